"""A queue with a thread: what does not belong on the path of a payment is delivered in the background."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Generic, TypeVar

from x402guard.flow.shell import LOG

T = TypeVar("T")

MOST_WAITING: Final = 1_000


class Background(Generic[T]):
    """A queue and its thread: what is put into it is delivered in order, off the caller's path."""

    def __init__(self, name: str, deliver: Callable[[T], None]) -> None:
        self.name, self._deliver = name, deliver
        self._waiting: queue.Queue[T | None] = queue.Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def put(self, item: T) -> None:
        """Deliver *item* soon. If a thousand wait already, it is dropped, and the log says so."""
        if self._pid != os.getpid():  # after a fork: what waited is the parent's, and a lock may be held for ever
            self._waiting, self._lock, self._thread, self._pid = (
                queue.Queue(MOST_WAITING),
                threading.Lock(),
                None,
                os.getpid(),
            )
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            LOG.error("%s: %d wait already; this one is dropped", self.name, MOST_WAITING)
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"x402guard-{self.name}", daemon=True)
                self._thread.start()

    def attempt(self, item: T) -> None:
        """Deliver *item* now. An error is logged, because it must not stop those after it."""
        try:
            self._deliver(item)
        except Exception:  # noqa: BLE001 - the owner's function may raise anything
            LOG.exception("%s failed", self.name)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            self.attempt(item)

    def close(self, until_s: float, ending: Callable[[], None] = lambda: None) -> None:
        """Wait for deliveries under way until *until_s* (monotonic); *ending* is called at half of the time."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid() or thread is threading.current_thread():
            return
        with suppress(queue.Full):  # a full queue is not waited for
            self._waiting.put_nowait(None)
        thread.join(max(0.0, (until_s - time.monotonic()) / 2))
        ending()
        thread.join(max(0.0, until_s - time.monotonic()))
