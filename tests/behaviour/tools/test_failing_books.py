"""A tool that is cancelled at whatever await, and books that fail at whatever write: no hold leaks, and no cost is lost."""

import asyncio
import logging
import threading
from contextlib import contextmanager
from decimal import Decimal

import anyio
import anyio.lowlevel
import pytest

from tests.support.faults import Tripwire
from tests.support.ledger import Clock
from tests.support.tool_forms import check, events, said
from x402guard import ConfigError, Guard, LedgerUnavailable
from x402guard.stores import open_store

STEPS = 16
both_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@contextmanager
def opened(ledger, wrap=lambda store: store):
    store = wrap(open_store(ledger, clock_ms=Clock()))
    with Guard(ledger=store) as guard, guard.session("research", budget="$1.00") as session:
        if guard.shell.late_writes is not None:
            guard.shell.late_writes.close()  # an end that fails here is not written later
        yield session
    store.close()


async def turns(count):
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


def shown(result, mode):
    return f"{result} as {mode}"


async def decorated(session, ran):
    @session.tool(cost="$0.05", mode="raw", render=shown, max_tokens=100)
    async def serp():
        ran.append("began")
        await turns(3)
        ran.append("said")
        return "Roe"

    assert await serp() == "Roe as raw"


async def block(session, ran):
    async with session.hold("serp", up_to="$0.05") as hold:
        ran.append("began")
        await turns(3)
        hold.capture("$0.02")
        ran.append("said")
        await turns(2)


async def silent_block(session, ran):
    async with session.hold("serp", up_to="$0.05"):
        ran.append("began")
        await turns(3)


async def charge(session, ran):
    await session.acharge("serp", "$0.05")
    ran.append("said")


SAID = {decorated: "0.05", block: "0.02", silent_block: None, charge: "0.05"}
every_use = pytest.mark.parametrize("use", SAID, ids=lambda use: use.__name__)


def check_end(session, use, ran):
    """Nothing is held or reserved; what began is paid for, at what was said or the ceiling. Returns how it ended."""
    where = f"{ran}, {[event['event'] for event in events(session)]}"
    assert (session.held, session.tokens.reserved) == (0, 0), where
    assert session.shell.store.outstanding() == [], where
    if "said" in ran:
        check(session, SAID[use], "estimate")
        return "said"
    if "began" in ran:
        check(session, "0.05", "assumed")
        return "ceiling"
    names = [event["event"] for event in events(session)]
    if use is charge and "capture" in names:
        check(session, "0.05", "estimate")  # one write, and not taken back: it was its caller's own word
        return "charged"
    assert names in ([], ["authorize", "void"]), where
    check(session, "0", calls=0)
    return "nothing"


async def cancelled_after(steps, use, session, ran):
    scope = anyio.CancelScope()

    async def call():
        with scope:
            await use(session, ran)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await turns(steps)
        scope.cancel()


async def task_cancelled_after(steps, use, session, ran):
    """asyncio's own way, which pierces anyio's shields."""
    task = asyncio.create_task(use(session, ran))
    await turns(steps)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


WAYS_OUT = [(cancelled_after, "asyncio"), (cancelled_after, "trio"), (task_cancelled_after, "asyncio")]
each_way_out = pytest.mark.parametrize(("leave", "backend"), WAYS_OUT, ids=["scope", "trio scope", "task"])


@pytest.mark.one_in(5)
@each_way_out
@every_use
def test_cancelled_at_every_await_nothing_stays_held_and_what_ran_is_paid_for(ledger_url, use, leave, backend):
    ends = set()
    for steps in range(STEPS):
        ran = []
        ledger = ledger_url.replace("ledger.db", f"{steps}.db")
        with opened(ledger) as session:
            anyio.run(leave, steps, use, session, ran, backend=backend)
            ends.add(check_end(session, use, ran))
    if use is not charge and ledger_url == "memory://":
        assert "ceiling" in ends
        assert "said" in ends or use is silent_block


class TaskTripwire(Tripwire):
    """The same, by the task's own ``cancel``; ``scope`` is the task."""

    def __init__(self, store, n, *, after):
        super().__init__(store, n, after=after)
        self.loop = None

    def transact(self, scope, change):
        if self.scope is None:
            return self._store.transact(scope, change)
        self._n -= 1
        if self._n == 0 and not self._after:
            self.cancel()
        result = self._store.transact(scope, change)
        if self._n == 0 and self._after:
            self.cancel()
        return result

    def cancel(self):
        """Returns when the loop has done it, so that the cancellation comes before the answer."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (self.scope.cancel(), done.set()))
        assert done.wait(10)


WRITES = [(decorated, n) for n in (1, 2, 3, 4)] + [(block, 1), (block, 2), (silent_block, 1), (silent_block, 2)]
around_each_write = pytest.mark.parametrize(
    ("use", "n"), [*WRITES, (charge, 1)], ids=lambda value: getattr(value, "__name__", value)
)
before_and_after = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
END_OF_SILENCE = {(silent_block, 2): "ceiling", (charge, 1): "charged"}


def expected_end(use, n):
    begins = 2 if use is decorated else 1
    return END_OF_SILENCE.get((use, n), "nothing" if n <= begins else "said")


@pytest.mark.one_in(3)
@both_loops
@before_and_after
@around_each_write
def test_cancelled_around_each_write_nothing_stays_held(ledger_url, backend, use, n, after):
    """From the thread that writes: before the rows are committed, and after."""
    ran = []
    with opened(ledger_url, lambda store: Tripwire(store, n, after=after)) as session:
        store = session.shell.store

        async def main():
            store.token = anyio.lowlevel.current_token()
            with anyio.CancelScope() as store.scope:
                await use(session, ran)
                await turns(1)

        anyio.run(main, backend=backend)
        store.scope = None
        assert store._n <= 0  # the write was met
        finished = use is charge and "said" in ran
        assert check_end(session, use, ran) == ("said" if finished else expected_end(use, n))


@before_and_after
@around_each_write
def test_a_task_cancelled_around_each_write_leaves_nothing_held(ledger_url, use, n, after):
    """asyncio's own cancellation comes while the write is out, which goes on in its thread all the same."""
    ran = []
    with opened(ledger_url, lambda store: TaskTripwire(store, n, after=after)) as session:
        store = session.shell.store

        async def main():
            store.loop = asyncio.get_running_loop()
            store.scope = asyncio.create_task(use(session, ran))
            await asyncio.gather(store.scope, return_exceptions=True)
            assert store.scope.cancelled() or (use is charge and ran)
            store.scope = None

        asyncio.run(main())
        assert check_end(session, use, ran) == expected_end(use, n)


def test_a_block_that_was_cancelled_on_its_way_out_is_over(ledger_url):
    """Its end stands in the books: there is a receipt, and no further word."""
    holds = []
    with opened(ledger_url, lambda store: TaskTripwire(store, 2, after=False)) as session:
        store = session.shell.store

        async def main():
            async def use():
                async with session.hold("serp", up_to="$0.05") as hold:
                    holds.append(hold)

            store.loop = asyncio.get_running_loop()
            store.scope = asyncio.create_task(use())
            await asyncio.gather(store.scope, return_exceptions=True)
            store.scope = None

        asyncio.run(main())
        check(session, "0.05", "assumed")
        with pytest.raises(ConfigError, match="hold: "):
            holds[0].capture("$0.01")


def test_a_call_that_is_thrown_away_with_its_loop_still_counts():
    async def main(session):
        @session.tool(cost="$0.05")
        async def serp():
            ran.append("began")
            await Forever()

        call = serp()
        while not ran:
            call.send(None)
            await asyncio.sleep(0)
        return call

    class Forever:
        def __await__(self):
            while True:
                yield

    ran = []
    with opened("memory://") as session:
        asyncio.run(main(session)).close()
        assert session.held + session.spent == Decimal("0.05")


# -- books that fail ---------------------------------------------------------------------------------------------------------


class Failing:
    """A store whose n-th write from now on fails, and all after it where ``down``; ``late``: what it wrote stands all the same."""

    def __init__(self, store):
        self._store, self.n, self.down, self.late = store, None, False, False

    def __getattr__(self, name):
        return getattr(self._store, name)

    def transact(self, scope, change):
        if self.n is None:
            return self._store.transact(scope, change)
        self.n -= 1
        if self.n == 0 or (self.down and self.n < 0):
            if self.late:
                self._store.transact(scope, change)
            raise LedgerUnavailable("the disk is full")
        return self._store.transact(scope, change)

    def fail(self, n, *, down=False, late=False):
        self.n, self.down, self.late = n, down, late


HOW = [{}, {"down": True}, {"late": True}]
each_failure = pytest.mark.parametrize("how", HOW, ids=["once", "down", "late"])
BEGINS = [(decorated, 1), (decorated, 2), (block, 1), (charge, 1)]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@each_failure
@pytest.mark.parametrize(("use", "n"), BEGINS, ids=["tokens", "decorated", "block", "charge"])
def test_books_that_fail_before_a_tool_runs_stop_it_and_hold_nothing(ledger_url, backend, how, use, n):
    ran = []
    with opened(ledger_url, Failing) as session:
        session.shell.store.fail(n, **how)
        with pytest.raises(LedgerUnavailable, match="the disk is full"):
            anyio.run(use, session, ran, backend=backend)
        session.shell.store.n = None
        assert ran == []
        if how.get("down") and n == 2:
            # What was reserved could not be given back either: it lapses. The dollars were never held.
            assert (session.held, session.spent) == (0, 0)
        else:
            assert check_end(session, use, ran) in ("nothing", "charged")


def check_in_doubt(session, caplog):
    assert (session.spent, session.held) == (0, Decimal("0.05"))
    # On a server the end is also left to the next process, because the queue of ends is closed here.
    told = [each for each in caplog.records if each.name == "x402guard" and each.module != "late_writes"]
    assert [record.levelno for record in told] == [logging.WARNING]
    assert "the disk is full" in told[0].getMessage()
    assert "'serp'" in told[0].getMessage()


@pytest.mark.parametrize("end", ["capture", "void", None, "raises"])
@pytest.mark.parametrize("backend", [None, "asyncio", "trio"])
def test_a_block_whose_end_cannot_be_written_is_held_in_full_and_says_so(ledger_url, caplog, backend, end):
    error = KeyError("the body's own")
    with opened(ledger_url, Failing) as session:
        hold = session.hold("serp", up_to="$0.05")

        def body():
            session.shell.store.fail(1, down=True)
            {"capture": lambda: hold.capture("$0.02"), "void": hold.void}.get(end, lambda: None)()
            return said(error if end == "raises" else None)

        async def main():
            async with hold:
                body()

        try:
            if backend is None:
                with hold:
                    body()
            else:
                anyio.run(main, backend=backend)
        except KeyError as raised:
            assert raised is error
        session.shell.store.n = None
        check_in_doubt(session, caplog)
        receipt = hold.receipt
        assert (receipt.amount, receipt.state, receipt.in_doubt) == (Decimal("0.05"), "held", True)


@pytest.mark.parametrize("how", HOW[:2], ids=["once", "down"])
@pytest.mark.parametrize("shows", [False, True], ids=["plain", "in a mode"])
@pytest.mark.parametrize("awaits", [False, True], ids=["function", "async function"])
def test_what_a_tool_returned_is_not_lost_with_its_books(ledger_url, caplog, how, shows, awaits):
    with opened(ledger_url, Failing) as session:
        more = {"mode": "raw", "render": shown} if shows else {}

        def body():
            session.shell.store.fail(1, **how)
            return "Roe"

        async def async_body():
            return body()

        tool = session.tool(cost="$0.05", name="serp", **more)(async_body if awaits else body)
        assert (asyncio.run(tool()) if awaits else tool()) == ("Roe as raw" if shows else "Roe")
        session.shell.store.n = None
        if not (shows and how):
            check_in_doubt(session, caplog)


def test_what_a_tool_returned_is_not_lost_where_only_its_tokens_cannot_be_written(ledger_url, caplog):
    with opened(ledger_url, Failing) as session:

        @session.tool(cost="$0.05", name="serp", mode="raw", render=shown)
        def serp():
            session.shell.store.fail(2)
            return "Roe"

        assert serp() == "Roe as raw"
        check(session, "0.05", "estimate")
        assert [record.levelname for record in caplog.records if record.name == "x402guard"] == ["WARNING"]


def test_a_tool_in_a_block_with_a_context_of_its_own_takes_room_there():
    with opened("memory://") as session, session.child("child", budget="$0.10", tokens=200) as child:
        tool = session.tool(cost="$0.05", name="serp", mode="raw", render=shown, max_tokens=100)(
            lambda: (child.tokens.reserved, session.tokens.reserved)
        )
        assert tool() == "(100, 0) as raw"
        assert child.tokens.used > session.tokens.used == 0
