"""Has the chain asked about claims, in a thread that lives while there are any: no paid answer waits for a chain."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from x402guard.errors import X402GuardError
from x402guard.x402.settlement import Swept

_LOG: Final = logging.getLogger("x402guard")
FIRST_PAUSE_S: Final = 1.0
"""Seconds between a claim and the first question, so that many claims are asked about together, and none while it is still paid for."""

MOST_AT_ONCE: Final = 64
"""How many sweeps one look takes, at most."""

LONGEST_PAUSE_S: Final = 30.0
_CLOSING_S: Final = 5.0


class Rechecker:
    """Looks once after it was nudged, then in growing pauses until nothing is open any more.

    Args:
        look: asks the chain about some payments.
    """

    def __init__(self, look: Callable[[], Swept]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._pause = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def nudge(self) -> None:
        """Look soon; returns at once."""
        with self._lock:
            if self._closed:
                return
            self._wake.set()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="x402guard-recheck", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            if self._wake.wait(pause_s):
                self._wake.clear()
                pause_s = FIRST_PAUSE_S
                # Not the same event: a nudge a moment later is one more claim for the same look.
                self._pause.wait(FIRST_PAUSE_S)
            still_open = self._looked()
            with self._lock:
                if self._closed or (still_open == 0 and not self._wake.is_set()):
                    self._thread = None
                    return
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    def _looked(self) -> int:
        try:
            for _ in range(MOST_AT_ONCE):
                swept = Swept(0, more=False) if self._closed else self._look()
                if not swept.more:
                    break
            return swept.still_open
        except X402GuardError as error:
            if not self._closed:
                _LOG.warning("claims could not be checked in the background, they will be later: %s", error)
            return 1

    def close(self) -> None:
        """Stop; a question that is on its way is waited for, for five seconds at most. Closing twice is fine."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wake.set()
        self._pause.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSING_S)
