"""Ends of answers that are written later: the caller has what was paid for, and must not wait for a ledger that is away."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, TypeVar

from x402guard.errors import LedgerUnavailable
from x402guard.flow.detached import Aside, TooLate
from x402guard.flow.shell import LOG

R = TypeVar("R")

MOST_WAITING: Final = 1_000
ANSWER_S: Final = 2.0
_PAUSES_S: Final = (0.5, 1.0, 2.0, 5.0)
_CLOSING_S: Final = 5.0


class _Write:
    """One write. ``is_left``: its caller no longer waits for it. ``is_over``: it needs no other attempt."""

    def __init__(self, call: Callable[[], Any], late: Callable[[Any], object]) -> None:
        self.call, self.late = call, late
        self.is_left = self.is_over = False


class LateWrites:
    """Writes at once while the ledger answers within two seconds; else in the background, in order, until it is written.

    A thousand writes wait at most. What is not written when the process ends is lost: the hold then counts in full until
    the chain or its deadline decides.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: deque[_Write] = deque()
        self._left = 0  # writes under way whose callers wait no longer
        self._thread: threading.Thread | None = None
        self._is_closing = threading.Event()
        self._dropped = 0

    def write(self, call: Callable[[], R], late: Callable[[R], object]) -> R:
        """Return the result of *call*. Raises what it raises, and ``LedgerUnavailable`` if it is written later.

        *late* then takes the result.
        """
        if self._pid != os.getpid():  # after a fork: what waited is the parent's
            self._begin()
        if self._is_closing.is_set():
            return call()
        mine = _Write(call, late)
        with self._changed:
            if self._waiting or self._left:
                self._add(mine)
                raise _away()
        try:
            written: R = Aside(lambda: self._attempt(mine)).within(ANSWER_S)
            return written
        except TooLate:
            self._leave(mine)
            raise _away() from None
        except LedgerUnavailable as error:
            if _may_come_back(error):
                with self._changed:
                    self._add(mine)
            raise
        except Exception:
            raise
        except BaseException:  # Ctrl-C
            self._leave(mine)
            raise

    def _attempt(self, mine: _Write) -> Any:
        result, error = None, None
        try:
            result = mine.call()
        except Exception as raised:  # noqa: BLE001 - raised again where it is waited for
            error = raised
        with self._changed:
            mine.is_over = True
            left = mine.is_left
            if left:
                self._left -= 1
                if isinstance(error, LedgerUnavailable) and _may_come_back(error):
                    self._add(mine, first=True)
            self._changed.notify_all()
        if error is not None:
            raise error
        if left:
            mine.late(result)
        return result

    def _leave(self, mine: _Write) -> None:
        with self._changed:
            if not mine.is_over:
                mine.is_left, self._left = True, self._left + 1

    def _add(self, write: _Write, *, first: bool = False) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._dropped += 1
            LOG.error(
                "the ledger is away, and %d ends of answers wait already; %d dropped", MOST_WAITING, self._dropped
            )
            return
        (self._waiting.appendleft if first else self._waiting.append)(write)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="x402guard-late-writes", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        failures = 0
        while True:
            with self._changed:
                while self._left:
                    self._changed.wait()
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                write = self._waiting[0]
            try:
                write.late(write.call())
            except Exception as error:  # noqa: BLE001 - it must not stop those after it
                if isinstance(error, LedgerUnavailable) and _may_come_back(error):
                    pause_s = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
                    failures += 1
                    if self._is_closing.wait(pause_s):
                        time.sleep(_PAUSES_S[0])
                    continue
                LOG.error("the end of an answer cannot be written: %s", error)
            failures = 0
            with self._changed:
                self._waiting.popleft()

    def close(self) -> None:
        """Wait at most five seconds for what is still to be written, and log what is not."""
        self._is_closing.set()
        if self._pid != os.getpid():
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._left, _CLOSING_S)
            lost = len(self._waiting) + self._left
        if lost:
            LOG.error("the ledger is away: %d ends of paid answers are not in it, and their holds count in full", lost)


def _may_come_back(error: LedgerUnavailable) -> bool:
    return error.retry != "after_change"


def _away() -> LedgerUnavailable:
    return LedgerUnavailable("the ledger does not answer; the end of this answer is written when it is back")
