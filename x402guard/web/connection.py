"""The connections of the server: they end where no whole request comes in time, and say what did not reach its caller."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Final

from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_S: Final = 5.0
LOST: Final = "x402guard.lost"
"""The key, in the scope of a request, of what is called if the connection breaks after its answer was sent."""

MOST_CONNECTIONS: Final = 1_000
"""Connections that are open at once. One more ends the oldest that has no request under way."""

_MOST_AHEAD: Final = 65_536


class TimedConnection(H11Protocol):
    """A connection of uvicorn's, which has five seconds for the head of each request from its first byte on.

    The first request has them from the connection on; between two requests the server's own limit counts. What a caller
    sends ahead, while its request is answered, does not hide that it goes away.
    """

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.number = next(_NUMBERS)
        if len(self.connections) > MOST_CONNECTIONS:
            self._make_room()
        self._await_head()

    @override
    def data_received(self, data: bytes) -> None:
        cycle = self.begun()
        if _is_answered(cycle):
            self._await_head()
        super().data_received(data)
        ahead, cycle = len(self.conn.trailing_data[0]), self.begun()
        is_answering = isinstance(cycle, RequestResponseCycle) and not cycle.response_complete
        if is_answering and 0 < ahead <= _MOST_AHEAD:
            self.flow.resume_reading()  # uvicorn reads no further until it has answered, and so feels no end

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        cycle = self.begun()
        lost = cycle.scope.get(LOST) if isinstance(cycle, RequestResponseCycle) else None
        if exc is not None and callable(lost):
            lost()
        super().connection_lost(exc)

    @override
    def on_response_complete(self) -> None:
        before, rest = self.begun(), self.conn.trailing_data[0]
        super().on_response_complete()
        if rest and self.begun() is before:
            self._await_head()

    def _make_room(self) -> None:
        """End the oldest connection that has asked for nothing yet, else one between two requests, else this one.

        Connections that say nothing would else keep out those who have something to ask.
        """
        others = [each for each in self.connections if isinstance(each, TimedConnection) and each is not self]
        silent = [each for each in others if each.begun() is None]
        idle = [each for each in others if _is_answered(each.begun())]
        chosen = min(silent or idle, key=lambda each: each.number, default=self)
        chosen.transport.close()

    def _await_head(self) -> None:
        """End the connection if no other request has begun in time."""
        self.loop.call_later(HEAD_S, self._end_if_silent, self.begun())

    def _end_if_silent(self, before: object) -> None:
        if self.begun() is before and not self.transport.is_closing():
            self.transport.close()

    def begun(self) -> object:
        """Return the last request that has begun, or None."""
        cycle: object | None = self.cycle
        return cycle


_NUMBERS: Final = count()


def _is_answered(cycle: object) -> bool:
    return isinstance(cycle, RequestResponseCycle) and cycle.response_complete
