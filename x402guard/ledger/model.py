"""What the ledger is made of: nodes of budget, holds, and immutable entries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

from x402guard.ledger.intent import Intent
from x402guard.money import Nanos

WALLET: Final = "wallet"
"""The id of the root: the wallet's own budget."""

NOTHING: Final = Nanos(0)

TERMINATIONS: Final = (
    "budget_exhausted", "disputed_usage", "kill_switch", "loop_detected", "overshoot", "session_timeout", "spend_spike",
)  # fmt: skip
"""Every word that ``terminated_by`` may be beside null."""


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
    """Where a hold stands; see the table in ``transitions``."""

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
    """Why an amount is believed, best first."""

    CHAIN = "chain"
    CHAIN_HEAD = "chain_head"
    PROVIDER_USAGE = "provider_usage"
    CLAIMED = "claimed"
    ESTIMATE = "estimate"
    ASSUMED = "assumed"

    @property
    def rank(self) -> int:
        """0 for the best evidence; larger is weaker."""
        return _RANK[self]


_RANK: Final = {evidence: rank for rank, evidence in enumerate(Evidence)}


Per = Literal["day", "week", "month"]
"""How long a window is."""


@dataclass(frozen=True, slots=True)
class Window:
    """When a budget begins anew: each day, week or month, by the calendar of a time zone."""

    per: Per
    tz: str


@dataclass(frozen=True, slots=True)
class Node:
    """A budget: a limit, what was taken from it, and a parent. All amounts in nano-dollars, all times in unix ms.

    A node of the kind ``tokens`` counts tokens, in the same fields, and has no parent.

    Attributes:
        limit: None for a wallet without a limit of its own.
        captured, held: of this node's own holds.
        granted_out: what children have drawn; granted_in: what this node has drawn from its parent.
        starved: the last authorization asked of it was refused for lack of budget.
        openers: who has its block open, one token each.
        seq, head: number and hash of its last journal entry.
        live: of this node's holds and of all below it, what is held now.
        window: when it begins anew; None for never.
        since_ms, past: when the window that it stands in began, and what had been captured before that.
        reserve: of the limit, what is kept for the session's last LLM calls; finalized: they have begun.
        trip_reason: why it is tripped, in words; None where it is not.
        soft: the parts of the limit, in millionths, at which people are told; warned: the highest that was reached.
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
    starved: bool = False
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

    @property
    def used(self) -> int:
        """Everything that was ever taken and not given back, in nano-dollars."""
        return self.captured + self.held + self.granted_out

    @property
    def counted(self) -> int:
        """Everything that counts against the limit, in nano-dollars: in its window, where it has one."""
        return self.used - self.past

    @property
    def spent(self) -> int:
        """What was captured here and below, in nano-dollars: in its window, where it has one."""
        return self.counted - self.live

    @property
    def room(self) -> int | None:
        """What the node's own limit leaves, in nano-dollars; negative once passed; None without a limit."""
        return None if self.limit is None else self.limit - self.counted

    @property
    def plain_room(self) -> int | None:
        """The same without what is kept for last LLM calls."""
        return None if self.limit is None else self.limit - self.counted - self.reserve


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a hold was taken for. No query strings: they carry keys and names.

    Attributes:
        method, url: the request line, the query left out.
        host: host name, and the port where it is not the default.
        fingerprint: SHA-256 over method, full URL and body hash, in hex: proves what a nonce was for.
        tool: the tool or model name for what is no HTTP payment.
        step: what makes identical calls the same, or "" where nobody can tell.
    """

    method: str = ""
    url: str = ""
    host: str = ""
    fingerprint: str = ""
    tool: str = ""
    step: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a server said of a settlement; believed by nobody until the chain agrees.

    Attributes:
        amount: nano-dollars it says it took.
        transaction: the hash it names, or "" where it names none.
    """

    amount: Nanos
    transaction: str


@dataclass(frozen=True, slots=True)
class Hold:
    """One authorization hold: the line in the chequebook, written before the cheque is signed.

    Attributes:
        amount: the ceiling, in nano-dollars; in tokens for a hold of the kind ``tokens``.
        captured: what was captured, in the same unit; 0 before.
        deadline_unix: unix seconds after which what was authorized is worthless.
        flying_since_ms: when its request was last sent off, in unix ms.
        chain_evidence: whether a chain can prove how it ended.
        owner: the process instance that answers for it.
        purchase_key: hash of what is being bought, so that a retry finds it; None where nothing can be retried.
        doubt: why nobody knows how it ended, or None.
        proof: ``network/transaction/log`` that proves it, once only in a ledger.
        ended_by: the event that ended it, as JSON.
        checked_ms: when the chain was last asked, in unix ms; 0 for never.
        presented: how often somebody took it over to present it again; whoever held it before may no longer void it.
        closed_ms: when it was captured first, in unix ms; 0 before.
    """

    id: str
    node_id: str
    kind: HoldKind
    amount: Nanos
    created_ms: int
    deadline_unix: int
    flying_since_ms: int
    owner: str
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

    def payment(self) -> Intent:
        """Return the intent of a payment hold. Raises ``ValueError`` for a hold of any other kind."""
        if self.intent is None:
            raise ValueError(f"hold {self.id} is no payment")
        return self.intent


@dataclass(frozen=True, slots=True)
class Entry:
    """One immutable line of a node's journal. The four amounts are changes, in nano-dollars; their sums are the balances.

    Attributes:
        data: what happened, as compact JSON.
        previous, hash: SHA-256 in hex; each entry hashes the one before it, from "" on.
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

    def sealed(self) -> Entry:
        """Return the entry with its hash."""
        body = json.dumps(
            [self.node_id, self.seq, self.at_ms, self.event, self.hold_id, self.captured, self.held, self.granted_in,
             self.granted_out, self.data, self.previous],
            separators=(",", ":"), ensure_ascii=False,
        )  # fmt: skip
        digest = hashlib.sha256(body.encode()).hexdigest()
        return Entry(
            self.node_id, self.seq, self.at_ms, self.event, self.hold_id, self.captured, self.held, self.granted_in,
            self.granted_out, self.data, self.previous, digest,
        )  # fmt: skip

    def facts(self) -> Mapping[str, Any]:
        """Return ``data`` decoded."""
        facts: Mapping[str, Any] = json.loads(self.data)
        return facts
