"""One request as plain facts, and what all flows about it share."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, TypeVar
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from x402guard.errors import PaymentRefused, PolicyDenied, SettlementUncertain, X402GuardError
from x402guard.flow.context import Context
from x402guard.flow.effects import Flow, SendFailed, Transact
from x402guard.kernel.rows import Nanos, Purpose
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.view import LedgerView, Scope
from x402guard.policy.steps import DIRECT, short_route, shown_host, whole_routes

POLLS: Final = "x402guard.polls"
"""The extension of a request that asks after a job: ``session.poll`` makes it."""


class RequestFacts(Struct, frozen=True):
    """One request as the core sees it, without types of an HTTP library.

    Attributes:
        method: upper case.
        url: in full, query included; it never leaves the process.
        origin: ``scheme://host:port``, lower case, always with the port.
        host: host name, and the port if it is not the scheme's default.
        secure: the scheme is https.
        loopback: the host is this machine.
        body_sha256: of the request body in hex; None if the body could not be kept.
        entropy: 32 random bytes; the hold's id and the payment's nonce.
        purchase: the caller's own name for what is bought, or None.
        pay_again: the caller wants a second payment even if one is in doubt.
        pays_itself: the request has a payment already.
        redirected_from: the origin of the first hop, if this hop has another; else None.
        paid_by: the hold that an earlier hop of this request has signed; else None.
        presented: how often that payment had been presented before, when the earlier hop had it.
        carries: that payment was made at this origin, and goes along if this hop asks for one.
        polls: it asks after a job that was bought as ``purchase``, and signs nothing new.
        paid_until: the deadline of that signature, in unix seconds.
        body: of the request, as far as it was kept.
        max_price: the price that the caller was quoted, in nano-dollars; None without one.
        price_class: the caller's own name for what changes a price, or "".
        host_header: the ``Host`` header, if it names another host than the URL; else "".
        tool: the tool of another server that is bought, as the owner's rules name it; else "".
        read_s: how long the caller's own client waits for a piece of an answer, in seconds; None for no limit.
        by_offer: the URL is one that the offer names, and so the seller's word: no request has been there.
        begun: the route of the first hop, if a redirect has named this one, whose path is a seller's word; else "".
    """

    method: str
    url: str
    origin: str
    host: str
    secure: bool
    loopback: bool
    body_sha256: str | None
    entropy: bytes
    purchase: str | None = None
    pay_again: bool = False
    pays_itself: bool = False
    redirected_from: str | None = None
    paid_by: str | None = None
    presented: int = 0
    carries: bool = False
    polls: bool = False
    paid_until: int = 0
    body: bytes | None = None
    max_price: Nanos | None = None
    price_class: str = ""
    host_header: str = ""
    tool: str = ""
    read_s: float | None = 0.0
    by_offer: bool = False
    begun: str = ""

    @property
    def is_http(self) -> bool:
        """False for an offer that did not come by HTTP: its resource may name a tool (``mcp://tool/name``), not a host."""
        return self.method != DIRECT

    def __repr__(self) -> str:
        return f"RequestFacts(method={self.method!r}, origin={self.origin!r})"  # query and body may hold secrets

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("method", self.method), ("origin", self.origin)]


def split_path(url: str) -> SplitResult:
    """Return the parts of a URL without its query: the standard library remembers them, and a query is often new."""
    return urlsplit(url.partition("?")[0])


def route_of(request: RequestFacts) -> str:
    """Return a request's route as a policy names it: ``GET host/path``, cut to 200 characters."""
    return short_route(request.method, request.host, split_path(request.url).path)


def routes_of(request: RequestFacts) -> tuple[str, ...]:
    """Return a request's route in full, in all readings, as the owner's rules see it."""
    return whole_routes(request.method, request.host, split_path(request.url).path)


def fingerprint_of(request: RequestFacts) -> str:
    """Return SHA-256 over method, full URL and the body's bytes, in hex."""
    what = json.dumps([request.method, request.url, request.body_sha256 or ""])
    return hashlib.sha256(what.encode()).hexdigest()


def purpose_of(request: RequestFacts, fingerprint: str, tool: str = "", *, step: str = "") -> Purpose:
    """Return the purpose of a hold. *tool* is the model or tool that *request* calls, *step* its deduplication key."""
    # No query, no fragment, and no user:password@ before the host.
    url = split_path(request.url)._replace(netloc=request.host, fragment="").geturl()
    return Purpose(request.method, url, request.host, fingerprint, tool, step)


def note_once(context: Context, name: str, where: str, place: str) -> Flow[bool]:
    """Record the event *name* with its *place*, once per budget and *where* (a host or an origin). True the first time."""
    key = ("once", f"{context.node_id} {name} {where}")

    def change(view: LedgerView) -> bool:
        is_new = view.mark(key) is None
        if is_new:
            view.put_mark(key, {"place": place})
            view.record(context.node_id, "event", facts={"name": name, "place": place})
        return is_new

    first: bool = yield Transact(Scope(nodes=(context.node_id,), marks=(key,)), change)
    return first


def host_refusal(request: RequestFacts, error: type[PaymentRefused] = PolicyDenied) -> Refusal:
    """Return the refusal of a request whose ``Host`` header names another host than its URL."""
    return Refusal(
        "host_header",
        f"the request goes to {shown_host(request.host, request.begun, request.host)} with Host: "
        f"{request.host_header[:100]}; whom it would pay is not what was judged",
        error=error,
        advice="Name the host in the URL, and set no Host header.",
        words=request.host if request.begun else "",
    )


R = TypeVar("R")


def guarding_earlier_payment(request: RequestFacts, conversation: Flow[R]) -> Flow[R]:
    """Return a flow whose errors never deny that an earlier hop of the same request was paid."""
    return conversation if request.paid_by is None else _after_payment(request, conversation)


def _after_payment(request: RequestFacts, conversation: Flow[R]) -> Flow[R]:
    paid_by = request.paid_by or ""
    try:
        return (yield from conversation)
    except SendFailed as failure:
        reason = f"no answer on a later hop: {type(failure.cause).__name__}"
        uncertain = SettlementUncertain(reason, hold_id=paid_by, deadline=request.paid_until, advice=_EARLIER_HOP)
        uncertain.retry = "no"
        raise uncertain from failure.cause
    except X402GuardError as error:
        error.money_may_have_moved, error.advice = True, _EARLIER_HOP
        raise


_EARLIER_HOP: Final = (
    "An earlier hop of this request was paid, this hop was not. Asking again is a new purchase; read the report first."
)
