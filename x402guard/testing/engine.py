"""Defines the chain that the test network needs, so that another engine can replace the built-in one."""

from typing import Any, Protocol, TypeAlias

JSON: TypeAlias = Any
"""A value as returned by `json.loads`."""


class RpcError(Exception):
    """A JSON-RPC error answer: `code` as in EIP-1474 (3 for a reverted call), `message`, and `data` if there is any."""

    def __init__(self, code: int, message: str, data: JSON = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class Engine(Protocol):
    """A running chain. All methods may be called from any thread."""

    @property
    def chain_id(self) -> int:
        """The chain's EIP-155 id, as contracts and JSON-RPC clients see it."""
        ...

    def rpc(self, method: str, params: list[JSON]) -> JSON:
        """Answer one Ethereum JSON-RPC call; raise RpcError if a node would answer with an error."""
        ...

    def advance(self, seconds: int) -> None:
        """Move the chain's clock forward by whole `seconds` and mine a block, so that the new time is visible."""
        ...

    def close(self) -> None:
        """Stop the chain and its background threads and processes. Idempotent."""
        ...
