"""A process decides on the rows that it knows: what others have changed meanwhile is seen, and nothing is believed that is not compared."""

import time
from functools import partial
from random import Random

import psycopg
import pytest

from tests.support.ledger import STATED, Books, Clock, a_hold, an_id, usd
from x402guard.errors import ConfigError, IllegalTransition
from x402guard.kernel.rows import WALLET, Evidence, Hold, HoldKind, NodeKind, NodeState
from x402guard.ledger.authorize import Refusal, authorize, check_open, lapse_due
from x402guard.ledger.events import Capture, Void
from x402guard.ledger.owner import owner_mark, reset_node, set_limit, trip_node
from x402guard.ledger.sessions import Closing, close_node
from x402guard.ledger.transitions import apply
from x402guard.ledger.view import Scope
from x402guard.stores import postgres_rows
from x402guard.stores.postgres_rows import KnownRows
from x402guard.stores.postgres_server import Server
from x402guard.stores.rows import NODE_COLUMNS

pytestmark = pytest.mark.xdist_group("postgres")

CENT = "$0.01"


def count(view, marks):
    for key in marks:
        view.put_mark(key, {"count": (view.mark(key) or {"count": 0})["count"] + 1})


class Many:
    """Some processes on one ledger, and one-line verbs on each. *remembers*: False for what always asks first."""

    def __init__(self, url, processes, patch=None):
        if patch is not None:
            patch.setattr(KnownRows, "find", lambda *_: None)
        self.clock = Clock()
        first = Books(url, wallet="$5.00", clock=self.clock)
        first.open("team", "$1.50", kind=NodeKind.BUDGET)
        first.open("t", "$1.00", parent="team")
        self.books = [first, *(Books(url, session=None, clock=self.clock) for _ in range(processes - 1))]

    def close(self):
        for books in self.books:
            books.close()

    def tool(self, at, name, amount, node, marks=()):
        hold = a_hold(name, amount, node, HoldKind.TOOL, now_ms=self.clock.now_ms)

        def change(view):
            count(view, marks)
            return authorize(view, hold, {"kind": "tool"})

        return self.books[at].change(change, nodes=(node,), holds=(name,), marks=tuple(marks))

    def charge(self, at, name, amount, node, marks=()):
        hold = a_hold(name, amount, node, HoldKind.TOOL, now_ms=self.clock.now_ms)

        def change(view):
            found = authorize(view, hold, {"kind": "tool"})
            if not isinstance(found, Refusal):
                apply(view, hold.id, Capture(hold.amount, Evidence.ESTIMATE), STATED)
                count(view, marks)
            return found

        return self.books[at].change(change, nodes=(node,), holds=(name,), marks=tuple(marks))

    def end(self, at, name, amount):
        event = Capture(usd(amount), Evidence.ESTIMATE)
        return self.books[at].change(lambda view: apply(view, name, event, STATED), holds=(name,))

    def owner(self, at, node, what):
        changes = {
            "trip": lambda view: trip_node(view, node, "enough", by="me"),
            "reset": lambda view: reset_node(view, node, "me"),
            "lower": lambda view: set_limit(view, node, usd("$0.10"), "me"),
            "close": lambda view: close_node(view, node, Closing(f"opener-of-{node}")),
        }
        return self.books[at].change(changes[what], nodes=(node,), marks=(owner_mark(node), ("inputs", node)))

    def rows(self):
        """All that the ledger has, but for what a server numbers itself."""
        with psycopg.connect(self.books[0].store._url) as server:
            ask = {
                "nodes": "SELECT to_jsonb(n) - 'rowid' - 'version' - 'rules' FROM x402guard.nodes AS n ORDER BY id",
                "holds": "SELECT to_jsonb(h) - 'rowid' - 'version' FROM x402guard.holds AS h ORDER BY id",
                "marks": "SELECT kind, key, value FROM x402guard.marks ORDER BY 1, 2",
                "entries": "SELECT * FROM x402guard.entries ORDER BY node_id, seq",
            }
            return {name: server.execute(sql).fetchall() for name, sql in ask.items()}


@pytest.fixture
def many(url):
    many = Many(url, 2)
    yield many
    many.close()


@pytest.fixture
def asked(monkeypatch):
    """What is asked of the server, by its functions' names."""
    said, say = [], Server.say

    def seen(server, sql, values=(), **more):
        said.extend(name for name in ("load", "write", "is_written") if f".{name}_" in sql)
        return say(server, sql, values, **more)

    monkeypatch.setattr(Server, "say", seen)
    return said


@pytest.mark.parametrize(
    ("node", "what"),
    [
        ("s", "trip"),
        (WALLET, "trip"),
        ("s", "lower"),
        (WALLET, "lower"),
        ("s", "close"),
        ("t", "trip"),
        ("team", "lower"),
    ],
)
def test_what_the_owner_has_said_to_another_process_holds_at_once(many, node, what):
    mine = "t" if node in ("t", "team") else "s"
    many.tool(0, "before", "$0.20", mine)
    many.owner(1, node, what)
    assert isinstance(many.tool(0, "after", CENT, mine), Refusal)
    assert many.books[1].store.audit() == []


def test_two_processes_spend_no_more_than_one_limit(many):
    granted = [many.charge(number % 2, f"h{number}", "$0.09", "s") for number in range(16)]
    assert sum(isinstance(each, Hold) for each in granted) == 11
    assert many.books[0].balances("s")[:2] == (usd("$0.99"), 0)
    assert many.books[1].store.audit() == []


def test_a_hold_that_another_process_has_ended_is_ended_once(many):
    many.tool(0, "h", "$0.20", "s")
    many.end(1, "h", "$0.05")
    with pytest.raises(IllegalTransition):
        many.end(0, "h", "$0.20")
    assert many.books[0].store.hold("h").captured == usd("$0.05")


def test_a_mark_and_a_hold_that_another_process_has_made_are_no_new_ones(many, asked):
    key = ("loop", "s x")
    many.tool(0, "first", CENT, "s", marks=[key])
    many.tool(1, "second", CENT, "s", marks=[key, ("loop", "s y")])
    many.tool(0, "third", CENT, "s", marks=[("loop", "s y")])
    assert many.books[0].store.marks("loop", "") == {"s x": {"count": 2}, "s y": {"count": 2}}
    with pytest.raises(IllegalTransition, match="exists"):
        many.tool(0, "second", "$0.02", "s")


def test_what_writes_nothing_is_asked_of_the_server(many, asked):
    many.tool(0, "h", CENT, "s")
    many.owner(1, "s", "trip")
    look = many.books[0].change(lambda view: check_open(view, "s"), nodes=("s",))
    assert look is not None, "a look at rows that are compared with nothing would say that it is open"


def test_a_look_locks_no_rows(many, asked):
    many.tool(0, "h", CENT, "s")
    asked.clear()
    many.books[0].change(lambda view: check_open(view, "s"), nodes=("s",))
    assert asked == ["load"]


def test_a_change_that_fails_on_known_rows_runs_again(many):
    many.tool(0, "h", CENT, "s")
    many.tool(1, "other", CENT, "s")
    end = Capture(usd(CENT), Evidence.ESTIMATE)
    ended = many.books[0].change(lambda view: apply(view, "other", end, STATED), nodes=("s",), holds=("other",))
    assert ended.captured == usd(CENT)


def test_known_rows_take_one_round_trip_and_others_two(many, asked):
    many.tool(0, "h0", CENT, "s")
    many.end(0, "h0", CENT)  # it asks for what is known of the process that the hold belongs to
    asked.clear()
    many.tool(0, "h1", CENT, "s")
    many.end(0, "h1", CENT)
    assert asked == ["write"] * 2
    many.tool(0, "in t", CENT, "t")
    many.owner(0, "team", "lower")
    asked.clear()
    many.tool(0, "in t again", CENT, "t")
    assert asked == ["write"], "the rules above it are known as this process has changed them"
    asked.clear()
    many.charge(1, "h2", CENT, "s")
    many.charge(0, "h3", CENT, "s")
    many.charge(0, "h4", CENT, "s")
    assert asked == ["load", "write", "write", "load", "write", "load", "write"], (
        "for ten seconds after a conflict the rows that it was about are read before each change"
    )


def test_a_bounded_number_of_rows_is_known(many, monkeypatch):
    monkeypatch.setattr(postgres_rows, "_MOST_KNOWN", 20)
    for number in range(60):
        many.tool(0, f"h{number}", CENT, "s", marks=[("loop", f"s {number}")])
    known = many.books[0].store._known_rows
    assert max(map(len, (known._nodes, known._holds, known._marks, known._due))) <= 22
    assert many.books[0].store.audit() == []


def test_a_hold_that_is_due_lapses_first(many):
    many.tool(0, "due", CENT, "s")
    many.clock.tick(3_600)
    due = many.books[0].change(lambda view: view.record("s", "test") or view.due, nodes=("s",))
    assert due == ("due",)
    many.books[0].change(lapse_due, nodes=("s",))
    assert many.books[0].store.hold("due").evidence is Evidence.ASSUMED


def test_another_history_at_the_same_version_is_not_taken_for_the_known_one(many):
    """A crash loses what is not durable. Another process then writes the same number of changes."""
    many.tool(0, "h", "$0.20", "s")
    store = many.books[0].store
    with psycopg.connect(store._url, autocommit=True) as server:
        server.execute("CREATE TABLE was AS SELECT * FROM x402guard.nodes WHERE id = 's'")
        many.books[0].change(lambda view: view.record("s", "test", facts={"by": "me"}), nodes=("s",), durable=False)
        server.execute("SET session_replication_role = replica")
        server.execute("DELETE FROM x402guard.entries AS e USING was WHERE e.node_id = 's' AND e.seq > was.seq")
        server.execute(
            "UPDATE x402guard.nodes AS n SET seq = was.seq, head = was.head, version = was.version FROM was WHERE n.id = 's'"
        )
        server.execute("DROP TABLE was")
    many.books[1].change(lambda view: view.record("s", "test", facts={"by": "another"}), nodes=("s",))
    many.tool(0, "next", CENT, "s")
    assert store.audit() == []
    assert [entry.facts()["by"] for entry in store.entries("s") if entry.event == "test"] == ["another"]


@pytest.fixture
def far(url, way):
    """A process whose way to the server fails on demand."""
    books = Books(way.url(url), wallet="$5.00")
    yield books
    books.close()


@pytest.mark.parametrize("plan", ["before", "half"])
def test_a_write_on_known_rows_that_never_arrives_is_made_again(far, way, straight, plan):
    """The server may have been started anew since it was asked last, and nothing had to be asked meanwhile."""
    way.plan = plan
    assert far.hold("h", CENT).id == an_id("h")
    assert (way.cuts, straight.hold(an_id("h")).amount) == (1, usd(CENT))
    assert far.balances("wallet") == (0, 0, 0, usd(CENT))
    assert straight.audit() == []


@pytest.mark.long
def test_a_write_on_known_rows_that_arrives_after_it_was_made_again_is_refused(far, way, straight):
    way.plan = "late"
    assert far.hold("h", CENT).id == an_id("h")
    way.deliver()
    time.sleep(0.2)
    assert far.balances("wallet") == (0, 0, 0, usd(CENT))
    assert far.hold("h2", CENT).id == an_id("h2")
    assert straight.audit() == []


def test_a_trip_after_a_lost_change_of_the_same_budgets_rules_holds(many):
    """The number of a budget's rules is the same in both histories; what they say is not."""
    many.tool(0, "h", "$0.20", "s")
    mine, owner = many.books
    marks = (owner_mark(WALLET), ("inputs", WALLET))
    with psycopg.connect(mine.store._url, autocommit=True) as server:
        server.execute("CREATE TABLE was AS SELECT * FROM x402guard.nodes WHERE id = 'wallet'")
        owner.change(lambda view: set_limit(view, WALLET, usd("$4.90"), "me"), nodes=(WALLET,), marks=marks)
        mine.change(lambda view: check_open(view, "s"), nodes=("s",))  # it sees that; then the server loses it
        server.execute("SET session_replication_role = replica")
        server.execute("DELETE FROM x402guard.entries AS e USING was WHERE e.node_id = 'wallet' AND e.seq > was.seq")
        names = ", ".join(f'"{name}"' for name in (*NODE_COLUMNS, "version", "rules"))
        sets = ", ".join(f'"{name}" = was."{name}"' for name in (*NODE_COLUMNS, "version", "rules"))
        server.execute(
            f"UPDATE x402guard.nodes AS n SET {sets} FROM (SELECT {names} FROM was) AS was WHERE n.id = 'wallet'"
        )
        server.execute("DROP TABLE was")
    third = Books(mine.store._url, session=None, clock=many.clock)
    third.change(lambda view: trip_node(view, WALLET, "enough", by="me"), nodes=(WALLET,), marks=marks)
    third.close()
    assert isinstance(many.tool(0, "after", CENT, "s"), Refusal)


def test_a_payment_of_another_process_that_was_guessed_absent_is_not_this_ones_to_give_back(many):
    mine, other = many.books
    many.tool(0, "first", CENT, "s")
    hold = a_hold("pay", CENT, "s", now_ms=many.clock.now_ms)
    other.change(lambda view: authorize(view, hold, {}), nodes=("s",), holds=("pay",))
    mine.change(lambda view: view.record("s", "test"), nodes=("s",))
    mine.store._known_rows._shared.clear()
    alike = a_hold("pay", "$0.02", "s", now_ms=many.clock.now_ms)
    with pytest.raises(IllegalTransition, match="exists"):
        mine.change(lambda view: authorize(view, alike, {}), nodes=("s",), holds=("pay",))
    assert mine.store.released.forget(hold.id) is None


def test_a_payment_that_is_ended_on_known_rows_alone_is_not_forgotten(many):
    mine = many.books[0]
    hold = a_hold("pay", CENT, "s", now_ms=many.clock.now_ms)
    mine.change(lambda view: authorize(view, hold, {}), nodes=("s",), holds=("pay",))
    mine.change(lambda view: check_open(view, "s"), nodes=("s",), holds=("pay",))
    many.owner(1, "s", "trip")

    def change(view):
        is_open = view.node("s").state is NodeState.OPEN
        return apply(view, hold.id, Void("not sent"), view.unsigned(hold.id)) if is_open else None

    assert mine.change(change, nodes=("s",), holds=("pay",)) is None
    assert mine.store.released._paths[hold.id], "it is live, and its session may still void it"


def test_a_refusal_beside_a_change_that_is_written_is_asked_about(many):
    mine = many.books[0]
    mine.open("s/a", "$0.90", parent="s", kind=NodeKind.SCOPE)
    mine.open("s/b", "$0.90", parent="s", kind=NodeKind.SCOPE)
    many.tool(0, "first", CENT, "t")
    many.tool(1, "big", "$0.80", "s/b")
    mine.change(lambda view: check_open(view, "s/a"), nodes=("s/a",))
    many.end(1, "big", CENT)
    holds = [
        a_hold(name, amount, node, HoldKind.TOOL, now_ms=many.clock.now_ms)
        for name, amount, node in (("beside", CENT, "t"), ("mine", "$0.50", "s/a"))
    ]
    changes = [
        (Scope(nodes=(h.node_id,), holds=(h.id,), durable=True), partial(authorize, hold=h, facts={})) for h in holds
    ]
    assert [type(each) for each, _ in mine.store.transact_all(changes)] == [Hold, Hold]


def test_what_was_known_to_be_absent_of_a_process_is_compared_too(many):
    mine, other = many.books
    key = ("instance", "me")
    many.tool(0, "h", CENT, "s")

    def look(view):
        view.record("s", "test")
        return view.mark(key)

    assert [mine.change(look, nodes=("s",), holds=("h",)) for _ in range(2)] == [None, None]
    other.change(lambda view: view.put_mark(key, {"ended": True}), marks=(key,))
    assert mine.change(look, nodes=("s",), holds=("h",)) == {"ended": True}


def test_deadlines_of_one_hold_are_known_once(many):
    many.tool(0, "h", CENT, "s")
    for _ in range(30):
        many.books[0].change(lambda view: view.record("s", "test"), nodes=("s",), holds=("h",))
    assert len(many.books[0].store._known_rows._due) == 1


def test_the_servers_time_is_asked_for_each_minute(many, asked, monkeypatch):
    many.tool(0, "h", CENT, "s")
    asked.clear()
    clock = many.books[0].store._server_clock
    monkeypatch.setattr(clock, "_seen", (clock._seen[0], clock._seen[1] - 61_000))
    many.tool(0, "h2", CENT, "s")
    many.tool(0, "h3", CENT, "s")
    assert asked == ["load", "write", "write"]


def test_nothing_is_known_over_a_new_connection(many, asked):
    many.tool(0, "h", CENT, "s")
    many.books[0].store._writer.close()
    many.tool(0, "h2", CENT, "s")  # sent over a new one before that is noticed, and compared there
    asked.clear()
    many.tool(0, "h3", CENT, "s")
    assert asked == ["load", "write"]


def test_what_many_processes_write_is_what_those_write_that_always_ask(url, monkeypatch):
    """The same changes in the same order, by three processes: each decision, and all rows but for their versions."""
    for seed in range(12):
        found = []
        for patched in (False, True):
            with monkeypatch.context() as patch, psycopg.connect(url, autocommit=True) as server:
                server.execute("DROP SCHEMA IF EXISTS x402guard CASCADE")
                many = Many(url, 3, patch if patched else None)
                said = play(many, Random(seed))
                found.append((said, many.rows(), many.books[0].store.audit()))
                many.close()
        assert found[0] == found[1]
        assert found[0][2] == []


def play(many, draws):
    """Make changes drawn by *draws*, and return what each came to."""
    said, held = [], ["none"]
    for number in range(60):
        at, name = draws.choice((0, 0, 0, 1, 2)), f"h{number}"
        amount, node = draws.choice((CENT, "$0.05", "$0.30")), draws.choice(("s", "s", "t"))
        marks = [("loop", f"{node} {draws.randrange(3)}") for _ in range(draws.randrange(2))]
        kind = draws.choices(("tool", "charge", "end", "owner", "tick"), (5, 8, 6, 1, 1))[0]
        try:
            if kind == "tool":
                held.append(name)
                result = many.tool(at, name, amount, node, marks)
            elif kind == "charge":
                result = many.charge(at, name, amount, node, marks)
            elif kind == "end":
                result = many.end(at, draws.choice(held), amount)
            elif kind == "owner":
                result = many.owner(
                    at, draws.choice(("s", "t", "team", WALLET)), draws.choice(("trip", "reset", "reset"))
                )
            else:
                result = many.clock.tick(draws.choice((1, 61)))
        except (IllegalTransition, ConfigError) as error:
            result = error
        said.append((kind, repr(result)))
    return said
