"""A Transfer that may be a payment which the chain has not decided yet is compared again, and told once at most."""

from tests.support.ledger import PAYEE, PAYER, START_MS, an_intent
from tests.support.merchant import OTHER_PAYEE, make_guard
from x402guard.assets import AssetRegistry
from x402guard.flow.effects import AskChain, Transact
from x402guard.flow.ports import OutgoingTransfer, Transfers, WalletTransfers
from x402guard.x402.reconciliation import Reconciliation, reconcile_wallet, scan_mark

TRANSFER = OutgoingTransfer("0x" + "ab" * 32, 1, PAYEE, 100_000, block=7)
STOLEN = OutgoingTransfer("0x" + "cd" * 32, 1, OTHER_PAYEE, 5, block=7)
[TOKEN] = [each for each in AssetRegistry().on({"eip155:84532"}) if each.symbol == "USDC"]


def compared(guard, *transfers, meanwhile=()):
    """Compare what a chain shows, while payments are made, and return what the comparison says."""
    store, made, result = guard.shell.store, [], Reconciliation()
    flow = reconcile_wallet(guard.context, TOKEN, PAYER, START_MS // 1000, result, undecided=lambda: list(made))
    told = None
    while True:
        try:
            effect = flow.send(told)
        except StopIteration:
            return result
        told = None
        if isinstance(effect, Transact):
            told = store.transact(effect.scope, effect.change)
        elif isinstance(effect, AskChain) and isinstance(effect.question, WalletTransfers):
            made.extend(meanwhile)
            told = Transfers(7, transfers, complete=True)


def test_the_undecided_payments_are_read_after_the_transfers():
    with make_guard() as guard:
        payment = an_intent(1, 100_000, scheme="exact", method="permit2")
        result = compared(guard, TRANSFER, meanwhile=[payment])
    assert (result.unexplained, result.complete) == ([], False)


def test_what_left_the_wallet_in_the_block_of_an_undecided_payment_is_told_once():
    with make_guard() as guard:
        payment = an_intent(1, 100_000, scheme="exact", method="permit2")
        first = compared(guard, STOLEN, TRANSFER, meanwhile=[payment])
        assert (first.unexplained, first.complete) == ([], False)
        [mark] = guard.shell.store.marks("scan", "").values()
        assert mark["block"] == 6
        second = compared(guard, STOLEN)
        assert [row["transaction"] for row in second.unexplained] == [STOLEN.transaction]
        events = [entry for entry in guard.shell.store.entries("wallet") if "unexplained" in entry.data]
        assert len(events) == 1
        assert list(guard.shell.store.marks("scan", "")) == [scan_mark(TOKEN, PAYER)[1]]
