"""Risk levels of tools, by name: which run, which are logged, which need approval, and which never run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from x402guard.errors import ConfigError
from x402guard.frozen import replace
from x402guard.kernel.rows import HoldKind
from x402guard.policy.checks import check_whole
from x402guard.policy.patterns import (
    check_patterns,
    ends_with,
    is_disguised,
    matches_name,
    matches_route,
    matches_word,
    without_words,
)
from x402guard.policy.verdicts import NO_VERDICT, Subject, Verdict

Level = Literal["LOW", "MEDIUM", "HIGH", "CRITICAL"]
"""LOW runs · MEDIUM is logged and runs · HIGH needs approval · CRITICAL is denied, or needs several approvers."""

Classify = Callable[[str, Mapping[str, Any] | None], str | None]

_ASSETS: Final = (
    "asset", "assets", "bitcoin", "btc", "coin", "coins", "crypto", "dai", "eth", "ether", "eur", "eurc", "funds", "gbp", "matic",
    "money", "payment", "payments", "pyusd", "sol", "token", "tokens", "transaction", "tx", "usd", "usdc", "usdt", "weth", "xrp",
)  # fmt: skip

DEFAULT_LEVELS: Final[Mapping[str, Level]] = MappingProxyType(
    {
        "search_*": "LOW",
        "get_*": "LOW",
        "list_*": "LOW",
        "post_webhook": "MEDIUM",
        "delete_*": "HIGH",
        "purge_*": "HIGH",
        "rm_*": "HIGH",
        # What runs what it is given.
        "exec_*": "HIGH",
        "run_sql_*": "HIGH",
        "send_email_*": "HIGH",
        "send_sms_*": "HIGH",
        # What moves money, or lets another move it.
        "approve_*": "HIGH",
        "pay_*": "HIGH",
        "sign_*": "HIGH",
        "swap_*": "HIGH",
        "transfer_*": "HIGH",
        "wire_*": "HIGH",
        "withdraw_*": "HIGH",
        **{f"send_{asset}_*": "HIGH" for asset in _ASSETS},
        "drop_*": "CRITICAL",
        "truncate_*": "CRITICAL",
    }
)
"""Pattern → level. A tool that matches none is MEDIUM. ``send_email_*`` also matches ``send_email``."""

_BEHIND: Final = frozenset(
    {"delete_*", "drop_*", "exec_*", "pay_*", "purge_*", "rm_*", "transfer_*", "truncate_*", "wire_*", "withdraw_*"}
)
"""Words that say as much at the end of a name: ``users_delete``. Others are nouns there: a road_sign."""

_NOT_SIGNATURES: Final = ("sign_in_*", "sign_off_*", "sign_out_*", "sign_up_*")
"""Names that match ``sign_*`` and sign nothing. What else they name counts."""

_WITHOUT_SIGN: Final = {pattern: level for pattern, level in DEFAULT_LEVELS.items() if pattern != "sign_*"}
_SIGN_IN: Final = re.compile(r"(?<![^_])sign_(in|off|out|up)(?![^_])")

RISK: Final = "risk"
_RANK: Final[Mapping[str, int]] = {level: rank for rank, level in enumerate(get_args(Level))}
_MOST_KNOWN: Final = 1_024
"""How many names keep their level: finding it takes some two hundred comparisons with patterns."""

_MOST_APPROVERS: Final = 10


@dataclass(frozen=True, kw_only=True)
class Risk:
    """Which tools run, and which need approval.

    Args:
        levels: pattern → ``LOW``, ``MEDIUM``, ``HIGH`` or ``CRITICAL``, before the default table; the strictest match
            counts. A pattern is a tool's name, with ``*`` for anything; for payments and LLM calls a host, or ``METHOD
            host/path``.
        approvers: how many different approvers a CRITICAL step needs; with fewer than two it is denied.
        classify: a function of a tool and all of its arguments (plain values, or None if unknown) that returns a level
            or None. It can raise the level and never lower it; if it fails, or if the arguments have more than two million
            values, the tool does not run.

    Raises ``ConfigError`` naming the setting.
    """

    levels: Mapping[str, Level] = field(default_factory=dict, hash=False)
    approvers: int = 1
    classify: Classify | None = None
    _known: dict[tuple[HoldKind, tuple[str, ...]], Level] = field(
        init=False, repr=False, compare=False, hash=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        if not isinstance(self.levels, Mapping):
            raise ConfigError(f'policy.risk.levels: {self.levels!r} is not a mapping; write {{"wipe_*": "CRITICAL"}}')
        checked = check_patterns("policy.risk.levels", self.levels)
        for pattern, level in self.levels.items():
            if not isinstance(level, str) or level not in _RANK:
                raise ConfigError(f"policy.risk.levels: {level!r} of {pattern!r} is not one of {', '.join(_RANK)}")
        check_whole("policy.risk.approvers", self.approvers, 1, _MOST_APPROVERS)
        if self.classify is not None and not callable(self.classify):
            raise ConfigError(f"policy.risk.classify: {self.classify!r} is not a function of a tool and its arguments")
        object.__setattr__(self, "levels", MappingProxyType(checked))

    def level_of(self, subject: Subject) -> Level:
        """Return the level of a step by its name alone. A payment or LLM call that matches no own pattern is LOW."""
        key = (subject.kind, subject.names)
        level = self._known.get(key)
        if level is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            level = self._known[key] = self._find_level(subject)
        return level

    def _find_level(self, subject: Subject) -> Level:
        own = [level for pattern, level in self.levels.items() if _named(pattern, subject, within=_RANK[level] > 1)]
        if own or subject.kind is not HoldKind.TOOL:
            return _highest(own, "LOW")
        if any(_named(each, subject, within=False) for each in _NOT_SIGNATURES):
            rest = replace(subject, names=tuple([without_words(_SIGN_IN, name) for name in subject.names]))
            found: list[Level] = ["MEDIUM", *_found(rest, DEFAULT_LEVELS), *_found(subject, _WITHOUT_SIGN)]
        else:
            found = _found(subject, DEFAULT_LEVELS)
        if is_disguised(subject.names[0]):
            found.append("HIGH")  # it is unknown which word it reads as
        return _highest(found, "MEDIUM")


def _found(subject: Subject, table: Mapping[str, Level]) -> list[Level]:
    """Return the levels in a table of a tool that begins with a pattern, else of one that has it within."""
    found = [level for pattern, level in table.items() if _named(pattern, subject, within=False)]
    return found or [level for pattern, level in table.items() if _named(pattern, subject, within=True)]


def _highest(levels: list[Level], otherwise: Level) -> Level:
    return max(levels, key=lambda level: _RANK[level], default=otherwise)


def _named(pattern: str, subject: Subject, *, within: bool) -> bool:
    return any(
        matches_route(pattern, name, frees=subject.kind is HoldKind.TOOL)  # a tool may be named as a seller's route
        or (
            matches_name(pattern, name, within=within)
            or (within and pattern in _BEHIND and ends_with(pattern[:-2], name))
            if subject.kind is HoldKind.TOOL
            else matches_word(pattern, name)
        )
        for name in subject.names
    )


def judge_risk(risk: Risk | None, subject: Subject) -> Verdict:
    """Return the verdict of a step's risk level: it runs, needs approval, or is denied."""
    if risk is None:
        return NO_VERDICT
    what, level = subject.shown, risk.level_of(subject)
    if risk.classify is not None and subject.kind is HoldKind.TOOL:
        try:
            raised = risk.classify(what, None if subject.arguments is None else subject.arguments.whole())
        except Exception as error:  # noqa: BLE001 - the owner's code; if it fails, the tool does not run
            return Verdict(
                "deny", RISK, f"{what}: policy.risk.classify failed: {type(error).__name__}", level="CRITICAL"
            )
        if raised is not None and not (isinstance(raised, str) and raised in _RANK):
            return Verdict(
                "deny", RISK, f"{what}: policy.risk.classify returned {raised!r:.60}, not a level", level="CRITICAL"
            )
        if raised is not None and _RANK[raised] > _RANK[level]:
            level = next(known for known in get_args(Level) if known == raised)
    if level == "CRITICAL" and risk.approvers < 2:
        reason = f"{what} is CRITICAL; it is denied unless policy.risk.approvers is 2 or more, or policy.risk.levels says less of it"
        return Verdict("deny", RISK, reason, level=level)
    if level in ("HIGH", "CRITICAL"):
        people = risk.approvers if level == "CRITICAL" else 1
        return Verdict("ask", RISK, f"{what} is {level}: it needs approval", people, level=level)
    return Verdict(level=level)
