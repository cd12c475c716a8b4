"""A fleet of processes on one ledger, and a process that stops inside a transaction.

``fleet URL PROCESSES SECONDS CALLS``: so many forks charge the session ``fleet`` a hundredth of a cent each time, at once, for so many
seconds or so many calls, and what each of them was served is printed as one line of JSON. ``stop URL``: takes the turn to write, and
stops itself with it; it prints ``in`` before, and ``out`` once it goes on and has committed.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from x402guard import BudgetExhausted, Guard, Policy
from x402guard.ledger.view import Scope
from x402guard.stores import file_lock, open_store

PRICE = "$0.0001"
SCHEDULER = Path("/proc/thread-self/schedstat")
"""Linux: nanoseconds run, nanoseconds ready to run while the machine ran others, and turns."""


def unserved_s():
    """Seconds in which this thread could have run, and the machine ran others: no lock is to blame for them."""
    return int(SCHEDULER.read_text().split()[1]) / 1e9 if SCHEDULER.exists() else 0.0


class Turns:
    """Counts what the machine kept from whoever held the turn, of all processes: those who wait cannot blame the lock for it either."""

    def __init__(self, lost):
        self._lost, self._since, self.own_s = lost, None, 0.0
        self._take, self._give = file_lock.FileTurn.take, file_lock.FileTurn.give
        file_lock.FileTurn.take = lambda turn, most_s: self._taken(self._take(turn, most_s))
        file_lock.FileTurn.give = lambda turn: self._given(turn)

    def _taken(self, got):
        self._since = unserved_s() if got else None
        return got

    def _given(self, turn):
        if self._since is not None:
            kept_s = unserved_s() - self._since
            self._since, self.own_s = None, self.own_s + kept_s
            self._lost.value += kept_s  # by the one that has the turn
        self._give(turn)

    def now_s(self):
        """A clock that stands while the machine runs others than this process and the one with the turn."""
        return time.monotonic() - unserved_s() - (self._lost.value - self.own_s)


def contend(url, seconds, calls, barrier, results, lost):
    waits, refused, turns = [], 0, Turns(lost)
    with Guard(ledger=url, policy=Policy(loop=None, breaker=None), background_checks=False) as guard:
        with guard.session("fleet", id="fleet") as session:
            barrier.wait(60)
            end = time.monotonic() + seconds
            while time.monotonic() < end and len(waits) < calls:
                began = turns.now_s()
                try:
                    session.charge("serp", PRICE)
                except BudgetExhausted:
                    refused += 1
                waits.append(turns.now_s() - began)
    results.put({"served": len(waits) - refused, "refused": refused, "worst_s": max(waits)})


def fleet(url, processes, seconds, calls):
    fork = multiprocessing.get_context("fork")
    barrier, results, lost = fork.Barrier(int(processes)), fork.SimpleQueue(), fork.RawValue("d", 0.0)
    given = (url, float(seconds), int(calls), barrier, results, lost)
    children = [fork.Process(target=contend, args=given, daemon=True) for _ in range(int(processes))]
    for child in children:
        child.start()
    print(json.dumps([results.get() for _ in children]), flush=True)
    for child in children:
        child.join(60)


def stop(url):
    store = open_store(url)

    def change(view):
        view.put_mark(("test", "stopped"), {"was": True})
        print("in", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)

    store.transact(Scope(marks=(("test", "stopped"),), durable=True), change)
    print("out", flush=True)
    store.close()


if __name__ == "__main__":
    {"fleet": fleet, "stop": stop}[sys.argv[1]](*sys.argv[2:])
