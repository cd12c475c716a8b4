"""Facilitators, chains and clocks that lie, from the fixtures that users get: the books end where the chain does."""

import time
from decimal import Decimal

import httpx
import pytest

from tests.support.ledger import a_hold, an_intent
from tests.support.merchant import KEY
from tests.support.refusals import events
from x402guard import BudgetExhausted, Guard, GuardedTransport, LocalSigner, Policy, X402GuardError
from x402guard.chain.reader import Chain, RpcChainReader
from x402guard.frozen import replace
from x402guard.ledger.findings import Unreadable, Unused, Used
from x402guard.stores import open_store
from x402guard.testing import (
    CHAIN_LIES,
    FACILITATOR_LIES,
    FacilitatorClient,
    HostileChain,
    HostileClock,
    HostileFacilitator,
    HostileServer,
    Merchant,
    Testnet,
)

pytest_plugins = ["x402guard.testing.fixtures"]
pytestmark = [pytest.mark.chain, pytest.mark.long, pytest.mark.xdist_group("hostile_world")]

CENT = 10_000
DOLLAR = 10**6


@pytest.fixture(scope="module")
def net():
    with Testnet() as running:
        yield running


def reader_of(network, url, *, timeout_s):
    """A reader that does not wait between two tries."""
    return RpcChainReader({network: Chain(url, timeout_s=timeout_s)}, pause=lambda seconds: None)


class World:
    """A guarded client, and a merchant behind a facilitator that lies."""

    def __init__(self, net, tmp_path, rpc=None, budget="$1.00", facilitator=None):
        self.net = net
        self.clock = HostileClock(int(time.time() * 1000))
        self.store = open_store(f"sqlite:///{tmp_path / 'spend.db'}", clock_ms=self.clock)
        self.facilitator = facilitator or HostileFacilitator(net.facilitator, stall_s=1.0).start()
        self.merchant = Merchant(settler=FacilitatorClient(self.facilitator.url), payee=net.payee).start()
        policy = Policy(breaker=None)
        self.chains = reader_of(net.network, rpc or net.rpc, timeout_s=1.0)
        signer = LocalSigner.from_key(net.payer_key)
        self.guard = Guard(signer=signer, ledger=self.store, chains=self.chains, policy=policy, background_checks=False)
        self.session = self.guard.session("attacked", budget=budget)
        self.http = httpx.Client(transport=GuardedTransport(self.session), base_url=self.merchant.url, trust_env=False)
        self.before = net.balance(net.payer)

    def buy(self, number=1, route="cents"):
        path = self.merchant.routes[route].format(n=number)
        return self.http.post(path, json={}) if route == "llm" else self.http.get(path)

    @property
    def moved(self):
        return self.before - self.net.balance(self.net.payer)

    @property
    def counted(self):
        return int((self.session.spent + self.session.held) * DOLLAR)

    def later(self, seconds):
        self.net.advance(seconds)
        self.clock.forward(seconds)
        self.guard.sweep()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.http.close()
        self.guard.close()
        self.chains.close()
        self.store.close()
        self.merchant.close()
        self.facilitator.close()


MOVES = {
    "honest": 1, "stalls": 0, "success_without_settling": 0, "failure_after_settling": 1, "another_hash": 1,
    "settles_late": 0, "fails": 0, "garbage": 1,
}  # fmt: skip


@pytest.mark.parametrize("route", ["cents", "llm", "permit2"])
@pytest.mark.parametrize("lie", FACILITATOR_LIES)
def test_a03_a_facilitator_that_lies_frees_nothing_that_can_still_be_taken(net, tmp_path, lie, route):
    held = {"cents": CENT, "llm": 5 * CENT, "permit2": 10 * CENT}[route]
    taken = 12_345 if route == "llm" else held
    with World(net, tmp_path) as world:
        world.facilitator.misbehave(lie)
        world.buy(route=route)
        assert world.moved == taken * MOVES[lie]
        assert world.moved <= world.counted <= held
        if not MOVES[lie]:
            assert world.counted == held
        world.clock.forward(10)
        world.guard.sweep()
        assert world.moved <= world.counted <= held
        assert len(world.facilitator.asked) == 1


def test_a03_another_payments_hash_proves_nothing_and_its_own_does(net, tmp_path):
    with World(net, tmp_path) as world:
        for number, lie in enumerate(("honest", "another_hash")):
            world.facilitator.misbehave(lie)
            world.buy(number)
        world.guard.sweep()
        assert (world.moved, world.counted) == (2 * CENT, 2 * CENT)
        proofs = [event["proof"] for event in events(world.session, "correct")]
        assert len(proofs) == len(set(proofs)) == 2
        assert {transfer.transaction for transfer in net.transfers()[-2:]} == {proof.split("/")[1] for proof in proofs}


def test_a14_another_payments_hash_is_a_discrepancy(net, tmp_path):
    with World(net, tmp_path) as world:
        world.buy(1)
        world.facilitator.misbehave("another_hash")
        second = world.buy(2).extensions["x402guard"]
        world.guard.sweep()
        told = {event["event"]: event for event in world.session.report().to_dict()["events"]}
        found = told.get("receipt_shared")
        assert found, "one transaction was shown for two payments, and nobody is told"
        assert found["hold_id"] == second.hold_id


def test_a04_withheld_and_settled_late_is_counted_and_found(net, tmp_path):
    with World(net, tmp_path, budget="$0.015") as world:
        world.facilitator.misbehave("settles_late")
        world.buy(1)
        assert (world.moved, world.counted) == (0, CENT)
        with pytest.raises(BudgetExhausted):
            world.buy(2)
        assert [receipt["success"] for receipt in world.facilitator.settle_late()] == [True]
        world.clock.forward(30)
        world.guard.sweep()
        assert (world.moved, int(world.session.spent * DOLLAR), world.session.held) == (CENT, CENT, 0)


@pytest.mark.parametrize("lie", ["success_without_settling", "settles_late", "stalls", "fails"])
def test_a04_what_never_settled_comes_back_when_it_never_can(testnet, tmp_path, lie):
    with World(testnet, tmp_path) as world:
        world.facilitator.misbehave(lie)
        world.buy(1)
        world.later(290)
        assert world.counted == CENT
        world.later(20)
        assert (world.moved, world.counted) == (0, 0)
        assert not any(receipt["success"] for receipt in world.facilitator.settle_late())


BLIND = sorted(set(CHAIN_LIES) - {"honest", "stale", "denies_transactions", "hides_logs"})


@pytest.mark.parametrize("lie", CHAIN_LIES)
def test_a_chain_that_lies_before_a_payment_makes_none_free(net, tmp_path, lie):
    """Whatever the node says: what moved is counted, and what is settled for certain is never thought unused."""
    with HostileChain(net.engine, stall_s=1.5) as chain, World(net, tmp_path, rpc=chain.url) as world:
        world.buy(1)
        chain.misbehave(lie)
        try:
            world.buy(2)
        except X402GuardError as error:
            assert not error.money_may_have_moved
        assert world.moved <= world.counted
        chain.misbehave("honest")
        world.clock.forward(10)
        world.guard.sweep()
        assert world.moved == world.counted


@pytest.mark.parametrize("lie", BLIND)
def test_could_not_read_is_never_not_settled(net, lie):
    intent = replace(an_intent(), network=net.network, payer=net.payer, token=net.token)
    hold = a_hold(intent=intent)
    with HostileChain(net.engine, behaviour=lie, stall_s=1.5) as chain:
        reader = reader_of(net.network, chain.url, timeout_s=0.5)
        try:
            assert isinstance(reader.read(hold), Unreadable)
            chain.misbehave("honest")
            assert isinstance(reader.read(hold), Unused)
            assert chain.asked
        finally:
            reader.close()


@pytest.mark.parametrize(("lie", "kind"), [("denies_transactions", Unreadable), ("hides_logs", Used)])
def test_a_chain_that_hides_what_was_settled_proves_no_amount(net, tmp_path, lie, kind):
    with HostileChain(net.engine) as chain, World(net, tmp_path, rpc=chain.url) as world:
        assert world.buy(1, route="llm").status_code == 200
        [hold] = world.store.outstanding()
        assert world.counted == 5 * CENT
        chain.misbehave(lie)
        assert isinstance(world.chains.read(hold), kind)
        chain.misbehave("honest")
        assert world.chains.read(hold).amount_atomic == 12_345


def test_a_stale_chain_does_not_expire_what_it_has_not_seen(testnet, tmp_path):
    """The node stopped before the payment; its clock stopped with it, so nothing is ever past its deadline there."""
    with HostileChain(testnet.engine) as chain, World(testnet, tmp_path, rpc=chain.url) as world:
        chain.misbehave("stale")
        world.facilitator.misbehave("failure_after_settling")
        world.buy(1)
        for _ in range(3):
            world.later(300)
            assert (world.moved, world.counted) == (CENT, CENT)
        chain.misbehave("honest")
        world.later(10)
        assert (int(world.session.spent * DOLLAR), world.session.held) == (CENT, 0)


def test_a_stale_chain_stands_at_the_block_at_which_it_was_told_to(testnet, hostile_chain, tmp_path):
    def asked(method, *params):
        call = {"jsonrpc": "2.0", "id": 1, "method": method, "params": list(params)}
        return httpx.post(hostile_chain.url, json=call, trust_env=False).json()["result"]

    def head():
        blocks = [asked("eth_getBlockByNumber", tag, False) for tag in ("latest", "finalized")]
        return {(block["number"], block["timestamp"]) for block in blocks} | {asked("eth_blockNumber")}

    before = head()
    hostile_chain.misbehave("stale")
    with World(testnet, tmp_path) as world:
        world.buy(1)
        testnet.advance(60)
        [moved] = testnet.transfers()
        assert head() == before
        assert asked("eth_getTransactionReceipt", moved.transaction) is None
        hostile_chain.misbehave("honest")
        assert head() != before
        assert asked("eth_getTransactionReceipt", moved.transaction)["status"] == "0x1"


def test_the_fixtures_are_one_world(hostile_chain, hostile_facilitator, hostile_server, hostile_clock, testnet):
    assert isinstance(hostile_server, HostileServer)
    assert httpx.get(hostile_server.url_of("honest"), trust_env=False).status_code == 402
    reader = RpcChainReader({testnet.network: hostile_chain.url})
    try:
        assert reader.funds(testnet.network, testnet.token, testnet.payer).balance == 1_000 * DOLLAR
    finally:
        reader.close()
    kinds = httpx.get(f"{hostile_facilitator.url}/supported", trust_env=False).json()["kinds"]
    assert {kind["scheme"] for kind in kinds} == {"exact", "upto"}
    before = hostile_clock()
    hostile_clock.jump(-60)
    hostile_clock.stand(30)
    assert (hostile_clock() - before, hostile_clock.steady()) == (-60_000, 30_000)
    hostile_clock.forward(1.5)
    assert (hostile_clock() - before, hostile_clock.steady()) == (-58_500, 31_500)
    with pytest.raises(ValueError, match="backwards"):
        hostile_clock.forward(-1)


@pytest.mark.parametrize("made", ["hostile_server", "hostile_chain", "hostile_facilitator"])
def test_an_unknown_way_to_misbehave_is_said_so(request, made):
    world = request.getfixturevalue(made)
    with pytest.raises(KeyError, match="nonsense"):
        world.url_of("nonsense") if made == "hostile_server" else world.misbehave("nonsense")
    nearly, meant = {
        "hostile_server": ("lost_anwser", "lost_answer"),
        "hostile_chain": ("stals", "stale"),
        "hostile_facilitator": ("settle_late", "settles_late"),
    }[made]
    with pytest.raises(KeyError, match=f"did you mean {meant}\\?"):
        world.url_of(nearly) if made == "hostile_server" else world.misbehave(nearly)


def test_a14_one_transaction_shown_for_two_payments_is_flagged_without_a_chain_too(hostile_server):
    policy = Policy(breaker=None)
    with Guard(signer=LocalSigner.from_key(KEY), ledger="memory://", policy=policy) as guard:
        with guard.session("s", budget="$1.00") as session:
            with httpx.Client(transport=GuardedTransport(session), trust_env=False) as http:
                for number in range(2):
                    assert http.get(hostile_server.url_of("same_transaction", number)).status_code == 200
            assert session.spent == Decimal("0.02")
            [flag] = events(session, "receipt_shared")
            assert flag["transaction"] == "0x" + "5a" * 32


def test_what_was_withheld_is_settled_when_told(hostile_server):
    policy = Policy(breaker=None)
    with Guard(signer=LocalSigner.from_key(KEY), ledger="memory://", policy=policy) as guard:
        with guard.session("s", budget="$1.00") as session:
            with httpx.Client(transport=GuardedTransport(session), trust_env=False) as http:
                assert http.get(hostile_server.url_of("withheld")).status_code == 500
            assert session.held == Decimal("0.01")
    assert [receipt["success"] for receipt in hostile_server.settle_withheld()] == [True]
    assert hostile_server.settle_withheld() == []
