"""Decides whether a hold is in doubt, from rows alone and never from memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from x402guard.ledger.model import Hold, HoldState
from x402guard.ledger.view import LedgerView, MarkKey

DEFAULT_FLIGHT_S: Final = 150
"""Default of ``flight_s``: seconds after which a request without an answer is in doubt; longer than any is waited for."""


_SILENT_MS: Final = 600_000


def instance_mark(instance: str) -> MarkKey:
    """Return the key of a process instance's mark: its process, and whether it has ended."""
    return "instance", instance


def silent_instances(rows: Mapping[str, Mapping[str, Any]], now_ms: int) -> set[str]:
    """Return the instances that show every minute that they live, and have not done so for ten.

    Their sessions count as ended then, for openings and reports. That frees no hold and makes none doubtful: the process
    may only be cut off. The signs are dated by the ledger's server; *now_ms* is the time here, which may be behind it.
    """
    seen = {key: int(row["seen_ms"]) for key, row in rows.items() if "seen_ms" in row and not row["ended"]}
    newest_ms = max(seen.values(), default=now_ms)
    return {key for key, at_ms in seen.items() if at_ms < max(now_ms, newest_ms) - _SILENT_MS}


def in_doubt(view: LedgerView, hold: Hold, *, flight_ms: int) -> bool:
    """True if the outcome of a live hold is unknown.

    That is so if a note says it, if its request was sent more than *flight_ms* (milliseconds) ago, or if the process
    that sent it is known to have ended. A hold with a claim is not in doubt.
    """
    if hold.state is not HoldState.HELD:
        return False
    if hold.doubt is not None:
        return True
    if hold.claim is not None:
        return False  # its answer came; only the amount is open
    if view.now_ms - hold.flying_since_ms > flight_ms:
        return True
    row = view.mark(instance_mark(hold.instance))
    return row is not None and bool(row["ended"])
