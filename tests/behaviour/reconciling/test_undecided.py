"""A payment that is made while the chain is read is among those that may explain a Transfer."""

from tests.support.ledger import PAYEE, PAYER, START_MS, an_intent
from tests.support.merchant import make_guard
from x402guard.assets import AssetRegistry
from x402guard.flow.effects import AskChain, Transact
from x402guard.flow.ports import OutgoingTransfer, Transfers, WalletTransfers
from x402guard.x402.reconciliation import Reconciliation, reconcile_wallet

TRANSFER = OutgoingTransfer("0x" + "ab" * 32, 1, PAYEE, 100_000, block=7)


def test_the_undecided_payments_are_read_after_the_transfers():
    [token] = [each for each in AssetRegistry().on({"eip155:84532"}) if each.symbol == "USDC"]
    made, result = [], Reconciliation()
    with make_guard() as guard:
        store = guard.shell.store
        flow = reconcile_wallet(guard.context, token, PAYER, START_MS // 1000, result, undecided=lambda: list(made))
        effect = next(flow)
        while True:
            told = None
            if isinstance(effect, Transact):
                told = store.transact(effect.scope, effect.change)
            elif isinstance(effect, AskChain) and isinstance(effect.question, WalletTransfers):
                made.append(an_intent(1, 100_000, scheme="exact", method="permit2"))  # meanwhile
                told = Transfers(7, (TRANSFER,), complete=True)
            try:
                effect = flow.send(told)
            except StopIteration:
                break
    assert (result.unexplained, result.complete) == ([], False)
