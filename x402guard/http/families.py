"""What httpx and httpx2 call the same things.

httpx2 is a fork: its classes have the shape of httpx's and are no kin of theirs, so a stream of one family breaks the clients of
the other. Everything between the core and the transports is written once, over the names gathered here; the types in it are
written as httpx's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import httpx

S = TypeVar("S")


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

    @cache  # noqa: B019 - two libraries, for the life of the process
    def of(self, ours: type[S]) -> type[S]:
        """Return a stream of ours as a class that the clients of this family accept: it derives from theirs, too."""
        theirs = self.async_stream if hasattr(ours, "__aiter__") else self.sync_stream
        return type(ours.__name__, (ours, theirs), {"__doc__": ours.__doc__, "__module__": ours.__module__})
