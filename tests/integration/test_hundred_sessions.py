"""A hundred sessions at once, five of them runaway: those five are stopped, the others finish, and the wallet is their sum."""

from decimal import Decimal

import anyio
import httpx
import pytest

from tests.support.sdks import LIMITED, MINI, metering
from x402guard import AsyncGuardedTransport, Guard, LocalSigner, Loop, PaymentRefused, Policy, Velocity
from x402guard.testing import Completion, LlmServer, Testnet

pytestmark = [
    pytest.mark.chain,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("hundred_sessions"),
]

CENT = 10_000
RUNAWAY = {7: "pays", 23: "pays", 48: "asks", 61: "charges", 99: "charges"}
LIMIT = 6
"""Identical calls that pass; a runaway session tries thirty."""


@pytest.fixture(scope="module")
def net():
    with Testnet() as net:
        yield net


@pytest.fixture(scope="module")
def server():
    with LlmServer() as server:
        server.reply = Completion()
        yield server


class Agent:
    """One session's agent, on a real chain and a real model's server."""

    def __init__(self, guard, net, server, number):
        self.session = guard.session(f"agent {number}", budget="$0.20", id=f"a{number}")
        self.net, self.server, self.number = net, server, number
        self.refused = []

    async def pays(self, http, what):
        reply = await http.get(f"{self.net.merchant.url}/cents/{what}")
        assert reply.status_code == 200

    async def asks(self, http, what):
        body = {**LIMITED, "messages": [{"role": "user", "content": str(what)}]}
        reply = await http.post(f"{self.server.base('openai')}/v1/chat/completions", json=body)
        assert reply.status_code == 200

    async def charges(self, _http, what):
        await anyio.to_thread.run_sync(lambda: self.session.charge("serp", "$0.001", arguments={"q": what}))

    async def works(self):
        """Two questions, three searches and one payment, as an honest agent would."""
        steps = [self.asks, self.charges, self.pays, self.charges, self.asks, self.charges]
        async with self._http() as http, self.session:
            for number, step in enumerate(steps):
                await step(http, f"{self.number}-{number}")

    async def runs_away(self, way):
        async with self._http() as http, self.session:
            for _ in range(30):
                try:
                    await getattr(self, way)(http, self.number)
                except PaymentRefused as refused:
                    self.refused.append(refused.rule)

    def _http(self):
        return httpx.AsyncClient(transport=AsyncGuardedTransport(self.session), trust_env=False, timeout=60)


@pytest.mark.parametrize("ledger", ["memory", "sqlite"])
def test_five_of_a_hundred_are_stopped_and_the_others_finish(net, server, tmp_path, ledger):
    url = "memory://" if ledger == "memory" else f"sqlite:///{tmp_path / 'spend.db'}"
    policy = Policy(
        loop=Loop(calls=LIMIT, window_s=600, latch_after=1), velocity=Velocity(new_payees_per_day=1), breaker=None
    )
    signer, chains = LocalSigner.from_key(net.payer_key), {net.network: net.rpc}
    moved_before = len(net.transfers())
    with Guard(
        signer=signer, ledger=url, chains=chains, policy=policy, budget="$100", metering=metering(server)
    ) as guard:
        agents = [Agent(guard, net, server, number) for number in range(100)]

        async def everybody():
            async with anyio.create_task_group() as tasks:
                for agent in agents:
                    way = RUNAWAY.get(agent.number)
                    tasks.start_soon(*((agent.runs_away, way) if way else (agent.works,)))

        anyio.run(everybody)
        nodes = {node.id: node for node in guard.shell.store.nodes()}
        reports = [agent.session.report().to_dict() for agent in agents]
    tripped = {number for number, report in enumerate(reports) if report["state"] == "tripped"}
    assert tripped == set(RUNAWAY)
    assert {report["state"] for number, report in enumerate(reports) if number not in RUNAWAY} == {"closed"}
    each = {"pays": Decimal("0.01"), "asks": MINI, "charges": Decimal("0.001")}
    for number, report in enumerate(reports):
        way = RUNAWAY.get(number)
        if way is None:
            assert Decimal(report["spent"]) == each["pays"] + 2 * each["asks"] + 3 * each["charges"]
            assert (report["terminated_by"], report["refusals"]) == (None, [])
        else:
            assert Decimal(report["spent"]) == LIMIT * each[way]
            assert report["terminated_by"] == "loop_detected"
            assert agents[number].refused == ["loop_detected", *["session_tripped"] * (29 - LIMIT)]
    wallet = nodes["wallet"]
    assert Decimal(wallet.spent) / 10**9 == sum(Decimal(report["spent"]) for report in reports)
    assert (wallet.live, {Decimal(report["held"]) for report in reports}) == (0, {Decimal(0)})
    moved = [transfer.amount for transfer in net.transfers()[moved_before:]]
    assert moved == [CENT] * (95 + 2 * LIMIT)
    assert sum(Decimal(report["payments"]["total"]) for report in reports) * 10**6 == sum(moved)
