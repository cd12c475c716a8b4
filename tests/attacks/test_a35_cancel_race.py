"""Attack 35: the client takes a payment back while the server settles it. Whichever the chain ran first is what counts, and nothing
is free before the chain has said so."""

import pytest
from eth_account import Account

from tests.support.engines import ENGINES, engine_maker
from tests.support.market import AMOUNTS, DIME, FAILS, TAKEN, market
from x402guard import ConfigError
from x402guard.kernel.rows import HoldState
from x402guard.testing import RpcError

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("anvil")]

PERMITS = ["permit2", "upto"]
AFTER = {"eip3009": DIME, "permit2": DIME, "upto": TAKEN}


@pytest.fixture(params=ENGINES)
def shop(request, tmp_path):
    with market(engine_maker(request.param), f"sqlite:///{tmp_path / 'spend.db'}") as opened:
        yield opened


@pytest.fixture
def relay(shop):
    """The key of an account that has coin for gas and nothing to do with the payment."""
    account = Account.create()
    shop.net.fund(account.address, wei=10**19)
    return account.key.hex()


def committed(shop, guard, kind, mode):
    """A payment that is out and kept by the seller; return session and hold id."""
    session = guard.session("s", budget="$0.10")
    shop.seller.says = FAILS
    return session, shop.ask(session, kind, mode).extensions["x402guard"].hold_id


def take_back(shop, guard, kind, hold_id, relay):
    """Send the cancellation: a signature that anybody may send, or for Permit2 a call of the wallet's own."""
    if kind in PERMITS:
        return shop.invalidate(guard.shell.store.hold(hold_id).payment().nonce)
    made = guard.cancel(hold_id)
    assert (made.network, made.hold_id) == (shop.net.network, hold_id)
    return shop.send(made.to, made.data, relay)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", AMOUNTS)
def test_a35_the_cancellation_was_first(shop, relay, kind, mode):
    guard = shop.guard()
    session, hold_id = committed(shop, guard, kind, mode)
    made = take_back(shop, guard, kind, hold_id, relay)
    assert made["status"] == "0x1"
    assert session.held == AMOUNTS[kind], "the chain has it, and nobody has read the chain"
    assert not shop.take()["success"]
    found = session.reconcile()
    assert (found.voided, found.contradicted, session.held, session.spent) == (1, [], 0, 0)
    hold = guard.shell.store.hold(hold_id)
    assert hold.state is HoldState.VOIDED
    assert made["transactionHash"] in hold.ended_by
    shop.seller.says = None
    assert shop.ask(session, kind, mode).status_code == 200, "the budget is back"


@pytest.mark.one_in(7)
@pytest.mark.parametrize("kind", AMOUNTS)
def test_a35_the_settlement_was_first(shop, relay, kind, mode):
    guard = shop.guard()
    session, hold_id = committed(shop, guard, kind, mode)
    if kind == "eip3009":
        made = guard.cancel(hold_id)
        assert shop.take()["success"]
        assert shop.send(made.to, made.data, relay)["status"] == "0x0"
    else:
        assert shop.take()["success"]
        # Permit2 says nothing when a payment uses a nonce, and emits its event all the same when a used one is given up.
        assert len(take_back(shop, guard, kind, hold_id, relay)["logs"]) == 1
    found = guard.reconcile()
    assert (found.captured, found.voided, found.unexplained) == (1, 0, [])
    assert (session.spent, session.held) == (AFTER[kind], 0)
    assert str(guard.shell.store.hold(hold_id).evidence) == "chain"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", PERMITS)
def test_a35_a_settlement_that_named_no_transaction_beside_an_event_of_its_nonce_is_found(shop, kind):
    """The seller claims success and hides the transaction; the only event with the nonce in it is the wallet's own."""
    guard = shop.guard()
    session = guard.session("s", budget="$0.10")

    def settled():
        shop.take()
        return {"transaction": "0x" + "ab" * 32}

    shop.seller.says = settled
    hold_id = shop.ask(session, kind).extensions["x402guard"].hold_id
    shop.invalidate(guard.shell.store.hold(hold_id).payment().nonce)
    assert shop.net.transfers()
    session.reconcile()
    assert (session.held, session.spent) == (0, AFTER[kind])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", AMOUNTS)
def test_a35_a_cancellation_that_is_not_final_frees_nothing(shop, relay, kind):
    guard = shop.final_after(3)
    session, hold_id = committed(shop, guard, kind, "sync")
    take_back(shop, guard, kind, hold_id, relay)
    session.reconcile()
    assert session.held + session.spent == AMOUNTS[kind]
    shop.mine(4)
    assert (session.reconcile().voided, session.remaining) == (1, DIME)


@pytest.mark.one_in(3)
def test_a35_a_request_to_cancel_alone_frees_nothing(shop, mode):
    guard = shop.guard()
    session, hold_id = committed(shop, guard, "eip3009", mode)
    guard.cancel(hold_id)
    assert (session.reconcile().still_open, session.held) == (1, DIME)
    assert [e["hold_id"] for e in session.report().to_dict()["events"] if e["event"] == "cancel_requested"] == [hold_id]
    assert shop.take()["success"]
    assert (session.reconcile().captured, session.spent) == (1, DIME)


def test_a35_a_claim_of_what_was_cancelled_is_contradicted(shop, relay):
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")

    def cancelled_meanwhile():
        made = guard.cancel(guard.shell.store.outstanding()[0].id)
        shop.send(made.to, made.data, relay)
        return {"transaction": "0x" + "ab" * 32}

    shop.seller.says = cancelled_meanwhile
    receipt = shop.ask(session, "eip3009").extensions["x402guard"]
    assert (receipt.evidence, session.spent) == ("claimed", DIME)
    found = session.reconcile()
    assert (found.contradicted, session.spent, session.held) == ([receipt.hold_id], 0, 0)


def test_a35_the_cancellation_of_one_nonce_frees_no_other(shop, relay):
    guard = shop.guard()
    session = guard.session("s", budget="$0.20")
    shop.seller.says = FAILS
    one, two = (shop.ask(session, "eip3009", path=f"/documents/{n}").extensions["x402guard"].hold_id for n in (1, 2))
    take_back(shop, guard, "eip3009", one, relay)
    found = session.reconcile()
    assert (found.voided, found.still_open, session.held) == (1, 1, DIME)
    assert guard.shell.store.hold(two).state is HoldState.HELD


def test_a35_giving_up_a_neighbouring_permit2_nonce_frees_nothing(shop):
    guard = shop.guard()
    session, hold_id = committed(shop, guard, "permit2", "sync")
    nonce = guard.shell.store.hold(hold_id).payment().nonce
    shop.invalidate(nonce ^ 1)
    shop.invalidate((nonce >> 8 ^ 1) << 8 | nonce & 255)
    assert (session.reconcile().still_open, session.held) == (1, DIME)


@pytest.mark.parametrize("kind", PERMITS)
def test_a35_permit2_cannot_be_cancelled_by_signature(shop, kind):
    guard = shop.guard()
    _, hold_id = committed(shop, guard, kind, "sync")
    with pytest.raises(ConfigError, match="invalidateUnorderedNonces"):
        guard.cancel(hold_id)


def test_a35_only_a_live_payment_of_this_ledger_is_cancelled(shop):
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")
    ended = shop.ask(session, "eip3009").extensions["x402guard"].hold_id
    with pytest.raises(ConfigError, match="only a live one"):
        guard.cancel(ended)
    with pytest.raises(ConfigError, match="no payment"):
        guard.cancel("0" * 64)


def test_a35_a_cancellation_can_do_nothing_but_cancel_this_one(shop, relay):
    """Whoever gets the calldata can burn this one nonce of this one wallet, and no other transaction comes out of it."""
    guard = shop.guard()
    _, hold_id = committed(shop, guard, "eip3009", "sync")
    made = guard.cancel(hold_id)
    payment = guard.shell.store.hold(hold_id).payment()
    assert shop.net.payer[2:].lower().rjust(64, "0") + f"{payment.nonce:064x}" in made.data
    tampered = made.data[: 10 + 64] + f"{payment.nonce ^ 1:064x}" + made.data[10 + 128 :]
    with pytest.raises(RpcError, match="invalid signature"):
        shop.chain.call(made.to, tampered)
    before = shop.net.balance(shop.net.payer)
    assert len(shop.send(made.to, made.data, relay)["logs"]) == 1
    assert shop.net.balance(shop.net.payer) == before
    assert made.data not in repr(made)
