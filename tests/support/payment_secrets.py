"""Looks for a payment in any text: its header and its signature, whole or in pieces, in every form it takes on the way."""

import base64
import json
import logging
from contextlib import contextmanager

_PIECE = 20
"""Whoever shows forty characters in a row shows twenty that begin at a multiple of twenty."""


def payment_header(request) -> str | None:
    return request.headers.get("payment-signature") or request.headers.get("x-payment")


def signature_of(header) -> str:
    return json.loads(base64.b64decode(header))["payload"]["signature"][2:]


def _pieces(text, size=_PIECE) -> list:
    return [text[start : start + size] for start in range(0, len(text) - size + 1, size)]


def forms_of(header, public="") -> set:
    """Every piece that gives *header* away: of itself, its signature's hex and bytes, and of what HTTP/2 makes of them."""
    signature = signature_of(header)
    raw = bytes.fromhex(signature)
    forms = {piece for piece in _pieces(header) if piece not in public}
    assert len(forms) > 5, "there is nothing of its own in this header"
    forms |= set(_pieces(signature)) | set(_pieces(signature.upper())) | {signature[:64], signature[64:128]}
    forms |= {str(int(signature[:64], 16)), str(int(signature[64:128], 16))}
    for value in (raw, *_compressed(header)):
        forms |= {piece.hex() for piece in _pieces(value, 12)}
        shown = [repr(piece)[2:-1] for piece in _pieces(value, 12) if not {*b"'\"\\"} & {*piece}]
        forms |= {piece for piece in shown if len(piece) > 11}
    return forms


def _compressed(header) -> list:
    try:
        from hpack.huffman import HuffmanEncoder
        from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
    except ImportError:
        return []
    return [HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(header.encode())]


def found(forms, text) -> list:
    return [form for form in forms if form in text]


class _Keeper(logging.Handler):
    """Keeps each record as a line of a log file, and as everything that a structured log would take of it."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.lines, self.names = [], set()

    def emit(self, record) -> None:
        self.names.add(record.name)
        self.lines.append(f"{record.name}: {self.format(record)}\n{vars(record)!r}")

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@contextmanager
def everything_logged():
    """The root logger at DEBUG, and a handler on it that keeps what arrives there."""
    root, keeper = logging.getLogger(), _Keeper()
    level = root.level
    root.setLevel(logging.DEBUG)
    root.addHandler(keeper)
    try:
        yield keeper
    finally:
        root.removeHandler(keeper)
        root.setLevel(level)
