"""Sessions of one wallet in a fleet: who waits for whom, that a trip is exact, and that no order of them locks another out."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import psycopg
import pytest

from tests.support import processes
from tests.support.ledger import Books, a_hold, an_id, usd
from x402guard import Owner
from x402guard.kernel.rows import Evidence, HoldKind
from x402guard.ledger.authorize import Refusal, authorize
from x402guard.ledger.bills import STATED
from x402guard.ledger.budgets import recall, trip
from x402guard.ledger.events import Capture, Void
from x402guard.ledger.owner import set_limit
from x402guard.ledger.sessions import Closing, close_node
from x402guard.ledger.transitions import apply

pytestmark = pytest.mark.xdist_group("postgres")

CENT = "$0.01"


@pytest.fixture
def mine(url):
    books = Books(url, wallet="$5.00", session="$5.00")
    books.open("t", "$5.00")
    yield books
    assert books.store.audit() == []
    books.close()


@pytest.fixture
def other(url, mine):
    books = Books(url, session=None, clock=mine.clock)
    yield books
    books.close()


def in_between(books, meanwhile, hold_id="h", node="s"):
    """Authorize a payment, and do something between its load and its write. Returns the result and how often it ran."""
    runs = []
    hold = a_hold(hold_id, CENT, node, now_ms=books.clock.now_ms)

    def change(view):
        runs.append(view)
        if len(runs) == 1:
            meanwhile()
        return authorize(view, hold, {"kind": "payment"})

    return books.change(change, nodes=(node,), holds=(hold_id,)), len(runs)


def test_a_payment_out_of_what_is_idle_waits_for_no_row_above_it(url, mine):
    mine.hold("first", CENT)
    with psycopg.connect(url) as locked:
        locked.execute("SELECT FROM x402guard.nodes WHERE id = 'wallet' FOR UPDATE")
        began = time.monotonic()
        for number in range(3):
            assert not isinstance(mine.hold(f"h{number}", CENT), Refusal)
        assert time.monotonic() - began < 1, "a lock is waited for two seconds"


def test_what_another_session_draws_meanwhile_does_not_matter_to_it(mine, other):
    mine.hold("first", CENT)
    held, runs = in_between(mine, lambda: other.hold("theirs", CENT, "t"))
    assert (held.id, runs) == (an_id("h"), 1)


def test_two_that_draw_at_the_same_time_do_not_draw_one_dollar_twice(mine, other):
    held, runs = in_between(mine, lambda: other.hold("theirs", CENT, "t"))
    assert (held.id, runs >= 2) == (an_id("h"), True)  # on a busy machine it may lose its turn, and runs once more
    assert mine.row("wallet").granted_out == sum(mine.row(node).granted_in for node in ("s", "t"))


STOPS = {
    "a trip of the wallet": lambda view: trip(view, "wallet", "kill_switch", "for a test"),
    "a trip of the session": lambda view: trip(view, "s", "kill_switch", "for a test"),
    "its end": lambda view: close_node(view, "s", Closing("opener-of-s")),
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_what_stops_a_budget_stops_a_payment_that_was_decided_before(mine, other, stop):
    mine.hold("first", CENT)

    def meanwhile():
        other.change(stop, nodes=("wallet", "s"), marks=(("inputs", "s"),))

    refused, runs = in_between(mine, meanwhile)
    assert (isinstance(refused, Refusal), runs >= 2) == (True, True)
    assert mine.stored("h") is None


def test_a_trip_waits_for_a_payment_that_is_being_written_and_none_is_written_after_it(url, mine, other):
    """The server is stopped between a payment's look at the wallet's rules and its commit: a trip does not overtake it."""
    mine.hold("first", CENT)
    with psycopg.connect(url) as locked, ThreadPoolExecutor() as pool:
        locked.execute("SELECT FROM x402guard.nodes WHERE id = 's' FOR UPDATE")
        paying = pool.submit(lambda: mine.hold("h", CENT))
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        with psycopg.connect(url, autocommit=True) as look:
            while look.execute(waits).fetchone() == (0,):
                time.sleep(0.01)
            tripping = pool.submit(lambda: other.change(STOPS["a trip of the wallet"], nodes=("wallet",)))
            while look.execute(waits).fetchone() == (1,):
                time.sleep(0.01)
        assert not tripping.done()
        locked.rollback()
        assert not isinstance(paying.result(), Refusal)
        tripping.result()
    assert isinstance(mine.hold("h2", CENT), Refusal)


def test_what_is_missing_is_recalled_from_sessions_of_other_processes(mine, other):
    for number in range(21):  # both keep some of the five dollars idle
        mine.hold(f"m{number}", "$0.05", "s")
        other.hold(f"o{number}", "$0.05", "t")
    assert mine.row("s").idle
    assert other.row("t").idle
    left = 500 - 210
    held = [each for number in range(left + 5) if not isinstance(each := mine.hold(f"c{number}", CENT), Refusal)]
    assert len(held) == left
    assert mine.node("wallet").used == usd("$5.00")
    assert isinstance(other.hold("more", CENT, "t"), Refusal)


def test_two_readings_of_the_tree_say_what_is_used_and_not_what_is_idle(mine, other):
    mine.hold("h", CENT)
    other.hold("theirs", CENT, "t")
    assert mine.row("wallet").granted_out > usd("$0.02")
    nodes = {node.id: node for node in mine.store.nodes()}
    assert (nodes["wallet"].used, nodes["wallet"].live) == (usd("$0.02"), usd("$0.02"))
    assert {node.id: node for node in mine.store.nodes("s")} == {id_: nodes[id_] for id_ in ("s", "wallet")}
    with mine.store.at_one_moment() as moment:
        assert {node.id: node for node in moment.nodes()} == nodes


def test_an_owner_may_lower_a_limit_to_what_is_used(url, mine):
    mine.hold("h", "$0.10")
    assert mine.row("wallet").counted == usd("$0.40")
    with Owner(url) as owner:
        change = owner.set_budget("wallet", "0.30")
        assert (change.used, change.left) == (Decimal("0.10"), Decimal("0.20"))
        change = owner.set_budget("wallet", "20.00")
        assert (change.used, change.left) == (Decimal("0.10"), Decimal("19.90"))


def test_threads_that_write_one_mark_take_turns_for_it_and_no_other_waits(url, mine):
    """A mark of all sessions, as a price or a breaker of a seller's: its writers conflict, though their sessions do not."""
    key = ("test", "shared")
    stores = [Books(url, session=None, clock=mine.clock) for _ in range(4)]
    for number in range(4):
        mine.open(f"u{number}", "$1.00")

    def count(number):
        def change(view):
            view.put_mark(key, {"n": (view.mark(key) or {"n": 0})["n"] + 1})
            return authorize(view, a_hold(f"{number}-{turn}", CENT, f"u{number}", now_ms=view.now_ms), {})

        for turn in range(15):
            stores[number].change(change, nodes=(f"u{number}",), holds=(f"{number}-{turn}",), marks=(key,))

    threads = [threading.Thread(target=count, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert mine.change(lambda view: view.mark(key), marks=(key,)) == {"n": 60}
    assert mine.node("wallet").used == 60 * usd(CENT)
    for books in stores:
        books.close()


HUNTER = """
import random, sys, time
sys.path.insert(0, ".")
from tests.support.ledger import Books, a_transfer, usd
from x402guard.errors import IllegalTransition, LedgerUnavailable
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.budgets import recall, trip
from x402guard.kernel.rows import Evidence
from x402guard.ledger.owner import reset_node, set_limit
from x402guard.ledger.sessions import Closing, close_node
from x402guard.ledger.events import Capture, Void
url, own, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
draws, books = random.Random(own), Books(url, session=None)
mine = [f"{own}-{number}" for number in range(4)]
for session in mine:
    books.open(session, "$100.00")
print("ready", flush=True)
sys.stdin.readline()
limit = lambda node, dollars: books.change(lambda v: set_limit(v, node, usd(dollars), "it"), nodes=(node,), marks=(("owner_limit", node),))
def stop(node):
    books.change(lambda v: trip(v, node, "kill_switch", "a test"), nodes=(node,))
    books.change(lambda v: v.node(node).state == "tripped" and v.node(node).room >= 0 and reset_node(v, node, "it"), nodes=(node,))
until, made, slowest, number, errors = time.monotonic() + seconds, 0, 0.0, 0, []
while time.monotonic() < until:
    number += 1
    session, what, began = draws.choice(mine), draws.random(), time.monotonic()
    try:
        if what < 0.80:
            hold_id = f"{session}-{number}"
            held = books.hold(hold_id, f"$0.{draws.randint(1, 30):02}", session, scheme="upto")
            if not isinstance(held, Refusal):
                made += 1
                half = Capture(held.amount // 2, Evidence.CHAIN, a_transfer(f"0x{own}", number))
                books.step(hold_id, Void("not signed") if draws.random() < 0.7 else half)
        elif what < 0.88:
            books.change(lambda v: recall(v, "wallet"), nodes=("wallet",))
        elif what < 0.92:
            stop("wallet")
        elif what < 0.95:
            stop(session)
        elif what < 0.97:
            limit(session, draws.choice(["$2.00", "$100.00"]))
        else:
            books.change(lambda v: close_node(v, session, Closing(f"opener-of-{session}")), nodes=(session,), marks=(("inputs", session),))
            books.open(session, "$100.00" if books.node(session).limit >= usd("$100.00") else "$2.00")
    except LedgerUnavailable as error:
        errors.append(str(error))
    slowest = max(slowest, time.monotonic() - began)
print(made, round(slowest, 2), errors, flush=True)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_sixteen_processes_of_payments_recalls_trips_and_ends_lock_no_other_out(url, mine):
    hunters = [processes.start(HUNTER, url, number, 20) for number in range(16)]
    assert [hunter.stdout.readline() for hunter in hunters] == ["ready\n"] * 16
    for hunter in hunters:
        hunter.stdin.write("go\n")
        hunter.stdin.flush()
    said = [hunter.communicate(timeout=200) for hunter in hunters]
    assert [errors for _, errors in said] == [""] * 16
    with psycopg.connect(url) as look:
        [deadlocks] = look.execute(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    assert deadlocks == 0
    assert all(int(printed.split()[0]) > 0 for printed, _ in said)
    assert all(printed.rstrip().endswith("[]") for printed, _ in said), said


MARKS = (("owner_limit", "s"), ("owner_limit", "wallet"), ("inputs", "s"))
ACTORS = {
    "a payment": lambda number: (
        lambda view: authorize(view, a_hold(f"p{number}", "$0.05", "s", now_ms=view.now_ms), {})
    ),
    "a sibling's payment": lambda number: (
        lambda view: authorize(view, a_hold(f"q{number}", "$0.90", "t", now_ms=view.now_ms), {})
    ),
    "a void": lambda _: lambda view: apply(view, "first", Void("not used"), STATED),
    "a capture": lambda _: lambda view: apply(view, "second", Capture(usd("$0.01"), Evidence.CLAIMED), STATED),
    "a trip of the session": lambda _: lambda view: trip(view, "s", "kill_switch", "for a test"),
    "a trip of the wallet": lambda _: lambda view: trip(view, "wallet", "kill_switch", "for a test"),
    "a lower limit of the wallet": lambda _: lambda view: set_limit(view, "wallet", usd("$0.30"), "a test"),
    "an end": lambda _: lambda view: close_node(view, "s", Closing("opener-of-s")),
    "a recall": lambda _: lambda view: recall(view, "wallet"),
}
ABOUT_T, ABOUT_ALL = {"a sibling's payment"}, {"a trip of the wallet", "a lower limit of the wallet", "a recall"}
HOLDS = {"a payment": ("p1", "p2"), "a sibling's payment": ("q1", "q2"), "a void": ("first",), "a capture": ("second",)}


def scope_of(actor):
    """Each names what it is about, and nothing above that."""
    node = "t" if actor in ABOUT_T else "wallet" if actor in ABOUT_ALL else "s"
    return {"nodes": (node,), "holds": HOLDS.get(actor, ()), "marks": MARKS}


def begun(books):
    books.open("t", "$9.00")
    for hold_id in ("first", "second"):
        books.hold(hold_id, "$0.10", kind=HoldKind.TOOL)  # one that any process may end
    return books


def standing(books):
    said = ("id", "captured", "held", "granted_in", "granted_out", "live", "state", "limit")
    return sorted(tuple(getattr(node, name) for name in said) for node in books.store.nodes())


@pytest.mark.parametrize("second", ACTORS)
@pytest.mark.parametrize("first", ACTORS)
def test_whatever_happens_between_a_look_and_a_write_it_is_as_if_one_had_come_after_the_other(url, first, second):
    """Each actor of a fleet decides while each other one commits; what stands then is what a ledger without idle budget says."""
    mine = begun(Books(url, wallet="$1.20", session="$1.00"))
    other = Books(url, session=None, clock=mine.clock)
    exact = begun(Books(wallet="$1.20", session="$1.00", clock=mine.clock))
    late, early = ACTORS[first](1), ACTORS[second](2)
    runs = []

    def change(view):
        runs.append(view)
        if len(runs) == 1:
            other.change(early, **scope_of(second))
        return late(view)

    mine.change(change, **scope_of(first))
    exact.change(early, **scope_of(second))
    exact.change(late, **scope_of(first))
    assert standing(mine) == standing(exact)
    assert mine.store.audit() == []
    for books in (mine, other, exact):
        books.close()
