"""After a clock that was ahead, and that the owner has accepted back: windows, guards and answered tasks."""

import itertools
import time
from decimal import Decimal

import httpx
import pytest

from tests.support.ledger import Books, Clock, usd
from tests.support.merchant import URL, Shop, accept, client, make_guard, required
from x402guard import Breaker, PaymentRefused, Policy, SessionClosed, Velocity
from x402guard.delegation.messages import TaskRequest
from x402guard.guard.clock import accept_clock
from x402guard.ledger.model import WALLET, Evidence, Hold, NodeKind, Window
from x402guard.ledger.sessions import NodeRequest, open_node
from x402guard.ledger.transitions import Capture, Void
from x402guard.ledger.windows import window_start_ms
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
