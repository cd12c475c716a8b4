"""Pairs each row after a change with the row before it, and plays the steps of each hold again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NoReturn

from x402guard.errors import IllegalTransition
from x402guard.kernel.change_set import Before, ChangeSet, Mark, MarkKey, Now, Opened, Step, mark_name
from x402guard.kernel.proofs import Lost, Proof
from x402guard.kernel.rows import Hold, HoldState, Node, lends
from x402guard.kernel.table import AUTHORIZE, STEPS
from x402guard.kernel.windows import Taken, rolled

_MOST_DEEP: Final = 1_000
"""The most nodes on a path. A row that is below itself has more."""


def refuse(rule: str, row: str, what: str) -> NoReturn:
    """Raise ``IllegalTransition`` for a change set: the rule that forbids it, the row, and what differs."""
    raise IllegalTransition(f"the kernel refuses this change by its rule {rule!r}: {row}: {what}", rule=rule, row=row)


class Move:
    """One hold of a change set.

    Attributes:
        before, after: its rows; *before* is None for a new hold.
        steps: in their order. *names*: theirs. *is_lost*: it is entered again, because the ledger's server has lost it.
        taken: what the hold takes before the first step, and after each.
        fault: what is wrong with the steps, or "". *place*: the name of its row in an error.
    """

    __slots__ = ("after", "before", "fault", "is_lost", "names", "place", "steps", "taken")

    def __init__(self, before: Hold | None, after: Hold, steps: tuple[Step, ...]) -> None:
        self.before, self.after, self.steps = before, after, steps
        self.taken, self.fault = _played(before, after, steps)
        self.names, self.place = {step.name for step in steps}, f"hold {after.id}"
        self.is_lost = before is None and bool(steps) and isinstance(steps[0].proof, Lost)

    @property
    def is_new_and_live(self) -> bool:
        """True for a new hold that stays live: it has to fit."""
        return self.before is None and self.after.state is HoldState.HELD and not self.is_lost

    def proof(self, name: str) -> Proof | None:
        """Return the last proof of its steps with a name."""
        named = (step.proof for step in reversed(self.steps) if step.name == name)
        return next((proof for proof in named if proof is not None), None)

    def played(self) -> Iterator[tuple[Taken, Taken, Step]]:
        """Yield what it takes before and after each step, and the step; not of the one that begins it."""
        steps = self.steps if self.before is not None else self.steps[1:]
        yield from zip(self.taken, self.taken[1:], steps, strict=False)

    def held(self) -> int:
        """Return by how much it changes what is held, in its unit."""
        was = self.before.amount if self.before is not None and self.before.state is HoldState.HELD else 0
        return (self.after.amount if self.after.state is HoldState.HELD else 0) - was

    def captured(self) -> int:
        """Return by how much it changes what is captured, in its unit."""
        return self.after.captured - (0 if self.before is None else self.before.captured)


def _played(before: Hold | None, after: Hold, steps: tuple[Step, ...]) -> tuple[list[Taken], str]:
    """Play the steps by the table: what the hold takes before the first one and after each, and what is wrong with them."""
    if before is None:
        if not steps or steps[0].name != AUTHORIZE:
            return [], "a new hold begins with another step than authorize"
        played, steps = [Taken(HoldState.HELD, 0, 0, 0)], steps[1:]
    else:
        first = before.first_captured if before.ended_by else 0
        played = [Taken(before.state, before.captured, before.closed_ms, first)]
    for step in steps:
        was = played[-1]
        target = STEPS.get((was.state, step.name))
        if target is None or target is not step.after:
            return played, f"{step.name} from {was.state} to {step.after} is not in the table"
        ends = target is HoldState.CAPTURED and was.state is not HoldState.CAPTURED
        played.append(Taken(target, step.captured, step.closed_ms, step.captured if ends else was.first))
    state, captured, _, _ = played[-1]
    if (state, captured) != (after.state, after.captured):
        return played, f"its steps end {state} with {captured} captured, its row is {after.state} with {after.captured}"
    return played, ""


class Changes:
    """A change set beside the rows before it, with windows rolled to the kernel's clock.

    Attributes:
        nodes: changed node → (its row before, rolled; None for a new one), and its row after.
        moves: the changed holds. *idle_steps*: holds that have steps, and whose rows are not written.
    """

    def __init__(self, opened: Opened, before: Before, change_set: ChangeSet, now: Now) -> None:
        self.opened, self.before, self.change_set, self.now = opened, before, change_set, now
        self._after = {node.id: node for node in change_set.nodes}
        steps: dict[str, list[Step]] = {}
        for step in change_set.steps:
            steps.setdefault(step.hold_id, []).append(step)
        self.moves = [Move(before.holds.get(hold.id), hold, tuple(steps.pop(hold.id, ()))) for hold in change_set.holds]
        self.idle_steps = list(steps)
        self.nodes = {node.id: (self.old(node.id), node) for node in change_set.nodes}
        self.commands = {(each.node_id, each.command) for each in change_set.owner}

    def old(self, node_id: str) -> Node | None:
        """Return the row before of a node, with its window rolled to the kernel's clock; None for a new node."""
        row = self.before.nodes.get(node_id)
        return row if row is None or row.window is None else rolled(row, self.now.clock_ms)

    def node(self, node_id: str) -> Node:
        """Return a node as it is after the change. Raises ``IllegalTransition`` for one that was not loaded."""
        found = self._after.get(node_id) or self.old(node_id)
        if found is None:
            refuse("books", f"node {node_id}", "it is neither loaded nor written")
        return found

    def path(self, node_id: str) -> list[Node]:
        """Return a node and its ancestors after the change, the node first."""
        found: list[Node] = []
        wanted: str | None = node_id
        while wanted is not None:
            if len(found) > _MOST_DEEP:
                refuse("books", f"node {node_id}", "it is below itself")
            found.append(self._after.get(wanted) or self.node(wanted))
            wanted = found[-1].parent_id
        return found

    def lends(self, node_id: str) -> bool:
        """True if the children of a node may keep idle budget."""
        return self.opened.keeps_idle and lends(self.path(node_id))

    def mark(self, key: MarkKey) -> Mark | None:
        """Return a mark as it is after the change. Raises ``IllegalTransition`` for one that was not loaded."""
        if mark_name(key) not in self.before.marks:
            refuse("giving back", f"mark {'/'.join(key)}", "it was not loaded")
        return dict(self.change_set.marks).get(key, self.before.marks[mark_name(key)])
