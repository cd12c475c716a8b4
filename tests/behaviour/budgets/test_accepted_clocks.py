"""After a clock that was ahead, and that the owner has accepted back: windows, guards and answered tasks."""

import itertools
import time
from decimal import Decimal

import httpx
import pytest

from tests.support.ledger import Books, Clock, a_hold, an_intent, usd, weigh_proven
from tests.support.merchant import URL, Shop, accept, client, make_guard, required
from x402guard import Breaker, PaymentRefused, Policy, SessionClosed, Velocity
from x402guard.delegation.messages import TaskRequest
from x402guard.guard.clock import accept_clock
from x402guard.kernel.rows import WALLET, Evidence, Hold, NodeKind, Window
from x402guard.kernel.windows import window_start_ms
from x402guard.ledger.authorize import authorize
from x402guard.ledger.events import Capture, Lapse, Void
from x402guard.ledger.evidence import weigh_marks
from x402guard.ledger.findings import Unused
from x402guard.ledger.sessions import NodeRequest, open_node
from x402guard.ledger.verify import verify_windows
from x402guard.stores import open_store

DAY_S = 86_400
DAILY = Window("day", "UTC")
ENDS = {"live": None, "captured": Capture(usd("$5.00"), Evidence.CLAIMED), "voided": Void("not sent")}


class Team:
    """A budget of $10 a day, with a session below it."""

    def __init__(self, ledger_url):
        self.clock = Clock()
        self.clock.now_ms = window_start_ms(DAILY, self.clock.now_ms) + (DAY_S - 60) * 1000  # a minute to midnight
        self.books = Books(ledger_url, wallet="$100", session=None, clock=self.clock)
        self.opened()
        self.books.open("s", "$100", parent="budget:team")

    def opened(self):
        asked = NodeRequest("budget:team", WALLET, NodeKind.BUDGET, "team", usd("$10"), "", window=DAILY)
        return self.books.change(lambda view: open_node(view, asked), nodes=("budget:team", WALLET))

    def spends(self, name, dollars, end=None):
        held = self.books.hold(name, dollars, deadline_s=3_600)
        if isinstance(held, Hold):
            self.books.step(name, end or Capture(usd(dollars), Evidence.CLAIMED))
        return isinstance(held, Hold)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("ahead_days", [1, 3])
def test_what_was_held_over_midnight_counts_once(ledger_url, end, ahead_days):
    team = Team(ledger_url)
    assert isinstance(team.books.hold("yesterday", "$5.00", deadline_s=3_600), Hold)
    team.clock.tick(120)
    if ENDS[end] is not None:
        team.books.step("yesterday", ENDS[end])
    team.clock.tick(600)
    spent = sum(team.spends(f"today {number}", "$1.00") for number in range(20))
    assert spent == (10 if end == "voided" else 5)
    for _ in range(ahead_days):  # a clock that runs ahead begins windows that are not due
        team.clock.tick(DAY_S)
        team.opened()
        team.spends(f"ahead {team.clock.now_ms}", "$0.01", Void("nothing"))
    team.clock.tick(-ahead_days * DAY_S + 60)
    accept_clock(team.books.store, "owner")
    assert team.opened().counted == usd("$10.00")
    assert not team.spends("more", "$1.00")
    team.clock.tick(DAY_S)
    assert team.spends("tomorrow", "$5.00")
    team.books.close()


@pytest.mark.parametrize("ahead_s", [13 * 3_600, 60 * 3_600])
@pytest.mark.parametrize("days_later", [0, 1, 2])
def test_a_payment_that_was_captured_ahead_and_is_given_back_later_frees_no_later_room(ledger_url, ahead_s, days_later):
    team = Team(ledger_url)
    team.clock.tick(-12 * 3_600)
    team.clock.tick(ahead_s)
    held = []
    for number in range(10):
        intent = an_intent(number + 1, 1_000_000, team.clock() // 1000 + 60)
        row = a_hold(f"h{number}", "$1.00", "s", now_ms=team.clock(), chain_evidence=True, intent=intent)
        authorized = team.books.change(
            lambda view, row=row: authorize(view, row, {"kind": "payment", "deadline": row.deadline_unix}),
            nodes=("s",),
            holds=(row.id,),
        )
        assert isinstance(authorized, Hold)
        team.books.step(row.id, Capture(usd("$1.00"), Evidence.CLAIMED))
        held.append(row)
    team.clock.tick(-ahead_s)
    accept_clock(team.books.store, "owner")
    team.clock.tick(days_later * DAY_S + 60)
    for row in held:
        finding = Unused(team.clock() // 1000 + ahead_s + 3_600)
        team.books.change(
            lambda view, row=row, finding=finding: weigh_proven(view, row.id, finding),
            nodes=("s",),
            holds=(row.id,),
            marks=weigh_marks(row, finding),
        )
    assert team.opened().counted >= 0
    assert sum(team.spends(f"today {number}", "$1.00") for number in range(30)) == 10
    assert verify_windows(team.books.store) == []
    team.books.close()


@pytest.mark.parametrize("window", ["day", "week", "month"])
def test_what_lapses_after_a_clock_that_was_ahead_counts(ledger_url, window):
    """A window that a wrong clock has begun is open until it is due, and what ends meanwhile counts in it."""
    team = Team(ledger_url)
    named = Window(window, "UTC")
    team.clock.now_ms = window_start_ms(named, team.clock.now_ms + 40 * DAY_S * 1000) - 3_600_000
    ask = NodeRequest("budget:other", WALLET, NodeKind.BUDGET, "other", usd("$1"), "", window=named)
    team.books.change(lambda view: open_node(view, ask), nodes=("budget:other", WALLET))
    team.books.open("t", "$100", parent="budget:other")
    assert isinstance(team.books.hold("before", "$0.10", node="t", deadline_s=60), Hold)
    team.clock.tick(3 * 3_600)
    team.books.step("before", Lapse())  # by a clock that is two hours past the end of the window
    team.clock.tick(-3 * 3_600 + 120)
    lapsed = 0
    for number in range(20):
        if isinstance(team.books.hold(f"then {number}", "$0.25", node="t", deadline_s=60), Hold):
            team.clock.tick(61)
            team.books.step(f"then {number}", Lapse())
            lapsed += 1
    assert lapsed <= 4
    team.clock.tick(2 * 3_600)
    again = sum(isinstance(team.books.hold(f"after {n}", "$0.25", node="t"), Hold) for n in range(9))
    assert (
        lapsed + again <= 5
    )  # what lapsed in the hour before counts in the window that the clock had begun, at most once
    team.books.close()


def test_a_budget_that_is_used_on_both_sides_of_a_clock_that_was_ahead_is_tripped_and_the_clock_accepted(ledger_url):
    team = Team(ledger_url)
    team.clock.tick(-12 * 3_600)
    assert all(team.spends(f"today {number}", "$1.00") for number in range(6))
    team.clock.tick(26 * 3_600)
    assert all(team.spends(f"ahead {number}", "$1.00") for number in range(7))
    team.clock.tick(-26 * 3_600)
    accept_clock(team.books.store, "owner")
    node = team.books.row("budget:team")
    assert (node.counted, str(node.state)) == (usd("$13.00"), "tripped")
    assert not team.spends("more", "$1.00")
    assert verify_windows(team.books.store) == []
    team.books.close()


@pytest.mark.parametrize("before", [0, 6])
def test_what_was_given_back_of_the_open_window_is_nothing_of_the_one_before(ledger_url, before):
    """$4 of today's $10 are found unused and spent again; then a clock is a day ahead, and the owner accepts the right one."""
    team = Team(ledger_url)
    team.clock.tick(-12 * 3_600)

    def claims(name, number):
        intent = an_intent(number, 1_000_000, team.clock() // 1000 + 60)
        row = a_hold(name, "$1.00", "s", now_ms=team.clock(), chain_evidence=True, intent=intent)
        facts = {"kind": "payment", "deadline": row.deadline_unix}
        written = team.books.change(lambda view: authorize(view, row, facts), nodes=("s",), holds=(row.id,))
        assert isinstance(written, Hold)
        team.books.step(name, Capture(usd("$1.00"), Evidence.CLAIMED))
        return row

    for number in range(before):
        claims(f"yesterday {number}", 100 + number)
    if before:
        team.clock.tick(DAY_S)
        team.opened()
    held = [claims(f"today {number}", number + 1) for number in range(10)]
    team.clock.tick(600)
    for row in held[:4]:
        finding = Unused(team.clock() // 1000 + 3_600)
        team.books.change(
            lambda view, row=row, finding=finding: weigh_proven(view, row.id, finding),
            nodes=("s",),
            holds=(row.id,),
            marks=weigh_marks(row, finding),
        )
    assert all(team.spends(f"again {number}", "$1.00") for number in range(3))
    team.clock.tick(26 * 3_600)
    team.spends("ahead", "$1.00")
    team.clock.tick(-26 * 3_600 + 60)
    accept_clock(team.books.store, "owner")
    node = team.books.row("budget:team")
    assert (node.counted, str(node.state)) == (usd("$10.00"), "open")
    assert not team.spends("more", "$0.01")
    team.books.close()


GUARDS = Policy(velocity=Velocity(dollars_per_day="$1.00"), breaker=Breaker(), loop=None)


class Machine:
    def __init__(self, tmp_path):
        self.url, self.wall, self.steady = f"sqlite:///{tmp_path}/l.db", Clock(), Clock()

    def ticks(self, seconds):
        self.wall.tick(seconds)
        self.steady.tick(seconds)

    def open(self, **more):
        return make_guard(open_store(self.url, clock_ms=self.wall, steady_ms=self.steady), budget="$100", **more)

    def accepts(self):
        store = open_store(self.url, clock_ms=self.wall, steady_ms=self.steady)
        accept_clock(store, "owner")
        store.close()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


PAYEES = (f"0x{number:040x}" for number in itertools.count(1))


def buys(machine, host, paid=None, run="run", **more):
    """Buy at a host, for 10 cents, from a payee that is not known yet. Return the rule that refuses, or the status."""
    terms = accept(100_000, payTo=next(PAYEES))
    with machine.open(policy=GUARDS) as guard:
        session = guard.session("run", id=run, budget="$50")
        shop = Shop(terms=lambda request: required(terms, url=str(request.url)), paid=paid)
        with client(session, shop) as http:
            try:
                return http.get(f"https://{host}.example/{time.monotonic_ns()}").status_code
            except PaymentRefused as refused:
                return refused.rule


@pytest.mark.parametrize("ahead_s", [3_600, 20 * 3_600, 25 * 3_600])
def test_a_circuit_and_a_day_that_a_wrong_clock_has_begun_end_by_the_right_one(machine, ahead_s):
    assert buys(machine, "plain") == 200
    machine.ticks(ahead_s)
    for _ in range(3):
        assert buys(machine, "down", paid=lambda *_: httpx.Response(500)) == 500
    assert buys(machine, "down") == "breaker_open"
    assert [buys(machine, "plain") for _ in range(7)][-1] == "new_payees_per_day"
    machine.ticks(-ahead_s)
    machine.accepts()
    assert buys(machine, "plain") == "new_payees_per_day"  # what it has counted counts
    assert buys(machine, "down", run="other") == 200  # another run
    machine.ticks(DAY_S + 3_700)
    assert buys(machine, "plain") == 200
    assert buys(machine, "down") == 200


@pytest.mark.parametrize("ahead_s", [3_600, 20 * 3_600])
def test_an_answered_task_pays_nothing_after_the_clock_is_set_back(machine, ahead_s):
    machine.wall.now_ms = machine.steady.now_ms = int(time.time() * 1000)
    guard = machine.open()
    ends = machine.wall() // 1000 + 3 * DAY_S
    asked = TaskRequest(task_type="x", payload={}, budget="$3", deadline=ends)
    task = guard.session("s", budget="$5", id="job").delegate(asked)
    worker = machine.open()
    session = worker.redeem(task.token)
    session.charge("serp", "$0.10")
    machine.ticks(ahead_s)
    session.task.answer("done", confidence=0.99)
    machine.ticks(-ahead_s)
    machine.accepts()
    with pytest.raises(SessionClosed):
        session.charge("serp", "$0.10")
    shop = Shop()
    with client(session, shop) as http, pytest.raises(SessionClosed):
        http.get(URL)
    assert task.result(timeout_s=2).cost == session.spent == Decimal("0.10")
    assert shop.nonces == set()
    worker.close()
    guard.close()
