"""The books beside a real chain, over real HTTP: what is taken late, never, for another amount, or before there was a chain."""

import time

import pytest
from web3 import HTTPProvider, Web3

from tests.support.ledger import Clock, weigh_proven
from tests.support.market import AMOUNTS, CEILING, DIME, FAILS, TAKEN, market
from tests.support.testnet import decoded
from x402guard import BudgetExhausted, Chain, ConfigError, PaidNotDelivered, SessionTripped
from x402guard.chain.rpc import JsonRpc
from x402guard.kernel.rows import HoldState
from x402guard.ledger.evidence import weigh_marks
from x402guard.ledger.findings import Cancelled, Unused
from x402guard.ledger.view import Scope
from x402guard.stores import open_store
from x402guard.testing.chain_client import calldata
from x402guard.testing.contracts import PERMIT2, TOKEN

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("reconcile"), pytest.mark.usefixtures("inline_notices")]

MADE_UP = "0x" + "ab" * 32


@pytest.fixture
def shop(make_engine, tmp_path):
    with market(make_engine, f"sqlite:///{tmp_path / 'spend.db'}") as opened:
        yield opened


def lines(found):
    return (found.captured, found.expired, found.voided, found.reopened, found.still_open)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", AMOUNTS)
def test_a_payment_that_failed_and_was_settled_later_is_found_and_counted(shop, kind, mode):
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")
    shop.seller.says = FAILS
    answer = shop.ask(session, kind, mode)
    assert (answer.status_code, answer.extensions["x402guard"].in_doubt) == (402, True)
    assert lines(session.reconcile()) == (0, 0, 0, 0, 1)
    assert (session.held, session.spent) == (AMOUNTS[kind], 0)
    settled = shop.take()
    assert settled["success"]
    found = session.reconcile()
    assert lines(found) == (1, 0, 0, 0, 0)
    assert (session.held, session.spent) == (0, TAKEN if kind == "upto" else DIME)
    assert found.contradicted == []
    proof = guard.shell.store.hold(answer.extensions["x402guard"].hold_id).proof
    assert settled["transaction"] in proof
    assert guard.reconcile().unexplained == []
    [scan] = guard.shell.store.marks("scan", "").values()
    assert abs(scan["unix"] - time.time()) < 600, scan  # the time of the last final block


@pytest.mark.parametrize("kind", AMOUNTS)
def test_what_nobody_takes_says_nothing_before_its_deadline_and_comes_back_after_it(shop, kind):
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")
    shop.seller.says = "lost"
    hold = guard.shell.store.hold(shop.ask(session, kind).extensions["x402guard"].hold_id)
    ahead = hold.payment().valid_until - int(time.time()) - 30
    shop.net.advance(ahead)
    assert lines(session.reconcile()) == (0, 0, 0, 0, 1)
    assert session.held == AMOUNTS[kind]
    shop.net.advance(40)
    assert not shop.take()["success"]
    found = session.reconcile()
    assert lines(found) == (0, 1, 0, 0, 0)
    assert found.freed == AMOUNTS[kind] * 10**9
    assert session.remaining == 1


@pytest.mark.parametrize("kind", ["eip3009", "permit2"])
def test_a_receipt_for_what_was_never_settled_is_corrected_to_zero_and_told(shop, kind):
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")
    shop.seller.says = {"transaction": MADE_UP}
    receipt = shop.ask(session, kind).extensions["x402guard"]
    assert (receipt.evidence, session.spent) == ("claimed", DIME)
    shop.net.advance(400)
    found = guard.reconcile()
    assert (found.contradicted, found.freed, found.is_alarming) == ([receipt.hold_id], 10**8, True)
    assert session.spent == 0
    told = [notice for notice in shop.told if notice.kind == "claim_contradicted"]
    assert [(n.facts["payee"], n.facts["claimed"], n.facts["chain"]) for n in told] == [
        (shop.net.payee, "0.10", "0.00")
    ]
    assert not guard.reconcile().is_alarming


def test_a_receipt_for_less_than_was_taken_is_corrected_and_names_payee_and_facilitator(shop):
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")
    shop.seller.says = lambda: {"transaction": shop.take(amount=40_000)["transaction"], "amount": "12345"}
    receipt = shop.ask(session, "upto").extensions["x402guard"]
    assert (receipt.state, session.held) == ("held", CEILING)
    found = guard.reconcile()
    assert (found.contradicted, str(session.spent)) == ([receipt.hold_id], "0.04")
    event = next(e for e in session.report().to_dict()["events"] if e["event"] == "claim_contradicted")
    assert (event["payee"], event["facilitator"]) == (shop.net.payee, shop.net.facilitator_address)
    assert (event["claimed"], event["chain"]) == ("0.012345", "0.04")


@pytest.mark.parametrize("taken", [None, 12_345, 50_000])
def test_what_was_assumed_without_a_chain_is_corrected_by_a_later_one(shop, taken):
    clock = Clock(time.time_ns() // 1_000_000)
    store = open_store(shop.ledger, clock_ms=clock)
    guard = shop.guard(chains=None, ledger=store)
    session = guard.session("s", budget="$1.00")
    shop.seller.says = FAILS
    hold_id = shop.ask(session, "upto").extensions["x402guard"].hold_id
    if taken:
        assert shop.take(amount=taken)["success"]
    assert lines(session.reconcile()) == (0, 0, 0, 0, 1)
    clock.tick(302)
    session.reconcile()
    assert (session.report().to_dict()["settlement"]["assumed"], session.spent) == ("0.05", CEILING)
    guard.close()
    shop.net.advance(400)
    again = shop.guard(ledger=store)
    assert again.reconcile().unexplained == []
    hold = store.hold(hold_id)
    again.close()
    store.close()
    assert (hold.state, hold.captured, str(hold.evidence)) == (HoldState.CAPTURED, (taken or 0) * 1000, "chain")


@pytest.mark.parametrize("ended", ["voided", "expired"])
def test_what_had_ended_in_the_books_and_was_taken_after_all_is_counted_past_the_limit_which_trips(shop, ended):
    guard = shop.guard()
    session = guard.session("s", budget="$0.10")
    shop.seller.says = FAILS
    hold_id = shop.ask(session, "eip3009").extensions["x402guard"].hold_id
    hold = guard.shell.store.hold(hold_id)  # a final block ends it that is undone later, however deep
    until = hold.payment().valid_until
    shown = Cancelled("0x" + "cd" * 32, final=True) if ended == "voided" else Unused(until)
    scope = Scope(holds=(hold_id,), marks=weigh_marks(hold, shown), durable=True)
    assert guard.shell.store.transact(scope, lambda view: weigh_proven(view, hold_id, shown)).state == ended
    shop.seller.says = None
    assert shop.ask(session, "eip3009", path="/documents/2").status_code == 200
    assert shop.take(0)["success"]
    found, looks = guard.reconcile(), 1
    while not found.added and looks < 50:  # the node's final block may be the one before the settlement's
        assert found.unexplained == []
        time.sleep(0.1)
        found, looks = guard.reconcile(), looks + 1
    assert (found.unexplained, found.added) == ([], 10**8)
    assert session.spent == 2 * DIME
    assert str(guard.shell.store.hold(hold_id).evidence) == "chain"
    with pytest.raises(SessionTripped, match=r"\$0.20 used of \$0.10"):
        shop.ask(session, "eip3009", path="/documents/3")
    assert {node.id: str(node.state) for node in guard.shell.store.nodes()}[session.id] == "tripped"
    assert guard.reconcile().added == 0


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_claims_are_settled_before_a_refusal_for_lack_of_budget(shop, mode):
    session = shop.guard().session("s", budget="$0.10")
    for _ in range(5):
        assert shop.ask(session, "upto", mode).status_code == 200
        assert session.held > 0, "nobody has asked the chain about this one yet"
    with pytest.raises(BudgetExhausted):
        shop.ask(session, "upto", mode)
    assert (session.spent, session.held) == (5 * TAKEN, 0)
    assert len(shop.seller.kept) == 5


def test_the_report_tells_proven_claimed_assumed_and_exposed_apart(shop):
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")
    shop.ask(session, "eip3009")
    session.reconcile()
    shop.ask(session, "permit2")
    shop.seller.says = FAILS
    holds = [shop.ask(session, kind).extensions["x402guard"].hold_id for kind in ("upto", "eip3009")]
    report = session.report().to_dict()
    known = {"proven": "0.10", "claimed": "0.10", "assumed": "0.00", "exposed": "0.15", "exposed_to_reorg": "0.00"}
    assert report["settlement"] == known
    until = {row["hold_id"]: row["exposed_until"] for row in report["outstanding"]}
    upto, eip3009 = (guard.shell.store.hold(hold_id).payment().valid_until for hold_id in holds)
    assert until == {holds[0]: upto + 1, holds[1]: eip3009}


def test_a_standing_permit2_allowance_is_a_liability_until_it_is_revoked(shop):
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")
    shop.ask(session, "eip3009")
    guard.close()
    guard = shop.guard()
    allowance = guard.reconcile().allowances
    assert [(row["network"], row["token"], row["exposed"]) for row in allowance] == [
        (shop.net.network, TOKEN, (1_000_000_000 - 100_000) * 1000)
    ]
    shown = guard.session("t", budget="$1.00").report().to_dict()["allowances"]
    assert [(row["symbol"], row["exposed"]) for row in shown] == [("USDC", "999.90")]
    shop.send(TOKEN, calldata("approve(address,uint256)", PERMIT2, 0))
    guard.close()
    assert shop.guard().reconcile().allowances == []


def test_a_lost_answer_is_presented_again_and_bought_once(shop):
    guard = shop.guard()
    session = guard.session("s", budget="$1.00")
    shop.seller.says = "lost"
    first = shop.ask(session, "eip3009")
    shop.seller.says = None
    second = shop.ask(session, "eip3009")
    assert (second.status_code, second.extensions["x402guard"].represented) == (200, True)
    assert second.extensions["x402guard"].hold_id == first.extensions["x402guard"].hold_id
    nonces = {payment["payload"]["authorization"]["nonce"] for payment, _ in shop.seller.kept}
    assert len(nonces) == 1
    assert session.reconcile().captured == 0
    assert (session.spent, len(shop.net.transfers())) == (DIME, 1)
    assert decoded(second.headers["PAYMENT-RESPONSE"])["success"]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", ["eip3009", "permit2"])
def test_a_nonce_that_was_used_looks_like_an_offer_and_is_none(shop, kind, mode):
    session = shop.guard().session("s", budget="$1.00")
    shop.seller.says = "lost"
    hold_id = shop.ask(session, kind, mode).extensions["x402guard"].hold_id
    assert shop.take()["success"]
    shop.seller.says = None
    for _ in range(3):
        with pytest.raises(PaidNotDelivered) as caught:
            shop.ask(session, kind, mode)
        assert (caught.value.hold_id, session.spent, len(shop.net.transfers())) == (hold_id, DIME, 1)
    again = shop.ask(session, kind, mode, extensions={"pay_again": True})
    assert (again.status_code, len(shop.net.transfers())) == (200, 2)
    assert again.extensions["x402guard"].hold_id != hold_id


def test_pay_again_holds_a_second_payment_in_full(shop):
    session = shop.guard().session("s", budget="$1.00")
    shop.seller.says = "lost"
    first = shop.ask(session, "eip3009").extensions["x402guard"].hold_id
    shop.seller.says = None
    second = shop.ask(session, "eip3009", extensions={"pay_again": True}).extensions["x402guard"]
    assert (second.hold_id != first, second.represented) == (True, False)
    assert (session.held, session.spent) == (DIME, DIME)
    assert shop.take(0)["success"]
    session.reconcile()
    assert (session.held, session.spent) == (0, 2 * DIME)


def test_the_rpc_of_another_chain_is_a_setting_that_is_wrong(shop):
    rpc = JsonRpc("eip155:8453", shop.net.rpc)
    with pytest.raises(ConfigError, match="serves chain 84532"):
        rpc.call("eth_blockNumber")
    rpc.close()


@pytest.mark.parametrize("kind", AMOUNTS)
def test_a_web3_that_the_program_has_already_reads_the_chain(shop, kind):
    web3 = Web3(HTTPProvider(shop.net.rpc))
    for chains in ({shop.net.network: web3}, {shop.net.network: Chain(["http://127.0.0.1:9", web3], timeout_s=0.5)}):
        guard = shop.guard(chains=chains)
        with guard.session("s", budget="$1.00") as session:
            shop.seller.says = "lost"
            shop.ask(session, kind, extensions={"pay_again": True})
            assert shop.take()["success"]
            assert lines(session.reconcile()) == (1, 0, 0, 0, 0)
            assert (session.held, session.spent) == (0, TAKEN if kind == "upto" else DIME)
        assert guard.reconcile().complete
    assert web3.eth.chain_id == 84532, "its owner closes it"
