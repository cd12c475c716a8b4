"""The hops of redirects: behind one address, a client sends the next hop as if it were a request of its own.

So each redirect leads to a path with a name of its own, by which the request that follows it is known.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import unquote

from msgspec import Struct

from x402guard.http.logical import LogicalRequest

PREFIX: Final = "/_hop/"
_KEPT_S: Final = 600.0
_AT_ONCE_S: Final = 10.0
_MOST: Final = 1_000


class Hop(Struct):
    """The hop that follows a redirect.

    Attributes:
        call: the call of which it is the next hop; None if that is not known any more.
        crosses: a redirect of its call has led to another host: what its client sends along was meant for the first one.
        place: the URL to which the redirect leads, see ``place_of``; door: its host and port.
        was_asked: its client has asked for just that place.
    """

    call: LogicalRequest | None
    crosses: bool
    place: str = ""
    door: str = ""
    was_asked: bool = False

    def asked_at(self, url: str, door: str) -> Hop | None:
        """Return the hop of a request for *url* at a *door* by this name; None for a request of its own.

        Whatever is relative to the page that the redirect has led to has its name as well, and is not that hop. The seller
        has chosen the place: a client that reads it as another one than this does is paid nothing there.
        """
        if self.place == place_of(url):
            self.was_asked = True
            return self
        if self.was_asked and not self.crosses and door == self.door:
            return None
        return Hop(None if self.call is None else self.call.beside(), crosses=True)


def place_of(url: str) -> str:
    """Return a URL as places are compared: clients escape it in different ways, and keep its fragment for themselves.

    They keep most of the escaped delimiters, which are none (RFC 3986, 2.2): the place with a plain one is another one.
    """
    path, mark, query = url.partition("#")[0].partition("?")
    return f"{_unescaped(path, _PATH_DELIMITER)}{mark}{_unescaped(query, _QUERY_DELIMITER)}"


def _unescaped(text: str, delimiter: re.Pattern[str]) -> str:
    return unquote(delimiter.sub(lambda found: f"%25{found[1].upper()}", _BARE.sub("%25", text)))


_BARE: Final = re.compile("%(?![0-9A-Fa-f]{2})")  # some write it as %25
_QUERY_DELIMITER: Final = re.compile("%(2[356B]|3[BD])", re.IGNORECASE)  # of # % & + ; =
_PATH_DELIMITER: Final = re.compile("%(2[35BF]|3F)", re.IGNORECASE)  # of # % + / ?; aiohttp writes & ; = plain there

_UNKNOWN: Final = Hop(None, crosses=True)


class Hops:
    """The hops that redirects of the last ten minutes lead to, the latest thousand of each caller.

    Args:
        monotonic_s: a monotonic clock in seconds.
    """

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._clock = monotonic_s
        self._known: dict[object, dict[str, tuple[float, Hop]]] = {}

    def name(self, caller: object, hop: Hop) -> str:
        """Return the name of a new hop of a *caller*: it stands before the path to which a redirect leads."""
        known, now = self._known.setdefault(caller, {}), self._clock()
        while known:
            first = next(iter(known))
            if len(known) < _MOST and known[first][0] > now - _KEPT_S:
                break
            del known[first]
        name = secrets.token_hex(8)
        known[name] = now, hop
        return name

    def find(self, caller: object, path: str) -> tuple[Hop | None, str]:
        """Return the hop that a path of a request names, and the path without the name; None for a request of its own."""
        if not path.startswith(PREFIX):
            return None, path
        name, slash, rest = path.removeprefix(PREFIX).partition("/")
        since, hop = self._known.get(caller, {}).get(name, (0.0, _UNKNOWN))
        return (hop if since > self._clock() - _KEPT_S else _UNKNOWN), f"{slash}{rest}"

    def until_followed(self) -> Callable[[], bool]:
        """Return what says that a redirect which is answered now is not followed any more: a client follows at once."""
        until = self._clock() + _AT_ONCE_S
        return lambda: self._clock() > until
