"""A change set is data: what a room proposes, what the kernel knew before, and what it was opened with.

All of it goes through bytes (JSON: msgspec writes 256-bit numbers whole) and back unchanged, so a kernel in a process of its
own could take exactly this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct, field

from x402guard.kernel.proofs import ByOwner, Proof
from x402guard.kernel.rows import NANOS_PER_DOLLAR, WALLET, Entry, Hold, HoldState, Node

MarkKey = tuple[str, str]
"""(kind, key) of a small JSON row beside the journal: an origin, a proof, a refusal counter, an instance."""

Mark = Mapping[str, Any]

MONEY_MARKS: Final = frozenset({"proof", "exposed", "wallet"})
"""The kinds of marks that decide about money: which Transfer proves which hold, what is exposed, and the wallet's address."""


def mark_name(key: MarkKey) -> str:
    """Return the key of a mark as one text. No kind contains a space."""
    return f"{key[0]} {key[1]}"


class Token(Struct, frozen=True):
    """A token that may be signed for: its decimals, and the value of one whole token in nano-dollars."""

    decimals: int
    peg_nanos: int = NANOS_PER_DOLLAR

    def worth(self, atomic: int) -> int:
        """Return the value of *atomic* units in nano-dollars, rounded up."""
        return -(-atomic * self.peg_nanos // int(10**self.decimals))


class Opened(Struct, frozen=True):
    """What the kernel is opened with, once. No change set can alter it.

    Attributes:
        tokens: the tokens that may be signed for, by ``NETWORK/CONTRACT``.
        root: the id of the wallet's node.
        most_exposed: nano-dollars that may be given back, in sum, before the blocks that show it are final.
        unsafe_trust_receipts: True if a server's claim about an ``upto`` gives back, where no chain can prove it.
        memory_ms: for how long a purchase without an answer, and a named one, is not paid again, in milliseconds.
        keeps_idle: True if sessions may keep idle budget, as in a store for many machines. The store says so at each load.
        test_networks: networks whose clock their owner may move.
    """

    tokens: Mapping[str, Token] = field(default_factory=dict)
    root: str = WALLET
    most_exposed: int = 0
    unsafe_trust_receipts: bool = False
    memory_ms: int = 86_400_000
    keeps_idle: bool = False
    test_networks: frozenset[str] = frozenset()

    def token(self, network: str, contract: str) -> Token | None:
        """Return the token at *contract* on *network*, or None for one that the kernel does not know."""
        return self.tokens.get(f"{network}/{contract}")


class Step(Struct, frozen=True):
    """One step of a hold: the name of the event, the state after it, and the proof that it needs, if any.

    Attributes:
        captured: nano-dollars captured after the step. *closed_ms*: as in ``Hold``, after the step.
    """

    hold_id: str
    name: str
    after: HoldState
    captured: int
    closed_ms: int
    proof: Proof | None = None


class Now(Struct, frozen=True):
    """The facts at the time of a commit that no room states.

    Attributes:
        clock_ms: its clock, in unix milliseconds. Windows follow it.
        now_ms: the same, and never below the last time of a row that was loaded. Entries are dated by it.
        unsigned: the holds that the signer was asked to forget, and that it had not been given.
        given: hold → how often its payment was given to the signer.
        lost: the holds that this process has noted as committed, and that the ledger's server does not have.
    """

    clock_ms: int
    now_ms: int
    unsigned: frozenset[str] = frozenset()
    given: Mapping[str, int] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()


class Before(Struct):
    """The rows that the kernel has loaded, as they are stored. None for a row that it has looked for and not found.

    Attributes:
        marks: those of ``MONEY_MARKS``, by ``mark_name``.
        purchase: the key whose holds were loaded, or None; *holds* has all of them that count and were not handed over,
            and, if *named*, the last one that was.
    """

    nodes: dict[str, Node | None]
    holds: dict[str, Hold | None]
    marks: dict[str, dict[str, Any] | None]
    purchase: str | None = None
    named: bool = False


class ChangeSet(Struct, frozen=True):
    """What a room proposes: rows after, entries, marks, the steps of holds in their order, and the owner's commands.

    Attributes:
        nodes: rows after, parents before children.
        durable: the room's word that the change has to survive a power cut. The kernel works that out from the rows.
    """

    nodes: tuple[Node, ...] = ()
    holds: tuple[Hold, ...] = ()
    marks: tuple[tuple[MarkKey, Mark], ...] = ()
    entries: tuple[Entry, ...] = ()
    steps: tuple[Step, ...] = ()
    owner: tuple[ByOwner, ...] = ()
    durable: bool = False
