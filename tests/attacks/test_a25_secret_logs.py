"""Row 25: no payment in any log, whichever library writes it, at DEBUG, over HTTP/1.1 and HTTP/2."""

import logging
from contextlib import suppress

import anyio
import httpx
import httpx2
import pytest

import x402guard.httpx2
from tests.support.http_server import WIRES, HangUpError, needs_http2, serving
from tests.support.merchant import KEY, Shop, accept, b64, make_guard, permit2, receipt, required, required_v1, upto
from tests.support.payment_secrets import everything_logged, forms_of, found, payment_header
from x402guard import AsyncGuardedTransport, GuardedTransport, SettlementUncertain
from x402guard.http import redaction
from x402guard.http.redaction import RedactingFilter, redact_logs

TOKEN = "token-of-the-callers-own-0123456789"
OFFERS = {
    "exact": lambda **more: required(accept(**more)),
    "permit2": lambda **more: required(permit2(**more)),
    "upto": lambda **more: required(upto(**more)),
    "v1": lambda **more: required_v1(accept(network="base-sepolia", **more)),
}
GUARDED = {
    ("httpx", "sync"): (httpx.Client, httpx.HTTPTransport, GuardedTransport),
    ("httpx", "async"): (httpx.AsyncClient, httpx.AsyncHTTPTransport, AsyncGuardedTransport),
    ("httpx2", "sync"): (httpx2.Client, httpx2.HTTPTransport, x402guard.httpx2.GuardedTransport),
    ("httpx2", "async"): (httpx2.AsyncClient, httpx2.AsyncHTTPTransport, x402guard.httpx2.AsyncGuardedTransport),
}


class Moody(Shop):
    """Takes a payment, or hangs up on it the first time where the path says so."""

    def __call__(self, request):
        header = payment_header(request)
        again = header is not None and any(payment_header(seen) for seen in self.seen if seen.url == request.url)
        response = super().__call__(request)
        if header is not None and request.url.path == "/lost" and not again:
            raise HangUpError
        return response


def paid(request, shop):
    name = "X-PAYMENT-RESPONSE" if "x-payment" in request.headers else "PAYMENT-RESPONSE"
    return httpx.Response(200, headers={name: b64(receipt())})


def terms_of(offer):
    return lambda request: OFFERS[offer](**({"amount": 90_000_000} if request.url.path == "/dear" else {}))


def send_all(family, mode, wire, session, base, paths) -> list:
    """One client, one request to each path; what it got, or was raised."""
    client, transport, guarded = GUARDED[family, mode]
    two = wire == "HTTP/2"
    inner = transport(http1=not two, http2=two)
    urls = [f"{base}{path}?token={TOKEN}" for path in paths]
    headers = {"authorization": f"Bearer {TOKEN}", "x-api-key": TOKEN}
    if mode == "sync":
        with client(transport=guarded(session, inner, on_refusal="raise"), headers=headers) as http:
            return [_outcome(lambda url=url: http.get(url)) for url in urls]

    async def go():
        outcomes = []
        async with client(transport=guarded(session, inner, on_refusal="raise"), headers=headers) as http:
            for url in urls:
                try:
                    outcomes.append(await http.get(url))
                except Exception as error:
                    outcomes.append(error)
        return outcomes

    return anyio.run(go)


def _outcome(call):
    try:
        return call()
    except Exception as error:
        return error


@pytest.fixture(autouse=True)
def nothing_is_hidden_yet(monkeypatch):
    """The process forgets the URLs of chains from other tests: the OS uses their ports again."""
    monkeypatch.setattr(redaction, "_HIDDEN", type(redaction._HIDDEN)())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("family", ["httpx", "httpx2"])
@pytest.mark.parametrize("wire", WIRES)
def test_a25_no_log_has_a_payment_a_key_or_a_query(mode, wire, family, offer):
    shop = Moody(terms_of(offer), paid)
    paths = ["/paid", "/lost", "/lost", "/dear"]
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, serving(shop, wire) as base:
        with everything_logged() as log:
            got = send_all(family, mode, wire, session, base, paths)
    kinds = [type(outcome).__name__ if isinstance(outcome, Exception) else outcome.status_code for outcome in got]
    assert kinds == [200, "SettlementUncertain", 200, "PolicyDenied"], got
    assert got[2].extensions["x402guard"].represented
    headers = {payment_header(request) for request in shop.seen} - {None}
    assert len(headers) == 2
    offered = b64(OFFERS[offer]())
    for header in headers:
        assert not found(forms_of(header, offered), log.text)
    assert not found([KEY[2:], TOKEN, b64(receipt())], log.text)
    core = "httpcore" if family == "httpx" else "httpcore2"
    assert {family, f"{core}.connection", f"{core}.http{'2' if wire == 'HTTP/2' else '11'}"} <= log.names
    assert ("hpack.hpack" in log.names) == (wire == "HTTP/2")
    assert "/paid?[redacted]" in log.text  # the records say what they are for all the same
    assert "(b'content-length'," in log.text


class NoFilters:
    """Loggers as they were before us, for as long as it lasts."""

    def __enter__(self):
        redact_logs()
        loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
        self.kept = [(logger, list(logger.filters)) for logger in loggers]
        for logger in loggers:
            logger.filters[:] = [each for each in logger.filters if not isinstance(each, RedactingFilter)]

    def __exit__(self, *_):
        for logger, filters in self.kept:
            logger.filters[:] = filters


@needs_http2
def test_a25_the_search_finds_what_hpack_would_print_without_us():
    shop = Moody(terms_of("exact"), paid)
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, serving(shop, "HTTP/2") as base:
        _, inner, guarded = GUARDED["httpx", "sync"]
        transport = guarded(session, inner(http1=False, http2=True))
        with NoFilters(), everything_logged() as log, httpx.Client(transport=transport) as http:
            http.get(f"{base}/paid?token={TOKEN}")
    [header] = {payment_header(request) for request in shop.seen} - {None}
    shown = found(forms_of(header, b64(OFFERS["exact"]())), log.text)
    assert any("\\x" in form for form in shown), "the compressed form"
    assert any(form in header for form in shown), "the plain form"
    assert TOKEN in log.text
    assert b64(receipt()) in log.text


def test_a25_the_search_finds_what_httpcore_would_print_without_us():
    shop = Moody(terms_of("exact"), paid)
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, serving(shop, "HTTP/1.1") as base:
        transport = GuardedTransport(session)
        with NoFilters(), everything_logged() as log, httpx.Client(transport=transport) as http:
            http.get(f"{base}/paid?token={TOKEN}")
    assert b64(receipt()) in log.text
    assert TOKEN in log.text


def test_a25_what_the_caller_logs_of_requests_and_errors_has_no_payment(mode, guard):
    """A custom transport names the request in its error and its answer, as httpx's own documentation does."""
    told = []

    def shop(request):
        told.append(payment_header(request))
        if request.url.path == "/lost" and told[-1]:
            raise httpx.ReadError("lost", request=request)
        answer = Shop(paid=paid)(request)
        answer.request = request
        return answer

    async def shop_async(request):
        return shop(request)

    seen = []
    with guard.session("s", budget="$1.00") as session:
        kind = GuardedTransport if mode == "sync" else AsyncGuardedTransport
        transport = kind(session, httpx.MockTransport(shop if mode == "sync" else shop_async))
        for path in ("/paid", "/lost"):
            request = httpx.Request("GET", f"https://courts.example{path}")
            with suppress(SettlementUncertain):
                try:
                    if mode == "sync":
                        answer = transport.handle_request(request)
                    else:
                        answer = anyio.run(transport.handle_async_request, request)
                    seen.append(answer.request)
                except SettlementUncertain as error:
                    seen += [error.request, error.__cause__.request]
                    raise
    assert len(seen) == 3
    assert [header is not None for header in told] == [False, True, False, True]
    for request in seen:
        assert payment_header(request) is None
        assert "payment" not in repr(request.headers).lower()
