"""Who writes the end of an answer: its caller, the thread that it waits for, or the background, and never two of them."""

import os
import threading
import time

import pytest

from tests.support.late_writes import Late, until
from x402guard import LedgerUnavailable
from x402guard.flow import late_writes


class Swift(Late):
    """Runs a write anew as soon as it is added, as its thread does that comes before the one that has added it."""

    def _add(self, write, *, first=False):
        super()._add(write, first=first)
        write.run()


def fails_once(ledger, what):
    call = ledger.write(what)

    def once():
        ledger.away, was_away = False, ledger.away
        if was_away:
            raise LedgerUnavailable("away")
        return call()

    return once


@pytest.mark.parametrize("patient", [False, True])
def test_a_write_that_the_background_has_taken_is_not_its_callers_any_more(ledger, late, patient):
    late.close()
    late = Swift()
    ledger.away = True
    with pytest.raises(LedgerUnavailable):
        late.write(fails_once(ledger, 0), ledger.told.append, patient=patient)
    until(lambda: ledger.told == [0])
    late.close()
    assert (ledger.told, late.kept) == ([0], [])


def test_one_that_was_left_and_is_taken_by_the_background_is_told_once(ledger, late):
    late.close()
    late = Swift()
    ledger.silent = ledger.away = True
    with pytest.raises(LedgerUnavailable):
        late.write(ledger.write(0), ledger.told.append)
    ledger.silent = False
    until(lambda: ledger.attempts > 1)
    ledger.away = False
    until(lambda: ledger.told)
    late.close()
    assert (ledger.told, late.kept) == ([0], [])


def test_ctrl_c_before_the_write_has_begun_leaves_it_to_the_background(ledger, late, monkeypatch):
    def interrupted(_aside, _seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(late_writes.Aside, "within", interrupted)
        with pytest.raises(KeyboardInterrupt):
            late.write(ledger.write(0), ledger.told.append)
    until(lambda: ledger.told == [0])
    assert (late._under_way, late.kept) == (0, [])
    assert late.write(ledger.write(1), ledger.told.append) == 1


def test_one_that_begins_only_after_its_caller_has_left_is_written_once(ledger, late, monkeypatch):
    """All threads are busy for two seconds: the background writes it, and the thread that comes later does not."""
    later = []
    with monkeypatch.context() as patch:
        patch.setattr(Late, "_run_aside", lambda _self, call: later.append(call) or too_late())
        with pytest.raises(LedgerUnavailable):
            late.write(ledger.write(0), ledger.told.append)
    until(lambda: ledger.told == [0])
    later[0]()
    assert (ledger.written, ledger.told, late._under_way) == ([0], [0], 0)


def too_late():
    raise late_writes.TooLate


@pytest.mark.parametrize("ends", ["catch_up", "close"])
def test_a_bill_that_found_no_thread_is_written_by_the_next_one_who_waits(ledger, late, monkeypatch, ends):
    def none(*_, **__):
        raise RuntimeError("can't start new thread")

    ledger.away = True
    with monkeypatch.context() as patch:
        patch.setattr(late_writes.threading, "Thread", none)
        with pytest.raises(LedgerUnavailable, match="away"):
            late.write(ledger.write(0), ledger.told.append, patient=True)
    ledger.away = False
    getattr(late, ends)()
    assert (ledger.written, ledger.told, late.kept) == ([0], [0], [])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_by_an_error_is_started_again(ledger, late, monkeypatch):
    ends, failed = late.keep, []

    def keep(end):
        if threading.current_thread().name == "x402guard-late-writes" and not failed:
            failed.append(threading.current_thread())
            raise SystemExit  # ends a thread without a word
        return ends(end)

    ledger.away = True
    monkeypatch.setattr(late, "keep", keep)
    with pytest.raises(LedgerUnavailable):
        late.write(ledger.write(0), ledger.told.append, patient=True)
    until(lambda: failed and not late._is_running)
    failed[0].join()  # pytest hears of its error in this test, not in the next one
    assert (late._under_way, late._restrains()) == (0, False)
    assert late.kept == ["h0"], "the next process enters it"
    ledger.away = False
    assert late.write(ledger.write(1), ledger.told.append) == 1


def test_a_forked_process_waits_for_no_bill_of_its_parent(ledger, late):
    ledger.away = True
    with pytest.raises(LedgerUnavailable):
        late.write(ledger.write(0), ledger.told.append, patient=True)
    child = os.fork()
    if child == 0:
        late.catch_up()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ledger.away = False
    until(lambda: ledger.told == [0])


class Ends(BaseException):
    """Ends a thread, as a greenlet or a handler may."""


@pytest.mark.parametrize("is_left", [False, True])
def test_a_write_that_ends_its_thread_holds_up_no_other(ledger, late, is_left):
    def ends():
        while is_left and ledger.silent:
            time.sleep(0.005)
        raise Ends

    ledger.silent = is_left
    with pytest.raises(LedgerUnavailable if is_left else Ends):
        late.write(ends, ledger.told.append)
    ledger.silent = False
    until(lambda: late._under_way == 0)
    assert late.kept == ["h0"]
    assert late.write(ledger.write(1), ledger.told.append) == 1


def test_without_a_thread_an_end_is_in_the_file_before_it_is_written(ledger, late, monkeypatch):
    def none(_aside, _seconds):
        raise RuntimeError("can't start new thread")

    seen = []
    monkeypatch.setattr(late_writes.Aside, "within", none)
    assert late.write(lambda: seen.extend(late.kept), ledger.told.append) is None
    assert (seen, late.kept) == (["h0"], [])
