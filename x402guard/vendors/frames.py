"""Reads the frames of an Amazon event stream (``application/vnd.amazon.eventstream``), in which Bedrock streams. Pure.

A frame is its length, the length of its headers and a CRC-32 of both; headers; a payload; and a CRC-32 of all before it.
"""

from __future__ import annotations

import base64
import zlib
from binascii import Error as Base64Error
from collections.abc import Iterator
from typing import Final

from x402guard.strict_json import NotReadable, read_object

CONTENT_TYPE: Final = "application/vnd.amazon.eventstream"
MOST_BYTES: Final = 25_165_824
"""The largest frame that is read: what Amazon's own SDK reads."""

_PRELUDE, _CRC = 12, 4


def take_frames(pending: bytearray) -> Iterator[bytes]:
    """Yield the payload of each whole frame in *pending*, and remove it. Raises ``ValueError`` for what is no frame."""
    while len(pending) >= _PRELUDE:
        total, headers = int.from_bytes(pending[:4]), int.from_bytes(pending[4:8])
        if zlib.crc32(pending[:8]) != int.from_bytes(pending[8:12]):
            raise ValueError("a frame's length has another checksum")
        if not _PRELUDE + headers + _CRC <= total <= MOST_BYTES:
            raise ValueError("a frame is shorter than its headers, or too long")
        if len(pending) < total:
            return
        if zlib.crc32(pending[: total - _CRC]) != int.from_bytes(pending[total - _CRC : total]):
            raise ValueError("a frame has another checksum")
        payload = bytes(pending[_PRELUDE + headers : total - _CRC])
        del pending[:total]
        yield payload


def event_in(payload: bytes) -> dict[str, object] | None:
    """Return the event in a payload: of ``invoke-with-response-stream`` it is in ``bytes``; None if it is none."""
    try:
        found = read_object(payload)
        packed = found.get("bytes")
        return read_object(base64.b64decode(packed, validate=True)) if isinstance(packed, str) else found
    except (NotReadable, Base64Error, ValueError):
        return None
