"""Defines the ledger's rows: nodes (budgets), holds, and immutable journal entries."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Literal, NewType

from msgspec import Struct
from msgspec.json import Decoder, Encoder

from x402guard.kernel.intent import Intent

Nanos = NewType("Nanos", int)
"""Nano-dollars: an integer number of 1e-9 US dollars."""

NANOS_PER_DOLLAR: Final = 1_000_000_000
MAX_NANOS: Final = Nanos(10**18)
"""One billion dollars: the largest amount or limit in the ledger. Sums of several fit a signed 64-bit column."""

WALLET: Final = "wallet"
"""The id of the root node: the wallet's own budget."""

NOTHING: Final = Nanos(0)


class NodeKind(StrEnum):
    """What a budget belongs to."""

    WALLET = "wallet"
    SESSION = "session"
    SCOPE = "scope"
    BUDGET = "budget"
    TOKENS = "tokens"


class NodeState(StrEnum):
    """Whether anything may be authorized in a node."""

    OPEN = "open"
    TRIPPED = "tripped"
    CLOSED = "closed"


class HoldState(StrEnum):
    """The state of a hold. ``kernel.table.STEPS`` lists every allowed step between states."""

    HELD = "held"
    CAPTURED = "captured"
    VOIDED = "voided"
    EXPIRED = "expired"


class HoldKind(StrEnum):
    """What a hold pays for."""

    PAYMENT = "payment"
    LLM = "llm"
    TOOL = "tool"
    TOKENS = "tokens"


class Evidence(StrEnum):
    """Why an amount is believed. The best evidence comes first."""

    CHAIN = "chain"
    CHAIN_HEAD = "chain_head"
    PROVIDER_USAGE = "provider_usage"
    CLAIMED = "claimed"
    ESTIMATE = "estimate"
    ASSUMED = "assumed"


Per = Literal["day", "week", "month"]
"""The length of a window."""


class Window(Struct, frozen=True, gc=False):
    """The window of a budget: its spending restarts each day, week or month, by the calendar of time zone ``tz``."""

    per: Per
    tz: str


class Node(Struct, frozen=True, gc=False):
    """A budget: a limit, the amounts taken from it, and a parent. Amounts are in nano-dollars, times in unix ms.

    A node of kind ``tokens`` counts tokens in the same fields and has no parent.

    Attributes:
        limit: None for a wallet without a limit of its own.
        captured, held: sums over this node's own holds.
        granted_out: the amount drawn by children; granted_in: the amount that this node has drawn from its parent.
        starved: the kinds (bits, see ``ledger.budgets.STARVED``) whose last authorization in it was refused for lack of budget, and tasks.
        openers: one token for each open ``with`` block of this node.
        seq, head: number and hash of its last journal entry.
        live: the amount held now by this node and all nodes below it; in a node whose children keep idle budget, by
            this node alone (see ``lends``).
        window: when its spending restarts; None for never.
        since_ms, past: when the current window began, and the amount captured before that.
        reserve: the part of the limit kept for the session's last LLM calls; finalized: True once these have begun.
        trip_reason: why it is tripped, as a sentence; None if it is not tripped.
        soft: the soft limits, in millionths of the limit; warned: the highest one notified in its window; above a million, a trip.
        until_ms: when nothing more may be authorized in it, in unix milliseconds; None for never; ``ledger.budgets.OVER`` by any clock.
    """

    id: str
    parent_id: str | None
    kind: NodeKind
    name: str
    limit: Nanos | None
    created_ms: int
    last_ms: int
    captured: int = 0
    held: int = 0
    granted_out: int = 0
    granted_in: int = 0
    state: NodeState = NodeState.OPEN
    terminated_by: str | None = None
    starved: int = 0
    openers: tuple[str, ...] = ()
    closed_ms: int | None = None
    seq: int = 0
    head: str = ""
    live: int = 0
    window: Window | None = None
    since_ms: int = 0
    past: int = 0
    reserve: int = 0
    finalized: bool = False
    soft: tuple[int, ...] = ()
    warned: int = 0
    trip_reason: str | None = None
    until_ms: int | None = None

    @property
    def used(self) -> int:
        """The amount taken and not given back, over all time, in nano-dollars."""
        return self.captured + self.held + self.granted_out

    @property
    def idle(self) -> int:
        """The amount drawn from the parent and not used, in nano-dollars. 0 in most stores; see ``ledger.budgets``."""
        return 0 if self.parent_id is None else max(0, self.granted_in - self.used)

    @property
    def counted(self) -> int:
        """The amount that counts against the limit, in nano-dollars; only the current window if the node has one."""
        return self.captured + self.held + self.granted_out - self.past

    @property
    def spent(self) -> int:
        """The amount captured here and below, in nano-dollars; only the current window if the node has one."""
        return self.counted - self.live

    @property
    def room(self) -> int | None:
        """The amount left under the node's own limit, in nano-dollars: negative past it, None without a limit."""
        return None if self.limit is None else self.limit - self.counted


class Purpose(Struct, frozen=True, gc=False):
    """What a hold pays for. Query strings are left out, because they can carry keys and names.

    Attributes:
        method, url: the request line, without the query.
        host: host name, with the port if it is not the default one.
        fingerprint: SHA-256 over method, full URL and body hash, in hex. It proves what a nonce was for.
        tool: the tool or model name, for a hold that is not an HTTP payment.
        step: deduplication key: identical calls have the same one; "" if it is unknown.
    """

    method: str = ""
    url: str = ""
    host: str = ""
    fingerprint: str = ""
    tool: str = ""
    step: str = ""


class Claim(Struct, frozen=True, gc=False):
    """A server's statement about a settlement. It is not proven until the chain confirms it.

    Attributes:
        amount: nano-dollars that the server says it took.
        transaction: the transaction hash that it names, or "" if it names none.
    """

    amount: Nanos
    transaction: str


class Delivery(StrEnum):
    """Whether the answer that a payment bought was handed over to the caller.

    ``open``: the request is in flight, or its answer is being read. ``lost``: no answer came, or one without success, or
    its body broke. ``done``: the whole answer was handed over; also for a hold that is no payment. ``forgiven``: the owner,
    or the caller with ``pay_again``, has closed the purchase, and the same request may sign a new payment.
    """

    OPEN = "open"
    LOST = "lost"
    DONE = "done"
    FORGIVEN = "forgiven"


class Hold(Struct, frozen=True, gc=False):
    """A reservation of budget, written before anything is signed or sent.

    Attributes:
        amount: the ceiling, in nano-dollars; in tokens for a hold of kind ``tokens``.
        captured: the captured amount, in the same unit; 0 before the capture.
        deadline_unix: unix seconds after which the authorization is worthless.
        flying_since_ms: when its request was last sent or, if its answer is lost, when it was lost; in unix ms.
        chain_evidence: True if a chain can prove how it ended.
        instance: the id of the process instance responsible for it.
        purchase_key: hash of the purchase, so that a retry finds this hold; None if the call cannot be retried.
        doubt: why its outcome is unknown, or None.
        proof: ``network/transaction/log`` that proves it; one proof belongs to one hold of a ledger.
        ended_by: the event that ended it, as JSON.
        checked_ms: when the chain was last asked, in unix ms; 0 for never.
        presented: how often an instance took it over to present it again; an earlier instance may no longer void it.
        closed_ms: which window counts it: the one that this falls into, in unix ms; 0 before the capture.
        delivery: whether the answer that it bought was handed over.
    """

    id: str
    node_id: str
    kind: HoldKind
    amount: Nanos
    created_ms: int
    deadline_unix: int
    flying_since_ms: int
    instance: str
    purpose: Purpose
    chain_evidence: bool = False
    purchase_key: str | None = None
    intent: Intent | None = None
    state: HoldState = HoldState.HELD
    captured: Nanos = NOTHING
    evidence: Evidence | None = None
    doubt: str | None = None
    claim: Claim | None = None
    proof: str | None = None
    ended_by: str | None = None
    checked_ms: int = 0
    presented: int = 0
    closed_ms: int = 0
    delivery: Delivery = Delivery.DONE

    @property
    def counts(self) -> int:
        """The amount that the hold takes from its budgets now, in nano-dollars (tokens for a hold of kind ``tokens``)."""
        return self.amount if self.state is HoldState.HELD else self.captured

    @property
    def first_captured(self) -> int:
        """The amount that a captured hold counted at first, before any correction."""
        end = _DECODED(self.ended_by) if self.ended_by else {}
        return int(self.amount if end.get("event") == "lapse" else end.get("amount", self.captured))

    def payment(self) -> Intent:
        """Return the intent of a payment hold. Raises ``ValueError`` for a hold of another kind."""
        if self.intent is None:
            raise ValueError(f"hold {self.id} is not a payment")
        return self.intent


HOLD_FIXED: Final = ("node_id", "kind", "amount", "created_ms", "deadline_unix", "purpose", "purchase_key", "intent")
"""What never changes of a hold."""

_ENCODED: Final = Encoder().encode
_DECODED: Final = Decoder(dict[str, Any]).decode


def entry_hash(covered: tuple[str | int | None, ...]) -> str:
    """Return the hash of an entry, SHA-256 in hex, over all of its other fields in their order as a JSON array."""
    return hashlib.sha256(_ENCODED(covered)).hexdigest()


class Entry(Struct, frozen=True, gc=False):
    """One immutable entry of a node's journal. Its four amounts are changes in nano-dollars; the sums are the balances.

    Attributes:
        data: the facts of the event, as compact JSON.
        previous, hash: SHA-256 in hex; each hash covers the previous one. ``previous`` of the first entry is "".
    """

    node_id: str
    seq: int
    at_ms: int
    event: str
    hold_id: str | None
    captured: int
    held: int
    granted_in: int
    granted_out: int
    data: str
    previous: str
    hash: str = ""

    def facts(self) -> Mapping[str, Any]:
        """Return ``data`` decoded. Raises ``ValueError`` if it is no JSON object."""
        return _DECODED(self.data)


_LENDERS: Final = (NodeKind.WALLET, NodeKind.BUDGET)


def lends(path: Sequence[Node]) -> bool:
    """True if what the children of a node have drawn may stay idle with them, in a store that keeps idle budget.

    *path* is the node and its ancestors. A wallet and a named budget lend. Nothing lends in a window: where a new window
    begins, all that was drawn counts as captured before it.
    """
    return path[0].kind in _LENDERS and all(node.window is None for node in path)
