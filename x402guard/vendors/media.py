"""Counts image and audio tokens: by the provider's documented formula, or else by an upper bound."""

from __future__ import annotations

import base64
import re
from binascii import Error as Base64Error
from typing import Final, Literal

from msgspec import Struct

MediaKind = Literal["image", "audio", "document", "video"]

HEADER_BYTES: Final = 524_288
"""The bytes of an image that are searched for its dimensions: in a JPEG they follow embedded previews and profiles."""

BYTES_PER_AUDIO_TOKEN: Final = 20
"""The lower bound: providers state at most 32 tokens a second, and speech codecs use at least 640 bytes a second."""


class Media(Struct, frozen=True):
    """A part of a request that is not text.

    Attributes:
        kind: image, audio, document or video.
        field: its path in the body, for a refusal.
        size: decoded bytes.
        width, height: pixels, or None if unknown.
        detail: the requested detail (``low``, ``high`` …), or "" if the request sets none.
    """

    kind: MediaKind
    field: str
    size: int
    width: int | None = None
    height: int | None = None
    detail: str = ""

    @classmethod
    def of(cls, field: str, mime: str, encoded: str, detail: str = "") -> Media:
        """Return the part with base64 data *encoded* of MIME type *mime*."""
        kind = media_kind(mime)
        size = len(encoded) * 3 // 4
        dimensions = image_size(_head(encoded)) if kind == "image" else None
        width, height = dimensions or (None, None)
        return cls(kind, field, size, width, height, detail)


def media_kind(mime: str) -> MediaKind:
    """Return the kind of a MIME type. Everything except image, audio and video counts as a document."""
    top = mime.partition("/")[0].strip().lower()
    if top == "image":
        return "image"
    if top == "audio":
        return "audio"
    return "video" if top == "video" else "document"


_URL_SAFE: Final = str.maketrans("-_", "+/")


def _head(encoded: str) -> bytes:
    letters = re.sub(r"\s", "", encoded[: HEADER_BYTES * 4 // 3]).translate(_URL_SAFE).rstrip("=")
    try:
        return base64.b64decode(letters + "=" * (-len(letters) % 4))
    except (Base64Error, ValueError):
        return b""


def image_size(data: bytes) -> tuple[int, int] | None:
    """Return (width, height) in pixels from the first bytes of a PNG, JPEG, GIF or WebP, or None if unknown."""
    size = None
    if data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) >= 24:
        size = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    elif data[:6] in (b"GIF87a", b"GIF89a") and len(data) >= 10:
        size = int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP" and len(data) >= 30:
        size = _webp_size(data)
    elif data.startswith(b"\xff\xd8"):
        size = _jpeg_size(data)
    return size if size is not None and min(size) > 0 else None


def _webp_size(data: bytes) -> tuple[int, int] | None:
    chunk = data[12:16]
    if chunk == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if chunk == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 7 : at + 9]), int.from_bytes(data[at + 5 : at + 7])
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return None


_TILES: Final[tuple[tuple[str, int, int], ...]] = (
    # (model, base, tokens per tile of 512 × 512): developers.openai.com/api/docs/guides/images-vision.
    ("gpt-4o-mini", 2833, 5667),
    ("gpt-4.1", 85, 170),
    ("gpt-4o", 85, 170),
    ("gpt-4-turbo", 85, 170),
    ("gpt-5-chat", 70, 140),
    ("o1-pro", 75, 150),
    ("o1", 75, 150),
    ("o3", 75, 150),
    ("gpt-5", 70, 140),
)
_PATCHES: Final[tuple[tuple[str, int], ...]] = (
    # (model, hundredths of a token per patch of 32 × 32, at most 1,536 patches); same page.
    ("gpt-4.1-mini", 162),
    ("gpt-4.1-nano", 246),
    ("gpt-5-mini", 162),
    ("gpt-5-nano", 246),
    ("o4-mini", 172),
)
_DATE: Final = re.compile(r"-20[0-9]{2}-[0-9]{2}-[0-9]{2}")
_ANTHROPIC_MOST: Final = 5_000
_GEMINI_MOST_OF_ONE: Final = 2_240
"""The tokens of a picture in the highest resolution (ai.google.dev/gemini-api/docs/media-resolution)."""
_GEMINI_BY_TILES: Final = re.compile(r"gemini-(1|2)\b|gemma")


def image_tokens(provider: str, model: str, image: Media) -> int | None:
    """Return the most tokens that an image can count, or None if its dimensions are unknown.

    OpenAI (tiles and patches), Anthropic and Google document their counting. For other models it is one token per
    14 × 14 pixels, the smallest patches in use.
    """
    if image.width is None or image.height is None:
        return None
    width, height = image.width, image.height
    vendor, _, name = model.rpartition("/")  # a gateway's model name begins with the vendor
    if provider in ("openai", "azure") or vendor == "openai":
        return _of_openai(_DATE.sub("", name), image, width, height)
    if provider == "anthropic" or vendor == "anthropic":
        return min(max(-(-width * height // 750), _grid(width, height, 28)), _ANTHROPIC_MOST)
    if provider == "google" or vendor == "google":
        side = max(256, min(768, min(width, height) * 2 // 3))
        tiles = 1 if max(width, height) <= 384 else _grid(width, height, side)
        # From Gemini 3 on a picture has a number of tokens that goes by the resolution asked for, not by its size.
        by_tiles = _GEMINI_BY_TILES.search(model) is not None
        return max(258 * tiles, 0 if by_tiles else _GEMINI_MOST_OF_ONE)
    return _grid(width, height, 14)


def _of_openai(name: str, image: Media, width: int, height: int) -> int:
    for known, hundredths in _PATCHES:
        if name == known:
            return -(-min(_grid(width, height, 32), 1_536) * hundredths // 100)
    for known, base, tile in _TILES:
        if name == known:
            return base if image.detail == "low" else base + tile * _tiles(width, height)
    return max(_grid(width, height, 14), 85 + 170 * _tiles(width, height))


def _grid(width: int, height: int, side: int) -> int:
    return -(-width // side) * -(-height // side)


def _tiles(width: int, height: int) -> int:
    """Return the tiles of 512 × 512 pixels after scaling to fit 2,048 × 2,048 and then the shortest side to 768."""
    longest, shortest = max(width, height), min(width, height)
    if longest > 2048:
        shortest, longest = -(-shortest * 2048 // longest), 2048
    longest, shortest = min(2048, -(-longest * 768 // max(shortest, 1))), 768
    return _grid(longest, shortest, 512)


def audio_tokens(sound: Media) -> int:
    """Return the most tokens that a sound can count, by its size."""
    return -(-sound.size // BYTES_PER_AUDIO_TOKEN)
