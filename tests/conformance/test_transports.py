"""One suite for both transports: what goes in, what comes out, and what the books say in between."""

import gzip
import io
from decimal import Decimal

import anyio
import httpx
import pytest

from tests.support.merchant import (
    PAYEE,
    URL,
    Shop,
    accept,
    async_client,
    b64,
    client,
    make_guard,
    permit2,
    receipt,
    required,
    required_v1,
    upto,
)
from x402guard import AlreadyPaid, BudgetExhausted, ConfigError, Policy, PolicyDenied, SettlementUncertain, Timeouts


class Both:
    """Sends a request through the sync or the async transport, and hands back what the caller would have."""

    def __init__(self, kind):
        self.kind = kind

    def send(self, payer, shop, method="GET", url=URL, *, read=True, **options):
        more = {key: options.pop(key) for key in ("on_refusal", "follow_redirects") if key in options}
        if self.kind == "sync":
            with client(payer, shop, **more) as http:
                return self._sync(http, method, url, read, options)
        return anyio.run(self._async, payer, shop, method, url, more, options)

    def _sync(self, http, method, url, read, options):
        if isinstance(options.get("content"), list):
            options["content"] = iter(options["content"])
        return http.request(method, url, **options)

    async def _async(self, payer, shop, method, url, more, options):
        if isinstance(options.get("content"), list):
            options["content"] = stream(options["content"])
        async with async_client(payer, shop, **more) as http:
            return await http.request(method, url, **options)


async def stream(chunks):
    for chunk in chunks:
        yield chunk


@pytest.fixture(params=["sync", "async"])
def both(request):
    return Both(request.param)


@pytest.fixture
def session():
    with make_guard() as guard, guard.session("test", budget="$1.00") as session:
        yield session


def test_a_402_is_paid_and_the_answer_handed_over(both, session):
    shop = Shop()
    response = both.send(session, shop)
    assert (response.status_code, response.json()) == (200, {"paid": 10_000, "path": "/opinion/42"})
    paid = response.extensions["x402guard"]
    assert (paid.amount, paid.evidence, paid.state, paid.in_doubt) == (Decimal("0.01"), "claimed", "captured", False)
    assert paid.hold_id == f"{shop.payments[0][0]:064x}"
    assert (session.spent, session.held, session.remaining) == (Decimal("0.01"), 0, Decimal("0.99"))
    assert response.request.url == URL
    assert "payment-signature" not in response.request.headers


def test_what_costs_nothing_passes_untouched(both, session):
    def free(request):
        return httpx.Response(200, headers={"x-own": "1"}, content=b"hello")

    response = both.send(session, free)
    assert (response.content, response.headers["x-own"]) == (b"hello", "1")
    assert "x402guard" not in response.extensions
    assert session.report().to_dict()["events"] == []


@pytest.mark.parametrize("offer", [accept(), permit2(), upto()], ids=["eip3009", "permit2", "upto"])
def test_every_scheme_is_signed_and_recovers_to_the_payer(both, session, offer):
    shop = Shop(required(offer))
    assert both.send(session, shop).status_code == 200
    [(_, amount, payee)] = shop.payments
    assert (amount, payee) == (int(offer["amount"]), PAYEE)


def test_an_upto_without_a_chain_stays_held_in_full_beside_its_claim(both, session):
    def charge(request, shop):
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(amount="12345"))})

    response = both.send(session, Shop(required(upto()), paid=charge))
    paid = response.extensions["x402guard"]
    assert (paid.state, paid.amount, paid.in_doubt) == ("held", Decimal("0.05"), False)
    assert session.held == Decimal("0.05")
    claims = [e["claim"]["amount"] for e in session.report().to_dict()["events"] if "claim" in e]
    assert claims == ["0.012345"]


def test_v1_is_paid_with_its_own_header(both, session):
    shop = Shop(required_v1())
    assert both.send(session, shop).status_code == 200
    assert "x-payment" in shop.seen[-1].headers
    assert "payment-signature" not in shop.seen[-1].headers


@pytest.mark.parametrize(
    "body",
    [
        {"json": {"q": "röm"}},
        {"content": b"\x00\xff" * 1000},
        {"content": [b"one ", b"two ", b"three"]},
        {"files": {"f": ("n.txt", io.BytesIO(b"file"), "text/plain")}},
    ],
    ids=["json", "bytes", "generator", "multipart"],
)
def test_a_post_body_survives_the_retry(both, session, body):
    bodies = []

    def echo(request, shop):
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())}, content=request.content)

    def terms(request):
        bodies.append(request.content)
        return required()

    if both.kind == "async" and "files" in body:
        body = {"files": {"f": ("n.txt", b"file", "text/plain")}}
    response = both.send(session, Shop(terms, paid=echo), "POST", **body)
    assert len(bodies[0]) > 4
    assert response.content == bodies[0]


def test_a_body_beyond_the_limit_streams_on_and_is_not_paid_for(both):
    seen = []

    def terms(request):
        seen.append(request.content)
        return required()

    with make_guard(max_body_bytes=10) as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(PolicyDenied, match="not_replayable"):
            both.send(session, Shop(terms), "POST", content=[b"12345678", b"90abc", b"def"])
        assert seen == [b"1234567890abcdef"]
        assert session.held == session.spent == 0


def test_a_large_body_that_is_not_charged_for_arrives_whole(both):
    def free(request):
        return httpx.Response(200, content=request.content)

    with make_guard(max_body_bytes=10) as guard, guard.session("s", budget="$1") as session:
        chunks = [bytes([65 + n]) * 7 for n in range(20)]
        shop = free if both.kind == "sync" else _reader
        assert both.send(session, shop, "POST", content=chunks).content == b"".join(chunks)


async def _reader(request):
    return httpx.Response(200, content=await request.aread())


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(402, content=b"pay me by cheque"),
        httpx.Response(402, json={"error": "quota"}),
        httpx.Response(402, json=["x402Version"]),
        httpx.Response(
            402,
            headers={"content-type": "application/json", "content-encoding": "gzip"},
            content=gzip.compress(b'{"a": 1}'),
        ),
        httpx.Response(402, headers={"PAYMENT-RESPONSE": b64(receipt(success=False, transaction=""))}, json={}),
    ],
    ids=["text", "json", "list", "gzip", "failed settlement"],
)
def test_not_every_402_is_an_offer(both, session, response):
    def answer(request):
        stream = (
            httpx.ByteStream(response.content)
            if response.headers.get("content-encoding") is None
            else httpx.ByteStream(gzip.compress(b'{"a": 1}'))
        )
        return httpx.Response(402, headers=response.headers, stream=stream)

    got = both.send(session, Shop(answer))
    assert (got.status_code, got.content) == (402, response.content)
    assert session.held == session.spent == 0
    assert session.report().to_dict()["refusals"] == []


def test_a_refusal_is_raised_with_the_request_and_counted(both, session):
    with pytest.raises(PolicyDenied) as caught:
        both.send(session, Shop(required(accept(2_000_000))))
    error = caught.value
    assert (error.rule, error.requested, error.available) == ("per_payment_cap", 2, 1)
    assert error.session == session.id
    assert error.request.url == URL
    assert (error.money_may_have_moved, error.phase) == (False, "policy")
    [row] = session.report().to_dict()["refusals"]
    assert (row["rule"], row["count"], row["requested"], row["available"]) == ("per_payment_cap", 1, "2.00", "1.00")
    assert not isinstance(error, httpx.RequestError)


def test_a_refusal_can_be_an_answer_instead(both, session):
    response = both.send(session, Shop(required(accept(2_000_000))), on_refusal="respond")
    assert response.status_code == 402
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["x-should-retry"] == "false"
    assert "payment-required" not in response.headers
    problem = response.json()
    assert (problem["rule"], problem["requested"], problem["available"]) == ("per_payment_cap", "2.00", "1.00")
    assert problem["money_may_have_moved"] is False
    assert session.held == session.spent == 0


def test_the_last_dollar_is_refused_before_signing(both):
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$0.02") as session:
        for number in range(2):
            both.send(session, shop, url=f"{URL}/{number}")
        with pytest.raises(BudgetExhausted) as caught:
            both.send(session, shop, url=f"{URL}/3")
        assert (caught.value.requested, caught.value.available) == (Decimal("0.01"), 0)
    assert shop.signed == 20_000


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("budget", "calls"), [("$0.01", 1), ("$0.05", 5), ("$0.10", 10), ("$0.50", 50), ("$1.00", 100)]
)
def test_a_budget_allows_exactly_its_cents(both, ledger_url, budget, calls):
    shop = Shop()
    with make_guard(ledger_url) as guard, guard.session("s", budget=budget) as session:
        for number in range(calls):
            assert both.send(session, shop, url=f"{URL}/{number}").status_code == 200
        with pytest.raises(BudgetExhausted):
            both.send(session, shop, url=f"{URL}/last")
        assert session.remaining == session.held == 0
    assert (len(shop.nonces), shop.signed) == (calls, calls * 10_000)


def test_a_lost_answer_is_uncertain_and_asking_again_presents_the_same_payment(both, session):
    shop = Shop(paid=httpx.ReadError("reset"))
    with pytest.raises(SettlementUncertain) as caught:
        both.send(session, shop)
    error = caught.value
    assert (error.money_may_have_moved, error.retry) == (True, "same_request")
    assert session.held == Decimal("0.01")
    shop.paid = None
    response = both.send(session, shop)
    assert response.extensions["x402guard"].represented is True
    assert response.extensions["x402guard"].hold_id == error.hold_id
    assert len(shop.nonces) == 1
    assert (session.spent, session.held) == (Decimal("0.01"), 0)


def test_pay_again_signs_a_second_payment_fully_held(both, session):
    shop = Shop(paid=httpx.ReadError("reset"))
    with pytest.raises(SettlementUncertain):
        both.send(session, shop)
    shop.paid = None
    both.send(session, shop, extensions={"pay_again": True})
    assert len(shop.nonces) == 2
    assert (session.spent, session.held) == (Decimal("0.01"), Decimal("0.01"))


@pytest.mark.parametrize("name", [{"extensions": {"purchase": "order-7"}}, {"headers": {"Idempotency-Key": "order-7"}}])
def test_a_purchase_has_a_name_of_the_callers(both, session, name):
    shop = Shop(paid=httpx.ReadError("reset"))
    with pytest.raises(SettlementUncertain):
        both.send(session, shop, "POST", json={"stamp": 1}, **name)
    shop.paid = None
    both.send(session, shop, "POST", json={"stamp": 2}, **name)
    assert len(shop.nonces) == 1
    with pytest.raises(AlreadyPaid):  # the name has its answer
        both.send(session, shop, "POST", json={"stamp": 3}, **name)
    assert len(shop.nonces) == 1


def test_the_callers_own_headers_and_extensions_survive(both, session):
    shop = Shop()
    limits = {"connect": 2.0, "read": 3.0}
    both.send(session, shop, headers={"authorization": "Bearer x", "x-own": "1"}, extensions={"timeout": limits})
    for request in shop.seen:
        assert (request.headers["authorization"], request.headers["x-own"]) == ("Bearer x", "1")
    free, paid = shop.seen
    assert free.extensions["timeout"] == limits
    assert paid.extensions["timeout"] == {"connect": 2.0, "read": 60}  # the offer's maxTimeoutSeconds


@pytest.mark.parametrize(
    ("asked", "limits", "settings", "read_s"),
    [
        (12, {"read": 5.0}, {}, 12),  # the offer's, where the client would be shorter
        (12, {"read": 90.0}, {}, 90.0),  # the client's own, where the offer would be
        (12, {"read": None}, {}, None),
        (600, {"read": 5.0}, {}, 240),  # 240 s at most
        (12, {"read": 400.0}, {}, 400.0),  # a piece may take as long as the client says; the whole answer 240 s
        (60, {"read": 5.0}, {"payment_s": 10}, 10),  # unless the owner says less
        (60, {"read": 5.0}, {"payment_s": None}, 60),
        (60, {"read": 5.0}, {"payment_s": 600}, 60),
    ],
)
def test_a_paid_request_waits_as_long_as_offer_and_client_allow(both, asked, limits, settings, read_s):
    shop = Shop(required(accept(maxTimeoutSeconds=asked)))
    policy = Policy(timeouts=Timeouts(**settings))
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1") as session:
        both.send(session, shop, extensions={"timeout": limits})
    free, paid = shop.seen
    assert (free.extensions["timeout"], paid.extensions["timeout"]) == (limits, {"read": read_s})


def test_a_caller_who_pays_itself_is_left_alone_if_the_policy_says_so(both):
    def answer(request):
        return httpx.Response(402, headers={"PAYMENT-REQUIRED": b64(required())}, json={})

    asked = answer if both.kind == "sync" else _async(answer)
    policy = Policy(foreign_payments="allow")
    with make_guard(policy=policy) as guard, guard.session("test", budget="$1.00") as session:
        response = both.send(session, asked, headers={"PAYMENT-SIGNATURE": "mine"})
        assert response.status_code == 402
        assert session.held == session.spent == 0


def _async(function):
    async def answer(request):
        return function(request)

    return answer


def test_a_shared_client_pays_from_the_session_in_context(both):
    shop = Shop()
    with make_guard() as guard:
        with pytest.raises(ConfigError, match="no session"):
            both.send(guard, shop)
        with guard.session("one", budget="$1") as one:
            both.send(guard, shop)
        with guard.session("two", budget="$1") as two:
            both.send(guard, shop)
            both.send(guard, shop)
        assert (one.spent, two.spent) == (Decimal("0.01"), Decimal("0.02"))


def test_the_innermost_budget_pays_if_it_is_inside_the_transports_session(both, session):
    shop = Shop()
    with session.scope("$0.015"):
        both.send(session, shop)
        with pytest.raises(BudgetExhausted):
            both.send(session, shop)
    both.send(session, shop)
    assert session.spent == Decimal("0.02")
    child = session.child("scraper", budget="$0.50")
    both.send(child, shop)  # outside the child's block its own client still pays from it
    assert child.spent == Decimal("0.01")


def test_a_foreign_session_in_context_is_a_config_error(both, session):
    with make_guard() as other, other.session("elsewhere", budget="$1"):
        with pytest.raises(ConfigError, match="not inside it"):
            both.send(session, Shop())


@pytest.mark.parametrize("status", [200, 204, 302, 404, 500, 503])
def test_every_other_status_is_handed_over(both, session, status):
    response = both.send(session, Shop(lambda request: httpx.Response(status)))
    assert response.status_code == status


def test_without_a_signer_nothing_is_paid():
    with make_guard(signer=None) as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(PolicyDenied, match="no_signer"):
            client(session, Shop()).get(URL)


def test_the_cheapest_payable_offer_is_taken(both, session):
    offers = [
        {"scheme": "exotic", "network": "solana:x", "anything": 1},
        accept(
            5_000,
            network="eip155:8453",
            asset="0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913",
            extra={"name": "USD Coin", "version": "2"},
        ),
        permit2(20_000),
        accept(20_000),
        accept(30_000),
    ]
    shop = Shop(required(*offers))
    both.send(session, shop)
    assert shop.payments[0][1] == 20_000
    from tests.support.merchant import unb64

    assert "authorization" in unb64(shop.seen[-1].headers["payment-signature"])["payload"]  # EIP-3009 before Permit2


def test_an_offer_list_with_nothing_payable_says_why_for_each():
    offers = [
        accept(2_000_000),
        accept(network="eip155:8453", asset="0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913", extra=None),
    ]
    from x402guard import NoAcceptableOffer

    with make_guard(policy=Policy()) as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(NoAcceptableOffer, match=r"\(1\) per_payment_cap.*\(2\) networks"):
            client(session, Shop(required(*offers))).get(URL)
