"""``Policy``: every rule that the owner can set, checked when it is created, not at the first payment."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal, Self, get_args

from x402guard.assets import TEST_NETWORKS, V1_NAMES, near_network, resolve_network
from x402guard.errors import ConfigError
from x402guard.evm import parse_address
from x402guard.kernel.rows import HoldKind, Nanos
from x402guard.money import Dollars
from x402guard.policy.approvals import Approvals
from x402guard.policy.breakers import Breaker, Bulkhead
from x402guard.policy.checks import SoftLimits, check_choice, check_dollars, check_flag, check_whole, parts_of
from x402guard.policy.counts import Counts
from x402guard.policy.loops import Loop
from x402guard.policy.patterns import check_patterns
from x402guard.policy.prices import Prices
from x402guard.policy.risk import Risk
from x402guard.policy.rules import Rule, check_rules
from x402guard.policy.sellers import Seller, SellerLimits
from x402guard.policy.spikes import Spike
from x402guard.policy.step_guard import Moment, StepGuard
from x402guard.policy.timeouts import Timeouts
from x402guard.policy.velocity import Velocity

MIN_LIFETIME_S: Final = 10
"""A signature that is valid for less than this many seconds would expire before it could be settled."""

ResourceMismatch = Literal["warn", "refuse"]
UptoAtCeiling = Literal["warn", "refuse"]
PayeeChange = Literal["allow", "refuse"]
Repeat = Literal["allow", "ask", "refuse"]
ForeignPayments = Literal["refuse", "book", "allow"]
UnexplainedTransfer = Literal["warn", "trip"]
UnknownLlmHosts = Literal["event", "refuse"]

_SCHEMES: Final = frozenset({"exact", "upto"})
_MAX_LIFETIME_S: Final = 86_400
_HOST: Final = re.compile(r"((\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(:(?P<port>[0-9]{1,5}))?", re.ASCII)
_LAST_PORT: Final = 65_535


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What may be paid, to whom, where and how. ``None`` means: any known value.

    Args:
        per_payment_cap: the most that one payment may cost, in dollars; None for no cap except the budget.
        networks: CAIP-2 or v1 names; by default the test networks. A v1 name includes its CAIP-2 twin.
        hosts: host names, ``host:port``, or ``*.example.com`` for all below a domain (and not the domain itself).
        payees: addresses that may be paid.
        facilitators: addresses that may settle an ``upto``; None: the first three that an origin shows (``Seller``: any).
        assets: symbols or contract addresses from the registry.
        schemes: ``exact``, ``upto``.
        flows: values of ``extra.paymentFlow``; only ``authorization`` pays after delivery is promised.
        max_lifetime_s: the longest validity of a signature, in seconds (10 to 86,400).
        resource_mismatch: if an offer names another host than the request: ``warn`` or ``refuse``.
        upto_at_ceiling: if a payee's last twenty ``upto`` settlements took the ceiling: ``warn`` (event) or ``refuse``.
        sellers: host, ``host:port`` or ``*.domain`` → ``Seller``: what that seller may do beyond other ones.
        payee_change: if an origin that has kept one payee names a new one: ``allow`` (honest sellers rotate) or ``refuse``.
        repeat: if the run has bought the same request before (method, URL and body, however they are spelt) and was given
            its answer: ``allow``, ``ask`` an approver, or ``refuse``. It stops that call alone; ``extensions={"pay_again": True}`` passes.
        foreign_payments: if a request has a payment that the guard did not make: ``refuse``, ``book`` (its amount is
            read and charged) or ``allow``.
        unexplained_transfer: if ``reconcile`` finds a Transfer out of the wallet that no payment explains: ``warn`` or
            ``trip`` the wallet, each time, until its owner acknowledges it (``x402guard acknowledge``).
        unknown_llm_hosts: if a request looks like an LLM call (path and body) to a host that is not metered: ``event`` (it
            is sent, and told of once a host) or ``refuse``, unless ``hosts`` or ``sellers`` names it.
        latch_days: days after which what was last seen of a host, an origin or a payee is held against no later offer
            (1 to 3,650); None for never. ``x402guard latches`` lists what refuses now.
        reorg_exposure: dollars of all remainders of ``upto`` payments that may be used before their blocks are final; a
            block that is undone makes them count again. None: a remainder comes back with the owner's finality.
        unsafe_pay_after_redirect: pay an origin that a redirect led to.
        rules: the owner's own rules; None for none.
        risk: which tools run, and which need approval; None turns risk levels off.
        approvals: which amounts need approval, and how long an answer may take.
        breaker: when the circuit of a payee, host or tool opens; None for never.
        bulkhead: how many calls to one host or tool may run at once; None for no limit.
        timeouts: how long a call, a step and the run may take.
        soft_limits: the parts of a budget (0 < part < 1, such as 0.9) that send a notice, each once; () for none.
        loop: when a repeated call is a loop; None for no loop detector.
        spike: when a step costs too much compared with earlier steps; None for no spike detector.
        velocity: how fast a run may spend; None for no such limits.
        max_steps: the most payments, LLM calls and tool uses, all together, in one run; None for no limit.
        min_confidence: ``session.finish(confidence=…)`` below it, or without one, asks the approver (0 to 1); None for no
            such question.
        max_calls: tool, host, or ``METHOD host/path``, or a pattern of these with ``*`` → the most uses of all that it
            matches in one run.
        wait_for_budget_s: seconds that a call waits in line if it does not fit only because other calls under way hold
            what it needs (0 to 600); then it is refused.

    Raises ``ConfigError`` naming the setting, also for an empty collection: it reads like "none", but would mean "any".
    """

    per_payment_cap: Dollars | None = "$1.00"
    networks: Collection[str] | None = TEST_NETWORKS
    hosts: Collection[str] | None = None
    payees: Collection[str] | None = None
    facilitators: Collection[str] | None = None
    assets: Collection[str] | None = None
    schemes: Collection[str] = _SCHEMES
    flows: Collection[str] = frozenset({"authorization"})
    max_lifetime_s: int = 300
    resource_mismatch: ResourceMismatch = "warn"
    upto_at_ceiling: UptoAtCeiling = "warn"
    sellers: Mapping[str, Seller] = field(default_factory=dict, hash=False)
    payee_change: PayeeChange = "allow"
    repeat: Repeat = "allow"
    foreign_payments: ForeignPayments = "refuse"
    unexplained_transfer: UnexplainedTransfer = "warn"
    unknown_llm_hosts: UnknownLlmHosts = "event"
    latch_days: int | None = 30
    reorg_exposure: Dollars | None = None
    unsafe_pay_after_redirect: bool = False
    rules: Collection[Rule] | None = None
    risk: Risk | None = field(default_factory=Risk)
    approvals: Approvals = field(default_factory=Approvals)
    breaker: Breaker | None = field(default_factory=Breaker)
    bulkhead: Bulkhead | None = field(default_factory=Bulkhead)
    timeouts: Timeouts = field(default_factory=Timeouts)
    soft_limits: SoftLimits = (0.5, 0.8, 0.9)
    loop: Loop | None = field(default_factory=Loop)
    spike: Spike | None = field(default_factory=Spike)
    velocity: Velocity | None = field(default_factory=Velocity)
    max_steps: int | None = None
    min_confidence: float | None = None
    max_calls: Mapping[str, int] = field(default_factory=dict, hash=False)
    wait_for_budget_s: int = 10
    most_exposed: Nanos = field(init=False, repr=False, compare=False, default=Nanos(0))
    cap_nanos: Nanos | None = field(init=False, repr=False, compare=False, default=None)
    soft_parts: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())
    guards: tuple[StepGuard, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        self._set("cap_nanos", _cap(self.per_payment_cap))
        if self.reorg_exposure is not None:
            self._set("most_exposed", check_dollars("policy.reorg_exposure", self.reorg_exposure))
        self._set("networks", each_of("policy.networks", self.networks, _network))
        self._set("hosts", each_of("policy.hosts", self.hosts, as_host))
        self._set("payees", each_of("policy.payees", self.payees, parse_address))
        self._set("facilitators", each_of("policy.facilitators", self.facilitators, parse_address))
        self._set("assets", each_of("policy.assets", self.assets, _asset))
        for name in ("schemes", "flows"):
            if getattr(self, name) is None:
                raise ConfigError(f"policy.{name}: None is not a choice; name what is allowed, or leave it out")
        self._set("schemes", each_of("policy.schemes", self.schemes, _scheme))
        self._set("flows", each_of("policy.flows", self.flows, _text))
        check_whole("policy.max_lifetime_s", self.max_lifetime_s, MIN_LIFETIME_S, _MAX_LIFETIME_S, what="of seconds ")
        check_whole("policy.latch_days", self.latch_days, 1, 3_650, what="of days ", optional=True)
        check_whole("policy.wait_for_budget_s", self.wait_for_budget_s, 0, 600, what="of seconds ")
        check_flag("policy.unsafe_pay_after_redirect", self.unsafe_pay_after_redirect)
        self._set("sellers", MappingProxyType(_sellers(self.sellers)))
        for name, choices in _CHOICES.items():
            check_choice(f"policy.{name}", getattr(self, name), choices)
        for name, (kind, example, optional) in _PARTS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and not (optional and value is None):
                write = f"write {kind.__name__}({example})" + (", or None" if optional else "")
                raise ConfigError(f"policy.{name}: {value!r} is not of type {kind.__name__}; {write}")
        self._set("rules", check_rules(self.rules))
        self._set("soft_parts", parts_of("policy.soft_limits", self.soft_limits))
        least = self.min_confidence
        if least is not None and (isinstance(least, bool) or not isinstance(least, int | float) or not 0 <= least <= 1):
            raise ConfigError(f"policy.min_confidence: {least!r:.60} is not a number from 0 to 1")
        check_whole("policy.max_steps", self.max_steps, 1, optional=True)
        if not isinstance(self.max_calls, Mapping):
            raise ConfigError(f'policy.max_calls: {self.max_calls!r} is not a mapping; write {{"serp": 50}}')
        for name, most in self.max_calls.items():
            check_whole(f"policy.max_calls[{name!r}]", most, 1)
        self._set("max_calls", MappingProxyType(check_patterns("policy.max_calls", self.max_calls)))
        counts = Counts(self.max_steps, self.max_calls) if self.max_steps is not None or self.max_calls else None
        velocity = self.velocity
        about = (None, None) if velocity is None else (velocity.new_payees_per_day, velocity.percent_per_payee)
        listed = frozenset(self.payees or ())
        sellers = SellerLimits(*about, self.sellers, listed) if velocity is not None or self.sellers else None
        ratio = None if velocity is None else velocity.price_ratio
        prices = None if ratio is None else Prices(ratio, self.latch_days)
        guards = (self.timeouts, self.breaker, counts, self.loop, velocity, sellers, self.spike, prices)
        self._set("guards", tuple(guard for guard in guards if guard is not None))

    @cached_property
    def acting(self) -> Mapping[tuple[Moment, HoldKind, bool], tuple[Callable[..., Any], ...]]:
        """The methods of the guards that do something, by moment, kind of step, and *late* (see ``StepGuard.acts``)."""
        return {
            (moment, kind, late): tuple(
                getattr(guard, moment) for guard in self.guards if guard.acts(moment, kind, late=late)
            )
            for moment in get_args(Moment)
            for kind in HoldKind
            for late in (False, True)
        }

    @cached_property
    def plain(self) -> Mapping[HoldKind, tuple[Callable[..., Any], ...]]:
        """``StepGuard.plainly`` of each guard that does something before a step of a kind, or as it is taken."""
        acting = {
            kind: [g for g in self.guards if any(g.acts(moment, kind, late=late) for moment, late in _OF_A_STEP)]
            for kind in HoldKind
        }
        return {kind: tuple(guard.plainly for guard in guards) for kind, guards in acting.items()}

    @classmethod
    def careful(cls, **changes: Any) -> Self:
        """Return a policy for real money in new hands: it asks and refuses early. *changes* are arguments of ``Policy``."""
        return cls(**{**_CAREFUL, **changes})

    @classmethod
    def balanced(cls, **changes: Any) -> Self:
        """Return the policy of a guard that is given none, with *changes*."""
        return cls(**changes)

    @classmethod
    def permissive(cls, **changes: Any) -> Self:
        """Return a policy that leaves an agent alone within its budget: it refuses what only an attack or a fault does.

        The budgets, the cap of one payment and the networks still hold. *changes* are arguments of ``Policy``.
        """
        return cls(**{**_PERMISSIVE, **changes})

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


_OF_A_STEP: Final[tuple[tuple[Moment, bool], ...]] = (("judge", False), ("judge", True), ("taken", False))
_CAREFUL: Final[Mapping[str, Any]] = {
    "per_payment_cap": "$0.10",
    "resource_mismatch": "refuse",
    "upto_at_ceiling": "refuse",
    "payee_change": "refuse",
    "repeat": "ask",
    "unexplained_transfer": "trip",
    "unknown_llm_hosts": "refuse",
    "approvals": Approvals(above="$0.05"),
    "breaker": Breaker(failures=2, rest_s=120),
    "bulkhead": Bulkhead(per_host=2, per_tool=2),
    "loop": Loop(calls=3, latch_after=2, similar=True),
    "spike": Spike(action="trip"),
    "velocity": Velocity(dollars_per_hour="$1.00", new_payees_per_day=3, percent_per_payee=50),
    "max_steps": 200,
}
_PERMISSIVE: Final[Mapping[str, Any]] = {
    "per_payment_cap": "$10.00",
    "breaker": Breaker(failures=10, rest_s=10),
    "bulkhead": Bulkhead(per_host=64, per_tool=64),
    "loop": Loop(calls=100, latch_after=10),
    "velocity": Velocity(new_payees_per_day=None, price_ratio=None),
    "risk": None,
}

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "resource_mismatch": get_args(ResourceMismatch),
    "upto_at_ceiling": get_args(UptoAtCeiling),
    "payee_change": get_args(PayeeChange),
    "repeat": get_args(Repeat),
    "foreign_payments": get_args(ForeignPayments),
    "unexplained_transfer": get_args(UnexplainedTransfer),
    "unknown_llm_hosts": get_args(UnknownLlmHosts),
}
_PARTS: Final[Mapping[str, tuple[type, str, bool]]] = {
    "loop": (Loop, "calls=10, window_s=60", True),
    "spike": (Spike, "multiplier=3, window=5", True),
    "velocity": (Velocity, "calls_per_minute=60", True),
    "risk": (Risk, 'levels={"wipe_*": "CRITICAL"}', True),
    "approvals": (Approvals, 'above="$0.50"', False),
    "breaker": (Breaker, "failures=3, rest_s=30", True),
    "bulkhead": (Bulkhead, "per_host=8, per_tool=8", True),
    "timeouts": (Timeouts, "payment_s=10", False),
}
"""Setting → (its class, an example of its arguments, whether None is allowed)."""


def _cap(cap: Dollars | None) -> Nanos | None:
    if cap is None:
        return None
    nanos = check_dollars("policy.per_payment_cap", cap)
    if nanos == 0:
        raise ConfigError("policy.per_payment_cap: a cap of zero pays nothing; leave the signer out instead")
    return nanos


def _sellers(sellers: object) -> dict[str, Seller]:
    if not isinstance(sellers, Mapping) or not all(isinstance(each, Seller) for each in sellers.values()):
        example = '{"api.shop.example": Seller(payees="any", daily="$5.00")}'
        raise ConfigError(f"policy.sellers: {sellers!r:.120} is no mapping of hosts to Seller; write {example}")
    try:
        found = {as_host(pattern): seller for pattern, seller in sellers.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"policy.sellers: {error}") from error
    if len(found) < len(sellers):
        raise ConfigError(f"policy.sellers: a host is there twice, in two spellings: {', '.join(sellers):.120}")
    return found


def each_of(setting: str, values: Collection[str] | None, check: Callable[[str], str]) -> frozenset[str] | None:
    """Return a list of the owner's as a set of checked texts; None for None. Raises ``ConfigError`` naming *setting*."""
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Collection):
        raise ConfigError(f"{setting}: write a set or list of texts, such as {{{str(values)!r}}}")
    if not values:
        raise ConfigError(f"{setting}: an empty list would allow nothing; leave it out, or name what is allowed")
    try:
        return frozenset(check(value) for value in values)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{setting}: {error}") from error


def _text(value: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a text")
    return value


def as_host(pattern: str) -> str:
    """Return a host or a ``*.domain`` pattern in lower case. Raises ``ValueError`` for anything else."""
    lower = _text(pattern).lower()
    if "/" in lower:
        name = lower.partition("://")[2].partition("/")[0] or lower.partition("/")[0]
        raise ValueError(f"{pattern!r} is a URL or a path; write the host alone, such as {name!r}")
    found = _HOST.fullmatch(lower)
    if found is None or not 1 <= int(found["port"] or 1) <= _LAST_PORT:
        raise ValueError(f"{pattern!r} is not a host; write 'example.com', 'example.com:8443' or '*.example.com'")
    return lower


def _network(name: str) -> str:
    network = resolve_network(_text(name))
    if network is None:
        near = near_network(name)
        meant = f"did you mean {near!r}?" if near else f"write eip155:<chain id>, or one of {', '.join(V1_NAMES)}"
        raise ValueError(f"{name!r} is not a known network; {meant}")
    return network


def _asset(name: str) -> str:
    return parse_address(name) if _text(name).startswith("0x") else name.upper()


def _scheme(name: str) -> str:
    if name not in _SCHEMES:
        raise ValueError(f"{name!r} is not a supported scheme; write 'exact' or 'upto'")
    return name
