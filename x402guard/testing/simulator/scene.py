"""Sets a run up: its time, chain, machines, processes, sellers and budgets, all drawn from the seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from x402guard.assets import AssetRegistry
from x402guard.chain.reader import RpcChainReader
from x402guard.chain.settings import Finality
from x402guard.errors import ConfigError
from x402guard.evm import parse_address
from x402guard.llm import Metering, ModelPrice
from x402guard.policy import Approvals, Breaker, Bulkhead, Loop, Policy, Rule, Spike, Velocity
from x402guard.testing.simulator.case import Case, Flavour
from x402guard.testing.simulator.chain import SimChain
from x402guard.testing.simulator.draws import Draws
from x402guard.testing.simulator.endpoints import Endpoint, SimRpc
from x402guard.testing.simulator.hostile import HostileSeller
from x402guard.testing.simulator.machine import Machine, SimProcess, TrueTime
from x402guard.testing.simulator.market import Seller, Want
from x402guard.testing.simulator.world import BrokenActor, World

KEY: Final = "0x" + "11" * 32
"""The key that signs in simulations. It holds nothing anywhere."""

_NETWORKS: Final = ("eip155:84532", "eip155:8453")
_DAY_MS: Final = 86_400_000
_BEGAN_MS: Final = 1_800_057_600_000  # a midnight in UTC
_SCHEMES: Final[Mapping[Flavour, Sequence[str]]] = {
    "mixed": ("exact", "exact", "v1", "permit2", "upto"),
    "dense": ("exact", "v1", "permit2", "permit2", "upto", "upto"),
    "midnight": ("exact", "exact", "v1", "permit2", "upto"),
    "remainders": ("upto", "upto", "upto", "exact"),
    "nodes": ("exact", "permit2", "permit2", "upto", "upto"),
    "forks": ("exact", "exact", "v1", "permit2", "upto"),
    "away": ("exact", "exact", "v1", "permit2", "upto"),
    "busy": ("exact", "exact", "v1", "permit2", "upto"),
}
_PRICES: Final[Mapping[Flavour, Sequence[int]]] = {
    "mixed": (1_000, 10_000, 10_000, 20_000, 50_000, 100_000, 7_777),
    "dense": (1_000, 10_000, 10_000, 50_000, 7_777),
    "midnight": (10_000, 20_000, 50_000, 100_000),
    "remainders": (20_000, 50_000, 100_000),
    "nodes": (1_000, 10_000, 7_777),
    "forks": (1_000, 5_000, 10_000, 10_000, 50_000),
    "away": (1_000, 10_000, 20_000, 50_000),
    "busy": (1_000, 5_000, 7_777, 10_000),
}

_EXPOSURES: Final[Mapping[Flavour, Sequence[str | None]]] = {"remainders": ("$0.02", "$0.10", "$1.00")}
_ENDPOINTS: Final[Mapping[Flavour, int]] = {"nodes": 1, "forks": 3}
_WANTS: Final[Mapping[Flavour, int]] = {"dense": 60, "busy": 240}


class _Characters:
    """Counts four characters as a token, for the meter of a run."""

    ready: Final = True

    def count(self, text: str, *, provider: str, model: str) -> int:  # noqa: ARG002 - of the protocol
        return max(1, len(text) // 4)


METERING: Final = Metering(
    models={"sim-1": ModelPrice(input="2.50", output="10.00", max_output=4_096)}, counter=_Characters()
)


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """A session that processes open: its id, its budget and its reserve, and the named budgets around it."""

    id: str
    budget: str
    reserve: str | None
    tokens: int
    above: tuple[tuple[str, str, str | None], ...]
    """Name, limit and window of each named budget around it, the outermost first."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A run as it begins."""

    world: World
    wants: list[Want]
    sellers: list[Seller]
    plans: list[SessionPlan]
    rpcs: list[SimRpc]


def set_scene(case: Case, sellers: Sequence[Seller], policy: Policy | None, *, trace: list[str] | None) -> Scene:
    """Return the scene of a run. *sellers* and *policy* take the place of the drawn ones, if they are given."""
    draws = Draws.named(case.seed, "scene")
    dense, midnight, busy = case.plays == "dense", case.plays in ("midnight", "remainders"), case.plays == "busy"
    mix = case.mix()
    time = TrueTime(_BEGAN_MS - draws.pick((20, 60, 120) if midnight else (30, 120, 400, 3_600, 40_000)) * 1_000)
    network = _allowed(policy, draws.pick((_NETWORKS[0], *_NETWORKS)))
    [asset] = [each for each in AssetRegistry().on(frozenset({network})) if each.symbol == "USDC"]
    chain = SimChain(Draws.named(case.seed, "chain"), time.unix, *_pace(draws, case.plays))
    endpoints = [Endpoint() for _ in range(_ENDPOINTS.get(case.plays) or draws.pick((1, 1, 2, 3)))]
    machines = [Machine(f"m{number}", time) for number in range(draws.pick((1, 1, 2, 3)))]
    for machine in machines if mix["clock"] else ():
        machine.skew_ms = draws.pick((0, 0, 0, -100_000, -250_000))
    world = World(case.seed, time, mix, asset, chain, endpoints, machines, trace=trace)
    rpcs: list[SimRpc] = []
    blind = draws.chance(0.06)
    wallet = draws.pick(("$0.30", "$3.00", "$50.00", "$50.00", None, None))
    wallet = wallet and ("$9000.00" if busy else "$50.00" if dense or midnight else wallet)
    for number in range(draws.pick((1, 2, 2, 3))):
        machine = draws.pick(machines)
        reads = not blind and (number == 0 or draws.chance(0.8))
        settings: dict[str, Any] = {
            "policy": policy or _policy(draws, network, case.plays),
            "flight_s": draws.pick((2, 10, 30, 30, 60)),
            "chains": _reader(case, world, number, draws, rpcs) if reads else None,
            "unsafe_no_chain": not reads or draws.chance(0.2) or policy is not None,  # it may allow more networks
            "unsafe_trust_receipts": False,
            "metering": METERING,
            "approver": (lambda _request: False) if draws.chance(0.8) else None,
            "budget": wallet if number == 0 else None,
        }
        world.processes.append(SimProcess(f"p{number}", machine, settings))
    shops = list(sellers) or [
        _seller(case, number, draws) for number in range(1 if case.plays == "nodes" else draws.pick((1, 2, 3)))
    ]
    for number, seller in enumerate(shops):
        seller.payee = _payee_of(seller) or str(parse_address("0x" + f"{number + 1:02x}" * 20))
    many = _WANTS.get(case.plays) or draws.pick((6, 12, 24))
    wants = [_want(number, draws, shops, case.plays) for number in range(many)]
    plans = _large_plans(draws) if busy else _plans(draws, dense=dense, midnight=midnight)
    return Scene(world, wants, shops, plans, rpcs)


def _allowed(policy: Policy | None, drawn: str) -> str:
    """Return the network of a run: the drawn one, or another one that the caller's own policy allows."""
    if policy is None or policy.networks is None or drawn in policy.networks:
        return drawn
    allowed = [each for each in _NETWORKS if each in policy.networks]
    if not allowed:
        raise ConfigError(f"policy.networks: a run is played on one of {', '.join(_NETWORKS)}; allow one of them")
    return allowed[0]


def _payee_of(seller: object) -> str:
    """Return the address of a seller, or "". Raises ``BrokenActor`` for what is no seller, or has no such address."""
    name = type(seller).__name__
    if not isinstance(seller, Seller):
        raise BrokenActor(f"{name}: it is no Seller; write class {name}(Seller)")
    payee: object = getattr(seller, "payee", None)
    try:
        return str(parse_address(payee)) if payee != "" else ""
    except (TypeError, ValueError) as error:
        raise BrokenActor(f"{name}.payee: {error}; its __init__ calls super().__init__(payee)") from None


def _pace(draws: Draws, flavour: Flavour) -> tuple[int, int]:
    """Return the depth of finality in blocks, and the seconds between two blocks."""
    depth, block_s = draws.pick((0, 1, 2, 3, 6, 12, 64)), draws.pick((2, 2, 6, 12))
    if flavour in ("midnight", "remainders"):
        return 12, 12
    if flavour == "busy":
        return min(depth, 3), 2
    if flavour == "dense" and depth > 1:
        return 64, 12
    return depth, 12 if flavour == "nodes" else block_s


def _reader(case: Case, world: World, number: int, draws: Draws, rpcs: list[SimRpc]) -> RpcChainReader:
    network, depth = world.asset.network, world.chain.depth
    rpc = SimRpc(network, world.chain, world.endpoints, Draws.named(case.seed, "rpc", number))
    rpc.hops = draws.pick((0.0, 0.02, 0.1)) if world.mix["rpc_hops"] else 0.0
    rpcs.append(rpc)
    finality: Finality = draws.pick(("finalized", "safe", depth))

    def time_s() -> float:
        return world.time.ms / 1000

    return RpcChainReader.over({network: rpc}, {network: finality}, monotonic_s=time_s, wall_s=time_s)


def _policy(draws: Draws, network: str, flavour: Flavour) -> Policy:
    if draws.chance(0.5):
        return Policy(
            per_payment_cap=None, networks=[network], loop=None, spike=None, velocity=None, bulkhead=None, breaker=None,
            max_lifetime_s=30 if flavour == "nodes" else draws.pick((30, 60, 120, 300)), upto_at_ceiling=draws.pick(("warn", "refuse")),
            soft_limits=(0.5, 0.9), reorg_exposure=draws.pick(_EXPOSURES.get(flavour, (None, None, "$0.02", "$1.00"))),
        )  # fmt: skip
    asks = Rule(name="dear", action="ask", above="$0.04", approvers=draws.pick((1, 2)))
    return Policy(
        per_payment_cap=draws.pick((None, "$0.09")), networks=[network], max_lifetime_s=draws.pick((60, 300)),
        breaker=draws.pick((None, Breaker(), Breaker(failures=1, rest_s=5))),
        bulkhead=draws.pick((None, Bulkhead(), Bulkhead(per_host=1, per_llm_host=1))),
        loop=draws.pick((None, Loop())), spike=draws.pick((None, Spike(action="trip"), Spike())),
        velocity=draws.pick((None, Velocity(dollars_per_minute="$0.20"), Velocity(calls_per_minute=5))),
        repeat=draws.pick(("allow", "allow", "ask", "refuse")), payee_change=draws.pick(("allow", "refuse")),
        rules=draws.pick((None, [asks])),
        approvals=draws.pick((Approvals(), Approvals(above="$0.09", timeout_s=30))),
        max_steps=draws.pick((None, None, 400)),
    )  # fmt: skip


def _seller(case: Case, number: int, draws: Draws) -> Seller:
    own = Draws.named(case.seed, "seller", number)
    mix = case.mix()
    return HostileSeller(own, offers=draws.pick((0, 30, 200)) if mix["offers"] else 0, redirects=mix["redirects"])


def _want(number: int, draws: Draws, sellers: Sequence[Seller], flavour: Flavour) -> Want:
    scheme = draws.pick(_SCHEMES[flavour])
    at = draws.below(len(sellers))
    price = draws.pick(_PRICES[flavour])
    host = f"s{at}{'v1' if scheme == 'v1' else ''}.example"
    return Want(number, sellers[at], scheme, price, draws.chance(0.3), host)


def _plans(draws: Draws, *, dense: bool, midnight: bool) -> list[SessionPlan]:
    team: tuple[tuple[str, str, str | None], ...] = ()
    if midnight:
        team = (("team", draws.pick(("$0.20", "$0.30", "$0.50")), "day"),)
    elif draws.chance(0.6):
        team = (
            (
                "team",
                draws.pick(("$30.00",) if dense else ("$0.20", "$0.60", "$9.00", "$30.00")),
                draws.pick(("day", "day", "week", None)),
            ),
        )
    nested = (*team, ("sub", draws.pick(("$0.15", "$0.40", "$9.00")), draws.pick(("day", None)))) if team else ()
    around = [(), team, nested] if nested and draws.chance(0.4) else [team] if midnight else [(), team]
    plans = []
    for number in range(draws.pick((1, 2, 3))):
        budget = draws.pick(("$20.00",) if dense or midnight else ("$0.10", "$0.50", "$5.00", "$20.00", "$20.00"))
        reserve = draws.pick((None, None, "10%"))
        plans.append(SessionPlan(f"run-{number}", budget, reserve, draws.pick((5_000, 100_000)), draws.pick(around)))
    return plans


def _large_plans(draws: Draws) -> list[SessionPlan]:
    """Return sessions that never lack budget."""
    team = (("team", "$9000.00", draws.pick(("day", "week", None))),)
    return [
        SessionPlan(f"run-{number}", "$4000.00", None, 100_000, draws.pick(((), team)))
        for number in range(draws.pick((1, 2, 3)))
    ]
