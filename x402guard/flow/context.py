"""What a flow works under: plain facts, the same for every request of a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from x402guard.assets import AssetRegistry
from x402guard.evm import Address
from x402guard.flow.effects import Flow
from x402guard.ledger.token_budget import TokenLimit
from x402guard.money import Nanos
from x402guard.policy import Policy

MAX_CLOCK_JUMP_S: Final = 300
"""How far the clock may run ahead of time passing, in seconds, unless the owner says otherwise."""


DEFAULT_BODY_BYTES: Final = 10_485_760
"""How much of a streaming request body is kept, in bytes, unless the owner says otherwise."""

Sweep = Callable[["Context", Nanos], Flow[bool]]


@dataclass(frozen=True, slots=True)
class Context:
    """What a flow works under; plain facts, the same for every request of a session.

    Attributes:
        session_id: whose report a refusal stands in.
        node_id: the budget that pays: the session, or a scope inside it.
        instance: this process instance.
        policy: the owner's rules.
        payer: the signer's account, or None where there is no signer and so nothing is ever signed.
        chains: networks whose chain can be read.
        flight_ms: how long a request may be out before its hold is in doubt, in milliseconds.
        unsafe_no_chain: pay on real networks whose chain cannot be read.
        unsafe_trust_receipts: capture what an ``upto`` receipt claims where no chain can tell.
        tokens: where the tokens of LLM calls are counted; None counts none.
        finalizing: budgets whose reserve an LLM call may use now.
        asks: there is somebody to ask.
        max_clock_jump_ms: how far the clock may run ahead of time passing, in milliseconds.
        registry: the tokens that may be paid with.
        max_body_bytes: how much of a streaming request body is kept, so that a paid request can repeat it.
        sweep: asks the chain about claims before a refusal that lacks budget, given how much fitted (nano-dollars); True where
            more may fit now. None without a chain.
        session_budget: nano-dollars of a session that names no budget; None where it has to name one.
        gone: process instances that are known to have ended.
    """

    session_id: str
    node_id: str
    instance: str
    policy: Policy
    payer: Address | None
    chains: frozenset[str]
    flight_ms: int = 30_000
    unsafe_no_chain: bool = False
    unsafe_trust_receipts: bool = False
    tokens: TokenLimit | None = None
    finalizing: frozenset[str] = frozenset()
    asks: bool = False
    max_clock_jump_ms: int = MAX_CLOCK_JUMP_S * 1000
    registry: AssetRegistry = field(default_factory=AssetRegistry)
    max_body_bytes: int = DEFAULT_BODY_BYTES
    sweep: Sweep | None = None
    session_budget: Nanos | None = None
    gone: frozenset[str] = frozenset()
