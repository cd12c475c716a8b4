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
_TOLD_S: Final = 60.0


class Background(Generic[T]):
    """A queue and its thread: what is put into it is delivered in order, off the caller's path.

    Args:
        name: what is delivered, for the log.
        deliver: takes one item; what it raises is logged.
    """

    def __init__(self, name: str, deliver: Callable[[T], None]) -> None:
        self.name, self._deliver = name, deliver
        self._begin()

    def _begin(self) -> None:
        self._waiting: queue.Queue[T | None] = queue.Queue(MOST_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_ending = threading.Event()
        self._dropped, self._told_s = 0, 0.0
        self._pid = os.getpid()

    def put(self, item: T) -> None:
        """Deliver *item* soon. If a thousand wait already, it is dropped, and the log says so, once a minute. Never raises."""
        if self._pid != os.getpid():  # after a fork: what waited is the parent's, and a lock may be held for ever
            self._begin()
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, args=(self._is_ending,), name=f"x402guard-{self.name}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:  # the process has too many, or is ending
                    self._drop(str(error))
                    return
                self._thread = thread
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            with self._lock:
                self._drop(f"{MOST_WAITING} wait already")

    def _drop(self, why: str) -> None:
        self._dropped += 1
        now_s = time.monotonic()
        if not self._told_s or now_s - self._told_s >= _TOLD_S:
            LOG.error("%s: %s; %d dropped", self.name, why, self._dropped)
            self._dropped, self._told_s = 0, now_s

    def attempt(self, item: T) -> None:
        """Deliver *item* now. An error is logged, because it must not stop those after it."""
        try:
            self._deliver(item)
        except Exception:  # noqa: BLE001 - the owner's function may raise anything
            LOG.exception("%s failed", self.name)

    def _run(self, is_ending: threading.Event) -> None:
        while True:
            item = self._waiting.get()
            if item is not None:
                self.attempt(item)
            if is_ending.is_set() and self._waiting.empty():
                return

    def close(self, until_s: float, ending: Callable[[], None] = lambda: None) -> None:
        """Wait for deliveries under way until *until_s* (monotonic); *ending* is called at half of the time."""
        if self._pid != os.getpid():
            return
        with self._lock:
            thread, self._thread = self._thread, None
            is_ending, self._is_ending = self._is_ending, threading.Event()
            if self._dropped:
                LOG.error("%s: %d more dropped", self.name, self._dropped)
                self._dropped = 0
        if thread is None or thread is threading.current_thread():
            return
        is_ending.set()
        with suppress(queue.Full):  # then it is awake
            self._waiting.put_nowait(None)
        thread.join(max(0.0, (until_s - time.monotonic()) / 2))
        ending()
        thread.join(max(0.0, until_s - time.monotonic()))
