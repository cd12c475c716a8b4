"""A $10 parent and six children of $2 that spend at once, in threads and in processes: exactly $10.00 are captured."""

import json
import threading
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path

import httpx
import pytest

from tests.support import processes
from tests.support.ledger import START_MS, Clock
from tests.support.merchant import URL, Shop, accept, client, make_guard, required
from x402guard import BudgetExhausted, Policy, SettlementUncertain
from x402guard.stores import open_store

pytestmark = pytest.mark.xdist_group("oversell")

ROOT = Path(__file__).parents[2]
TEN, CHILDREN = Decimal("10.00"), 6
POLICY = Policy(breaker=None, loop=None, bulkhead=None)


@pytest.fixture(params=["memory", "sqlite"])
def guard(request, tmp_path):
    with make_guard(
        "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'l.db'}", policy=POLICY
    ) as guard:
        yield guard


def at_once(count, work):
    """Run *work* of a number in so many threads that begin together; raise what any of them raised."""
    gate, failed = threading.Barrier(count), []

    def run(number):
        try:
            gate.wait(60)
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert failed == []


def checked(parent, children, made):
    """What was made, what each child captured and what the parent captured are one sum: ten dollars."""
    assert sum(made) == sum(child.spent for child in children) == parent.spent == TEN
    assert parent.held == parent.remaining == 0
    assert all(child.held == 0 and child.spent <= 2 for child in children)
    nodes = {node.id: node for node in parent.shell.store.nodes()}
    assert nodes[parent.id].granted_out == sum(nodes[child.id].captured for child in children) == 10 * 10**9
    assert {node.live for node in nodes.values()} == {0}


def test_twelve_threads_that_hold_capture_less_and_give_back(guard):
    parent, made = guard.session("parent", budget="$10.00"), []
    children = [parent.child(f"c{number}", budget="$2.00") for number in range(CHILDREN)]

    def spend(number):
        child = children[number % CHILDREN]
        for call in range(45):
            try:
                with child.hold("render", up_to="$0.08") as job:
                    if call % 5 == 4:
                        job.void()
                    else:
                        job.capture("$0.05")
                made.append(Decimal("0.05") if call % 5 != 4 else Decimal(0))
            except BudgetExhausted:
                continue

    def fill(number):  # what is left where a hold of eight cents no longer fits
        for _ in range(60):
            try:
                children[number % CHILDREN].charge("serp", "$0.01")
            except BudgetExhausted:
                return
            made.append(Decimal("0.01"))

    at_once(12, spend)
    at_once(12, fill)
    checked(parent, children, made)


def test_twelve_threads_that_pay(guard):
    shop = Shop(required(accept(50_000)))
    made = []
    with guard.session("parent", budget="$10.00") as parent:
        children = [parent.child(f"c{number}", budget="$2.00") for number in range(CHILDREN)]

        def buy(number):
            with client(children[number % CHILDREN], shop) as http:
                for call in range(22):
                    try:
                        assert http.get(f"{URL}/{number}/{call}").status_code == 200
                        made.append(1)
                    except BudgetExhausted:
                        continue

        at_once(12, buy)
        assert len(made) == len(shop.nonces) == 200
        assert shop.signed == 10_000_000
        assert (parent.spent + parent.held, parent.remaining) == (TEN, 0)
        assert sum(child.spent + child.held for child in children) == TEN
        assert all(child.spent + child.held <= 2 for child in children)


def test_a_customers_day_under_twelve_threads_while_it_turns(tmp_path):
    clock = Clock(START_MS // 86_400_000 * 86_400_000 + 86_399_000)
    store = open_store(f"sqlite:///{tmp_path / 'l.db'}", clock_ms=clock)
    made, turned = {0: [], 1: []}, threading.Event()
    with make_guard(store, policy=POLICY) as guard:
        day = guard.budget("customer", "$10.00", per="day")
        children = [day.session(f"c{number}", budget="$100") for number in range(CHILDREN)]

        def spend(number):
            for call in range(130):
                if call == 30 and number == 0:
                    clock.tick(2)
                    turned.set()
                if call == 100:
                    assert turned.wait(60)
                try:
                    children[number % CHILDREN].charge("serp", "$0.05")
                except BudgetExhausted:
                    continue

        at_once(12, spend)
        assert (day.spent, day.held, day.remaining) == (TEN, 0, 0)
        midnight = clock.now_ms // 86_400_000 * 86_400_000
        for entry in store.entries(day.id):
            made[int(entry.at_ms >= midnight)].append(entry.captured)
        assert sum(made[0]) <= 10 * 10**9
        assert sum(made[1]) == 10 * 10**9
    store.close()


SPENDER = """
import json, sys, threading
from decimal import Decimal
from tests.support.merchant import make_guard
from x402guard import BudgetExhausted, Policy
url, own, under = sys.argv[1:]
made, failed = [], []
with make_guard(url, policy=Policy(breaker=None, loop=None, bulkhead=None)) as guard:
    if under == "budget":
        child = guard.budget("parent").session("c" + own, budget="$2.00")
    else:
        child = guard.session("parent", id="parent").child("c" + own, budget="$2.00")
    print("ready", flush=True)
    sys.stdin.readline()
    def spend(number):
        for call in range(60):
            try:
                with child.hold("render", up_to="$0.05") as job:
                    job.capture("$0.05" if call % 2 else "$0.03")
                made.append(Decimal("0.05") if call % 2 else Decimal("0.03"))
            except BudgetExhausted:
                pass
            except Exception as error:
                failed.append(repr(error))
        for _ in range(30):
            try:
                child.charge("serp", "$0.01")
                made.append(Decimal("0.01"))
            except BudgetExhausted:
                return
    threads = [threading.Thread(target=spend, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    print(json.dumps([str(sum(made)), str(child.spent), failed]))
"""


@pytest.mark.parametrize("under", ["session", "budget"])
def test_six_processes_on_one_file(tmp_path, under):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with ExitStack() as stack:
        guard = stack.enter_context(make_guard(url, policy=POLICY))
        parent = (
            guard.budget("parent", "$10.00", per="month")
            if under == "budget"
            else guard.session("parent", budget="$10.00", id="parent")
        )
        spenders = [stack.enter_context(processes.start(SPENDER, url, n, under)) for n in range(CHILDREN)]
        for spender in spenders:
            assert spender.stdout.readline() == "ready\n"
        for spender in spenders:
            spender.stdin.write("go\n")
            spender.stdin.flush()
        told = [json.loads(spender.communicate(timeout=90)[0]) for spender in spenders]
        assert [failed for _, _, failed in told] == [[]] * CHILDREN
        made, spent = ([Decimal(row[column]) for row in told] for column in (0, 1))
        assert made == spent
        assert sum(made) == parent.spent == TEN
        assert max(spent) <= 2
        assert (parent.held, parent.remaining) == (0, 0)
        assert {node.live for node in guard.shell.store.nodes()} == {0}


def test_closed_children_with_payments_out_leave_no_room_to_their_siblings(guard):
    """What is out counts until it ends, though whoever sent it is gone."""
    shop = Shop(required(accept(1_000_000)), paid=httpx.ReadError("reset"))
    with guard.session("parent", budget="$10.00") as parent:

        def lose(number):
            with parent.child(f"c{number}", budget="$2.00") as child, client(child, shop) as http:
                for call in range(3):
                    try:
                        http.get(f"{URL}/{number}/{call}")
                    except (SettlementUncertain, BudgetExhausted):
                        continue

        at_once(CHILDREN, lose)
        assert len(shop.nonces) == 10
        assert (parent.held, parent.remaining) == (TEN, 0)
        with pytest.raises(BudgetExhausted), client(parent.child("late", budget="$2.00"), Shop()) as http:
            http.get(f"{URL}/late")
