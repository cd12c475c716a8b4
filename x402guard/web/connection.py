"""Ends a connection that sends no whole request in time: two hundred silent ones would keep everyone else out."""

from __future__ import annotations

import asyncio

from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_S = 5.0


class TimedConnection(H11Protocol):
    """A connection of uvicorn's, which has five seconds for the head of each request from its first byte on.

    The first request has them from the connection on; between two requests the server's own limit counts.
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
