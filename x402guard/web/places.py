"""Shares out what the callers of the proxy use: places, memory and look-ups of names, in equal parts for each token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Final

import anyio

from x402guard.web.reach import LOOKUPS

PLACES: Final = 900
"""Requests that may be under way at once, in equal shares for each token."""

MOST_BYTES: Final = 134_217_728
"""Bytes of bodies that one token may have under way."""

_LOOKUPS: Final = 4
"""Look-ups of names that one token may have under way."""


class Full(Exception):  # noqa: N818 - it becomes an answer
    """A token has its share under way."""


class Places:
    """The places of *tokens* callers. What one of them uses is not that of the others."""

    def __init__(self, tokens: int) -> None:
        self._share = max(1, PLACES // tokens)
        self._under_way, self._bytes = Counter[Hashable](), Counter[Hashable]()
        self._lookups: dict[Hashable, anyio.CapacityLimiter] = {}

    @contextmanager
    def take(self, caller: Hashable) -> Iterator[Callable[[int], None]]:
        """Take a place, and yield what to call with each number of bytes that the caller sends. Both raise ``Full``."""
        if self._under_way[caller] >= self._share:
            raise Full(f"{self._share} requests with this token are under way, which is its share; wait for one")
        sent = 0

        def grows(by: int) -> None:
            nonlocal sent
            if self._bytes[caller] + by > MOST_BYTES:
                raise Full(f"requests with this token under way have {MOST_BYTES} bytes; wait for one")
            self._bytes[caller] += by
            sent += by

        self._under_way[caller] += 1
        LOOKUPS.set(self._lookups.setdefault(caller, anyio.CapacityLimiter(_LOOKUPS)))
        try:
            yield grows
        finally:
            self._under_way[caller] -= 1
            self._bytes[caller] -= sent
