"""A server that answers, and refuses for a moment: the end of an answer waits as if it were away."""

import time
from contextlib import contextmanager, suppress
from decimal import Decimal

import httpx
import psycopg
import pytest

from tests.support import postgres
from tests.support.ended_buyer import begin_call, books_of
from tests.support.ledger import usd
from tests.support.merchant import URL as SHOP_URL
from tests.support.merchant import Shop, b64, client, make_guard, receipt
from x402guard import BudgetExhausted, LedgerUnavailable, Policy
from x402guard.flow.capture import Bill, capture_bill
from x402guard.flow.drivers import run
from x402guard.kernel.rows import Evidence
from x402guard.stores import open_store

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.long]

REFUSALS = {
    "read-only": ("SET default_transaction_read_only = on", "RESET default_transaction_read_only"),
    "starts": ("ALLOW_CONNECTIONS false", "ALLOW_CONNECTIONS true"),
}


@contextmanager
def refusing(url, how):
    """A block in which the database refuses; the connections of this ledger are made anew before and after."""
    name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
    with psycopg.connect(postgres.url(postgres.server(), "postgres"), autocommit=True) as admin:

        def set_to(what):
            admin.execute(f'ALTER DATABASE "{name}" {what}')
            admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (name,))

        set_to(REFUSALS[how][0])
        try:
            yield
        finally:
            set_to(REFUSALS[how][1])


@pytest.mark.parametrize("how", REFUSALS)
def test_a_bill_above_its_hold_is_written_before_anything_else_is_spent(url, how):
    with make_guard(url, budget="$1.00") as guard, guard.session("s", budget="$1.00", id="s") as session:
        held = begin_call(guard, "s")
        with refusing(url, how):
            with pytest.raises(LedgerUnavailable):
                run(capture_bill(guard.context, held, Bill(usd("$0.90"), Evidence.ESTIMATE)), guard.shell)
            with pytest.raises(LedgerUnavailable, match="the end of an earlier call, which may exceed a budget"):
                session.charge("search", "$0.10")
        session.charge("search", "$0.10")
        with pytest.raises(BudgetExhausted):
            session.charge("search", "$0.01")
        assert session.spent == Decimal("1.00")


@pytest.mark.parametrize("how", REFUSALS)
def test_an_answer_that_broke_in_that_moment_is_asked_for_with_the_same_payment(url, how):
    shop, refusals = Shop(), []

    class Breaks(httpx.SyncByteStream):
        def __iter__(self):
            yield b"a part"
            refusals.append(refusing(url, how))
            refusals[0].__enter__()
            raise httpx.ReadError("the connection broke")

    def paid(_request, _shop):
        stream = Breaks() if not refusals else httpx.ByteStream(b"the goods")
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())}, stream=stream)

    shop.paid, policy = paid, Policy(breaker=None, loop=None)
    with make_guard(url, budget="$1.00", policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        with client(session, shop) as http:
            with pytest.raises(httpx.ReadError):
                http.get(SHOP_URL)
            refusals[0].__exit__(None, None, None)
            assert http.get(SHOP_URL).content == b"the goods"
        assert (len(shop.payments), len(shop.nonces), session.spent) == (2, 1, Decimal("0.01"))


def test_a_living_process_enters_its_own_bill_as_it_finds_that_the_server_has_lost_entries(url, way):
    """Its owner may reset the wallet while it lives: what it was billed counts by then."""
    guard, is_refused = make_guard(way.url(url), budget="$1.00"), False
    with suppress(LedgerUnavailable), guard, guard.session("run", budget="$1.00", id="s") as session:
        held = begin_call(guard, "s")
        postgres.keep_copy(url)
        session.charge("search", "$0.36")
        way.go_down()
        with pytest.raises(LedgerUnavailable):
            run(capture_bill(guard.context, held, Bill(usd("$0.60"), Evidence.PROVIDER_USAGE)), guard.shell)
        postgres.lose_since(url)
        way.down = False
        until_s = time.monotonic() + 20
        while books_of(url)[0][0] == "open" or books_of(url)[1][1]:
            assert time.monotonic() < until_s
            time.sleep(0.1)
        assert books_of(url) == (("tripped", "rolled_back"), (Decimal("0.96"), Decimal(0)))
        with pytest.raises(LedgerUnavailable):
            session.charge("search", "$0.01")
        is_refused = True
    assert is_refused


def test_a_guard_on_a_store_that_stays_open_enters_what_an_earlier_one_has_left(url, way):
    store = open_store(way.url(url))
    first = make_guard(store, budget="$1.00")
    with suppress(LedgerUnavailable), first.session("s", budget="$1.00", id="s"):
        held = begin_call(first, "s")
        way.go_down()
        with pytest.raises(LedgerUnavailable):
            run(capture_bill(first.context, held, Bill(usd("$0.90"), Evidence.ESTIMATE)), first.shell)
    with pytest.raises(LedgerUnavailable):
        first.close()
    way.down = False
    with make_guard(store) as second, second.session("t", budget="$1.00") as session:
        session.charge("search", "$0.10")
        with pytest.raises(BudgetExhausted):
            session.charge("search", "$0.01")
    assert store.outbox.ends == []
    store.close()


@pytest.mark.parametrize(
    "lock", ["SELECT FROM x402guard.nodes FOR UPDATE", "LOCK TABLE x402guard.entries IN SHARE MODE"]
)
def test_rows_that_a_person_has_locked_are_named_after_ten_seconds(url, lock):
    with make_guard(url, budget="$1.00") as guard, guard.session("s", budget="$1.00", id="s") as session:
        with psycopg.connect(url) as person:
            person.execute(lock)
            began_s = time.monotonic()
            with pytest.raises(LedgerUnavailable, match="another session of the database has locked rows"):
                session.charge("search", "$0.01")
            assert time.monotonic() - began_s < 15
        session.charge("search", "$0.01")


def test_a_silent_server_holds_no_look_of_a_payment_for_long(url, way):
    with make_guard(way.url(url), budget="$1.00") as guard, guard.session("s", budget="$1.00") as session:
        assert session.remaining == 1
        way.silent, began_s = True, time.monotonic()
        with pytest.raises(LedgerUnavailable):
            session.remaining  # noqa: B018 - it asks the server
        with pytest.raises(LedgerUnavailable):
            guard.shell.store.hold("h")
        assert time.monotonic() - began_s < 30
        way.silent = False
