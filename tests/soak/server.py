"""The ledger's server of a soak: it crashes, the way to it fails at every message, and a replica takes over."""

import threading
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random

from tests.support import postgres
from tests.support.postgres_way import Way

_PLANS = ("before", "half", "after", "late", "slow")
_LONGEST_S = 0.6


class LedgerServer:
    """A server with a synchronous replica, so that nothing that was committed is lost. All agents reach it by one address.

    Attributes:
        url: the way to it, which fails.
        restarts, cuts, failovers: how often each has happened.
    """

    def __init__(self, opened: ExitStack, folder: Path, chance: Random) -> None:
        folder.chmod(0o711)
        self._chance, self._now, self._next = chance, folder / "server", folder / "replica"
        for each in (self._now, self._next):
            each.mkdir()
        postgres.make_cluster(self._now)
        postgres.start(self._now, fsync="on")
        opened.callback(lambda: postgres.stop(self._now, "immediate"))
        postgres.copy(self._now, self._next)
        postgres.start(self._next, fsync="on", wal_retrieve_retry_interval="100ms")
        opened.callback(lambda: self.failovers or postgres.stop(self._next, "immediate"))
        postgres.say(self._now, "ALTER SYSTEM SET synchronous_standby_names = '*'")
        postgres.say(self._now, "SELECT pg_reload_conf()")
        self._way = Way(self._now)
        opened.callback(self._way.close)
        self.url = self._way.url(postgres.url(self._now, "postgres"))
        self.restarts = self.cuts = self.failovers = 0

    def direct(self) -> str:
        """The URL of the server itself, for who watches."""
        return postgres.url(self._now, "postgres")

    def crash(self) -> None:
        """What was committed durably is there again, and nothing else need be."""
        postgres.stop(self._now, "immediate")
        postgres.start(self._now, fsync="on")
        self.restarts += 1

    def cut(self) -> None:
        """The way fails: at the next write, for a while, or for all that are on it."""
        self.cuts += 1
        what = self._chance.choice([*_PLANS, "silent", "down"])
        if what == "silent":
            self._way.silent = True
            self._later(setattr, self._way, "silent", False)
        elif what == "down":
            self._way.go_down()
            self._later(setattr, self._way, "down", False)
        else:
            self._way.plan = what
            if what == "late":
                self._later(self._way.deliver)

    def _later(self, what, *given) -> None:
        timer = threading.Timer(self._chance.uniform(0.05, _LONGEST_S), what, given)
        timer.daemon = True
        timer.start()

    def fail_over(self) -> None:
        """The server is gone for good, and its replica takes over."""
        postgres.stop(self._now, "immediate")
        postgres.say(self._next, "SELECT pg_promote()")
        self._now, self._way.folder = self._next, self._next
        self.failovers += 1
        until_s = time.monotonic() + 20
        while postgres.say(self._now, "SELECT pg_is_in_recovery()") != (False,):
            assert time.monotonic() < until_s
            time.sleep(0.05)

    def summary(self) -> str:
        """What has happened to it."""
        return f"the ledger's server crashed {self.restarts} times, was cut off {self.cuts} times, was replaced {self.failovers} times"
