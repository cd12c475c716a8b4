"""What may leave a ledger: for a file only what has ended and is final, and for another ledger all of it, unchanged.

A budget's row stays with its sums, so nothing that leaves makes room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from x402guard.kernel.changes import refuse
from x402guard.kernel.rows import Delivery, Evidence, Hold, HoldState, Node


class Said(Struct, frozen=True):
    """What a journal says up to an entry: its number and hash, and the sums of the entries so far, in nanos or tokens."""

    seq: int = 0
    head: str = ""
    captured: int = 0
    held: int = 0
    granted_in: int = 0
    granted_out: int = 0


class Leaving(Struct, frozen=True):
    """Budgets and holds as the ledger has them in the transaction that removes them, and what the file says of them."""

    nodes: tuple[Node, ...]
    holds: tuple[Hold, ...]
    said: Mapping[str, Said]
    filed: Mapping[str, Hold]


def leave(
    write: Callable[[Callable[[Any], Leaving]], Leaving],
    choose: Callable[[Any], Leaving],
    remove: Callable[[Any, Leaving], None],
) -> Leaving:
    """Let a store *choose* what leaves, and *remove* it if it may leave, in one transaction (*write*). Return what has left.

    Raises ``IllegalTransition`` for anything else; then nothing is removed.
    """

    def work(query: Any) -> Leaving:
        leaving = choose(query)
        check_leaving(leaving)
        remove(query, leaving)
        return leaving

    return write(work)


def check_leaving(leaving: Leaving) -> None:
    """Only what has ended and is final leaves, as the file has it; and the file says the sums that stay in the rows."""
    for node in leaving.nodes:
        said, place = leaving.said.get(node.id), f"node {node.id}"
        if said is None or any(getattr(said, name) != getattr(node, name) for name in Said.__struct_fields__):
            refuse("books", place, "the file says another journal or other sums than its row")
        if node.held:
            refuse("lifecycle", place, f"{node.held} are held, and would leave for a file")
    ids = {node.id for node in leaving.nodes}
    for hold in leaving.holds:
        if hold.node_id not in ids or leaving.filed.get(hold.id) != hold:
            refuse("books", f"hold {hold.id}", "the file does not have it as it is, or not the journal of its budget")
        if not is_final(hold):
            refuse("lifecycle", f"hold {hold.id}", f"it is {hold.state} by {hold.evidence}, {hold.delivery}: not final")


def is_final(hold: Hold) -> bool:
    """True for what has ended and cannot change: a final block shows what a payment took, and its sale is over."""
    if hold.intent is None or hold.state is not HoldState.CAPTURED:
        return hold.state is not HoldState.HELD
    is_over = hold.proof is not None and hold.delivery in (Delivery.DONE, Delivery.FORGIVEN)
    return hold.evidence is Evidence.CHAIN and (is_over or not hold.captured)


def check_moved(left: Iterable[Any], arrived: Iterable[Any]) -> None:
    """Check that nodes, holds and money marks arrive, in one order. What is *live* a file and a server count differently."""
    for row, other in zip_longest(map(_compared, left), map(_compared, arrived)):
        if row != other:
            refuse("books", f"row {getattr(row or other, 'id', row or other)}", "it would not arrive as it left")


def _compared(row: Any) -> Any:
    return replace(row, live=0) if isinstance(row, Node) else row
