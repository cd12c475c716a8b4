"""Every guard alone, with two processes on one ledger: what one has done the other knows, and together they pass no more than one."""

import atexit
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.support.guard_rows import BY_NAME, CASES, ROWS, Opened
from tests.support.ledger import START_MS

pytestmark = [pytest.mark.xdist_group("guards_matrix_processes"), pytest.mark.long]
OPEN = {}


def opened(name, folder, now_ms):
    """The row's guard in this process, which keeps it open from one call to the next."""
    if folder not in OPEN:
        OPEN[folder] = Opened(BY_NAME[name], f"sqlite:///{folder}/l.db", Path(folder), now_ms)
        atexit.register(OPEN[folder].close)
    OPEN[folder].clock.now_ms = now_ms
    return OPEN[folder]


def take(name, folder, now_ms, kind, steps):
    """Take steps in this process; return what refused each, and what got out."""
    one = opened(name, folder, now_ms)
    before = one.agent.reached
    rules = one.takes(kind, steps)
    return rules, one.agent.reached != before, one.clock.now_ms


def act(name, folder, now_ms):
    one = opened(name, folder, now_ms)
    one.acts()
    return one.clock.now_ms


def stands(name, folder, now_ms):
    return opened(name, folder, now_ms).stands


def leave(folder):
    if folder in OPEN:
        one = OPEN.pop(folder)
        atexit.unregister(one.close)
        one.close()


@pytest.fixture(scope="module")
def pair():
    """Two processes that go on living, with one call after the other."""
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as one, ProcessPoolExecutor(1, mp_context=spawn) as other:
        yield tuple(lambda function, *arguments, pool=pool: pool.submit(function, *arguments) for pool in (one, other))


@pytest.fixture
def both(pair, tmp_path):
    yield pair
    for process in pair:
        process(leave, str(tmp_path)).result(timeout=60)


@pytest.mark.parametrize(("row", "kind"), CASES, ids=lambda part: str(part))
def test_the_steps_of_one_process_count_for_the_other(both, tmp_path, row, kind):
    folder, now_ms = str(tmp_path), START_MS
    for process in both:  # both have it open before either takes a step
        process(stands, row.name, folder, now_ms).result(timeout=60)
    for number, step in enumerate(row.passes):
        done = both[number % 2](take, row.name, folder, now_ms, kind, [step])
        rules, _, now_ms = done.result(timeout=60)
        assert rules == [None]
    last = both[len(row.passes) % 2]
    other = both[(len(row.passes) + 1) % 2]
    now_ms = other(act, row.name, folder, now_ms).result(timeout=60)
    rules, reached, _ = last(take, row.name, folder, now_ms, kind, [row.refuses]).result(timeout=60)
    assert (rules, reached) == ([row.rule], False)
    expected = ("tripped" if row.word else "open", row.word)
    assert [process(stands, row.name, folder, now_ms).result(timeout=60) for process in both] == [expected] * 2
    if row.word is not None:
        rules, reached, _ = other(take, row.name, folder, now_ms, kind, [(88, 1)]).result(timeout=60)
        assert (rules, reached) == (["session_tripped"], False)


COUNTED = {
    "loop": (3, (1, 1)),
    "dollars a minute": (2, (1, 5)),
    "dollars a day": (2, (1, 5)),
    "calls a minute": (3, None),
    "calls a hour": (3, None),
    "max_steps": (3, None),
    "max_calls": (3, None),
    "budget": (2, (1, 5)),
}
"""How many steps pass when both processes take as many as they can, and which; None for one in other words each time."""


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("kind", ["pay", "think", "charge"])
def test_at_the_same_time_they_pass_together_what_one_alone_may(both, tmp_path, name, kind):
    folder = str(tmp_path)
    for process in both:
        process(stands, name, folder, START_MS).result(timeout=60)
    passing, step = COUNTED[name]
    steps = [[step or (100 * which + number, 1) for number in range(10)] for which in range(2)]
    if name.startswith(("dollars", "budget")):
        steps = [[(100 * which + number, 5) for number in range(10)] for which in range(2)]
    under_way = [process(take, name, folder, START_MS, kind, own) for process, own in zip(both, steps, strict=True)]
    rules = [rule for done in under_way for rule in done.result(timeout=60)[0]]
    assert rules.count(None) == passing
    # The same request of another process that is still paying is no reason to sign.
    assert set(rules) - {None} <= {BY_NAME[name].rule, "session_tripped", "in_flight"}
    assert rules.count("loop_detected") <= 1


def test_every_guard_that_counts_is_tried_at_the_same_time():
    counting = {row.name for row in ROWS if not row.acts and not row.pace_s}
    assert counting - set(COUNTED) == {"spike", "dollars a hour", "calls a day"}
