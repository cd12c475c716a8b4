"""Provides an x402 test network on one machine: a chain, a facilitator, a merchant, LLM providers, and hostile ones.

Its names load on first use, because their dependencies (an EVM, web3, an HTTP server) take most of a second to import
and are not installed with x402guard alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from x402guard.testing.anvil_engine import AnvilEngine, AnvilError, find_anvil
    from x402guard.testing.engine import Engine, RpcError
    from x402guard.testing.eth_tester_engine import EthTesterEngine
    from x402guard.testing.facilitator import Facilitator
    from x402guard.testing.hostile_behaviours import BEHAVIOURS, Behaviour
    from x402guard.testing.hostile_chain import CHAIN_LIES, HostileChain
    from x402guard.testing.hostile_clock import HostileClock
    from x402guard.testing.hostile_facilitator import FACILITATOR_LIES, HostileFacilitator
    from x402guard.testing.hostile_records import Cheque, Received
    from x402guard.testing.hostile_server import HostileServer
    from x402guard.testing.llm import LlmServer
    from x402guard.testing.llm_calls import Completion, Failure, LlmCall, ToolCall
    from x402guard.testing.merchant import Merchant
    from x402guard.testing.routes import Offer, Route, default_routes
    from x402guard.testing.rpc import rpc_app
    from x402guard.testing.server import Server
    from x402guard.testing.settlers import FacilitatorClient, Payment, Settler, SignatureSettler
    from x402guard.testing.testnet import Testnet, Transfer

__all__ = [
    "BEHAVIOURS",
    "CHAIN_LIES",
    "FACILITATOR_LIES",
    "AnvilEngine",
    "AnvilError",
    "Behaviour",
    "Cheque",
    "Completion",
    "Engine",
    "EthTesterEngine",
    "Facilitator",
    "FacilitatorClient",
    "Failure",
    "HostileChain",
    "HostileClock",
    "HostileFacilitator",
    "HostileServer",
    "LlmCall",
    "LlmServer",
    "Merchant",
    "Offer",
    "Payment",
    "Received",
    "Route",
    "RpcError",
    "Server",
    "Settler",
    "SignatureSettler",
    "Testnet",
    "ToolCall",
    "Transfer",
    "default_routes",
    "find_anvil",
    "rpc_app",
]

_HOME = {
    "AnvilEngine": "anvil_engine",
    "AnvilError": "anvil_engine",
    "BEHAVIOURS": "hostile_behaviours",
    "CHAIN_LIES": "hostile_chain",
    "FACILITATOR_LIES": "hostile_facilitator",
    "Behaviour": "hostile_behaviours",
    "Cheque": "hostile_records",
    "Completion": "llm_calls",
    "Engine": "engine",
    "EthTesterEngine": "eth_tester_engine",
    "Facilitator": "facilitator",
    "FacilitatorClient": "settlers",
    "Failure": "llm_calls",
    "HostileChain": "hostile_chain",
    "HostileClock": "hostile_clock",
    "HostileFacilitator": "hostile_facilitator",
    "HostileServer": "hostile_server",
    "LlmCall": "llm_calls",
    "LlmServer": "llm",
    "Merchant": "merchant",
    "Offer": "routes",
    "Payment": "settlers",
    "Received": "hostile_records",
    "Route": "routes",
    "RpcError": "engine",
    "Server": "server",
    "Settler": "settlers",
    "SignatureSettler": "settlers",
    "Testnet": "testnet",
    "ToolCall": "llm_calls",
    "Transfer": "testnet",
    "default_routes": "routes",
    "find_anvil": "anvil_engine",
    "rpc_app": "rpc",
}
_EXTRA = {"eth", "eth_tester", "starlette", "uvicorn"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_HOME[name]}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise ImportError(
            f'the test network needs {error.name}, which is not installed: pip install "x402guard[testnet]"'
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
