"""What httpx and httpx2 call the same things.

httpx2 is a fork: its classes have the shape of httpx's and are no kin of theirs, so a stream of one family breaks the clients of
the other. Everything between the core and the transports is written once, over the names gathered here; the types in it are
written as httpx's.
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
    """Return *ours* as a stream that the clients of a family accept."""
    return type(ours.__name__, (ours, theirs), {"__doc__": ours.__doc__, "__module__": ours.__module__})


@dataclass(frozen=True)
class Library:
    """One family of HTTP classes.

    Attributes:
        request, response, headers: what requests, responses and header lines are made of.
        bytes_stream: a body in memory.
        sync_stream, async_stream: what bodies derive from.
        unsent: errors of the family's own transports after which it is certain that nothing left the machine.
        stock: those transports, blocking and asynchronous.
        transports: what they derive from.
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
        """See ``Replay``."""
        return _of(Replay, self.sync_stream)

    @cached_property
    def async_replay(self) -> type[AsyncReplay]:
        """See ``AsyncReplay``."""
        return _of(AsyncReplay, self.async_stream)

    @cached_property
    def rest(self) -> type[Rest]:
        """See ``Rest``."""
        return _of(Rest, self.sync_stream)

    @cached_property
    def async_rest(self) -> type[AsyncRest]:
        """See ``AsyncRest``."""
        return _of(AsyncRest, self.async_stream)

    @cached_property
    def watched(self) -> type[Watched]:
        """See ``Watched``."""
        return _of(Watched, self.sync_stream)

    @cached_property
    def async_watched(self) -> type[AsyncWatched]:
        """See ``AsyncWatched``."""
        return _of(AsyncWatched, self.async_stream)

    @cached_property
    def metered(self) -> type[Metered]:
        """See ``Metered``."""
        return _of(Metered, self.sync_stream)

    @cached_property
    def async_metered(self) -> type[AsyncMetered]:
        """See ``AsyncMetered``."""
        return _of(AsyncMetered, self.async_stream)
