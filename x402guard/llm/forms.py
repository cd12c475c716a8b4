"""Reads the form of an upload (``multipart/form-data``, RFC 7578), where it names a model and holds a sound. Pure."""

from __future__ import annotations

import re
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Final

from msgspec import Struct

_NAMES: Final = re.compile(r"(?i)boundary\s*\*?[0-9]*\*?\s*=")
_LONGEST_BOUNDARY: Final = 200
_LONGEST_HEAD: Final = 4_096
_MOST_PARTS: Final = 100


class Field(Struct, frozen=True):
    """One field of a form. ``is_file``: it has a file's name."""

    name: str
    value: bytes
    is_file: bool


def read_form(body: bytes, content_type: str) -> list[Field] | None:
    """Return the fields of a form, in order; None for a body that servers may read in another way, or not at all.

    Nothing stands before its first boundary, and that is the one of its content type.
    """
    header = Message()
    header["content-type"] = content_type
    named = header.get_boundary("")
    boundary = b"--" + named.encode("ascii", "replace")
    is_plain = header.get_content_type() == "multipart/form-data" and len(_NAMES.findall(content_type)) == 1
    if not is_plain or not 0 < len(named) <= _LONGEST_BOUNDARY:
        return None
    before, *parts = (b"\r\n" + body).split(b"\r\n" + boundary, _MOST_PARTS + 2)
    if before or len(parts) > _MOST_PARTS or parts[-1].strip() != b"--":
        return None
    fields = []
    for part in parts[:-1]:
        head, gap, value = part.partition(b"\r\n\r\n")
        if head[:2] != b"\r\n" or not gap or len(head) > _LONGEST_HEAD:
            return None
        told = BytesHeaderParser().parsebytes(head[2:] + b"\r\n\r\n")
        name = told.get_param("name", header="content-disposition")
        if not isinstance(name, str) or len(told.get_all("content-disposition", [])) != 1:
            return None
        fields.append(Field(name, value, told.get_filename() is not None))
    return fields


_FLAC: Final = b"fLaC"


def seconds_of_flac(sound: bytes) -> int | None:
    """Return how long a FLAC file says that it is, rounded up; None for another file (RFC 9639, section 8.2)."""
    if sound[:4] != _FLAC or len(sound) < 26:
        return None
    packed = int.from_bytes(sound[18:26])  # 20 bits of the rate, 3 of channels, 5 of the depth, 36 of the samples
    rate, samples = packed >> 44, packed & ((1 << 36) - 1)
    return -(-samples // rate) if rate and samples else None
