"""Defines the settings to read one network. The code that reads it loads when a guard has chains."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Union

from x402guard.errors import ConfigError

if TYPE_CHECKING:
    from web3 import Web3

Finality = Literal["finalized", "safe"] | int


@dataclass(frozen=True, slots=True)
class Chain:
    """The settings to read one network.

    Attributes:
        urls: its JSON-RPC endpoints, asked in turn; one or several, each a URL or a ``web3.Web3``.
        finality: the block that cannot be undone: the node's ``finalized`` or ``safe`` block, or a number of blocks
            behind the latest. Only this block's state frees budget.
        timeout_s: seconds for one call to one endpoint.

    Raises ``ConfigError`` that names the field. The repr omits the URLs, because most contain an access key.
    """

    urls: str | Web3 | Sequence[str | Web3]
    finality: Finality = "finalized"
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "urls", as_endpoints(self.urls))
        depth = type(self.finality) is int and self.finality >= 0
        if self.finality not in ("finalized", "safe") and not depth:
            raise ConfigError(f"finality: {self.finality!r} is not 'finalized', 'safe' or a number of blocks")
        if (
            isinstance(self.timeout_s, bool)
            or not isinstance(self.timeout_s, (int, float))
            or not 0 < self.timeout_s <= 60
        ):
            raise ConfigError(f"timeout_s: {self.timeout_s!r} is not a number of seconds above 0 and up to 60")

    def __repr__(self) -> str:
        return f"Chain({len(as_endpoints(self.urls))} endpoints, finality={self.finality!r})"


Endpoints = Union["str | Web3 | Sequence[str | Web3]", Chain]
"""What names a network's endpoints in ``chains``."""


def as_endpoints(given: str | Web3 | Sequence[str | Web3]) -> tuple[str | Web3, ...]:
    """Return the endpoints of one network. Raises ``ConfigError`` for what is neither a URL nor a ``web3.Web3``.

    The message omits what was given, because most URLs contain an access key.
    """
    found = (given,) if isinstance(given, str) or not isinstance(given, list | tuple) else tuple(given)
    for endpoint in found:
        asks = getattr(getattr(endpoint, "provider", None), "make_request", None)
        if inspect.iscoroutinefunction(asks):
            raise ConfigError("urls: an AsyncWeb3 is awaited, and chains are read in threads too; give a web3.Web3")
        if asks is None and not (isinstance(endpoint, str) and endpoint.startswith(("http://", "https://"))):
            raise ConfigError(
                "urls: not an http:// or https:// URL of a JSON-RPC endpoint, a web3.Web3, or a list of these"
            )
    if not found:
        raise ConfigError("urls: the list of endpoints is empty")
    return found
