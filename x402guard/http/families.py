"""Maps the classes of httpx and httpx2 to common names.

httpx2 is a fork: its classes have the same interface as httpx's but are unrelated, so a stream of one family breaks the
clients of the other. The code between core and transports is written once, over these names, with httpx's types.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

if TYPE_CHECKING:
    import httpx

S = TypeVar("S")


class Library(Struct, frozen=True, eq=False):
    """One family of HTTP classes.

    Attributes:
        name: the name of the library; its classes may name another, because vendors' SDKs rename them.
        request, response, headers: the classes of requests, responses and headers.
        bytes_stream: the class of a body in memory.
        sync_stream, async_stream: the base classes of bodies.
        undecodable: the error of a body that does not match its content encoding.
        transport_error: the base class of the errors of transports.
        unsent: those of the stock transports that prove that nothing was sent, where no event of the pool is known.
        stock: the family's own transports, blocking and asynchronous.
        transports: the base classes of transports.
    """

    name: str
    request: type[httpx.Request]
    response: type[httpx.Response]
    headers: type[httpx.Headers]
    bytes_stream: type[httpx.ByteStream]
    sync_stream: type[httpx.SyncByteStream]
    async_stream: type[httpx.AsyncByteStream]
    undecodable: type[Exception]
    transport_error: type[Exception]
    unsent: tuple[type[Exception], ...]
    stock: tuple[type[Any], type[Any]]
    transports: tuple[type[Any], type[Any]]

    @cache  # noqa: B019 - two libraries, for the life of the process
    def of(self, ours: type[S]) -> type[S]:
        """Return a stream of ours as a class that the clients of this family accept: it derives from theirs, too."""
        theirs = self.async_stream if hasattr(ours, "__aiter__") else self.sync_stream
        return type(ours.__name__, (ours, theirs), {"__doc__": ours.__doc__, "__module__": ours.__module__})
