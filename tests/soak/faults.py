"""Guards that are broken on purpose: a soak that passes with one of these shows nothing."""

from collections.abc import Callable

from x402guard.ledger.events import Void
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.transitions import apply
from x402guard.ledger.view import Scope


def _without_the_kernel() -> None:
    """Take the kernel's check out, which would refuse what a broken room proposes."""
    import x402guard.kernel.ledger

    x402guard.kernel.ledger.check = lambda *_: None


def _forget(store: LedgerStore) -> None:
    """A process that starts gives back what the dead one held, as if nothing of it were out, and no kernel looks."""
    _without_the_kernel()
    for hold in store.outstanding():
        scope = Scope(nodes=(hold.node_id,), holds=(hold.id,))
        store.transact(
            scope, lambda view, hold=hold: apply(view, hold.id, Void("a new start")) if _held(view, hold) else None
        )


def _held(view, hold) -> bool:
    return view.known_hold(hold.id).state == "held"


def _twice(_store: LedgerStore) -> None:
    """A retry signs anew, whatever is out for the same purchase, and no kernel looks."""
    import x402guard.x402.purchase

    _without_the_kernel()
    x402guard.x402.purchase.open_purchases = lambda *_, **__: []


def _overdraw(_store: LedgerStore) -> None:
    """No budget is ever short, and the kernel does not look either."""
    import x402guard.ledger.authorize

    _without_the_kernel()
    x402guard.ledger.authorize.find_shortfall = lambda *_, **__: None


def _aside(_store: LedgerStore) -> None:
    """Nothing is changed here: the agent itself pays past the guard now and then, with the same key."""


FAULTS: dict[str, Callable[[LedgerStore], None]] = {
    "forget": _forget,
    "twice": _twice,
    "overdraw": _overdraw,
    "aside": _aside,
}
"""The ways to break it, each of which has to make another number of the last line go wrong."""
