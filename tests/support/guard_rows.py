"""The guards in a table: each with a run of steps that it lets pass, the one that it refuses, and whether that latches."""

from dataclasses import dataclass

from tests.support.agent import Agent
from tests.support.ledger import Clock
from tests.support.llm_provider import CHAT
from tests.support.merchant import make_guard
from x402guard import Loop, Policy, Spike, Velocity
from x402guard.policy import Timeouts
from x402guard.stores import open_store

ONE_PLACE = {"serp": 3, "GET courts.example/opinion/42": 3, "POST api.openai.com/v1/chat/completions": 3}
assert CHAT.endswith("api.openai.com/v1/chat/completions")

OFF = {
    "loop": None,
    "spike": None,
    "velocity": None,
    "breaker": None,
    "bulkhead": None,
    "risk": None,
    "soft_limits": (),
}
"""Every guard but the budget."""


def alone(**guards):
    """A policy of these guards, all others off."""
    return Policy(**{**OFF, **guards})


def pays_per(**limits):
    return alone(velocity=Velocity(**{"new_payees_per_day": None, "price_ratio": None, **limits}))


@dataclass(frozen=True)
class Row:
    """One guard, alone.

    ``passes`` are (number, cents) of the steps that it lets pass, ``pace_s`` apart; ``refuses`` is the next.
    ``acts`` is what happens before that: a method of ``Opened``, or nothing. ``frees_s`` later it passes, where that is so.
    """

    name: str
    rule: str
    policy: Policy
    passes: tuple
    refuses: tuple = (9, 1)
    pace_s: float = 0
    acts: str = ""
    word: str | None = None
    frees_s: int | None = None
    budget: str = "$5.00"
    kinds: tuple = Agent.KINDS

    def __str__(self):
        return self.name


SAME = ((1, 1),) * 3
THREE = ((1, 1), (2, 1), (3, 1))
ROWS = [
    Row("loop", "loop_detected", alone(loop=Loop(latch_after=1, calls=3, failures=0)), SAME, (1, 1), word="loop_detected"),
    Row(
        "cycle", "loop_detected", alone(loop=Loop(latch_after=1, calls=2, longest_cycle=2, failures=0)),
        ((1, 1), (2, 1), (1, 1), (2, 1), (1, 1)), (2, 1), pace_s=31, word="loop_detected",
    ),
    Row(
        "cycle of three", "loop_detected", alone(loop=Loop(latch_after=1, calls=2, longest_cycle=3, failures=0)),
        ((1, 1), (2, 1), (3, 1), (1, 1), (2, 1), (3, 1), (1, 1), (2, 1)), (3, 1), pace_s=21, word="loop_detected",
    ),
    Row("spike", "spend_spike", alone(spike=Spike(action="trip")), ((1, 2), (2, 2), (3, 2), (4, 2)), (9, 9), word="spend_spike"),
    *(
        Row(f"dollars a {window}", f"dollars_per_{window}", pays_per(**{f"dollars_per_{window}": "$0.11"}),
            ((1, 5), (2, 5)), (9, 5), frees_s=frees_s)
        for window, frees_s in (("minute", 65), ("hour", 3_660), ("day", 90_000))
    ),
    *(
        Row(f"calls a {window}", f"calls_per_{window}", pays_per(**{f"calls_per_{window}": 3}), THREE, frees_s=frees_s)
        for window, frees_s in (("minute", 65), ("hour", 3_660), ("day", 90_000))
    ),
    Row("max_steps", "max_steps", alone(max_steps=3), THREE),
    Row("max_calls", "max_calls", alone(max_calls=ONE_PLACE), THREE),
    Row("kill switch", "session_tripped", alone(), THREE, acts="trips", word="kill_switch"),
    Row("kill file", "session_tripped", alone(), THREE, acts="touches", word="kill_switch"),
    Row("session timeout", "session_timeout", alone(timeouts=Timeouts(session_s=60)), THREE, pace_s=20, acts="waits",
        word="session_timeout"),
    Row("step timeout", "step_timeout", alone(timeouts=Timeouts(step_s=20)), THREE, acts="waits",
        kinds=("pay", "charge", "hold", "use")),
    Row("budget", "budget", alone(), ((1, 5), (2, 5)), (9, 5), budget="$0.13"),
]  # fmt: skip
BY_NAME = {row.name: row for row in ROWS}
CASES = [(row, kind) for row in ROWS for kind in row.kinds]


class Opened:
    """A row's guard on a ledger, opened as often as one likes, in as many processes; its clock begins at *now_ms*."""

    def __init__(self, row, url, folder, now_ms=None):
        self.row, self.stop = row, folder / "stop"
        self.clock = Clock() if now_ms is None else Clock(now_ms)
        self.store = open_store(url, clock_ms=self.clock)
        self.guard = make_guard(self.store, policy=row.policy, kill_file=self.stop)
        known = any(node.id == "run" for node in self.store.nodes())
        self.session = self.guard.session("s", budget=None if known else row.budget, id="run")
        self.agent = Agent(self.session)
        if not known:
            self.session.step()

    def takes(self, kind, steps):
        """Take steps at the row's pace; return what refused each."""
        rules = []
        for number, cents in steps:
            rules.append(self.agent.take(kind, number, cents))
            self.clock.tick(self.row.pace_s)
        return rules

    def acts(self):
        """Do what the row does before its refusal."""
        if self.row.acts:
            getattr(self, f"_{self.row.acts}")()

    def _trips(self):
        self.session.trip("why")

    def _touches(self):
        self.stop.touch()

    def _waits(self):
        self.clock.tick(21)

    @property
    def stands(self):
        """The state, and what tripped it; an open session that lacks budget says so as well, and is not tripped."""
        report = self.session.report().to_dict()
        lacks = report["state"] == "open" and report["terminated_by"] == "budget_exhausted"
        return report["state"], None if lacks else report["terminated_by"]

    def close(self):
        self.guard.close()
        self.store.close()
