"""Ends a connection that sends no whole request in time: two hundred silent ones would keep everyone else out."""

from __future__ import annotations

import asyncio

from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

FIRST_S = 5.0


class TimedConnection(H11Protocol):
    """A connection of uvicorn's, which has five seconds for the head of its first request."""

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(FIRST_S, self._end_if_silent)

    def _end_if_silent(self) -> None:
        if not self._has_begun() and not self.transport.is_closing():
            self.transport.close()

    def _has_begun(self) -> bool:
        cycle: object | None = self.cycle
        return cycle is not None
