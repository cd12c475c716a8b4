"""Ways out of a request that say less than they seem to: a tunnel, an error inside a loop, a fragment, a dot."""

import itertools
import time
from contextlib import suppress

import anyio
import httpx
import httpx2
import pytest

import x402guard
import x402guard.httpx2
from tests.support.merchant import b64, make_guard, receipt
from tests.support.slow_server import Trickler, once_paid, paid_head
from x402guard import Policy, PolicyDenied, X402GuardError
from x402guard.flow.address import address
from x402guard.http.leaving import Leaving
from x402guard.policy.timeouts import Timeouts

LIBRARIES = {httpx: x402guard, httpx2: x402guard.httpx2}
BODY = b'{"a": 1}\n' * 20_000


@pytest.fixture
def shop():
    with Trickler() as shop:
        yield shop


@pytest.fixture
def session():
    with make_guard(budget="$1.00") as guard, guard.session("s", budget="$1.00") as session:
        yield session


def ask(library, mode, session, method, url):
    """Send one request. Errors go to the caller."""
    ours = LIBRARIES[library]

    async def aask():
        async with library.AsyncClient(
            transport=ours.AsyncGuardedTransport(session, on_refusal="raise"), trust_env=False
        ) as http:
            return await http.request(method, url)

    if mode == "async":
        return anyio.run(aask)
    with library.Client(transport=ours.GuardedTransport(session, on_refusal="raise"), trust_env=False) as http:
        return http.request(method, url)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("method", ["CONNECT", "connect"])
def test_a_connect_is_refused_before_it_leaves(library, mode, method, shop, session):
    with pytest.raises(PolicyDenied) as refused:
        ask(library, mode, session, method, f"{shop.url}/page")
    assert (refused.value.rule, shop.asked, session.spent + session.held) == ("method", [], 0)


@pytest.mark.parametrize(
    ("method", "connects", "left"), [(b"GET", False, True), (b"CONNECT", False, False), (b"CONNECT", True, True)]
)
def test_a_request_of_its_own_that_connects_has_left_as_any_other(method, connects, left):
    class Asked:
        pass

    request = Asked()
    request.method = method
    leaving = Leaving(None, connects=connects)
    leaving.trace("http11.send_request_headers.started", {"request": request})
    assert leaving.has_left is left


class CallersError(Exception):
    """Of the caller's own."""


READERS = ("iter_lines", "iter_text", "iter_bytes", "iter_raw")
ERRORS = (CallersError, ValueError, KeyboardInterrupt)


def dropped(library, session, url, *, reader, error, aside):
    """Read a streamed answer, and raise in the middle of it: in the loop itself, or in one over a generator of the caller's."""

    def pieces(http):
        with http.stream("GET", url) as response:
            yield from getattr(response, reader)()

    with library.Client(transport=LIBRARIES[library].GuardedTransport(session), trust_env=False) as http:
        if aside:
            for _ in pieces(http):
                raise error
        with http.stream("GET", url) as response:
            for _ in getattr(response, reader)():
                raise error


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("reader", "error", "aside"), list(itertools.product(READERS, ERRORS, [False, True])))
def test_an_error_in_the_middle_of_a_streamed_answer_is_no_hand_over(library, reader, error, aside, shop, session):
    def answer(line):
        with suppress(OSError):
            line.send(paid_head(f"content-length: {len(BODY)}\r\n\r\n".encode()) + BODY)
        return False

    shop.answers["/page"] = once_paid(answer)
    for _ in range(3):
        with pytest.raises((error, X402GuardError)):
            dropped(library, session, f"{shop.url}/page", reader=reader, error=error, aside=aside)
    assert len(set(shop.nonces)) == 1
    assert str(session.spent + session.held) == "0.01"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("second", ["/page", "/page#", "/page#two", "/page#two#three"])
def test_a_lost_answer_is_not_bought_again_under_another_fragment(library, mode, second, shop, session):
    shop.answers["/page"] = once_paid(lambda line: False)
    for path in ("/page#one", second):
        with pytest.raises(X402GuardError):
            ask(library, mode, session, "GET", shop.url + path)
    assert len(set(shop.nonces)) == 1
    assert str(session.held) == "0.01"


@pytest.mark.parametrize("port", [None, 443, 8443])
def test_a_dot_at_the_end_of_a_host_leads_to_the_same_host(port):
    plain, dotted = (address("https", host, port) for host in (b"Courts.example", b"courts.example."))
    assert (dotted.origin, dotted.host, dotted.name, dotted.plain) == (plain.origin, plain.host, plain.name, True)
    at = f":{port or 443}"
    assert {f"courts.example.{at}", f"courts.example{at}"} <= dotted.named
    assert ("courts.example." in dotted.named) is (port != 8443)
    assert address("http", b"localhost.", None).loopback


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_paid_connection_that_is_upgraded_lives_longer_than_an_answer_may_take(library, shop):
    def upgrades(line):
        head = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: raw\r\nconnection: upgrade\r\n"
        line.send(head + f"PAYMENT-RESPONSE: {b64(receipt())}\r\n\r\n".encode())
        with suppress(OSError):
            while not line.server.done.wait(0.1):
                line.send(b"tick")
        return False

    shop.answers["/live"] = once_paid(upgrades)
    policy = Policy(breaker=None, timeouts=Timeouts(payment_s=1))
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        with library.Client(transport=LIBRARIES[library].GuardedTransport(session), trust_env=False) as http:
            with http.stream("GET", f"{shop.url}/live", headers={"connection": "upgrade", "upgrade": "raw"}) as answer:
                stream, until = answer.extensions["network_stream"], time.monotonic() + 1.8
                while time.monotonic() < until:
                    assert stream.read(100, timeout=5)
    assert len(shop.nonces) == 1
