"""From the 402 to the payment's header: what lies between a seller's offer and the signature that answers it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import httpx

from benchmarks.peers import Peer
from benchmarks.scenes import SOLD, NewOffers, client, seller, session
from benchmarks.timing import Figure

_ROUNDS, _EACH = 20, 20


class _Stamped:
    """A seller that notes when its 402 leaves and when the payment comes."""

    def __init__(self, inner: Callable[[httpx.Request], httpx.Response]) -> None:
        self._inner, self.left, self.came = inner, 0, 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if "payment-signature" in request.headers:
            self.came = time.perf_counter_ns()
            return self._inner(request)
        answer = self._inner(request)
        self.left = time.perf_counter_ns()
        return answer


def measure() -> Iterator[Figure]:
    """Yield the times for an offer seen before and for a new one, and their ratio to the official SDK's."""
    seen, new = _Stamped(seller), _Stamped(NewOffers())
    taken: dict[str, list[float]] = {"seen": [], "new": [], "sdk": []}
    with session() as payer, Peer("sdk_header") as sdk:
        sdk.round(_EACH)
        for made, stamped, name in ((client(payer, seen), seen, "seen"), (client(payer, new), new, "new")):
            _times(made, stamped, name, 2)
        for number in range(_ROUNDS):
            taken["seen"] += _times(client(payer, seen), seen, f"seen{number}", _EACH)
            taken["new"] += _times(client(payer, new), new, f"new{number}", _EACH)
            taken["sdk"] += sdk.round(_EACH)
    least, usual = ({name: how(times) for name, times in taken.items()} for how in (min, statistics.median))
    yield Figure("header to header, offer seen before", least["seen"], "µs", "≤ 150", f"SDK {least['sdk']:.0f}")
    yield Figure("header to header, new offer", least["new"], "µs", "≤ 200", f"SDK {least['sdk']:.0f}")
    yield Figure("… ÷ SDK, medians", usual["seen"] / usual["sdk"], "×", "< 0.5", f"SDK {usual['sdk']:.0f} µs")


def _times(http: httpx.Client, stamped: _Stamped, name: str, count: int) -> list[float]:
    found = []
    for number in range(count):
        http.get(f"{SOLD}?{name}={number}")
        found.append((stamped.came - stamped.left) / 1000)
    return found
