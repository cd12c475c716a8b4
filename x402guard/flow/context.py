"""What a flow works under: plain facts, the same for every request of a session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from x402guard.evm import Address
from x402guard.ledger.token_budget import TokenLimit
from x402guard.llm.meter import Meter
from x402guard.policy import Policy

MAX_CLOCK_JUMP_S: Final = 300
"""How far the clock may run ahead of time passing, in seconds, unless the owner says otherwise."""


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
        meter: what LLM calls are held and priced by; None meters nothing.
        tokens: where the tokens of LLM calls are counted; None counts none.
        finalizing: budgets whose reserve an LLM call may use now.
        asks: there is somebody to ask.
        kill_file: the file whose being there stops everything, or "".
        max_clock_jump_ms: how far the clock may run ahead of time passing, in milliseconds.
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
    meter: Meter | None = None
    tokens: TokenLimit | None = None
    finalizing: frozenset[str] = frozenset()
    asks: bool = False
    kill_file: str = ""
    max_clock_jump_ms: int = MAX_CLOCK_JUMP_S * 1000
