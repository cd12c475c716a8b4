"""What redirects have named: behind one address, a client sends the next hop as if it were a request of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from x402guard.http.request import LogicalRequest

_KEPT_S: Final = 60.0
_MOST: Final = 1_000


class Hop(Struct, frozen=True):
    """The hop that follows a redirect.

    Attributes:
        pays: the call of which it is the next hop, if an earlier hop has paid; else None.
        crosses: a redirect of its call has led to another host: what its client sends there was meant for the first one.
    """

    pays: LogicalRequest | None
    crosses: bool


class Hops:
    """The places that redirects have named within the last minute, each until a request for it has come.

    Args:
        monotonic_s: a monotonic clock in seconds.
    """

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._clock = monotonic_s
        self._named: dict[tuple[object, str], tuple[float, Hop]] = {}

    def note(self, caller: object, place: str, hop: Hop) -> None:
        """Remember the place that an answer to a *caller* has named."""
        self._named.pop((caller, place), None)
        self._named[caller, place] = self._clock(), hop
        self._forget()

    def take(self, caller: object, place: str) -> Hop | None:
        """Return the hop that a request of a *caller* for a place is, once; None for one of its own."""
        self._forget()
        _, hop = self._named.pop((caller, place), (0.0, None))
        return hop

    def _forget(self) -> None:
        """Forget what is old, the oldest first. A call of which nothing comes any more has lost its answer."""
        old = self._clock() - _KEPT_S
        while self._named:
            first = next(iter(self._named))
            if len(self._named) <= _MOST and self._named[first][0] > old:
                return
            del self._named[first]
