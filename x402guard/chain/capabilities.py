"""What a node can tell, asked once each: ``x402guard doctor`` names what is missing, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from x402guard.chain.logs import TRANSFER, Block, head_of, padded
from x402guard.chain.rpc import JsonRpc, NodeRefuses, selector
from x402guard.chain.settings import Finality
from x402guard.kernel.typed_data import PERMIT2

_NONCES: Final = {"to": PERMIT2, "data": f"0x{selector('nonceBitmap', ['address', 'uint256']).hex()}{'00' * 64}"}
"""A call that any chain answers, with Permit2 or without it."""

FINAL_BLOCK: Final = "the final block"
STATE_BY_HASH: Final = "state at a block's hash (EIP-1898)"
OLD_STATE: Final = "the state of the final block"
LOGS: Final = "eth_getLogs"

COSTS: Final = {
    FINAL_BLOCK: "no payment is ever final; set a number of blocks: finality = 20 in [chains.NETWORK]",
    STATE_BY_HASH: "a nonce is asked for at a block's number, which takes more calls",
    OLD_STATE: "a payment is proven by its receipt and the block of that, and not by the state",
    LOGS: "a payment whose seller names no transaction counts at its ceiling, and `reconcile` cannot compare the wallet",
}
"""Capability → what is lost without it."""


def missing(rpc: JsonRpc, finality: Finality) -> Iterator[str]:
    """Yield the capabilities that a network's endpoints lack, as keys of ``COSTS``. Raises ``ChainUnreadable``."""
    head = head_of(rpc)
    final = _asked(lambda: _final(rpc, finality))
    if final is None:
        yield FINAL_BLOCK
    if _asked(lambda: rpc.call("eth_call", _NONCES, _at(head))) is None:
        yield STATE_BY_HASH
    elif final is not None and _asked(lambda: rpc.call("eth_call", _NONCES, _at(final))) is None:
        yield OLD_STATE
    number = hex(head.number)
    query = {"address": PERMIT2, "topics": [TRANSFER, padded(PERMIT2)], "fromBlock": number, "toBlock": number}
    if _asked(lambda: rpc.call("eth_getLogs", query)) is None:
        yield LOGS


def _final(rpc: JsonRpc, finality: Finality) -> Block:
    tag = finality if isinstance(finality, str) else hex(max(0, head_of(rpc).number - finality))
    return Block.of(rpc.call("eth_getBlockByNumber", tag, False))  # noqa: FBT003 - the RPC's own signature


def _at(block: Block) -> dict[str, Any]:
    return {"blockHash": block.hash, "requireCanonical": True}


def _asked(question: Callable[[], Any]) -> Any:
    """Return the answer, or None if the node refuses it."""
    try:
        return question()
    except NodeRefuses:
        return None
