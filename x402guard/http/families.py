"""Maps the classes of httpx and httpx2 to common names.

httpx2 is a fork: its classes have the same interface as httpx's but are unrelated, so a stream of one family breaks the
clients of the other. The code between core and transports is written once, over these names, with httpx's types.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from x402guard.http.deadline import AsyncWatched, Watched
from x402guard.http.streams import AsyncMetered, AsyncReplay, AsyncRest, Metered, Replay, Rest

if TYPE_CHECKING:
    import httpx

S = TypeVar("S")


def _of(ours: type[S], theirs: type) -> type[S]:
    """Return *ours* as a subclass of a family's stream, so that its clients accept it."""
    return type(ours.__name__, (ours, theirs), {"__doc__": ours.__doc__, "__module__": ours.__module__})


@dataclass(frozen=True)
class Library:
    """One family of HTTP classes.

    Attributes:
        request, response, headers: the classes of requests, responses and headers.
        bytes_stream: the class of a body in memory.
        sync_stream, async_stream: the base classes of bodies.
        unsent: errors of the stock transports that prove that nothing was sent.
        stock: the family's own transports, blocking and asynchronous.
        transports: the base classes of transports.
    """

    request: type[httpx.Request]
    response: type[httpx.Response]
    headers: type[httpx.Headers]
    bytes_stream: type[httpx.ByteStream]
    sync_stream: type[httpx.SyncByteStream]
    async_stream: type[httpx.AsyncByteStream]
    unsent: tuple[type[Exception], ...]
    stock: tuple[type[Any], type[Any]]
    transports: tuple[type[Any], type[Any]]

    @cached_property
    def replay(self) -> type[Replay]:
        """``Replay`` in this family."""
        return _of(Replay, self.sync_stream)

    @cached_property
    def async_replay(self) -> type[AsyncReplay]:
        """``AsyncReplay`` in this family."""
        return _of(AsyncReplay, self.async_stream)

    @cached_property
    def rest(self) -> type[Rest]:
        """``Rest`` in this family."""
        return _of(Rest, self.sync_stream)

    @cached_property
    def async_rest(self) -> type[AsyncRest]:
        """``AsyncRest`` in this family."""
        return _of(AsyncRest, self.async_stream)

    @cached_property
    def watched(self) -> type[Watched]:
        """``Watched`` in this family."""
        return _of(Watched, self.sync_stream)

    @cached_property
    def async_watched(self) -> type[AsyncWatched]:
        """``AsyncWatched`` in this family."""
        return _of(AsyncWatched, self.async_stream)

    @cached_property
    def metered(self) -> type[Metered]:
        """``Metered`` in this family."""
        return _of(Metered, self.sync_stream)

    @cached_property
    def async_metered(self) -> type[AsyncMetered]:
        """``AsyncMetered`` in this family."""
        return _of(AsyncMetered, self.async_stream)
