"""The loop detector's rows, and its property: distinct calls never trip it, identical ones do at N + 1, whatever lies between."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.ledger import Books, usd
from x402guard import ConfigError, Loop
from x402guard.frozen import replace
from x402guard.kernel.rows import HoldKind, NodeState
from x402guard.ledger.view import LedgerView
from x402guard.policy.loops import forget_before
from x402guard.policy.step_guard import StepEnd
from x402guard.policy.steps import Step, request_key, run_of, tool_key

START_MS = 1_800_000_000_000


class Run:
    """A run's small rows, and a clock: each step is judged, and noted where nothing is said against it."""

    def __init__(self, **settings):
        # What repeats without a clock is for tests/behaviour/guards/test_slow_loops.py.
        self.loop, self.rows, self.now_ms = Loop(latch_after=1, repeats=1_000, **settings), {}, START_MS

    def view(self, keys):
        return LedgerView.of_marks(self.now_ms, {key: self.rows[key] for key in keys if key in self.rows})

    def step(self, name, arguments=None, after_s=0):
        self.now_ms += int(after_s * 1000)
        key = tool_key(name, {} if arguments is None else arguments, self.loop.ignored)
        step = Step(HoldKind.TOOL, name, key, "run")
        view = self.view(self.loop.marks(step, (), ending=False))
        found = self.loop.find_loop(view, step)
        if found is None:
            self.loop.taken(view, step, "")
            self.rows.update(view.change_set(durable=True).marks)
        return found

    def stops_at(self, steps):
        """The number of the first step that is refused, from 1, or None."""
        return next((number for number, step in enumerate(steps, 1) if self.step(*step) is not None), None)


def calls(name, count, arguments=None):
    return [(name, arguments)] * count


UNIQUE = [(f"tool-{n}", {"n": n}) for n in range(10)]
ROTATING = ["search", "read", "write"]


@pytest.mark.parametrize(
    ("steps", "stops"),
    [
        pytest.param([(f"tool-{n}", None) for n in range(15)], None, id="fifteen unique calls"),
        pytest.param([(ROTATING[n % 3], {"q": 1}) for n in range(15)], None, id="three rotating, the same arguments"),
        pytest.param([(ROTATING[n % 3], {"q": n}) for n in range(15)], None, id="three rotating, new arguments"),
        pytest.param(calls("search", 9, {"q": 1}), 6, id="the same call"),
        pytest.param(UNIQUE + calls("search", 9, {"q": 1}), 16, id="ten unique, then a new one repeated"),
        pytest.param(UNIQUE + calls("tool-3", 9, {"n": 3}), 15, id="ten unique, then one of them repeated"),
        pytest.param([("list", {"page": n}) for n in range(15)], None, id="paging"),
        pytest.param(
            [("candle", {"of": "BTC", "timestamp": n}) for n in range(9)], None, id="a time is what a tool is asked"
        ),
        pytest.param([("post", {"to": 1, "request_id": n}) for n in range(9)], 6, id="a fresh request id each time"),
        pytest.param(
            [("post", {"to": 1, "meta": {"nonce": n}}) for n in range(9)],
            None,
            id="a nonce deep inside is what is asked for",
        ),
    ],
)
def test_at_five_calls(steps, stops):
    assert Run(calls=5).stops_at(steps) == stops


@pytest.mark.parametrize(
    ("window_s", "pace_s", "stops"), [(60, 0, 11), (60, 6, 11), (60, 6.001, None), (60, 3, 11), (1, 0.5, None)]
)
def test_the_window_is_closed_at_both_ends(window_s, pace_s, stops):
    run = Run(window_s=window_s)
    assert next((n for n in range(1, 201) if run.step("poll", after_s=pace_s)), None) == stops


@pytest.mark.parametrize(
    ("period", "longest", "stops"),
    [(2, 4, 12), (3, 4, 18), (4, 4, 24), (5, 4, None), (5, 5, 30), (2, 1, None)],
)
def test_a_slow_cycle_trips_after_more_than_n_full_repeats(period, longest, stops):
    run = Run(calls=5, window_s=60, longest_cycle=longest)
    steps = [("step", {"n": n % period}) for n in range(100)]
    assert next((n for n, step in enumerate(steps, 1) if run.step(*step, after_s=50)), None) == stops


def test_a_pause_longer_than_the_window_parts_a_cycle():
    run = Run(calls=5, window_s=60)
    assert all(run.step("step", {"n": n % 2}, after_s=61) is None for n in range(200))
    hourly = Run(calls=5, window_s=60)  # a tool that pays: two steps at once, once an hour
    assert all(hourly.step("step", {"n": n % 2}, after_s=3_600 * (n % 2)) is None for n in range(200))


def test_a_slow_poll_is_no_cycle():
    run = Run(calls=5, window_s=1)
    assert all(run.step("poll", after_s=100) is None for _ in range(200))


def test_a_cycle_that_is_broken_counts_anew():
    run = Run(calls=5, window_s=60)
    for round_ in range(20):
        for n in [0, 1] * 5 + [round_ + 10]:
            assert run.step("step", {"n": n}, after_s=50) is None


def test_a_cycle_with_a_double_step_is_found():
    run = Run(calls=5, window_s=60)
    steps = [("step", {"n": n}) for n in [0, 0, 1] * 10]
    assert next((n for n, step in enumerate(steps, 1) if run.step(*step, after_s=50)), None) == 18


def test_tools_and_routes_have_numbers_of_their_own():
    run = Run(calls=5, own={"poll": 8, "wait": None})
    assert run.stops_at(calls("wait", 100)) is None
    assert run.stops_at(calls("poll", 100)) == 9
    assert run.stops_at(calls("other", 100)) == 6


def test_calls_without_arguments_are_one_call_of_that_name_and_amount_with_a_number_of_their_own():
    keys = [tool_key(name, None, (), nanos) for name, nanos in (("serp", 1), ("serp", 1), ("serp", 2), ("mail", 1))]
    assert (len(set(keys)), keys[0] == keys[1]) == (3, True)
    assert keys[0] != tool_key("serp", {}, (), 1), "no arguments are not unknown ones"
    loop = Loop(calls=3, calls_without_arguments=7, own={"mail": 5})
    assert [loop.calls_of(Step(HoldKind.TOOL, name, tool_key(name, arguments, ()), "run")) for name, arguments in
            (("serp", None), ("serp", {}), ("mail", None))] == [7, 3, 5]  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"page": 1}, {"page": 2}, True),
        ({"day": "2026-11-22"}, {"day": "2025-01-01T10:00:00Z"}, False),
        ({"day": "2026-11-22"}, {"day": "2025-01-01"}, True),
        ({"id": "0b9d7c1e-1111-4222-8333-abcdefabcdef"}, {"id": "ffffffff-1111-4222-8333-000000000000"}, True),
        ({"id": "a3f9c2b17d"}, {"id": "99f9c2b17e"}, True),
        ({"q": "tea"}, {"q": "coffee"}, False),
        ({"q": "tea"}, {"q": "tea", "page": 1}, False),
    ],
)
def test_similar_arguments_differ_in_numbers_dates_and_ids_alone(one, other, same):
    assert (tool_key("t", one, (), similar=True) == tool_key("t", other, (), similar=True)) is same
    assert tool_key("t", one, ()) != tool_key("t", other, ())
    urls = [f"https://a/b?x={json.dumps(each)}" for each in (one, other)]
    keys = [request_key(HoldKind.PAYMENT, "GET", url, b"", (), similar=True) for url in urls]
    assert (keys[0] == keys[1]) is same


def test_after_a_reset_everything_counts_anew():
    run = Run(calls=5)
    assert run.stops_at(calls("search", 9)) == 6
    view = run.view([])
    forget_before(view, "run")
    run.rows.update(view.change_set(durable=True).marks)
    run.now_ms += 1
    assert run.stops_at(calls("search", 9)) == 6


def test_a_ring_keeps_no_more_stamps_than_calls():
    run = Run(calls=5, window_s=1)
    for _ in range(1000):
        run.step("poll", after_s=10)
    assert len(json.dumps(list(run.rows.values()))) < 400


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (b'{"a": 1, "b": [2]}', b'{ "b":[2],"a":1 }', True),
        (b'{"a": 1, "timestamp": 5}', b'{"a": 1, "timestamp": 6}', True),
        (b'{"a": [{"trace_id": 5}]}', b'{"a": [{}]}', False),
        (b'[{"a": 1, "trace_id": 5}]', b'[ {"a": 1} ]', True),
        (b'{"a": 1.0}', b'{"a": 1.00}', True),
        (b'{"a": 1.5}', b'{"a": "1.5"}', False),
        (b'{"a": 1}', b'{"a": 2}', False),
        (b'{"a": 1}', b'{"a": "1"}', False),
        (b'{"a": [1, 2]}', b'{"a": [2, 1]}', False),
        (b"a=1&nonce=5", b"a=1&nonce=6", False),
        (b"\xff\x00", b"\xff\x00", True),
        (b"[1]", b"[ 1 ]", True),
    ],
)
def test_bodies_are_the_same_where_they_say_the_same(one, other, same):
    keys = [
        request_key(HoldKind.LLM, "POST", "https://a/b", body, Loop(latch_after=1).ignored) for body in (one, other)
    ]
    assert (keys[0] == keys[1]) is same


@pytest.mark.parametrize("url", ["https://a/b#1", "https://me@a/b", "https://A./b/", "https://a//%62"])
def test_other_spellings_of_a_place_are_the_same_place(url):
    keys = {request_key(HoldKind.PAYMENT, "GET", each, b"", ()) for each in (url, "https://a/b")}
    assert len(keys) == 1


@pytest.mark.parametrize("url", ["https://a/b?nonce=1", "https://a/1", "https://b/b", "https://a/b?timestamp=5"])
def test_path_and_query_always_count(url):
    ignored = Loop(latch_after=1).ignored
    assert request_key(HoldKind.PAYMENT, "GET", url, b"", ignored) != request_key(
        HoldKind.PAYMENT, "GET", "https://a/b", b"", ignored
    )


def test_a_payment_a_call_and_a_tool_are_never_the_same():
    keys = {request_key(kind, "GET", "https://a/b", b"", ()) for kind in (HoldKind.PAYMENT, HoldKind.LLM)}
    assert len(keys) == 2


@pytest.mark.parametrize("node", ["s_1", "s_1/session-ab", "s_1/session-ab/scope-cd"])
def test_children_have_no_counters_of_their_own(node):
    assert run_of(node) == "s_1"


def test_five_failures_in_a_row_are_one_too_many_and_a_delivery_forgets_them():
    books = Books()
    loop = Loop(latch_after=1)

    def trips(payee, outcome):
        """Whether this end of a payment trips the run; the run is opened again for the next."""
        step = Step(HoldKind.PAYMENT, "GET shop/a", "", "s", usd("$0.01"), payee, priced=True)

        def change(view):
            loop.ended(view, step, StepEnd("h", outcome))
            tripped = view.node("s").state is NodeState.TRIPPED
            view.put_node(replace(view.node("s"), state=NodeState.OPEN))
            return tripped

        return books.change(change, nodes=("s",), marks=tuple(loop.marks(step, (), ending=True)))

    said = [trips("0xP", outcome) for outcome in ["failed"] * 4 + ["ok"] + ["failed"] * 5]
    assert said == [False] * 9 + [True]
    for pause_s in [3_601] * 9 + [3_599] * 3:  # one now and then is no streak
        books.clock.tick(pause_s)
        assert not trips("0xQ", "failed")
    books.clock.tick(3_599)
    assert trips("0xQ", "failed")
    books.close()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"calls": 0}, "calls: 0"),
        ({"calls": 1.5}, "calls: 1.5"),
        ({"calls": True}, "calls: True"),
        ({"calls": 1001}, "calls: 1001"),
        ({"calls_without_arguments": 0}, "calls_without_arguments: 0"),
        ({"latch_after": -1}, "latch_after: -1"),
        ({"latch_after": None}, "latch_after: None"),
        ({"similar": 1}, "similar: 1"),
        ({"window_s": -1}, "window_s: -1"),
        ({"longest_cycle": 17}, "longest_cycle: 17"),
        ({"failures": -1}, "failures: -1"),
        ({"ignored": "nonce"}, "ignored: 'nonce'"),
        ({"ignored": [1]}, "ignored"),
        ({"own": ["poll"]}, "own"),
        ({"own": {"GET https://a/b": 5}}, "own: 'GET https"),
        ({"own": {"poll": 0}}, r"own\['poll'\]: 0"),
    ],
)
def test_a_wrong_setting_is_named(arguments, names):
    with pytest.raises(ConfigError, match=f"policy.loop.{names}"):
        Loop(**arguments)


@given(st.lists(st.integers(0, 10**9), unique=True, max_size=60), st.integers(1, 6))
@settings(max_examples=examples(60), deadline=None)
def test_distinct_calls_never_trip(numbers, most):
    assert Run(calls=most).stops_at([("tool", {"n": n}) for n in numbers]) is None


@given(st.lists(st.integers(0, 3), max_size=5), st.integers(1, 6), st.data())
@settings(max_examples=examples(100), deadline=None)
def test_identical_calls_within_the_window_trip_at_n_plus_one_whatever_lies_between(others, most, data):
    run, fresh = Run(calls=most, longest_cycle=1), iter(range(10**6))
    for _ in range(most):
        assert run.step("same") is None
        for _ in range(data.draw(st.integers(0, 3))):
            assert run.step("other", {"n": next(fresh)}) is None
    assert run.step("same") is not None
