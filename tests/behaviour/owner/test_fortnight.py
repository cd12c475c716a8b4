"""Two weeks of three customers, on a clock that moves: each evening all views say the same, and nobody is stopped who should not be.

Bills over a limit, processes that die, a backup that is put back, and an upgrade of the ledger in the middle.
"""

import datetime as dt
import json
import random
import shutil
from decimal import Decimal

from tests.support.command_line import typed
from tests.support.ledger import Clock
from tests.support.merchant import Shop, client, make_guard
from x402guard import BudgetExhausted, Owner, SessionTripped
from x402guard.stores import sqlite_schema
from x402guard.stores.sqlite_schema import MIGRATIONS
from x402guard.web.metrics import metrics

START = int(dt.datetime(2027, 2, 22, 8, tzinfo=dt.UTC).timestamp() * 1000)  # a Monday; the month ends within
CUSTOMERS = {"anna": ("3.00", "day"), "bert": ("9.00", "week"), "cleo": ("20.00", "month")}
NEXT = "CREATE TABLE next (n INTEGER);"


class World:
    """A ledger, its customers, and what each of them has truly spent, by when."""

    def __init__(self, folder, clock):
        self.path, self.clock = folder / "x402guard.db", clock
        self.spent = {name: [] for name in CUSTOMERS}
        self.lost, self.stopped = Decimal(0), {}
        self.dice = random.Random(58)

    @property
    def url(self):
        return f"sqlite:///{self.path}"

    def guard(self):
        return make_guard(self.url, budget={"amount": "60.00", "per": "month", "tz": "UTC"})

    def since(self, per):
        day = dt.datetime.fromtimestamp(self.clock.now_ms / 1000, dt.UTC).date()
        first = {"day": day, "week": day - dt.timedelta(days=day.weekday()), "month": day.replace(day=1)}[per]
        return int(dt.datetime.combine(first, dt.time(), dt.UTC).timestamp()) * 1000

    def of(self, name):
        since = self.since(CUSTOMERS[name][1])
        return sum((amount for at, amount in self.spent[name] if at >= since), Decimal(0))

    def all_of_it(self):
        since = self.since("month")
        return sum((amount for name in self.spent for at, amount in self.spent[name] if at >= since), Decimal(0))

    def work(self, guard, name, *, bill=None):
        """One run for a customer: a charge, a payment, an LLM call; as far as the budget goes. *bill*: tokens of a large one."""
        limit, per = CUSTOMERS[name]
        budget = guard.budget(name, limit, per=per, tz="UTC")
        with budget.session("run", budget=limit) as session, client(session, Shop()) as http:
            before = session.spent
            try:
                session.charge("serp", Decimal(self.dice.randrange(1, 40)) / 100)
                http.get(f"https://seller.example/{self.clock.now_ms}")
                session.record_usage("openai", "gpt-4o", {"input_tokens": self.dice.randrange(1_000, 40_000)})
            except (BudgetExhausted, SessionTripped):
                pass
            if bill is not None:
                session.record_usage("openai", "gpt-4o", {"input_tokens": bill})
            self.spent[name].append((self.clock.now_ms, session.spent - before))
        self.clock.tick(600)

    def evening(self):
        """Compare all views with what is true."""
        stopped = {name for name, since in self.stopped.items() if since == self.since(CUSTOMERS[name][1])}
        with Owner(self.path) as owner:
            rows = {row.name: row for row in owner.sessions() if row.kind in ("budget", "wallet")}
            live = {each.name: each for each in owner.live().customers}
            totals = owner.totals()
            counted = {each.name: each for each in totals.customers}
            listed = json.loads(typed("sessions", "--ledger", self.url, "--json", cwd=self.path.parent).stdout)
            listed = {row["name"]: row for row in listed if row["kind"] == "budget"}
            said = metrics(totals).decode()
            for name, (limit, per) in CUSTOMERS.items():
                report, true = owner.report(name), self.of(name)
                nanos = int(true * 10**9)
                assert rows[name].spent == Decimal(listed[name]["spent"]) == Decimal(report.to_dict()["spent"]) == true
                assert live[name].spent == counted[name].spent == report.view.sums.spent == nanos, name
                period = owner.report(name, since=dt.datetime.fromtimestamp(self.since(per) / 1000, dt.UTC)).view
                assert (period.sums.spent, period.sums.claimed) == (nanos, report.view.sums.claimed), name
                left = Decimal(0) if name in stopped else max(Decimal(0), Decimal(limit) - true)
                assert min(rows["wallet"].remaining, left) == rows[name].remaining == Decimal(listed[name]["remaining"])
                assert live[name].left == counted[name].left == (0 if name in stopped else live[name].left)
                assert (rows[name].state == "tripped") == (name in stopped) == bool(live[name].stopped), name
                assert name in said
            assert rows["wallet"].spent == self.all_of_it() + self.lost
            assert (rows["wallet"].state, totals.stopped) == ("open", None)
            assert owner.verify() == []
            owner.report("wallet").to_html()
        return sorted(stopped)


def to_the_next_morning(world):
    day_ms = 86_400_000
    world.clock.now_ms = (world.clock.now_ms // day_ms + 1) * day_ms + 8 * 3_600_000


def test_a_fortnight(tmp_path, monkeypatch):
    clock = Clock(START)
    monkeypatch.setattr("x402guard.stores.transacts._system_clock_ms", lambda: clock.now_ms)
    monkeypatch.setattr("x402guard.stores.transacts.system_steady_ms", lambda: clock.now_ms - START + 10**6)
    world = World(tmp_path, clock)
    backup = tmp_path / "backup.db"
    evenings = []
    for day in range(14):
        guard = world.guard()
        for run in range(3):
            for name in CUSTOMERS:
                bill = {(2, 1, "anna"): 1_200_000, (9, 2, "bert"): 4_000_000}.get((day, run, name))
                world.work(guard, name, bill=bill)
                if bill is not None:
                    world.stopped[name] = world.since(CUSTOMERS[name][1])
            if day == 4 and run == 1:  # the process dies with a session open, and is started again
                guard.budget("anna").session("run", budget="$1.00", id="left-open").charge("serp", "$0.01")
                world.spent["anna"].append((clock.now_ms, Decimal("0.01")))
                guard._life.close()
                guard.shell.store.close()
                guard = world.guard()
        guard.close()
        if day == 5:
            monkeypatch.setattr(sqlite_schema, "MIGRATIONS", (*MIGRATIONS, NEXT))
            assert typed("ledger", "upgrade", "--ledger", world.url, cwd=tmp_path).returncode == 0
        if day == 7:
            assert typed("ledger", "copy", backup, "--ledger", world.url, cwd=tmp_path).returncode == 0
        if day == 8:
            _put_back(world, backup, tmp_path)
        evenings.append((day, world.evening()))
        to_the_next_morning(world)
    assert [day for day, stopped in evenings if "anna" in stopped] == [2]
    assert [day for day, stopped in evenings if "bert" in stopped] == [9, 10, 11, 12, 13], "until its week ends"
    assert world.lost > 0


def _put_back(world, backup, folder):
    """The disk fails in the evening of the eighth day; the copy of the seventh is put back, and the owner lets all go on."""
    today = world.since("day")
    for name in ("", "-wal", "-shm"):
        world.path.with_name(f"{world.path.name}{name}").unlink(missing_ok=True)
    shutil.copy(backup, world.path)
    done = typed("ledger", "restore", "--accept-older", "--ledger", world.url, cwd=folder)
    assert done.returncode == 0, done.stderr
    lost = sum((amount for name in CUSTOMERS for at, amount in world.spent[name] if at >= today), Decimal(0))
    assert f"${lost.normalize():f} are captured" in done.stdout or f"${lost:.2f}" in done.stdout, (lost, done.stdout)
    world.lost += lost
    for name in CUSTOMERS:  # what they spent since is in the wallet alone
        world.spent[name] = [(at, amount) for at, amount in world.spent[name] if at < today]
    with Owner(world.path) as owner:
        for name in CUSTOMERS:
            assert owner.budget(name).state == "tripped"
            owner.reset(name)
