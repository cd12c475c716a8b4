"""What a rule is shown of a step, and what it says: allow, narrow, ask or deny."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

from x402guard.errors import ConfigError, PaymentRefused, PolicyDenied
from x402guard.ledger.model import HoldKind
from x402guard.money import Dollars, Nanos, format_dollars
from x402guard.policy.checks import check_dollars, check_texts

Action = Literal["allow", "narrow", "ask", "deny"]


_STRICT: Final[Mapping[str, int]] = {action: rank for rank, action in enumerate(get_args(Action))}


@dataclass(frozen=True, kw_only=True)
class Narrow:
    """What a rule leaves of a call. What is narrowed is what is checked, held and sent.

    Args:
        ceiling: dollars that it may cost at most: an LLM call's output is limited to that, a tool's hold lowered; a payment that
            asks for more is refused, since its price is the seller's.
        output_limit: tokens of an LLM's answer, or of a decorated tool's result.
        remove: fields of an LLM request's body, or arguments of a decorated tool, that are left out.

    Raises ``ConfigError`` naming the field.
    """

    ceiling: Dollars | None = None
    output_limit: int | None = None
    remove: Collection[str] = ()
    most: Nanos | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.ceiling is not None:
            object.__setattr__(self, "most", check_dollars("policy.rules.ceiling", self.ceiling))
        if self.output_limit is not None and (type(self.output_limit) is not int or self.output_limit <= 0):
            raise ConfigError(
                f"policy.rules.output_limit: {self.output_limit!r} is not a positive whole number of tokens"
            )
        object.__setattr__(self, "remove", check_texts("policy.rules.remove", self.remove, "field names"))
        if self.ceiling is None and self.output_limit is None and not self.remove:
            raise ConfigError("policy.rules: a rule that narrows says what to: ceiling, output_limit or remove")

    def and_also(self, other: Narrow) -> Narrow:
        """Return what is left where both narrow: the lower of each limit, and no field that either removes."""
        least = min((n.most for n in (self, other) if n.most is not None), default=None)
        limits = [n.output_limit for n in (self, other) if n.output_limit is not None]
        return Narrow(
            ceiling=None if least is None else f"${format_dollars(least)}",
            output_limit=min(limits, default=None),
            remove=frozenset(self.remove) | frozenset(other.remove),
        )


@dataclass(frozen=True, slots=True)
class Subject:
    """What a rule is shown of a step.

    Attributes:
        kind: payment, LLM call or tool.
        names: what it goes by: the tool; or ``METHOD host/path``, and the model.
        amount: nano-dollars that it costs, or costs at most.
        payee: who is paid, or "".
        arguments: a tool's, where they were told.
    """

    kind: HoldKind
    names: tuple[str, ...]
    amount: Nanos
    payee: str = ""
    arguments: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the owner's rules say of one step, all together.

    Attributes:
        action: the strictest that any says.
        rule: whose it is, "" for nobody's.
        reason: a sentence for people.
        approvers: how many people have to allow it, where it is to ask.
        narrow: what is left of it; None for all.
        narrowed_by: the first rule that narrows it, or "".
        level: its level of risk, or "".
        error: the class that the caller gets where it denies.
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


def strictest(one: Verdict, other: Verdict) -> Verdict:
    """Return what two verdicts come to: the stricter action, the more people, the narrower call."""
    ranks = [(_STRICT[verdict.action], verdict.approvers) for verdict in (one, other)]
    first = one if ranks[0] >= ranks[1] else other
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
