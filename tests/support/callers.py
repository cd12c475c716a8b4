"""Callers that pay, a thread or a task each, and the clock that they wait on.

The clock passes only when it is told to, and then only while each caller waits on it: an order of events takes no time,
and how long a caller has waited is known to the millisecond.
"""

import asyncio
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import anyio

from tests.support.ledger import Clock
from x402guard.adapters import direct
from x402guard.flow import drivers, surroundings

PATIENCE_S = 60
"""Real seconds after which a caller counts as stuck."""


class WaitingClock(Clock):
    """A clock that knows how many callers run, and which of them sleep until when."""

    def __init__(self):
        super().__init__()
        self._running, self._sleepers, self._changed, self._is_over = 0, [], threading.Condition(), False

    def replaces_sleep(self, patch):
        """Let what waits in the drivers wait on this clock."""
        patch.setattr(drivers, "time", _Sleeping(drivers.time, self.sleep))
        patch.setattr(drivers, "anyio", _Sleeping(drivers.anyio, self.asleep))
        patch.setattr(surroundings, "_AGAIN_S", [0.0])
        for module in (surroundings, direct):
            patch.setattr(module, "time", self)

    def monotonic(self):
        return self.now_ms / 1000

    def begins(self):
        with self._changed:
            self._running += 1

    def ends(self):
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def sleep(self, pause_s):
        woken = threading.Event()
        self._add(pause_s, woken.set)
        woken.wait()
        if self._is_over:
            raise TimeoutError("the clock has stopped")

    async def asleep(self, pause_s):
        if not pause_s:
            return await anyio.sleep(0)
        woken = asyncio.Event()
        sleeper = self._add(pause_s, partial(asyncio.get_running_loop().call_soon_threadsafe, woken.set))
        try:
            await woken.wait()
        finally:
            with self._changed:
                if sleeper in self._sleepers:  # it is cancelled, and runs again
                    self._sleepers.remove(sleeper)
                    self._running += 1

    def _add(self, pause_s, wake):
        with self._changed:
            sleeper = (self.now_ms + int(pause_s * 1000) + 1, wake)
            self._sleepers.append(sleeper)
            self._running -= 1
            self._changed.notify_all()
        return sleeper

    def until_idle(self):
        """Wait until each caller has ended what it was told, or sleeps."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._running <= 0, PATIENCE_S):
                raise TimeoutError(f"{self._running} callers neither end nor sleep")

    def passes(self, seconds):
        """Let time pass, and each sleeper run at its time."""
        until = self.now_ms + int(seconds * 1000)
        while (wake := self._next(until)) is not None:
            wake()
            self.until_idle()
        self.now_ms = max(self.now_ms, until)

    def _next(self, until):
        with self._changed:
            at_ms, wake = sleeper = min(self._sleepers, key=lambda each: each[0], default=(until + 1, None))
            if at_ms > until:
                return None
            self.now_ms = max(self.now_ms, at_ms)
            self._sleepers.remove(sleeper)
            self._running += 1
        return wake

    def stop(self):
        """Wake all threads with an error, so that those that a fault has left asleep can be joined."""
        with self._changed:
            self._is_over = True
            left, self._sleepers = self._sleepers, []
        for _, wake in left:
            wake()


class _Sleeping:
    """A module of the drivers, with another ``sleep``."""

    def __init__(self, module, sleep):
        self._module, self.sleep = module, sleep

    def __getattr__(self, name):
        return getattr(self._module, name)


class _Told:
    """What a caller is told to do, and *after*, which it calls with the result and the error.

    The result is kept nowhere else: a payment that *after* does not keep is dropped.
    """

    def __init__(self, job, after):
        self.job, self.after, self.done = job, after, Future()

    def ended(self, result=None, error=None):
        self.after(result, error)
        self.done.set_result(None)

    def failed(self, error):
        error.__traceback__ = error.__cause__ = error.__context__ = None  # their frames refer to the payment
        self.ended(error=error)


class ThreadCaller:
    """A thread that does what it is told, and lives on."""

    def __init__(self, clock):
        self._clock, self._jobs = clock, queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self):
        while (told := self._jobs.get()) is not None:
            try:
                result = told.job()
            except BaseException as error:
                told.failed(error)
            else:
                told.ended(result)
                del result
            del told
            self._clock.ends()

    def tell(self, job, after):
        told = _Told(job, after)
        self._clock.begins()
        self._jobs.put(told)
        return told.done

    @property
    def lives(self):
        return self._thread.is_alive()

    def end(self):
        self._jobs.put(None)
        self._thread.join(PATIENCE_S)


class Loop:
    """An event loop in a thread of its own, for tasks."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(32))  # as many as wait at once, on any machine
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def close(self):
        self.run(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()

    async def _end(self):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.loop.shutdown_asyncgens()
        await self.loop.shutdown_default_executor()


class TaskCaller:
    """A task that does what it is told, and lives on."""

    def __init__(self, clock, loop):
        self._clock, self._loop = clock, loop
        self._jobs, self._task = loop.run(self._begin())

    async def _begin(self):
        jobs = asyncio.Queue()
        return jobs, asyncio.create_task(self._work(jobs))

    async def _work(self, jobs):
        while True:
            told = await jobs.get()
            try:
                result = await told.job()
            except asyncio.CancelledError:
                told.done.cancel()
                raise
            except BaseException as error:
                told.failed(error)
            else:
                told.ended(result)
                del result
            finally:
                del told
                self._clock.ends()

    def tell(self, job, after):
        told = _Told(job, after)
        self._clock.begins()
        self._loop.loop.call_soon_threadsafe(self._jobs.put_nowait, told)
        return told.done

    @property
    def lives(self):
        return not self._task.done()

    def end(self):
        """Cancel the task, and wait for its end."""
        self._loop.run(self._cancelled())

    async def _cancelled(self):
        self._task.cancel()
        await asyncio.wait([self._task])
