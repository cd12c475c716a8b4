"""An owner's command that comes at an odd moment: beside a call under way, another owner, a window, a clock set back."""

import threading
import time
from contextlib import closing
from decimal import Decimal

import httpx
import pytest

from tests.support.command_line import typed
from tests.support.ledger import Clock
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import Approvals, BudgetExhausted, ConfigError, Owner, PaymentRefused, Policy
from x402guard.ledger.purchases import DEFAULT_FLIGHT_S
from x402guard.stores import open_store

DAY_MS = 86_400_000


class Held(httpx.SyncByteStream):
    """A body whose second half comes when the test says so."""

    def __init__(self):
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def __iter__(self):
        self.begun.set()
        assert self.goes_on.wait(30)
        yield b"goods"


@pytest.mark.parametrize("unsafe", [False, True])
def test_an_answer_that_is_under_way_is_not_forgiven_unless_that_is_said(spent_url, unsafe):
    body = Held()
    shop = Shop(paid=lambda *_: httpx.Response(200, stream=body))
    got = []
    with make_guard(spent_url, policy=Policy(breaker=None)) as guard, guard.session("s", budget="$1.00") as session:
        buyer = threading.Thread(target=lambda: got.append(client(session, shop).get(URL).content))
        buyer.start()
        assert body.begun.wait(30)
        with Owner(spent_url) as owner:
            [hold] = owner.holds()
            if unsafe:
                assert owner.forgive(hold.id, unsafe_in_flight=True).delivery == "forgiven"
            else:
                with pytest.raises(
                    ConfigError, match=r"under way, in process .*Wait until its process has ended, or for 2"
                ):
                    owner.forgive(hold.id)
        body.goes_on.set()
        buyer.join(30)
        assert got == [b"goods"]
        assert len(shop.nonces) == 1


@pytest.mark.parametrize("way", ["flight_s", "its process ends"])
def test_it_is_forgiven_once_nothing_more_can_come(tmp_path, way):
    url, clock = f"sqlite:///{tmp_path / 'spend.db'}", Clock()
    with closing(open_store(url, clock_ms=clock)) as store:
        guard = make_guard(store)
        session = guard.session("s", budget="$1.00")
        with session, client(session, Shop(paid=lambda *_: httpx.Response(200, stream=Held()))) as http:
            http.send(http.build_request("GET", URL), stream=True)  # its body is not read
            [hold] = store.outstanding()
            if way == "its process ends":
                guard.close()
            else:
                clock.tick(DEFAULT_FLIGHT_S + 1)
            with Owner(url) as owner:
                owner._store._clock = store._clock
                assert owner.forgive(hold.id).delivery == "forgiven"
        guard.close()


def test_a_yes_to_one_question_is_none_to_the_next(tmp_path):
    url, shop = f"sqlite:///{tmp_path / 'spend.db'}", Shop()
    policy = Policy(approvals=Approvals(above="$0.001", timeout_s=30), breaker=None)
    outcomes = []

    def buy(session):
        for _ in range(2):
            try:
                outcomes.append(client(session, shop).get(URL).status_code)
            except PaymentRefused as error:
                outcomes.append(type(error).__name__)

    with make_guard(url, policy=policy, approver="queue") as guard, guard.session("s", budget="$1.00") as session:
        buyer = threading.Thread(target=buy, args=(session,))
        buyer.start()
        with Owner(url) as ann, Owner(url) as bea:
            first = asked(ann, 1)
            write = bea._store.transact

            def late(scope, change):
                ann.allow(first, by="Ann")
                asked(ann, 2)
                return write(scope, change)

            bea._store.transact = late
            with pytest.raises(ConfigError, match=rf"question '{first}' does not exist or is already closed"):
                bea.allow(first, by="Bea")
            ann.deny(asked(ann, 2), by="Ann")
        buyer.join(30)
    assert outcomes == [200, "ApprovalDenied"]
    assert len(shop.nonces) == 1


def asked(owner, number):
    for _ in range(600):
        for row in owner.approvals():
            if row.id.endswith(f".{number}"):
                return row.id
        threading.Event().wait(0.02)
    raise AssertionError(f"question {number} was not asked")


def test_a_clock_that_is_set_back_forgets_nothing_that_a_payee_got_without_an_approval(ledger_url):
    clock, shop, questions = Clock(), Shop(), []
    policy = Policy(breaker=None, approvals=Approvals(above="$0.03"))
    with (
        closing(open_store(ledger_url, clock_ms=clock)) as store,
        make_guard(store, policy=policy, approver=lambda ask: questions.append(ask) or False) as guard,
        guard.session("s", budget="$5.00") as session,
        client(session, shop) as http,
    ):
        for number in range(9):
            clock.tick(-7 if number % 3 == 2 else 1)
            try:
                http.get(f"{URL}?n={number}")
            except PaymentRefused:
                continue
    assert (shop.signed, len(questions)) == (30_000, 6)


def test_a_daily_limit_counts_what_today_has_used(spent_url, tmp_path):
    clock = Clock(time.time_ns() // 1_000_000 - 3 * DAY_MS)
    with closing(open_store(spent_url, clock_ms=clock)) as store, make_guard(store) as guard:
        team = guard.budget("customer", "$5.00", per="day")
        for spends in ("$4.00", "$4.00", "$4.00", "$1.00"):
            with team.session("w", budget="$4.00") as session:
                session.charge("x", spends)
            clock.now_ms += DAY_MS
    with Owner(spent_url) as owner:
        change = owner.set_budget("customer", "$8.00")
        assert (change.used, change.left, change.state) == (Decimal("1.00"), Decimal("7.00"), "open")
        with pytest.raises(
            ConfigError, match=r"\$8\.00 → \$0\.50 stops budget .*: \$1\.00 is used; if that is meant, give --yes"
        ):
            owner.set_budget("customer", "$0.50")
    assert (
        "$8.00 → $9.00, $8.00 left"
        in typed("budget", "set", "customer", "9.00", "--ledger", spent_url, cwd=tmp_path).stdout
    )


def test_a_limit_below_what_is_kept_for_the_last_calls_stops(spent_url):
    with make_guard(spent_url) as guard, guard.session("s", budget="$5.00", reserve="$1.00", id="s") as session:
        session.charge("x", "$0.10")
        words = r"\$5\.00 → \$0\.80 stops session s \(s\): \$0\.10 is used, and \$1\.00 is kept for its last LLM calls"
        with Owner(spent_url) as owner:
            with pytest.raises(ConfigError, match=words):
                owner.set_budget("s", "$0.80")
            assert owner.set_budget("s", "$1.30").left == Decimal("0.20")
            assert owner.budget("s").reserve == Decimal("1.00")
        session.charge("x", "$0.20")
        with pytest.raises(BudgetExhausted):
            session.charge("x", "$0.01")


@pytest.fixture
def spent_url(tmp_path):
    return f"sqlite:///{tmp_path / 'spend.db'}"
