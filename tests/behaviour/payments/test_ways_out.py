"""Ways out of a request that say less than they seem to: a tunnel, an error inside a loop, a fragment, a dot."""

import itertools
from contextlib import suppress

import anyio
import httpx
import httpx2
import pytest

import x402guard
import x402guard.httpx2
from tests.support.merchant import Shop, make_guard
from tests.support.refusals import fetch
from tests.support.slow_server import Trickler, once_paid, paid_head
from x402guard import Policy, PolicyDenied, X402GuardError
from x402guard.flow.address import address
from x402guard.http.leaving import Leaving

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
def test_a_dot_at_the_end_of_a_host_makes_another_origin(port):
    plain, dotted = (address("https", host, port) for host in (b"Courts.example", b"courts.example."))
    assert (dotted.name, dotted.plain, plain.name) == ("courts.example.", True, "courts.example")
    assert dotted.origin != plain.origin
    at = f":{port or 443}"
    assert {f"courts.example.{at}", f"courts.example{at}"} <= dotted.named
    assert ("courts.example." in dotted.named) is (port != 8443)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("policy", [Policy(), Policy(hosts={"courts.example"}), Policy(hosts={"*.example"})])
@pytest.mark.parametrize("host", ["courts.example.", "courts.example.:8443"])
def test_a_host_with_a_dot_at_its_end_is_not_paid(mode, policy, host):
    seller = Shop()
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(PolicyDenied, match="ends with a dot") as refused:
            fetch(mode, session, seller, url=f"https://{host}/x")
        assert (refused.value.rule, seller.nonces, session.held) == ("hosts", set(), 0)
        seller.terms = httpx.Response(200)
        assert fetch(mode, session, seller, url=f"https://{host}/x").status_code == 200  # what is free passes


def test_a_machine_that_only_looks_local_is_paid_over_https_alone():
    for host in ("localhost.", "127.0.0.1."):
        assert not address("http", host.encode(), None).loopback
