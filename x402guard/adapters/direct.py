"""Pays an offer that did not come by HTTP: the flow of a paid request, halted between the signature and the answer.

The flow is that of a transport. It waits where a transport sends the payment, until the caller says what came back.
"""

from __future__ import annotations

import hashlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

from msgspec import Struct

from x402guard.errors import ConfigError, ProtocolError
from x402guard.flow.address import DEFAULT_PORTS, address
from x402guard.flow.context import Context
from x402guard.flow.drivers import run, run_async
from x402guard.flow.effects import Flow, Interrupted, PeekBody, Reply, Send, SendFailed, Sign
from x402guard.flow.ports import Slot
from x402guard.flow.receipt import Receipt
from x402guard.flow.request import RequestFacts
from x402guard.flow.sealed import Sealed, forget_frames, forgetting
from x402guard.flow.shell import Payer, Shell
from x402guard.flow.surroundings import follow_job, here
from x402guard.http.answer_end import AnswerEnding, note_answer, note_answer_async
from x402guard.http.redaction import redact_logs
from x402guard.http.request import note_made
from x402guard.money import Dollars
from x402guard.policy.checks import check_dollars, check_flag
from x402guard.policy.steps import DIRECT, LOCAL
from x402guard.strict_json import plain_values
from x402guard.x402.flow import paid_request
from x402guard.x402.settlement import succeeded
from x402guard.x402.wire import (
    MAX_BODY_BYTES,
    PAYMENT_REQUIRED,
    PAYMENT_RESPONSE,
    compact_json,
    decode_base64_json,
    decode_header,
    encode_header,
)

_SCHEMES: Final = frozenset({"https", "http", LOCAL})
_REQUIRED: Final = "required"


class Offered(Struct, frozen=True):
    """An offer, and what it is for.

    Attributes:
        required: the terms, as decoded JSON.
        place: a URL that says where the offer came from and what is bought there.
        body: what is bought, beside the place: the canonical arguments of a tool.
        purchase: the caller's own name of the purchase, or None.
        pay_again: the caller wants a second payment even if one is in doubt.
        max_price: the price that the caller was quoted, in dollars; None without one.
        tool: the tool that is bought, as the owner's rules name it; else "".
        by_offer: the place is one that the offer names.
        beside: a second text with terms, beside the first; what it names otherwise is a conflict.
    """

    required: Mapping[str, Any]
    place: str
    body: bytes = b""
    purchase: str | None = None
    pay_again: bool = False
    max_price: Dollars | None = None
    tool: str = ""
    by_offer: bool = False
    beside: bytes = b""

    def facts(self) -> RequestFacts:
        """Return the facts of a request for the core, with 32 new random bytes. Raises ``ConfigError``."""
        try:
            parts = urlsplit(self.place)
            port, host = parts.port, (parts.hostname or "").encode("ascii")
        except (ValueError, UnicodeEncodeError):
            raise ConfigError(f"place: {self.place!r:.80} is no URL; write https://seller.example/what") from None
        if parts.scheme not in _SCHEMES or not host or parts.username is not None:
            raise ConfigError(f"place: {self.place!r:.80} does not begin with https://host, http://host or mcp://name")
        where = address(parts.scheme, host, None if port == DEFAULT_PORTS.get(parts.scheme) else port)
        if not where.plain:
            raise ConfigError(f"place: the host {where.host!r:.80} has other characters than a host's name has")
        return RequestFacts(
            method=DIRECT,
            url=self.place,
            origin=where.origin,
            host=where.host,
            secure=parts.scheme in ("https", LOCAL),
            loopback=where.loopback or parts.scheme == LOCAL,
            body_sha256=hashlib.sha256(self.body).hexdigest(),
            entropy=here().random_bytes(32),
            purchase=self.purchase,
            pay_again=self.pay_again,
            body=self.body,
            max_price=None if self.max_price is None else check_dollars("max_price", self.max_price),
            tool=self.tool,
            read_s=None,
            by_offer=self.by_offer,
        )


def offered(
    required: object,
    *,
    purchase: object = None,
    place: object = None,
    max_price: Dollars | None = None,
    pay_again: object = False,
) -> Offered:
    """Return an offer, checked.

    *required* is the text of a ``PAYMENT-REQUIRED`` header, a mapping, or a model with ``model_dump``. Raises
    ``ConfigError`` naming the argument, ``ProtocolError`` for terms that cannot be read.
    """
    terms = as_message(required, field=_REQUIRED)
    if purchase is not None and (not isinstance(purchase, str) or not purchase.strip()):
        raise ConfigError(f"purchase: {purchase!r:.60} is no name; write text such as 'order 7'")
    check_flag("pay_again", pay_again)
    if max_price is not None:
        check_dollars("max_price", max_price)
    by_offer, place = place is None, _resource_url(terms) if place is None else place
    if not isinstance(place, str) or not place:
        raise ConfigError(
            "place: the offer names no resource; say where it came from: place='https://seller.example/what'"
        )
    offer = Offered(terms, place, b"", purchase, bool(pay_again), max_price, by_offer=by_offer)
    if by_offer:
        _check_theirs(offer)
    return offer


def _check_theirs(offer: Offered) -> None:
    """Refuse a place of the seller's own that no rule about hosts can judge, without its words."""
    try:
        usable = urlsplit(offer.place).scheme != LOCAL and bool(offer.facts())
    except (ConfigError, ValueError):  # the first would quote it
        usable = False
    if not usable:
        raise ProtocolError(
            "it is no URL of a web server; say where the offer came from: place=…", field=f"{_REQUIRED}.resource.url"
        )


def as_message(given: object, *, field: str) -> Mapping[str, Any]:
    """Return a message of x402 as decoded JSON. Raises ``ProtocolError`` naming *field*, ``ConfigError`` for another type."""
    if isinstance(given, str):
        given = decode_base64_json(given, field=field)
    elif hasattr(given, "model_dump"):
        given = given.model_dump(mode="json", by_alias=True, exclude_none=True)
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{field}: a {type(given).__name__} is no message of x402; give its model, a dict or the header's text"
        )
    return given


def _resource_url(terms: Mapping[str, Any]) -> object:
    """Return the URL of what is sold: of the offer (v2), or of its first way to pay (v1)."""
    resource = terms.get("resource")
    if isinstance(resource, Mapping):
        return resource.get("url")
    accepts = terms.get("accepts")
    first = accepts[0] if isinstance(accepts, (list, tuple)) and accepts else None
    return first.get("resource") if isinstance(first, Mapping) else None


class _Halted(Struct, frozen=True):
    """A flow that has signed, and the payment that it would send."""

    flow: Flow[Receipt | None]
    sent: Send
    presented: int


def _advanced(
    flow: Flow[Receipt | None], given: Any = None, *, failure: BaseException | None = None, body: bytes = b""
) -> Flow[_Halted | Receipt | None]:
    """Run a flow from an answer or a failure on, up to the send of its payment or to its end. *body*: the 402's."""
    presented = 0
    while True:
        try:
            effect = flow.send(given) if failure is None else flow.throw(failure)
        except StopIteration as done:
            receipt: Receipt | None = done.value
            return receipt
        if isinstance(effect, Send):
            return _Halted(flow, effect, presented)
        if isinstance(effect, Sign):
            presented = effect.hold.presented
        given, failure = None, None
        try:
            given = body if isinstance(effect, PeekBody) else (yield effect)
        except GeneratorExit:
            flow.close()
            raise
        except BaseException as error:  # noqa: BLE001 - the flow decides what every failure means
            failure = error


class _Keeps:
    """Keeps the slot of a payment until it ends: the part of an exchange that a flow without HTTP needs."""

    def __init__(self) -> None:
        self._slot: Slot | None = None

    def keep(self, slot: Slot | None) -> None:
        """Keep a slot, and release the one kept before."""
        if self._slot is not None:
            self._slot.leave()
        self._slot = slot

    def follow(self, is_lost: Callable[[], bool], most_s: float) -> None:
        """See ``Slot.follow``."""
        if self._slot is not None:
            self._slot.follow(is_lost, most_s)


class _Slots(_Keeps):
    def send(self, effect: Send) -> Reply:
        raise TypeError(f"{effect!r} is not sent here")  # the flow halts before

    def peek(self, effect: PeekBody) -> bytes | None:
        raise TypeError(f"{effect!r} is not read here")  # the terms are known


class _AsyncSlots(_Keeps):
    async def send(self, effect: Send) -> Reply:
        raise TypeError(f"{effect!r} is not sent here")

    async def peek(self, effect: PeekBody) -> bytes | None:
        raise TypeError(f"{effect!r} is not read here")


_UNREAD_S: Final = 3.0
"""After so long, a payment that was not read keeps nothing waiting: its slot goes to who waits, and the task that has signed
it may ask again. Until then another task may be about to read it."""

_TAKEN_OVER: Final = f"payment: not read for {_UNREAD_S:g} seconds, and another call has asked for it since; pay again"


class Payment:
    """A payment that is signed, and whose outcome the caller knows: end it by ``settled`` or ``failed``.

    One that is not ended stays held to its deadline, as any payment whose answer is lost. Awaited, the ends are
    ``asettled`` and ``afailed``.
    """

    def __init__(self, halted: _Halted, slots: _Keeps, context: Context, shell: Shell) -> None:
        [(name, value)] = halted.sent.headers
        self._name, self._value = name, value if isinstance(value, Sealed) else Sealed(value)
        self._flow: Flow[Receipt | None] | None = halted.flow
        self._hold_id = halted.sent.pays or ""
        self._presentation = (self._hold_id, halted.presented)
        self._slots, self._context, self._shell = slots, context, shell
        self._lock = threading.Lock()
        self._was_read = False
        slots.follow(lambda: False, _UNREAD_S)  # one that is not read is not under way
        signer, until_s = here().follow_task(), time.monotonic() + _UNREAD_S
        context.between_hops[self._presentation] = lambda: time.monotonic() >= until_s and signer()

    def __repr__(self) -> str:
        return f"Payment(hold={self._hold_id[:16]}…)"  # without the signature

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Payment holds a signature and is not pickled")

    @property
    def hold_id(self) -> str:
        """The id of its hold in the ledger."""
        return self._hold_id

    @property
    def header(self) -> tuple[str, str]:
        """The name and value of its header, for a request of the caller's own."""
        self._note_read()
        return self._name, self._value.reveal()

    @property
    def payload(self) -> dict[str, Any]:
        """The PaymentPayload to send, as JSON values: in ``_meta["x402/payment"]`` over MCP, for example."""
        self._note_read()
        return self._message()

    def _message(self) -> dict[str, Any]:
        with forgetting():
            return decode_header(self._value.reveal())

    def note(self) -> None:
        """Note it as this guard's own: a guarded transport that carries it does not take it for another client's.

        It may carry it in a header, over MCP or over A2A.
        """
        with forgetting():
            note_made([(self._name.lower(), self._value.reveal())], self._message())

    def _note_read(self) -> None:
        """The task that reads it first sends it. If it asks again, it has lost it: its payment is presented again at once.

        The task that signs may be another one, which ends before the payment is sent.
        """
        with self._lock:
            if self._flow is not None and not self._was_read:
                is_lost = follow_job(_UNREAD_S)
                self._context.between_hops[self._presentation] = is_lost
                if self._presentation not in self._context.in_flight:
                    raise ConfigError(_TAKEN_OVER)
                self._was_read = True
                self._slots.follow(is_lost, self._context.flight_ms / 1000)

    def settled(self, response: object = None) -> Receipt:
        """End it with the seller's answer, and return its receipt.

        *response* is the SettleResponse: a model, a mapping, or the text of a ``PAYMENT-RESPONSE`` header. It is the
        seller's claim, which the chain confirms later. Without one, or with a failure, the payment stays in doubt and
        counts. Raises ``ConfigError`` if it has ended, ``LedgerUnavailable``.
        """
        return self._end(200, response)

    async def asettled(self, response: object = None) -> Receipt:
        """``settled``, awaited."""
        return await self._aend(200, response)

    def failed(self, response: object = None) -> Receipt:
        """End it without what was bought, and return its receipt: it may still be taken, so it counts to its deadline.

        The same purchase presents the same payment again; nothing new is signed. *response* as in ``settled``. Raises
        ``PaidNotDelivered`` if the chain shows that it was taken.
        """
        return self._end(402, response)

    async def afailed(self, response: object = None) -> Receipt:
        """``failed``, awaited."""
        return await self._aend(402, response)

    async def abroken(self, error: BaseException) -> NoReturn:
        """End it because its request was sent and no answer came, and raise what its caller gets: never a denial.

        ``SettlementUncertain`` from *error*; a cancellation is passed on. An error that shows the payment, in its text or
        in the local variables of its frames, shows it no more.
        """
        error = self.without_payment(error)
        failure = SendFailed(error, before_connection=False) if isinstance(error, Exception) else Interrupted(error)
        try:
            await run_async(_received(_advanced(self._take(), failure=failure)), self._shell)
        finally:
            self._gone()
        raise error  # the flow raises; this line is for a flow that does not

    def without_payment(self, error: BaseException) -> BaseException:
        """Return an error that may be shown, or one in its place if its text has the payment: a server may echo it.

        The frames below the catching one are dropped.
        """
        forget_frames(error)
        with forgetting():
            secrets = [self._value.reveal(), *_signatures(self._message())]
            text = "".join(traceback.format_exception(error))
            shows = isinstance(error, Exception) and any(secret in text for secret in secrets)
        return ConnectionError(f"{type(error).__name__}: its text has the payment, and is left out") if shows else error

    def _end(self, status: int, response: object) -> Receipt:
        rest = self._rest(status, response)
        try:
            receipt = run(_received(rest), self._shell)
        except BaseException:
            self._gone()
            raise
        self._slots.keep(None)
        note_answer(self._answer_ending(receipt, status), "whole")
        return receipt

    async def _aend(self, status: int, response: object) -> Receipt:
        rest = self._rest(status, response)
        try:
            receipt = await run_async(_received(rest), self._shell)
        except BaseException:
            self._gone()
            raise
        self._slots.keep(None)
        await note_answer_async(self._answer_ending(receipt, status), "whole")
        return receipt

    def _answer_ending(self, receipt: Receipt, status: int) -> AnswerEnding:
        return AnswerEnding(self._context, receipt, self._shell, success=succeeded(status), broke=False)

    def _rest(self, status: int, response: object) -> Flow[_Halted | Receipt | None]:
        reply = _answer(status, response)  # before the flow is taken: an answer of a wrong type ends nothing
        return _advanced(self._take(), reply)

    def _take(self) -> Flow[Receipt | None]:
        with self._lock:
            flow, self._flow = self._flow, None
        if flow is None:
            raise ConfigError("payment: it has ended already; pay again for another one")
        self._context.between_hops.pop(self._presentation, None)
        return flow

    def _gone(self) -> None:
        self._context.in_flight.pop(self._presentation, None)
        self._slots.keep(None)


def _received(rest: Flow[_Halted | Receipt | None]) -> Flow[Receipt]:
    receipt = yield from rest
    if not isinstance(receipt, Receipt):
        raise TypeError("a payment was sent twice")
    return receipt


def _signatures(payload: object) -> Iterator[str]:
    """Yield the signatures in a payment: of the transfer, and of a permit beside it."""
    if isinstance(payload, dict):
        for name, value in payload.items():
            if name == "signature" and isinstance(value, str):
                yield value
            yield from _signatures(value)


def _answer(status: int, response: object) -> Reply:
    if response is None:
        return Reply(status, _NO_BODY)
    text = response
    try:
        if not isinstance(text, str):
            compact_json(text := plain_values(as_message(response, field="response")))
            text = encode_header(text)
    except (TypeError, ValueError, RecursionError):
        text = "unreadable"  # the money is out: an answer that is no JSON is a doubt
    return Reply(status, ((PAYMENT_RESPONSE, text), *_NO_BODY))


_NO_BODY: Final = (("content-length", "0"),)
"""The caller has the answer, so that it has ended when it is told."""


def _challenge(offer: Offered) -> tuple[Reply, bytes]:
    """Return the 402 that these terms would come in, and its body: the flow reads and bounds both as ever."""
    try:
        text, header = compact_json(terms := plain_values(offer.required)), encode_header(terms)
    except (TypeError, ValueError, RecursionError):
        raise ProtocolError("it is no JSON", field=_REQUIRED) from None
    if terms.get("x402Version") == 1:
        body = text.encode("utf-8", "replace")
        if len(body) > MAX_BODY_BYTES:
            raise ProtocolError(f"{len(body)} bytes; at most {MAX_BODY_BYTES} are allowed", field=_REQUIRED)
        return Reply(402, (("content-type", "application/json"),)), body
    return Reply(402, ((PAYMENT_REQUIRED, header),)), offer.beside


def pay(payer: Payer, offer: Offered) -> Payment:
    """Hold and sign a payment for an offer. Raises what a paid request raises, and ``ConfigError``."""
    context, shell, slots = payer.context, payer.shell, _Slots()
    try:
        return _signed(run(_signing(offer, context), shell, slots), slots, context, shell)
    except BaseException:
        slots.keep(None)
        raise


async def apay(payer: Payer, offer: Offered) -> Payment:
    """``pay``, awaited."""
    context, shell, slots = payer.context, payer.shell, _AsyncSlots()
    try:
        return _signed(await run_async(_signing(offer, context), shell, slots), slots, context, shell)
    except BaseException:
        slots.keep(None)
        raise


def _signing(offer: Offered, context: Context) -> Flow[_Halted]:
    reply, body = _challenge(offer)
    halted = yield from _advanced(paid_request(offer.facts(), context, reply), body=body)
    if not isinstance(halted, _Halted):
        raise ProtocolError("it offers nothing that can be paid", field=_REQUIRED)
    return halted


def _signed(halted: _Halted, slots: _Keeps, context: Context, shell: Shell) -> Payment:
    redact_logs()
    payment = Payment(halted, slots, context, shell)
    payment.note()
    return payment
