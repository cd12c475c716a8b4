"""A Transfer that may be a payment which the chain has not decided yet is compared again, and told once at most."""

from contextlib import suppress
from functools import partial

import httpx
import pytest

from tests.support.ledger import PAYEE, PAYER, START_MS, a_hold, an_intent, weigh_proven
from tests.support.merchant import OTHER_PAYEE, URL, Shop, client, make_guard
from x402guard.assets import AssetRegistry
from x402guard.flow.effects import AskChain, Transact
from x402guard.flow.ports import HoldStatus, OutgoingTransfer, TransferNonce, Transfers, WalletTransfers
from x402guard.frozen import replace
from x402guard.ledger.evidence import note_unshown, weigh_marks
from x402guard.ledger.findings import Settled, Used
from x402guard.ledger.view import Scope
from x402guard.x402.reconciliation import Reconciliation, ledger_reconciled, reconcile_wallet, scan_mark
from x402guard.x402.unexplained import unexplained_in, waiting_in

TRANSFER = OutgoingTransfer("0x" + "ab" * 32, 1, PAYEE, 100_000, block=7)
STOLEN = OutgoingTransfer("0x" + "cd" * 32, 1, OTHER_PAYEE, 5, block=7)
[TOKEN] = [each for each in AssetRegistry().on({"eip155:84532"}) if each.symbol == "USDC"]


def to_the_end(flow, store, answer):
    """Run a flow on a ledger; *answer* says what the chain answers to a question."""
    told = None
    with suppress(StopIteration):
        while True:
            effect, told = flow.send(told), None
            if isinstance(effect, Transact):
                told = store.transact(effect.scope, effect.change)
            elif isinstance(effect, AskChain):
                told = answer(effect.question)


def compared(guard, *transfers, meanwhile=()):
    """Compare what a chain shows, while payments are made, and return what the comparison says."""
    store, made, result = guard.shell.store, [], Reconciliation()
    flow = reconcile_wallet(
        guard.context,
        TOKEN,
        PAYER,
        START_MS // 1000,
        result,
        undecided=lambda: list(made),
        unshown=partial(store.marks, "unshown"),
        waiting=partial(waiting_in, store),
    )

    def answer(question):
        if not isinstance(question, WalletTransfers):
            return None
        made.extend(meanwhile)
        return Transfers(7, transfers, complete=True)

    to_the_end(flow, store, answer)
    result.unexplained = unexplained_in(store)
    return result


def test_the_undecided_payments_are_read_after_the_transfers():
    with make_guard() as guard:
        payment = an_intent(1, 100_000, scheme="exact", method="permit2")
        result = compared(guard, TRANSFER, meanwhile=[payment])
    assert (result.unexplained, result.complete) == ([], False)


def test_what_left_the_wallet_in_the_block_of_an_undecided_payment_is_told_at_once_and_once():
    """What may be the payment waits for it, and keeps nothing else from being told."""
    with make_guard() as guard:
        payment = an_intent(1, 100_000, scheme="exact", method="permit2")
        first = compared(guard, STOLEN, TRANSFER, meanwhile=[payment])
        assert ([row["transaction"] for row in first.unexplained], first.complete) == ([STOLEN.transaction], False)
        [mark] = guard.shell.store.marks("scan", "").values()
        assert (mark["block"], mark["unix"]) == (7, 0)
        second = compared(guard, meanwhile=[payment])
        assert (len(second.unexplained), second.complete) == (1, False)
        events = [entry for entry in guard.shell.store.entries("wallet") if "unexplained" in entry.data]
        assert len(events) == 1
        assert list(guard.shell.store.marks("scan", "")) == [scan_mark(TOKEN, PAYER)[1]]


def test_no_payment_that_is_signed_later_keeps_a_transfer_from_being_told():
    """A thief moves what a sale costs to its seller: it waits for that sale alone, and for no later one."""
    with make_guard() as guard:
        sales = [an_intent(number, 100_000, scheme="exact", method="permit2") for number in range(1, 6)]
        assert compared(guard, TRANSFER, meanwhile=sales[:1]).unexplained == []
        for later in sales[1:4]:
            assert compared(guard, meanwhile=[sales[0], later]).unexplained == []
        third = compared(guard, meanwhile=sales[1:])
        assert ([row["transaction"] for row in third.unexplained], third.complete) == ([TRANSFER.transaction], True)
        assert compared(guard, meanwhile=sales[1:]).unexplained == third.unexplained


def test_a_thousand_settlements_inside_a_contract_are_no_theft(ledger_url):
    """A seller's contract shows no nonce, and its owner compares the wallet once a month."""
    payments = [
        an_intent(number * 0x9E3779B97F4A7C15 % 2**64 << 192, 100_000, scheme="exact", method="permit2")
        for number in range(1_000)
    ]
    with make_guard(ledger_url) as guard:
        store = guard.shell.store
        for payment in payments:
            hold = a_hold(f"{payment.nonce:064x}", intent=payment)
            scope = Scope(marks=weigh_marks(hold, Used(final=True)))
            store.transact(scope, lambda view, hold=hold: note_unshown(view, hold))
        moved = [replace(TRANSFER, transaction=f"0x{number:064x}") for number in range(1_000)]
        result = compared(guard, *moved, STOLEN, TRANSFER)
        told = [row["transaction"] for row in result.unexplained]
        assert sorted(told) == sorted([STOLEN.transaction, TRANSFER.transaction]), "each payment explains one"


SHOWN, OTHER = "0x" + "11" * 32, "0x" + "22" * 32


@pytest.fixture
def paid():
    """(guard, hold) of a payment whose answer had no receipt."""
    shop = Shop(paid=lambda *_: httpx.Response(200, text="sold"))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, client(session, shop) as http:
        yield guard, guard.shell.store.hold(http.get(URL).extensions["x402guard"].hold_id)


def show(guard, hold, *, final):
    """Let a block show that the transaction SHOWN has taken the payment."""
    found = Settled(hold.payment().amount_atomic, SHOWN, 1, final=final)
    scope = Scope(holds=(hold.id,), marks=weigh_marks(hold, found))
    guard.shell.store.transact(scope, lambda view: weigh_proven(view, hold.id, found))


def reconciled(guard, hold, status):
    """Reconcile the ledger while OTHER has moved the amount, with the payment's nonce before it; *status* answers for the hold."""
    payment, store, result = hold.payment(), guard.shell.store, Reconciliation()
    transfer = OutgoingTransfer(OTHER, 1, payment.payee, payment.amount_atomic, block=7)

    def answer(question):
        match question:
            case WalletTransfers(token=payment.token):
                return Transfers(7, (transfer,), complete=True)
            case WalletTransfers():
                return Transfers(7, (), complete=True)
            case TransferNonce():
                return int(hold.id, 16)
            case HoldStatus(hold=asked):
                return status(asked.claim is not None and asked.claim.transaction == OTHER)
        return None

    context = replace(guard.context, chains=frozenset({payment.network}))
    to_the_end(ledger_reconciled(store, context, result), store, answer)
    return result


def settled(hold, transaction, *, final):
    return Settled(hold.payment().amount_atomic, transaction, 1, final=final)


def test_a_payment_whose_block_may_be_undone_is_not_decided(paid):
    """Its block is undone, another has taken it, and the node that is asked is behind."""
    guard, hold = paid
    show(guard, hold, final=False)
    result = reconciled(guard, hold, lambda _named: settled(hold, SHOWN, final=False))
    assert (result.unexplained, result.complete) == ([], False)
    result = reconciled(guard, hold, lambda _named: settled(hold, OTHER, final=True))
    assert (result.unexplained, result.complete) == ([], True)


def test_a_proof_of_a_dead_fork_gives_way_to_the_transfer_that_took_the_payment(paid):
    guard, hold = paid
    show(guard, hold, final=True)
    result = reconciled(guard, hold, lambda named: settled(hold, OTHER if named else SHOWN, final=True))
    assert (result.unexplained, result.complete) == ([], True)
    assert OTHER in guard.shell.store.hold(hold.id).proof


def test_what_moves_behind_the_settlement_of_a_payment_in_its_transaction_is_told(paid):
    """The nonce that is shown last belongs to the Transfer before it."""
    guard, hold = paid
    show(guard, hold, final=True)
    result = reconciled(guard, hold, lambda _named: settled(hold, SHOWN, final=True))
    assert [row["transaction"] for row in result.unexplained] == [OTHER]
