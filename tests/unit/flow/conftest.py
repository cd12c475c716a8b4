"""A ledger that is away, and a queue of late ends with short pauses."""

import pytest

from tests.support.late_writes import Late, Ledger
from x402guard.flow import late_writes


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(late_writes, "ANSWER_S", 0.1)
    monkeypatch.setattr(late_writes, "_PAUSES_S", (0.01, 0.02))
    monkeypatch.setattr(late_writes, "_CLOSING_S", 1.0)
    writes = Late()
    yield writes
    writes.close()
