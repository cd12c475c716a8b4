"""Counting the tokens of a text for a context, and cutting a text to so many of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, Protocol, get_args

from x402guard.errors import ConfigError

_CUT: Final = "…"


class ContextCounter(Protocol):
    """Counts the tokens of a text that goes into a context."""

    def count(self, text: str) -> int:
        """Return how many tokens *text* is."""


TextCounter = Callable[[str], int]
"""A function that counts the tokens of a text."""


class CharsPerToken:
    """An estimate: so many characters are one token, rounded up. Good for a context, and for no ceiling of money.

    Raises ``ConfigError`` for what is no positive whole number of characters.
    """

    def __init__(self, chars: int = 4) -> None:
        if type(chars) is not int or chars <= 0:
            raise ConfigError(f"chars: {chars!r} is not a positive whole number of characters")
        self._chars = chars

    def count(self, text: str) -> int:
        """Return how many tokens *text* is, about."""
        return -(-len(text) // self._chars)

    def __repr__(self) -> str:
        return f"CharsPerToken({self._chars})"


def counting(counter: ContextCounter | TextCounter) -> TextCounter:
    """Return the function that counts: the counter's ``count``, or a function as it is. Raises ``ConfigError`` for neither.

    What it counts is checked: anything but a whole number that is not negative raises ``ConfigError``. A text that it cannot
    count (``LookupError``, ``ValueError``: tiktoken gives up on a megabyte of spaces) is as many tokens as bytes.
    """
    own = None if isinstance(counter, (str, bytes, list, tuple, type)) else getattr(counter, "count", None)
    chosen = own if callable(own) else counter
    if not callable(chosen) or isinstance(chosen, type):
        raise ConfigError(
            f"counter: {counter!r} has no count(text), and is no function of a text; write CharsPerToken(4)"
        )
    count: TextCounter = chosen

    def checked(text: str) -> int:
        try:
            tokens = count(text)
        except (LookupError, ValueError):
            return len(text.encode("utf-8", "surrogatepass"))
        if type(tokens) is not int or tokens < 0:
            raise ConfigError(f"counter: {counter!r} counted {tokens!r}, which is no number of tokens")
        return tokens

    return checked


def cut(text: str, tokens: int, count: TextCounter) -> str:
    """Return *text*, or as much of its beginning as is at most *tokens* tokens, a mark of the cut included.

    Never counts much more than it keeps, however long the text is.
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
"""All of it; its rows and columns; what it comes to; or no more than a name to ask for it by. Each shows less than the one before."""


_MODES: Final[tuple[Mode, ...]] = get_args(Mode)


def check_mode(name: str, mode: str) -> Mode:
    """Return *mode*. Raises ``ConfigError`` naming the argument for what is none."""
    for known in _MODES:
        if mode == known:
            return known
    raise ConfigError(f"{name}: {mode!r} is none of {', '.join(_MODES)}")


def suggest_mode(requested: Mode, *, left: int, total: int) -> Mode:
    """Return the mode for *left* tokens of *total*: what was requested, or less, never more.

    Of 100 left: above 50 as requested; from 50 down, a table; from 20 down, a summary; below 5, the handle alone.
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
