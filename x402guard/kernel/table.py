"""The states of a hold and every step between them. A step that is not in ``TABLE`` cannot happen.

This file knows nothing of HTTP, of chains or of the caller, so it has no exceptions for any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from x402guard.kernel.rows import Claim, Evidence, HoldState


class Note(Struct, frozen=True):
    """A fact about a live hold: why its outcome is unknown, or a server's claim. It changes no balance.

    *words* are the server's own words about it, for the journal alone.
    """

    doubt: str | None = None
    claim: Claim | None = None
    words: str | None = None


class Capture(Struct, frozen=True):
    """The amount taken, in nano-dollars, its evidence, and the proof if a chain gave one.

    ``usage`` is the usage that an LLM provider reports, by unit; ``note`` is a remark for the journal.
    """

    amount: int
    evidence: Evidence
    proof: str | None = None
    usage: Mapping[str, int] | None = None
    note: str | None = None


class Void(Struct, frozen=True):
    """Nothing can be taken: no signature exists or was sent, the nonce was cancelled, or a provider did not bill.

    *reason* is a remark. It frees nothing: a proof does (``kernel.proofs``).
    """

    reason: str


class Expire(Struct, frozen=True):
    """A final block of ``block_time`` (unix seconds) past the deadline shows that the nonce is unused."""

    block_time: int


class Lapse(Struct, frozen=True):
    """The hold's own deadline is past and no chain can prove its outcome: the ceiling is captured as ``assumed``."""


class Correct(Struct, frozen=True):
    """Better evidence for the amount taken, in nano-dollars. It adds an entry; the earlier entry stays."""

    amount: int
    evidence: Evidence
    proof: str | None = None


class Reopen(Struct, frozen=True):
    """The block that settled the payment was undone, so the payment can be taken again.

    A final block of ``block_time`` (unix seconds) shows that the nonce is unused and still valid. ``block_time`` is 0
    if another block, not final yet, has already taken the payment again. *same* is True if it took all of it, as the first
    one did: then the payment counts in the window in which it did, else in the present one.
    """

    block_time: int
    same: bool = False


Event = Note | Capture | Void | Expire | Lapse | Correct | Reopen

_HELD, _CAPTURED, _VOIDED, _EXPIRED = HoldState.HELD, HoldState.CAPTURED, HoldState.VOIDED, HoldState.EXPIRED

TABLE: Final[Mapping[tuple[HoldState, type[Event]], HoldState]] = MappingProxyType(
    {
        (_HELD, Note): _HELD,
        (_HELD, Capture): _CAPTURED,
        (_HELD, Void): _VOIDED,
        (_HELD, Expire): _EXPIRED,
        (_HELD, Lapse): _CAPTURED,
        (_CAPTURED, Correct): _CAPTURED,
        (_CAPTURED, Reopen): _HELD,
        (_EXPIRED, Correct): _CAPTURED,
        (_VOIDED, Correct): _CAPTURED,
        (_VOIDED, Reopen): _HELD,
    }
)
"""(state, event) → next state. AUTHORIZE is the only step without an earlier state."""

AUTHORIZE: Final = "authorize"
"""The name of the step that writes a new hold: – → HELD."""

STEPS: Final[Mapping[tuple[HoldState, str], HoldState]] = MappingProxyType(
    {(state, event.__name__.lower()): target for (state, event), target in TABLE.items()}
)
"""(state, name of the event) → next state: the table as a change set names it."""
