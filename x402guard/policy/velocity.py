"""Velocity limits: dollars and calls per minute, hour and day, new payees, one payee's share, and prices.

Windows are rings of buckets and only move forward. An amount may count up to one bucket too long, and never too short.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final

from typing_extensions import override

from x402guard.errors import PaymentRefused, PolicyDenied, VelocityExceeded
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Nanos
from x402guard.ledger.authorize import Latch, Refusal
from x402guard.ledger.view import LedgerView
from x402guard.money import Dollars, format_dollars
from x402guard.policy.checks import check_dollars, check_whole
from x402guard.policy.patterns import host_name
from x402guard.policy.step_guard import StepGuard
from x402guard.policy.steps import Step, shown_host

# Window → (seconds of a bucket, buckets).
_WINDOWS: Final[Mapping[str, tuple[int, int]]] = {"minute": (5, 12), "hour": (60, 60), "day": (3600, 24)}
_ONE: Final = {"minute": "a minute", "hour": "an hour", "day": "a day"}
_PRICES: Final = 20
_FEWEST_PRICES: Final = 5
_LEAST_PRICE: Final = 10_000_000  # nano-dollars: no lower price is too high, so that a price near zero can rise

_DAY_MS: Final = 86_400_000
VELOCITY: Final = "velocity"
"""The kind of the marks with what a run has spent in a window. Their keys end with its name."""
NEW_PAYEES: Final = "new_payees"
"""The kind of the marks with how many new payees a run has paid within a day, in all and for one host name."""
PRICES: Final = "prices"
"""The kind of the marks with what a payee has asked for a route."""
_NEW_PER_HOST, _NEW_PER_HOST_PERCENT = 5, 50  # the larger one: one server cannot use up those of all others
_CALM_PERCENT: Final = 125  # a price above this part of the median does not move it: else a ramp could pass


@dataclass(frozen=True, kw_only=True)
class Velocity(StepGuard):
    """How fast a run may spend. A step past a limit is refused without a trip, and passes when its window has moved on.

    Args:
        dollars_per_minute, dollars_per_hour, dollars_per_day: dollars that are held; None (the default) for no limit.
        calls_per_minute, calls_per_hour, calls_per_day: payments, LLM calls and tool uses; None for no limit.
        new_payees_per_day: payees that this ledger has never paid; 10 by default, None for no limit. One host name may
            use half of a run's, or five, rounded up.
        percent_per_payee: the share of the run's budget for any one payee (1 to 100); None for no limit.
        price_ratio: a price may be this many times the median of its route's last twenty (2 by default), from the sixth
            price on; None for any price.

    Raises ``ConfigError`` naming the setting.
    """

    dollars_per_minute: Dollars | None = None
    dollars_per_hour: Dollars | None = None
    dollars_per_day: Dollars | None = None
    calls_per_minute: int | None = None
    calls_per_hour: int | None = None
    calls_per_day: int | None = None
    new_payees_per_day: int | None = 10
    percent_per_payee: int | None = None
    price_ratio: int | None = 2
    limits: tuple[tuple[str, Nanos | None, int | None], ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        limits = []
        for window in _WINDOWS:
            name, calls = f"dollars_per_{window}", getattr(self, f"calls_per_{window}")
            dollars = (
                None if getattr(self, name) is None else check_dollars(f"policy.velocity.{name}", getattr(self, name))
            )
            if dollars is not None or calls is not None:
                limits.append((window, dollars, calls))
            check_whole(f"policy.velocity.calls_per_{window}", calls, 1, 10**9, optional=True)
        check_whole("policy.velocity.new_payees_per_day", self.new_payees_per_day, 1, 10**6, optional=True)
        check_whole("policy.velocity.percent_per_payee", self.percent_per_payee, 1, 100, optional=True)
        check_whole("policy.velocity.price_ratio", self.price_ratio, 1, 1_000, optional=True)
        object.__setattr__(self, "limits", tuple(limits))

    @override
    def marks(self, step: Step, payees: tuple[str, ...], *, ending: bool) -> list[MarkKey]:
        if ending:
            return []
        marks = [_window(step, window) for window, _, _ in self.limits] if self.limits else []
        if payees:
            marks += [_new_of(step), _new_at(step)]
        for payee in payees:
            marks += [_known(payee), _to(step, payee), _prices(step, payee)]
        return marks

    @override
    def judge(self, view: LedgerView, step: Step) -> Refusal | None:
        if not step.priced:
            return None
        for window, dollars, calls in self.limits:
            spent, made = _sums(view, _window(step, window), window)
            if calls is not None and made + 1 > calls:
                reason = f"{made} calls were made within {_ONE[window]}, which is the limit"
                return _excess(step, f"calls_per_{window}", reason, _wait_s(view, _window(step, window), window))
            if dollars is not None and spent + step.amount > dollars:
                allowed = (
                    f"${format_dollars(spent)} of ${format_dollars(dollars)} were held or spent within {_ONE[window]}"
                )
                reason = f"{allowed}, and this costs ${format_dollars(step.amount)}"
                wait_s = _wait_s(view, _window(step, window), window) if step.amount <= dollars else None
                return _excess(step, f"dollars_per_{window}", reason, wait_s)
        if not step.payee:
            return None
        return self._new_payee(view, step) or self._share(view, step) or self._price(view, step)

    def _new_payee(self, view: LedgerView, step: Step) -> Refusal | None:
        payee, most = step.payee, self.new_payees_per_day
        if most is None or _is_known(view, payee):
            return None
        if _sums(view, _new_of(step), "day")[1] >= most:
            return _too_many_new(view, step, _new_of(step), f"this run has paid {most} new payees within a day")
        share = max(_NEW_PER_HOST, -(-most * _NEW_PER_HOST_PERCENT // 100))
        if _sums(view, _new_at(step), "day")[1] >= share:
            host = shown_host(step.name.partition(" ")[2].partition("/")[0], step.begun, _host(step))
            return _too_many_new(
                view, step, _new_at(step), f"{host} has named {share} new payees within a day, of {most}"
            )
        return None

    def _share(self, view: LedgerView, step: Step) -> Refusal | None:
        percent = self.percent_per_payee
        limit = None if percent is None else view.node(step.run_id).limit
        if percent is None or limit is None:
            return None
        paid = _paid_to(view, step)
        if (paid + step.amount) * 100 <= limit * percent:
            return None
        share = f"${format_dollars(paid)} were held for {step.payee}"
        reason = f"{share}; with this it is over {percent} % of the run's ${format_dollars(limit)}"
        return _excess(step, "percent_per_payee", reason, error=PolicyDenied)

    def _price(self, view: LedgerView, step: Step) -> Refusal | None:
        if self.price_ratio is None or step.amount < _LEAST_PRICE:
            return None
        stamped = _usual(view, step)
        prices = [price for price, _ in stamped]
        if len(prices) < _FEWEST_PRICES or step.amount <= self.price_ratio * _median(prices):
            return None
        usual, asked = format_dollars(_median(prices)), format_dollars(step.amount)
        reason = f"{price_route(step.shown)} asks ${asked}, over {self.price_ratio} times its usual ${usual}"
        latch = Latch(_prices(step, step.payee), stamped[-_FEWEST_PRICES][1] + _DAY_MS)
        return _excess(step, "price_ratio", reason, error=PolicyDenied, latch=latch)

    @override
    def taken(self, view: LedgerView, step: Step, hold_id: str) -> None:
        amount, payee = step.amount, step.payee
        for window, _, _ in self.limits:
            _add(view, _window(step, window), window, amount)
        if not payee:
            return
        if not _is_known(view, payee):
            view.put_mark(_known(payee), {"since": view.now_ms})
            _add(view, _new_of(step), "day", Nanos(0))
            _add(view, _new_at(step), "day", Nanos(0))
        view.put_mark(_to(step, payee), {"nanos": _paid_to(view, step) + amount})
        prices = [price for price, _ in _usual(view, step)]
        if len(prices) < _FEWEST_PRICES or amount * 100 <= _median(prices) * _CALM_PERCENT:
            key = _prices(step, payee)
            stamped = list((view.mark(key) or {"prices": []})["prices"])
            view.put_mark(key, {"prices": [*stamped, [amount, view.now_ms]][-_PRICES:]})

    @override
    def given_back(self, view: LedgerView, step: Step, at_ms: int) -> None:
        for window, _, _ in self.limits:
            _remove(view, _window(step, window), window, step.amount, at_ms)
        if not step.payee:
            return
        view.put_mark(_to(step, step.payee), {"nanos": max(0, _paid_to(view, step) - step.amount)})
        if (view.mark(_known(step.payee)) or {}).get("since") == at_ms:  # so it was this step that made it known
            view.put_mark(_known(step.payee), {"since": None})
            for key in (_new_of(step), _new_at(step)):
                _remove(view, key, "day", Nanos(0), at_ms)


def _excess(
    step: Step,
    rule: str,
    reason: str,
    wait_s: int | None = None,
    *,
    error: type[PaymentRefused] = VelocityExceeded,
    latch: Latch | None = None,
) -> Refusal:
    reason = f"{reason} (policy.velocity.{rule})"
    advice = _WAIT if wait_s is not None else ""
    return Refusal(rule, reason, step.amount, error=error, retry_after_s=wait_s, advice=advice, latch=latch)


def _too_many_new(view: LedgerView, step: Step, key: MarkKey, why: str) -> Refusal:
    wait_s = _wait_s(view, key, "day")
    latch = Latch(key, None if wait_s is None else view.now_ms + wait_s * 1000)
    reason = f"{step.payee} was never paid before, and {why}"
    return _excess(step, "new_payees_per_day", reason, wait_s, latch=latch)


_WAIT: Final = "Wait, use a payee that was paid before, or ask the owner to raise the limit."


def _wait_s(view: LedgerView, key: MarkKey, window: str) -> int | None:
    """Return after how many seconds the oldest of what counts in a window counts no more; it may still be too much then."""
    seconds, count = _WINDOWS[window]
    _, buckets = _ring(view, key, window)
    oldest = min((int(at) for at, (_, made) in buckets.items() if made), default=None)
    return None if oldest is None else max(1, (oldest + count + 1) * seconds - view.now_ms // 1000)


_VARYING: Final = re.compile(r"(?<=/)[^/]*\d[^/]*")


@lru_cache(maxsize=1024)
def price_route(name: str) -> str:
    """Return a route without its variable segments: ``GET host/opinion/42`` is one route with ``/opinion/43``."""
    method, space, route = name.partition(" ")
    return f"{method}{space or ' '}{_VARYING.sub('*', route)}"


def _window(step: Step, window: str) -> MarkKey:
    return VELOCITY, f"{step.run_id} {window}"


def _known(payee: str) -> MarkKey:
    return "payee", payee


def _is_known(view: LedgerView, payee: str) -> bool:
    return (view.mark(_known(payee)) or {}).get("since") is not None


def _host(step: Step) -> str:
    return host_name(step.name.partition(" ")[2].partition("/")[0])  # ports of one host are one host


def _new_of(step: Step) -> MarkKey:
    return NEW_PAYEES, step.run_id


def _new_at(step: Step) -> MarkKey:
    return NEW_PAYEES, f"{step.run_id} {_host(step)}"


def _to(step: Step, payee: str) -> MarkKey:
    return "paid_to", f"{step.run_id} {payee}"


def _paid_to(view: LedgerView, step: Step) -> int:
    return int((view.mark(_to(step, step.payee)) or {"nanos": 0})["nanos"])


def _prices(step: Step, payee: str) -> MarkKey:
    return PRICES, f"{payee} {price_route(step.name)}"


def _usual(view: LedgerView, step: Step) -> list[tuple[int, int]]:
    """Return the prices that a payee asked for a route within a day, each with its unix milliseconds, oldest first."""
    row = view.mark(_prices(step, step.payee)) or {"prices": []}
    return [(price, at) for price, at in row["prices"] if at > view.now_ms - _DAY_MS]


def _median(prices: list[int]) -> int:
    """Return the lower median, which is the stricter one for the seller."""
    return sorted(prices)[(len(prices) - 1) // 2]


def _ring(view: LedgerView, key: MarkKey, window: str) -> tuple[int, dict[str, list[int]]]:
    seconds, count = _WINDOWS[window]
    row: Mapping[str, Any] = view.mark(key) or {"now": 0, "buckets": {}}
    now = max(view.now_ms // (seconds * 1000), int(row["now"]))  # a window never moves back
    return now, {at: sums for at, sums in row["buckets"].items() if int(at) >= now - count}


def _sums(view: LedgerView, key: MarkKey, window: str) -> tuple[int, int]:
    if view.mark(key) is None:
        return 0, 0
    _, buckets = _ring(view, key, window)
    return sum(map(itemgetter(0), buckets.values())), sum(map(itemgetter(1), buckets.values()))


def bucket_ms(key: MarkKey) -> int:
    """Return the length of one bucket of a ring, in milliseconds; without a window in its key it is one of a day."""
    kind, name = key
    window = "day" if kind == NEW_PAYEES else name.rpartition(" ")[2]
    return _WINDOWS.get(window, _WINDOWS["day"])[0] * 1000


def counted_within(row: Mapping[str, Any], name: str, now_ms: int) -> tuple[int, int]:
    """Return the nano-dollars and the calls of a ring that still count at *now_ms*; none of an empty row.

    *name* is the key of the ring, which ends with its window.
    """
    seconds, count = _WINDOWS[name.rpartition(" ")[2]]
    first = now_ms // (seconds * 1000) - count
    sums = [bucket for at, bucket in row.get("buckets", {}).items() if int(at) >= first]
    return sum(map(itemgetter(0), sums)), sum(map(itemgetter(1), sums))


def _add(view: LedgerView, key: MarkKey, window: str, amount: Nanos) -> None:
    now, buckets = _ring(view, key, window)
    spent, made = buckets.get(str(now), [0, 0])
    view.put_mark(key, {"now": now, "buckets": {**buckets, str(now): [spent + amount, made + 1]}})


def _remove(view: LedgerView, key: MarkKey, window: str, amount: Nanos, at_ms: int) -> None:
    """Take a step of *at_ms* (unix milliseconds) out of a window, if its bucket is still there."""
    seconds, _ = _WINDOWS[window]
    now, buckets = _ring(view, key, window)
    at = str(at_ms // (seconds * 1000))
    if at in buckets:
        spent, made = buckets[at]
        view.put_mark(key, {"now": now, "buckets": {**buckets, at: [max(0, spent - amount), max(0, made - 1)]}})
