"""The rows of the breakers: when they open, how long they rest, who may try again. And its property: never two at a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from x402guard import Breaker, Bulkhead, ConfigError, Policy
from x402guard.frozen import replace
from x402guard.kernel.rows import HoldKind, Nanos
from x402guard.ledger.view import LedgerView
from x402guard.policy.breakers import BREAKER, slot_of
from x402guard.policy.guards import guard_marks
from x402guard.policy.step_guard import StepEnd
from x402guard.policy.steps import Step

START_MS = 1_800_000_000_000
TOOL = Step(HoldKind.TOOL, "serp", "", "run")
CALL = Step(HoldKind.LLM, "POST api.example/v1/chat", "", "run")
PAYS = Step(HoldKind.PAYMENT, "GET shop.example/a", "", "run", Nanos(10), "0xA", priced=True)


class Rows:
    """The ledger's rows of some breakers, and a clock: one transaction a verb."""

    def __init__(self, breaker=None, **more):
        self.breaker = Breaker(**more) if breaker is None else breaker
        self.rows, self.now_ms, self.notices = {}, START_MS, []

    def _within(self, change, step):
        marks = tuple(self.breaker.marks(step, (step.payee,) if step.payee else (), ending=False))
        view = LedgerView.of_marks(self.now_ms, {key: self.rows[key] for key in marks if key in self.rows})
        result = change(view)
        self.rows.update(view.change_set(durable=True).marks)
        self.notices += view.notices
        return result

    def begin(self, hold_id, step=TOOL, node="run"):
        """Begin a step; None where it may go, else its refusal: its host or tool first, then its payee."""
        step = replace(step, node_id=node)

        def change(view):
            refusal = self.breaker.judge(view, replace(step, priced=False))
            if refusal is None and step.payee:
                refusal = self.breaker.judge(view, replace(step, priced=True))
            if refusal is None:
                self.breaker.taken(view, step, hold_id)
            return refusal

        return self._within(change, step)

    def end(self, hold_id, well, step=TOOL, node="run"):
        step = replace(step, node_id=node)
        outcome = {True: "ok", False: "failed", None: "unknown"}[well]
        return self._within(lambda view: self.breaker.ended(view, step, StepEnd(hold_id, outcome)), step)

    def fail(self, times=3, step=TOOL, node="run"):
        for n in range(times):
            self.end(f"failed-{n}", False, step, node)

    def wait(self, seconds):
        self.now_ms += int(seconds * 1000)


@pytest.mark.parametrize("step", [TOOL, CALL, PAYS], ids=lambda step: str(step.kind))
@pytest.mark.parametrize("failures", [1, 3, 5])
def test_so_many_failures_in_a_row_open_it_and_not_one_less(step, failures):
    rows = Rows(failures=failures)
    rows.fail(failures - 1, step)
    assert rows.begin("a", step) is None
    rows.fail(1, step)
    refusal = rows.begin("b", step)
    assert (refusal.rule, refusal.retry_after_s) == (BREAKER, 30)
    assert f"failed {failures} times in a row" in refusal.reason


@pytest.mark.parametrize(
    ("ends", "opens"),
    [
        ([False, False, False], True),
        ([False, False, True, False, False], False),
        ([False, False, None, False], True),
        ([None, None, None, None], False),
        ([True, False, False, False], True),
        ([False, False, True, False, False, False], True),
    ],
)
def test_only_a_success_breaks_a_row_of_failures(ends, opens):
    rows = Rows()
    for n, well in enumerate(ends):
        rows.end(f"h{n}", well)
    assert (rows.begin("a") is not None) is opens


@pytest.mark.parametrize(
    ("after_s", "retry_after"), [(0, 30), (0.001, 30), (1, 29), (29, 1), (29.999, 1), (30, None), (3_600, None)]
)
def test_it_says_in_whole_seconds_how_long_it_rests(after_s, retry_after):
    rows = Rows()
    rows.fail()
    rows.wait(after_s)
    refusal = rows.begin("a")
    assert (refusal and refusal.retry_after_s) == retry_after


@pytest.mark.parametrize(("apart_s", "opens"), [(0, True), (3_599, True), (3_600, False)])
def test_failures_an_hour_apart_are_no_row(apart_s, opens):
    rows = Rows()
    for _ in range(3):
        rows.wait(apart_s)
        rows.fail(1)
    assert (rows.begin("a") is not None) is opens


def test_after_the_rest_one_tries_and_the_others_wait_a_second_at_a_time():
    rows = Rows()
    rows.fail()
    rows.wait(30)
    came = [rows.begin(f"h{n}") for n in range(20)]
    assert [refusal and refusal.retry_after_s for refusal in came] == [None] + [1] * 19
    assert "a probe is under way" in came[1].reason


@pytest.mark.parametrize(("well", "then"), [(True, None), (False, 30), (None, "tries")])
def test_how_the_try_ends_decides(well, then):
    rows = Rows()
    rows.fail()
    rows.wait(31)
    assert rows.begin("probe") is None
    rows.end("probe", well)
    following = [rows.begin("next"), rows.begin("after")]
    assert following[0] is None if then in (None, "tries") else following[0].retry_after_s == then
    assert (following[1] is None) is (then is None)


def test_closed_again_it_takes_as_many_failures_as_before():
    rows = Rows()
    rows.fail()
    rows.wait(30)
    rows.begin("probe")
    rows.end("probe", True)
    rows.fail(2)
    assert rows.begin("a") is None
    rows.fail(1)
    assert rows.begin("b") is not None


@pytest.mark.parametrize(("step", "lost_s"), [(TOOL, 60), (PAYS, 60), (CALL, 60)])
def test_a_try_that_was_lost_with_its_process_does_not_close_the_door_for_ever(step, lost_s):
    rows = Rows()
    rows.fail(3, step)
    rows.wait(30)
    assert rows.begin("lost", step) is None
    rows.wait(lost_s - 0.001)
    assert rows.begin("a", step) is not None
    rows.wait(0.001)
    assert rows.begin("b", step) is None
    assert rows.begin("c", step) is not None


def test_people_are_told_once_when_it_opens_and_not_at_each_failed_try():
    rows = Rows()
    rows.fail()
    for n in range(3):
        rows.wait(30)
        rows.begin(f"h{n}")
        rows.end(f"h{n}", False)
    [notice] = rows.notices
    assert "tool serp has failed 3 times in a row" in notice.message


@pytest.mark.parametrize(
    ("failing", "asking", "open_"),
    [
        ((PAYS, "run"), (PAYS, "another"), False),
        (
            (PAYS, "run"),
            (Step(HoldKind.PAYMENT, "POST shop.example/b", "", "run", Nanos(1), "0xB", priced=True), "run"),
            True,
        ),
        (
            (PAYS, "run"),
            (Step(HoldKind.PAYMENT, "GET other.example/a", "", "run", Nanos(1), "0xA", priced=True), "run"),
            True,
        ),
        (
            (PAYS, "run"),
            (Step(HoldKind.PAYMENT, "GET other.example/a", "", "run", Nanos(1), "0xB", priced=True), "run"),
            False,
        ),
        ((PAYS, "run"), (Step(HoldKind.LLM, "POST shop.example/v1", "", "run"), "run"), True),
        (
            (PAYS, "run"),
            (Step(HoldKind.PAYMENT, "GET shop.example:81/a", "", "run", Nanos(1), "0xB", priced=True), "run"),
            False,
        ),
        ((TOOL, "run"), (TOOL, "run/child"), True),
        ((TOOL, "run/child"), (TOOL, "run"), True),
        ((TOOL, "run"), (TOOL, "another"), False),
        ((TOOL, "run"), (Step(HoldKind.TOOL, "mail", "", "run"), "run"), False),
        ((Step(HoldKind.TOOL, "shop.example", "", "run"), "run"), (PAYS, "run"), False),
        ((Step(HoldKind.TOOL, "payee 0xA", "", "run"), "run"), (PAYS, "run"), False),
    ],
)
def test_what_fails_is_at_rest_for_its_run_alone(failing, asking, open_):
    rows = Rows()
    rows.fail(3, *failing)
    assert (rows.begin("a", *asking) is not None) is open_


def test_a_payee_at_rest_is_refused_under_another_name_of_a_host():
    rows = Rows()
    rows.fail(3, PAYS)
    assert (
        "payee 0xA"
        in rows.begin("a", Step(HoldKind.PAYMENT, "GET other.example/", "", "run", Nanos(1), "0xA", priced=True)).reason
    )


def test_without_a_breaker_nothing_is_seen():
    assert not any(kind == "breaker" for kind, _ in guard_marks(Policy(breaker=None), PAYS, ("0xA",)))
    assert any(kind == "breaker" for kind, _ in guard_marks(Policy(), PAYS, ("0xA",)))


def test_a_call_from_before_the_rest_does_not_end_anothers_try():
    """It was under way when the breaker opened, and was cancelled while somebody else tried."""
    rows = Rows()
    assert rows.begin("old") is None
    rows.fail()
    rows.wait(30)
    assert rows.begin("probe") is None
    rows.end("old", None)
    assert rows.begin("second") is not None


VERBS = st.lists(
    st.one_of(
        st.just(("begin",)),
        st.tuples(st.just("end"), st.integers(0, 3), st.sampled_from([False, None, True])),
        st.just(("wait", 30)),
    ),
    max_size=20,
)
OPENED = [("begin",), ("begin",), ("end", 0, False), ("wait", 30)]


@given(VERBS)
@settings(max_examples=examples(1_500))
def test_whatever_happens_never_more_than_one_tries_at_a_time(verbs):
    """Every try ends within the minute after which it would count as lost."""
    rows, out, tries = Rows(failures=1), {}, set()
    for number, verb in enumerate([*OPENED, *verbs]):
        if verb[0] == "begin":
            was_open = rows.rows.get(("breaker", "tool run serp"), {}).get("opened_ms") is not None
            if rows.begin(f"h{number}") is None:
                out[f"h{number}"] = rows.now_ms
                if was_open:
                    tries.add(f"h{number}")
                    assert len(tries) == 1
        elif verb[0] == "end" and out:
            hold_id = sorted(out)[verb[1] % len(out)]
            del out[hold_id]
            tries.discard(hold_id)
            rows.end(hold_id, verb[2])
        elif verb[0] == "wait":
            rows.wait(verb[1])
            for hold_id in [each for each in tries if rows.now_ms - out[each] >= 59_000]:
                del out[hold_id]
                tries.discard(hold_id)
                rows.end(hold_id, False)


@pytest.mark.parametrize("name", ["failures", "rest_s"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None, 10**6])
def test_settings_of_a_breaker_are_checked(name, value):
    with pytest.raises(ConfigError, match=rf"policy\.breaker\.{name}"):
        Breaker(**{name: value})


@pytest.mark.parametrize("name", ["per_host", "per_tool", "per_llm_host"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", 10_001])
def test_settings_of_a_bulkhead_are_checked(name, value):
    with pytest.raises(ConfigError, match=rf"policy\.bulkhead\.{name}"):
        Bulkhead(**{name: value})


@pytest.mark.parametrize(
    ("bulkhead", "kind", "slot"),
    [
        (Bulkhead(), HoldKind.TOOL, ("tool x", 8)),
        (Bulkhead(per_host=3), HoldKind.LLM, None),
        (Bulkhead(per_llm_host=3), HoldKind.LLM, ("LLM host x", 3)),
        (Bulkhead(per_host=3), HoldKind.PAYMENT, ("host x", 3)),
        (Bulkhead(per_tool=None), HoldKind.TOOL, None),
        (Bulkhead(per_host=None), HoldKind.LLM, None),
        (None, HoldKind.TOOL, None),
    ],
)
def test_what_a_call_takes_a_place_of(bulkhead, kind, slot):
    assert slot_of(bulkhead, kind, "x") == slot
