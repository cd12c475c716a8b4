"""The settings that a flow works under."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal

from msgspec import Struct, field

from x402guard.assets import AssetRegistry
from x402guard.flow.effects import Flow
from x402guard.kernel.evm import Address
from x402guard.kernel.rows import Hold, Nanos
from x402guard.ledger.purchases import Presentation
from x402guard.ledger.token_budget import TokenLimit
from x402guard.policy import Policy
from x402guard.policy.reach import Reach

MAX_CLOCK_JUMP_S: Final = 300  # default of max_clock_jump_s
DEFAULT_BODY_BYTES: Final = 10_485_760  # default of max_body_bytes

Mode = Literal["enforce", "shadow"]


class Looked(Struct, frozen=True):
    """What a look at the chain before a refusal has shown: whether more may fit now, and what waits, as a sentence."""

    may_fit: bool
    waits: str = ""


MayFitNow = Callable[["Context", Nanos], Flow[Looked]]


class Context(Struct, frozen=True, eq=False):
    """The settings that a flow works under: plain facts, the same for every request of a session.

    Attributes:
        session_id: the session whose report lists a refusal.
        node_id: the budget that pays: the session, or a scope inside it.
        instance: this process instance.
        machine: where it runs: another container is another machine.
        policy: the owner's rules.
        payer: the signer's account; None without a signer: nothing is signed.
        chains: networks whose chain can be read.
        flight_ms: how long a request may be in flight before its hold is in doubt, in milliseconds.
        memory_ms: how long a taken payment without an answer keeps its purchase open, in milliseconds.
        unsafe_no_chain: pay on real networks whose chain cannot be read.
        may_lose_holds: a failover of the ledger's server can lose the newest holds, and the owner has not accepted it.
        unsafe_trust_receipts: capture the claim of an ``upto`` receipt if no chain can prove it.
        tokens: where the tokens of LLM calls are counted, or None.
        finalizing: budgets whose reserve an LLM call may use now.
        undoing: budgets whose reserve every call may use now, because an action is undone.
        asks: the guard has an approver.
        shadow: the owner's rules refuse nothing; what they would refuse is recorded.
        max_clock_jump_ms: how far the clock may run ahead of time passing, in milliseconds.
        registry: the tokens that may be paid with.
        max_body_bytes: the most bytes of a streaming request body that are kept to repeat it in a paid request.
        may_fit_now: asks the chain about claims before a refusal for lack of budget, given the amount that fitted
            (nano-dollars). None without a chain.
        session_budget: nano-dollars of a session that names no budget; None if it has to name one.
        quotes: (pattern of routes, nano-dollars): the prices that the session expects.
        reach: what the session and those around it narrow the policy to.
        named_by: places that a 3xx answer of the run named, with the origin that did.
        in_flight: the presentations of this instance whose request or answer is under way now, each with the key of its
            purchase; shared by its sessions.
        cut_off: those whose answer did not reach its caller, until the ledger has it; shared by its sessions.
        clocks: real networks whose newest block was found to agree with the clock; shared by its sessions.
        between_hops: of those under way: the ones whose answer redirects, until the next hop; each says whether its task is over.
        gone: process instances that are known to have ended.
        outstanding: returns the live holds of the ledger; None: no call waits for a budget.
        lines: the calls of this instance that wait, by budget, in order of arrival; shared by its sessions.
    """

    session_id: str
    node_id: str
    instance: str
    policy: Policy
    payer: Address | None
    chains: frozenset[str]
    machine: str = ""
    flight_ms: int = 270_000
    memory_ms: int = 86_400_000
    unsafe_no_chain: bool = False
    may_lose_holds: bool = False
    unsafe_trust_receipts: bool = False
    tokens: TokenLimit | None = None
    finalizing: frozenset[str] = frozenset()
    undoing: frozenset[str] = frozenset()
    asks: bool = False
    shadow: bool = False
    max_clock_jump_ms: int = MAX_CLOCK_JUMP_S * 1000
    registry: AssetRegistry = field(default_factory=AssetRegistry)
    max_body_bytes: int = DEFAULT_BODY_BYTES
    may_fit_now: MayFitNow | None = None
    session_budget: Nanos | None = None
    quotes: tuple[tuple[str, Nanos], ...] = ()
    reach: tuple[Reach, ...] = ()
    named_by: dict[str, str] = field(default_factory=dict)
    in_flight: dict[Presentation, str | None] = field(default_factory=dict)
    cut_off: set[Presentation] = field(default_factory=set)
    clocks: set[str] = field(default_factory=set)
    between_hops: dict[Presentation, Callable[[], bool]] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()
    outstanding: Callable[[], Sequence[Hold]] | None = None
    lines: dict[str, deque[object]] = field(default_factory=dict)
