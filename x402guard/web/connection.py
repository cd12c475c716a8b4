"""The connections of the server: they end where no whole request comes in time, and say what did not reach its caller."""

from __future__ import annotations

import asyncio
from typing import Final

from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_S: Final = 5.0
LOST: Final = "x402guard.lost"
"""The key, in the scope of a request, of what is called if the connection breaks after its answer was sent."""

_MOST_AHEAD: Final = 65_536


class TimedConnection(H11Protocol):
    """A connection of uvicorn's, which has five seconds for the head of each request from its first byte on.

    The first request has them from the connection on; between two requests the server's own limit counts. What a caller
    sends ahead, while its request is answered, does not hide that it goes away.
    """

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    @override
    def data_received(self, data: bytes) -> None:
        cycle = self._begun()
        if isinstance(cycle, RequestResponseCycle) and cycle.response_complete:
            self._await_head()
        super().data_received(data)
        ahead, cycle = len(self.conn.trailing_data[0]), self._begun()
        is_answering = isinstance(cycle, RequestResponseCycle) and not cycle.response_complete
        if is_answering and 0 < ahead <= _MOST_AHEAD:
            self.flow.resume_reading()  # uvicorn reads no further until it has answered, and so feels no end

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        cycle = self._begun()
        lost = cycle.scope.get(LOST) if isinstance(cycle, RequestResponseCycle) else None
        if exc is not None and callable(lost):
            lost()
        super().connection_lost(exc)

    @override
    def on_response_complete(self) -> None:
        before, rest = self._begun(), self.conn.trailing_data[0]
        super().on_response_complete()
        if rest and self._begun() is before:
            self._await_head()

    def _await_head(self) -> None:
        """End the connection if no other request has begun in time."""
        self.loop.call_later(HEAD_S, self._end_if_silent, self._begun())

    def _end_if_silent(self, before: object) -> None:
        if self._begun() is before and not self.transport.is_closing():
            self.transport.close()

    def _begun(self) -> object:
        """Return the last request that has begun, or None."""
        cycle: object | None = self.cycle
        return cycle
