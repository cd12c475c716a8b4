"""Plays a run: opens the processes, lets everything happen that the case plans, and lets it come to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from x402guard.errors import ConfigError, LedgerUnavailable, X402GuardError
from x402guard.guard.clock import accept_clock
from x402guard.guard.named_budget import BudgetParent
from x402guard.guard.session import Session
from x402guard.kernel.rows import WALLET
from x402guard.ledger.lost import to_enter, write_end
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.view import Notice
from x402guard.policy import Policy
from x402guard.stores import open_store
from x402guard.testing.simulator.agents import Agents
from x402guard.testing.simulator.books import Actor, Books
from x402guard.testing.simulator.case import Case, Stimulus
from x402guard.testing.simulator.chain import Transaction
from x402guard.testing.simulator.disk import SimMemory
from x402guard.testing.simulator.draws import Draws
from x402guard.testing.simulator.endpoints import Endpoint
from x402guard.testing.simulator.late import SimLateWrites
from x402guard.testing.simulator.ledgers import WatchedStore
from x402guard.testing.simulator.machine import Agent, Machine, SimOutbox, SimProcess
from x402guard.testing.simulator.market import Seller
from x402guard.testing.simulator.owner import Owner
from x402guard.testing.simulator.reports import check_report
from x402guard.testing.simulator.scene import KEY, SessionPlan, set_scene
from x402guard.testing.simulator.tasks import Tasks
from x402guard.testing.simulator.world import Violation
from x402guard.x402.signer import LocalSigner

_DAY_MS: Final = 86_400_000
_LOOKS_EVERY: Final = 1_000
_MOST_STEPS: Final = 400_000
_MOST_STEPS_A_STIMULUS: Final = 1_000
_DOWN_MS: Final = (0, 1_000, 10_000, 40_000, 200_000)
_SKEWS_MS: Final = (0, 0, -20_000, -3_000, 900, 20_000, 100_000, -100_000, -100_000, -250_000)


class Play:
    """One run under way. ``run`` plays it all.

    Args:
        case: the run.
        sellers, policy: in place of the drawn ones.
        trace: a list that gets the story of the run, a line for each event that matters; None for no story.
    """

    def __init__(
        self,
        case: Case,
        *,
        sellers: Sequence[Seller] = (),
        policy: Policy | None = None,
        trace: list[str] | None = None,
    ) -> None:
        self.case, self.own_policy = case, policy is not None
        scene = set_scene(case, sellers, policy, trace=trace)
        self.world, self.wants, self.sellers, self.plans, self.rpcs = (
            scene.world, scene.wants, scene.sellers, scene.plans, scene.rpcs,
        )  # fmt: skip
        self.books = Books(self.world, keeps_idle=case.store == "fleet")
        self.tasks = Tasks(self.world, self.books, lambda _hold, _task: None)
        self.agents = Agents(self.world, self.books, self.tasks)
        self.owner = Owner(self.world, self.books, self.tasks)
        self.disk: SimMemory | None = None
        self._full_until_ms = 0
        self._has_more = True
        self._most_steps = max(_MOST_STEPS, _MOST_STEPS_A_STIMULUS * case.length)
        self._folder = TemporaryDirectory() if case.store == "sqlite" else None
        self._stores: dict[str, LedgerStore] = {}
        self._acts = self._acts_by_name()

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self, end: Callable[[Play], None]) -> None:
        """Play the run, and then its *end*. Raises ``Violation``, ``BrokenActor``."""
        try:
            for process in self.world.processes:
                self.start(process)
            self.world.after(self.world.chain.block_s * 1000, self._mine, idle=True)
            schedule = iter(self.case.schedule())
            self._next(schedule)
            self.drain()
            end(self)
        finally:
            self.close()

    def close(self) -> None:
        """Close files, if the ledger is one."""
        for store in self._stores.values():
            store.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _step(self) -> None:
        self.world.step()
        touched = self.world.chain.touched
        if touched:
            for nonce in touched:
                self.books.note_chain(nonce)
            touched.clear()
        if self.world.counts.steps > self._most_steps:
            under_way = [str(task) for task in self.tasks.running.values()][:5]
            raise Violation("never-ends", f"after {self._most_steps} steps: {under_way}")

    def drain(self) -> None:
        """Play until nothing is under way, or nothing but background checks for a day: their endpoint answers none.

        Those of several processes overlap, so without a bound they would go on for as long as it stands still.
        """
        played, since_ms = 0, self.world.time.ms
        while self.world.busy or self.tasks.running:
            self._step()
            played += 1
            if played % _LOOKS_EVERY:
                continue
            checks_alone = all(task.actor.kind == "recheck" for task in self.tasks.running.values())
            if self._has_more or not checks_alone:
                since_ms = self.world.time.ms
            elif self.world.time.ms - since_ms > _DAY_MS:
                return

    def _next(self, schedule: Iterable[Stimulus]) -> None:
        """Plan the next stimulus."""
        stimulus = next(iter(schedule), None)
        self._has_more = stimulus is not None
        if stimulus is None:
            return

        def happens() -> bool:
            self._next(schedule)
            if not stimulus.what:
                return False
            draws = self.world.draws("stimulus", stimulus.number)
            self._acts[stimulus.what](draws)
            return True

        self.world.after(stimulus.pause_ms, happens)

    def _mine(self) -> bool:
        """Add a block. While nothing is under way, blocks are rarer, so that days pass in few steps."""
        world = self.world
        world.chain.mine(world.time.unix, left_out=self._left_out())
        quiet_ms = 0 if world.chain.pool or self.tasks.running else (world.next_ms - world.time.ms) // 3
        world.after(max(world.chain.block_s * 1000, quiet_ms), self._mine, idle=True)
        for process in world.alive:
            self.owner.rechecks(process)
        for process in world.processes:
            if not process.is_alive and process.down_until_ms <= world.time.ms:
                self.start(process)
        return True

    def _left_out(self) -> frozenset[str]:
        chain = self.world.chain
        if not chain.pool or not self.world.mix["censor"] or self.world.calm:
            return frozenset()
        draws = self.world.draws("censor", len(chain.blocks))
        return frozenset(each.hash for each in chain.pool if draws.chance(0.3))

    # -- processes ----------------------------------------------------------------------------------------------------

    def _store_of(self, process: SimProcess) -> LedgerStore:
        machine = process.machine
        if self._folder is not None:
            url = f"sqlite:///{Path(self._folder.name) / 'ledger.db'}"
            inner = open_store(url, clock_ms=machine.clock_ms, steady_ms=machine.steady_ms, verified=False)
            if process.name in self._stores:
                self._stores[process.name].close()
            self._stores[process.name] = inner
        else:
            self.disk = inner = SimMemory(
                self.disk,
                clock_ms=machine.clock_ms,
                steady_ms=machine.steady_ms,
                keeps_idle=self.case.store == "fleet",
            )
        return WatchedStore(inner, self.books.committed, lambda: self.world.time.ms < self._full_until_ms)

    def start(self, process: SimProcess) -> None:
        """Start a process. One that cannot write yet tries again later."""
        self.books.actor = Actor("opening", process)
        store, draws = self._store_of(process), self.world.draws("process", process.name, process.starts)
        signer = LocalSigner.from_key(KEY)
        if self.case.store == "fleet":
            process.outbox = SimOutbox(self.books.owed)
            name, die = f"{process.name} {process.starts}", partial(self._dies, process, process.starts + 1)
            process.late = SimLateWrites(self.world, self.books, process.outbox, name, die)
        for _ in range(2):
            try:
                self._write_left(process.machine, store)
                process.start(store, draws, self._notified, signer=signer)
                self.world.say(f"{process.name} starts as pid {process.pid} on {process.machine.name}")
                return
            except LedgerUnavailable:
                break
            except ConfigError as error:
                if not str(error).startswith("clock:"):
                    raise Violation("start-refused", f"{process.name}: {error}") from error
                self.world.coverage.notes["clock asked about"] += 1
                accept_clock(store, "owner")
        process.down_until_ms = self.world.time.ms + 10_000

    def _dies(self, process: SimProcess, start: int, draws: Draws) -> None:
        if process.is_alive and process.starts == start:
            process.down_until_ms = self.world.time.ms + draws.pick(_DOWN_MS)
            self.kill(process)

    def _write_left(self, machine: Machine, store: LedgerStore) -> None:
        """Write what ended processes of a machine could not, as the next one does that opens the ledger there."""
        while machine.left:
            for end in to_enter(machine.left[0].ends):
                store.transact(*write_end(end))
                self.world.coverage.notes["an end is written by the next process"] += 1
            machine.left.pop(0)

    def _notified(self, notices: Iterable[Notice]) -> None:
        for notice in notices:
            self.books.check_shown(f"notice {notice.kind}", f"{notice.message} {notice.facts}")
            self.world.coverage.notes[f"notice {notice.kind}"] += 1

    def kill(self, process: SimProcess) -> None:
        """End a process as by kill -9."""
        self.world.say(f"{process.name} dies")
        self.tasks.kill(process)
        for want in self.wants:
            want.under_way = sum(task.actor.want is want for task in self.tasks.running.values())
        process.end()

    def open_session(self, process: SimProcess, plan: SessionPlan) -> Agent | None:
        """Open a session in a process, with the named budgets around it; None if it is refused."""
        guard = process.guard
        if guard is None:
            return None
        self.books.actor = Actor("opening", process)

        def opened() -> Session:
            parent: BudgetParent = guard
            for name, limit, per in plan.above:
                parent = parent.budget(name, limit, per=per)
            return parent.session(plan.id, budget=plan.budget, id=plan.id, reserve=plan.reserve, tokens=plan.tokens)

        try:
            session = process.run(opened)
        except X402GuardError as error:
            self.world.coverage.notes[f"open refused: {type(error).__name__}"] += 1
            self.world.say(f"{process.name} cannot open {plan.id}: {error}")
            return None
        return process.enter(session, session.__enter__, session.close, process.context)

    # -- stimuli ------------------------------------------------------------------------------------------------------

    def _acts_by_name(self) -> dict[str, Callable[[Draws], None]]:
        """Return what each stimulus does. Its keys are those of ``case.STIMULI``."""
        by_agent: dict[str, Callable[[Agent, Draws], None]] = {
            "calls": self.agents.calls,
            "uses_tool": self.agents.uses_tool,
            "nests": self.agents.nests,
            "counts_tokens": self.agents.counts_tokens,
            "finalizes": self.agents.finalizes,
            "goes_past": self.agents.goes_past,
        }
        by_process: dict[str, Callable[[SimProcess, Draws], None]] = {
            "sweeps": self.owner.sweeps,
            "commands": self._commands,
            "resets": self.owner.resets,
            "cancels": self._cancels,
            "crash": self._crash,
            "closes": self._closes,
            "reconciles": self.owner.reconciles,
            "compares": self.owner.compares,
        }
        by_world: dict[str, Callable[[Draws], None]] = {
            "buys": self._buys,
            "opens": self._opens,
            "leaves": self._leaves,
            "reads": self._reads,
            "power": self._power,
            "disk_full": self._disk_full,
            "clock": self._clock,
            "reorg": self._reorg,
            "resends": self._resends,
            "endpoint": self._endpoint,
            "outside": self._outside,
            "dusk": self._dusk,
        }
        agents = {what: partial(self._with_agent, act) for what, act in by_agent.items()}
        return agents | {what: partial(self._in_one, act) for what, act in by_process.items()} | by_world

    def _in_one(self, act: Callable[[SimProcess, Draws], None], draws: Draws) -> None:
        alive = self.world.alive
        chosen = draws.below(len(self.world.processes))
        if alive:
            act(alive[chosen % len(alive)], draws)

    def _with_agent(self, act: Callable[[Agent, Draws], None], draws: Draws) -> None:
        def with_agent(process: SimProcess, draws: Draws) -> None:
            agents = process.open_agents()
            if not agents:
                opened = self.open_session(process, draws.pick(self.plans))
                agents = [] if opened is None else [opened]
            if agents:
                self.books.actor = Actor("opening", process)
                act(draws.pick(agents), draws)

        self._in_one(with_agent, draws)

    def _buys(self, draws: Draws) -> None:
        want = draws.pick(self.wants)
        if want.under_way and not (want.under_way < 3 and self.world.goes_wrong("elsewhere", 0.5, draws)):
            return

        def buys(agent: Agent, draws: Draws) -> None:
            session_id = agent.session.context.session_id
            want.session_id = want.session_id or session_id
            if session_id != want.session_id:
                same = self._of_session(agent.process, want.session_id)
                if not same:
                    return
                agent = draws.pick(same)
            self.agents.buys(agent, want, draws)

        self._with_agent(buys, draws)

    def _of_session(self, process: SimProcess, session_id: str) -> list[Agent]:
        """Return the agents of a session in a process; it is opened there if none has it."""
        same = [each for each in process.open_agents() if each.session.context.session_id == session_id]
        plan = next((plan for plan in self.plans if plan.id == session_id), None)
        opened = self.open_session(process, plan) if plan is not None and not same else None
        return same if opened is None else [opened]

    def _opens(self, draws: Draws) -> None:
        plan = draws.pick(self.plans)
        self._in_one(lambda process, _: self._open_once(process, plan), draws)

    def _open_once(self, process: SimProcess, plan: SessionPlan) -> None:
        if all(agent.session.id != plan.id for agent in process.open_agents()):
            self.open_session(process, plan)

    def _leaves(self, draws: Draws) -> None:
        if self.world.goes_wrong("closing", 1, draws):
            self._with_agent(lambda agent, _: self.agents.leaves(agent), draws)

    def _commands(self, process: SimProcess, draws: Draws) -> None:
        if self.world.goes_wrong("owner", 1, draws):
            self.owner.commands(process, draws)

    def _cancels(self, process: SimProcess, draws: Draws) -> None:
        if self.world.goes_wrong("cancel_tx", 1, draws):
            self.owner.cancels(process, draws)

    def _reads(self, draws: Draws) -> None:
        """Read a report, as the owner does at any time."""
        nodes = [node for node in self.books.nodes.values() if node.kind != "tokens"]
        node = draws.pick(nodes)

        def reads(process: SimProcess, _: Draws) -> None:
            if process.guard is not None:
                check_report(process.guard.shell.store, node.id)

        self._in_one(reads, draws)

    # -- what breaks --------------------------------------------------------------------------------------------------

    def _crash(self, process: SimProcess, draws: Draws) -> None:
        if self.world.goes_wrong("crash", 1, draws):
            process.down_until_ms = self.world.time.ms + draws.pick(_DOWN_MS)
            self.kill(process)

    def _closes(self, process: SimProcess, draws: Draws) -> None:
        """End a process in order: its sessions close, and its guard."""
        guard = process.guard
        if guard is None or not self.world.goes_wrong("close", 1, draws):
            return
        for agent in reversed(process.open_agents()):
            self.agents.leaves(agent)
        try:
            process.run(guard.close)
        except LedgerUnavailable:
            self.world.say(f"{process.name} cannot write that it ends")
        process.down_until_ms = self.world.time.ms + draws.pick(_DOWN_MS)
        self.kill(process)

    def _power(self, draws: Draws) -> None:
        """Cut the power: every process ends, and the newest commits that were not durable are gone."""
        lost = draws.below(1 + (0 if self.disk is None else self.disk.volatile))
        if self.disk is None or not self.world.goes_wrong("power", 1, draws):
            return
        self.world.say(f"the power is cut, {lost} commits are lost")
        for process in self.world.alive:
            process.down_until_ms = self.world.time.ms + draws.pick(_DOWN_MS)
            self.kill(process)
        for machine in self.world.machines:
            machine.reboot()
        self.disk.lose_power(lost)
        self.books.read_again(self.disk.all_nodes(), self.disk.all_holds(), self.disk.entries(WALLET))
        self.books.check_all((), None)

    def _disk_full(self, draws: Draws) -> None:
        until_ms = self.world.time.ms + draws.pick((500, 5_000, 60_000))
        if self.world.goes_wrong("disk_full", 1, draws):
            self._full_until_ms = until_ms
            self.world.say("the disk is full")

    def heal(self) -> None:
        """Mend everything: disk, clocks, endpoints."""
        self._full_until_ms = 0
        for machine in self.world.machines:
            machine.skew_ms = 0
        self.world.endpoint_changes += 1
        for endpoint in self.world.endpoints:
            endpoint.heal()
        for rpc in self.rpcs:
            rpc.hops = 0.0

    def _clock(self, draws: Draws) -> None:
        machine, skew_ms = draws.pick(self.world.machines), draws.pick(_SKEWS_MS)
        if self.world.goes_wrong("clock", 1, draws):
            machine.skew_ms = skew_ms
            self.world.say(f"the clock of {machine.name} is {skew_ms} ms ahead")

    def _reorg(self, draws: Draws) -> None:
        count, dropped = draws.pick((1, 2, 5, 11)), draws.pick((0.0, 0.5, 1.0))
        if self.world.goes_wrong("reorg", 1, draws):
            undone = self.world.chain.reorganise(count, draws, dropped=dropped, twist=self.world.mix["twist"])
            self.world.say(f"{count} blocks are undone: {undone}")

    def _resends(self, draws: Draws) -> None:
        """Send a settlement again that a reorganisation has dropped, as its seller can."""
        sent = [each for each in self.books.signed.values() if each.sent]
        if sent:
            signed = draws.pick(sent)
            if signed.settled_by is not None and not self.world.chain.knows(signed.settled_by):
                old = signed.settled_by
                signed.settled_by = Transaction(self.world.chain.new_hash(), old.kind, old.parts[:1])
                self.world.chain.submit(signed.settled_by)

    def _endpoint(self, draws: Draws) -> None:
        self.world.endpoint_changes += 1
        endpoint, mix = draws.pick(self.world.endpoints), self.world.goes_wrong
        liar = next((each for each in self.world.endpoints if each.lies), endpoint)
        if liar is not endpoint:
            return  # beside one that lies, the others tell the truth
        how = draws.pick(("down", "lag", "fork", "nonsense", "limit", "logs", "heals", "heals", "heals", "heals"))
        if how == "heals":
            endpoint.heal()
        elif how == "down" and mix("rpc_down", 1, draws):
            endpoint.down = True
        elif how == "lag" and mix("rpc_lag", 1, draws):
            endpoint.lag = draws.pick((1, 3, 8))
        elif how == "fork" and mix("rpc_fork", 1, draws):
            endpoint.leave(self.world.chain.blocks, self.world.chain.used)
        elif how == "nonsense" and mix("rpc_nonsense", 1, draws):
            endpoint.nonsense = draws.pick((0.02, 0.3))
        elif how == "limit" and mix("rpc_limit", 1, draws):
            endpoint.limited = True
        elif how == "logs" and mix("no_logs", 1, draws):
            endpoint.no_logs = True
        if how != "heals":
            self._lead_away(endpoint, draws)

    def _lead_away(self, endpoint: Endpoint, draws: Draws) -> None:
        """Let an endpoint answer from another chain. It does not say so only where another one tells the truth."""
        if self.world.goes_wrong("rpc_elsewhere", 0.2, draws):
            endpoint.lead_away(lies=False)
        others = [each for each in self.world.endpoints if each is not endpoint]
        if others and self.world.goes_wrong("rpc_lies", 0.2, draws):
            for other in others:
                other.heal()
            endpoint.lead_away(lies=True)

    def _dusk(self, draws: Draws) -> None:
        """Let time pass until shortly before midnight."""
        before_s = draws.pick((10, 40, 90, 140))
        self.world.time.ms += _DAY_MS - self.world.time.ms % _DAY_MS - before_s * 1_000
        self.world.say("the day ends soon")

    def _outside(self, draws: Draws) -> None:
        """Move money past the ledger, as another holder of the key can."""
        asset, chain = self.world.asset, self.world.chain
        amount = draws.pick((1, 5_000, 10_000, 50_000))
        if self.world.goes_wrong("outside", 1, draws):
            payer = LocalSigner.from_key(KEY).address
            chain.submit(Transaction(chain.new_hash(), "outside", outside=(asset.contract, payer, amount)))
            self.world.say(f"{amount} units leave the wallet past the ledger")
