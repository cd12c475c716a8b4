"""Puts the guard in the place of a client of the official SDK ``x402``: what it pays is judged, held and signed here.

The SDK's transports stay. They ask their client for a payment and show it each answer; this client signs nothing that is
not in the ledger, and ends each payment with its answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from x402guard.adapters.peers import checked_budget
from x402guard.errors import ConfigError
from x402guard.flow.shell import FindsBudget

if TYPE_CHECKING:
    from x402.http import x402HTTPClient, x402HTTPClientSync


class GuardedSigner:
    """Signs for the official SDK what a session allows, by EVM's ``exact`` (v1, v2) and ``upto``.

    ``x402HttpxClient(GuardedSigner(session).client())`` pays, and so do ``x402AsyncTransport``, and ``x402_requests`` with
    ``client_sync()``. A payment whose answer is lost stays held to its deadline; the same request presents it again.

    Args:
        session: the budget that pays, or a guard, for the session in context.

    Raises ``ConfigError`` for anything else.
    """

    def __init__(self, session: FindsBudget) -> None:
        checked_budget(session)
        self._session = session

    def client(self) -> x402HTTPClient:
        """Return the client for the SDK's awaited transports. Raises ``ConfigError`` without the package x402."""
        made: x402HTTPClient = _clients().GuardedClient(self._session)
        return made

    def client_sync(self) -> x402HTTPClientSync:
        """Return the client for the SDK's blocking transports, such as that of ``requests``. Raises ``ConfigError``."""
        made: x402HTTPClientSync = _clients().GuardedClientSync(self._session)
        return made

    def __repr__(self) -> str:
        return f"GuardedSigner({self._session!r})"


def _clients() -> Any:
    try:
        from x402guard.adapters import sdk_clients
    except ImportError:
        raise ConfigError("GuardedSigner: it needs the official SDK: pip install 'x402[evm,httpx]>=2.25'") from None
    return sdk_clients
