"""Guards that are broken on purpose: a soak that passes with one of these shows nothing."""

from collections.abc import Callable

from x402guard.ledger.events import Void
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.transitions import apply
from x402guard.ledger.view import Scope


def _forget(store: LedgerStore) -> None:
    """A process that starts gives back what the dead one held, as if nothing of it were out."""
    for hold in store.outstanding():
        scope = Scope(nodes=(hold.node_id,), holds=(hold.id,))
        store.transact(
            scope, lambda view, hold=hold: apply(view, hold.id, Void("a new start")) if _held(view, hold) else None
        )


def _held(view, hold) -> bool:
    return view.known_hold(hold.id).state == "held"


def _twice(_store: LedgerStore) -> None:
    """A retry signs anew, whatever is out for the same purchase."""
    import x402guard.x402.purchase

    x402guard.x402.purchase.open_purchases = lambda *_, **__: []


def _overdraw(_store: LedgerStore) -> None:
    """No budget is ever short, and the store does not look either."""
    import x402guard.ledger.authorize
    import x402guard.stores.group_commit

    x402guard.ledger.authorize.find_shortfall = lambda *_, **__: None
    x402guard.stores.group_commit.check_change = lambda *_: None


def _aside(_store: LedgerStore) -> None:
    """Nothing is changed here: the agent itself pays past the guard now and then, with the same key."""


FAULTS: dict[str, Callable[[LedgerStore], None]] = {
    "forget": _forget,
    "twice": _twice,
    "overdraw": _overdraw,
    "aside": _aside,
}
"""The ways to break it, each of which has to make another number of the last line go wrong."""
