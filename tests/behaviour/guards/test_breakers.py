"""Breakers on the wire, on LLM calls and on tools; after a restart, in two processes, and with twenty who want to try at once."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import httpx
import pytest

from tests.support import processes
from tests.support.ledger import Clock
from tests.support.llm_provider import CHAT, ERROR, ask, completion
from tests.support.merchant import (
    OTHER_PAYEE,
    PAYEE,
    URL,
    Shop,
    accept,
    async_client,
    b64,
    client,
    make_guard,
    offer_response,
    receipt,
    required,
    required_v1,
)
from x402guard import (
    Breaker,
    Bulkhead,
    CallTimeout,
    CircuitOpen,
    Policy,
    PolicyDenied,
    SettlementUncertain,
    Timeouts,
)
from x402guard.stores import open_store

POLICY = Policy(breaker=Breaker(), loop=None)


class Fickle:
    """A seller, a model and a tool that fail while told to."""

    def __init__(self):
        self.fails, self.shop, self.asked = True, Shop(paid=self._paid), 0

    def _paid(self, request, _shop):
        self.asked += 1
        return httpx.Response(500) if self.fails else Shop()(request)

    def think(self, _request):
        self.asked += 1
        return httpx.Response(500, json=ERROR) if self.fails else httpx.Response(200, json=completion())

    def use(self):
        self.asked += 1
        if self.fails:
            raise ValueError("it has failed")
        return "found"


def pays(session, fickle):
    http, number = client(session, fickle.shop), iter(range(10**6))
    return lambda: http.get(f"{URL}/{next(number)}").raise_for_status()


def thinks(session, fickle):
    http = client(session, fickle.think)
    return lambda: http.post(CHAT, json=ask()).raise_for_status()


def uses(session, fickle):
    return session.tool(cost="$0.01", name="serp")(fickle.use)


def holds(session, fickle):
    def use():
        with session.hold("serp", up_to="$0.05") as job:
            fickle.use()
            job.capture("$0.01")

    return use


STEPS = [pays, thinks, uses, holds]
every_step = pytest.mark.parametrize("step", STEPS)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def opened(ledger_url, clock):
    """A session on a clock to be turned."""
    with make_guard(open_store(ledger_url, clock_ms=clock, steady_ms=clock), policy=POLICY) as guard:
        with guard.session("s", budget="$5") as session:
            yield session


def fail(act, times=3):
    for _ in range(times):
        with pytest.raises((httpx.HTTPStatusError, ValueError)):
            act()


@every_step
def test_three_failures_open_it_and_half_a_minute_later_one_may_try(opened, clock, step):
    fickle = Fickle()
    act = step(opened, fickle)
    fail(act)
    spent = opened.spent, opened.held
    with pytest.raises(CircuitOpen) as refused:
        act()
    assert (refused.value.rule, refused.value.retry_after, refused.value.retry) == ("breaker_open", 30, "later")
    assert not refused.value.money_may_have_moved
    assert (fickle.asked, (opened.spent, opened.held)) == (3, spent)
    clock.tick(29.9)
    with pytest.raises(CircuitOpen) as refused:
        act()
    assert refused.value.retry_after == 1
    clock.tick(0.1)
    fickle.fails = False
    act()
    act()
    assert (fickle.asked, opened.report().to_dict()["state"]) == (5, "open")


@every_step
def test_a_try_that_fails_is_another_rest(opened, clock, step):
    fickle = Fickle()
    act = step(opened, fickle)
    fail(act)
    clock.tick(30)
    fail(act, 1)
    with pytest.raises(CircuitOpen) as refused:
        act()
    assert refused.value.retry_after == 30


@every_step
def test_two_failures_and_a_success_open_nothing(opened, step):
    fickle = Fickle()
    act = step(opened, fickle)
    for _ in range(3):
        fickle.fails = True
        fail(act, 2)
        fickle.fails = False
        act()


@every_step
def test_it_survives_a_restart(tmp_path, clock, step):
    url, fickle = f"sqlite:///{tmp_path / 'books.db'}", Fickle()
    for turn in range(2):
        with make_guard(open_store(url, clock_ms=clock, steady_ms=clock), policy=POLICY) as guard:
            act = step(guard.session("s", budget="$5", id="run"), fickle)
            if turn == 0:
                fail(act)
            clock.tick(10)
            with pytest.raises(CircuitOpen) as refused:
                act()
            assert refused.value.retry_after == 20 - 10 * turn


@every_step
def test_of_twenty_who_want_to_try_at_once_one_does(ledger_url, clock, step):
    fickle, inside, let_go = Fickle(), threading.Semaphore(0), threading.Event()
    policy = Policy(
        breaker=Breaker(), loop=None, bulkhead=Bulkhead(per_host=20, per_tool=20), timeouts=Timeouts(tool_s=60)
    )
    with make_guard(open_store(ledger_url, clock_ms=clock, steady_ms=clock), policy=policy) as guard:
        session = guard.session("s", budget="$5")
        fail(step(session, fickle))
        clock.tick(30)
        fickle.fails, slow = False, Fickle()
        slow.fails = False
        slow.shop.paid = lambda request, _shop: (inside.release(), let_go.wait(20), Shop()(request))[2]
        slow.think, slow.use = _slowly(slow.think, inside, let_go), _slowly(slow.use, inside, let_go)
        act, start = step(session, slow), threading.Barrier(20)

        def attempt(_):
            start.wait(20)
            try:
                act()
            except CircuitOpen as error:
                return error.retry_after
            return "passed"

        with ThreadPoolExecutor(20) as threads:
            came = [threads.submit(attempt, n) for n in range(20)]
            assert inside.acquire(timeout=20)
            refused = _first(came, 19)
            let_go.set()
            assert sorted(map(str, (each.result(20) for each in came))) == ["1"] * 19 + ["passed"]
        assert refused == [1] * 19
        act()


def _slowly(call, inside, let_go):
    def slow(*args):
        inside.release()
        let_go.wait(20)
        return call(*args)

    return slow


def _first(futures, count):
    """The results of the first so many that come to an end."""
    from concurrent.futures import as_completed

    done = as_completed(futures, timeout=20)
    return [next(done).result() for _ in range(count)]


TWO = """
import sys, httpx
from tests.behaviour.guards.test_breakers import STEPS, Fickle, POLICY, fail
from tests.support.merchant import make_guard
from x402guard import CircuitOpen
url, name = sys.argv[1:]
step = {step.__name__: step for step in STEPS}[name]
with make_guard(url, policy=POLICY) as guard:
    act = step(guard.session("s", budget="$5", id="run"), fickle := Fickle())
    try:
        act()
    except CircuitOpen as error:
        print("refused", fickle.asked, error.retry_after)
    except (httpx.HTTPStatusError, ValueError):
        print("failed")
"""


@every_step
def test_one_process_learns_from_another(tmp_path, step):
    url = f"sqlite:///{tmp_path / 'books.db'}"

    def run():
        done = processes.run(TWO, url, step.__name__)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    with make_guard(url, policy=POLICY) as guard:
        fail(step(guard.session("s", budget="$5", id="run"), Fickle()), 2)
        assert run() == ["failed"]
        said = run()
        assert said[:2] == ["refused", "0"]
        assert 1 <= int(said[2]) <= 30
        with pytest.raises(CircuitOpen):
            step(guard.session("s", budget="$5", id="run"), Fickle())()


SETTLED = {"PAYMENT-RESPONSE": b64(receipt())}
PAID_BUT = {
    "lost": httpx.ReadError("gone"),
    "late": httpx.ReadTimeout("late"),
    "402 again": lambda request, _shop: offer_response(required()),
    "5xx": lambda request, _shop: httpx.Response(503),
    "5xx and settled": lambda request, _shop: httpx.Response(503, headers=SETTLED),
    "403": lambda request, _shop: httpx.Response(403),
}


@pytest.mark.parametrize("answer", PAID_BUT)
def test_whatever_a_payment_is_answered_with_that_is_not_what_it_bought_is_a_failure(opened, answer):
    shop = Shop(paid=PAID_BUT[answer])
    http = client(opened, shop)
    for n in range(3):
        try:
            http.get(f"{URL}/{n}")
        except SettlementUncertain:
            assert answer in ("lost", "late")
    with pytest.raises(CircuitOpen):
        http.get(f"{URL}/another")
    assert len(shop.payments) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 429])
def test_a_model_that_says_no_is_well(opened, status):
    http = client(opened, lambda request: httpx.Response(status, json=ERROR))
    for _ in range(5):
        assert http.post(CHAT, json=ask()).status_code == status


def test_a_payee_at_rest_is_at_rest_at_every_host_and_another_is_not(opened):
    shop = Shop(paid=lambda request, _shop: httpx.Response(500))
    http = client(opened, shop)
    for n in range(3):
        http.get(f"{URL}/{n}")
    elsewhere = "https://elsewhere.example/a"
    with pytest.raises(CircuitOpen, match="payee"):
        client(opened, Shop(terms=required(url=elsewhere))).get(elsewhere)
    other = Shop(terms=required(accept(payTo=OTHER_PAYEE), url=elsewhere))
    assert client(opened, other).get(elsewhere).status_code == 200


def test_where_the_best_offers_payee_is_at_rest_the_next_one_is_taken(opened):
    shop = Shop(paid=lambda request, _shop: httpx.Response(500))
    for n in range(3):
        client(opened, shop).get(f"{URL}/{n}")
    url = "https://elsewhere.example/a"
    two = Shop(terms=required(accept(100), accept(200, payTo=OTHER_PAYEE), url=url))
    assert client(opened, two).get(url).status_code == 200
    assert [payee for _, _, payee in two.payments] == [OTHER_PAYEE]


@pytest.mark.parametrize("terms", [required, required_v1])
def test_a_payment_in_doubt_is_not_shown_to_a_host_at_rest_and_the_error_says_so(opened, clock, terms):
    shop = Shop(terms=terms(), paid=httpx.ReadError("gone"))
    http = client(opened, shop)
    for _ in range(3):
        with pytest.raises(SettlementUncertain):
            http.get(URL)
    with pytest.raises(CircuitOpen) as refused:
        http.get(URL)
    assert refused.value.money_may_have_moved
    assert "may be taken until its deadline" in str(refused.value)
    assert json.loads(refused.value.as_tool_result("call_1")["content"])["money_may_have_moved"] is True
    assert (len(shop.payments), len(shop.nonces), opened.held) == (3, 1, Decimal("0.01"))
    clock.tick(30)
    shop.paid = None
    assert http.get(URL).status_code == 200
    assert (len(shop.payments), len(shop.nonces), opened.spent) == (4, 1, Decimal("0.01"))


@pytest.mark.parametrize("rests", ["host", "payee"])
def test_a_payment_in_doubt_is_not_shown_where_the_host_alone_or_the_payee_alone_is_at_rest(opened, rests):
    lost = Shop(paid=httpx.ReadError("gone"))
    with pytest.raises(SettlementUncertain):
        client(opened, lost).get(URL)
    url, payee = (URL, OTHER_PAYEE) if rests == "host" else ("https://elsewhere.example/a", PAYEE)
    failing = Shop(
        lambda request: required(accept(payTo=payee), url=str(request.url)), lambda request, _shop: httpx.Response(500)
    )
    for n in range(2):
        client(opened, failing).get(f"{url}/{n}")
    with pytest.raises(CircuitOpen, match=f"{rests} .* has failed 3 times in a row") as refused:
        client(opened, lost).get(URL)
    assert refused.value.money_may_have_moved
    assert len(lost.payments) == 1


def test_what_may_have_been_paid_is_not_said_to_be_unpaid(opened):
    http = client(opened, Shop(paid=httpx.ReadError("gone")))
    for _ in range(3):
        with pytest.raises(SettlementUncertain):
            http.get(URL)
    with pytest.raises(CircuitOpen) as refused:
        http.get(URL)
    assert "Nothing was paid" not in refused.value.advice


def test_answered_as_a_402_it_says_for_how_long_too(opened):
    fickle = Fickle()
    fail(pays(opened, fickle))
    answer = client(opened, fickle.shop, on_refusal="respond").get(URL)
    assert answer.status_code == 402
    assert isinstance(answer.extensions["x402guard.refusal"], CircuitOpen)
    assert answer.json()["code"] == "circuit_open"
    assert answer.json()["retry_after"] == 30


def test_a_tool_that_takes_too_long_has_failed(ledger_url):
    policy = Policy(breaker=Breaker(failures=1), timeouts=Timeouts(tool_s=1))
    let_go = threading.Event()
    with make_guard(ledger_url, policy=policy) as guard, guard.session("s", budget="$1") as session:
        slow = session.tool(cost="$0.01", name="slow")(lambda: let_go.wait(20))
        with pytest.raises(CallTimeout, match="'slow' did not end within 1 s") as late:
            slow()
        let_go.set()
        assert late.value.hold_id
        assert session.spent == Decimal("0.01")
        with pytest.raises(CircuitOpen):
            slow()


def test_a_tool_without_a_price_is_given_a_rest_too(opened):
    fickle = Fickle()
    act = opened.tool(name="shown", mode="raw", render=lambda result, mode: result)(fickle.use)
    fail(act)
    with pytest.raises(CircuitOpen):
        act()


def test_a_charge_ends_its_own_try(opened, clock):
    """It is over as soon as it is booked."""
    fickle = Fickle()
    fail(uses(opened, fickle))
    clock.tick(30)
    opened.charge("serp", "$0.01")
    fickle.fails = False
    uses(opened, fickle)()


class SearchError(Exception):
    """An error of a tool's own."""


async def as_it_is(call):
    return await call()


async def as_its_cause(call):
    try:
        return await call()
    except PolicyDenied as error:
        raise SearchError from error


async def while_it_is_handled(call):
    try:
        return await call()
    except PolicyDenied:
        raise SearchError from None


async def in_a_group(call):
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(call())
    return task.result()


async def in_a_group_in_a_cause(call):
    try:
        return await in_a_group(call)
    except ExceptionGroup as error:
        raise SearchError from error


@pytest.mark.parametrize("raised", [as_it_is, as_its_cause, while_it_is_handled, in_a_group, in_a_group_in_a_cause])
def test_what_the_guard_refuses_inside_a_tool_is_no_failure_of_the_tool(raised):
    """Three sellers are above the cap; the fourth is not, and is asked."""

    def priced(request):
        return required(accept(amount=5_000_000 if "dear" in request.url.host else 10_000), url=str(request.url))

    async def main(session):
        http = async_client(session, Shop(priced))

        @session.tool(cost="$0", name="read_page")
        async def read(url):
            return (await raised(lambda: http.get(url))).status_code

        for name in "abc":
            with pytest.raises((PolicyDenied, SearchError, ExceptionGroup)):
                await read(f"https://dear-{name}.example/x")
        assert await read("https://cheap.example/x") == 200

    with make_guard(policy=Policy(breaker=Breaker())) as guard, guard.session("s", budget="$50.00") as session:
        asyncio.run(main(session))


def test_a_tool_that_fails_by_itself_beside_a_refusal_has_failed():
    async def fails():
        raise SearchError

    with make_guard(policy=Policy(breaker=Breaker())) as guard, guard.session("s", budget="$50.00") as session:
        http = async_client(session, Shop(required(accept(amount=5_000_000))))

        @session.tool(cost="$0", name="read_page")
        async def read():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(http.get(URL))
                tasks.create_task(fails())

        async def main():
            for _ in range(3):
                with pytest.raises(ExceptionGroup):
                    await read()
            with pytest.raises(CircuitOpen):
                await read()

        asyncio.run(main())


def test_a_tool_that_fails_while_it_handles_a_refusal_has_failed():
    with make_guard(policy=Policy(breaker=Breaker())) as guard, guard.session("s", budget="$50.00") as session:
        http = client(session, Shop(required(accept(amount=5_000_000))))

        @session.tool(cost="$0", name="read_page")
        def read():
            try:
                http.get(URL)
            except PolicyDenied:
                raise OSError("the disk is full")  # noqa: B904 - a fault of its own

        for _ in range(3):
            with pytest.raises(OSError, match="disk"):
                read()
        with pytest.raises(CircuitOpen):
            read()
