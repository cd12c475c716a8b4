"""Payments that are settled inside another contract's call, where the transaction's own calldata says nothing."""

import time
from functools import partial

import pytest

from tests.support.engines import needs_anvil
from tests.support.market import DIME, FAILS, market
from x402guard.chain.calldata import amount_settled, nonce_settled
from x402guard.kernel.evm import checksum_address
from x402guard.testing import AnvilEngine, EthTesterEngine
from x402guard.testing.chain_client import calldata
from x402guard.testing.contracts import TOKEN, genesis_contracts

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("reconcile"), pytest.mark.usefixtures("inline_notices")]

FORWARDER = checksum_address(b"\xf0" * 20)
FORWARDER_CODE = bytes.fromhex("602036038060206000376000600082600060006000355af115601d57005b60006000fd")
"""call(gas, word 0 of the calldata, 0, the rest of the calldata), and revert where that does."""
MADE_UP = "0x" + "ab" * 32


@pytest.fixture
def shop(engine, tmp_path):
    contracts = genesis_contracts() | {FORWARDER: FORWARDER_CODE}
    kind, more = EthTesterEngine, {}
    if engine == "anvil":
        kind, more = AnvilEngine, {"binary": needs_anvil(), "slots_in_an_epoch": 0}
    with market(partial(kind, contracts=contracts, **more), f"sqlite:///{tmp_path / 'spend.db'}") as opened:
        yield opened


def settle_inside(shop, number=-1):
    to, data = shop.settling_call(number)
    receipt = shop.send(FORWARDER, "0x" + to[2:].lower().rjust(64, "0") + data.removeprefix("0x"))
    assert receipt["status"] == "0x1"
    return receipt["transactionHash"]


@pytest.mark.parametrize("names", ["nothing", "the transaction", "another"])
def test_an_authorization_used_inside_another_call_is_proven_by_the_tokens_own_event(shop, names):
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")

    def settled():
        transaction = settle_inside(shop)
        return {"transaction": {"nothing": "", "the transaction": transaction, "another": MADE_UP}[names]}

    shop.seller.says = settled
    hold_id = shop.ask(session, "eip3009").extensions["x402guard"].hold_id
    found = guard.reconcile()
    hold = guard.shell.store.hold(hold_id)
    assert (found.captured, found.contradicted, found.unexplained, session.spent) == (0, [], [], DIME)
    assert (str(hold.evidence), hold.proof.split("/")[1]) == ("chain", shop.net.transfers()[-1].transaction)


def test_an_authorization_used_inside_another_call_after_a_failure_is_no_stranger(shop):
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")
    shop.seller.says = FAILS
    shop.ask(session, "eip3009")
    settle_inside(shop)
    found = guard.reconcile()
    assert (found.captured, found.unexplained, session.spent, session.held) == (1, [], DIME, 0)


def test_a_permit_settled_inside_another_call_holds_up_no_other_payment(shop):
    """Its seller names a transaction that nobody sees: until it can't show it any more the maximum stays held."""
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")

    def settled():
        settle_inside(shop)
        return {"transaction": MADE_UP}

    shop.seller.says = settled
    hidden = shop.ask(session, "permit2").extensions["x402guard"].hold_id
    shop.seller.says = FAILS
    shop.ask(session, "eip3009")
    assert shop.take()["success"]
    found = session.reconcile()
    assert (found.captured, session.spent) == (1, 2 * DIME)
    assert found.still_open == 1
    assert str(guard.shell.store.hold(hidden).evidence) == "claimed"
    shop.net.advance(400)
    session.reconcile()
    assert (session.spent, str(guard.shell.store.hold(hidden).evidence)) == (2 * DIME, "chain")


@pytest.mark.parametrize("kind", ["permit2"])
def test_a_permit_settled_inside_another_call_and_given_up_afterwards_was_taken(shop, kind):
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")
    shop.seller.says = FAILS
    hold_id = shop.ask(session, kind).extensions["x402guard"].hold_id
    settle_inside(shop)
    shop.invalidate(guard.shell.store.hold(hold_id).payment().nonce)
    found = session.reconcile()
    assert (found.voided, found.captured, session.spent) == (0, 1, DIME)


@pytest.mark.parametrize("kind", ["eip3009", "permit2", "upto"])
def test_the_decoder_reads_what_the_contracts_were_called_with(shop, kind):
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")
    hold_id = shop.ask(session, kind).extensions["x402guard"].hold_id
    payment = guard.shell.store.hold(hold_id).payment()
    sent = shop.chain.rpc("eth_getTransactionByHash", shop.net.transfers()[-1].transaction)
    data = bytes.fromhex(sent["input"].removeprefix("0x"))
    assert amount_settled(payment, sent["to"], data) == shop.net.transfers()[-1].amount
    assert nonce_settled(TOKEN, sent["to"], data) == payment.nonce
    for changed in (data[:-400], data[:4], b"", b"\0" * 4 + data[4:]):
        assert amount_settled(payment, sent["to"], changed) is None


# ---- the wallet beside the books ----


def test_a_transfer_past_the_guard_is_told_once(shop):
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")
    for kind in ("eip3009", "permit2", "upto"):
        shop.ask(session, kind)
    assert guard.reconcile().unexplained == []
    gone = [shop.pay_past_the_guard(amount) for amount in (7, 9)]
    found = guard.reconcile()
    rows = sorted((row["amount"], row["transaction"]) for row in found.unexplained)
    assert rows == [(7_000, gone[0]), (9_000, gone[1])]
    assert found.is_alarming
    shop.ask(session, "eip3009", path="/documents/2")
    assert guard.reconcile().unexplained == found.unexplained
    assert [n.facts["total"] for n in shop.told if n.kind == "unexplained_transfer"] == ["0.000016"]


def test_a_payment_that_another_ledger_made_with_the_same_key_is_an_alarm(shop, tmp_path):
    guard, other = shop.guard(), shop.guard(ledger=f"sqlite:///{tmp_path / 'other.db'}")
    sessions = other.session("o", budget="$1.00"), guard.session("s", budget="$1.00")
    time.sleep(1.1)  # the chain counts in whole seconds, and what was before a ledger's first moment is no alarm
    for session in sessions:
        shop.ask(session, "eip3009")
    assert len(guard.reconcile().unexplained) == len(other.reconcile().unexplained) == 1


def test_what_left_the_wallet_before_the_ledgers_first_moment_is_no_alarm(shop):
    shop.pay_past_the_guard(7)
    time.sleep(1.1)  # the chain counts in whole seconds
    guard = shop.guard()
    shop.ask(guard.session("s", budget="$1.00"), "eip3009")
    assert guard.reconcile().unexplained == []


def test_an_rpc_that_dies_in_the_comparison_forgets_nothing(shop):
    guard = shop.guard()
    shop.ask(guard.session("s", budget="$1.00"), "eip3009")
    guard.reconcile()
    gone, rpc, refused = shop.pay_past_the_guard(7), shop.net.engine.rpc, []

    def dying(method, params):
        if method == "eth_getTransactionByHash":
            refused.append(method)
            raise ConnectionError("gone")
        return rpc(method, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.net.engine, "rpc", dying)
        found = guard.reconcile()
    assert refused
    assert (found.unexplained, list(found.unreadable)) == ([], [shop.net.network])
    assert [row["transaction"] for row in guard.reconcile().unexplained] == [gone]


def test_a_transfer_of_nothing_is_no_alarm(shop):
    """Anybody may have a token emit a Transfer of zero from any wallet: address poisoning."""
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")
    shop.ask(session, "eip3009")
    guard.reconcile()
    thief = "0x" + "55" * 20
    sent = shop.send(TOKEN, calldata("transferFrom(address,address,uint256)", shop.net.payer, thief, 0))
    assert sent["status"] == "0x1"
    assert session.spent == DIME
    assert guard.reconcile().unexplained == []
