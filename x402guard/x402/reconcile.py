"""Looks at the chain for a whole ledger, or one run: what ``Guard.reconcile`` and ``Session.reconcile`` do."""

from __future__ import annotations

from collections.abc import Callable

import anyio.to_thread

from x402guard.assets import AssetRegistry
from x402guard.evm import parse_address
from x402guard.flow.drivers import Shell, run
from x402guard.flow.terms import Terms
from x402guard.guard.account import nodes_of
from x402guard.ledger.model import WALLET
from x402guard.ledger.report import below
from x402guard.ledger.sessions import PAYER_MARK
from x402guard.x402.reconciliation import Reconciliation, reconcile_holds, reconcile_wallet


def reconcile_node(shell: Shell, terms: Terms, node_id: str) -> Reconciliation:
    """Ask the chain about every unproven payment of a budget and all below it, and write down what it shows."""
    store = shell.store
    inside = {node.id for node in below(nodes_of(store, node_id), node_id)}
    result = Reconciliation()
    unsettled = store.unsettled(store.now_ms() // 1000)
    wanted = [hold_id for hold_id in unsettled if (hold := store.hold(hold_id)) is not None and hold.node_id in inside]
    run(reconcile_holds(terms, wanted, result), shell)
    return result


def reconcile_ledger(shell: Shell, terms: Terms, registry: AssetRegistry) -> Reconciliation:
    """The same for all of a ledger; then compare what left its wallet with what its payments have proven."""
    store = shell.store
    result = Reconciliation()
    run(reconcile_holds(terms, store.unsettled(store.now_ms() // 1000), result), shell)
    row = store.marks(*PAYER_MARK).get(PAYER_MARK[1])
    if row is None:
        return result  # nobody has signed anything
    payer = parse_address(str(row["address"]))
    since_unix = min(node.created_ms for node in store.nodes() if node.id == WALLET) // 1000
    for token in registry.on(terms.chains):
        run(reconcile_wallet(token, payer, since_unix, result), shell)
    return result


async def areconciled(look: Callable[[], Reconciliation]) -> Reconciliation:
    """Run one look at the chain in a thread, and return what it found. A cancelled task leaves it behind: it ends by itself."""
    return await anyio.to_thread.run_sync(look, abandon_on_cancel=True)
