"""Payments that the guard did not make: another payer in the process, and one purchase over two rails."""

import json
from decimal import Decimal

import anyio
import httpx
import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import x402guard
from tests.support import official_sdk
from tests.support.merchant import (
    NETWORK,
    OTHER_PAYEE,
    URL,
    USDC,
    Shop,
    async_client,
    b64,
    client,
    make_guard,
    required,
    required_v1,
)
from tests.support.refusals import events, fetch
from tests.support.slow_server import Trickler
from x402guard import Asset, BudgetExhausted, ConfigError, Policy, PolicyDenied, Rule, refusal_from
from x402guard.testing import Server, Testnet

MODES = pytest.mark.parametrize("mode", ["sync", "async"])
PAYEE = "0x857b06519E91e3A54538791bDbb0E22373e36b66"
HOST = httpx.URL(URL).host
SIGNED = {"from": PAYEE, "to": PAYEE, "value": "250000", "validAfter": "0", "validBefore": "9999999999", "nonce": "0x1"}
PAID = {
    "x402Version": 2,
    "accepted": {"scheme": "exact", "network": NETWORK, "asset": USDC, "amount": "1", "payTo": PAYEE},
    "payload": {"authorization": SIGNED, "signature": "0x00"},
}
PAID_V1 = {"x402Version": 1, "scheme": "exact", "network": "base-sepolia", "payload": PAID["payload"]}
PERMIT = {**PAID, "payload": {"permit2Authorization": {"permitted": {"token": USDC, "amount": "250000"}}}}


def rpc(payment):
    params = {"name": "search", "arguments": {}, "_meta": {"x402/payment": payment}}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


def a2a(payment):
    message = {"messageId": "m", "role": "ROLE_USER", "parts": [], "metadata": {"x402.payment.payload": payment}}
    return {"jsonrpc": "2.0", "id": 1, "method": "SendMessage", "params": {"message": message}}


CARRIED = {
    "PAYMENT-SIGNATURE": {"headers": {"PAYMENT-SIGNATURE": b64(PAID)}},
    "payment-signature, permit2": {"headers": {"payment-signature": b64(PERMIT)}},
    "X-PAYMENT": {"headers": {"X-PAYMENT": b64(PAID_V1)}},
    "JSON-RPC": {"method": "POST", "json": rpc(PAID)},
    "A2A": {"method": "POST", "json": a2a(PAID)},
    "JSON-RPC, a batch": {"method": "POST", "json": [{"jsonrpc": "2.0", "id": 0, "method": "ping"}, rpc(PAID)]},
}
UNREADABLE = {
    "MPP": {"headers": {"Authorization": "Payment eyJjaGFsbGVuZ2UiOiB7fX0"}},
    "MPP, in lower case": {"headers": {"authorization": "payment abc"}},
    "no base64": {"headers": {"PAYMENT-SIGNATURE": "a cheque"}},
    "an unknown token": {"headers": {"X-PAYMENT": b64({**PAID, "accepted": {**PAID["accepted"], "asset": PAYEE}})}},
    "an unknown network": {"headers": {"X-PAYMENT": b64({**PAID_V1, "network": "solana"})}},
    "no amount": {"headers": {"X-PAYMENT": b64({**PAID_V1, "payload": {"authorization": {"value": "1e9"}}})}},
    "JSON-RPC, no object": {"method": "POST", "json": rpc("a cheque")},
    "A2A, no object": {"method": "POST", "json": a2a("a cheque")},
}


def send(mode, session, shop, *, method="GET", url=URL, **asked):
    if mode == "sync":
        with client(session, shop) as http:
            return http.request(method, url, **asked)

    async def main():
        async with async_client(session, _async(shop)) as http:
            return await http.request(method, url, **asked)

    return anyio.run(main)


def _async(function):
    async def answer(request):
        return function(request)

    return answer


def takes_anything(seen):
    def answer(request):
        seen.append(request)
        return httpx.Response(200, text="the goods")

    return answer


@MODES
@pytest.mark.parametrize("carried", [*CARRIED, *UNREADABLE])
def test_a36_a_payment_of_another_client_is_refused(mode, carried):
    seen = []
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(PolicyDenied, match=r"payment of another client.*policy\.foreign_payments") as caught:
            send(mode, session, takes_anything(seen), **(CARRIED | UNREADABLE)[carried])
        assert (caught.value.rule, seen, session.spent, session.held) == ("foreign_payment", [], 0, 0)


def tool_server(seen):
    """A paid tool over MCP: its terms stand in the result of the call, its payment in ``_meta``."""

    def answer(request):
        seen.append(request)
        asked = json.loads(request.content)
        terms = {"x402Version": 2, "accepts": [PAID["accepted"]], "error": "Payment required"}
        if asked["params"]["name"] == "search":
            result = {
                "isError": True,
                "structuredContent": terms,
                "content": [{"type": "text", "text": json.dumps(terms)}],
            }
            return httpx.Response(200, json={"jsonrpc": "2.0", "id": 1, "result": result})
        failed = {"code": 402, "message": "Payment required", "data": terms}
        return httpx.Response(200, json={"jsonrpc": "2.0", "id": 1, "error": failed})

    return answer


@MODES
@pytest.mark.parametrize("quoted", ["search", "translate"])
@pytest.mark.parametrize("called", ["search", "translate"])
@pytest.mark.parametrize("url", [URL, "https://other.example/mcp"], ids=["same server", "another server"])
def test_a37_terms_in_band_are_not_paid_and_no_payment_in_band_leaves_whatever_it_is_for(mode, quoted, called, url):
    """Quoted for one tool of one server; another client's payment leaves with the call of another tool or server."""
    seen = []
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": quoted, "arguments": {}}}
        assert send(mode, session, tool_server(seen), method="POST", json=asked).status_code == 200
        paid = rpc(PAID)
        paid["params"]["name"] = called
        with pytest.raises(PolicyDenied) as caught:
            send(mode, session, tool_server(seen), method="POST", url=url, json=paid)
        assert (caught.value.rule, len(seen), session.spent, session.held) == ("foreign_payment", 1, 0, 0)


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer token, Payment abc"},
        {"Authorization": "Bearer token,pAyMeNt abc"},
        {"Authorization": "Payment\tabc"},
        {"Payment_Signature": b64(PAID)},
        {"x_payment": b64(PAID)},
    ],
    ids=str,
)
def test_a36_a_payment_in_a_header_is_seen_however_it_is_spelled(headers):
    seen = []
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(PolicyDenied, match="another client"):
            send("sync", session, takes_anything(seen), headers=headers)
        send("sync", session, takes_anything(seen), headers={"Authorization": "Bearer payment-token", "X-Paid": "no"})
        assert len(seen) == 1


WORSE = {
    "two payloads": {**PAID, "payload": PAID["payload"] | PERMIT["payload"]},
    "a token of its own": {**PAID, "accepted": {**PAID["accepted"], "asset": PAYEE}},
}


@pytest.mark.parametrize("how", WORSE)
def test_a36_what_may_take_more_than_it_says_cannot_be_booked(how):
    with make_guard(policy=Policy(foreign_payments="book")) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(PolicyDenied, match="cannot be read"):
            send("sync", session, takes_anything([]), headers={"X-PAYMENT": b64(WORSE[how])})


def test_a36_the_dearest_token_counts_because_the_token_is_not_signed():
    cheap = Asset("eip155:84532", OTHER_PAYEE, "CHEAP", 18, "Cheap", "1")
    claims = {**PAID, "accepted": {**PAID["accepted"], "asset": OTHER_PAYEE}}
    with make_guard(policy=Policy(foreign_payments="book"), assets=[cheap]) as guard:
        with guard.session("s", budget="$1.00") as session:
            send("sync", session, takes_anything([]), headers={"X-PAYMENT": b64(claims)})
            assert session.spent == Decimal("0.25")


@pytest.mark.parametrize(
    ("policy", "session", "rule"),
    [
        ({"hosts": {"other.example"}}, {}, "hosts"),
        ({"payees": {"0x" + "11" * 20}}, {}, "payees"),
        ({"per_payment_cap": "$0.20"}, {}, "per_payment_cap"),
        ({"networks": ["eip155:43113"]}, {}, "networks"),
        ({"rules": [Rule(name="r", action="deny", match=f"* {HOST}/*")]}, {}, "r"),
        ({"rules": [Rule(name="r", action="deny", payees=[PAYEE])]}, {}, "r"),
        ({"rules": [Rule(name="r", action="deny", kinds=["payment"], above="$0.20")]}, {}, "r"),
        ({"rules": [Rule(name="r", action="ask", kinds=["payment"], above="$0.20")]}, {}, "r"),
        ({"rules": [Rule(name="r", action="narrow", kinds=["payment"], ceiling="$0.20")]}, {}, "r"),
        ({"rules": [Rule(name="r", action="deny", kinds=["payment"], above="$0.25")]}, {}, None),
        ({"rules": [Rule(name="r", action="narrow", kinds=["payment"], ceiling="$0.25")]}, {}, None),
        ({}, {"hosts": {"other.example"}}, "hosts"),
        ({}, {"payees": {"0x" + "11" * 20}}, "payees"),
        ({}, {"tools": {"search"}}, None),
    ],
)
def test_a36_the_owners_lists_and_rules_hold_for_what_is_booked(policy, session, rule):
    seen = []
    with make_guard(policy=Policy(foreign_payments="book", **policy)) as guard:
        with guard.session("s", budget="$1.00", **session) as opened:
            if rule is None:
                send("sync", opened, takes_anything(seen), **CARRIED["X-PAYMENT"])
            else:
                with pytest.raises(PolicyDenied) as caught:
                    send("sync", opened, takes_anything(seen), **CARRIED["X-PAYMENT"])
                assert (caught.value.rule, opened.spent) == (rule, 0)
            assert len(seen) == (rule is None)


def test_a36_our_own_payment_passes_below_a_transport_that_makes_its_requests_anew(install):
    seen = []

    class Lowest(httpx.HTTPTransport):
        """As a tracing or retrying transport that keeps method, URL, headers and body, and nothing else."""

        def handle_request(self, request):
            return super().handle_request(
                httpx.Request(request.method, request.url, headers=request.headers, content=b"")
            )

    def sell(request):
        seen.append(request.headers.get("payment-signature"))
        if seen[-1]:
            return JSONResponse({})
        return JSONResponse({}, status_code=402, headers={"PAYMENT-REQUIRED": b64(required())})

    install("$1.00")
    with (
        Server(Starlette(routes=[Route("/a", sell)])) as server,
        httpx.Client(transport=Lowest(trust_env=False)) as http,
    ):
        assert http.get(f"{server.url}/a").status_code == 200
    assert [bool(header) for header in seen] == [False, True]


@MODES
@pytest.mark.parametrize("carried", CARRIED)
def test_a36_a_payment_of_another_client_can_be_booked(mode, carried):
    seen = []
    with make_guard(policy=Policy(foreign_payments="book")) as guard, guard.session("s", budget="$0.60") as session:
        for _ in range(2):  # the same payment, presented again, is one
            assert send(mode, session, takes_anything(seen), **CARRIED[carried]).text == "the goods"
        assert (session.spent, session.held) == (Decimal("0.25"), 0)
        [row] = [event for event in events(session, "authorize") if event["tool"] == "foreign_payment"]
        assert row["amount"] == "0.25"
    with make_guard(policy=Policy(foreign_payments="book")) as guard, guard.session("s", budget="$0.20") as session:
        with pytest.raises(BudgetExhausted):
            send(mode, session, takes_anything(seen), **CARRIED[carried])
        assert (len(seen), session.spent) == (2, 0)


@pytest.mark.parametrize("carried", UNREADABLE)
def test_a36_what_cannot_be_read_cannot_be_booked(carried):
    seen = []
    with make_guard(policy=Policy(foreign_payments="book")) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(PolicyDenied, match="its amount cannot be read"):
            send("sync", session, takes_anything(seen), **UNREADABLE[carried])
        assert (seen, session.spent) == ([], 0)


def test_a36_the_owners_rules_see_what_is_booked():
    policy = Policy(foreign_payments="book", rules=[Rule(name="none", action="deny", match="foreign_payment")])
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(PolicyDenied) as caught:
            send("sync", session, takes_anything([]), **CARRIED["X-PAYMENT"])
        assert caught.value.rule == "none"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": 'what is _meta["x402/payment"]?'}]},
        {"params": {"x402/payment": PAID}},
        {"params": {"_meta": {"progressToken": "x402/payment"}}},
        {"_meta": {"x402/payment": PAID}},
    ],
)
def test_a36_words_about_payments_are_no_payment(body):
    seen = []
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        assert send("sync", session, takes_anything(seen), method="POST", json=body).text == "the goods"
        assert len(seen) == 1


@MODES
def test_a36_a_receipt_that_was_not_bought_is_an_event(mode):
    def answer(_request):
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64({"success": True})})

    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        for _ in range(2):
            send(mode, session, answer)
        assert [event["place"] for event in events(session, "foreign_receipt")] == ["GET courts.example/opinion/42"]
        fetch(mode, session, Shop(), url="https://other.example/a")  # with a receipt of ours
        assert len(events(session, "foreign_receipt")) == 1


@pytest.mark.parametrize("choice", ["", "Refuse", None, True])
def test_a36_the_choice_is_one_of_three(choice):
    with pytest.raises(ConfigError, match=r"^policy\.foreign_payments: "):
        Policy(foreign_payments=choice)


@pytest.fixture(scope="module")
def net():
    with Testnet() as net:
        yield net


@pytest.fixture
def install(tmp_path):
    def install(budget, net=None, **policy):
        guard = make_guard(f"sqlite:///{tmp_path}/l.db", policy=Policy(**policy))
        guards.append(guard)
        return x402guard.install(budget, guard=guard)

    guards = []
    yield install
    x402guard.uninstall()
    for guard in guards:
        guard.close()


@pytest.mark.chain
@pytest.mark.xdist_group("foreign")
def test_a36_the_official_sdk_pays_nothing_under_install(net, install):
    session, before = install("$0.000001"), net.balance(net.payer)
    with pytest.raises(Exception, match=r"."):  # the SDK's own class; behind it is the refusal
        official_sdk.pay(net.payer_key, "GET", f"{net.merchant.url}/documents/1")
    assert net.balance(net.payer) == before
    [refusal] = session.report().to_dict()["refusals"]
    assert (refusal["rule"], refusal["count"]) == ("foreign_payment", 1)


@pytest.mark.chain
@pytest.mark.xdist_group("foreign")
def test_a36_the_refusal_is_found_behind_the_sdks_error(net, install):
    install("$1.00")
    try:
        official_sdk.pay(net.payer_key, "GET", f"{net.merchant.url}/documents/1")
    except Exception as error:
        assert refusal_from(error).rule == "foreign_payment"
    else:
        pytest.fail("it paid")


@pytest.mark.chain
@pytest.mark.xdist_group("foreign")
def test_a36_the_official_sdks_payment_is_booked_if_the_policy_says_so(net, install):
    session, before = install("$0.15", foreign_payments="book"), net.balance(net.payer)
    response, _ = official_sdk.pay(net.payer_key, "GET", f"{net.merchant.url}/documents/1")
    assert response.status_code == 200
    assert before - net.balance(net.payer) == 100_000
    assert (session.spent, session.held) == (Decimal("0.10"), 0)
    with pytest.raises(Exception, match=r"."):
        official_sdk.pay(net.payer_key, "GET", f"{net.merchant.url}/documents/2")
    assert before - net.balance(net.payer) == 100_000


@MODES
@pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
def test_a36_a_payment_is_seen_where_the_librarys_own_transport_sends(mode, library, install):
    """A transport that has its own idea of payments stands below the guard, and copies all extensions."""
    session = install("$1.00")

    def paying(request):
        headers = {**request.headers, "PAYMENT-SIGNATURE": b64(PAID)}
        return library.Request(request.method, request.url, headers=headers, extensions=dict(request.extensions))

    class Sync(library.HTTPTransport):
        def handle_request(self, request):
            return super().handle_request(paying(request))

    class Async(library.AsyncHTTPTransport):
        async def handle_async_request(self, request):
            return await super().handle_async_request(paying(request))

    async def ask(url):
        async with library.AsyncClient(transport=Async(trust_env=False)) as http:
            return await http.get(url)

    def sent(url):
        if mode == "async":
            return anyio.run(ask, url)
        with library.Client(transport=Sync(trust_env=False)) as http:
            return http.get(url)

    with Trickler() as server:
        if library is httpx:
            with pytest.raises(PolicyDenied, match="another client"):
                sent(server.url)
        else:  # httpx2's guards answer
            assert "another client" in sent(server.url).json()["detail"]
    assert session.report().to_dict()["refusals"][0]["rule"] == "foreign_payment"


TWO_RAILS = {"WWW-Authenticate": 'Payment id="x", realm="shop", method="tempo", intent="charge", request="e30"'}


@MODES
def test_a38_one_purchase_over_two_rails_is_paid_once(mode):
    """A 402 has x402's terms and another protocol's; a client of that one stands above the guard."""
    shop = Shop()

    def server(request):
        response = shop(request)
        if response.status_code == 402:
            response.headers.update(TWO_RAILS)
        return response

    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        assert send(mode, session, server).status_code == 200  # paid by x402, so the other client never sees a 402
        with pytest.raises(PolicyDenied, match="Payment"):
            send(mode, session, server, headers={"Authorization": "Payment abc"})
        assert (len(shop.payments), session.spent) == (1, Decimal("0.01"))


@MODES
def test_a38_what_another_rail_has_paid_is_not_paid_again(mode):
    """The owner allows the other rail; its payment is not enough for this server, which asks again."""
    shop = Shop()
    with make_guard(policy=Policy(foreign_payments="allow")) as guard, guard.session("s", budget="$1.00") as session:
        assert send(mode, session, shop, headers={"Authorization": "Payment abc"}).status_code == 402
        assert (shop.payments, session.spent, session.held) == ([], 0, 0)


@MODES
@pytest.mark.parametrize("terms", [required(), required_v1()], ids=["v2", "v1"])
def test_a36_our_own_payment_passes_the_librarys_own_transport(mode, terms, install):
    paid = []

    async def sell(request):
        name = "payment-signature" if terms["x402Version"] == 2 else "x-payment"
        if name in request.headers:
            paid.append(request.headers[name])
            return JSONResponse({})
        headers = {"PAYMENT-REQUIRED": b64(terms)} if terms["x402Version"] == 2 else {}
        return JSONResponse(terms, status_code=402, headers=headers)

    async def ask(url):
        async with httpx.AsyncClient(trust_env=False) as http:
            return await http.get(url)

    install("$1.00", resource_mismatch="warn")
    with Server(Starlette(routes=[Route("/a", sell)])) as server:
        if mode == "async":
            answer = anyio.run(ask, f"{server.url}/a")
        else:
            with httpx.Client(trust_env=False) as http:
                answer = http.get(f"{server.url}/a")
    assert (answer.status_code, len(paid)) == (200, 1)
    assert json.loads(answer.text) == {}
