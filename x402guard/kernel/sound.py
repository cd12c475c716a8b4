"""Looks at rows as they are loaded: what the commit has checked is checked again, so a row that was edited decides nothing."""

from __future__ import annotations

from typing import Final, NoReturn

from x402guard.errors import InconsistentLedger
from x402guard.kernel.change_set import Before
from x402guard.kernel.rows import Hold, HoldKind, HoldState, Node, NodeKind, NodeState

_MOST_KNOWN: Final = 4_096


class Sound:
    """The rows of an open ledger that were looked at last. The same row is not looked at twice."""

    def __init__(self) -> None:
        self._known: dict[str, Node | Hold] = {}

    def look(self, before: Before, *, keeps_idle: bool) -> None:
        """Look at the rows that were loaded. Raises ``InconsistentLedger``, which names the row, the rule and the figures."""
        known = self._known
        if len(known) > _MOST_KNOWN:
            known.clear()
        for row in (*before.nodes.values(), *before.holds.values()):
            if row is not None and known.get(row.id) is not row:
                if isinstance(row, Node):
                    _look_at_node(row, keeps_idle=keeps_idle)
                else:
                    _look_at_hold(row)
                known[row.id] = row


def _inconsistent(rule: str, row: str, what: str) -> NoReturn:
    raise InconsistentLedger(f"the ledger is inconsistent by the kernel's rule {rule!r}: {row}: {what}")


def _look_at_node(node: Node, *, keeps_idle: bool) -> None:
    place, drawn, limit = f"node {node.id}", node.granted_in, node.limit
    used = node.captured + node.held + node.granted_out
    if min(node.captured, node.held, node.granted_out, drawn) < 0:
        _inconsistent("books", place, "a balance is negative")
    if node.parent_id is None:
        if drawn:
            _inconsistent("books", place, f"it has no parent, and has drawn {drawn} from one")
    elif drawn < used or (drawn > used and not keeps_idle):
        _inconsistent("books", place, f"it uses {used}, and has drawn {drawn}")
    past = 0 if limit is None else used - node.past - limit
    if past > 0 and node.state is NodeState.OPEN and node.kind is not NodeKind.TOKENS:
        _inconsistent("room", place, f"it is {past} past its limit, and open")


def _look_at_hold(hold: Hold) -> None:
    place, intent = f"hold {hold.id}", hold.intent
    if hold.amount <= 0 or hold.captured < 0 or (hold.captured and hold.state is not HoldState.CAPTURED):
        _inconsistent("lifecycle", place, f"it is {hold.state} for {hold.amount}, with {hold.captured} captured")
    if (hold.kind is HoldKind.PAYMENT) is not (intent is not None):
        _inconsistent("lifecycle", place, f"it is of kind {hold.kind}, and what has an intent is a payment")
    if intent is not None and (hold.id, hold.deadline_unix) != (f"{intent.nonce:064x}", intent.valid_until):
        _inconsistent("lifecycle", place, "its nonce or deadline is not the one that is signed")
