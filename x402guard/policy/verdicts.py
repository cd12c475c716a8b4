"""What a rule sees of a step, and its verdict: allow, narrow, ask or deny."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, get_args

from msgspec import Struct
from msgspec.structs import replace

from x402guard.errors import ConfigError, NeedsReview, PaymentRefused, PolicyDenied
from x402guard.kernel.rows import HoldKind, Nanos
from x402guard.money import Dollars, format_dollars
from x402guard.policy.checks import check_dollars, check_texts, check_whole

Action = Literal["allow", "narrow", "ask", "deny"]
_STRICT: Final[Mapping[str, int]] = {action: rank for rank, action in enumerate(get_args(Action))}


class Arguments(Protocol):
    """A tool's arguments, read when the owner's code or an approver needs them."""

    def whole(self) -> Mapping[str, Any]:
        """Return all of them as plain values. Raises ``ConfigError`` if they are too many or nested too deep."""

    def cut(self) -> Mapping[str, Any]:
        """Return what a person can read of them."""


@dataclass(frozen=True, kw_only=True)
class Narrow:
    """The limits that a rule sets for a call. The narrowed call is the one that is checked, held and sent.

    Args:
        ceiling: dollars at most: limits an LLM call's output, lowers a tool's hold, refuses a payment that costs more.
        output_limit: tokens of an LLM's answer, or of a decorated tool's result.
        remove: fields of an LLM request's body, or arguments of a decorated tool, to leave out.

    Raises ``ConfigError`` naming the field.
    """

    ceiling: Dollars | None = None
    output_limit: int | None = None
    remove: Collection[str] = ()
    most: Nanos | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.ceiling is not None:
            object.__setattr__(self, "most", check_dollars("policy.rules.ceiling", self.ceiling))
        check_whole("policy.rules.output_limit", self.output_limit, 1, optional=True, what="of tokens ")
        object.__setattr__(self, "remove", check_texts("policy.rules.remove", self.remove, "field names"))
        if self.ceiling is None and self.output_limit is None and not self.remove:
            raise ConfigError("policy.rules: action 'narrow' needs ceiling, output_limit or remove")

    def and_also(self, other: Narrow) -> Narrow:
        """Return both narrowings combined: the lower of each limit, and the fields that either removes."""
        least = min((n.most for n in (self, other) if n.most is not None), default=None)
        limits = [n.output_limit for n in (self, other) if n.output_limit is not None]
        return Narrow(
            ceiling=None if least is None else f"${format_dollars(least)}",
            output_limit=min(limits, default=None),
            remove=frozenset(self.remove) | frozenset(other.remove),
        )


UNKNOWN_PAYEE: Final = "unknown"
"""Stands for the payee of a payment that another client has made, and that does not say whom it pays."""


class Subject(Struct, frozen=True):
    """What a rule sees of a step.

    Attributes:
        kind: payment, LLM call or tool.
        names: the tool; or ``METHOD host/path``, and the model.
        amount: the price or the ceiling, in nano-dollars.
        payee: the address that is paid, ``UNKNOWN_PAYEE``, or "" if none is paid.
        arguments: of a tool, or None if unknown.
        tool: the tool that a payment is for, which was judged before as a tool without a price; "" for all others.
        begun: the name of the first hop, if a redirect has named this one; else "".
    """

    kind: HoldKind
    names: tuple[str, ...]
    amount: Nanos
    payee: str = ""
    arguments: Arguments | None = None
    tool: str = ""
    begun: str = ""

    def __repr__(self) -> str:
        return f"Subject({self.kind}, {self.names!r}, {self.amount}, {self.payee!r})"  # not its arguments

    @property
    def shown(self) -> str:
        """The name for messages that a model reads: no path that a seller's redirect has named."""
        return self.begun or self.names[0]


class Verdict(Struct, frozen=True):
    """The combined verdict of the owner's rules on one step.

    Attributes:
        action: the strictest action.
        rule: the rule that decided, or "".
        reason: a sentence for the owner.
        approvers: how many approvers have to allow it, if the action is ``ask``.
        narrow: the limits for the call, or None.
        narrowed_by: the first rule that narrows it, or "".
        level: its risk level, or "".
        error: the class of the error that the caller gets, if the action is ``deny``.
    """

    action: Action = "allow"
    rule: str = ""
    reason: str = ""
    approvers: int = 0
    narrow: Narrow | None = None
    narrowed_by: str = ""
    level: str = ""
    error: type[PaymentRefused] = PolicyDenied


NO_VERDICT: Final = Verdict()


def without_approver(verdict: Verdict) -> Verdict:
    """Return the verdict of a guard that has no approver: it denies instead of asking."""
    reason = f"{verdict.reason}, and this guard has no approver; set one with Guard(approver=…)"
    return replace(verdict, action="deny", rule=NEEDS_REVIEW, reason=reason, error=NeedsReview)


NEEDS_REVIEW: Final = "needs_review"
"""The rule of a step that needs approval where there is no approver."""


def strictest(one: Verdict, other: Verdict) -> Verdict:
    """Return two verdicts combined: the stricter action, the higher number of approvers, the narrower call."""
    if other is NO_VERDICT:
        return one
    if one is NO_VERDICT and not other.rule:
        return other
    ours, theirs = (_STRICT[one.action], one.approvers), (_STRICT[other.action], other.approvers)
    first = one if ours >= theirs else other
    narrow = one.narrow or other.narrow
    if one.narrow is not None and other.narrow is not None:
        narrow = one.narrow.and_also(other.narrow)
    return replace(
        first,
        approvers=max(one.approvers, other.approvers),
        narrow=narrow,
        narrowed_by=one.narrowed_by or other.narrowed_by,
        level=one.level or other.level,
    )
