"""The owner's rules as data: what to deny, what needs approval, and what to narrow. The strictest rule decides."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, get_args

from x402guard.errors import ConfigError
from x402guard.evm import parse_address
from x402guard.kernel.rows import HoldKind, Nanos
from x402guard.money import Dollars, format_dollars
from x402guard.policy.checks import check_dollars, check_texts, check_whole
from x402guard.policy.patterns import check_pattern, matches_name, matches_route, matches_word, may_be_host
from x402guard.policy.verdicts import NO_VERDICT, UNKNOWN_PAYEE, Action, Narrow, Subject, Verdict, strictest

KINDS: Final = frozenset(str(kind) for kind in (HoldKind.PAYMENT, HoldKind.LLM, HoldKind.TOOL))
_MOST_APPROVERS: Final = 10
_LIKE_A_HOST: Final = re.compile(r"(?:[\w*-]+\.)+(?:[a-z]{2,}|[a-z0-9-]*\*[a-z0-9*-]*)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of the owner. It applies if all its conditions match; the strictest of the rules that apply decides.

    Args:
        name: the name in refusals and reports.
        action: ``deny``, ``ask`` (for approval of this call), ``narrow``, or ``allow`` (which loosens no other rule).
        match: a tool, in any spelling; a model; a host; or ``METHOD host/path`` without the query. ``*`` stands for anything.
        kinds: ``payment``, ``llm``, ``tool``; all by default.
        above: dollars; the rule applies to a step that costs more, or may.
        payees: addresses; only for payments.
        approvers: how many different approvers have to allow it, with ``ask``.
        ceiling, output_limit, remove: the limits to set, with ``narrow``; see ``Narrow``.

    Raises ``ConfigError`` naming the field.
    """

    name: str
    action: Action
    match: str = "*"
    kinds: Collection[str] = KINDS
    above: Dollars | None = None
    payees: Collection[str] | None = None
    approvers: int = 1
    ceiling: Dollars | None = None
    output_limit: int | None = None
    remove: Collection[str] = ()
    narrow: Narrow | None = field(init=False, repr=False, compare=False, default=None)
    more_than: Nanos | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isprintable() or not 0 < len(self.name) <= 100:
            raise ConfigError(
                f"policy.rules.name: {self.name!r:.120} is not a name for a rule; write text such as 'big-documents'"
            )
        try:
            self._check()
        except ConfigError as error:
            told = str(error)
            raise ConfigError(told if repr(self.name) in told else f"{told} (rule {self.name!r})") from error

    def _check(self) -> None:
        if self.action not in get_args(Action):
            raise ConfigError(
                f"policy.rules.action: {self.action!r} of rule {self.name!r} is not one of {', '.join(get_args(Action))}"
            )
        self._set("match", check_pattern(f"policy.rules.match of rule {self.name!r}", self.match))
        kinds = check_texts("policy.rules.kinds", self.kinds, "payment, llm, tool")
        if not kinds or not kinds <= KINDS:
            raise ConfigError(
                f"policy.rules.kinds: {self.kinds!r} of rule {self.name!r} is not a list of payment, llm, tool"
            )
        self._set("remove", check_texts("policy.rules.remove", self.remove, "field names"))
        check_whole("policy.rules.approvers", self.approvers, 1, _MOST_APPROVERS)
        narrows = self.ceiling is not None or self.output_limit is not None or bool(self.remove)
        if narrows is not (self.action == "narrow"):
            raise ConfigError(
                f"policy.rules: rule {self.name!r}: action 'narrow' needs ceiling, output_limit or remove, and no other action takes them"
            )
        if kinds == {str(HoldKind.PAYMENT)} and _LIKE_A_HOST.fullmatch(self.match) and not may_be_host(self.match):
            raise ConfigError(
                f"policy.rules.match of rule {self.name!r}: {self.match!r:.120} names no payment; write a host such as "
                "bank.example (in ASCII: xn--…), a route such as '* bank.example/*', or SERVER/TOOL for a paid tool"
            )
        self._set("kinds", kinds)
        if narrows:
            self._set("narrow", Narrow(ceiling=self.ceiling, output_limit=self.output_limit, remove=self.remove))
        if self.above is not None:
            self._set("more_than", check_dollars("policy.rules.above", self.above))
        if self.payees is not None:
            self._set("payees", _addresses(self.name, self.payees))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def holds_for(self, subject: Subject) -> bool:
        """Return whether the rule applies to a step."""
        named = str(subject.kind) in self.kinds and any(
            _matches(self.match, name, subject.kind) for name in subject.names
        )
        return (
            (named or self._is_about_the_price_of(subject))
            and (self.more_than is None or subject.amount > self.more_than)
            and (self.payees is None or self._names_the_payee_of(subject))
        )

    @property
    def asks_without_a_price(self) -> bool:
        """True if it has asked about a tool before its price was known."""
        return str(HoldKind.TOOL) in self.kinds and self.more_than is None and self.payees is None

    def _names_the_payee_of(self, subject: Subject) -> bool:
        """True for a payee on the rule's list; an unknown one may be on each list that restrains."""
        if subject.payee == UNKNOWN_PAYEE:
            return self.action != "allow"
        return subject.payee.lower() in (self.payees or ())

    def _is_about_the_price_of(self, subject: Subject) -> bool:
        """True for the payment for a tool if the rule names that tool, and could not be judged before its price was known."""
        if not subject.tool or not _matches(self.match, subject.tool, HoldKind.TOOL):
            return False
        if str(HoldKind.TOOL) not in self.kinds:
            return str(HoldKind.PAYMENT) in self.kinds
        if self.action == "ask":
            return True  # a yes to a free call covers $0
        if self.narrow is not None:
            return self.narrow.most is not None  # its arguments are sent already
        return self.more_than is not None or self.payees is not None


def _matches(pattern: str, name: str, kind: HoldKind) -> bool:
    if pattern == "*" or matches_route(pattern, name):
        return True
    return matches_name(pattern, name, within=True) if kind is HoldKind.TOOL else matches_word(pattern, name)


def _addresses(rule: str, payees: object) -> frozenset[str]:
    listed = check_texts("policy.rules.payees", payees, "addresses")
    if not listed:
        raise ConfigError(f"policy.rules.payees: the list of rule {rule!r} is empty and matches no payee; leave it out")
    try:
        return frozenset(parse_address(payee).lower() for payee in listed)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy.rules.payees of rule {rule!r}: {error}") from error


def check_rules(rules: object) -> tuple[Rule, ...] | None:
    """Return the rules as a tuple. Raises ``ConfigError`` for anything but a list of rules with unique names."""
    if rules is None:
        return None
    if isinstance(rules, (str, Mapping)) or not isinstance(rules, Iterable):
        raise ConfigError(f"policy.rules: {rules!r} is not a list of Rule")
    listed = tuple(rules)
    if not listed:
        raise ConfigError("policy.rules: an empty list reads like 'nothing is allowed'; leave it out, or write a rule")
    for rule in listed:
        if not isinstance(rule, Rule):
            raise ConfigError(f"policy.rules: {rule!r} is not a Rule; write Rule(name=…, action=…)")
    names = [rule.name for rule in listed]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"policy.rules: two rules are named {twice[0]!r}; give each its own name")
    return listed


def judge_rules(rules: Iterable[Rule], subject: Subject) -> Verdict:
    """Return the combined verdict of the rules on a step."""
    verdict = NO_VERDICT
    for rule in rules:
        if rule.holds_for(subject):
            reason = f"rule {rule.name!r} {_SAYS[rule.action]} {subject.shown}{_over(rule)}"
            if subject.tool and rule.action == "ask" and rule.asks_without_a_price:
                reason += f"; it was asked about for $0.00, and costs ${format_dollars(subject.amount)} now"
            approvers = rule.approvers if rule.action == "ask" else 0
            by = rule.name if rule.narrow is not None else ""
            verdict = strictest(verdict, Verdict(rule.action, rule.name, reason, approvers, rule.narrow, by))
    return verdict


_SAYS: Final = {"allow": "allows", "narrow": "narrows", "ask": "asks before", "deny": "denies"}


def _over(rule: Rule) -> str:
    return "" if rule.more_than is None else f" above ${format_dollars(rule.more_than)}"
