"""A ledger that is away or silent, and a queue of late ends that remembers what lies beside the ledger."""

import time
from itertools import count

from x402guard import LedgerUnavailable
from x402guard.flow.late_writes import LateWrites
from x402guard.ledger.lost import LateEnd


class Ledger:
    """Writes that fail while it is away, and wait while it is silent."""

    def __init__(self):
        self.away = self.silent = False
        self.written, self.told, self.attempts = [], [], 0

    def write(self, what):
        def call():
            self.attempts += 1
            while self.silent:
                time.sleep(0.005)
            if self.away:
                raise LedgerUnavailable("away")
            self.written.append(what)
            return what

        return call


class Late(LateWrites):
    """Gives each write an end of its own, h0, h1 and so on; ``kept`` are those that lie beside the ledger."""

    def __init__(self):
        super().__init__(self)
        self.kept, self._numbers, self.full = [], count(), False

    def write(self, call, late, **options):
        return super().write(call, late, end=LateEnd(f"h{next(self._numbers)}"), **options)

    def keep(self, end):
        if end.hold_id not in self.kept:
            self.kept.append(end.hold_id)
        return not self.full

    def written(self, end):
        if end.hold_id in self.kept:
            self.kept.remove(end.hold_id)


def until(holds):
    end_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.005)
