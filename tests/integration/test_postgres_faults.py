"""The ledger's server, and the way to it, fail at every message: what is said held is in the ledger, and nothing is held twice."""

import gc
import os
import signal
import threading
import time
from decimal import Decimal

import psycopg
import pytest

from tests.support import postgres, processes
from tests.support.ledger import Books, a_hold, an_id, usd
from tests.support.merchant import Shop, client, make_guard
from tests.support.signers import SpySigner
from x402guard import LedgerUnavailable
from x402guard.frozen import replace
from x402guard.kernel.rows import HoldKind
from x402guard.ledger.authorize import Refusal, authorize, lapse_due
from x402guard.ledger.view import Scope
from x402guard.stores import open_store
from x402guard.stores.group_commit import Request
from x402guard.stores.postgres_rows import KnownRows
from x402guard.stores.postgres_schema import VERSION
from x402guard.stores.postgres_server import Server
from x402guard.stores.transacts import Proposal

pytestmark = pytest.mark.xdist_group("postgres")

CENT = "$0.01"


@pytest.fixture
def books(url, way):
    books = Books(way.url(url), wallet="$5.00")
    yield books
    books.close()


@pytest.fixture
def asked_first(monkeypatch):
    """The server is asked for the rows of each change, as it is where others have changed them."""
    monkeypatch.setattr(KnownRows, "find", lambda *_: None)


@pytest.mark.parametrize("plan", ["before", "half"])
def test_a_write_that_never_arrives_is_an_error_and_nothing_is_held(books, way, straight, plan, asked_first):
    way.plan = plan
    with pytest.raises(LedgerUnavailable) as caught:
        books.hold("h", CENT)
    assert (caught.value.retry, way.cuts) == ("later", 1)
    assert straight.hold(an_id("h")) is None
    assert books.hold("h", CENT).id == an_id("h"), "the next one goes over a new connection"
    assert straight.audit() == []


def test_a_commit_whose_answer_is_lost_is_found_in_the_ledger(books, way, straight):
    way.plan = "after"
    assert not isinstance(books.hold("h", CENT), Refusal)
    assert (way.cuts, straight.hold(an_id("h")).amount) == (1, usd(CENT))
    assert books.balances("wallet") == (0, 0, 0, usd(CENT))
    assert straight.audit() == []


@pytest.mark.long
@pytest.mark.usefixtures("asked_first")
def test_a_write_that_arrives_after_it_was_given_up_is_refused_by_the_server(books, way, straight):
    way.plan = "late"
    with pytest.raises(LedgerUnavailable):
        books.hold("h", CENT)
    assert straight.hold(an_id("h")) is None
    way.deliver()
    time.sleep(0.2)
    assert straight.hold(an_id("h")) is None, (
        "else a payment that was refused would be held, and its caller would not know"
    )
    assert straight.audit() == []


def test_what_another_process_has_written_alike_does_not_pass_for_ones_own(books, way, straight, url):
    """Both end the same hold at the same time, so their first entries have one hash; only one of them holds money."""
    books.hold("due", CENT, kind=HoldKind.TOOL)
    books.clock.tick(3_600)
    other = Books(url, session=None, clock=books.clock)
    mine = a_hold("mine", CENT, now_ms=books.clock.now_ms)

    def change(view):
        lapse_due(view)
        if way.plan is None and way.cuts == 0:
            other.change(lambda view: (lapse_due(view), authorize(view, their, {})), nodes=("s",), holds=("theirs",))
            way.plan = "before"
        return authorize(view, mine, {})

    their = a_hold("theirs", CENT, now_ms=books.clock.now_ms)
    with pytest.raises(LedgerUnavailable):
        books.change(change, nodes=("s",), holds=("mine",))
    assert (way.cuts, straight.hold(an_id("mine")), straight.hold(an_id("theirs")).amount) == (1, None, usd(CENT))
    other.close()


def test_a_server_that_does_not_come_back_leaves_it_unknown_and_says_so(books, way, straight, monkeypatch):
    monkeypatch.setattr("x402guard.stores.postgres._ASKED_AGAIN_S", (0.0, 0.05))
    way.plan, way.down = "after", True
    with pytest.raises(LedgerUnavailable, match="does not come back") as caught:
        books.hold("h", CENT)
    assert "expires at its deadline" in caught.value.advice
    assert straight.hold(an_id("h")) is not None, "it counts, until it expires"


def _request(store, scope, change):
    return Request(scope, store._work(scope, Proposal(scope, change)))


def _two(store):
    """Two changes that share a transaction, as when one thread waits behind the other."""
    ran = []

    def adds(name):
        def change(view):
            ran.append(name)
            view.put_mark(("test", name), {"runs": ran.count(name)})

        return _request(store, Scope(marks=(("test", name),), nodes=("s",)), change)

    return adds("mine"), adds("mate"), ran


def test_ctrl_c_behind_a_write_runs_no_change_again(books, monkeypatch, asked_first):
    say = Server.say

    def interrupted(server, sql, values=(), **more):
        answer = say(server, sql, values, **more)
        if f"write_{VERSION}(" in sql:
            monkeypatch.setattr(Server, "say", say)
            raise KeyboardInterrupt
        return answer

    mine, mate, ran = _two(books.store)
    monkeypatch.setattr(Server, "say", interrupted)
    with pytest.raises(KeyboardInterrupt):
        books.store._commit([mine, mate])
    assert ran == ["mine", "mate"]
    assert mate.over, "its thread does not run it again"
    with pytest.raises(LedgerUnavailable, match="before it answered"):
        mate.raise_error()
    assert books.store.marks("test", "") == {"mate": {"runs": 1}, "mine": {"runs": 1}}


def test_one_change_that_no_table_takes_fails_alone(books):
    mine, mate, _ = _two(books.store)
    scope = Scope(marks=(("test", "bad"),))
    bad = _request(books.store, scope, lambda view: view.put_mark(("test", "bad"), {"text": "\ud800"}))
    books.store._commit([mine, bad, mate])
    mine.raise_error()
    mate.raise_error()
    with pytest.raises(UnicodeEncodeError):
        bad.raise_error()
    assert set(books.store.marks("test", "")) == {"mine", "mate"}


@pytest.mark.usefixtures("asked_first")
def test_a_server_whose_process_is_stopped_is_not_waited_for_without_end(url, monkeypatch):
    monkeypatch.setattr("x402guard.stores.postgres_server._SILENT_S", -4.5)
    books, straight = Books(url, wallet="$5.00"), open_store(url)
    hold, stopped = a_hold("h", CENT), []

    def change(view):
        [(backend,)] = books.store._writer.run("SELECT pg_backend_pid()")
        os.kill(backend, signal.SIGSTOP)
        stopped.append(backend)
        return authorize(view, hold, {})

    began = time.monotonic()
    with pytest.raises(LedgerUnavailable, match="timeout"):
        books.change(change, nodes=("s",), holds=("h",))
    assert time.monotonic() - began < 5
    assert straight.hold(an_id("h")) is None
    os.kill(stopped[0], signal.SIGCONT)
    assert not isinstance(books.hold("h2", CENT), Refusal)
    assert straight.hold(an_id("h")) is None, "what it had been asked is refused now"
    assert straight.audit() == []
    straight.close()
    books.close()


def test_a_report_may_take_longer_than_a_payment(url, monkeypatch):
    monkeypatch.setattr("x402guard.stores.postgres_server._SILENT_S", -4.9)  # a tenth of a second for a payment
    store = open_store(url)
    with store.at_one_moment() as ledger:
        assert ledger._read(tuple, "SELECT pg_sleep(0.5), 1")[0][1] == 1
    store.close()


def test_a_store_that_is_not_closed_closes_its_connections_with_itself(url):
    say = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'x402guard' AND datname = current_database()"
    with psycopg.connect(url, autocommit=True) as server:

        def counts(number):
            for _ in range(100):  # the connection that made the ledger may still be closing
                if server.execute(say).fetchone() == (number,):
                    return True
                time.sleep(0.02)
            return False

        store = open_store(url)
        assert counts(1)
        del store
        gc.collect()
        assert counts(0)


def test_a_transaction_that_an_interrupt_has_left_open_swallows_nothing(books, straight):
    books.store._writer.say("BEGIN")
    books.hold("h", CENT)
    assert straight.hold(an_id("h")) is not None


@pytest.fixture
def patient_server(monkeypatch):
    """A server that ends no turn of a process that the machine has stalled."""
    monkeypatch.setattr("x402guard.stores.postgres._IN_TURN_MS", 2_000)


@pytest.mark.usefixtures("patient_server")
def test_a_slow_change_gets_its_turn_beside_a_fast_process(url):
    slow, fast = Books(url, wallet="$5.00"), Books(url, session=None)
    over = threading.Event()

    def runs():
        while not over.is_set():
            fast.change(lambda view: view.record("s", "test"), nodes=("s",))

    thread = threading.Thread(target=runs)
    thread.start()
    try:
        for _ in range(10):
            slow.change(lambda view: (time.sleep(0.02), view.record("s", "slow")), nodes=("s",))
    finally:
        over.set()
        thread.join(20)
    assert sum(entry.event == "slow" for entry in slow.store.entries("s")) == 10
    slow.close()
    fast.close()


def test_a_clock_of_the_server_that_jumps_is_found_out(url):
    store = open_store(url)
    store._server_clock.see(store.now_ms() + 40 * 86_400_000)
    believed_ms, ahead_ms = store._clock.read()
    assert (abs(believed_ms - time.time() * 1000) < 5_000, ahead_ms // 86_400_000) == (True, 40)
    store.close()


def test_a_server_that_is_started_anew_between_two_changes_is_not_noticed(books, way, straight):
    books.hold("h1", CENT)
    for connection in list(way._open):
        connection.shutdown(2)
    books.hold("h2", CENT)
    assert books.stored("h2").id == an_id("h2")
    assert straight.audit() == []


def test_while_the_server_is_away_nothing_is_signed_and_afterwards_it_goes_on(url, way):
    signer, shop = SpySigner(), Shop()
    with make_guard(way.url(url), signer=signer) as guard, guard.session("s", budget="$1.00") as session:
        with client(session, shop) as http:
            http.get("https://courts.example/1")
            way.down = True
            for connection in list(way._open):
                connection.shutdown(2)
            began = time.monotonic()
            with pytest.raises(LedgerUnavailable) as caught:
                http.get("https://courts.example/2")
            assert time.monotonic() - began < 10
            assert (len(signer.signed), len(shop.payments)) == (1, 1)
            assert "Bring the ledger's server back" in caught.value.advice
            way.down = False
            http.get("https://courts.example/2")
        assert (session.spent, len(shop.payments)) == (Decimal("0.02"), 2)


def test_a_decision_takes_two_round_trips_and_a_paid_request_seven(url, monkeypatch):
    said = []
    ask = Server.say

    def counted(server, sql, values=(), **more):
        said.append(sql)
        return ask(server, sql, values, **more)

    monkeypatch.setattr(Server, "say", counted)
    with make_guard(url) as guard, guard.session("s", budget="$1.00") as session:
        session.charge("search", CENT)
        session.remaining  # noqa: B018 - the connection that reads is made
        said.clear()
        session.charge("search", CENT)
        assert len(said) <= 4, said  # authorize and capture
        with client(session, Shop()) as http:
            http.get("https://courts.example/1")
            said.clear()
            http.get("https://courts.example/2")
            assert len(said) <= 7, said  # authorize 2, the signer 1, the claim 2, the answer handed over 2


STOPPED = """
import sys
sys.path.insert(0, "tests"), sys.path.insert(0, ".")
from tests.support.ledger import Books, a_hold
from x402guard.ledger.authorize import authorize
from x402guard.stores import postgres
import os, signal, time
url, in_turn = sys.argv[1], sys.argv[2] == "in turn"
books = Books(url, session=None)
if in_turn:
    books.store._hot = {"s": time.monotonic() + 60}
def change(view):
    print("inside", flush=True)
    sys.stdin.readline()
    return authorize(view, a_hold("stopped", "$0.01"), {})
held = books.change(change, nodes=("s",), holds=("stopped",))
print(type(held).__name__, flush=True)
"""


@pytest.mark.parametrize("how", ["at once", "in turn"])
def test_a_process_that_is_stopped_inside_a_change_delays_no_other(url, how):
    books = Books(url, wallet="$5.00")
    books.store._hot = {"s": time.monotonic() + (60 if how == "in turn" else 0)}
    books.hold("warm", CENT)
    other = processes.start(STOPPED, url, how)
    assert other.stdout.readline() == "inside\n"
    os.kill(other.pid, signal.SIGSTOP)
    try:
        waits = []
        for number in range(20):
            began = time.monotonic()
            assert not isinstance(books.hold(f"h{number}", CENT), Refusal)
            waits.append(time.monotonic() - began)
    finally:
        os.kill(other.pid, signal.SIGCONT)
    printed, errors = other.communicate("go\n")
    assert printed == "inside\nHold\n", (printed, errors)  # it has run again, on what the others have left
    usual = sorted(waits)[len(waits) // 2]  # on a machine with other work, each one takes longer
    # What the other process delays, it delays each time; a machine that stalls delays one or two.
    assert sorted(waits)[-4] < 0.1 + 5 * usual, waits
    assert books.store.audit() == []
    assert books.stored("stopped") is not None
    books.close()


@pytest.mark.usefixtures("patient_server")
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
def test_what_was_read_and_has_changed_meanwhile_is_read_again(url, isolation):
    """Each kind of row, read and not written: by another process's change between this one's load and its write."""
    set_default(url, f"default_transaction_isolation = '{isolation}'")
    mine, other = Books(url, wallet="$5.00"), Books(url, session=None)
    mine.hold("h", CENT)
    key = ("test", "known")

    def with_row(meanwhile, look, **scope):
        seen = []

        def change(view):
            seen.append(look(view))
            if len(seen) == 1:
                meanwhile()
            view.put_mark(("test", f"mine {len(seen)} {scope}"), {"seen": len(seen)})

        mine.change(change, **scope)
        return seen

    assert with_row(lambda: other.hold("h2", CENT), lambda view: view.node("s").held, nodes=("s",)) == [
        usd(CENT), 2 * usd(CENT),
    ]  # fmt: skip
    put = lambda value: other.change(lambda view: view.put_mark(key, value), marks=(key,))
    look = lambda view: view.mark(key)
    assert with_row(lambda: put({"n": 1}), look, marks=(key,)) == [None, {"n": 1}]
    assert with_row(lambda: put({"n": 2}), look, marks=(key,)) == [{"n": 1}, {"n": 2}]
    held = lambda view: view.hold("h3")
    assert [hold and hold.id for hold in with_row(lambda: other.hold("h3", CENT), held, holds=("h3",))] == [
        None,
        an_id("h3"),
    ]
    shown = lambda view: view.put_hold(replace(view.known_hold("h"), presented=1))
    times = lambda view: view.hold("h").presented
    assert with_row(lambda: other.change(shown, holds=("h",)), times, holds=("h",)) == [0, 1]
    assert mine.store.audit() == []
    mine.close()
    other.close()
    set_default(url, "default_transaction_isolation = DEFAULT")


def set_default(url, setting):
    with psycopg.connect(url, autocommit=True) as connection:
        [name] = connection.execute("SELECT current_database()").fetchone()
        connection.execute(f"ALTER DATABASE {name} SET {setting}")


def test_threads_of_several_stores_sell_exactly_the_budget(url):
    """Every change writes the wallet's row, so all of them conflict."""
    stores = [Books(url, wallet="$0.50")] + [Books(url, session=None) for _ in range(3)]
    held, failed = [], []

    def buy(number):
        for turn in range(20):
            try:
                if not isinstance(stores[number % 4].hold(f"{number}-{turn}", CENT), Refusal):
                    held.append((number, turn))
            except LedgerUnavailable as error:
                failed.append(error)

    threads = [threading.Thread(target=buy, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(held), failed) == (50, [])
    assert stores[0].balances("wallet")[3] == usd("$0.50")
    assert stores[0].store.audit() == []
    for books in stores:
        books.close()


BUYER = """
import sys, time
sys.path.insert(0, ".")
from tests.support.ledger import Books
from x402guard.errors import LedgerUnavailable
from x402guard.ledger.authorize import Refusal, authorize, lapse_due
from x402guard.kernel.rows import HoldKind
url, own, sessions, each = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
books = Books(url, session=None)
for number in range(sessions):
    books.open(f"{own}-{number}", "$100.00")
print("ready", flush=True)
sys.stdin.readline()
held, unsure = 0, 0
def asked(question):
    for _ in range(600):
        try:
            return question()
        except LedgerUnavailable:
            time.sleep(0.05)
    raise TimeoutError
def buy(name, session):
    global held, unsure
    try:
        held += not isinstance(books.hold(name, "$0.01", session), Refusal)
    except LedgerUnavailable:
        time.sleep(0.05)
        if asked(lambda: books.stored(name)) is None:
            return buy(name, session)
        unsure += 1
for turn in range(each):
    for number in range(sessions):
        buy(f"{own}-{number}-{turn}", f"{own}-{number}")
print(held, unsure, flush=True)
"""


@pytest.fixture
def folder():
    postgres.server()  # skips where there is none
    with postgres.a_folder() as folder:
        yield folder


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("payments", "restarts"), [(2_000, 3)])
def test_eight_processes_and_two_hundred_sessions_hold_exactly_the_budget_while_the_server_crashes(
    folder, payments, restarts
):
    postgres.make_cluster(folder)
    postgres.start(folder, fsync="on")
    url = postgres.url(folder, "postgres")
    try:
        books = Books(url, wallet=f"${payments / 100}", session=None)
        each = payments // 200 + 2
        buyers = [processes.start(BUYER, url, number, 25, each) for number in range(8)]
        assert [buyer.stdout.readline() for buyer in buyers] == ["ready\n"] * 8
        for buyer in buyers:
            buyer.stdin.write("go\n")
            buyer.stdin.flush()
        for _ in range(restarts):
            time.sleep(3)
            postgres.stop(folder, "immediate")
            postgres.start(folder, fsync="on")
        sums = [buyer.communicate(timeout=300) for buyer in buyers]
        counts = [
            [int(number) for number in printed.split()] for printed, errors in sums if printed or pytest.fail(errors)
        ]
        said, unsure = (sum(column) for column in zip(*counts, strict=True))
        live = len(books.store.outstanding())
        assert (live, said + unsure) == (payments, payments), counts
        assert books.balances("wallet")[3] == payments * usd(CENT)
        assert books.store.audit() == []
        books.close()
    finally:
        postgres.stop(folder, "immediate")
