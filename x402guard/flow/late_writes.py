"""Ends of answers that are written later: the caller has what was paid for, and must not wait for a ledger that is away.

What waits is kept beside the ledger as well, so that another process can enter it if this one ends before.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any, Final, TypeVar, cast

from x402guard.errors import LedgerUnavailable
from x402guard.flow.detached import Aside, TooLate
from x402guard.flow.shell import LOG
from x402guard.ledger.lost import LateEnd
from x402guard.ledger.store import KeepsEnds

R = TypeVar("R")

MOST_WAITING: Final = 1_000
ANSWER_S: Final = 2.0
_PAUSES_S: Final = (0.2, 0.5, 1.0)
_CLOSING_S: Final = 5.0


class LateWrite:
    """One write, and what has become of it.

    Attributes:
        end: what it writes, as data.
        restrains: nothing else is written before it.
        is_taken: its caller's thread runs it, or the background will.
        is_left: its caller no longer waits for it.
        has_run: its last run has ended, with ``result`` or ``error``.
        is_over: its caller's thread has ended.
    """

    def __init__(
        self, call: Callable[[], Any], late: Callable[[Any], object], end: LateEnd, *, restrains: bool
    ) -> None:
        self._call, self._late, self._context = call, late, copy_context()
        self.end, self.restrains = end, restrains
        self.is_taken = self.is_left = self.has_run = self.is_over = False
        self.result: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        """Run it, in the context of its caller."""
        self.error, self.has_run = None, False
        try:
            self.result = self._context.copy().run(self._call)
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            self.error = error
        self.has_run = True

    def tell(self) -> None:
        """Hand over a result that its caller did not wait for. Raises its error, if it has failed."""
        if self.error is not None:
            raise self.error
        self._context.copy().run(self._late, self.result)

    @property
    def is_missing(self) -> bool:
        """True if it failed, and the ledger may take it at another time: also after a change by its owner."""
        return isinstance(self.error, LedgerUnavailable) and self.error.retry != "no"

    @property
    def is_entered(self) -> bool:
        """True if the ledger has it, or can never keep what is in it. After any other error another process tries."""
        return self.error is None or (isinstance(self.error, LedgerUnavailable) and not self.is_missing)


class LateWrites:
    """Writes at once while the ledger answers within two seconds; else in the background, in order, until it is written.

    A thousand writes wait at most. What is not written when the process ends is kept in *outbox*, and the next process on
    this machine enters it; until then the hold counts in full.
    """

    def __init__(self, outbox: KeepsEnds) -> None:
        self._outbox = outbox
        self._begin()

    def _begin(self) -> None:
        # Ctrl-C cannot leave a lock of C behind that is held; it can inside the methods of a condition.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[LateWrite] = deque()
        self._under_way = 0  # in the background
        self._is_running = False
        self._is_closing = self._is_over = self._is_wanted = False
        self._dropped = 0
        self._restraining: set[LateWrite] = set()  # of those that wait
        self._patient: set[LateWrite] = set()  # of those whose callers wait
        self._failure: Exception | None = None
        self._pid = os.getpid()  # the last: another thread of a forked process goes by it

    def write(self, call: Callable[[], R], late: Callable[[R], object], *, end: LateEnd, patient: bool = False) -> R:
        """Return the result of *call*. Raises what it raises, and ``LedgerUnavailable`` if it is written later.

        *late* then takes the result. *end* is what the call writes, as data. A *patient* write is waited for to its end,
        and what others spend waits for it as well; only if it fails is it written later.
        """
        if self._pid != os.getpid():  # after a fork: what waited is the parent's
            self._begin()
        mine = LateWrite(call, late, end, restrains=patient)
        if patient or self._is_closing:
            self._outbox.keep(end)  # a process that is killed meanwhile leaves it behind
            try:
                self._patient.add(mine)
                mine.run()
                return cast("R", self._ended(mine))
            finally:
                self._patient.discard(mine)
                with self._lock:
                    self._changed.notify_all()
        if self._waiting or self._under_way:
            self._outbox.keep(end)  # not under the lock: a disk may be slow
        with self._lock:
            if self._waiting or self._under_way:
                self._add(mine)
                raise _away()
        try:
            self._run_aside(lambda: self._run_mine(mine))
        except TooLate:
            if self._leave(mine):
                raise _away() from None
        except RuntimeError:
            if not self._takes(mine):
                raise
            self._outbox.keep(end)
            mine.run()  # no thread can be started
        except BaseException:  # Ctrl-C
            if not self._leave(mine):
                self._end_alone(mine)
            raise
        return cast("R", self._ended(mine))

    def _takes(self, mine: LateWrite) -> bool:
        """Return whether the caller of this is the one who runs it."""
        with self._lock:
            taken, mine.is_taken = mine.is_taken, True
            return not taken

    def _run_mine(self, mine: LateWrite) -> None:
        if not self._takes(mine):
            return  # its caller was interrupted before this thread began
        is_told = False
        try:
            mine.run()
        finally:
            with self._lock:
                mine.is_over, again = True, mine.has_run and mine.is_missing
                if mine.is_left:
                    self._under_way -= 1
                    if again:
                        self._add(mine, first=True)  # from now on it is the background's
                    self._changed.notify_all()
                is_told = mine.is_left and mine.has_run and not again
        if is_told:
            self._tell(mine)

    def _leave(self, mine: LateWrite) -> bool:
        """Wait for it no longer. Returns False if it has ended just now."""
        self._outbox.keep(mine.end)
        with self._lock:
            if mine.is_over:
                return False
            mine.is_left = True
            if mine.is_taken:
                self._under_way += 1
            else:  # it has not begun
                mine.is_taken = True
                self._add(mine)
            return True

    def _end_alone(self, mine: LateWrite) -> None:
        """End a write whose caller is interrupted just as it has ended; one that did not run stays beside the ledger."""
        if mine.is_missing:
            with self._lock:
                self._add(mine)
        elif mine.has_run:
            self._tell(mine)

    def _ended(self, mine: LateWrite) -> Any:
        error, result, is_missing = mine.error, mine.result, mine.is_missing
        if mine.is_entered:
            self._outbox.written(mine.end)
        else:
            self._outbox.keep(mine.end)  # not under the lock: a disk may be slow
        if is_missing:
            with self._lock:
                self._add(mine)  # from now on it is the background's
        if error is not None:
            raise error
        return result

    def _tell(self, write: LateWrite) -> None:
        """End a write that its caller does not wait for."""
        if write.is_entered:
            self._outbox.written(write.end)
        try:
            write.tell()
        except Exception as error:  # noqa: BLE001 - it must not stop those after it
            LOG.error("the end of an answer cannot be written: %s", error)

    def _add(self, write: LateWrite, *, first: bool = False) -> None:
        kept = self._outbox.keep(write.end)
        wait = len(self._waiting) + self._under_way
        if (wait >= MOST_WAITING and not write.restrains) or self._is_over:
            self._dropped += 1
            LOG.error(
                "the ledger is away, and %d ends of answers wait; %d more %s",
                wait,
                self._dropped,
                "are left to the next process on this machine" if kept else "are dropped: their holds count in full",
            )
            return
        (self._waiting.appendleft if first else self._waiting.append)(write)
        if write.restrains:
            self._restraining.add(write)
        self._go_on()

    def _go_on(self) -> None:
        """Let what waits be written in the background, with the lock held."""
        if self._is_running or self._is_over or not self._waiting:
            return
        self._is_running = True
        try:
            self._start(self._turns())
        except BaseException as error:
            self._is_running = False
            if not isinstance(error, RuntimeError):  # too many threads: the next one who writes or waits tries again
                raise
            LOG.error("an end of an answer waits, and no thread can be started: %s", error)

    def _turns(self) -> Iterator[float | None]:
        """Write what waits, in its order, until nothing does.

        Yields the seconds to wait before the next one; None if it waits for what others write.
        """
        failures = 0
        while True:
            with self._lock:
                is_busy = self._under_way > 0 and not self._is_over
                if not is_busy and (not self._waiting or self._is_over):
                    self._is_running = False
                    self._changed.notify_all()
                    return
                write = None if is_busy else self._waiting.popleft()
                self._under_way += write is not None
            if write is None:
                yield None
                continue
            again = False
            try:
                self._outbox.keep(write.end)
                write.run()
                again = write.is_missing
                if not again:
                    self._tell(write)
            finally:
                with self._lock:
                    self._under_way -= 1
                    self._failure = write.error
                    again = again and not self._is_over
                    if again:
                        self._waiting.appendleft(write)
                    else:
                        self._restraining.discard(write)
                    self._changed.notify_all()
            failures = failures + 1 if again else 0
            if again:
                yield _PAUSES_S[0] if self._is_closing else _PAUSES_S[min(failures, len(_PAUSES_S)) - 1]

    # -- threads: a simulation has none ---------------------------------------------------------------------------------

    def _run_aside(self, call: Callable[[], None]) -> None:
        """Run *call* to its end. Raises ``TooLate`` after two seconds, and ``RuntimeError`` if no thread can be started."""
        Aside(call).within(ANSWER_S)

    def _start(self, turns: Iterator[float | None]) -> None:
        """Take the turns beside all callers. Raises ``RuntimeError`` if no thread can be started."""
        threading.Thread(target=self._take, args=(turns,), name="x402guard-late-writes", daemon=True).start()

    def _take(self, turns: Iterator[float | None]) -> None:
        try:
            for pause_s in turns:
                with self._lock:
                    if pause_s is None:
                        self._changed.wait_for(lambda: not self._under_way or self._is_over)
                    else:
                        self._changed.wait_for(lambda: self._is_over or self._is_wanted, pause_s)
                        self._is_wanted = False
        except BaseException:
            with self._lock:
                self._is_running = False  # the next one who writes or waits starts again
            raise

    def _wait(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until *holds* is true, with the lock held; return False if it is not in that time."""
        return self._changed.wait_for(holds, seconds)

    # -- its end ----------------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Let what restrains be written first. Raises ``LedgerUnavailable`` if that takes longer than two seconds."""
        if not self._restrains() or self._is_over or self._pid != os.getpid():
            return
        with self._lock:
            self._is_wanted = True
            self._go_on()
            self._changed.notify_all()
            if not self._wait(lambda: not self._restrains() or self._is_over, ANSWER_S):
                why = "the ledger does not answer" if self._failure is None else str(self._failure)
                raise LedgerUnavailable(
                    f"the end of an earlier call, which may exceed a budget, is not in the ledger yet: {why}"
                )

    def _restrains(self) -> bool:
        """True while nothing else may be spent."""
        return bool(self._restraining or self._patient)

    def close(self) -> None:
        """Wait at most five seconds for what is still to be written, and log what is not. Idempotent."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._is_closing = True
            self._go_on()
            self._wait(lambda: not self._waiting and not self._under_way, _CLOSING_S)
            lost = len(self._waiting) + self._under_way
            unkept = sum(not self._outbox.keep(write.end) for write in self._waiting)
            self._is_over = True
            self._waiting.clear()
            self._changed.notify_all()
        if lost:
            LOG.error(
                "the ledger is away: %d ends of paid answers are not in it, and their holds count in full until the next "
                "process on this machine opens it; %d of them are in no file",
                lost,
                unkept,
            )


def _away() -> LedgerUnavailable:
    return LedgerUnavailable(
        "the ledger does not answer; the end of this answer is written when it is back",
        advice="The answer was handed over, and its hold counts in full until then. Bring the ledger's server back.",
    )
