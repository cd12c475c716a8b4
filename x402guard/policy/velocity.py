"""Velocity limits: dollars and calls of a run per minute, hour and day; and the settings of its sellers and prices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from typing_extensions import override

from x402guard.errors import PaymentRefused, VelocityExceeded
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import HoldKind, Nanos
from x402guard.ledger.authorize import Latch, Refusal
from x402guard.ledger.view import LedgerView
from x402guard.money import Dollars, format_dollars
from x402guard.policy.checks import check_dollars, check_whole
from x402guard.policy.step_guard import Moment, StepGuard
from x402guard.policy.steps import Step
from x402guard.policy.windows import VELOCITY, WINDOWS, add, remove, sums_in, wait_s

_ONE: Final = {"minute": "a minute", "hour": "an hour", "day": "a day"}


@dataclass(frozen=True, kw_only=True)
class Velocity(StepGuard):
    """How fast a run may spend. A step past a limit is refused without a trip, and passes when its window has moved on.

    Args:
        dollars_per_minute, dollars_per_hour, dollars_per_day: dollars that are held; None (the default) for no limit.
        calls_per_minute, calls_per_hour, calls_per_day: payments, LLM calls and tool uses; None for no limit.
        new_payees_per_day: sellers (hosts) with a payee that this ledger has never paid; 10 by default, None for no
            limit. One host may name five such payees a day. ``Policy.sellers`` lifts both for a host.
        percent_per_payee: the share of the run's budget for any one payee (1 to 100); None for no limit.
        price_ratio: a price may be this many times what its route has usually cost for a like request (2 by default),
            from the sixth price on; None for any price.

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
        for window in WINDOWS:
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
    def acts(self, moment: Moment, kind: HoldKind, *, late: bool) -> bool:
        if not self.limits or (late and moment == "marks") or (not late and moment == "judge"):
            return False
        return super().acts(moment, kind, late=late)

    @override
    def marks(self, step: Step, payees: tuple[str, ...], *, ending: bool) -> list[MarkKey]:
        return [_window(step, window) for window, _, _ in self.limits] if self.limits and not ending else []

    @override
    def judge(self, view: LedgerView, step: Step) -> Refusal | None:
        if not step.priced:
            return None
        for window, dollars, calls in self.limits:
            spent, made = sums_in(view, _window(step, window), window)
            if calls is not None and made + 1 > calls:
                reason = f"{made} calls were made within {_ONE[window]}, which is the limit"
                return excess(step, f"calls_per_{window}", reason, wait_s(view, _window(step, window), window))
            if dollars is not None and spent + step.amount > dollars:
                allowed = (
                    f"${format_dollars(spent)} of ${format_dollars(dollars)} were held or spent within {_ONE[window]}"
                )
                reason = f"{allowed}, and this costs ${format_dollars(step.amount)}"
                later_s = wait_s(view, _window(step, window), window) if step.amount <= dollars else None
                return excess(step, f"dollars_per_{window}", reason, later_s)
        return None

    @override
    def taken(self, view: LedgerView, step: Step, hold_id: str) -> None:
        for window, _, _ in self.limits:
            add(view, _window(step, window), window, step.amount)

    @override
    def given_back(self, view: LedgerView, step: Step, at_ms: int) -> None:
        for window, _, _ in self.limits:
            remove(view, _window(step, window), window, step.amount, at_ms)


def excess(
    step: Step,
    rule: str,
    reason: str,
    wait_s: int | None = None,
    *,
    error: type[PaymentRefused] = VelocityExceeded,
    latch: Latch | None = None,
) -> Refusal:
    """Return the refusal of a step that is too much now, by a limit of ``Velocity``."""
    reason = f"{reason} (policy.velocity.{rule})"
    advice = _WAIT if wait_s is not None else ""
    return Refusal(rule, reason, step.amount, error=error, retry_after_s=wait_s, advice=advice, latch=latch)


_WAIT: Final = "Wait, use a payee that was paid before, or ask the owner to raise the limit."


def _window(step: Step, window: str) -> MarkKey:
    return VELOCITY, f"{step.run_id} {window}"
