"""A change set is data: what a room proposes, what the kernel knew before, and what it was opened with.

All of it goes through bytes and back unchanged, so a kernel in a process of its own could take exactly this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct, field
from msgspec.json import Decoder, Encoder

from x402guard.kernel.money import NANOS_PER_DOLLAR
from x402guard.kernel.proofs import ByOwner, Proof
from x402guard.kernel.rows import WALLET, Entry, Hold, HoldState, Node

MarkKey = tuple[str, str]
"""(kind, key) of a small JSON row beside the journal: an origin, a proof, a refusal counter, an instance."""

Mark = Mapping[str, Any]


class Scope(Struct, frozen=True):
    """The rows that a change may read. The store locks and loads these, and no others.

    Attributes:
        nodes: node ids; all their ancestors are included.
        holds: hold ids; the node of each and its ancestors are included.
        purchase: a purchase key; the holds of that key are included that are live or captured, and whose answer was not
            handed over.
        named: True if the purchase has a name of the caller's: the last hold of that key is included whose answer was
            handed over.
        marks: keys of marks.
        out: (network, token): the sum of their payments is included that are live, and that no server has claimed.
        sweep: the maximum number of payment holds to include whose outcome a chain may prove, longest unchecked first:
            HELD ones that are noted or older than ``flight_ms`` (milliseconds), and ones captured on a claim or on a
            block that is not final yet.
        live_first: see ``sweep``; HELD ones first, because they take budget.
        flight_ms: see ``sweep``.
        durable: True if the change restrains (authorize, trip, a lower limit, an upward correction) and therefore must
            survive a power cut; False if it only frees or notes.
    """

    nodes: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    purchase: str | None = None
    named: bool = False
    marks: tuple[MarkKey, ...] = ()
    out: tuple[tuple[str, str], ...] = ()
    sweep: int = 0
    live_first: bool = False
    flight_ms: int = 0
    durable: bool = False


class Token(Struct, frozen=True):
    """A token that may be signed for: its decimals, and the value of one whole token in nano-dollars."""

    decimals: int
    peg_nanos: int = NANOS_PER_DOLLAR

    def worth(self, atomic: int) -> int:
        """Return the value of *atomic* units in nano-dollars, rounded up."""
        return -(-atomic * self.peg_nanos // int(10**self.decimals))


DAY_MS: Final = 86_400_000


class Opened(Struct, frozen=True):
    """What the kernel is opened with, once. No change set can alter it.

    Attributes:
        tokens: the tokens that may be signed for, by ``NETWORK/CONTRACT``.
        root: the id of the wallet's node.
        most_exposed: nano-dollars that may be given back, in sum, before the blocks that show it are final.
        unsafe_trust_receipts: True if a server's claim about an ``upto`` gives back, where no chain can prove it.
        memory_ms: for how long a purchase without an answer, and a named one, is not paid again, in milliseconds.
        keeps_idle: True if sessions may keep idle budget, as in a store for many machines.
        test_networks: networks whose clock their owner may move.
    """

    tokens: Mapping[str, Token] = field(default_factory=dict)
    root: str = WALLET
    most_exposed: int = 0
    unsafe_trust_receipts: bool = False
    memory_ms: int = DAY_MS
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
    """The kernel's own facts at the time of a commit.

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
        purchase: the key whose holds were loaded, or None; *holds* has all of them that count and were not handed over,
            and, if *named*, the last one that was.
    """

    nodes: dict[str, Node | None]
    holds: dict[str, Hold | None]
    marks: dict[MarkKey, Mark | None]
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


class Submission(Struct, frozen=True):
    """All that ``kernel.commit.check`` takes."""

    opened: Opened
    before: Before
    change_set: ChangeSet
    now: Now

    def to_bytes(self) -> bytes:
        """Return it as JSON."""
        before = self.before
        rows = _Rows(
            before.nodes,
            before.holds,
            tuple((key, None if row is None else dict(row)) for key, row in before.marks.items()),
            before.purchase,
            before.named,
        )
        return _ENCODED(_Sent(self.opened, rows, self.change_set, self.now))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Submission:
        """Return what ``to_bytes`` has written. Raises ``msgspec.ValidationError`` for anything else."""
        sent = _DECODED(raw)
        rows = sent.before
        before = Before(rows.nodes, rows.holds, dict(rows.marks), rows.purchase, rows.named)
        return cls(sent.opened, before, sent.change_set, sent.now)


class _Rows(Struct, frozen=True):
    """``Before``, with keys that JSON has."""

    nodes: dict[str, Node | None]
    holds: dict[str, Hold | None]
    marks: tuple[tuple[MarkKey, dict[str, Any] | None], ...]
    purchase: str | None
    named: bool


class _Sent(Struct, frozen=True):
    opened: Opened
    before: _Rows
    change_set: ChangeSet
    now: Now


_ENCODED: Final = Encoder().encode
_DECODED: Final[Callable[[bytes], _Sent]] = Decoder(_Sent).decode
