"""Calls a method from time to time: to show other machines that this process lives, or to check a ledger on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final
from weakref import WeakMethod

from x402guard.flow.shell import LOG

BEAT_S: Final = 60
_CLOSING_S: Final = 5.0


class Heartbeat:
    """A thread that calls *beat* from time to time until it is closed, or the object of the method is gone.

    Args:
        beat: a method. If it fails, the next time is as good.
        what: what fails then, for the log.
        first_s: seconds until the first call; a minute by default.
        every_s: seconds between two calls, after one that has not failed; a minute by default.
    """

    def __init__(
        self, beat: Callable[[], None], what: str, *, first_s: float | None = None, every_s: float | None = None
    ) -> None:
        self._pid, self._is_over = os.getpid(), threading.Event()
        work = (WeakMethod(beat), self._is_over, what, first_s, every_s)
        thread = threading.Thread(target=_run, args=work, name="x402guard-heartbeat", daemon=True)
        thread.start()
        self._thread = thread

    def close(self) -> None:
        """Stop, and wait at most five seconds for a sign under way. Idempotent."""
        self._is_over.set()
        if self._pid == os.getpid():
            self._thread.join(_CLOSING_S)


def _run(
    beat: WeakMethod[Callable[[], None]],
    is_over: threading.Event,
    what: str,
    first_s: float | None,
    every_s: float | None,
) -> None:
    wait_s = BEAT_S if first_s is None else first_s
    while not is_over.wait(wait_s):
        wait_s = BEAT_S if every_s is None else every_s
        write = beat()
        if write is None:
            return
        try:
            write()
        except Exception as error:  # noqa: BLE001 - a thread that ends would make its process look dead
            wait_s = BEAT_S
            if not is_over.is_set():
                LOG.warning("%s, and is tried again: %s", what, error)
        del write
