"""Runs an application until Ctrl-C, SIGTERM, or the end of its terminal."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from typing_extensions import override

from x402guard.flow.surroundings import ending_signals
from x402guard.web.connection import TimedConnection


class Server(uvicorn.Server):
    """uvicorn's server with its signals taken around the event loop, so that a second Ctrl-C meets no half-closed one.

    The first signal calls ``on_exit`` and ends the server in order; a second one does not wait for open answers.
    ``run`` then returns; no ``KeyboardInterrupt`` is raised. ``settings`` are those of ``uvicorn.Config``.
    """

    def __init__(self, app: Any, *, on_exit: Callable[[], None] | None = None, **settings: Any) -> None:
        super().__init__(uvicorn.Config(app, http=TimedConnection, access_log=False, **settings))
        self._on_exit = on_exit

    @override
    def run(self, sockets: list[socket.socket] | None = None) -> None:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, *ending_signals())}
        try:
            super().run(sockets)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @override
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._on_exit is not None:
            self._on_exit()
        super().handle_exit(sig, frame)
