"""Looks at the sessions of a ledger from another process, and trips those that are stuck."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from x402guard.flow.drivers import transact_now
from x402guard.flow.surroundings import here
from x402guard.guard.arguments import gone_instances
from x402guard.guard.guard import Guard
from x402guard.kernel.rows import Hold, HoldKind, Node, NodeState
from x402guard.ledger.delegations import DelegationState
from x402guard.ledger.inputs import Input, Wait, find_cycles, input_mark, read_input, wait_mark, waits_of
from x402guard.ledger.view import Scope
from x402guard.ledger.watch import (
    BEAT,
    Limits,
    open_runs,
    seen_of,
    trip_stuck,
    trip_youngest,
    why_deadlocked,
    why_stuck,
)
from x402guard.policy.steps import run_of

_Edge = tuple[str, str, int, int]


def _edge(wait: Wait, asked: Mapping[tuple[str, str], Input]) -> _Edge:
    """Return who waits for whom, and for the reply to which question: the same in the next look if none went on."""
    question = asked.get((wait.target, wait.waiter)) if wait.awaits == "reply" else None
    number, read_ms = (0, 0) if question is None else (question.number, question.read_ms)
    return wait.waiter, wait.target, number, read_ms


def _is_out(hold: Hold, now_ms: int) -> bool:
    return hold.kind is not HoldKind.TOKENS and hold.deadline_unix * 1000 >= now_ms


def _agent(node_id: str, delegated: Collection[str]) -> str:
    """Return the session of the agent that a node belongs to: that of its task, or the outermost one."""
    around = [each for each in delegated if node_id == each or node_id.startswith(f"{each}/")]
    return max(around, key=len, default=run_of(node_id))


class Watchdog:
    """Trips the sessions of a guard's ledger that are stuck, and notes each look, so that ``doctor`` sees when it has died."""

    def __init__(self, guard: Guard, limits: Limits, beat_s: int) -> None:
        self._guard, self._limits, self._beat_s = guard, limits, beat_s
        self._cycles: set[frozenset[_Edge]] = set()

    def look(self) -> list[tuple[Node, str]]:
        """Look once, and return the sessions that it has tripped, with the reasons. Raises ``LedgerUnavailable``.

        A cycle of sessions that wait for each other is tripped at the second look that shows it.
        """
        store = self._guard.shell.store
        self._note(ended=False)
        now_ms, nodes, holds = store.now_ms(), store.nodes(), store.outstanding()
        questions, states = store.marks("approval", "").values(), store.marks("state", "")
        instances, tripped = store.marks("instance", ""), []
        gone = gone_instances(instances, now_ms, store.lives)
        waits = _waits(store.marks("wait", "").values(), nodes, lambda key: key in gone or key not in instances)
        delegated = {
            key for key, row in store.marks("delegation", "").items() if row["state"] == DelegationState.WORKING
        }
        for run in open_runs(nodes, delegated):
            seen = seen_of(run, nodes, now_ms, holds=holds, questions=questions, states=states, waits=waits)
            seen = replace(seen, stopped=_stopped(run, instances))
            # A delegated task has its own deadline.
            reason = why_stuck(seen, replace(self._limits, run_s=None) if run.id in delegated else self._limits, now_ms)
            if reason is None:
                continue
            scope = Scope(nodes=seen.inside, durable=True)
            if transact_now(self._guard.shell, scope, partial(trip_stuck, seen=seen, reason=reason)):
                tripped.append((run, reason))
        names = {node.id: node.name for node in nodes}
        called = {_agent(hold.node_id, delegated) for hold in holds if _is_out(hold, now_ms)}
        # An agent with a call under way is at work in another task.
        waits = [wait for wait in waits if _agent(wait.waiter, delegated) not in called]
        return tripped + self._break_cycles(waits, names)

    def _break_cycles(self, waits: Collection[Wait], names: Mapping[str, str]) -> list[tuple[Node, str]]:
        inputs = map(read_input, self._guard.shell.store.marks("input", "").values() if waits else ())
        asked = {(each.to, each.sender): each for each in inputs}
        cycles = {frozenset(_edge(wait, asked) for wait in cycle): cycle for cycle in find_cycles(waits, asked)}
        before, self._cycles = self._cycles, set(cycles)
        tripped = []
        for key, cycle in cycles.items():
            if key not in before:
                continue
            reason = why_deadlocked(cycle, names)
            pairs = [(wait.waiter, wait.target) for wait in cycle]
            marks = tuple(mark for a, b in pairs for mark in (wait_mark(a, b), input_mark(b, a)))
            scope = Scope(nodes=tuple(wait.waiter for wait in cycle), marks=marks, durable=True)
            change = partial(trip_youngest, cycle=cycle, asked=asked, reason=reason)
            youngest = transact_now(self._guard.shell, scope, change)
            if youngest is not None:
                tripped.append((youngest, reason))
        return tripped

    def close(self) -> None:
        """Note that it has ended, and close the guard."""
        try:
            self._note(ended=True)
        finally:
            self._guard.close()

    def _note(self, *, ended: bool) -> None:
        at_ms = self._guard.shell.store.now_ms()
        row = {"at_ms": at_ms, "beat_s": self._beat_s, "pid": here().pid(), "host": here().machine(), "ended": ended}
        transact_now(self._guard.shell, Scope(marks=(BEAT,)), lambda view: view.put_mark(BEAT, row))


def _stopped(run: Node, instances: Mapping[str, Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the ids of a run's processes if all of them are of this machine and stopped; else none."""
    pids = set[int]()
    for opener in run.openers:
        row = instances.get(opener.rpartition("#")[0], {})
        pid = row.get("pid")
        if row.get("host") != here().machine() or not isinstance(pid, int) or not here().is_stopped(pid):
            return ()
        pids.add(pid)
    return tuple(sorted(pids))


def _waits(rows: Iterable[Mapping[str, Any]], nodes: Iterable[Node], gone: Callable[[str], bool]) -> list[Wait]:
    """Return the waits of open sessions for open sessions, as far as their processes are not known to have ended."""
    known = {node.id: node for node in nodes if node.state is NodeState.OPEN}

    def lives(node_id: str) -> bool:
        openers = known[node_id].openers if node_id in known else ()
        return any(not gone(each.rpartition("#")[0]) for each in openers)

    waits = [wait for row in rows for wait in waits_of(row, gone)]
    return [wait for wait in waits if wait.target in known and lives(wait.waiter)]
