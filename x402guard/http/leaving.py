"""Notes whether a request has left the machine: an error of a connection alone does not say that it has not.

A server of HTTP/2 can read a request, refuse its stream, and close. The pool of httpcore then dials again by itself, and
its caller gets the error of that second connection, as if nothing had ever been sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

TRACE: Final = "trace"
"""The request extension by which httpcore tells what it does. Source: its documentation of extensions."""

CONNECT: Final = "CONNECT"
"""The method that opens a tunnel through a proxy: none for a client's request."""


class Leaving:
    """A request's trace, in front of the caller's own one. *connects*: the request is a CONNECT itself.

    Attributes:
        is_told: the pool tells what it does.
        has_left: the pool has begun to send the request, on any connection.
    """

    def __init__(
        self, callers: Callable[[str, Mapping[str, Any]], Awaitable[None] | None] | None, *, connects: bool
    ) -> None:
        self._callers, self._connects, self.is_told, self.has_left = callers, connects, False, False

    def _note(self, event: str, info: Mapping[str, Any]) -> None:
        self.is_told = True
        # The pool's own CONNECT to a proxy opens the way, and has no payment; a caller's CONNECT is refused before.
        is_connect = getattr(info.get("request"), "method", b"") == CONNECT.encode() and not self._connects
        if ".send_request" in event and event.endswith(".started") and not is_connect:
            self.has_left = True

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Note one event of a blocking pool."""
        self._note(event, info)
        if self._callers is not None:
            self._callers(event, info)

    async def atrace(self, event: str, info: Mapping[str, Any]) -> None:
        """Note one event of an asynchronous pool."""
        self._note(event, info)
        if self._callers is not None and (told := self._callers(event, info)) is not None:
            await told
