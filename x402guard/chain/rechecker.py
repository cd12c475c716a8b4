"""Checks claims on the chain in a background thread while there are any, so that no paid answer waits for a chain."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from x402guard.errors import X402GuardError
from x402guard.x402.settlement import Swept

_LOG: Final = logging.getLogger("x402guard")
# Seconds from a claim to the first check: many claims are checked together, and none while its payment is under way.
FIRST_PAUSE_S: Final = 1.0
MOST_AT_ONCE: Final = 64  # sweeps in one check
LONGEST_PAUSE_S: Final = 30.0
_CLOSING_S: Final = 5.0


class Rechecker:
    """Checks once after a nudge, then in growing pauses until nothing is open.

    Args:
        look: one sweep: asks the chain about some payments, but none again that was asked about since the first sweep of
            the check began (unix milliseconds; None for the first one).
    """

    def __init__(self, look: Callable[[int | None], Swept]) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._pause = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def nudge(self) -> None:
        """Request a check soon. Returns at once."""
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
                # A separate event: a nudge during this pause adds its claim to the same check.
                self._pause.wait(FIRST_PAUSE_S)
            still_open = self._looked()
            with self._lock:
                if self._closed or (still_open == 0 and not self._wake.is_set()):
                    self._thread = None
                    return
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    def _looked(self) -> int:
        since_ms: int | None = None
        try:
            for _ in range(MOST_AT_ONCE):
                swept = Swept(0, more=False) if self._closed else self._look(since_ms)
                since_ms = swept.began_ms if since_ms is None else since_ms
                if not swept.more:
                    break
            return swept.still_open
        except X402GuardError as error:
            if not self._closed:
                _LOG.warning("claims could not be checked in the background and will be checked later: %s", error)
            return 1

    def close(self) -> None:
        """Stop. Waits at most five seconds for a check under way. May be called twice."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wake.set()
        self._pause.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSING_S)
