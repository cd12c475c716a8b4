"""Two guards on one ledger: that of a planner, and that of a worker as if it were another process."""

import time
from contextlib import contextmanager

from tests.support.ledger import Clock
from tests.support.merchant import make_guard
from x402guard import Guard, Policy, TaskRequest
from x402guard.stores import open_store

NOW_S = 1_800_000_000
SOON = NOW_S + 600


def asked(**changes):
    """Return a request, with other fields than the usual ones."""
    fields = {"task_type": "research", "payload": {"topic": "tides"}, "budget": "$0.40", "deadline": SOON}
    return TaskRequest(**{**fields, **changes})


def lasting(**changes):
    """The same for a ledger with the machine's own clock."""
    return asked(**{"deadline": int(time.time()) + 120, **changes})


class World:
    """A ledger whose clock a test sets, and guards on it."""

    def __init__(self, url):
        self.clock = Clock(NOW_S * 1000)
        self.store = open_store(url, clock_ms=self.clock, steady_ms=self.clock)
        self.guards = []

    def guard(self, **settings) -> Guard:
        settings.setdefault("policy", Policy(loop=None, breaker=None))
        guard = make_guard(self.store, **settings)
        self.guards.append(guard)
        return guard

    def forward(self, seconds):
        self.clock.now_ms += seconds * 1000

    def events(self, session):
        """The journal's events of a session and below, with their facts."""
        return [entry.facts() for entry in self.store.entries(session.id) if entry.event == "event"]

    def close(self):
        for guard in self.guards:
            guard.close()
        self.store.close()


@contextmanager
def world(url):
    made = World(url)
    try:
        yield made
    finally:
        made.close()
