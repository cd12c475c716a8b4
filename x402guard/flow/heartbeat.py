"""Shows other machines from time to time that this process lives."""

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
    """A thread that calls *beat* every minute until it is closed, or the object of the method is gone. It starts at once.

    Args:
        beat: a method that writes the sign into the ledger. If that fails, the next one is as good.
    """

    def __init__(self, beat: Callable[[], None]) -> None:
        self._pid, self._is_over = os.getpid(), threading.Event()
        thread = threading.Thread(
            target=_run, args=(WeakMethod(beat), self._is_over), name="x402guard-heartbeat", daemon=True
        )
        thread.start()
        self._thread = thread

    def close(self) -> None:
        """Stop, and wait at most five seconds for a sign under way. Idempotent."""
        self._is_over.set()
        if self._pid == os.getpid():
            self._thread.join(_CLOSING_S)


def _run(beat: WeakMethod[Callable[[], None]], is_over: threading.Event) -> None:
    while not is_over.wait(BEAT_S):
        write = beat()
        if write is None:
            return
        try:
            write()
        except Exception as error:  # noqa: BLE001 - a thread that ends would make its process look dead
            if not is_over.is_set():
                LOG.warning("the sign that this process lives cannot be written, and is tried again: %s", error)
        del write
