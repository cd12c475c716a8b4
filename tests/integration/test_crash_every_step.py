"""kill -9 at every step of a payment: the books count at least what the chain can still take, and reconciled, what it took.

A fork of its own pays each time and dies before, inside or after one effect of the conversation, or while the merchant settles. The
steps are counted by a run that lives, so that a step nobody thought of is died at as well.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import pytest

from tests.support import postgres
from x402guard import Guard, LocalSigner, Policy
from x402guard.flow.effects import Effect
from x402guard.flow.ports import ChainQuestion
from x402guard.kernel.rows import Delivery, HoldState
from x402guard.stores import open_store
from x402guard.stores.sqlite import SqliteStore
from x402guard.testing import FacilitatorClient, Merchant, Offer, Route, Testnet

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.chain, pytest.mark.slow, pytest.mark.xdist_group("crash_every_step")]

PRICE, CHARGED, LIFE_S = 50_000, 12_345, 300
OFFERS = {
    "eip3009": Offer(price=PRICE),
    "eip3009-v1": Offer(price=PRICE),
    "permit2": Offer(price=PRICE, transfer_method="permit2"),
    "upto": Offer(price=PRICE, scheme="upto"),
}
IN_THE_SERVER = ("settling", "settled")


class Killing(FacilitatorClient):
    """A settler that kills the buyer, whose process id stands in the path, before it settles or before anybody hears of it."""

    def __init__(self, url):
        super().__init__(url)
        self.kills, self.settled, self.done = None, [], threading.Event()

    async def settle(self, payment, requirements, *, path):
        buyer = int(path.rsplit("-", 1)[1])
        if self.kills == "settling":
            os.kill(buyer, signal.SIGKILL)
            await asyncio.sleep(0)
        receipt = await super().settle(payment, requirements, path=path)
        message = payment["payload"]
        nonce = (message.get("authorization") or message["permit2Authorization"])["nonce"]
        self.settled.append((path, f"{int(str(nonce), 0):064x}", receipt))
        if self.kills == "settled":
            os.kill(buyer, signal.SIGKILL)
        self.done.set()
        return receipt


@dataclass
class Life:
    """One run of a child: how it ended, and what it said up to then."""

    code: int
    steps: list = field(default_factory=list)
    signed: list = field(default_factory=list)
    url: str = ""
    ended: str = ""


class Zygote:
    """The process that everything dies in; see ``dying``."""

    def __init__(self, folder):
        self._folder, self._count = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked_buyer"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def live(self, **order) -> Life:
        self._count += 1
        told = self._folder / f"told-{self._count}"
        self._process.stdin.write(json.dumps({"told": str(told), "at": None, **order}) + "\n")
        self._process.stdin.flush()
        life = Life(int(self._process.stdout.readline()))
        for line in told.read_text().splitlines():
            kind, _, rest = line.partition(" ")
            if kind in ("url", "ended"):
                setattr(life, kind, rest)
            else:
                {"step": life.steps, "signed": life.signed}[kind].append(rest)
        return life

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


class World:
    """A chain, a merchant that sells in one way, and one ledger."""

    def __init__(self, zygote, folder, scheme, mode="sync", store="sqlite"):
        self.zygote, self.mode, self.path = zygote, mode, folder / f"{scheme}-{mode}.db"
        self.url = f"sqlite:///{self.path}" if store == "sqlite" else postgres.empty_database()
        version = 1 if scheme.endswith("v1") else 2
        route = Route(
            name="sold", path="/sold/{n}", answer=lambda _: {}, offers=(OFFERS[scheme],), version=version,
            charge=CHARGED if scheme == "upto" else None, max_timeout_s=LIFE_S,
        )  # fmt: skip
        self.net, self.ahead_s = Testnet(), 0
        # Worlds share a server, whose ledger is emptied between them: to what a life of another one has left, it has lost entries.
        self.state = os.environ["XDG_STATE_HOME"]
        self.settler = Killing(self.net.facilitator)
        self.merchant = Merchant(settler=self.settler, payee=self.net.payee, routes=(route,)).start()
        self.before = self.net.balance(self.net.payer)

    def live(self, session="", **order) -> Life:
        self.settler.done.clear()
        fixed = {"ledger": self.url, "chain": [self.net.network, self.net.rpc], "key": self.net.payer_key}
        fixed["state"] = self.state
        fixed |= {"session": session, "mode": self.mode, "task": "buy", "ahead_s": self.ahead_s}
        fixed["url"] = f"{self.merchant.url}/sold/{session}-{{pid}}"
        return self.zygote.live(**fixed | order)

    def die(self, session, number, step, **order) -> Life:
        """Die at one step; what the merchant was at is waited for."""
        self.settler.kills = step if step in IN_THE_SERVER else None
        life = self.live(session, at=None if step in IN_THE_SERVER else number, **order)
        assert life.code == -signal.SIGKILL, (step, life)
        if step in IN_THE_SERVER:
            assert self.settler.done.wait(30)
        self.settler.kills = None
        return life

    def taken(self, session) -> dict:
        """Nonce → atomic units that the chain shows were taken for a session."""
        amounts = {transfer.transaction: transfer.amount for transfer in self.net.transfers()}
        return {
            nonce: amounts[receipt["transaction"]]
            for path, nonce, receipt in self.settler.settled
            if receipt["success"] and path.startswith(f"/sold/{session}-")
        }

    def counted(self, session, path=None) -> int:
        store = open_store(self.url if path is None else f"sqlite:///{path}")
        try:
            nodes = {node.id: node for node in store.nodes(session)}
            return (nodes[session].spent + nodes[session].live) // 1000 if session in nodes else 0
        finally:
            store.close()

    def holds(self, session) -> list:
        store = open_store(self.url)
        try:
            known = dict.fromkeys([*(hold.id for hold in store.outstanding()), *store.unsettled(0)])
            return [hold for hold in map(store.hold, known) if hold.node_id == session]
        finally:
            store.close()

    def pass_the_deadline(self):
        self.net.advance(LIFE_S + 100)
        self.ahead_s += LIFE_S + 100

    def reconcile(self, path=None):
        url = self.url if path is None else f"sqlite:///{path}"
        store = open_store(url, clock_ms=lambda: time.time_ns() // 10**6 + self.ahead_s * 1000)
        signer, chains = LocalSigner.from_key(self.net.payer_key), {self.net.network: self.net.rpc}
        with Guard(
            signer=signer, ledger=store, chains=chains, policy=Policy(breaker=None), background_checks=False
        ) as guard:
            result = guard.reconcile()
            live = [hold.id for hold in store.outstanding() if hold.state is HoldState.HELD]
        store.close()
        assert (live, result.still_open, result.unreadable, result.unexplained) == ([], 0, {}, [])
        assert result.complete
        return result

    def close(self):
        self.merchant.close()
        self.net.close()


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    made = Zygote(tmp_path_factory.mktemp("dying"))
    yield made
    made.close()


@pytest.fixture
def world(request, zygote, tmp_path):
    made = World(zygote, tmp_path, *request.param)
    yield made
    made.close()


def steps_of(world, **order) -> list:
    """Count the steps by a run that lives; then those inside the server."""
    life = world.live("lives", **order)
    assert (life.code, life.ended) == (0, "200")
    return [*life.steps, *IN_THE_SERVER]


def check(world, session, life, number, steps):
    """The counted is never less than what can still be taken; return what was taken so far."""
    step = steps[number]
    if step not in IN_THE_SERVER:
        assert life.steps == steps[: number + 1], "the same conversation goes the same way"
    taken = world.taken(session)
    exposed = PRICE * len(set(life.signed) - set(taken))
    counted = world.counted(session)
    assert counted >= sum(taken.values()) + exposed, step
    assert counted <= PRICE, step
    return taken


def settle_up(world, sessions):
    """Past every deadline, one reconcile makes the books say of each session what the chain took of it, and of all together."""
    world.pass_the_deadline()
    result = world.reconcile()
    assert result.contradicted == []
    taken = {session: sum(world.taken(session).values()) for session in sessions}
    assert {session: world.counted(session) for session in sessions} == taken
    assert world.before - world.net.balance(world.net.payer) == sum(taken.values())
    again = world.reconcile()
    assert (again.captured, again.expired, again.freed, again.added) == (0, 0, 0, 0)
    return result


def left_alone(mode):
    """Every way to pay; two of them, that go through the same steps as the other two, in ``make test-long``.

    One on PostgreSQL, in ``make test-fleet``.
    """
    later = {"eip3009-v1", "permit2"}
    ways = [
        pytest.param((scheme, mode), marks=[pytest.mark.long] * (scheme in later), id=f"{scheme}-{mode}")
        for scheme in OFFERS
    ]
    there = pytest.param(
        ("upto", mode, "postgres"), marks=[pytest.mark.long, pytest.mark.fleet], id=f"upto-{mode}-postgres"
    )
    return [*ways, there]


@pytest.mark.parametrize("world", left_alone("async"), indirect=True)
def test_killed_at_any_step_the_books_count_what_can_be_taken_and_reconciled_what_was(world):
    steps = steps_of(world)
    for number, step in enumerate(steps):
        life = world.die(f"s{number}", number, step)
        check(world, f"s{number}", life, number, steps)
    sessions = ["lives", *(f"s{number}" for number in range(len(steps)))]
    result = settle_up(world, sessions)
    settled = {len(world.taken(session)) for session in sessions}
    assert settled == {0, 1}
    assert result.expired >= 4  # held and never signed; signed and never shown


@pytest.mark.long
@pytest.mark.parametrize("world", left_alone("sync"), indirect=True)
def test_killed_at_any_step_and_asked_again_the_same_payment_is_presented(world):
    steps = steps_of(world)
    presented, sessions = 0, ["lives"]
    for number, step in enumerate(steps):
        if step.startswith("before"):
            continue  # what comes after the effect before it: the same moment, and died at above
        session = f"s{number}"
        sessions.append(session)
        first = world.die(session, number, step)
        before = check(world, session, first, number, steps)
        left = [hold for hold in world.holds(session) if hold.delivery is not Delivery.DONE]
        again = world.live(session, url=first.url)
        assert again.code == 0
        if left:
            presented += 1
            assert {*first.signed, *again.signed} == {left[0].id}, step
            assert again.ended == ("PaidNotDelivered" if before else "200"), step
        else:  # nothing was held yet, or its whole answer was handed over
            assert (len(again.signed), again.ended) == (1, "200"), step
            assert first.signed == sorted(before), step
        assert len(world.taken(session)) == len({*first.signed, *again.signed}), step
    assert presented >= 7
    settle_up(world, sessions)


def test_killed_at_any_step_of_asking_a_person_nothing_is_held_while_nobody_has_answered(zygote, tmp_path):
    world = World(zygote, tmp_path, "eip3009")
    try:
        steps = steps_of(world, asks=True)
        asked = range(steps.index("before Ask") - 3, steps.index("before Checkpoint"))
        held = {}
        for number in asked:
            life = world.die(f"s{number}", number, steps[number], asks=True)
            check(world, f"s{number}", life, number, steps)
            held[number] = world.counted(f"s{number}")
        settle_up(world, ["lives", *(f"s{number}" for number in asked)])
    finally:
        world.close()
    assert all(held[number] == 0 for number in asked if number <= steps.index("after Ask"))
    assert held[asked[-1]] == PRICE


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.long)], ids=["each third", "each"])
def test_killed_at_any_step_of_reconciling_the_next_one_ends_it(zygote, tmp_path, every):
    """Every copy of one ledger is reconciled by somebody who dies on the way, and then by somebody who lives."""
    world = World(zygote, tmp_path, "upto")
    try:
        steps = steps_of(world)
        sold = ["lives"]
        claimed = max(number for number, step in enumerate(steps) if step == "after Transact")  # the claim is written
        for number in (claimed, steps.index("after Sign"), steps.index("settled")):
            sold.append(f"{number}_{steps[number].replace(' ', '_')}")
            world.die(sold[-1], number, steps[number])
        world.pass_the_deadline()
        taken = {session: sum(world.taken(session).values()) for session in sold}
        assert list(taken.values()) == [CHARGED, CHARGED, 0, CHARGED]

        def copied(name):
            for end in ("", "-wal"):
                shutil.copy(f"{world.path}{end}", f"{tmp_path / name}{end}")
            SqliteStore(tmp_path / name, accept_file=True).close()  # each is the ledger of a life of its own
            return {"ledger": f"sqlite:///{tmp_path / name}", "task": "reconcile"}

        counted = world.live(**copied("whole.db")).steps
        assert {"before HoldStatus", "before WalletTransfers", "inside Transact"} <= set(counted)
        for number, step in [*enumerate(counted)][::every]:
            life = world.live(at=number, **copied(f"{number}.db"))
            assert (life.code, life.steps) == (-signal.SIGKILL, counted[: number + 1])
            for session in sold:
                assert world.counted(session, tmp_path / f"{number}.db") >= taken[session], step
            world.reconcile(tmp_path / f"{number}.db")
            for session in sold:
                assert world.counted(session, tmp_path / f"{number}.db") == taken[session], step
    finally:
        world.close()


NOT_DIED_AT = {
    "TransferNonce": "asked for a Transfer that no proof in the books explains; see test_chain_wallet",
    "Compute": "reads a large body, with nothing held and nothing written; a small one is read in the flow itself",
    "HeadTime": "asked before the first payment on a real network, with nothing held and nothing signed; see test_a80_clock",
    "TokenFacts": "asked before a payment in a token that was added, with nothing held and nothing signed; see test_a61_tokens",
}


def test_every_effect_that_there_is_was_died_at(zygote, tmp_path):
    """A new kind of effect has to be died at, or to say why not."""
    world = World(zygote, tmp_path, "eip3009")
    try:
        paid = world.live("lives", asks=True).steps
        reconciled = world.live(task="reconcile").steps
    finally:
        world.close()
    seen = {step.split()[1] for step in paid + reconciled}
    known = {
        kind.__name__ if hasattr(kind, "__name__") else kind.__origin__.__name__
        for kind in (*get_args(Effect), *get_args(ChainQuestion))
    } - {"AskChain"}
    assert known - seen == set(NOT_DIED_AT), seen
