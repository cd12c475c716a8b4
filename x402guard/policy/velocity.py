"""How fast money may go: by the minute, hour and day, to how many new payees, to any one of them, and at which prices.

Windows are rings of buckets: what is counted may be up to one bucket older than the window, and is never younger. A window only
moves forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from x402guard.errors import ConfigError
from x402guard.ledger.view import LedgerView, MarkKey
from x402guard.money import Dollars, Nanos, dollars_to_nanos, format_dollars
from x402guard.policy.steps import Step

_WINDOWS: Final[Mapping[str, tuple[int, int]]] = {"minute": (5, 12), "hour": (60, 60), "day": (3600, 24)}
"""Window → (seconds of a bucket, buckets)."""

_ONE: Final = {"minute": "a minute", "hour": "an hour", "day": "a day"}
_PRICES: Final = 20
_FEWEST_PRICES: Final = 5
_LEAST_PRICE: Final = 10_000_000
"""Under a cent (in nano-dollars) no price is too high: else one that begins at nearly nothing could never become one."""

_DAY_MS: Final = 86_400_000
_NEW_PER_HOST: Final = 5
_CALM_PERCENT: Final = 125
"""A price above so much of the median does not move it: else each step of a ramp would excuse the next."""


@dataclass(frozen=True, kw_only=True)
class Velocity:
    """How fast a run may spend. What exceeds is refused, nothing latches, and it passes again when its window has moved on.

    Args:
        dollars_per_minute, dollars_per_hour, dollars_per_day: what is held for, in dollars; None (the default) for no limit.
        calls_per_minute, calls_per_hour, calls_per_day: payments, LLM calls and uses of tools; None for no limit.
        new_payees_per_day: payees whom this ledger has never paid; 10 by default, None for no limit.
        percent_per_payee: of the run's budget, to any one payee (1 to 100); None for no limit.
        price_ratio: a price may be so many times the median of the last twenty for its route (2 by default), from the sixth on;
            None for any price.

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

    def __post_init__(self) -> None:
        for window in _WINDOWS:
            dollars = getattr(self, f"dollars_per_{window}")
            if dollars is not None:
                self._nanos(window)
            _check_whole(f"calls_per_{window}", getattr(self, f"calls_per_{window}"), 10**9)
        _check_whole("new_payees_per_day", self.new_payees_per_day, 10**6)
        _check_whole("percent_per_payee", self.percent_per_payee, 100)
        _check_whole("price_ratio", self.price_ratio, 1_000)

    def _nanos(self, window: str) -> Nanos:
        name = f"dollars_per_{window}"
        try:
            return dollars_to_nanos(getattr(self, name), field=f"policy.velocity.{name}")
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error

    def limits(self) -> Iterator[tuple[str, Nanos | None, int | None]]:
        """Yield (window, nano-dollars, calls) for each window that has a limit."""
        for window in _WINDOWS:
            dollars = None if getattr(self, f"dollars_per_{window}") is None else self._nanos(window)
            calls: int | None = getattr(self, f"calls_per_{window}")
            if dollars is not None or calls is not None:
                yield window, dollars, calls


def _check_whole(name: str, value: object, most: int) -> None:
    if value is not None and (type(value) is not int or not 1 <= value <= most):
        raise ConfigError(f"policy.velocity.{name}: {value!r} is not a whole number from 1 to {most:,}, or None")


def route_of(name: str) -> str:
    """Return a place without what changes from call to call: ``GET host/opinion/42`` is one route with ``/opinion/43``."""
    method, _, place = name.partition(" ")
    host, *parts = place.split("/")
    kept = ("*" if any(char.isdigit() for char in part) else part for part in parts)
    return f"{method} {'/'.join((host, *kept))}"


def _window(run_id: str, window: str) -> MarkKey:
    return "velocity", f"{run_id} {window}"


def _known(payee: str) -> MarkKey:
    return "payee", payee


_NEW_PAYEES: Final[MarkKey] = ("velocity", "new payees day")


def _host(step: Step) -> str:
    return step.name.partition(" ")[2].partition("/")[0]


def _new_at(step: Step) -> MarkKey:
    return "velocity", f"new payees at {_host(step)}"


def _to(run_id: str, payee: str) -> MarkKey:
    return "paid_to", f"{run_id} {payee}"


def _prices(step: Step) -> MarkKey:
    return "prices", f"{step.payee} {route_of(step.name)}"


def _usual(view: LedgerView, step: Step) -> list[int]:
    """Return what a payee has asked for a route within a day, oldest first."""
    row = view.mark(_prices(step)) or {"prices": []}
    return [price for price, at in row["prices"] if at > view.now_ms - _DAY_MS]


def velocity_marks(velocity: Velocity | None, run_id: str, step: Step, payees: tuple[str, ...]) -> tuple[MarkKey, ...]:
    """Return the small rows that ``find_excess`` and ``note_spent`` have to see. *payees* are whom the step may pay."""
    if velocity is None:
        return ()
    marks = [_window(run_id, window) for window, _, _ in velocity.limits()]
    if payees:
        marks += [_NEW_PAYEES, _new_at(step)]
        for payee in payees:
            marks += [_known(payee), _to(run_id, payee), _prices(step.at(step.amount, payee))]
    return tuple(marks)


def find_excess(view: LedgerView, velocity: Velocity | None, run_id: str, step: Step) -> tuple[str, str] | None:
    """Return (rule, reason) where a step is too much too fast, or None."""
    if velocity is None:
        return None
    for window, dollars, calls in velocity.limits():
        spent, made = _sums(view, _window(run_id, window), window)
        if calls is not None and made + 1 > calls:
            return f"calls_per_{window}", f"{made} calls were made within {_ONE[window]}, all that may be"
        if dollars is not None and spent + step.amount > dollars:
            allowed = f"${format_dollars(spent)} of ${format_dollars(dollars)} were spent within {_ONE[window]}"
            return f"dollars_per_{window}", f"{allowed}, and this costs ${format_dollars(step.amount)}"
    return _payee_excess(view, velocity, run_id, step) if step.payee else None


def _payee_excess(view: LedgerView, velocity: Velocity, run_id: str, step: Step) -> tuple[str, str] | None:
    amount, payee = step.amount, step.payee
    most = velocity.new_payees_per_day
    if most is not None and view.mark(_known(payee)) is None and _sums(view, _NEW_PAYEES, "day")[1] >= most:
        return "new_payees_per_day", f"{payee} was never paid before, and {most} new payees were paid within a day"
    if most is not None and view.mark(_known(payee)) is None and _sums(view, _new_at(step), "day")[1] >= _NEW_PER_HOST:
        host = _host(step)
        return (
            "new_payees_per_day",
            f"{payee} was never paid before, and {host} has named {_NEW_PER_HOST} new payees within a day",
        )
    limit, percent = view.node(run_id).limit, velocity.percent_per_payee
    if percent is not None and limit is not None:
        paid = int((view.mark(_to(run_id, payee)) or {"nanos": 0})["nanos"])
        if (paid + amount) * 100 > limit * percent:
            share = f"${format_dollars(paid)} were held for {payee}"
            return (
                "percent_per_payee",
                f"{share}; with this it is over {percent} % of the run's ${format_dollars(limit)}",
            )
    prices, ratio = _usual(view, step), velocity.price_ratio
    if (
        ratio is not None
        and amount >= _LEAST_PRICE
        and len(prices) >= _FEWEST_PRICES
        and amount > ratio * _median(prices)
    ):
        usual = format_dollars(_median(prices))
        return (
            "price_ratio",
            f"{route_of(step.name)} asks ${format_dollars(amount)}, over {ratio} times its usual ${usual}",
        )
    return None


def note_spent(view: LedgerView, velocity: Velocity | None, run_id: str, step: Step) -> None:
    """Remember a step that was held for."""
    amount, payee = step.amount, step.payee
    if velocity is None:
        return
    for window, _, _ in velocity.limits():
        _add(view, _window(run_id, window), window, amount)
    if not payee:
        return
    if view.mark(_known(payee)) is None:
        view.put_mark(_known(payee), {"since": view.now_ms})
        _add(view, _NEW_PAYEES, "day", Nanos(0))
        _add(view, _new_at(step), "day", Nanos(0))
    paid = int((view.mark(_to(run_id, payee)) or {"nanos": 0})["nanos"])
    view.put_mark(_to(run_id, payee), {"nanos": paid + amount})
    prices = _usual(view, step)
    if len(prices) < _FEWEST_PRICES or amount * 100 <= _median(prices) * _CALM_PERCENT:
        stamped = list((view.mark(_prices(step)) or {"prices": []})["prices"])
        view.put_mark(_prices(step), {"prices": [*stamped, [amount, view.now_ms]][-_PRICES:]})


def forget_spent(view: LedgerView, velocity: Velocity | None, run_id: str, step: Step, at_ms: int) -> None:
    """Take back a step that was noted at *at_ms* (unix milliseconds) and never paid for."""
    if velocity is None:
        return
    for window, _, _ in velocity.limits():
        seconds, _ = _WINDOWS[window]
        now, buckets = _ring(view, _window(run_id, window), window)
        at = str(at_ms // (seconds * 1000))
        if at in buckets:
            spent, made = buckets[at]
            left = [max(0, spent - step.amount), max(0, made - 1)]
            view.put_mark(_window(run_id, window), {"now": now, "buckets": {**buckets, at: left}})
    if step.payee:
        paid = int((view.mark(_to(run_id, step.payee)) or {"nanos": 0})["nanos"])
        view.put_mark(_to(run_id, step.payee), {"nanos": max(0, paid - step.amount)})


def _median(prices: list[int]) -> int:
    """Return the lower middle of the prices: against the seller."""
    return sorted(prices)[(len(prices) - 1) // 2]


def _ring(view: LedgerView, key: MarkKey, window: str) -> tuple[int, dict[str, list[int]]]:
    seconds, count = _WINDOWS[window]
    row: Mapping[str, Any] = view.mark(key) or {"now": 0, "buckets": {}}
    now = max(view.now_ms // (seconds * 1000), int(row["now"]))  # a window never goes back
    return now, {at: sums for at, sums in row["buckets"].items() if int(at) >= now - count}


def _sums(view: LedgerView, key: MarkKey, window: str) -> tuple[int, int]:
    _, buckets = _ring(view, key, window)
    return sum(sums[0] for sums in buckets.values()), sum(sums[1] for sums in buckets.values())


def _add(view: LedgerView, key: MarkKey, window: str, amount: Nanos) -> None:
    now, buckets = _ring(view, key, window)
    spent, made = buckets.get(str(now), [0, 0])
    view.put_mark(key, {"now": now, "buckets": {**buckets, str(now): [spent + amount, made + 1]}})
