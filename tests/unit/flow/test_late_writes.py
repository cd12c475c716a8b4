"""The end of an answer is written at once, or later and in order; no caller waits longer than two seconds for it."""

import logging
import os
import threading
import time

import pytest

from x402guard import LedgerUnavailable
from x402guard.flow import late_writes
from x402guard.flow.late_writes import LateWrites


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


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(late_writes, "ANSWER_S", 0.1)
    monkeypatch.setattr(late_writes, "_PAUSES_S", (0.01, 0.02))
    monkeypatch.setattr(late_writes, "_CLOSING_S", 1.0)
    writes = LateWrites()
    yield writes
    writes.close()


def until(holds):
    end_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_at_once_while_the_ledger_answers(ledger, late):
    assert [late.write(ledger.write(n), ledger.told.append) for n in range(3)] == [0, 1, 2]
    assert (ledger.written, ledger.told) == ([0, 1, 2], [])
    with pytest.raises(ZeroDivisionError):
        late.write(lambda: 1 / 0, ledger.told.append)


def test_what_fails_is_written_when_the_ledger_is_back_in_the_order_in_which_it_came(ledger, late):
    ledger.away = True
    for n in range(5):
        with pytest.raises(LedgerUnavailable):
            late.write(ledger.write(n), ledger.told.append)
    assert ledger.written == []
    ledger.away = False
    until(lambda: ledger.told == [0, 1, 2, 3, 4])
    assert ledger.written == [0, 1, 2, 3, 4]
    until(lambda: late._thread is None)
    assert late.write(ledger.write(5), ledger.told.append) == 5  # and at once again


def test_a_silent_ledger_is_waited_for_once_and_the_next_do_not_wait(ledger, late):
    ledger.silent = True
    began_s = time.monotonic()
    with pytest.raises(LedgerUnavailable, match="is written when it is back"):
        late.write(ledger.write(0), ledger.told.append)
    assert 0.1 <= time.monotonic() - began_s < 1
    began_s = time.monotonic()
    for n in (1, 2):
        with pytest.raises(LedgerUnavailable):
            late.write(ledger.write(n), ledger.told.append)
    assert time.monotonic() - began_s < 0.1
    assert ledger.attempts == 1
    ledger.silent = False
    until(lambda: ledger.told == [0, 1, 2])
    assert ledger.written == [0, 1, 2]


def test_silent_and_then_away_it_is_tried_again_before_the_others(ledger, late):
    ledger.silent = True
    for n in range(3):
        with pytest.raises(LedgerUnavailable):
            late.write(ledger.write(n), ledger.told.append)
    ledger.away, ledger.silent = True, False
    until(lambda: ledger.attempts > 2)
    ledger.away = False
    until(lambda: ledger.told == [0, 1, 2])


def test_what_can_never_be_written_is_not_kept(ledger, late, caplog):
    error = LedgerUnavailable("another ledger is here now")
    error.retry = "after_change"

    def never():
        raise error

    with pytest.raises(LedgerUnavailable):
        late.write(never, ledger.told.append)
    assert not late._waiting
    ledger.away = True
    for call in (ledger.write(0), never, lambda: 1 / 0, ledger.write(1)):
        with pytest.raises(LedgerUnavailable):
            late.write(call, ledger.told.append)
    with caplog.at_level(logging.ERROR):
        ledger.away = False
        until(lambda: ledger.told == [0, 1])
    assert [record.getMessage() for record in caplog.records] == [
        "the end of an answer cannot be written: another ledger is here now",
        "the end of an answer cannot be written: division by zero",
    ]


def test_a_thousand_wait_at_most(ledger, late, monkeypatch, caplog):
    monkeypatch.setattr(late_writes, "MOST_WAITING", 3)
    ledger.away = True
    for n in range(5):
        with pytest.raises(LedgerUnavailable):
            late.write(ledger.write(n), ledger.told.append)
    assert "2 dropped" in caplog.text
    ledger.away = False
    until(lambda: ledger.told == [0, 1, 2])


def test_its_end_waits_for_what_is_still_to_be_written(ledger, late):
    ledger.silent = True
    with pytest.raises(LedgerUnavailable):
        late.write(ledger.write(0), ledger.told.append)
    with pytest.raises(LedgerUnavailable):
        late.write(ledger.write(1), ledger.told.append)
    threading.Timer(0.1, setattr, (ledger, "silent", False)).start()
    late.close()
    assert ledger.written == [0, 1]
    assert late.write(ledger.write(2), ledger.told.append) == 2


def test_and_says_how_much_is_not(ledger, late, caplog):
    ledger.away = True
    for n in range(2):
        with pytest.raises(LedgerUnavailable):
            late.write(ledger.write(n), ledger.told.append)
    began_s = time.monotonic()
    late.close()
    assert time.monotonic() - began_s < 3
    assert "2 ends of paid answers are not in it, and their holds count in full" in caplog.text
    ledger.away = False


def test_a_forked_process_writes_its_own(ledger, late):
    ledger.away = True
    with pytest.raises(LedgerUnavailable):
        late.write(ledger.write(0), ledger.told.append)
    child = os.fork()
    if child == 0:
        ledger.away = False
        same = late.write(ledger.write(1), ledger.told.append) == 1 and ledger.written == [1]
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ledger.away = False
    until(lambda: ledger.told == [0])


def test_ctrl_c_while_it_waits_leaves_the_write_to_the_background(ledger, late, monkeypatch):
    def interrupted(aside, seconds):
        aside._start()
        raise KeyboardInterrupt

    ledger.silent = True
    with monkeypatch.context() as patch:
        patch.setattr(late_writes.Aside, "within", interrupted)
        with pytest.raises(KeyboardInterrupt):
            late.write(ledger.write(0), ledger.told.append)
    with pytest.raises(LedgerUnavailable):
        late.write(ledger.write(1), ledger.told.append)
    ledger.silent = False
    until(lambda: ledger.told == [0, 1])
