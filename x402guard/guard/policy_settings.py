"""The table ``[policy]`` of ``x402guard.toml``, and the tables in it, as models: what is not in them is an error."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from x402guard.policy import (
    Approvals,
    Breaker,
    Bulkhead,
    Loop,
    Policy,
    Risk,
    Rule,
    Spike,
    Timeouts,
    Velocity,
)


class LoopSettings(BaseModel):
    """The table ``[policy.loop]``; each key is an argument of ``Loop``. In ``own``, 0 lets a tool or route repeat for ever."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    calls: int | None = None
    window_s: int | None = None
    longest_cycle: int | None = None
    failures: int | None = None
    ignored: list[str] | None = None
    own: dict[str, int] | None = None

    def part(self) -> Loop:
        """Return the loop. Raises ``ConfigError``."""
        given = self.model_dump(exclude_none=True)
        if self.own is not None:
            given["own"] = {name: calls or None for name, calls in self.own.items()}
        return Loop(**given)


class SpikeSettings(BaseModel):
    """The table ``[policy.spike]``; each key is an argument of ``Spike``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    multiplier: int | None = None
    window: int | None = None
    action: str | None = None
    min_step: str | None = None

    def part(self) -> Spike:
        """Return the spike. Raises ``ConfigError``."""
        return Spike(**self.model_dump(exclude_none=True))


class VelocitySettings(BaseModel):
    """The table ``[policy.velocity]``; each key is an argument of ``Velocity``, and 0 is no limit of that kind."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dollars_per_minute: str | None = None
    dollars_per_hour: str | None = None
    dollars_per_day: str | None = None
    calls_per_minute: int | None = None
    calls_per_hour: int | None = None
    calls_per_day: int | None = None
    new_payees_per_day: int | None = None
    percent_per_payee: int | None = None
    price_ratio: int | None = None

    def part(self) -> Velocity:
        """Return the velocity. Raises ``ConfigError``."""
        return Velocity(
            **{
                name: None if value in (0, "0", "$0") else value
                for name, value in self.model_dump(exclude_none=True).items()
            }
        )


class RuleSettings(BaseModel):
    """One table ``[[policy.rules]]``; each key is an argument of ``Rule``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    action: str
    match: str | None = None
    kinds: list[str] | None = None
    above: str | None = None
    payees: list[str] | None = None
    approvers: int | None = None
    ceiling: str | None = None
    output_limit: int | None = None
    remove: list[str] | None = None

    def rule(self) -> Rule:
        """Return the rule. Raises ``ConfigError``."""
        return Rule(**self.model_dump(exclude_none=True))


class RiskSettings(BaseModel):
    """The table ``[policy.risk]``; ``levels`` and ``approvers`` are arguments of ``Risk``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    levels: dict[str, str] | None = None
    approvers: int | None = None

    def part(self) -> Risk:
        """Return the risk. Raises ``ConfigError``."""
        return Risk(**self.model_dump(exclude_none=True))


class ApprovalsSettings(BaseModel):
    """The table ``[policy.approvals]``; each key is an argument of ``Approvals``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    above: str | None = None
    timeout_s: int | None = None

    def part(self) -> Approvals:
        """Return the approvals. Raises ``ConfigError``."""
        return Approvals(**self.model_dump(exclude_none=True))


class BreakerSettings(BaseModel):
    """The table ``[policy.breaker]``; each key is an argument of ``Breaker``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    failures: int | None = None
    rest_s: int | None = None

    def part(self) -> Breaker:
        """Return the breaker. Raises ``ConfigError``."""
        return Breaker(**self.model_dump(exclude_none=True))


class BulkheadSettings(BaseModel):
    """The table ``[policy.bulkhead]``; each key is an argument of ``Bulkhead``, and 0 is any number."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    per_host: int | None = None
    per_tool: int | None = None

    def part(self) -> Bulkhead:
        """Return the bulkhead. Raises ``ConfigError``."""
        return Bulkhead(**{name: value or None for name, value in self.model_dump(exclude_none=True).items()})


class TimeoutsSettings(BaseModel):
    """The table ``[policy.timeouts]``; each key is an argument of ``Timeouts``, and 0 is any time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    payment_s: int | None = None
    tool_s: int | None = None
    llm_s: int | None = None
    chunk_s: int | None = None
    step_s: int | None = None
    session_s: int | None = None

    def part(self) -> Timeouts:
        """Return the timeouts. Raises ``ConfigError``."""
        return Timeouts(**{name: value or None for name, value in self.model_dump(exclude_none=True).items()})


class PolicySettings(BaseModel):
    """The table ``[policy]``; each key is an argument of ``Policy``, and what is left out keeps its default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    per_payment_cap: str | None = None
    networks: list[str] | None = None
    hosts: list[str] | None = None
    payees: list[str] | None = None
    facilitators: list[str] | None = None
    assets: list[str] | None = None
    schemes: list[str] | None = None
    flows: list[str] | None = None
    max_lifetime_s: int | None = None
    resource_mismatch: str | None = None
    upto_at_ceiling: str | None = None
    payee_change: str | None = None
    unsafe_pay_after_redirect: bool | None = None
    rules: list[RuleSettings] | None = None
    risk: RiskSettings | Literal[False] | None = None
    approvals: ApprovalsSettings | None = None
    breaker: BreakerSettings | Literal[False] | None = None
    bulkhead: BulkheadSettings | Literal[False] | None = None
    timeouts: TimeoutsSettings | None = None
    soft_limits: list[float] | float | None = None
    loop: LoopSettings | Literal[False] | None = None
    spike: SpikeSettings | Literal[False] | None = None
    velocity: VelocitySettings | Literal[False] | None = None
    max_steps: int | None = None
    max_calls: dict[str, int] | None = None

    def policy(self) -> Policy:
        """Return the policy. Raises ``ConfigError``."""
        given: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if value is None:
                continue
            if name == "rules":
                given[name] = [rule.rule() for rule in value]
            elif name in _PARTS:
                given[name] = value.part() if value else None  # false is none of its kind
            else:
                given[name] = value
        return Policy(**given)


_PARTS: Final = frozenset({"risk", "approvals", "breaker", "bulkhead", "timeouts", "loop", "spike", "velocity"})
