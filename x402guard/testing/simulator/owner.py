"""What owners and their commands do: limits, trips, resets, cancellations, forgiveness, sweeps, reconciliations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from x402guard.chain.rechecker import LONGEST_PAUSE_S, MOST_AT_ONCE
from x402guard.errors import ConfigError, IllegalTransition, LedgerUnavailable, X402GuardError
from x402guard.flow.drivers import transact_now
from x402guard.flow.effects import Flow
from x402guard.kernel.rows import WALLET, Nanos, NodeKind, NodeState
from x402guard.ledger.owner import owner_mark, reset_node, set_limit, trip_node
from x402guard.ledger.purchases import forgive, instance_mark
from x402guard.ledger.view import LedgerView, Scope
from x402guard.testing.simulator.books import Actor, Books
from x402guard.testing.simulator.chain import Part, Transaction
from x402guard.testing.simulator.draws import Draws
from x402guard.testing.simulator.machine import SimProcess
from x402guard.testing.simulator.tasks import Tasks
from x402guard.testing.simulator.world import Violation, World
from x402guard.x402.reconciled import Reconciliation
from x402guard.x402.reconciliation import ledger_reconciled, reconcile_holds
from x402guard.x402.settlement import Swept, sweep

R = TypeVar("R")

_OFTEN_ENOUGH_MS = 5_000
_LIMITS = (100_000_000, 300_000_000, 1_000_000_000, 5_000_000_000)


class Owner:
    """The owner of the wallet, and what runs for the owner."""

    def __init__(self, world: World, books: Books, tasks: Tasks) -> None:
        self._world, self._books, self._tasks = world, books, tasks
        self.reconciled = Reconciliation()

    def commands(self, process: SimProcess, draws: Draws) -> None:
        """Give one command on one budget."""
        nodes = [node for node in self._books.nodes.values() if node.kind is not NodeKind.TOKENS]
        node = self._books.nodes[WALLET] if draws.chance(0.4) else draws.pick(nodes)
        what = draws.below(10)
        if what < 2:
            scope = Scope(nodes=(node.id,), durable=True)
            self._now(process, scope, lambda view: trip_node(view, node.id, "the owner says so"))
        elif what < 6 and node.limit is not None:
            limit = Nanos(draws.pick(_LIMITS))
            scope = Scope(nodes=(node.id,), marks=(owner_mark(node.id),), durable=True)
            self._now(process, scope, lambda view: set_limit(view, node.id, limit, "owner"))
        else:
            self._forgives(process, draws)

    def resets(self, process: SimProcess, draws: Draws) -> None:
        """Reset a tripped budget, if there is one."""
        tripped = [node.id for node in self._books.nodes.values() if node.state is NodeState.TRIPPED]
        if tripped:
            reset = draws.pick(tripped)
            self._now(process, Scope(nodes=(reset,), durable=True), lambda view: reset_node(view, reset, "owner"))

    def _forgives(self, process: SimProcess, draws: Draws) -> None:
        sent = [each for each in self._books.signed.values() if each.generation == each.want.generation]
        if not sent:
            return
        chosen = draws.pick(sent)
        known = self._books.holds.get(chosen.hold_id)
        marks = () if known is None else (instance_mark(known.instance),)
        scope = Scope(holds=(chosen.hold_id,), marks=marks, durable=True)
        if self._now(process, scope, lambda view: forgive(view, chosen.hold_id, "owner")) is not None:
            chosen.want.excuses[chosen.generation] = "forgiven"

    def _now(self, process: SimProcess, scope: Scope, change: Callable[[LedgerView], R]) -> R | None:
        """Run one command; None if it is refused."""
        guard = process.guard
        if guard is None:
            return None
        self._books.actor = Actor("owner", process)
        try:
            return process.run(lambda: transact_now(guard.shell, scope, change))
        except (ConfigError, LedgerUnavailable):
            return None
        except IllegalTransition as error:
            raise Violation("illegal-transition", f"a command: {error}") from error

    def cancels(self, process: SimProcess, draws: Draws) -> None:
        """Sign a cancellation of a live payment, and send it to the chain, or not."""
        guard = process.guard
        chain = self._world.chain
        out = [each.intent for each in self._books.signed.values() if each.intent.nonce not in chain.used]
        live = [intent for intent in out if not intent.dead_at(chain.final.time)]
        if guard is None or not live:
            return
        intent = draws.pick(live)
        self._books.actor = Actor("owner", process)
        if intent.method == "eip3009":
            try:
                process.run(lambda: guard.cancel(f"{intent.nonce:064x}"))
            except X402GuardError:
                return
        if draws.chance(0.8):
            later_s = draws.pick((0, 0, 15, 60))
            parts = (Part(intent, 0),)
            chain.submit(Transaction(chain.new_hash(), "cancel", parts, self._world.time.unix + later_s))

    # -- what asks the chain ------------------------------------------------------------------------------------------

    def sweeps(self, process: SimProcess, draws: Draws) -> None:
        """Ask the chain once about some payments."""
        if process.guard is not None and process.reads_chain:
            self._tasks.begin("sweep", sweep(process.guard.context), process, draws)

    def rechecks(self, process: SimProcess) -> None:
        """Check claims in the background if that is due: one check at a time, then in growing pauses while any is open."""
        guard, due_ms = process.guard, process.recheck_ms
        if guard is None or process.is_checking or due_ms is None or due_ms > self._world.time.ms:
            return
        process.recheck_ms, process.is_checking, process.checks = None, True, process.checks + 1
        began_ms, troubles, waiting = self._world.time.ms, self._troubles(process), list(self._books.claimed)

        def look() -> Flow[int]:
            since_ms: int | None = None
            for _ in range(MOST_AT_ONCE):
                swept: Swept = yield from sweep(guard.context, since_ms=since_ms)
                since_ms = swept.began_ms if since_ms is None else since_ms
                if not swept.more:
                    break
            return swept.still_open

        def ended(still_open: int | None, _error: BaseException | None) -> None:
            process.is_checking = False
            if still_open is not None and troubles is not None and troubles == self._troubles(process):
                self._check_asked(waiting, began_ms)
            if still_open == 0:
                return
            process.pause_ms = min(int(LONGEST_PAUSE_S * 1000), 2 * process.pause_ms)
            due_ms = self._world.time.ms + process.pause_ms
            process.recheck_ms = due_ms if process.recheck_ms is None else min(due_ms, process.recheck_ms)

        draws = self._world.draws("recheck", process.name, process.checks)
        self._tasks.begin("recheck", look(), process, draws, on_end=ended)

    def _troubles(self, process: SimProcess) -> int | None:
        """Return how often an endpoint has changed, while all are well and the clocks are right; else None."""
        world = self._world
        well = all(endpoint.is_well for endpoint in world.endpoints) and process.reads_chain
        return world.endpoint_changes if well and not world.mix["rpc_hops"] and not world.mix["clock"] else None

    def _check_asked(self, waiting: list[str], since_ms: int) -> None:
        """After a background check, it has asked about every claim that waited at its begin: none waits behind others."""
        claimed = self._books.claimed
        for hold in (claimed[hold_id] for hold_id in waiting if hold_id in claimed):
            if max(hold.checked_ms, hold.closed_ms) < since_ms - _OFTEN_ENOUGH_MS:
                raise Violation("claim-unchecked", f"a background check has left out {hold}")

    def reconciles(self, process: SimProcess, draws: Draws) -> None:
        """Reconcile every unproven payment."""
        guard = process.guard
        if guard is not None:
            store = guard.shell.store
            flow = reconcile_holds(guard.context, store.unsettled(store.now_ms() // 1000), Reconciliation())
            self._tasks.begin("reconcile", flow, process, draws)

    def compares(self, process: SimProcess, draws: Draws) -> None:
        """Reconcile the ledger, and compare what left the wallet; often twice at the same time, as by hand and a timer."""
        guard = process.guard
        if guard is None:
            return
        for _ in range(2 if draws.chance(0.6) else 1):
            flow = ledger_reconciled(guard.shell.store, guard.context, Reconciliation())
            self._tasks.begin("reconcile", flow, process, Draws(draws.bits64()))

    def reconciles_now(self, process: SimProcess) -> Reconciliation:
        """Run the command to its end, as `x402guard reconcile` does."""
        guard = process.guard
        if guard is None:
            raise Violation("runs-after-death", process.name)
        self._books.actor = Actor("reconcile", process)
        try:
            return process.run(guard.reconcile)
        except IllegalTransition as error:
            raise Violation("illegal-transition", f"reconcile: {error}") from error
