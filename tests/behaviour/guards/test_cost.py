"""What a decision costs does not grow with what a session has done: rows, bytes and the database's own steps are counted."""

import json
from collections import Counter

import httpx
import pytest

from tests.support.agent import Agent
from tests.support.ledger import Clock
from tests.support.merchant import PAYEE, URL, Shop, client, make_guard, required
from x402guard import Loop, Policy, SettlementUncertain, Spike, Velocity
from x402guard.policy import Breaker, Timeouts
from x402guard.stores.memory import MemoryStore
from x402guard.stores.sqlite import SqliteStore

EVERY_GUARD = Policy(
    loop=Loop(calls=20, window_s=2_000, longest_cycle=4, failures=1_000),
    spike=Spike(window=20),
    velocity=Velocity(
        dollars_per_minute="$900", dollars_per_hour="$900", dollars_per_day="$900", calls_per_minute=10**6,
        calls_per_hour=10**6, calls_per_day=10**6, percent_per_payee=100,
    ),
    breaker=Breaker(failures=1_000),
    max_steps=10**6,
    max_calls={"serp": 10**6, "GET courts.example/opinion/42": 10**6},
    timeouts=Timeouts(step_s=300 * 86_400, session_s=300 * 86_400),
)  # fmt: skip


class Counting:
    """What the changes of a store have loaded and written since it was last asked."""

    def __init__(self):
        self.counts = Counter()

    def around(self, change):
        def counted(view):
            self.counts["transactions"] += 1
            self._add("loaded", view)
            result = change(view)
            self.counts["written"] += len(view.changed_nodes) + len(view.changed_holds) + len(view.changed_marks)
            self.counts["entries"] += len(view.entries)
            self.counts["bytes written"] += sum(
                len(json.dumps(value)) for _, value in view.change_set(durable=True).marks
            )
            return result

        return counted

    def _add(self, verb, view):
        self.counts[verb] += len(view.nodes()) + len(view._holds) + len(view._marks)
        self.counts[f"bytes {verb}"] += sum(len(json.dumps(value)) for value in view._marks.values())

    def taken(self):
        counts, self.counts = self.counts, Counter()
        return counts


class CountingSqlite(SqliteStore):
    """Books in a file that count, the steps of the database's machine among it: a scan of any table would show there."""

    def __init__(self, path, clock):
        self.counting = Counting()
        super().__init__(path, clock_ms=clock)
        for connection in (self._writer, self._reader):
            connection.set_progress_handler(self._stepped, 10)

    def _stepped(self):
        self.counting.counts["database"] += 10
        return 0

    def transact(self, scope, change):
        return super().transact(scope, self.counting.around(change))


class CountingMemory(MemoryStore):
    def __init__(self, clock):
        self.counting = Counting()
        super().__init__(clock_ms=clock)

    def transact(self, scope, change):
        return super().transact(scope, self.counting.around(change))


def store_of(kind, folder, clock):
    return CountingMemory(clock) if kind == "memory" else CountingSqlite(folder / "l.db", clock)


def cost_of(store, step, numbers):
    """What one step costs, over ten of them."""
    store.counting.taken()
    for number in numbers:
        step(number)
    return store.counting.taken()


def assert_flat(early, late):
    assert early["transactions"] == late["transactions"] >= 10
    for name in early | late:
        assert late[name] <= 1.5 * early[name], (name, early, late)


STEPS = {
    "charge": Agent.charge,
    "the same charge": lambda agent, _number: agent.charge(1),
    "think": Agent.think,
    "pay": Agent.pay,
    "use": Agent.use,
}


def works(agent, number):
    """Mostly what is new, now and then the same search or a payment."""
    name = {0: "the same charge", 5: "pay"}.get(number % 10, "charge")
    STEPS[name](agent, number)


PACE_S = 1_000  # every window is full at the hundredth call


@pytest.mark.one_in(3)
@pytest.mark.parametrize("many", [800, pytest.param(5_000, marks=[pytest.mark.long, pytest.mark.large])])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_the_five_thousandth_step_costs_what_the_hundredth_did(tmp_path, kind, many):
    clock = Clock()
    store = store_of(kind, tmp_path, clock)
    with make_guard(store, policy=EVERY_GUARD) as guard, guard.session("s", budget="$800") as session:
        agent = Agent(session)

        def steps(take, numbers):
            for number in numbers:
                clock.tick(PACE_S)
                take(agent, number)

        def costs(first):
            found = {}
            for name, take in STEPS.items():
                store.counting.taken()
                steps(take, range(first, first + 10))
                found[name] = store.counting.taken()
            return found

        for take in STEPS.values():
            steps(take, range(50, 72))  # each kind's own memory is full, too
        early = costs(100)
        steps(works, range(200, many))
        late = costs(many)
        for name in STEPS:
            assert_flat(early[name], late[name])
        assert session.report().to_dict()["state"] == "open"
    store.close()


@pytest.mark.parametrize("many", [500, pytest.param(1_500, marks=pytest.mark.long)])
def test_a_refusal_costs_the_same_however_many_there_were(tmp_path, many):
    store = CountingSqlite(tmp_path / "l.db", Clock())
    with make_guard(store, policy=Policy(max_steps=1)) as guard, guard.session("s", budget="$1") as session:
        agent = Agent(session)
        agent.charge()

        def refused(number):
            assert agent.take("charge", number) == "max_steps"

        for number in range(90):
            refused(number)
        early = cost_of(store, refused, range(10))
        for number in range(many):
            refused(number)
        assert_flat(early, cost_of(store, refused, range(10)))
    store.close()


@pytest.mark.parametrize("many", [200, pytest.param(600, marks=pytest.mark.long)])
def test_payments_in_doubt_make_no_later_decision_dearer(tmp_path, many):
    clock = Clock()
    store = CountingSqlite(tmp_path / "l.db", clock)
    with make_guard(store, policy=EVERY_GUARD) as guard, guard.session("s", budget="$800") as session:
        shop = Shop(lambda request: required(url=str(request.url)), paid=httpx.ReadError("reset"))
        http, agent = client(session, shop), Agent(session)

        def lost(number):
            with_doubt = http.build_request("GET", URL, params={"lost": number})
            with pytest.raises(SettlementUncertain):
                http.send(with_doubt)

        for number in range(50):
            lost(number)
        early = cost_of(store, agent.pay, range(10))
        for number in range(50, many):
            lost(number)
        assert_flat(early, cost_of(store, agent.pay, range(20, 30)))
        assert len(store.outstanding()) == many
    store.close()


@pytest.mark.parametrize("many", [100, pytest.param(300, marks=pytest.mark.long)])
def test_many_sessions_and_payees_make_no_decision_of_one_dearer(tmp_path, many):
    clock = Clock()
    store = CountingSqlite(tmp_path / "l.db", clock)
    policy = Policy(velocity=Velocity(new_payees_per_day=None), breaker=None)
    with make_guard(store, policy=policy) as guard, guard.session("s", budget="$10") as session:
        agent = Agent(session)
        for number in range(20):
            agent.pay(number)
        early = cost_of(store, agent.pay, range(100, 110))
        for number in range(many):
            with guard.session(f"other {number}", budget="$1") as other:
                stranger = Agent(other)
                stranger.payee = f"0x{number + 1:040x}"
                stranger.pay(number)
        agent.payee = PAYEE
        assert_flat(early, cost_of(store, agent.pay, range(200, 210)))
    store.close()


def test_no_session_reads_those_beside_it_and_no_budget_those_below(ledger_url, monkeypatch):
    with make_guard(ledger_url) as guard:
        budget = guard.budget("customer", "$5.00")
        for number in range(3):
            with budget.session(f"other {number}", budget="$1.00") as other:
                other.charge("search", "$0.01")
        store = type(guard.shell.store)
        read, asked = store.nodes, []
        monkeypatch.setattr(store, "nodes", lambda self, under=None: asked.append(under) or read(self, under))
        assert (str(budget.remaining), str(budget.spent), budget.held) == ("4.97", "0.03", 0)
        assert not budget.would_exceed("$4.97")
        with budget.session("mine", budget="$1.00", id="mine") as session:
            Agent(session).charge()
            assert guard.budget("customer").remaining == budget.remaining
    if ledger_url != "memory://":
        with make_guard(ledger_url) as guard, guard.budget("customer").session("mine", id="mine"):
            pass
    assert asked == []
