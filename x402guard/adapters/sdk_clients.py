"""The clients of ``GuardedSigner``: classes of the official SDK. This module loads the SDK."""

from __future__ import annotations

import asyncio
import re
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, NoReturn, TypeVar

import anyio
import httpx
from pydantic import BaseModel, PrivateAttr
from typing_extensions import override
from x402 import x402Client, x402ClientSync
from x402.http import x402HTTPClient, x402HTTPClientSync
from x402.http.x402_http_client_base import ProcessPaymentResult
from x402.schemas import PaymentPayload
from x402.schemas.v1 import PaymentPayloadV1

from x402guard.adapters.direct import Offered, Payment, apay, offered, pay
from x402guard.errors import ConfigError, PolicyDenied
from x402guard.flow.drivers import run, run_async
from x402guard.flow.refusals import refused
from x402guard.flow.shell import FindsBudget
from x402guard.http.request import note_made, place_of
from x402guard.ledger.authorize import Refusal
from x402guard.x402.wire import PAYMENT_RESPONSE

C = TypeVar("C", x402Client, x402ClientSync)

_PAYMENT_RESPONSE_V1: Final = "X-PAYMENT-RESPONSE"
_PLACE: ContextVar[tuple[object, str] | None] = ContextVar("x402guard_sdk_place", default=None)
"""An offer and the URL that made it, from the SDK's question whether to pay on."""
_NAMED: ContextVar[str] = ContextVar("x402guard_sdk_named", default="")
"""The place that the answer to the last payment has redirected to: one call pays once."""


class _Paid(BaseModel):
    """A payload that keeps its payment open for as long as the SDK keeps the payload."""

    _payment: Payment | None = PrivateAttr(default=None)

    def __repr_args__(self) -> list[tuple[str, object]]:
        """Return nothing to show: its fields have the signature."""
        return []

    @property
    def is_open(self) -> bool:
        """True until the payment is taken."""
        return self._payment is not None

    def keep(self, payment: Payment) -> None:
        """Keep a payment."""
        self._payment = payment

    def take(self) -> Payment | None:
        """Return the payment, once."""
        payment, self._payment = self._payment, None
        return payment


class _PaidV2(_Paid, PaymentPayload):
    pass


class _PaidV1(_Paid, PaymentPayloadV1):
    pass


class _Exchanges:
    """The exchanges of the SDK that are under way: it does not say when one fails.

    An exchange runs in one task, or in one thread, from its payload to its answer. So it is over when its task has ended,
    and when its task asks for the next payment. Its payment is then lost: the same request presents it again, and does
    not wait for it, although an error that is kept may keep the payload.
    """

    def __init__(self) -> None:
        self._open: list[tuple[object, weakref.ref[_Paid]]] = []
        self._lock = threading.Lock()

    def begin(self, payment: Payment) -> _PaidV1 | _PaidV2:
        """Return the payload of a payment, which is on its way from now on."""
        message = payment.payload
        payload = (_PaidV1 if message.get("x402Version") == 1 else _PaidV2).model_validate(message)
        payload.keep(payment)
        with self._lock:
            self._open.append((_here(), weakref.ref(payload)))
        return payload

    def end_those_over(self) -> None:
        """Let go of the payments of exchanges that are over. Their flows end with them."""
        here = _here()
        with self._lock:
            known = [(owner, found, found()) for owner, found in self._open]
            known = [(owner, found, paid) for owner, found, paid in known if paid is not None and paid.is_open]
            over = [paid for owner, _, paid in known if paid is not None and _is_over(owner, here)]
            self._open = [(owner, found) for owner, found, _ in known if not _is_over(owner, here)]
        for paid in over:
            paid.take()


def _here() -> object:
    """Return the task that runs, or the thread; None where neither tells one exchange from another."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        pass  # no event loop of asyncio's
    try:
        anyio.get_current_task()
    except (anyio.NoEventLoopError, RuntimeError):
        return threading.current_thread()
    return None  # a task of another event loop


def _is_over(owner: object, here: object) -> bool:
    """True if an exchange of *owner* cannot go on: its task has ended, or is *here*."""
    ended = owner.done() if isinstance(owner, asyncio.Task) else not getattr(owner, "is_alive", lambda: True)()
    return owner is not None and (owner is here or ended)


_EXCHANGES: Final = _Exchanges()


def _offer(required: object) -> Offered:
    """Return the offer with the place that made it: the seller's own word of its place is not believed."""
    known = _PLACE.get()
    if known is None or known[0] is not required:
        raise ConfigError(
            "client: it pays what a transport of the SDK has received; pay any other offer with session.pay(…, place=…)"
        )
    return offered(required, place=known[1])


def _second(place: str) -> Refusal | None:
    """Return the refusal of a payment at the place that the answer to another payment has named, once."""
    named = _NAMED.get()
    _NAMED.set("")
    if not named or named not in (_ANY, _spelled(place)):
        return None
    return Refusal(
        "one_payment_per_request",
        "the answer to a payment redirects here, and one call pays once",
        error=PolicyDenied,
        advice="Nothing was paid here; the first payment counts. Request this place by itself for a new purchase.",
    )


def _note_named(status: int, get_header: Callable[[str], str | None]) -> None:
    known, where = _PLACE.get(), get_header("location")
    _NAMED.set("")
    if known is not None and where is not None and 300 <= status < 400:
        plain = _PLAIN.fullmatch(where.translate(_DROPPED).strip(" "))
        _NAMED.set(_spelled(known[1], plain[0]) if plain else _ANY)


_ANY: Final = "any"
"""Clients read a Location in different ways unless it is plain: it may be any place."""

_PLAIN: Final = re.compile(
    r"(?:(?:https?:)?//(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]+)?(?=[/?#]|$)|(?!//|[^/?#]*:))"
    r"(?:[A-Za-z0-9._~!$&'()*,;=:@/?#+-]|%(?!(?:4[1-9A-F]|[57][0-9A]|6[1-9A-F]|3[0-9]|2[DE]|5F|7E))[0-9A-F]{2})*",
    re.IGNORECASE,
)
"""A URL of RFC 3986 with the characters that it allows, and no escape of one that needs none, such as ``%2e``."""


def _spelled(url: str, where: str = "") -> str:
    """Return a place in one of its spellings, that of *where* on the page *url*; one that clients may read is any place."""
    try:
        found = httpx.URL(url).join(where)
        return f"{place_of(found)}?{found.query.decode('ascii')}"
    except (httpx.InvalidURL, ValueError):
        return _ANY


_DROPPED: Final = dict.fromkeys(map(ord, "\t\r\n"))
"""What clients leave out of a Location."""


def _ended(payload: object, get_header: Callable[[str], str | None]) -> tuple[Payment, str | None] | None:
    """Return the payment of a payload, once, and the receipt in its answer."""
    payment = payload.take() if isinstance(payload, _Paid) else None
    return None if payment is None else (payment, get_header(PAYMENT_RESPONSE) or get_header(_PAYMENT_RESPONSE_V1))


def _noted(payload: object, headers: dict[str, str]) -> dict[str, str]:
    """Remember the SDK's own form of a payment: a guarded transport below does not take it for another client's."""
    if isinstance(payload, _Paid):
        note_made([(name.lower(), value) for name, value in headers.items()])
    return headers


def _refuse_scheme(*_: object, **__: object) -> NoReturn:
    raise ConfigError(
        "client: GuardedSigner signs every scheme itself; a scheme beside it would sign without the ledger"
    )


def _without_schemes(client: C) -> C:
    """Return a client of the SDK that keeps its hooks, and takes no scheme."""
    client.register = client.register_v1 = _refuse_scheme  # type: ignore[method-assign]
    return client


class GuardedClient(x402HTTPClient):
    """The client of the SDK's awaited transports."""

    def __init__(self, session: FindsBudget) -> None:
        super().__init__(_without_schemes(x402Client()))
        self._session = session

    @override
    async def handle_payment_required(self, payment_required: Any, request_url: str) -> dict[str, str] | None:
        headers = await super().handle_payment_required(payment_required, request_url)
        _PLACE.set((payment_required, request_url))
        return headers

    @override
    async def create_payment_payload(self, payment_required: Any) -> _PaidV1 | _PaidV2:
        _EXCHANGES.end_those_over()
        budget, offer = self._session.innermost(), _offer(payment_required)
        if (refusal := _second(offer.place)) is not None:
            raise await run_async(refused(budget.context, refusal), budget.shell)
        return _EXCHANGES.begin(await apay(budget, offer))

    @override
    async def process_payment_result(
        self, payment_payload: Any, get_header: Callable[[str], str | None], status: int
    ) -> ProcessPaymentResult:
        found = _ended(payment_payload, get_header)
        if found is not None:
            payment, receipt = found
            _note_named(status, get_header)
            await (payment.asettled if status < 400 else payment.afailed)(receipt)
        return await super().process_payment_result(payment_payload, get_header, status)

    @override
    def encode_payment_signature_header(self, payload: Any) -> dict[str, str]:
        return _noted(payload, super().encode_payment_signature_header(payload))


class GuardedClientSync(x402HTTPClientSync):
    """The client of the SDK's blocking transports."""

    def __init__(self, session: FindsBudget) -> None:
        super().__init__(_without_schemes(x402ClientSync()))
        self._session = session

    @override
    def handle_payment_required(self, payment_required: Any, request_url: str) -> dict[str, str] | None:
        headers = super().handle_payment_required(payment_required, request_url)
        _PLACE.set((payment_required, request_url))
        return headers

    @override
    def create_payment_payload(self, payment_required: Any) -> _PaidV1 | _PaidV2:
        _EXCHANGES.end_those_over()
        budget, offer = self._session.innermost(), _offer(payment_required)
        if (refusal := _second(offer.place)) is not None:
            raise run(refused(budget.context, refusal), budget.shell)
        return _EXCHANGES.begin(pay(budget, offer))

    @override
    def process_payment_result(
        self, payment_payload: Any, get_header: Callable[[str], str | None], status: int
    ) -> ProcessPaymentResult:
        found = _ended(payment_payload, get_header)
        if found is not None:
            payment, receipt = found
            _note_named(status, get_header)
            (payment.settled if status < 400 else payment.failed)(receipt)
        return super().process_payment_result(payment_payload, get_header, status)

    @override
    def encode_payment_signature_header(self, payload: Any) -> dict[str, str]:
        return _noted(payload, super().encode_payment_signature_header(payload))
