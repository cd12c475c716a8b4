"""The end of a run: everything is well again, time passes, and what has to be true at last is checked."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final

from x402guard.errors import BudgetExhausted, PaymentRefused
from x402guard.kernel.rows import Entry, Evidence, Hold, HoldKind, HoldState, NodeKind, NodeState
from x402guard.ledger.evidence import UNSHOWN_S
from x402guard.ledger.queries import nodes_of
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.verify import Balances, HoldRow, verify_balances, verify_journal, verify_windows
from x402guard.policy.recount import too_low
from x402guard.testing.simulator.machine import Agent, SimProcess
from x402guard.testing.simulator.market import Seller, Want
from x402guard.testing.simulator.play import Play
from x402guard.testing.simulator.reports import check_report
from x402guard.testing.simulator.world import Violation

_ROUND_S: Final = 400
_TWO_DAYS_MS: Final = 2 * 86_400_000
_ROOM: Final = 2_000_000
_PRICE: Final = 1_000


class Ending:
    """The end of one run."""

    def __init__(self, play: Play) -> None:
        self._play, self._world, self._books = play, play.world, play.books
        self._calm_unix = 0

    def play(self) -> None:
        """Play the end, and check it. Raises ``Violation``."""
        self._world.say("everything is well again")
        self._world.calm, self._calm_unix = True, self._world.time.unix
        self._play.heal()
        self._wait(6)
        for process in self._world.processes:
            if not process.is_alive:
                self._play.start(process)
        self._reconcile(3)
        self._check_rows()
        self._check_owed()
        self._check_idle()
        self._world.time.ms += _TWO_DAYS_MS
        self._wait(1)
        self._buy_anew()
        self._wait(6)
        self._reconcile(3)
        self._check_rows()
        self._check_chain()
        for node in self._books.nodes.values():
            if node.kind is not NodeKind.TOKENS:
                check_report(self._store, node.id)

    @property
    def _store(self) -> LedgerStore:
        guard = self._world.alive[0].guard
        if guard is None:
            raise Violation("no-process", "no process runs at the end")
        return guard.shell.store

    @property
    def _readers(self) -> list[SimProcess]:
        return [process for process in self._world.alive if process.reads_chain]

    def _wait(self, rounds: int) -> None:
        """Let time pass: deadlines, and the finality of blocks."""
        chain = self._world.chain
        for _ in range(rounds):
            self._play.drain()
            self._world.time.ms += _ROUND_S * 1000
            for left in range(chain.depth + 1, -1, -1):
                chain.mine(self._world.time.unix - left * chain.block_s)
            for process in self._world.processes:
                self._play.owner.rechecks(process)
        self._play.drain()

    def _reconcile(self, times: int) -> None:
        for _ in range(times):
            for process in self._readers or self._world.alive:
                result = self._play.owner.reconciles_now(process)
                if result.unreadable and process.reads_chain:
                    raise Violation("unreadable-at-the-end", f"{process.name}: {result.unreadable}")

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _check_rows(self) -> None:
        store, books = self._store, self._books
        disk = self._play.disk
        nodes = list(store.nodes()) if disk is None else disk.all_nodes()
        books.check_all(nodes, None if disk is None else disk.all_holds())
        roots = [node.id for node in nodes if node.parent_id is None]
        entries = [entry for root in roots for entry in store.entries(root)]
        rows = [HoldRow.of(hold) for hold in books.holds.values()]
        self._check_counters(entries)
        sums: dict[str, Balances] = defaultdict(Balances)
        for entry in entries:
            total = sums[entry.node_id]
            total.captured, total.held = total.captured + entry.captured, total.held + entry.held
            total.granted_in, total.granted_out = (
                total.granted_in + entry.granted_in,
                total.granted_out + entry.granted_out,
            )
            total.seq = entry.seq
        held: Counter[str] = Counter()
        for hold in books.holds.values():
            held[hold.node_id] += hold.amount if hold.state is HoldState.HELD else 0
        keeps_idle = self._play.case.store == "fleet"
        problems = [
            *verify_journal(nodes, entries, rows, keeps_idle=keeps_idle)[0],
            *verify_balances(nodes, sums, held, keeps_idle=keeps_idle),
            *verify_windows(store),
        ]
        if problems:
            raise Violation("verify", "; ".join(problems[:3]))
        for node in nodes_of(store).values():
            counted = books.counted(node, store.now_ms())
            if node.kind is not NodeKind.TOKENS and node.counted < counted:
                raise Violation("window-undercounts", f"{node.id} counts {node.counted}, its holds {counted}")

    def _check_counters(self, entries: Sequence[Entry]) -> None:
        """Each row of the guards says at least what the journals say, under one of the policies that count in it."""
        policies = {id(policy): policy for policy in (each.settings["policy"] for each in self._world.processes)}
        told = [set(too_low(policy, entries, self._store)) for policy in policies.values()]
        if differing := set.intersection(*told):
            raise Violation("counter", min(differing))

    def _check_owed(self) -> None:
        """What a process could not write is written by it, or by the next one on its machine."""
        for hold_id, amount in self._books.owed.items():
            hold = self._books.holds[hold_id]
            if hold.captured < amount:
                raise Violation("bill-lost", f"{hold.captured} counted of {amount} billed: {hold}")
        for machine in self._world.machines:
            if machine.left:
                raise Violation("end-lost", f"{machine.name}: {machine.left[0].ends}")

    def _check_idle(self) -> None:
        for hold in self._books.holds.values():
            if hold.state is HoldState.HELD and hold.kind is not HoldKind.TOKENS:
                raise Violation("live-for-ever", f"{hold.kind} {hold}")

    # -- business -----------------------------------------------------------------------------------------------------

    def _buy_anew(self) -> None:
        """Let every session that is open and has room buy something of an honest seller."""
        number = 1_000
        for process in self._world.alive:
            for plan in self._play.plans:
                agent = self._play.open_session(process, plan)
                if agent is None:
                    continue
                number += 1
                self._buys(agent, number)

    def _buys(self, agent: Agent, number: int) -> None:
        node_id, process = agent.session.context.node_id, agent.process
        want = Want(number, Seller(self._play.sellers[0].payee), "exact", _PRICE, named=False, host="fresh.example")
        errors: list[BaseException | None] = []
        self._play.agents.buys(agent, want, self._world.draws("anew", number), errors.append)
        self._play.drain()
        nodes = nodes_of(self._store)
        at, is_open = nodes[node_id], True
        while True:
            is_open = is_open and at.state is not NodeState.TRIPPED
            if at.parent_id is None:
                break
            at = nodes[at.parent_id]
        rooms = self._books.rooms_at(node_id, self._store.now_ms())
        refused = bool(errors) and isinstance(errors[0], PaymentRefused)
        if refused and is_open and min(rooms.values(), default=_ROOM) >= _ROOM and process.reads_chain:
            error = errors[0]
            is_owners = self._play.own_policy and not isinstance(error, BudgetExhausted)
            if not is_owners and getattr(error, "rule", "") not in _OWNERS_RULES:
                raise Violation("cannot-buy", f"{agent.session.id}, rooms {rooms}: {error}")

    # -- the chain ----------------------------------------------------------------------------------------------------

    def _check_chain(self) -> None:
        """The books equal the chain to the atomic unit, and the alarms the transfers past the ledger."""
        if not self._readers:
            return
        asset, chain = self._world.asset, self._world.chain
        for hold in self._books.holds.values():
            if hold.intent is None:
                continue
            if hold.state is HoldState.HELD:
                raise Violation("live-for-ever", str(hold))
            took = asset.value_nanos(chain.taken(hold.intent.nonce))
            self._world.counts.settled += took > 0
            captured = hold.captured if hold.state is HoldState.CAPTURED else 0
            if captured == took:
                continue
            if captured > took and self._is_unshown(hold):
                self._world.coverage.notes["booked at its ceiling: no log shows the amount"] += 1
                continue
            raise Violation("not-equal", f"captured {captured}, the chain {took}: {hold}")
        outside = asset.value_nanos(chain.outside_units)
        if self._books.told < outside:
            raise Violation("alarm-missed", f"told {self._books.told}, moved past the ledger {outside}")
        if self._books.told > outside:
            raise Violation("false-alarm", f"told {self._books.told}, moved past the ledger {outside}")

    def _is_unshown(self, hold: Hold) -> bool:
        """True for a payment that stays at its ceiling, as documented, because no log shows what has used its nonce.

        That is a Permit2 payment that was settled inside a contract, or cancelled in a block in which a contract moved
        money to the same payee; or any payment that no healthy node was asked about until ``UNSHOWN_S`` after its deadline.
        """
        if hold.evidence is not Evidence.CHAIN or hold.proof is not None:
            return False
        if hold.deadline_unix + UNSHOWN_S < self._calm_unix + 3_600:
            return True
        intent, chain = hold.payment(), self._world.chain
        number = chain.used.get(intent.nonce)
        if number is None or intent.method != "permit2":
            return False
        return any(
            (each.kind == "wrapped" or len(each.parts) > 1)
            and any(part.intent.payee == intent.payee for part in each.parts)
            for each in chain.blocks[number].transactions
        )


_OWNERS_RULES: Final = frozenset(
    {"max_steps", "velocity", "repeat", "payee", "payee_change", "loop", "spike", "breaker_open", "max_calls"}
)
"""Rules of the owner's that may refuse also at the end."""
