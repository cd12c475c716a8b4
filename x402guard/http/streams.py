"""The response streams of metered calls: the caller reads, the meter reads along, the end of the body writes the books."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import anyio

from x402guard.flow.drivers import Shell, run, run_async
from x402guard.http.deadline import AsyncWatched, Watched
from x402guard.http.response import EXTENSION
from x402guard.llm.flow import InFlight, end_call

if TYPE_CHECKING:
    import httpx


def _let_go(stream: object) -> None:
    """The call has ended, be its last bytes read or not: it takes no place any more."""
    if isinstance(stream, (Watched, AsyncWatched)):
        stream.end()


class Metered:
    """A response stream that is read along. It ends once: with the provider's word, its last chunk, an error, or its closing.

    Attributes:
        extensions: the response's, where the call's receipt takes its last form when it has ended.
    """

    def __init__(self, stream: httpx.SyncByteStream, flight: InFlight, shell: Shell) -> None:
        self._stream, self._flight, self._shell = stream, flight, shell
        self.extensions: MutableMapping[str, Any] = {}
        self._over = False

    def __iter__(self) -> Iterator[bytes]:
        reader = self._flight.reader
        try:
            for chunk in self._stream:
                handed = reader.feed(chunk)
                if reader.over:
                    self._end(ended=True)
                if handed:
                    yield handed
        except BaseException as error:
            self._end(ended=False, failed=isinstance(error, Exception))
            raise
        rest = reader.rest()
        self._end(ended=True)
        if rest:
            yield rest

    def _end(self, *, ended: bool, failed: bool = False) -> None:
        if not self._over:
            self._over = True
            _let_go(self._stream)
            self.extensions[EXTENSION] = run(end_call(self._flight, ended=ended, failed=failed), self._shell)

    def close(self) -> None:
        """End the call where its body has not, and close the stream underneath."""
        try:
            self._end(ended=False)
        finally:
            self._stream.close()


class AsyncMetered:
    """The same as ``Metered``, for an asynchronous stream."""

    def __init__(self, stream: httpx.AsyncByteStream, flight: InFlight, shell: Shell) -> None:
        self._stream, self._flight, self._shell = stream, flight, shell
        self.extensions: MutableMapping[str, Any] = {}
        self._over = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        reader = self._flight.reader
        try:
            async for chunk in self._stream:
                handed = reader.feed(chunk)
                if reader.over:
                    await self._end(ended=True)
                if handed:
                    yield handed
        except GeneratorExit:
            raise  # thrown away: nothing can be awaited here, and closing the response ends the call
        except BaseException as error:
            await self._end(ended=False, failed=isinstance(error, Exception))
            raise
        rest = reader.rest()
        await self._end(ended=True)
        if rest:
            yield rest

    async def _end(self, *, ended: bool, failed: bool = False) -> None:
        if not self._over:
            self._over = True
            _let_go(self._stream)
            self.extensions[EXTENSION] = await run_async(
                end_call(self._flight, ended=ended, failed=failed), self._shell
            )

    async def aclose(self) -> None:
        """End the call where its body has not, and close the stream underneath."""
        with anyio.CancelScope(shield=True):
            try:
                await self._end(ended=False)
            finally:
                await self._stream.aclose()
