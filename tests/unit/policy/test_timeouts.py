"""Time limits: their settings, the rows of a step and of a session, and one call's own watch."""

import inspect

import pytest

from tests.support.ledger import START_MS, Clock
from tests.support.merchant import make_guard
from x402guard import CallTimeout, ConfigError, Policy, PolicyDenied, SessionTripped, Timeouts
from x402guard.cli.arguments import seconds
from x402guard.cli.watchdog import watchdog
from x402guard.flow.admission import LONGEST_WAIT_S
from x402guard.http.deadline import Watch
from x402guard.kernel.rows import HoldKind
from x402guard.ledger.purchases import DEFAULT_FLIGHT_S
from x402guard.ledger.view import LedgerView
from x402guard.policy.steps import Step, run_of
from x402guard.stores import open_store
from x402guard.x402.purchase import MIN_REMAINING_S

NAMES = ["payment_s", "tool_s", "llm_s", "chunk_s", "step_s", "session_s"]


def test_the_defaults_are_those_that_users_are_promised():
    assert [getattr(Timeouts(), name) for name in NAMES] == [240, None, 600, 60, None, None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "10", 366 * 86_400 + 1, float("inf")])
def test_settings_are_checked(name, value):
    with pytest.raises(ConfigError, match=rf"policy\.timeouts\.{name}"):
        Timeouts(**{name: value})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [None, 1, 366 * 86_400])
def test_the_longest_the_shortest_and_none_are_settings(name, value):
    assert getattr(Timeouts(**{name: value}), name) == value


class Steps:
    """The rows of one run, and a clock."""

    def __init__(self, **settings):
        self.timeouts, self.rows, self.now_ms = Timeouts(**settings), {}, START_MS

    def within(self, change, node="run"):
        marks = self.timeouts.run_marks(run_of(node))
        view = LedgerView.of_marks(self.now_ms, {key: self.rows[key] for key in marks if key in self.rows})
        result = change(view)
        self.rows.update(view.change_set(durable=True).marks)
        return result

    def late(self, kind=HoldKind.TOOL, node="run"):
        return self.within(lambda view: self.timeouts.judge(view, Step(kind, "", "", node)), node)

    def begin(self, node="run"):
        self.within(lambda view: self.timeouts.begin_step(view, run_of(node)), node)

    def end(self, node="run"):
        self.within(lambda view: self.timeouts.taken(view, Step(HoldKind.LLM, "", "", node), "h"), node)


@pytest.mark.parametrize(("after_ms", "late"), [(0, False), (5_000, False), (5_001, True), (10**9, True)])
@pytest.mark.parametrize("kind", [HoldKind.TOOL, HoldKind.PAYMENT])
def test_past_its_time_a_step_gets_no_payment_and_no_tool(after_ms, late, kind):
    steps = Steps(step_s=5)
    steps.begin()
    steps.now_ms += after_ms
    refusal = steps.late(kind)
    assert (refusal is not None) is late
    assert refusal is None or (refusal.rule, "session.step()" in refusal.reason) == ("step_timeout", True)
    assert steps.late(HoldKind.LLM) is None


@pytest.mark.parametrize("node", ["run", "run/child"])
def test_asking_the_model_ends_a_step_and_its_answer_begins_another_for_children_too(node):
    steps = Steps(step_s=5)
    assert steps.late() is None
    steps.begin(node)
    steps.now_ms += 9_000
    assert steps.late() is not None
    steps.end(node)
    assert steps.late() is None  # while the model thinks, nothing runs out
    steps.now_ms += 9_000
    assert steps.late() is None
    steps.begin(node)
    assert steps.late() is None
    steps.now_ms += 5_001
    assert steps.late() is not None


def test_with_the_limit_off_no_row_is_written_or_asked_for():
    steps = Steps()
    steps.begin()
    steps.end()
    assert (steps.rows, steps.timeouts.run_marks("run"), steps.late()) == ({}, (), None)


@pytest.mark.parametrize("restart", [False, True])
def test_a_step_of_a_session_runs_out_also_after_a_restart(tmp_path, restart):
    clock, url = Clock(), f"sqlite:///{tmp_path / 'books.db'}"
    policy = Policy(breaker=None, timeouts=Timeouts(step_s=5))
    with make_guard(open_store(url, clock_ms=clock, steady_ms=clock), policy=policy) as guard:
        session = guard.session("s", budget="$1", id="run")
        session.step()
        session.charge("serp", "$0.01")
        clock.tick(5.001)
        if not restart:
            with pytest.raises(PolicyDenied, match="step_timeout"):
                session.charge("serp", "$0.01")
    with make_guard(open_store(url, clock_ms=clock, steady_ms=clock), policy=policy) as guard:
        session = guard.session("s", budget="$1", id="run")
        with pytest.raises(PolicyDenied, match="step_timeout"):
            session.charge("serp", "$0.01")
        session.step()
        session.charge("serp", "$0.01")


def test_a_session_runs_out_with_its_children_and_is_latched(ledger_url):
    clock = Clock()
    policy = Policy(breaker=None, timeouts=Timeouts(session_s=60))
    with make_guard(open_store(ledger_url, clock_ms=clock, steady_ms=clock), policy=policy) as guard:
        session = guard.session("s", budget="$1", id="run")
        clock.tick(60)
        session.child("c", budget="$0.10").charge("serp", "$0.01")
        clock.tick(0.001)
        with pytest.raises(SessionTripped, match="more than 60 s"):
            session.child("d", budget="$0.10").charge("serp", "$0.01")
        with pytest.raises(SessionTripped):
            session.charge("serp", "$0.01")
        assert session.report().to_dict()["terminated_by"] == "session_timeout"


@pytest.fixture(params=["memory", "sqlite"])
def ledger_url(request, tmp_path):
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'ledger.db'}"


class Turned:
    """The monotonic clock, as far as a watch looks at it."""

    def __init__(self, monkeypatch):
        self.now_s = 1_000.0
        monkeypatch.setattr("x402guard.http.deadline.time.monotonic", lambda: self.now_s)


@pytest.fixture
def turned(monkeypatch):
    return Turned(monkeypatch)


@pytest.mark.parametrize(
    ("call_s", "chunk_s", "left_s"), [(None, None, None), (10, None, 4.0), (None, 5, 3.0), (10, 5, 3.0), (10, 60, 4.0)]
)
def test_a_watch_knows_which_of_its_limits_comes_first(turned, call_s, chunk_s, left_s):
    watch = Watch(call_s, chunk_s)
    turned.now_s += 4
    watch.wanted()
    turned.now_s += 2
    assert watch.left_s == left_s


def test_an_answer_begins_within_its_own_limit_and_ends_within_that_of_the_call(turned):
    late, begun, unlimited = (
        Watch(*limits, "payment_s", (10, "the offer")) for limits in ((240, None), (240, None), (None, None))
    )
    turned.now_s += 9
    assert (late.left_s, begun.left_s, unlimited.left_s) == (1, 1, 1)
    begun.head_came()
    unlimited.head_came()
    assert (begun.left_s, unlimited.left_s) == (231, None)
    turned.now_s += 1
    assert str(late.timeout()) == "the answer did not begin within 10 s (the offer)"
    turned.now_s += 230
    assert str(begun.timeout()) == "the answer did not end within 240 s (payment_s)"
    assert Watch(1, None, "", (1, "both")).left_s == 1


def test_before_the_first_piece_only_the_whole_calls_time_counts(turned):
    watch = Watch(600, 60)
    turned.now_s += 100
    assert watch.left_s == 500


@pytest.mark.parametrize(("moved_at", "asked_at", "says"), [(1, 7, "within 5 s"), (9, 11, "within 10 s")])
def test_the_error_names_the_limit_that_ran_out(turned, moved_at, asked_at, says):
    watch = Watch(10, 5)
    turned.now_s += moved_at
    watch.wanted()
    turned.now_s += asked_at - moved_at
    assert watch.left_s == 0
    error = watch.timeout()
    assert says in str(error)
    assert (type(error), error.money_may_have_moved) == (CallTimeout, True)


def test_a_watch_that_is_lifted_never_runs_out(turned):
    watch = Watch(10, 5)
    watch.wanted()
    watch.lift()
    turned.now_s += 10**6
    assert (watch.left_s, watch.until_s) == (None, None)


@pytest.mark.parametrize("value", [-1, 1.5, True, "10", 10**9])
def test_the_time_of_one_tool_is_checked(value):
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(ConfigError, match="timeout_s"):
            session.tool(cost="$0.01", timeout_s=value)


def test_the_defaults_leave_room_for_each_other():
    """Who waits for a paid answer is not taken for gone, and what is lost can be presented again before it expires."""
    silence_s = seconds("--silence", inspect.signature(watchdog).parameters["silence"].default)
    assert Timeouts().payment_s + 30 <= DEFAULT_FLIGHT_S
    assert Policy().max_lifetime_s >= DEFAULT_FLIGHT_S + MIN_REMAINING_S + 10
    assert DEFAULT_FLIGHT_S + 30 <= LONGEST_WAIT_S, "a slot that is kept until then goes to who waits for it"
    assert Timeouts().payment_s + 60 <= silence_s, "a run that waits for what it has paid is not silent"
