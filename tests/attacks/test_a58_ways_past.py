"""What leaves is what was judged: odd hosts, upgrades, proxies and mounts, and errors that keep the paid request."""

import warnings

import anyio
import httpx
import httpx2
import pytest

import x402guard.httpx2
from tests.support.merchant import URL, Shop, make_guard
from tests.support.refusals import fetch
from x402guard import AsyncGuardedTransport, GuardedTransport, Metering, PolicyDenied, SettlementUncertain, Unpriced
from x402guard.guard.unseen import clients_past_guard

MODES = pytest.mark.parametrize("mode", ["sync", "async"])


@MODES
@pytest.mark.parametrize(
    "host", ["courts.example;evil.example", "courts!example", "a$b", "courts.example,x", "cou*ts.example", "(a)"]
)
def test_a58_a_host_of_odd_characters_is_refused(mode, host):
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(PolicyDenied, match="other characters") as caught:
            fetch(mode, session, shop, url=f"https://{host}/a")
        assert (caught.value.rule, caught.value.detail, shop.seen) == ("host", repr(host), [])


@pytest.mark.parametrize(
    "host", ["courts.example", "a_b-c.example:8443", "127.0.0.1", "[::1]:8402", "[2001:db8::1]", "x"]
)
def test_a58_a_plain_host_passes(host):
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        assert fetch("sync", session, shop, url=f"https://{host}/a").status_code == 200


@MODES
@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/chat/completions"])
def test_a58_an_upgrade_of_a_metered_host_is_unpriced(mode, path):
    seen = []

    def server(request):
        seen.append(request)
        return httpx.Response(101)

    async def answer(request):
        return server(request)

    headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
    with make_guard(metering=Metering()) as guard, guard.session("s", budget="$1.00") as session:
        asked = server if mode == "sync" else answer
        with pytest.raises(Unpriced, match="upgrades the connection"):
            fetch(mode, session, asked, url=f"https://api.openai.com{path}", headers=headers)
        assert (seen, session.spent) == ([], 0)
        fetch(mode, session, asked, url="https://courts.example/live", headers=headers)
        assert len(seen) == 1


OURS = {httpx: x402guard, httpx2: x402guard.httpx2}
PAST = {
    "proxy": (lambda library: {"proxy": "http://127.0.0.1:9"}, "all://"),
    "mounts": (lambda library: {"mounts": {"https://api.example": library.HTTPTransport()}}, "https://api.example"),
}


@pytest.mark.parametrize("way", PAST)
@pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
def test_a58_a_client_whose_proxy_or_mounts_go_past_its_guard_is_found(library, way):
    make, pattern = PAST[way]
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        transport = OURS[library].GuardedTransport(session)
        with library.Client(transport=transport, **make(library)):
            [told] = clients_past_guard()
            assert told.startswith(f"{library.__name__}.Client sends {pattern} past its guarded transport")
            with make_guard() as installed, warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                x402guard.install("$1.00", guard=installed)
                x402guard.uninstall()
            assert any("past its guarded transport" in str(warning.message) for warning in said)


@pytest.mark.parametrize(
    "make",
    [
        lambda guarded: httpx.Client(transport=guarded),
        lambda guarded: httpx.Client(proxy="http://127.0.0.1:9"),
        lambda guarded: httpx.Client(transport=guarded, mounts={"https://api.example": guarded, "all://x": None}),
    ],
    ids=["guarded", "not guarded at all", "guarded mounts"],
)
def test_a58_another_client_is_not_found(make):
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, make(GuardedTransport(session)):
        assert clients_past_guard() == []


def _from_cause(request):
    raise KeyError("gone") from ValueError(request)


def _from_context(request):
    try:
        raise httpx.ReadError("gone", request=request)
    except httpx.ReadError:
        raise KeyError("gone")  # noqa: B904 - the context is what is tested


def _group(request):
    raise ExceptionGroup(
        "gone", [ValueError("other"), ExceptionGroup("in it", [httpx.ReadError("x", request=request)])]
    )


def _args(request):
    raise KeyError("gone", request, ValueError(request))


def _response(request):
    raise httpx.HTTPStatusError("gone", request=request, response=httpx.Response(500, request=request))


def _attribute(request):
    error = KeyError("gone")
    error.sent = request
    raise error


def _copied(request):
    """As an SDK does that makes its own request of ours."""
    copy = httpx.Request(request.method, request.url, headers=request.headers)
    raise KeyError("gone", copy) from httpx.ReadError("x", request=copy)


@MODES
@pytest.mark.parametrize("fail", [_from_cause, _from_context, _group, _args, _response, _attribute, _copied])
def test_a58_an_error_that_keeps_the_paid_request_keeps_no_header(mode, fail):
    shop, kept = Shop(paid=lambda request, _shop: fail(request)), []

    class Watching:
        """Finds every request that hangs on an error, as a crash report does."""

        def __init__(self, error):
            self.seen, self.error = set(), error

        def walk(self, part):
            if part is None or id(part) in self.seen:
                return
            self.seen.add(id(part))
            if isinstance(part, httpx.Request):
                kept.append(part)
            if isinstance(part, httpx.Response):
                self.walk(getattr(part, "_request", None))
            if isinstance(part, BaseException):
                for kept_part in (part.__cause__, part.__context__, *vars(part).values()):
                    self.walk(kept_part)
                for inner in (*part.args, *getattr(part, "exceptions", ())):
                    self.walk(inner)

    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(SettlementUncertain) as caught:
            if mode == "sync":
                with httpx.Client(transport=GuardedTransport(session, httpx.MockTransport(shop))) as http:
                    http.get(URL)
            else:
                anyio.run(_ask, session, shop)
        assert len(shop.payments) == 1
        Watching(caught.value).walk(caught.value)
        assert kept
        assert not [request for request in kept if {"payment-signature", "x-payment"} & request.headers.keys()]


async def _ask(session, shop):
    async def answer(request):
        return shop(request)

    async with httpx.AsyncClient(transport=AsyncGuardedTransport(session, httpx.MockTransport(answer))) as http:
        await http.get(URL)
