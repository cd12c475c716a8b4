"""The events of a hold, as the rooms name them. The kernel's table says which may follow which."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from x402guard.kernel.rows import Claim, Evidence, HoldState
from x402guard.kernel.table import STEPS


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

TABLE: Final[Mapping[tuple[HoldState, type[Event]], HoldState]] = MappingProxyType(
    {
        (state, event): target
        for event in (Note, Capture, Void, Expire, Lapse, Correct, Reopen)
        for (state, step), target in STEPS.items()
        if step == event.__name__.lower()
    }
)
"""(state, event) → next state. ``begin`` is the only step without an earlier state: authorize → HELD."""
