"""Blocks that were final by the setting and are undone after all: what was freed counts again, and what is taken then is counted right."""

from decimal import Decimal
from functools import partial

import pytest

from tests.support.engines import needs_anvil
from tests.support.market import CEILING, DIME, FAILS, TAKEN, market
from x402guard import BudgetExhausted, Policy, SessionTripped
from x402guard.kernel.evm import checksum_address
from x402guard.kernel.rows import HoldState
from x402guard.testing import AnvilEngine

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("anvil"), pytest.mark.usefixtures("inline_notices")]

NEVER_S = 3600.0


@pytest.fixture
def shop(tmp_path):
    make_engine = partial(AnvilEngine, binary=needs_anvil(), tick_s=NEVER_S)
    with market(make_engine, f"sqlite:///{tmp_path / 'spend.db'}") as opened:
        yield opened


def undo(shop, depth):
    """Undo so many blocks, and let the chain go on until a final block is surely later than the last look at it."""
    shop.net.engine.reorg(depth)
    shop.net.advance(60)  # setting the chain's clock takes a busy machine seconds
    shop.net.advance(2)


def freed(shop, guard, kind="upto", amount=TAKEN):
    """Pay, and have the payment proven two blocks deep; return session and hold id."""
    session = guard.session("s", budget="$0.10")
    hold_id = shop.ask(session, kind).extensions["x402guard"].hold_id
    shop.mine(2)
    found = session.reconcile()
    assert (found.captured + (kind != "upto"), session.spent, session.held) == (1, amount, 0)
    assert str(guard.shell.store.hold(hold_id).evidence) == "chain"
    return session, hold_id


def test_a_reorg_that_undoes_a_settlement_counts_the_ceiling_again(shop):
    guard = shop.final_after(1)
    session, hold_id = freed(shop, guard)
    undo(shop, 3)
    assert shop.net.transfers() == []
    found = guard.reconcile()
    assert (found.reopened, found.still_open, found.added) == (1, 1, 37_655_000)
    assert (session.spent, session.held) == (0, CEILING)
    assert guard.shell.store.hold(hold_id).state is HoldState.HELD
    assert guard.reconcile().reopened == 0


@pytest.mark.parametrize("amount", [1, 12_345, 40_000, 50_000])
def test_what_is_settled_after_a_reorg_is_counted_right(shop, amount):
    guard = shop.final_after(1)
    session, hold_id = freed(shop, guard)
    shop.net.engine.reorg(3)
    session.reconcile()
    assert shop.take(amount=amount)["success"]
    session.reconcile()
    assert session.spent + session.held == CEILING, "a block that can be undone frees nothing"
    shop.mine(2)
    found = guard.reconcile()
    assert (found.contradicted, found.unexplained) == ([], [])
    assert (session.spent, session.held) == (Decimal(amount) / 10**6, 0)
    assert guard.shell.store.hold(hold_id).state is HoldState.CAPTURED


def test_what_is_settled_anew_before_anybody_looked_counts_at_once(shop):
    """Nobody has seen the nonce unused in between, and the new block is not final yet: the books must not stay below the chain."""
    guard = shop.final_after(1)
    session, _ = freed(shop, guard)
    shop.net.engine.reorg(3)
    assert shop.take(amount=40_000)["success"]
    session.reconcile()
    assert session.spent + session.held >= Decimal("0.04")
    shop.mine(2)
    session.reconcile()
    assert (session.spent, session.held) == (Decimal("0.04"), 0)


@pytest.mark.parametrize("amount", [1, 40_000])
def test_what_is_settled_anew_and_final_replaces_the_old_proof(shop, amount):
    guard = shop.final_after(1)
    session, hold_id = freed(shop, guard)
    before = guard.shell.store.hold(hold_id).proof
    shop.net.engine.reorg(3)
    assert shop.take(amount=amount)["success"]
    shop.mine(2)
    session.reconcile()
    assert (session.spent, session.held) == (Decimal(amount) / 10**6, 0)
    assert guard.shell.store.hold(hold_id).proof != before


@pytest.mark.parametrize("kind", ["eip3009", "permit2"])
def test_an_exact_payment_that_a_reorg_undoes_is_live_again_and_expires_at_last(shop, kind):
    guard = shop.final_after(1)
    session, _ = freed(shop, guard, kind, DIME)
    undo(shop, 3)
    assert session.reconcile().reopened == 1
    assert (session.spent, session.held) == (0, DIME)
    shop.net.advance(400)
    assert (session.reconcile().expired, session.held) == (0, DIME), "the block past the deadline is not final yet"
    shop.mine(2)
    found = session.reconcile()
    assert (found.expired, session.remaining) == (1, DIME)


@pytest.mark.parametrize("kind", ["eip3009", "permit2", "upto"])
def test_a_reorg_of_what_was_not_final_changes_nothing_that_was_freed(shop, kind):
    guard = shop.final_after(5)
    session = guard.session("s", budget="$1.00")
    amount = CEILING if kind == "upto" else DIME
    shop.ask(session, kind)
    session.reconcile()
    assert session.held + session.spent == amount
    shop.net.engine.reorg(1)
    session.reconcile()
    assert session.held + session.spent == amount, "it may be taken yet"
    assert shop.take()["success"]
    shop.mine(6)
    session.reconcile()
    assert (session.held, session.spent) == (0, TAKEN if kind == "upto" else DIME)


def test_a_reopened_payment_past_the_limit_trips(shop):
    guard = shop.final_after(1)
    session, _ = freed(shop, guard)
    shop.ask(session, "upto")
    shop.mine(2)
    session.reconcile()
    assert session.remaining == Decimal("0.10") - 2 * TAKEN
    session.charge("archive", "$0.07")
    undo(shop, 6)
    assert session.reconcile().reopened == 2
    assert session.spent + session.held == Decimal("0.17")
    assert {node.id: str(node.state) for node in guard.shell.store.nodes()}[session.id] == "tripped"


def cancelled_for_good(shop, guard):
    """A payment that the seller keeps, cancelled, two blocks deep; return session and hold id."""
    session = guard.session("s", budget="$1.00")
    shop.seller.says = FAILS
    hold_id = shop.ask(session, "eip3009").extensions["x402guard"].hold_id
    made = guard.cancel(hold_id)
    assert shop.send(made.to, made.data)["status"] == "0x1"
    assert (session.reconcile().voided, session.held) == (0, DIME), "not final yet"
    shop.mine(2)
    assert (session.reconcile().voided, session.held) == (1, 0)
    return session, hold_id


def test_a_cancellation_that_is_undone_counts_again(shop):
    guard = shop.final_after(1)
    session, _ = cancelled_for_good(shop, guard)
    undo(shop, 3)
    session.reconcile()
    assert session.spent + session.held == DIME, "the signature is good again, and nothing of the cancellation is left"


def test_a_payment_that_takes_the_place_of_an_undone_cancellation_is_counted(shop):
    guard = shop.final_after(1)
    session, _ = cancelled_for_good(shop, guard)
    guard.reconcile()  # the wallet has been compared up to here
    shop.net.engine.reorg(3)
    assert shop.take()["success"]
    shop.mine(2)
    found = guard.reconcile()
    assert (session.spent, found.unexplained) == (DIME, [])


def test_money_that_leaves_past_the_guard_in_a_replaced_block_is_an_alarm(shop):
    guard = shop.final_after(1)
    freed(shop, guard, "eip3009", DIME)
    guard.reconcile()
    shop.mine(5)
    guard.reconcile()
    shop.net.engine.reorg(5)
    gone = shop.pay_past_the_guard(7)
    shop.mine(2)
    assert [row["transaction"] for row in guard.reconcile().unexplained] == [gone]
    assert (
        checksum_address(bytes.fromhex("44" * 20))
        in [n for n in shop.told if n.kind == "unexplained_transfer"][-1].facts["transfers"][0]["payee"]
    )


def test_a_remainder_is_used_before_finality_as_far_as_the_owner_allows(shop):
    """A ceiling of $0.05 and a use of $0.012: a budget of $0.10 takes two calls, and with the exposure seven."""
    strict = shop.final_after(20).session("strict", budget="$0.10")
    for _ in range(2):
        shop.ask(strict)
    with pytest.raises(
        BudgetExhausted, match=r"\$0\.07531 more wait for the finality of their blocks.*policy\.reorg_exposure"
    ):
        shop.ask(strict)
    policy = Policy(breaker=None, loop=None, reorg_exposure="$1.00")
    guard = shop.final_after(20, policy=policy)
    session, calls = guard.session("exposed", budget="$0.10"), 0
    while calls < 20:
        try:
            shop.ask(session)
        except BudgetExhausted:
            break
        calls += 1
    settlement = session.report().to_dict()["settlement"]
    assert calls >= 5
    assert (
        Decimal(settlement["exposed_to_reorg"])
        == calls * (Decimal("0.05") - TAKEN) - Decimal(settlement["exposed"]) * 0
    )
    assert session.spent == calls * TAKEN
    assert session.spent + session.held <= Decimal("0.10")
    undo(shop, calls)
    shop.mine(25)  # a final block is later than the last look
    guard.reconcile()
    assert Decimal(session.report().to_dict()["settlement"]["exposed_to_reorg"]) == 0
    assert session.held == calls * CEILING  # all of it counts again, past the limit
    with pytest.raises(SessionTripped):
        shop.ask(session)
