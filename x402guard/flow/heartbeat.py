"""Shows other machines from time to time that this process lives."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

from x402guard.errors import LedgerUnavailable
from x402guard.flow.shell import LOG

BEAT_S: Final = 60
_CLOSING_S: Final = 5.0


class Heartbeat:
    """A thread that calls *beat* every minute until it is closed. It starts at once.

    Args:
        beat: writes the sign into the ledger. If that fails, the next one is as good.
    """

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat, self._pid = beat, os.getpid()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="x402guard-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(BEAT_S):
            try:
                self._beat()
            except LedgerUnavailable as error:
                if not self._is_over.is_set():
                    LOG.info("the sign of this process could not be written, and is tried again: %s", error)

    def close(self) -> None:
        """Stop, and wait at most five seconds for a sign under way. Idempotent."""
        self._is_over.set()
        if self._pid == os.getpid():
            self._thread.join(_CLOSING_S)
