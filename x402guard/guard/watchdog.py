"""Looks at the runs of a ledger from another process, and trips those that are stuck."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from x402guard.flow.drivers import transact_now
from x402guard.flow.surroundings import here
from x402guard.frozen import replace
from x402guard.guard.guard import Guard
from x402guard.ledger.model import Node
from x402guard.ledger.view import Scope
from x402guard.ledger.watch import BEAT, Limits, open_runs, seen_of, trip_stuck, why_stuck


class Watchdog:
    """Trips the runs of a guard's ledger that are stuck, and notes each look, so that ``doctor`` sees when it has died."""

    def __init__(self, guard: Guard, limits: Limits, beat_s: int) -> None:
        self._guard, self._limits, self._beat_s = guard, limits, beat_s

    def look(self) -> list[tuple[Node, str]]:
        """Look once, and return the runs that it has tripped, with the reasons. Raises ``LedgerUnavailable``."""
        store = self._guard.shell.store
        self._note(ended=False)
        now_ms, nodes, holds = store.now_ms(), store.nodes(), store.outstanding()
        questions, states = store.marks("approval", "").values(), store.marks("state", "")
        instances, tripped = store.marks("instance", ""), []
        for run in open_runs(nodes):
            seen = seen_of(run, nodes, now_ms, holds=holds, questions=questions, states=states)
            seen = replace(seen, stopped=_stopped(run, instances))
            reason = why_stuck(seen, self._limits, now_ms)
            if reason is None:
                continue
            scope = Scope(nodes=seen.inside, durable=True)
            if transact_now(self._guard.shell, scope, partial(trip_stuck, seen=seen, reason=reason)):
                tripped.append((run, reason))
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
