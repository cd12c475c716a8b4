"""Decides which open sessions are stuck: stopped, silent, past their time, in one state, or waiting in a cycle."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Hold, HoldKind, Node, NodeKind, NodeState
from x402guard.ledger.budgets import trip
from x402guard.ledger.inputs import Input, Wait, input_of, wait_mark
from x402guard.ledger.questions import answer_of
from x402guard.ledger.view import LedgerView

WATCHDOG: Final = "watchdog"
"""The word of a run that the watchdog has tripped."""

BEAT: Final[MarkKey] = ("watchdog", "beat")
"""The key of the mark that says when the watchdog has last looked."""


class Limits(Struct, frozen=True):
    """What a watchdog takes for stuck.

    Attributes:
        silence_s: seconds without an entry, with nothing under way.
        run_s: seconds since the run was opened; None for no limit.
        states: how often a run may report the same state.
    """

    silence_s: int
    run_s: int | None
    states: int


class Seen(Struct, frozen=True):
    """What was seen of one open run, or of one session that works on a delegated task.

    Attributes:
        run: its outermost session, or that session.
        inside: the ids of its nodes.
        last_ms: its last entry, in unix milliseconds.
        waits: True if a call of it is under way, a question of it waits for a person, or it waits for another agent.
        same_state: how often it has reported the state that it has reported most.
        stopped: the ids of its processes, if all of them are stopped; else empty.
    """

    run: Node
    inside: tuple[str, ...]
    last_ms: int
    waits: bool
    same_state: int
    stopped: tuple[int, ...] = ()


def open_runs(nodes: Collection[Node], delegated: Collection[str]) -> list[Node]:
    """Return the outermost sessions that are open in a process, and those that work on *delegated* tasks."""
    found = (node for node in nodes if node.kind is NodeKind.SESSION and ("/" not in node.id or node.id in delegated))
    return [node for node in found if node.state is NodeState.OPEN and node.openers]


def seen_of(
    run: Node,
    nodes: Collection[Node],
    now_ms: int,
    *,
    holds: Collection[Hold],
    questions: Collection[Mapping[str, Any]],
    states: Mapping[str, Mapping[str, Any]],
    waits: Collection[Wait],
) -> Seen:
    """Return what the rows of a ledger show of an open run, as of *now_ms* (unix milliseconds).

    *holds* are the live ones; *questions* and *states* the marks of approvals and of reported states; *waits* those of
    living sessions for other ones.
    """
    inside = {node.id: node for node in nodes if node.id == run.id or node.id.startswith(f"{run.id}/")}
    out = (hold for hold in holds if hold.node_id in inside and hold.kind is not HoldKind.TOKENS)
    asked = (row for row in questions if row["session"] in inside and answer_of(row, now_ms) is None)
    return Seen(
        run=run,
        inside=tuple(inside),
        last_ms=max(node.last_ms for node in inside.values()),
        waits=any(hold.deadline_unix * 1000 >= now_ms for hold in out)
        or any(not row["taken"] for row in asked)
        or any(wait.waiter in inside for wait in waits),
        same_state=max((row["count"] for key, row in states.items() if key.startswith(f"{run.id} ")), default=0),
    )


def why_stuck(seen: Seen, limits: Limits, now_ms: int) -> str | None:
    """Return why a run is stuck, in words, or None."""
    if seen.stopped:
        names = ", ".join(map(str, seen.stopped))
        return f"its process {names} is stopped" if len(seen.stopped) == 1 else f"its processes {names} are stopped"
    if limits.run_s is not None and now_ms - seen.run.created_ms > limits.run_s * 1000:
        return f"it is open for {(now_ms - seen.run.created_ms) // 1000} s, and may be for {limits.run_s}"
    if seen.same_state >= limits.states:
        return f"it has reported the same state {seen.same_state} times"
    silent_s = (now_ms - seen.last_ms) // 1000
    if silent_s >= limits.silence_s and not seen.waits:
        return f"it is silent for {silent_s} s"
    return None


def why_deadlocked(cycle: Sequence[Wait], names: Mapping[str, str]) -> str:
    """Return a cycle of waits in words; *names* are those of the sessions, by id."""
    each = (
        f"{names[w.waiter]!r} ({w.waiter}) waits for a {w.awaits} of {names[w.target]!r} ({w.target})" for w in cycle
    )
    return f"a deadlock: {', '.join(each)}"


def trip_youngest(
    view: LedgerView, cycle: Sequence[Wait], asked: Mapping[tuple[str, str], Input], reason: str
) -> Node | None:
    """Trip the session of a cycle of waits that was opened last; None if one of them has gone on.

    *asked* are the questions by (asked session, sender), as they were seen.
    """
    for wait in cycle:
        row, edge = view.mark(wait_mark(wait.waiter, wait.target)), (wait.target, wait.waiter)
        if row is None or not row["calls"]:
            return None
        if wait.awaits == "reply" and input_of(view, *edge) != asked.get(edge):
            return None
    youngest = max((view.node(wait.waiter) for wait in cycle), key=lambda node: (node.created_ms, node.id))
    trip(view, youngest.id, WATCHDOG, reason)
    return youngest if view.node(youngest.id).state is NodeState.TRIPPED else None


def trip_stuck(view: LedgerView, seen: Seen, reason: str) -> bool:
    """Trip a run that is stuck, and return whether it is: it has ended or gone on since, if not."""
    now = [view.node(node_id) for node_id in seen.inside if view.has_node(node_id)]
    gone_on = max(node.last_ms for node in now) != seen.last_ms and not seen.stopped
    if gone_on or view.node(seen.run.id).state is not NodeState.OPEN:
        return False
    trip(view, seen.run.id, WATCHDOG, reason)
    return view.node(seen.run.id).state is NodeState.TRIPPED
