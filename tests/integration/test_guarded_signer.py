"""Clients of the official SDK with the guard behind them, against the official server, on a chain."""

import asyncio
import contextvars
import gc
import pickle
import time
from decimal import Decimal

import httpx
import pytest
import rich.pretty
from x402.http.clients.httpx import x402AsyncTransport, x402HttpxClient
from x402.http.clients.requests import x402_requests
from x402.mechanisms.evm.exact import ExactEvmScheme
from x402.schemas import PaymentRequired, RecoveredResponseResult

import x402guard
from tests.support import official_sdk
from tests.support.chain import MockChain
from tests.support.merchant import KEY, accept, required, required_v1
from tests.support.slow_server import CHUNKED, HEAD, Trickler, once_paid, paid_head
from x402guard import BudgetExhausted, ConfigError, Guard, GuardedSigner, LocalSigner, Policy, PolicyDenied
from x402guard.testing import Server

pytestmark = [pytest.mark.chain]
PAYEE = "0x857b06519E91e3A54538791bDbb0E22373e36b66"
DIME = Decimal("0.1")


@pytest.fixture(scope="module")
def shop(net):
    app = official_sdk.merchant_app(facilitator_url=net.facilitator, network=net.network, payee=PAYEE, token=net.token)
    with Server(app) as server:
        yield server


def causes(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("sale", ["GET /documents/1", "GET /permit2/1", "POST /llm"])
def test_the_async_client_pays_by_every_scheme(net, shop, guarded, sale):
    method, path = sale.split()
    before = net.balance(net.payer)
    with guarded() as guard, guard.session("s", budget="$1.00") as session:
        client = GuardedSigner(session).client()

        async def go():
            transport = x402AsyncTransport(client)
            async with httpx.AsyncClient(transport=transport, timeout=30, trust_env=False) as http:
                return await http.request(method, shop.url + path)

        answer = asyncio.run(go())
        assert answer.status_code == 200, answer.text
        session.reconcile()
        assert (session.spent, session.held) == (Decimal(before - net.balance(net.payer)) / 10**6, 0)
        assert session.spent > 0


def test_the_httpx_client_and_requests_pay(net, shop, guarded):
    before = net.balance(net.payer)
    with guarded() as guard, guard.session("s", budget="$1.00") as session:

        async def go():
            async with x402HttpxClient(GuardedSigner(session).client(), timeout=30) as http:
                return await http.get(f"{shop.url}/documents/2")

        assert asyncio.run(go()).status_code == 200
        with x402_requests(GuardedSigner(session).client_sync()) as http:
            http.trust_env = False
            assert http.get(f"{shop.url}/documents/3", timeout=30).status_code == 200
            assert http.get(f"{shop.url}/free", timeout=30).status_code == 200
        assert (session.spent, session.held) == (2 * DIME, 0)
    assert before - net.balance(net.payer) == 200_000


def test_32_calls_at_once_on_a_budget_for_ten_buy_exactly_ten(net, shop, guarded):
    before = net.balance(net.payer)
    with guarded() as guard, guard.session("s", budget="$1.00") as session:
        client = GuardedSigner(session).client()
        bought, refused = [], []

        async def one(http, number):
            try:
                answer = await http.get(f"{shop.url}/documents/{number}")
                bought.append(answer.status_code)
            except Exception as error:
                assert any(isinstance(each, BudgetExhausted) for each in causes(error)), error
                refused.append(number)

        async def go():
            limits = httpx.Limits(max_connections=8)
            async with httpx.AsyncClient(
                transport=x402AsyncTransport(client, transport=httpx.AsyncHTTPTransport(limits=limits)),
                timeout=120, trust_env=False,
            ) as http:  # fmt: skip
                await asyncio.gather(*(one(http, number) for number in range(32)))

        asyncio.run(go())
        assert (bought, len(refused)) == ([200] * 10, 22)
        session.reconcile()
        assert (session.spent, session.held) == (Decimal("1.0"), 0)
    assert before - net.balance(net.payer) == 1_000_000


def test_the_policy_refuses_before_anything_is_signed(net, shop, guarded):
    with guarded(policy=Policy(per_payment_cap="$0.05", breaker=None)) as guard:
        with guard.session("s", budget="$1.00") as session:
            client = GuardedSigner(session).client()

            async def go():
                async with httpx.AsyncClient(transport=x402AsyncTransport(client), trust_env=False) as http:
                    await http.get(f"{shop.url}/documents/4")

            with pytest.raises(Exception) as caught:
                asyncio.run(go())
            [refusal] = {each for each in causes(caught.value) if isinstance(each, PolicyDenied)}
            assert refusal.rule == "per_payment_cap"
            assert (session.spent, session.held) == (0, 0)


def test_what_cannot_be_guarded_is_refused_by_name():
    with Guard(ledger="memory://") as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(ConfigError, match=r"session: .* is neither a Session nor a Guard"):
            GuardedSigner(MockChain())
        with pytest.raises(ConfigError, match=r"session: <class .* is neither a Session nor a Guard"):
            GuardedSigner(Guard)
        for client in (GuardedSigner(session).client(), GuardedSigner(session).client_sync()):
            for register in (client._client.register, client._client.register_v1):
                with pytest.raises(ConfigError, match="client: GuardedSigner signs every scheme itself"):
                    register("eip155:*", ExactEvmScheme(object()))


# -- answers that are lost, in every way that the SDK tells nothing of ------------------------------------------------------------


def _broken(line):
    return False


def _error(line):
    line.send(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy")


def _again(line):
    line.offer()


def _no_receipt(line):
    line.send(HEAD + b"content-length: 4\r\n\r\nsold")


def _cut(line):
    line.send(HEAD + CHUNKED + b"4\r\nhalf\r\n")
    return False


def _cut_with_receipt(line):
    line.send(paid_head(CHUNKED) + b"4\r\nhalf\r\n")
    return False


LOST = {"no answer": _broken, "5xx": _error, "402 again": _again}


@pytest.fixture
def trickler():
    with Trickler() as shop:
        yield shop


class Awaited:
    follow = False

    def __init__(self, session):
        self.client = GuardedSigner(session).client()

    def get(self, url):
        async def go():
            async with x402HttpxClient(self.client, timeout=30, trust_env=False, follow_redirects=self.follow) as http:
                answer = await http.get(url)
                return answer.status_code

        return asyncio.run(go())


class Blocking:
    follow = False

    def __init__(self, session):
        self.client = GuardedSigner(session).client_sync()

    def get(self, url):
        with x402_requests(self.client) as http:
            http.trust_env = False
            return http.get(url, timeout=30, allow_redirects=self.follow).status_code


BOTH = pytest.mark.parametrize("way", [Awaited, Blocking])


def attempt(client, url):
    try:
        return client.get(url)
    except Exception as error:
        return type(error).__name__


@BOTH
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("lost", LOST)
def test_a_lost_answer_presents_the_same_payment_again(guarded, trickler, way, version, lost):
    trickler.terms = required(accept(), url=f"{trickler.url}/lost") if version == 2 else required_v1()
    trickler.answers["/lost"] = once_paid(LOST[lost])
    with guarded(chains=None) as guard, guard.session("s", budget="$1.00") as session:
        client = way(session)
        for _ in range(3):
            attempt(client, f"{trickler.url}/lost")
            gc.collect()
        assert len(trickler.nonces) >= 2
        assert len(set(trickler.nonces)) == 1
        assert session.spent + session.held == Decimal("0.01")


@BOTH
@pytest.mark.parametrize("cut", [_cut, _cut_with_receipt])
def test_what_the_sdk_does_not_show_is_counted_all_the_same(guarded, trickler, way, cut):
    """It shows no body: one that breaks after a good head is taken for whole, and the next call is a new purchase."""
    trickler.answers["/cut"] = once_paid(cut)
    with guarded(chains=None) as guard, guard.session("s", budget="$0.02") as session:
        for _ in range(4):
            attempt(way(session), f"{trickler.url}/cut")
        assert len(set(trickler.nonces)) == 2
        assert session.spent + session.held == Decimal("0.02")


@BOTH
def test_a_retry_within_the_handling_of_the_error_presents_it_again_at_once(guarded, trickler, way):
    trickler.answers["/lost"] = once_paid(_broken)
    with guarded(chains=None) as guard, guard.session("s", budget="$1.00") as session:
        client, kept = way(session), []
        began = time.monotonic()
        for _ in range(3):
            try:
                client.get(f"{trickler.url}/lost")
            except Exception as error:
                kept.append(error)  # and with it the frames of the exchange, with the payload
        assert time.monotonic() - began < 60
        assert (len(trickler.nonces), len(set(trickler.nonces))) == (3, 1)


def test_tasks_that_want_one_page_each_buy_it_one_after_the_other(guarded, trickler):
    signer = LocalSigner.from_key(KEY)  # whom the receipts name: each payment is captured at once
    with guarded(chains=None, signer=signer) as guard, guard.session("s", budget="$0.03") as session:

        async def go():
            async with x402HttpxClient(GuardedSigner(session).client(), timeout=30, trust_env=False) as http:
                return await asyncio.gather(
                    *(http.get(f"{trickler.url}/page") for _ in range(5)), return_exceptions=True
                )

        answers = asyncio.run(go())
        bought = [answer for answer in answers if isinstance(answer, httpx.Response)]
        assert [answer.status_code for answer in bought] == [200] * 3
        assert len(trickler.nonces) == len(set(trickler.nonces)) == 3


@BOTH
def test_an_answer_without_a_receipt_ends_the_purchase(guarded, trickler, way):
    trickler.answers["/page"] = once_paid(_no_receipt)
    with guarded(chains=None) as guard, guard.session("s", budget="$1.00") as session:
        assert [way(session).get(f"{trickler.url}/page") for _ in range(2)] == [200, 200]
        assert session.spent + session.held == Decimal("0.01") * len(set(trickler.nonces))


@BOTH
def test_a_sellers_own_word_of_its_place_passes_no_rule(guarded, trickler, way):
    trickler.terms = required(accept(), url="https://allowed.example/page")
    policy = Policy(hosts={"allowed.example"}, breaker=None)
    with guarded(chains=None, policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        attempt(way(session), f"{trickler.url}/page")
        assert (trickler.nonces, session.held) == ([], 0)


@BOTH
def test_a_guard_that_is_installed_below_knows_the_payment(guarded, trickler, way):
    trickler.terms = required(accept(), url=f"{trickler.url}/page")
    with guarded(chains=None) as guard:
        x402guard.install(budget="$1.00", guard=guard)
        try:
            with guard.session("s", budget="$1.00") as session:
                assert way(session).get(f"{trickler.url}/page") == 200
                assert session.spent + session.held == Decimal("0.01")
        finally:
            x402guard.uninstall()
    assert len(trickler.nonces) == 1


def test_a_payload_shows_no_signature_and_is_not_pickled(guarded, trickler):
    with guarded(chains=None) as guard, guard.session("s", budget="$1.00") as session:
        client = GuardedSigner(session).client_sync()
        offer = PaymentRequired.model_validate(required(accept()))
        client.handle_payment_required(offer, trickler.url)
        payload = client.create_payment_payload(offer)
        signature = payload.payload["signature"]
        shown = [repr(payload), str(payload), rich.pretty.pretty_repr(payload)]
        assert not [text for text in shown if signature[2:20] in text or "Payment(hold=" in text], shown
        with pytest.raises((TypeError, AttributeError)):
            pickle.dumps(payload)
        assert "_payment" not in payload.model_dump_json()


@BOTH
@pytest.mark.parametrize(
    "where",
    [
        "{path}",
        "/x/..{path}",
        "HTTP://{host}{path}",
        "http://@{host}{path}",
        "http://{host}/.{path}",
        "{path}\t",
        "{path}#x",
        "http://:{port}{path}",
        ":{path}",
        "\u00a0{path}",
        "{path}?a=%41",
        "{path}?a=|",
        "{path}?a=\u00e9",
        "/x/%2e%2e{path}",
    ],
)
def test_one_call_pays_once_however_it_is_redirected(guarded, trickler, way, where):
    def onward(line):
        number = int(line.asked.path[2:3])
        place = where.format(path=f"/c{number + 1}", host=trickler.host, port=trickler.host.rpartition(":")[2])
        line.send(
            paid_head(f"location: {place}\r\ncontent-length: 0\r\n\r\n".encode()).replace(b"200 OK", b"302 Found")
        )

    for number in range(9):
        trickler.answers[f"/c{number}"] = once_paid(onward)
    here = contextvars.copy_context()  # a place that a client has not followed is refused once
    with guarded(chains=None) as guard, guard.session("s", budget="$1.00") as session:
        client = way(session)
        client.follow = True
        here.run(attempt, client, f"{trickler.url}/c0")
        assert len(set(trickler.nonces)) == 1
        for _ in range(2):
            if len(set(trickler.nonces)) == 1:  # by itself it is another purchase
                here.run(attempt, client, f"{trickler.url}/c1")
        assert len(set(trickler.nonces)) == 2
        rules = [row["rule"] for row in session.report().to_dict()["refusals"]]
        assert set(rules) == {"one_payment_per_request"}


@BOTH
def test_the_sdks_recovery_signs_no_second_payment(guarded, trickler, way):
    trickler.terms = required(accept(), url="https://allowed.example/x")
    trickler.answers["/lost"] = once_paid(_again)
    with guarded(chains=None) as guard, guard.session("s", budget="$1.00") as session:
        client = way(session)
        client.client._client.on_payment_response(lambda _: RecoveredResponseResult())
        attempt(client, f"{trickler.url}/lost")
        assert len(trickler.nonces) == 2
        assert len(set(trickler.nonces)) == 1


def test_an_offer_that_no_transport_has_received_is_not_paid(guarded):
    policy = Policy(hosts={"allowed.example"}, breaker=None)
    with guarded(chains=None, policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        client = GuardedSigner(session).client_sync()
        with pytest.raises(ConfigError, match="client: it pays what a transport of the SDK has received"):
            client.create_payment_payload(
                PaymentRequired.model_validate(required(accept(), url="https://allowed.example/x"))
            )
        assert session.held == 0
