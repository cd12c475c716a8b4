"""Follows a body through its compressed frames: one that ends inside a frame did not come whole, whatever HTTP says.

The HTTP libraries find a torn frame of zstd only after they have read the body to its end, and a torn gzip never. The
frames of zstd are not decoded here: their headers say how long they are (RFC 8878, section 3.1). gzip and deflate have to
be decoded (RFC 1951), piece by piece, and nothing of it is kept.
"""

from __future__ import annotations

import zlib
from typing import Final, Literal

_MAGIC: Final = 0xFD2FB528
_SKIPPABLE: Final = range(0x184D2A50, 0x184D2A60)
_DICTIONARY_BYTES: Final = (0, 1, 2, 4)
_RLE, _RESERVED = 1, 3

_Part = Literal["magic", "skipped", "descriptor", "block", "damaged"]
_BYTES: Final[dict[_Part, int]] = {"magic": 4, "skipped": 4, "descriptor": 1, "block": 3, "damaged": 0}


class Frames:
    """The frames of one body in zstd.

    Args:
        error: the HTTP library's error of a body that does not match its content encoding.
    """

    def __init__(self, error: type[Exception]) -> None:
        self._error = error
        self._part: _Part = "magic"
        self._head = bytearray()  # of the part that comes next
        self._skip = self._checksum_bytes = 0

    def follow(self, chunk: bytes) -> None:
        """Take the next raw bytes."""
        at = 0
        while at < len(chunk) and self._part != "damaged":
            if self._skip:
                passed = min(self._skip, len(chunk) - at)
                self._skip -= passed
            else:
                passed = min(_BYTES[self._part] - len(self._head), len(chunk) - at)
                self._head += chunk[at : at + passed]
                if len(self._head) == _BYTES[self._part]:
                    head, self._head = int.from_bytes(self._head, "little"), bytearray()
                    self._read(head)
            at += passed

    def end(self) -> None:
        """Raise the HTTP library's error if the body ended inside a frame. What is damaged the library says itself."""
        if self._part != "damaged" and (self._part != "magic" or self._head or self._skip):
            raise self._error("the answer ends inside its compressed frame")

    def _read(self, head: int) -> None:
        match self._part:
            case "magic":
                self._part = "descriptor" if head == _MAGIC else "skipped" if head in _SKIPPABLE else "damaged"
            case "skipped":
                self._part, self._skip = "magic", head
            case "descriptor":
                is_single = head >> 5 & 1
                size_bytes = (is_single, 2, 4, 8)[head >> 6]
                self._checksum_bytes = 4 * (head >> 2 & 1)
                self._part, self._skip = "block", 1 - is_single + _DICTIONARY_BYTES[head & 3] + size_bytes
            case "block":
                is_last, kind, size = head & 1, head >> 1 & 3, head >> 3
                self._skip = (1 if kind == _RLE else size) + self._checksum_bytes * is_last
                self._part = "damaged" if kind == _RESERVED else "magic" if is_last else "block"
            case "damaged":
                pass


class Deflated:
    """One body in gzip, or in deflate with or without the header of zlib.

    Args:
        error: the HTTP library's error of a body that does not match its content encoding.
        window_bits: as ``zlib`` has them: 31 for gzip, 15 for deflate.
    """

    def __init__(self, error: type[Exception], window_bits: int) -> None:
        self._error, self._window_bits = error, window_bits
        self._reader: zlib._Decompress | None = zlib.decompressobj(window_bits)
        self._began = False

    def follow(self, chunk: bytes) -> None:
        """Take the next raw bytes. What is damaged the library says itself."""
        left = chunk
        while left and self._reader is not None and not self._reader.eof:
            try:
                self._reader.decompress(left, _PIECE_BYTES)
            except zlib.error:
                # As the libraries do: what has no header of zlib is tried without one.
                plain = self._window_bits == _ZLIB and not self._began
                self._reader = zlib.decompressobj(-_ZLIB) if plain else None
                self._window_bits = 0
                continue
            left = self._reader.unconsumed_tail
        self._began = self._began or bool(chunk)

    def end(self) -> None:
        """Raise the HTTP library's error if the body ended before its compressed data did."""
        if self._began and self._reader is not None and not self._reader.eof:
            raise self._error("the answer ends inside its compressed data")


_ZLIB: Final = 15
_GZIP: Final = 31
_WINDOW_BITS: Final = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _ZLIB}
_PIECE_BYTES: Final = 65_536


def frames_of(content_encoding: str, error: type[Exception]) -> Frames | Deflated | None:
    """Return what follows a body of a content encoding; None for one whose end HTTP alone shows."""
    outermost = content_encoding.rpartition(",")[2].strip().lower()
    if outermost in _WINDOW_BITS:
        return Deflated(error, _WINDOW_BITS[outermost])
    return Frames(error) if outermost == "zstd" else None
