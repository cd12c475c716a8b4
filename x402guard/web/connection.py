"""Ends a connection that sends no whole request in time: two hundred silent ones would keep everyone else out."""

from __future__ import annotations

import asyncio

from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 5.0


class TimedConnection(H11Protocol):
    """A connection of uvicorn's, which has five seconds for the head of each request."""

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    @override
    def on_response_complete(self) -> None:
        self._await_head()
        super().on_response_complete()

    def _await_head(self) -> None:
        """End the connection if no other request has begun in time."""
        self.loop.call_later(HEAD_S, self._end_if_silent, self._begun())

    def _end_if_silent(self, before: object) -> None:
        if self._begun() is before and not self.transport.is_closing():
            self.transport.close()

    def _begun(self) -> object:
        cycle: object | None = self.cycle
        return cycle
