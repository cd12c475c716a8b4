"""Compares a price with what its route has cost: like with like, by what the request itself says.

A seller does not choose what a request says. A longer prompt or more output may cost more in proportion, and another model
something else; the same request may not. A route is ``METHOD host/path`` without its variable segments.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import parse_qsl

from msgspec import Struct
from typing_extensions import override

from x402guard.errors import ConfigError, PolicyDenied
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import WALLET, Nanos
from x402guard.ledger.authorize import Latch, Refusal
from x402guard.ledger.view import LedgerView
from x402guard.money import format_dollars
from x402guard.policy.patterns import plain_host
from x402guard.policy.step_guard import PriceGuard
from x402guard.policy.steps import DIRECT, Asked, Said, Step
from x402guard.policy.velocity import excess

PRICES: Final = "prices"
"""The kind of the marks with what a route has cost."""
PRICE_RATIO: Final = "price_ratio"
"""The rule of a price that is too high beside what its route has cost."""
PRICE_ACCEPTED: Final = "price_accepted"
"""The event of a price that the owner has accepted for a route."""

_PRICES: Final = 20
_PRICES_OF_CLASS: Final = 10
_CLASSES: Final = 8
_FEWEST_PRICES: Final = 5
_FIGURES: Final = 4  # of a price: nano-dollars, unix milliseconds, bytes and output of its request
_LEAST_PRICE: Final = 10_000_000  # nano-dollars: no lower price is too high, so that a price near zero can rise
_CALM_PERCENT: Final = 125  # a price above this part of the median does not move it: else a ramp could pass

_MOST_SCALE: Final = 100  # a request that says to be ten thousand times larger may still not cost so much more
_LEAST_BYTES: Final = 64  # below it, most of a request is what all have
_OTHER_MODEL: Final = 10  # the first price of another model may be so many times that of a like request
_MODELS_A_DAY: Final = 3  # so a new name for each request passes nothing
_DAY_MS: Final = 86_400_000


class Prices(Struct, PriceGuard, frozen=True):
    """Refuses a price that is ``ratio`` times what a route has cost for a like request, from its sixth price on.

    What is compared was paid within ``days`` (None: ever). The size of the request and the output that it asks for raise what
    an earlier price is compared as, up to a hundredfold. A model, or the caller's ``price_class``, has a history of its own
    beside the route's. The first price of a model may be ten times that of another one, three times a day; that of a
    ``price_class`` is compared with its route.
    """

    ratio: int
    days: int | None

    @override
    def marks(self, step: Step, payees: tuple[str, ...], *, ending: bool) -> list[MarkKey]:
        return [] if ending else [_key(step, payee) for payee in payees]

    @override
    def judge(self, view: LedgerView, step: Step) -> Refusal | None:
        if not step.priced or not step.payee or step.amount < _LEAST_PRICE:
            return None
        key = _key(step, step.payee)
        row = view.mark(key) or {}
        known = self._known(view, row)
        if len(known) < _FEWEST_PRICES or step.amount <= self._most(view, row, step):
            return None
        usual, asked = format_dollars(Nanos(self._usual(view, row, step))), format_dollars(step.amount)
        place = price_route(step.shown)
        reason = f"{place} asks ${asked}, over {self.ratio} times its usual ${usual} for such a request"
        if key[1] == place:
            reason += f"; its owner accepts it by: x402guard prices accept {shlex.quote(place)} {asked}"
        ends_ms = None if self.days is None else known[-_FEWEST_PRICES][1] + self.days * _DAY_MS
        return excess(step, PRICE_RATIO, reason, error=PolicyDenied, latch=Latch(key, ends_ms))

    @override
    def taken(self, view: LedgerView, step: Step, hold_id: str) -> None:
        if not step.payee:
            return
        key, label = _key(step, step.payee), step.asks.label
        row = dict(view.mark(key) or {})
        known, priced = self._known(view, row), [step.amount, view.now_ms, step.asks.size, step.asks.output]
        if step.asks.model and len(known) >= _FEWEST_PRICES and step.amount > self._plain(view, row, step):
            row["models"] = [*self._models(view, row), view.now_ms][-_MODELS_A_DAY:]
        if _is_calm(step, known):
            row["prices"] = _kept([*known, priced], _PRICES)
        if label:
            classes = dict(row.get("classes") or {})
            own = self._known(view, {"prices": classes.pop(label, [])})
            if _is_calm(step, own):
                own = _kept([*own, priced], _PRICES_OF_CLASS)
            row["classes"] = dict([*classes.items(), (label, own)][-_CLASSES:])  # the last ones that were bought
        view.put_mark(key, {"prices": known, **row})

    def _known(self, view: LedgerView, row: Mapping[str, Any]) -> list[list[int]]:
        """Return the prices of a row that still count, oldest first; none of an earlier version, which has no sizes."""
        since_ms = -1 if self.days is None else view.now_ms - self.days * _DAY_MS
        return [price for price in row.get("prices") or [] if price[1] > since_ms and len(price) == _FIGURES]

    def _models(self, view: LedgerView, row: Mapping[str, Any]) -> list[int]:
        return [at_ms for at_ms in row.get("models") or [] if at_ms > view.now_ms - _DAY_MS]

    def _own(self, view: LedgerView, row: Mapping[str, Any], step: Step) -> list[list[int]]:
        classes = row.get("classes")
        return self._known(view, {"prices": classes.get(step.asks.label)}) if classes else []

    def _usual(self, view: LedgerView, row: Mapping[str, Any], step: Step) -> int:
        """Return what a like request has cost, in nano-dollars: of its class, or of its route while that says little."""
        own, route = self._own(view, row, step), _median(_alike(step, self._known(view, row)))
        if len(own) >= _FEWEST_PRICES:
            return _median(_alike(step, own))
        return max(route, _median(_alike(step, own))) if own else route

    def _plain(self, view: LedgerView, row: Mapping[str, Any], step: Step) -> int:
        """Return the most that a request may cost whose model is known."""
        accepted: int = row.get("accepted", 0)
        return max(self.ratio * self._usual(view, row, step), accepted)

    def _most(self, view: LedgerView, row: Mapping[str, Any], step: Step) -> int:
        """Return the most that a request may cost."""
        is_new = bool(step.asks.model) and not self._own(view, row, step)
        plain = self._plain(view, row, step)
        is_other = is_new and len(self._models(view, row)) < _MODELS_A_DAY
        return max(plain, self.ratio * self._usual(view, row, step) * _OTHER_MODEL) if is_other else plain


def _alike(step: Step, prices: Iterable[list[int]]) -> list[int]:
    """Return earlier prices as those of a request like this one: a smaller request would have cost more in proportion.

    Those of much larger requests say nothing of a small one, where there are enough others.
    """
    size, output, alike, all_of = step.asks.size, step.asks.output, list[int](), list(prices)
    near = [each for each in all_of if each[2] <= 2 * max(size, _LEAST_BYTES) and (not output or each[3] <= 2 * output)]
    for price, _, its_size, its_output in near if len(near) >= _FEWEST_PRICES else all_of:
        more = 100  # hundredths
        if size > its_size and size > _LEAST_BYTES:
            more = size * 100 // max(its_size, _LEAST_BYTES)
        if output > its_output > 0:
            more = max(more, output * 100 // its_output)
        alike.append(price * min(more, _MOST_SCALE * 100) // 100)
    return alike


def _kept(prices: list[list[int]], most: int) -> list[list[int]]:
    """Return the last prices, and of those before them the ones of the smallest requests: many large ones replace none."""
    if len(prices) <= most:
        return prices
    before, last = prices[: _FEWEST_PRICES - most], prices[_FEWEST_PRICES - most :]
    smallest = sorted(
        [(max(size, _LEAST_BYTES) * max(output, 1), at) for at, (_, _, size, output) in enumerate(before)]
    )
    return [*[before[at] for at in sorted([at for _, at in smallest[:_FEWEST_PRICES]])], *last]


def _is_calm(step: Step, prices: list[list[int]]) -> bool:
    return len(prices) < _FEWEST_PRICES or step.amount * 100 <= _median(_alike(step, prices)) * _CALM_PERCENT


def _median(prices: list[int]) -> int:
    """Return the lower median, which is the stricter one for the seller."""
    return sorted(prices)[(len(prices) - 1) // 2]


def _key(step: Step, payee: str) -> MarkKey:
    # A seller is its host. An offer that did not come by HTTP may name any, so there the payee counts as well. A place that
    # a redirect has named is a seller's word: what was asked for is the first hop.
    is_moved = step.begun and _host_of(step.begun) == _host_of(step.name)
    route = price_route(step.begun if is_moved else step.name)
    return PRICES, f"{payee} {route}" if step.is_local or route.startswith(f"{DIRECT} ") else route


def _host_of(name: str) -> str:
    return name.partition(" ")[2].partition("/")[0]


_VARYING: Final = re.compile(r"(?<=/)(?!v[0-9]{1,2}(?:/|$))[^/]*\d[^/]*")
"""A segment with a digit; but no version of an API, as ``/v1/``."""


@lru_cache(maxsize=1024)
def price_route(name: str) -> str:
    """Return a route without its variable segments: ``GET host/opinion/42`` is one route with ``/opinion/43``."""
    method, space, route = name.partition(" ")
    return f"{method}{space or ' '}{_VARYING.sub('*', route)}"


def accepted_key(route: str) -> MarkKey:
    """Return the key of the row of a route as its owner writes it. Raises ``ConfigError`` for what is no route."""
    method, _, place = route.strip().partition(" ")
    host, slash, path = place.partition("/")
    host = _DEFAULT_PORT.sub("", host.lower())
    if method.upper() not in _METHODS or not slash or not _HOST.fullmatch(host) or "?" in place or "://" in place:
        raise ConfigError(
            f"route: {route!r:.120} is no route; write it as the refusal does, in quotes: 'POST shop.example/v1/chat'"
        )
    return PRICES, price_route(f"{method.upper()} {plain_host(host)}/{path}")


_METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "QUERY"})
_HOST: Final = re.compile(r"[a-z0-9._-]+(:[0-9]{1,5})?|\[[0-9a-f:.]+\](:[0-9]{1,5})?", re.ASCII)
_DEFAULT_PORT: Final = re.compile(r":(80|443)$")


def accept_price(view: LedgerView, key: MarkKey, most: Nanos, by: str) -> None:
    """Let a route cost up to *most* nano-dollars, whatever it has cost; 0 takes that back. The journal keeps who said it."""
    view.put_mark(key, {"prices": [], **(view.mark(key) or {}), "accepted": most})
    view.record(WALLET, "event", facts={"name": PRICE_ACCEPTED, "route": key[1], "most": most, "by": by})


_TOKENS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")
_TIMES: Final = (
    "n",
    "num_images",
    "num_outputs",
    "batch_size",
    "seconds",
    "duration",
    "duration_seconds",
    "num_frames",
)
_SIZES: Final = ("size", "resolution", "image_size")
_INNER: Final = ("input", "parameters", "options", "generationConfig")
_AREA: Final = re.compile(r"(\d{1,5})[x*:×](\d{1,5})")
_LINES: Final = re.compile(r"(\d{3,4})p")
_WHOLE: Final = re.compile(r"\d{1,9}(?=\.\d{1,9}$|s?$)")
_MOST: Final = 10**12


def asked_of(said: Said, url: str, body_bytes: int, named: str) -> Asked:
    """Return what a request says that may change its price: a JSON body's own fields and those of its query.

    *named* is the caller's ``price_class``.
    """
    query = url.partition("?")[2].partition("#")[0]
    fields: dict[str, Any] = dict(parse_qsl(query)) if query else {}
    fields.pop("n", None)  # in a query it is mostly the number of a page or a thing
    if isinstance(said, Mapping):
        fields.update(said)
        for name in _INNER:
            inner = said.get(name)
            if isinstance(inner, Mapping):
                fields = {**inner, **fields}
    model = fields.get("model")
    model = model[:60].encode("utf-8", "backslashreplace").decode() if isinstance(model, str) else ""
    return Asked(body_bytes + len(query), _output(fields), model, named)


def _output(fields: Mapping[str, Any]) -> int:
    """Return a measure of the output that is asked for: tokens, or pieces times seconds times area; 0 if nothing says it."""
    said = {name: _FIGURE_OF[name](fields[name]) for name in _FIGURE_OF.keys() & fields.keys()}
    figures = [said.get(name, 0) for name in _TIMES] if said else []
    figures += [max(said.get(name, 0) for name in one_of) for one_of in ((_TOKENS, _SIZES) if said else ())]
    figures += [said.get("width", 0) * said.get("height", 0)]
    found = 1
    for figure in filter(None, figures):
        found = min(_MOST, found * figure)
    return found if any(figures) else 0


def _area(said: object) -> int:
    if not isinstance(said, str):
        return 0
    area, lines = _AREA.fullmatch(said), _LINES.fullmatch(said)
    if area is not None:
        return int(area[1]) * int(area[2])
    return 0 if lines is None else int(lines[1]) ** 2


def _whole(said: object) -> int:
    if isinstance(said, bool) or said is None:
        return 0
    found = _WHOLE.match(str(said)) if isinstance(said, str | int) or hasattr(said, "as_tuple") else None
    return 0 if found is None else int(found[0])


_FIGURE_OF: Final[Mapping[str, Callable[[object], int]]] = {
    **dict.fromkeys((*_TOKENS, *_TIMES, "width", "height"), _whole),
    **dict.fromkeys(_SIZES, _area),
}
