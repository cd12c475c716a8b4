"""Puts the guard behind a client of the official SDK ``x402``: what it pays is judged, held and signed here.

The SDK keeps its clients, transports and hooks; of its schemes it asks for a signed payload, and gets one whose hold is in
the ledger.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, Final, Protocol, Self, TypeVar

from x402guard.adapters.direct import Payment, apay, offered, pay
from x402guard.errors import ConfigError
from x402guard.flow.shell import Payer

ALL_NETWORKS: Final = "eip155:*"
_SCHEMES: Final = ("exact", "upto")
_MOST_KNOWN: Final = 1_000

_SIGNED: ContextVar[tuple[Any, Payment] | None] = ContextVar("x402guard_sdk_signed", default=None)
"""The line of an offer that the SDK has selected, and the payment for it: signed by its hook, taken by its scheme.

The hook can be awaited, and the scheme cannot: a blocking one would keep the event loop from the calls that it waits for.
"""


class FindsPayer(Protocol):
    """A session, or a guard that finds the session in context."""

    def innermost(self) -> Payer:
        """Return the innermost budget in context."""


C = TypeVar("C")


class GuardedSigner:
    """Signs for a client of the official SDK, by EVM's ``exact`` (v1, v2) and ``upto``, what a session allows.

    ``GuardedSigner(session).register(client)`` takes the place of the SDK's own schemes; the client can then be given to
    ``x402HttpxClient``, ``x402AsyncTransport``, ``requests`` and the others. A payment ends with the SDK's own hook for
    answers; one without an answer stays held to its deadline.

    Args:
        session: the budget that pays, or a guard, for the session in context.

    Raises ``ConfigError`` for anything else.
    """

    def __init__(self, session: FindsPayer) -> None:
        if not hasattr(session, "innermost"):
            raise ConfigError(
                f"session: {session!r:.60} is neither a Session nor a Guard; write GuardedSigner(session)"
            )
        self._session = session
        self._open: OrderedDict[str, Payment] = OrderedDict()
        self._lock = threading.Lock()

    def register(self, client: C, networks: Iterable[str] | str = ALL_NETWORKS) -> C:
        """Give a client of the SDK the guard's schemes and hooks, and return it.

        *networks* are CAIP-2 names; what may be paid on them is the policy's word. Raises ``ConfigError`` for a client of
        another kind.
        """
        if not all(hasattr(client, name) for name in ("register", "register_v1", "on_before_payment_creation")):
            raise ConfigError(f"client: a {type(client).__name__} is no client of the package x402; give an x402Client")
        from x402.mechanisms.evm.v1.constants import V1_NETWORKS

        target: Any = client
        for scheme in map(self._scheme, _SCHEMES):
            for network in (networks,) if isinstance(networks, str) else networks:
                target.register(network, scheme)
        for network in V1_NETWORKS:
            target.register_v1(network, self._scheme("exact"))
        awaited = inspect.iscoroutinefunction(getattr(client, "create_payment_payload", None))
        target.on_before_payment_creation(self._abefore if awaited else self._before)
        target.on_payment_response(self._aafter if awaited else self._after)
        return client

    def _scheme(self, name: str) -> _Scheme:
        return _Scheme(self, name)

    def _before(self, context: Any) -> None:
        """Hold and sign a payment for the line that the SDK has selected. Raises as ``session.pay``."""
        self._keep(context, pay(self._session.innermost(), offered(_terms(context))))

    async def _abefore(self, context: Any) -> None:
        self._keep(context, await apay(self._session.innermost(), offered(_terms(context))))

    def _keep(self, context: Any, payment: Payment) -> None:
        _SIGNED.set((context.selected_requirements, payment))
        with self._lock:
            self._open[str(payment.payload["payload"]["signature"])] = payment
            if len(self._open) > _MOST_KNOWN:
                self._open.popitem(last=False)

    def payload(self, requirements: Any) -> dict[str, Any]:
        """Return the scheme's payload of the payment that was signed for *requirements*. Raises ``ConfigError``."""
        signed = _SIGNED.get()
        _SIGNED.set(None)
        if signed is None or signed[0] is not requirements:
            raise ConfigError("client: its hooks have not run for this payment; register it by GuardedSigner.register")
        found: dict[str, Any] = signed[1].payload["payload"]
        return found

    def _ending(self, context: Any) -> Payment | None:
        inner = getattr(context.payment_payload, "payload", None)
        signature = inner.get("signature") if isinstance(inner, dict) else None
        with self._lock:
            return self._open.pop(str(signature), None)

    def _after(self, context: Any) -> None:
        """End a payment with its answer."""
        payment, answer = self._ending(context), context.settle_response
        if payment is not None:
            (payment.settled if answer is not None and answer.success else payment.failed)(answer)

    async def _aafter(self, context: Any) -> None:
        payment, answer = self._ending(context), context.settle_response
        if payment is not None:
            await (payment.asettled if answer is not None and answer.success else payment.afailed)(answer)

    def __repr__(self) -> str:
        return f"GuardedSigner({self._session!r})"

    def __copy__(self) -> Self:
        raise TypeError("a GuardedSigner holds signatures and is not copied")

    def __reduce__(self) -> str:
        raise TypeError("a GuardedSigner holds signatures and is not pickled")


class _Scheme:
    """A scheme, as the SDK knows them."""

    def __init__(self, signer: GuardedSigner, scheme: str) -> None:
        self._signer, self.scheme = signer, scheme

    def find_default_asset(self, asset: str, network: str) -> Any:
        """Return what the SDK knows of a token: its own spend controls ask for it."""
        from x402.mechanisms.evm.default_assets import find_default_asset

        return find_default_asset(asset, network)

    def create_payment_payload(self, requirements: Any) -> dict[str, Any]:
        """Return the signed payload for *requirements*."""
        return self._signer.payload(requirements)


def _terms(context: Any) -> dict[str, Any]:
    """Return the offer with the one line that the SDK has selected."""
    line = context.selected_requirements.model_dump(mode="json", by_alias=True, exclude_none=True)
    resource = getattr(context.payment_required, "resource", None)
    if "maxAmountRequired" in line:
        return {"x402Version": 1, "accepts": [line]}
    named = {} if resource is None else {"resource": resource.model_dump(mode="json", by_alias=True, exclude_none=True)}
    return {"x402Version": 2, "accepts": [line], **named}
