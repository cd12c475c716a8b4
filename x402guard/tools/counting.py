"""Counts the tokens of a text for a context, and cuts a text to a number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, Protocol, get_args

from x402guard.errors import ConfigError

_CUT: Final = "…"


class ContextCounter(Protocol):
    """Counts the tokens of a text for a context."""

    def count(self, text: str) -> int:
        """Return the number of tokens of *text*."""


TextCounter = Callable[[str], int]
"""A function that counts the tokens of a text."""


class CharsPerToken:
    """Estimates one token per *chars* characters, rounded up. For contexts only, never for a ceiling in money.

    Raises ``ConfigError`` unless *chars* is a positive whole number.
    """

    def __init__(self, chars: int = 4) -> None:
        if type(chars) is not int or chars <= 0:
            raise ConfigError(f"chars: {chars!r} is not a positive whole number of characters")
        self._chars = chars

    def count(self, text: str) -> int:
        """Return the estimated number of tokens of *text*."""
        return -(-len(text) // self._chars)

    def __repr__(self) -> str:
        return f"CharsPerToken({self._chars})"


def counting(counter: ContextCounter | TextCounter) -> TextCounter:
    """Return a checked counting function: the counter's ``count``, or the function itself. Raises ``ConfigError``.

    A result that is not a whole number from 0 on raises ``ConfigError``. A text that cannot be counted
    (``LookupError``, ``ValueError``: tiktoken fails on a megabyte of spaces) counts one token per byte.
    """
    own = None if isinstance(counter, (str, bytes, list, tuple, type)) else getattr(counter, "count", None)
    chosen = own if callable(own) else counter
    if not callable(chosen) or isinstance(chosen, type):
        raise ConfigError(
            f"counter: {counter!r} has no count(text) and is not a function of a text; write CharsPerToken(4)"
        )
    count: TextCounter = chosen

    def checked(text: str) -> int:
        try:
            tokens = count(text)
        except (LookupError, ValueError):
            return len(text.encode("utf-8", "surrogatepass"))
        if type(tokens) is not int or tokens < 0:
            raise ConfigError(f"counter: {counter!r} returned {tokens!r}, which is not a number of tokens")
        return tokens

    return checked


def cut(text: str, tokens: int, count: TextCounter) -> str:
    """Return *text*, or its longest beginning with at most *tokens* tokens including a final "…".

    The counted text is never much longer than the kept text.
    """
    size = max(64, 8 * tokens)
    while size < len(text) and count(text[:size]) <= tokens:
        size *= 2
    if size >= len(text) and count(text) <= tokens:
        return text
    mark = _CUT if count(_CUT) <= tokens else ""
    fits, too_long = 0, min(size, len(text))
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if count(text[:middle] + mark) <= tokens:
            fits = middle
        else:
            too_long = middle
    kept = text[:fits] + mark
    return kept if count(kept) <= tokens else ""


Mode = Literal["raw", "table", "summary", "handle_only"]
"""The whole result; its rows and columns; a summary; only a handle to request it. Each shows less than the previous."""

_MODES: Final[tuple[Mode, ...]] = get_args(Mode)


def check_mode(name: str, mode: str) -> Mode:
    """Return *mode*. Raises ``ConfigError`` naming the argument if it is not a mode."""
    for known in _MODES:
        if mode == known:
            return known
    raise ConfigError(f"{name}: {mode!r} is none of {', '.join(_MODES)}")


def suggest_mode(requested: Mode, *, left: int, total: int) -> Mode:
    """Return the mode for *left* tokens of *total*: the requested one, or one that shows less.

    Above 50 % left: as requested; at most 50 %: table; at most 20 %: summary; below 5 %: only the handle.
    """
    if left * 100 > 50 * total:
        floor: Mode = "raw"
    elif left * 100 > 20 * total:
        floor = "table"
    elif left * 100 >= 5 * total:
        floor = "summary"
    else:
        floor = "handle_only"
    return max(requested, floor, key=_MODES.index)
