"""Who a seller is, which is its host and no address: what the owner says of one, and how many new ones a run may pay."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from msgspec import Struct
from typing_extensions import override

from x402guard.errors import ConfigError, PolicyDenied, VelocityExceeded
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import NOTHING, Nanos
from x402guard.ledger.authorize import Latch, Refusal
from x402guard.ledger.view import LedgerView
from x402guard.money import Dollars, format_dollars
from x402guard.policy.checks import check_choice, check_dollars
from x402guard.policy.patterns import host_listed, host_name
from x402guard.policy.step_guard import PriceGuard
from x402guard.policy.steps import DIRECT, Step, shown_host
from x402guard.policy.velocity import excess
from x402guard.policy.windows import NEW_PAYEES, SELLER, add, remove, sums_in, wait_s

SELLER_DAILY: Final = "seller_daily"
"""The rule of a payment that its seller's ``daily`` does not allow."""

_PAYEES_PER_HOST: Final = 5  # new ones within a day: one server cannot use up the addresses of a run
_VERSIONS: Final = frozenset({1, 2})


@dataclass(frozen=True, kw_only=True)
class Seller:
    """What the owner says of the sellers at one host, or at all that a pattern names.

    It holds for requests that went to the host itself. An offer that only names the host, as one that a tool has brought,
    is judged as that of any other seller.

    Args:
        payees: ``any`` for a seller that names a fresh address for each sale: ``new_payees_per_day``, ``payee_change``
            and ``percent_per_payee`` leave it out, and ``daily`` bounds its dollars. The lists of payees still hold.
        facilitators: ``any`` for a pool of facilitators that settle its ``upto`` payments.
        versions: ``{1, 2}`` for one that uses both versions of x402, each at any time; None: a route that has used version 2
            keeps to it.
        daily: dollars that all runs of this ledger together may pay within a day to all hosts of its pattern; None for no
            such limit.

    Raises ``ConfigError`` naming the setting.
    """

    payees: Literal["any"] | None = None
    facilitators: Literal["any"] | None = None
    versions: Collection[int] | None = None
    daily: Dollars | None = None
    most_a_day: Nanos | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        for name in ("payees", "facilitators"):
            if getattr(self, name) is not None:
                check_choice(f"policy.sellers.{name}", getattr(self, name), ("any",))
        if self.versions is not None:
            given: object = self.versions
            if not isinstance(given, Collection) or sorted(map(str, given)) != ["1", "2"] or isinstance(given, str):
                raise ConfigError(f"policy.sellers.versions: {given!r:.60} is not both versions; write [1, 2]")
            object.__setattr__(self, "versions", _VERSIONS)
        if self.daily is not None:
            most = check_dollars("policy.sellers.daily", self.daily)
            if most == 0:
                raise ConfigError("policy.sellers.daily: zero pays nothing; write a rule that denies the host instead")
            object.__setattr__(self, "most_a_day", most)
        if self.payees == "any" and self.daily is None:
            raise ConfigError(
                'policy.sellers.payees: "any" needs daily, which bounds the dollars in place of the addresses; '
                'add daily = "5.00"'
            )


Sellers = Mapping[str, Seller]
"""Host, ``host:port`` or ``*.domain`` → what its owner says of the sellers there."""


def sellers_at(sellers: Sellers, host: str) -> tuple[Seller, ...]:
    """Return what the owner says of a host; with its port if that is not the default one."""
    return tuple(seller for pattern, seller in sellers.items() if host_listed(host, (pattern,))) if sellers else ()


def takes_any_payee(sellers: Sellers, host: str) -> bool:
    """True for a host whose addresses its owner does not count."""
    return any(seller.payees == "any" for seller in sellers_at(sellers, host))


class SellerLimits(Struct, PriceGuard, frozen=True):
    """The new sellers of a run, one payee's share of its budget, and the dollars of one seller.

    Attributes:
        most: the new sellers that a run may pay within a day; None for any number.
        percent: the share of the run's budget for any one payee; None for any.
        sellers: what the owner says of some.
        listed: the owner's list of payees: none of them is new.
    """

    most: int | None
    percent: int | None
    sellers: Sellers
    listed: frozenset[str] = frozenset()

    def _bounded(self, step: Step) -> list[tuple[str, Nanos]]:
        """Return the pattern and the dollars of each limit on the seller of a step."""
        return [
            (pattern, seller.most_a_day)
            for pattern, seller in self.sellers.items()
            if seller.most_a_day is not None and _is_asked(step) and host_listed(_place(step), (pattern,))
        ]

    def _counts(self, step: Step) -> bool:
        return not (self.sellers and _is_asked(step) and takes_any_payee(self.sellers, _place(step)))

    @override
    def marks(self, step: Step, payees: tuple[str, ...], *, ending: bool) -> list[MarkKey]:
        if ending or not payees:
            return []
        marks = [(SELLER, pattern) for pattern, _ in self._bounded(step)] if self.sellers else []
        if self._counts(step):
            marks += [_new_of(step), _new_at(step)]
            for payee in payees:
                marks += [_known(payee), _to(step, payee)]
        return marks

    @override
    def judge(self, view: LedgerView, step: Step) -> Refusal | None:
        if not step.priced or not step.payee:
            return None
        for pattern, most in self._bounded(step) if self.sellers else ():
            spent = sums_in(view, (SELLER, pattern), "day")[0]
            if spent + step.amount > most:
                return _too_much(view, step, pattern, Nanos(spent), most)
        return (self._new_payee(view, step) or self._share(view, step)) if self._counts(step) else None

    def _new_payee(self, view: LedgerView, step: Step) -> Refusal | None:
        if self.most is None or step.payee in self.listed or _is_known(view, step.payee):
            return None
        named = sums_in(view, _new_at(step), "day")[1]
        if named >= _PAYEES_PER_HOST:
            host = shown_host(_place(step), step.begun, _host(step))
            why = f"{host} has named {named} new payees within a day; if it is known to do so, see policy.sellers"
            return _too_many_new(view, step, _new_at(step), why)
        if not named and sums_in(view, _new_of(step), "day")[1] >= self.most:
            return _too_many_new(view, step, _new_of(step), f"this run has paid {self.most} new sellers within a day")
        return None

    def _share(self, view: LedgerView, step: Step) -> Refusal | None:
        percent = self.percent
        limit = None if percent is None else view.node(step.run_id).limit
        if percent is None or limit is None:
            return None
        paid = _paid_to(view, step)
        if (paid + step.amount) * 100 <= limit * percent:
            return None
        share = f"${format_dollars(paid)} were held for {step.payee}"
        reason = f"{share}; with this it is over {percent} % of the run's ${format_dollars(limit)}"
        return excess(step, "percent_per_payee", reason, error=PolicyDenied)

    @override
    def taken(self, view: LedgerView, step: Step, hold_id: str) -> None:
        if not step.payee:
            return
        for pattern, _ in self._bounded(step) if self.sellers else ():
            add(view, (SELLER, pattern), "day", step.amount)
        if not self._counts(step):
            return
        if not _is_known(view, step.payee):
            view.put_mark(_known(step.payee), {"since": view.now_ms})
            if not sums_in(view, _new_at(step), "day")[1]:  # a seller counts once
                add(view, _new_of(step), "day", NOTHING)
            add(view, _new_at(step), "day", NOTHING)
        view.put_mark(_to(step, step.payee), {"nanos": _paid_to(view, step) + step.amount})

    @override
    def given_back(self, view: LedgerView, step: Step, at_ms: int) -> None:
        if not step.payee:
            return
        for pattern, _ in self._bounded(step) if self.sellers else ():
            remove(view, (SELLER, pattern), "day", step.amount, at_ms)
        if not self._counts(step):
            return
        view.put_mark(_to(step, step.payee), {"nanos": max(0, _paid_to(view, step) - step.amount)})
        if (view.mark(_known(step.payee)) or {}).get("since") == at_ms:  # so it was this step that made it known
            view.put_mark(_known(step.payee), {"since": None})
            remove(view, _new_at(step), "day", NOTHING, at_ms)
            if not sums_in(view, _new_at(step), "day")[1]:
                remove(view, _new_of(step), "day", NOTHING, at_ms)


def _too_much(view: LedgerView, step: Step, pattern: str, spent: Nanos, most: Nanos) -> Refusal:
    later_s = wait_s(view, (SELLER, pattern), "day") if step.amount <= most else None
    reason = (
        f"${format_dollars(spent)} of ${format_dollars(most)} were held or spent at {pattern} within a day, and this costs "
        f"${format_dollars(step.amount)} (policy.sellers, daily)"
    )
    advice = "Wait, or ask the owner to raise daily in policy.sellers." if later_s is not None else ""
    left = Nanos(max(0, most - spent))
    return Refusal(
        SELLER_DAILY, reason, step.amount, left, error=VelocityExceeded, retry_after_s=later_s, advice=advice
    )


def _too_many_new(view: LedgerView, step: Step, key: MarkKey, why: str) -> Refusal:
    later_s = wait_s(view, key, "day")
    latch = Latch(key, None if later_s is None else view.now_ms + later_s * 1000)
    reason = f"{step.payee} was never paid before, and {why}"
    return excess(step, "new_payees_per_day", reason, later_s, latch=latch)


def _is_asked(step: Step) -> bool:
    """True if a request went to the step's host; an offer that did not come by HTTP may name any."""
    return bool(step.routes) and not step.routes[0].startswith(f"{DIRECT} ")


def _place(step: Step) -> str:
    """Return the host of a step, with its port."""
    return (step.routes[0] if step.routes else step.name).partition(" ")[2].partition("/")[0]


def _host(step: Step) -> str:
    return host_name(step.name.partition(" ")[2].partition("/")[0])  # ports of one host are one host


def _known(payee: str) -> MarkKey:
    return "payee", payee


def _is_known(view: LedgerView, payee: str) -> bool:
    return (view.mark(_known(payee)) or {}).get("since") is not None


def _new_of(step: Step) -> MarkKey:
    return NEW_PAYEES, step.run_id


def _new_at(step: Step) -> MarkKey:
    return NEW_PAYEES, f"{step.run_id} {_host(step)}"


def _to(step: Step, payee: str) -> MarkKey:
    return "paid_to", f"{step.run_id} {payee}"


def _paid_to(view: LedgerView, step: Step) -> int:
    return int((view.mark(_to(step, step.payee)) or {"nanos": 0})["nanos"])
