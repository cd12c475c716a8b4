"""The response streams of metered calls: the caller and the meter read the body; its end writes the ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Final

import anyio

from x402guard.flow.drivers import run, run_async
from x402guard.flow.shell import Shell
from x402guard.http.deadline import AsyncWatched, Watched
from x402guard.llm.flow import InFlight, end_call

if TYPE_CHECKING:
    import httpx


def _let_go(stream: object) -> None:
    """Release the bulkhead slot of a call that has ended, even if its last bytes are unread."""
    if isinstance(stream, (Watched, AsyncWatched)):
        stream.end()


class Metered:
    """A metered response stream. It ends once: by the provider's end marker, its last chunk, an error, or ``close``.

    Attributes:
        extensions: those of the response; they get the final receipt when the call has ended.
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
        """End the call if its body has not ended, and close the inner stream."""
        try:
            self._end(ended=False)
        finally:
            self._stream.close()


class AsyncMetered:
    """``Metered`` for an asynchronous stream."""

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
            raise  # the generator is closed: nothing can be awaited here, and closing the response ends the call
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
        """End the call if its body has not ended, and close the inner stream."""
        with anyio.CancelScope(shield=True):
            try:
                await self._end(ended=False)
            finally:
                await self._stream.aclose()


EXTENSION: Final = "x402guard"
"""The key of the receipt in ``response.extensions``."""


class Buffered:
    """The chunks of a stream that were read ahead."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self._size = 0

    def add(self, chunk: bytes, limit: int) -> bool:
        """Keep a chunk. Returns True while all chunks together have at most *limit* bytes."""
        self.chunks.append(chunk)
        self._size += len(chunk)
        return self._size <= limit


class Replay:
    """A response stream that was partly read ahead and can be read from its beginning.

    Attributes:
        broken: the error with which it broke while it was read ahead; the reader gets it at the same byte.
    """

    def __init__(self, stream: httpx.SyncByteStream) -> None:
        self._stream = stream
        self._source = iter(stream)
        self._kept = Buffered()
        self.broken: Exception | None = None

    def keep(self, limit: int) -> bytes | None:
        """Return the whole raw stream, or None if it is longer than *limit* bytes; it stays readable."""
        try:
            for chunk in self._source:
                if not self._kept.add(chunk, limit):
                    return None
        except Exception as error:
            self.broken = error
            raise
        return b"".join(self._kept.chunks)

    def __iter__(self) -> Iterator[bytes]:
        yield from self._kept.chunks
        if self.broken is not None:
            raise self.broken  # the caller gets the error at the same byte
        yield from self._source

    def close(self) -> None:
        """Close the inner stream."""
        self._stream.close()


class AsyncReplay:
    """``Replay`` for an asynchronous stream."""

    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream
        self._source = aiter(stream)
        self._kept = Buffered()
        self.broken: Exception | None = None

    @property
    def lose(self) -> Callable[[], None] | None:
        """What notes that the answer did not reach its caller after all; None if nothing was paid for it."""
        lose: Callable[[], None] | None = getattr(self._stream, "lose", None)
        return lose

    async def keep(self, limit: int) -> bytes | None:
        """Return the whole raw stream, or None if it is longer than *limit* bytes; it stays readable."""
        try:
            async for chunk in self._source:
                if not self._kept.add(chunk, limit):
                    return None
        except Exception as error:
            self.broken = error
            raise
        return b"".join(self._kept.chunks)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._kept.chunks:
            yield chunk
        if self.broken is not None:
            raise self.broken
        async for chunk in self._source:
            yield chunk

    async def aclose(self) -> None:
        """Close the inner stream."""
        await self._stream.aclose()


class Rest:
    """A request body partly read ahead: the first read starts at its beginning, later reads use the original."""

    def __init__(self, stream: httpx.SyncByteStream, chunks: list[bytes], source: Iterator[bytes]) -> None:
        self._stream = stream
        self._chunks, self._source = chunks, source
        self._fresh = True

    def __iter__(self) -> Iterator[bytes]:
        if self._fresh:
            self._fresh = False
            yield from self._chunks
            self._chunks = []
            yield from self._source
        else:
            yield from self._stream  # a redirect sends the body again: multipart rewinds, a generator raises


class AsyncRest:
    """``Rest`` for an asynchronous body."""

    def __init__(self, stream: httpx.AsyncByteStream, chunks: list[bytes], source: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self._chunks, self._source = chunks, source
        self._fresh = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._fresh:
            self._fresh = False
            for chunk in self._chunks:
                yield chunk
            self._chunks = []
            async for chunk in self._source:
                yield chunk
        else:
            async for chunk in self._stream:
                yield chunk
