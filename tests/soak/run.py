"""The run: builds the world, starts agents again and again, makes trouble, checks, and counts at the end."""

import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

from eth_account import Account

from tests.soak import agent
from tests.soak.bookwatch import Books, BookWatch, ServerWatch
from tests.soak.chainwatch import ChainWatch
from tests.soak.checker import NANOS, Checker
from tests.soak.layout import LIFETIME_S, MOST_JUMPS_S, Lines, Plan, SharedClock
from tests.soak.seller import LyingSeller
from tests.soak.server import LedgerServer
from x402guard import Guard
from x402guard.kernel.rows import Nanos
from x402guard.ledger.owner import owner_mark, set_limit
from x402guard.ledger.view import Scope
from x402guard.money import format_dollars
from x402guard.stores import open_store
from x402guard.testing import AnvilEngine, EthTesterEngine, Facilitator, HostileChain, Testnet

SLOTS = 4
RECONCILER = SLOTS
CLOSING_S = 300
"""How long the last start may take."""

UNASKED_S = 2.0
"""How long there is no chain at the end, so that what sellers have claimed is left for the last start to ask about."""

_TROUBLE = ("dead", "hangs", "errors", "rate_limited", "null", "garbage", "stale")
_WALLET, _TEAM = "$0.15", "$0.09"
SELLERS = 3
"""The last speaks version 1: an origin that has spoken version 2 is not believed when it steps back."""


@dataclass
class Soak:
    """One run of so many seconds.

    It goes on until `least` payments are signed, three times as long at most: a machine may be busy. `fault` breaks the agents' guards on
    purpose; such a run ends as soon as that is seen.
    """

    seconds: float
    seed: int
    engine: str
    least: int = 0
    fault: str = ""
    store_kind: str = "sqlite"
    server: LedgerServer | None = None
    kills: int = 0
    jumps: int = 0
    troubles: int = 0
    raises: int = 0
    said: Counter[str] = field(default_factory=Counter)
    leave: Counter[str] = field(default_factory=Counter)
    broke: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    wanting: list[str] = field(default_factory=list)
    behind: list[tuple[Callable[[int], None], int]] = field(default_factory=list)
    contradicted: set[str] = field(default_factory=set)
    closed: dict | None = None
    looks: list[dict] = field(default_factory=list)

    def run(self) -> Books:
        """Do it; return the ledger as it stands at the end. What went wrong stands in `checker` and `broke`."""
        self.chance = random.Random(self.seed)
        with ExitStack() as opened:
            self._build(opened)
            opened.callback(self._end_everybody)
            for slot in range(SLOTS + 1):
                self._start(slot)
            self._make_trouble()
            return self._count()

    # ---- the world ----

    def _build(self, opened: ExitStack) -> None:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="x402guard-soak-")))
        opened.enter_context(patch.dict(os.environ, XDG_STATE_HOME=str(folder / "state")))
        self.clock = SharedClock(folder / "clock")
        maker = (
            EthTesterEngine if self.engine == "eth-tester" else partial(AnvilEngine, slots_in_an_epoch=1, tick_s=1.0)
        )
        self.net = opened.enter_context(Testnet(make_engine=maker))
        self.front = opened.enter_context(HostileChain(self.net.engine))
        self.sellers = [self._seller(opened, number) for number in range(SELLERS)]
        urls = tuple(seller.url for seller in self.sellers)
        ledger, watch = self._ledger(opened, folder)
        self.plan = Plan(
            str(folder), self.front.url, urls, self.net.network, self.net.payer_key, self.seed, self.fault, ledger
        )
        self.store = open_store(self.plan.ledger, clock_ms=self.clock)
        opened.callback(self.store.close)
        with Guard(ledger=self.store, budget=_WALLET) as owner:
            for number in range(2):
                owner.budget(f"team-{number}", _TEAM)
        self.told = Lines(folder / "told.jsonl")
        opened.callback(self.told.close)
        signers = Lines(folder / "signed.jsonl")
        opened.callback(signers.close)
        watched, chain = watch(), ChainWatch(self.net)
        opened.callback(watched.close)
        opened.callback(chain.close)
        self.checker = Checker(self.sellers, signers, watched, chain)
        self._stop_late = threading.Event()
        self._late = threading.Thread(target=self._settle_late, name="soak-late-settlements", daemon=True)
        self._late.start()
        opened.callback(self._end_late)
        # A server process that has imported everything: a start is a fork of it, and takes no second.
        self.starter = multiprocessing.get_context("forkserver")
        self.starter.set_forkserver_preload(["tests.soak.agent"])
        self.running: dict[int, multiprocessing.process.BaseProcess] = {}
        self.starts: Counter[int] = Counter()

    def _ledger(self, opened: ExitStack, folder: Path) -> tuple[str, Callable[[], BookWatch]]:
        """The ledger's URL, and what reads it."""
        if self.store_kind == "sqlite":
            return f"sqlite:///{folder}/spend.db", lambda: BookWatch(folder / "spend.db")
        self.server = LedgerServer(opened, folder, self.chance)
        return self.server.url, lambda: ServerWatch(self.server.direct)

    def _seller(self, opened: ExitStack, number: int) -> LyingSeller:
        collector = Account.create()
        self.net.fund(collector.address, wei=10**20)
        facilitator = Facilitator(rpc_url=self.net.rpc, chain_id=self.net.chain_id, key=collector.key.hex())
        opened.callback(facilitator.close)
        return opened.enter_context(LyingSeller(self.net, facilitator, self.clock, self.seed + number))

    def _settle_late(self) -> None:
        while not self._stop_late.wait(0.1):
            for seller in self.sellers:
                seller.settle_due()

    def _end_late(self) -> None:
        self._stop_late.set()
        self._late.join()

    # ---- agents ----

    def _start(self, slot: int) -> None:
        number = self.starts[slot]
        if slot == RECONCILER:
            started = self.starter.Process(target=agent.run_reconciler, args=(self.plan, number))
        else:
            started = self.starter.Process(target=agent.run_agent, args=(self.plan, slot, number))
        started.start()
        self.running[slot] = started
        self.starts[slot] += 1

    def _kill(self, slot: int) -> None:
        killed = self.running.pop(slot)
        if not killed.is_alive():
            self.broke.append(f"slot {slot} ended by itself with {killed.exitcode}")
        killed.kill()
        killed.join()
        killed.close()

    def _end_everybody(self) -> None:
        for slot in list(self.running):
            self._kill(slot)

    # ---- trouble ----

    def _make_trouble(self) -> None:
        """Until time is up: whatever is due, each at its own random pace."""
        began = time.monotonic()
        jump_every = max(5.0, self.seconds * 8 / MOST_JUMPS_S)
        paces: dict[Callable[[], None], float] = {
            self._check: 1.0,
            self._kill_one: 1.2,
            self._change_front: 1.5,
            self._jump: jump_every,
            self._catch_up: 4.0,
            self._raise_limits: 3.0,
        }
        if self.server is not None:
            paces |= {self.server.crash: 9.0, self.server.cut: 0.8, self._fail_over: self.seconds / 2}
        due = {what: began + pace * self.chance.uniform(0.5, 1.5) for what, pace in paces.items()}
        while not self._is_enough(now := time.monotonic(), began):
            what = min(due, key=lambda each: due[each])
            if due[what] > now:
                time.sleep(due[what] - now)
                continue
            what()
            due[what] = time.monotonic() + paces[what] * (1 if what == self._check else self.chance.uniform(0.5, 1.5))

    def _is_enough(self, now: float, began: float) -> bool:
        if self.fault and (self.checker.failures or self.again):
            return True
        longer = 3 if len(self.checker.signed) < self.least else 1
        return now >= began + longer * self.seconds

    def _fail_over(self) -> None:
        if self.server is not None and not self.server.failovers:
            self.server.fail_over()

    def _check(self) -> None:
        books = self.checker.check()
        self._find_signed_again()
        self.wanting = [
            name
            for name, node in books.nodes.items()
            if (name == "wallet" or name.startswith("budget:")) and node.limit and node.counted > node.limit * 0.95
        ]

    def _kill_one(self) -> None:
        slot = self.chance.choice([*range(SLOTS), *range(SLOTS), RECONCILER])
        self._kill(slot)
        self.kills += 1
        self._check()
        self._start(slot)

    def _change_front(self) -> None:
        honest = self.front.behaviour != "honest" or self.chance.random() < 0.5
        self.front.misbehave("honest" if honest else self.chance.choice(_TROUBLE))
        self.troubles += not honest

    def _jump(self) -> None:
        """Time passes for the chain or for the ledger; for the other one a moment later. Who believes the wrong one frees too early."""
        seconds = min(self.chance.randint(3, 12), MOST_JUMPS_S - self.clock.added_s)
        if seconds > 0 and not self.behind:
            ahead, behind = self.chance.sample([self.clock.add, self.net.advance], 2)
            ahead(seconds)
            self.behind.append((behind, seconds))
            self.jumps += 1

    def _catch_up(self) -> None:
        while self.behind:
            pass_time, seconds = self.behind.pop()
            pass_time(seconds)

    def _raise_limits(self) -> None:
        """The owner gives more to what is used up, now and then: else the rest of the run would only be refused."""
        for name in self.wanting:
            if self.chance.random() < 0.6:
                more = Nanos(self.checker.ledger.read().nodes[name].limit * 13 // 10)
                scope = Scope(nodes=(name,), marks=(owner_mark(name),), durable=True)
                agent.while_away(
                    lambda scope=scope, name=name, more=more: self.store.transact(
                        scope, lambda view: set_limit(view, name, more, "the soak")
                    )
                )
                self.raises += 1

    def _find_signed_again(self) -> None:
        """The journal is read first: whoever asks for a second payment says so before."""
        times = self.checker.ledger.signed_again()
        self._listen()
        self.again = [place for place, count in times.items() if count > self.leave[place]]

    def _listen(self) -> None:
        for line in self.told.fresh():
            if "said" in line:
                self.said[line["said"]] += 1
            if "again" in line:
                self.leave[line["again"]] += 1
            if "broke" in line:
                self.broke.append(line["broke"])
            if "reconciled" in line:
                self.contradicted |= set(line["reconciled"]["contradicted"])
                if line["reconciled"]["unexplained"]:
                    self.said["alarm unexplained_transfer"] += 1
            if "looked" in line:
                self.looks.append(line["looked"])
            if "closed" in line:
                self.closed = line["closed"]

    # ---- the end ----

    def _count(self) -> Books:
        """Let nothing be takeable any more, start once more, and compare to the atomic unit."""
        self.front.misbehave("dead")
        time.sleep(UNASKED_S)
        self._end_everybody()
        self.checker.check()
        self._end_late()
        for number, seller in enumerate(self.sellers):
            if number:
                seller.settle_due(all_of_them=True)  # what the other one has kept is never taken
            seller.close()
        self.front.misbehave("honest")
        self._catch_up()
        self.clock.add(LIFETIME_S + 1)
        for seconds in (LIFETIME_S + 1, 1, 1, 1):  # anvil's final block is some way back
            self.net.advance(seconds)
        self.checker.check()
        last = self.starter.Process(target=agent.run_closing, args=(self.plan,))
        last.start()
        last.join(CLOSING_S)
        if last.is_alive():
            last.kill()
            last.join()
        if last.exitcode:
            self.broke.append(f"the last start ended with {last.exitcode}")
        last.close()
        self._find_signed_again()
        return self.checker.compare_at_the_end()

    # ---- what is said of it ----

    @property
    def refusals(self) -> dict[str, int]:
        """How often each rule refused."""
        return {what.removeprefix("refused "): n for what, n in self.said.items() if what.startswith("refused ")}

    def failures(self) -> list[str]:
        """Everything that should not be; empty for a run that held."""
        found = [f"broke: {what}" for what in self.broke]
        found += [f"{what} (seen {times} times)" for what, times in self.checker.failures.items()]
        found += [f"settled twice: {nonce}" for nonce in sorted(self.checker.twice)]
        found += [f"signed twice: {place}" for place in self.again]
        if not self.checker.chain.settled or not self.kills:
            found.append("nothing was settled or nobody was killed: this run shows nothing")
        if self.closed is None:
            found.insert(0, "the last start has not reconciled")
        elif self.closed["unexplained"]:
            found.append(f"the last start cannot explain {self.closed['unexplained']}")
        return found

    def last_line(self, books: Books) -> str:
        """The sums: what was allowed, signed, settled and counted, in dollars; and what was out of control."""
        wallet = books.nodes["wallet"]
        signed = sum(payment.amount for payment in self.checker.signed.values()) * NANOS
        return (
            f"budget ${_usd(wallet.limit)}, signed ${_usd(signed)}, settled on chain ${_usd(self.checker.chain.total * NANOS)}, "
            f"counted ${_usd(wallet.counted)}, overshoot ${_usd(self.checker.overshoot)}, "
            f"holds lost {len(self.checker.lost)}, duplicates {len(self.again) + len(self.checker.twice)}"
        )

    def summary(self, books: Books) -> list[str]:
        """What has happened, so that a run in which nothing did is seen for one."""
        shown: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        for seller in self.sellers:
            shown.update(seller.shown)
            refused.update(seller.refused)
        ends = Counter(hold.state for hold in books.holds.values())
        signed, settled, risk = len(self.checker.signed), len(self.checker.chain.settled), _usd(self.checker.most_out)
        answers = Counter({what: times for what, times in self.said.items() if not what.startswith("refused ")})
        return [
            f"kills {self.kills}, checks {self.checker.checks}, chain in trouble {self.troubles}, limits raised {self.raises}",
            "no server" if self.server is None else self.server.summary(),
            f"clock moved on {self.jumps} times by {self.clock.added_s} s",
            f"signatures {signed}, payments shown {shown.total()}, settled {settled}, most at risk at once ${risk}",
            f"refusals {sum(self.refusals.values())}: {_listed(Counter(self.refusals))}",
            f"answers: {_listed(answers)}",
            f"shown to: {_listed(shown)}",
            f"settlements that the chain refused: {_listed(refused)}",
            f"holds that ended {_listed(ends)}, in {len(books.nodes)} budgets",
            f"the last start's looks at the chain: {self.looks}",
            f"second payments asked for {self.leave.total()}, receipts that the chain contradicts {len(self.contradicted)}",
        ]


def _usd(nanos: int | None) -> str:
    return format_dollars(Nanos(nanos or 0))


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())
