"""What a reading by fresh eyes of the books beside the chain has found, on a real chain where one runs."""

import time

import pytest
from eth_account import Account

from tests.support.contract_seller import PRICE, Wild, any_hash
from tests.support.ledger import Clock
from x402guard import Policy, SessionTripped
from x402guard.chain.reader import Chain, RpcChainReader
from x402guard.chain.rpc import NodeRefuses
from x402guard.stores import open_store
from x402guard.testing import HostileChain, Testnet
from x402guard.testing.chain_client import ChainClient, calldata

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("reviewed_chain")]

DOLLAR = 10**6
TRANSFER_FROM = "transferFrom(address,address,uint256)"


@pytest.fixture
def net():
    with Testnet() as running:
        yield running


def test_zero_transfers_by_strangers_are_no_alarm(net, tmp_path):
    """Anybody may move nothing out of any wallet: address poisoners do so to every wallet that is used."""
    with Wild(net, tmp_path) as wild:
        wild.buy()
        wild.send(net.token, calldata(TRANSFER_FROM, net.payer, Account.create().address, 0))
        found = wild.guard.reconcile()
        assert found.unexplained == []
        assert not found.is_alarming


def test_money_that_leaves_past_the_books_is_an_alarm(net, tmp_path):
    with Wild(net, tmp_path) as wild:
        wild.buy()
        chain = ChainClient(net.rpc, net.chain_id)
        thief = Account.from_key(net.payer_key)
        chain.receipt(
            chain.send(thief, net.token, calldata("transfer(address,uint256)", wild.seller.address, 7), gas=10**5)
        )
        chain.close()
        assert [row["payee"] for row in wild.guard.reconcile().unexplained] == [wild.seller.address]


def test_money_that_leaves_past_the_books_trips_the_wallet_if_the_owner_wants_it(net, tmp_path):
    with Wild(net, tmp_path, policy=Policy(unexplained_transfer="trip")) as wild:
        wild.buy()
        assert not wild.guard.reconcile().is_alarming
        chain = ChainClient(net.rpc, net.chain_id)
        thief = Account.from_key(net.payer_key)
        chain.receipt(
            chain.send(thief, net.token, calldata("transfer(address,uint256)", wild.seller.address, 7), gas=10**5)
        )
        chain.close()
        assert len(wild.guard.reconcile().unexplained) == 1
        with pytest.raises(SessionTripped, match="unexplained_transfer"):
            wild.buy("/2")


def test_a_payment_taken_by_a_contract_of_the_sellers_is_no_alarm(net, tmp_path):
    """It is counted in full; nobody else has the key."""
    with Wild(net, tmp_path, "permit2") as wild:
        wild.take = wild.settle_wrapped
        wild.buy()
        found = wild.guard.reconcile()
        assert wild.session.spent * DOLLAR == PRICE
        assert found.unexplained == []


def test_an_authorization_taken_by_a_contract_of_the_sellers_is_proven_by_the_tokens_event(net, tmp_path):
    with Wild(net, tmp_path) as wild:
        wild.take = wild.settle_wrapped
        wild.buy()
        found = wild.guard.reconcile()
        assert (found.unexplained, found.still_open, found.unreadable) == ([], 0, {})


@pytest.mark.parametrize(
    "look", [lambda wild: wild.session.reconcile(), lambda wild: wild.guard.sweep()], ids=["reconcile", "sweep"]
)
def test_one_payment_that_cannot_be_read_keeps_no_other_from_being_proven(net, tmp_path, look):
    """A seller takes by a contract of its own and names a transaction that never appears on the chain."""
    with Wild(net, tmp_path, "permit2") as wild:

        def hidden(payload):
            wild.settle_wrapped(payload)
            return any_hash()

        wild.take = hidden
        wild.buy("/hidden")
        wild.take = wild.settle
        wild.buy("/plain")
        look(wild)
        proven = wild.session.report().to_dict()["settlement"]["proven"]
        assert float(proven) == PRICE / DOLLAR, "the honest payment behind it was never asked about"


def hidden(wild):
    """Take by a contract of the seller's own, and name a transaction that never appears on the chain."""

    def take(payload):
        wild.settle_wrapped(payload)
        return any_hash()

    return take


def test_a_payment_that_is_not_decided_yet_is_no_theft(net, tmp_path):
    """Its Transfer shows no nonce, so the comparison of the wallet comes to it before the payment is decided."""
    store = open_store(f"sqlite:///{tmp_path / 'spend.db'}", clock_ms=(clock := Clock(int(time.time() * 1000))))
    with Wild(net, tmp_path, "permit2", ledger=store) as wild:
        wild.take = hidden(wild)
        wild.buy()
        for _ in range(3):
            found = wild.guard.reconcile()
            assert (found.unexplained, found.still_open, found.complete) == ([], 1, False)
        for _ in range(2):  # the deadline of the payment passes
            net.advance(200)
            clock.tick(200)
        found = wild.guard.reconcile()
        assert (found.unexplained, wild.session.spent * DOLLAR) == ([], PRICE)
        assert wild.guard.reconcile().complete
    store.close()


def test_a_theft_behind_a_payment_that_is_not_decided_yet_is_told_at_once(net, tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'spend.db'}", clock_ms=(clock := Clock(int(time.time() * 1000))))
    with Wild(net, tmp_path, "permit2", ledger=store) as wild:
        thief = Account.from_key(net.payer_key)

        def steal(payee):
            move = calldata("transfer(address,uint256)", payee, 7)
            wild.chain.receipt(wild.chain.send(thief, net.token, move, gas=10**5))

        steal(Account.create().address)
        assert len(wild.guard.reconcile().unexplained) == 1
        wild.take = hidden(wild)
        wild.buy()
        steal(Account.create().address)
        assert len(wild.guard.reconcile().unexplained) == 2, "the payment keeps no theft from being told"
        for _ in range(2):
            net.advance(200)
            clock.tick(200)
        told = [row for _ in range(2) for row in wild.guard.reconcile().unexplained]
        assert [row["amount"] for row in told] == [7_000] * 4
    store.close()


def test_what_was_spent_before_the_ledger_began_is_no_alarm(net, tmp_path):
    chain = ChainClient(net.rpc, net.chain_id)
    owner = Account.from_key(net.payer_key)
    move = calldata("transfer(address,uint256)", Account.create().address, 7)
    chain.receipt(chain.send(owner, net.token, move, gas=10**5))
    chain.close()
    net.advance(60)
    store = open_store(f"sqlite:///{tmp_path / 'spend.db'}", clock_ms=lambda: int(time.time() + 60) * 1000)
    with Wild(net, tmp_path, ledger=store) as wild:
        wild.buy()
        found = wild.guard.reconcile()
        assert (found.unexplained, found.still_open, found.complete) == ([], 0, True)
    store.close()


def test_a_node_that_lags_behind_undoes_no_payment(net, tmp_path):
    """Behind most RPC addresses there are many nodes, some of them a few blocks behind the others."""
    with HostileChain(net.engine) as node:
        node.misbehave("stale")
        node.behaviour = "honest"
        chain = RpcChainReader({net.network: Chain(node.url, finality=0)}, pause=lambda seconds: None)
        with Wild(net, tmp_path, chains=chain) as wild:
            wild.buy()
            assert wild.session.reconcile().still_open == 0
            node.behaviour = "stale"
            found = wild.session.reconcile()
            assert (found.reopened, found.unreadable) == (0, {})
            assert wild.session.held == 0
        chain.close()


def unreadable_receipts(wild):
    """A node that shows no receipt of the seller's transactions: as when these have more logs than anybody reads."""
    [rpc] = wild.guard.shell.chain._rpcs.values()
    honest = rpc.call

    def call(method, *params):
        if method == "eth_getTransactionReceipt":
            raise NodeRefuses("an answer of more than 16777216 bytes")
        return honest(method, *params)

    rpc.call = call


def test_a_transaction_too_large_to_be_read_hides_neither_the_payment_nor_what_else_left_the_wallet(net, tmp_path):
    """Some 35,000 empty logs are 16 MiB of receipt, and cost less than a dollar where blocks are cheap."""
    with Wild(net, tmp_path) as wild:
        wild.take = wild.settle_wrapped
        wild.buy()
        thief = Account.from_key(net.payer_key)
        move = calldata("transfer(address,uint256)", wild.seller.address, 7)
        wild.chain.receipt(wild.chain.send(thief, net.token, move, gas=10**5))
        unreadable_receipts(wild)
        found = wild.guard.reconcile()
        assert (found.still_open, found.unreadable) == (0, {})
        assert [row["amount"] for row in found.unexplained] == [7_000]
