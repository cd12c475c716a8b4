"""What hangs at one host, or in one tool, delays nobody elsewhere: ten hung calls cost another one less than 50 ms."""

import threading
import time

import anyio
import pytest

from tests.support.merchant import make_guard
from tests.support.slow_server import SLOW_ANSWERS, WAYS, Trickler, settings_of
from x402guard import CallTimeout, Policy, Timeouts

POLICY = Policy(breaker=None, loop=None, timeouts=Timeouts(payment_s=20, tool_s=20))
WITHIN_S = 0.05
TIMES = 9


@pytest.fixture
def hosts():
    with Trickler() as hung, Trickler() as other:
        hung.answers |= {f"/{n}": SLOW_ANSWERS["silence"] for n in range(10)}
        yield hung, other


@pytest.fixture
def session():
    with make_guard(policy=POLICY) as guard, guard.session("s", budget="$1") as session:
        yield session


def until(true):
    ends_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < ends_s, "it never came to that"
        time.sleep(0.005)


def quickest(act):
    """The quickest of so many calls, in seconds, after one to warm up: what delays all delays it, and other work does not."""
    took = []
    for n in range(TIMES + 1):
        begun = time.monotonic()
        act(n)
        took.append(time.monotonic() - begun)
    return min(took[1:])


def in_threads(count, act):
    threads = [threading.Thread(target=act, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    return threads


def quietly(act):
    def run(n):
        try:
            act(n)
        except Exception as error:
            assert type(error).__name__ in ("SettlementUncertain", "CallTimeout", "ReadError", "RemoteProtocolError")

    return run


def test_ten_hung_payments_delay_none_at_another_host(hosts, session):
    hung, other = hosts
    http = WAYS[0].library.Client(**settings_of(WAYS[0], session))
    with http:
        alone = quickest(lambda n: http.get(f"{other.url}/alone/{n}"))
        threads = in_threads(10, quietly(lambda n: http.get(f"{hung.url}/{n}")))
        until(lambda: len(hung.nonces) == 8)  # eight at a time
        beside = quickest(lambda n: http.get(f"{other.url}/beside/{n}"))
        assert len(hung.nonces) == 8
        hung.let_go()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    assert beside - alone < WITHIN_S


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_ten_hung_tasks_delay_none_at_another_host(hosts, session, loop):
    hung, other = hosts
    medians = anyio.run(_beside, settings_of(WAYS[1], session), hung, other, backend=loop)
    assert medians[1] - medians[0] < WITHIN_S
    assert session.shell.slots._taken == {}


async def _beside(settings, hung, other):
    async def median_of(name):
        took = []
        for n in range(TIMES + 1):
            begun = time.monotonic()
            assert (await http.get(f"{other.url}/{name}/{n}")).content == b"sold"
            took.append(time.monotonic() - begun)
        return min(took[1:])

    async with WAYS[1].library.AsyncClient(**settings) as http:
        alone = await median_of("alone")
        async with anyio.create_task_group() as group:
            for n in range(10):
                group.start_soon(http.get, f"{hung.url}/{n}")
            with anyio.fail_after(10):
                while len(hung.nonces) < 8:
                    await anyio.sleep(0.005)
            beside = await median_of("beside")
            assert len(hung.nonces) == 8
            group.cancel_scope.cancel()
    return alone, beside


def test_ten_hung_uses_of_a_tool_delay_no_other_tool(session):
    let_go, inside = threading.Event(), []
    hung = session.tool(cost="$0.001", name="hung")(lambda n: (inside.append(n), let_go.wait(20)))
    quick = session.tool(cost="$0.001", name="quick")(lambda n: n)
    alone = quickest(quick)
    threads = in_threads(10, hung)
    until(lambda: len(inside) == 8)
    beside = quickest(lambda n: quick(n + 100))
    assert len(inside) == 8
    let_go.set()
    for thread in threads:
        thread.join(20)
    assert len(inside) == 10
    assert beside - alone < WITHIN_S


def test_a_ninth_use_waits_until_one_has_ended_late_or_not():
    """A tool that is past its time still runs, and keeps its place until it has ended."""
    policy = Policy(breaker=None, loop=None, timeouts=Timeouts(tool_s=1))
    let_go, inside = threading.Event(), []
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1") as session:
        hung = session.tool(cost="$0.001", name="hung")(lambda n: (inside.append(n), let_go.wait(20)))

        def use(n):
            with pytest.raises(CallTimeout):
                hung(n)

        for thread in in_threads(8, use):
            thread.join(10)
        last = in_threads(1, hung)[0]
        until(lambda: session.shell.slots._lines)
        assert len(inside) == 8
        let_go.set()
        last.join(10)
        assert len(inside) == 9
        until(lambda: session.shell.slots._taken == {})


def test_children_share_the_places_of_their_run_and_other_runs_have_their_own():
    let_go, inside = threading.Event(), []
    with (
        make_guard(policy=POLICY) as guard,
        guard.session("a", budget="$1") as one,
        guard.session("b", budget="$1") as two,
    ):
        uses = [
            payer.tool(cost="$0.001", name="hung")(lambda n: (inside.append(n), let_go.wait(20)))
            for payer in (one, one.child("c", budget="$0.10"), two)
        ]
        threads = in_threads(8, uses[0])
        until(lambda: len(inside) == 8)
        threads += in_threads(1, uses[1])
        until(lambda: one.shell.slots._lines)
        threads += in_threads(1, lambda n: uses[2]("other"))
        until(lambda: "other" in inside)
        assert len(inside) == 9
        let_go.set()
        for thread in threads:
            thread.join(20)
        assert len(inside) == 10
