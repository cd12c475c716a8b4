"""A ledger's server goes away after a payment or a call has left: the caller has the answer, and its end is written later.

If the process ends before that, the next one on its machine writes it.
"""

import time
from decimal import Decimal

import anyio
import httpx
import pytest

from tests.support import postgres
from tests.support.ended_buyer import FOLLOWS, begin_call, begun, books_of, files, opens_a_guard
from tests.support.ledger import a_hold, usd
from tests.support.merchant import URL as SHOP_URL
from tests.support.merchant import Shop, async_client, b64, client, make_guard, receipt
from x402guard import BudgetExhausted, LedgerUnavailable, Owner, PaymentRefused, Policy
from x402guard.flow import late_writes
from x402guard.flow.capture import Bill, capture_bill
from x402guard.flow.detached import Aside
from x402guard.flow.drivers import run, transact_now
from x402guard.frozen import replace
from x402guard.kernel.rows import Delivery, Evidence, HoldKind
from x402guard.ledger.authorize import authorize
from x402guard.ledger.events import Capture
from x402guard.ledger.lost import LateEnd, to_enter
from x402guard.ledger.view import Scope

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.long]


@pytest.mark.parametrize("how", ["silent", "down"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_server_that_goes_away_after_the_payment_left_holds_up_no_answer(url, way, straight, how, kind):
    """The end is written when it is back: the hold is captured, and the purchase is handed over."""
    shop = Shop()

    def sells(request):
        answer = shop(request)
        if "payment-signature" in request.headers:
            away()
        return answer

    def away():
        if how == "silent":
            way.silent = True
        else:
            way.go_down()
        gone.append(time.monotonic())

    gone = []
    with make_guard(way.url(url), budget="$1.00") as guard, guard.session("s", budget="$1.00") as session:
        if kind == "sync":
            with client(session, sells) as http:
                answer = http.get(SHOP_URL)
        else:

            async def pays():
                async with async_client(session, sells) as http:
                    return await http.get(SHOP_URL)

            answer = anyio.run(pays)
        assert (answer.status_code, len(gone)) == (200, 1)
        assert time.monotonic() - gone[0] < 2.7
        hold_id = answer.extensions["x402guard"].hold_id
        assert straight.hold(hold_id).state == "held"
        way.silent = way.down = False
        until_s = time.monotonic() + 30
        if kind == "sync" and how == "silent":  # at once: it waits for that end, and is another purchase
            with client(session, shop) as http:
                assert http.get(SHOP_URL).extensions["x402guard"].hold_id != hold_id
            # One read: an end may come between two.
            [row] = [node for node in straight.nodes() if node.id == session.id]
            assert (row.captured + row.held, shop.signed) == (usd("$0.02"), 20_000)
            return
        while (found := straight.hold(hold_id)).delivery != "done":
            assert time.monotonic() < until_s, found
            time.sleep(0.02)
        assert (found.state, found.evidence, found.doubt) == ("captured", "claimed", None)
        assert session.spent == Decimal("0.01")
    assert straight.audit() == []


def test_a_bill_above_its_hold_that_waits_is_written_before_anything_else_is_spent(url, way):
    with make_guard(way.url(url), budget="$1.00") as guard, guard.session("s", budget="$1.00", id="s") as session:
        context = replace(guard.context, node_id="s")
        held = begin_call(guard, "s")
        way.go_down()
        with pytest.raises(LedgerUnavailable):
            run(capture_bill(context, held, Bill(usd("$0.90"), Evidence.ESTIMATE)), guard.shell)
        with pytest.raises(LedgerUnavailable):
            session.charge("search", "$0.20")
        way.down = False
        session.charge("search", "$0.10")
        assert session.spent == Decimal("1.00")
        with pytest.raises(BudgetExhausted):
            session.charge("search", "$0.01")


def test_an_answer_that_is_cut_off_while_its_claim_waits_is_lost_for_the_next_process_as_well(url, way, monkeypatch):
    """Ctrl-C, as everything goes down: the file says that it was handed over, and after that that it was not."""
    shop, within = Shop(), Aside.within

    def sells(request):
        way.silent = "payment-signature" in request.headers
        return shop(request)

    def interrupted(_aside, _seconds):
        monkeypatch.setattr(Aside, "within", within)
        raise KeyboardInterrupt

    with make_guard(way.url(url), budget="$1.00") as guard, guard.session("s", budget="$1.00") as session:
        with client(session, sells) as http:
            monkeypatch.setattr(late_writes.Aside, "within", interrupted)
            with pytest.raises(KeyboardInterrupt):
                http.get(SHOP_URL, timeout=None)
        assert [end.delivery for end in to_enter(guard.shell.store.outbox.ends)] == [None, Delivery.LOST]
        way.silent = False
        with client(session, shop) as http:
            assert http.get(SHOP_URL).status_code == 200
        assert (len(shop.payments), len(shop.nonces)) == (2, 1)


@pytest.mark.parametrize("repeat", ["refuse", "allow"])
def test_the_whole_end_of_an_answer_is_written_later(url, way, straight, repeat):
    """Where the policy asks about repeated requests, it is two changes."""
    shop = Shop()

    def sells(request):
        answer = shop(request)
        way.silent = "payment-signature" in request.headers
        return answer

    policy = Policy(repeat=repeat)
    with (
        make_guard(way.url(url), budget="$1.00", policy=policy) as guard,
        guard.session("s", budget="$1.00") as session,
    ):
        with client(session, sells) as http:
            assert http.get(SHOP_URL).status_code == 200
            way.silent = False
            until_s = time.monotonic() + 20
            while guard.shell.late_writes._waiting or guard.shell.late_writes._under_way:
                assert time.monotonic() < until_s
                time.sleep(0.02)
        assert (len(straight.marks("bought", "")) == 1) is (repeat == "refuse")
        with client(session, shop) as http:
            if repeat == "refuse":
                with pytest.raises(PaymentRefused):
                    http.get(SHOP_URL)
            else:
                assert http.get(SHOP_URL).status_code == 200
        assert shop.signed == (10_000 if repeat == "refuse" else 20_000)


def ends_while_the_server_is_away(url, way, how="kill", *, lost=False):
    """A process pays $0.01 and has a bill of $0.60 for $0.10, and ends before either end is written. What it said."""
    process = begun(way.url(url), "unwritten", how)
    if lost:
        postgres.keep_copy(url)
    process.stdin.write("\n")
    process.stdin.flush()
    nonce = process.stdout.readline()
    way.go_down()
    said, _ = process.communicate("\n", timeout=60)
    way.down = False
    if lost:
        postgres.lose_since(url)
    return nonce, said


CASES = [*(("kill", follows) for follows in FOLLOWS), ("exit", opens_a_guard), ("close", opens_a_guard)]


@pytest.mark.parametrize(("how", "follows"), CASES)
def test_what_an_ended_process_could_not_write_is_written_by_the_next_one(url, way, straight, how, follows):
    """$0.50 of the bill are above its hold: who comes next would have spent them a second time."""
    ends_while_the_server_is_away(url, way, how)
    assert books_of(url) == (("open", None), (Decimal("0.35"), Decimal("0.11")))
    for _ in range(2):
        follows(url)
        assert books_of(url) == (("open", None), (Decimal("0.96"), Decimal(0)))
    assert len(files()) == 1
    [paid] = [hold for hold in map(straight.hold, holds_of(straight)) if hold.intent is not None]
    assert (paid.state, paid.evidence, paid.doubt, paid.delivery) == ("captured", "claimed", None, "done")
    billed = straight.hold("llm")
    assert (billed.state, billed.captured, billed.evidence) == ("captured", usd("$0.60"), "provider_usage")
    with make_guard(url) as guard, guard.session("n", budget="$1.00") as session:
        with pytest.raises(BudgetExhausted):
            session.charge("search", "$0.05")
        session.charge("search", "$0.04")


def holds_of(store):
    return dict.fromkeys(entry.hold_id for entry in store.entries("run") if entry.hold_id)


def test_what_the_server_has_lost_comes_first(url, way):
    """Its hold is entered again, and the end of it after that."""
    ends_while_the_server_is_away(url, way, lost=True)
    opens_a_guard(url)
    assert books_of(url) == (("tripped", "rolled_back"), (Decimal("0.96"), Decimal(0)))
    opens_a_guard(url)
    assert books_of(url) == (("tripped", "rolled_back"), (Decimal("0.96"), Decimal(0)))


def test_who_may_not_write_or_only_looks_leaves_the_file_as_it_is(url, way):
    ends_while_the_server_is_away(url, way)
    [left] = files()
    with Owner(url, read_only=True) as owner:
        assert owner.verify() == []
    assert files() == [left]
    assert books_of(url)[1] == (Decimal("0.35"), Decimal("0.11"))


def test_a_process_that_is_killed_while_a_bill_is_waited_for_leaves_it_behind(url, way):
    """The server is silent, so the write of the bill takes as long as the server may."""
    process = begun(way.url(url), "unwritten")
    process.stdin.write("\n")
    process.stdin.flush()
    process.stdout.readline()
    way.silent = True
    process.stdin.write("\n")
    process.stdin.flush()
    until_s = time.monotonic() + 20
    while not any(b'"capture"' in file.read_bytes() for file in files()):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=20)
    way.silent = False
    opens_a_guard(url)
    assert books_of(url) == (("open", None), (Decimal("0.96"), Decimal(0)))


@pytest.mark.parametrize("status", [200, 500])
def test_a_nul_in_a_receipt_stops_nothing(url, way, status):
    """PostgreSQL keeps none. The payment is in doubt, and what others buy is written."""

    def paid(request, shop):
        return httpx.Response(
            status, headers={"PAYMENT-RESPONSE": b64({**receipt(), "transaction": "0x\0"})}, text="sold"
        )

    policy = Policy(loop=None, breaker=None)
    with (
        make_guard(way.url(url), budget="$1.00", policy=policy) as guard,
        guard.session("s", budget="$1.00") as session,
    ):
        with client(session, Shop(paid=paid)) as http:
            assert http.get(SHOP_URL).status_code == status
        session.charge("search", "$0.10")
        assert not guard.shell.late_writes._waiting
    opens_a_guard(url)


def test_an_end_that_the_server_can_never_take_keeps_no_other_out(url, caplog):
    """Its file was written by another version, or edited."""
    with make_guard(url, budget="$1.00") as guard, guard.session("s", budget="$1.00", id="s") as session:
        for name in ("one", "two", "three"):
            held = a_hold(name, "$0.10", "s", kind=HoldKind.LLM, now_ms=guard.shell.store.now_ms(), deadline_s=900)
            scope = Scope(nodes=("s",), holds=(name,), durable=True)
            facts = {"kind": "llm", "model": "m", "host": "h"}
            transact_now(guard.shell, scope, lambda view, hold=held, facts=facts: authorize(view, hold, facts))
        keep = guard.shell.store.outbox.keep
        keep(LateEnd("one", doubt="a\0b"))
        keep(LateEnd("two", capture=Capture(-5, Evidence.ESTIMATE)))
        keep(LateEnd("never authorized", doubt="no answer came"))
        keep(LateEnd("archived", capture=Capture(usd("$0.05"), Evidence.ESTIMATE)))
        keep(LateEnd("three", capture=Capture(usd("$0.60"), Evidence.ESTIMATE)))
        assert session.held == Decimal("0.30")
    with make_guard(url) as guard:
        holds = [guard.shell.store.hold(name) for name in ("one", "two", "three")]
        assert [(hold.state, hold.captured) for hold in holds] == [("held", 0), ("held", 0), ("captured", usd("$0.60"))]
        [wallet] = [node for node in guard.shell.store.nodes() if node.id == "wallet"]
        assert (wallet.captured, wallet.counted) == (usd("$0.05"), usd("$0.85"))
    assert caplog.text.count("can never be written") == 2
    assert "its hold never authorized is not in the ledger" in caplog.text
    assert len(files()) == 1
