"""The end of an answer is written at once, or later and in order; no caller waits longer than two seconds for it."""

import logging
import os
import threading
import time
from contextlib import nullcontext, suppress
from contextvars import ContextVar

import pytest

from tests.support.late_writes import until
from x402guard import LedgerUnavailable
from x402guard.flow import late_writes


def test_at_once_while_the_ledger_answers(ledger, late):
    assert [late.write(ledger.write(n), ledger.told.append) for n in range(3)] == [0, 1, 2]
    assert (ledger.written, ledger.told) == ([0, 1, 2], [])
    with pytest.raises(ZeroDivisionError):
        late.write(lambda: 1 / 0, ledger.told.append)
    assert late.kept == ["h3"]  # another process may be able to


def test_what_fails_is_written_when_the_ledger_is_back_in_the_order_in_which_it_came(ledger, late):
    ledger.away = True
    for n in range(5):
        with pytest.raises(LedgerUnavailable):
            late.write(ledger.write(n), ledger.told.append)
    assert (ledger.written, late.kept) == ([], ["h0", "h1", "h2", "h3", "h4"])
    ledger.away = False
    until(lambda: ledger.told == [0, 1, 2, 3, 4])
    assert (ledger.written, late.kept) == ([0, 1, 2, 3, 4], [])
    until(lambda: not late._is_running)
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
    assert (ledger.attempts, late.kept) == (1, ["h0", "h1", "h2"])
    ledger.silent = False
    until(lambda: ledger.told == [0, 1, 2])
    assert (ledger.written, late.kept) == ([0, 1, 2], [])


def test_silent_and_then_away_it_is_tried_again_before_the_others(ledger, late):
    ledger.silent = True
    for n in range(3):
        with pytest.raises(LedgerUnavailable):
            late.write(ledger.write(n), ledger.told.append)
    ledger.away, ledger.silent = True, False
    until(lambda: ledger.attempts > 2)
    ledger.away = False
    until(lambda: ledger.told == [0, 1, 2])


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("retry", ["later", "same_request", "after_change"])
def test_what_its_owner_has_to_change_first_is_written_after_that(ledger, late, retry, patient):
    """A role without rights, a replica, another ledger of the same name: as restraining as a server that is away."""
    error = LedgerUnavailable("this role may not write")
    error.retry, refused = retry, [True]

    def refuses():
        if refused:
            raise error
        return ledger.write(0)()

    with pytest.raises(LedgerUnavailable, match="may not write"):
        late.write(refuses, ledger.told.append, patient=patient)
    if patient:
        with pytest.raises(LedgerUnavailable, match="not in the ledger yet: this role may not write"):
            late.catch_up()
    assert late.kept == ["h0"]
    refused.clear()
    until(lambda: ledger.told == [0])
    late.catch_up()
    assert late.kept == []


@pytest.mark.parametrize("waits", [False, True])
def test_what_fails_in_itself_stops_no_other_and_is_left_to_the_next_process(ledger, late, waits, caplog):
    """Unless the ledger can never keep it: that is repeated by none."""
    never = LedgerUnavailable("a text with a NUL")
    never.retry = "no"

    def can_never():
        raise never

    ledger.away = waits
    with caplog.at_level(logging.ERROR):
        for call in (ledger.write(0), can_never, lambda: 1 / 0, ledger.write(1)):
            with (
                pytest.raises((LedgerUnavailable, ZeroDivisionError))
                if waits or call.__name__ != "call"
                else nullcontext()
            ):
                late.write(call, ledger.told.append)
        ledger.away = False
        until(lambda: ledger.written == [0, 1])
        until(lambda: not late._waiting and not late._under_way)
    said = [record.getMessage().partition("cannot be written: ")[2] for record in caplog.records]
    assert said == (["a text with a NUL", "division by zero"] if waits else [])
    assert late.kept == ["h2"]


def test_a_thousand_wait_at_most(ledger, late, monkeypatch, caplog):
    monkeypatch.setattr(late_writes, "MOST_WAITING", 3)
    ledger.away = True
    for n in range(5):
        with pytest.raises(LedgerUnavailable):
            late.write(ledger.write(n), ledger.told.append)
    assert "2 more are left to the next process on this machine" in caplog.text
    ledger.away = False
    until(lambda: ledger.told == [0, 1, 2])
    assert late.kept == ["h3", "h4"]


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
    assert late.kept == []
    ledger.away = True
    with pytest.raises(LedgerUnavailable):
        late.write(ledger.write(3), ledger.told.append)
    assert late.kept == ["h3"]


def test_and_says_how_much_is_not(ledger, late, caplog):
    ledger.away = True
    for n in range(2):
        with pytest.raises(LedgerUnavailable):
            late.write(ledger.write(n), ledger.told.append)
    began_s = time.monotonic()
    late.close()
    assert time.monotonic() - began_s < 3
    assert "2 ends of paid answers are not in it, and their holds count in full" in caplog.text
    assert late.kept == ["h0", "h1"]
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


def test_what_ends_just_when_it_is_left_is_not_lost(ledger, monkeypatch, late):
    """A thousand writes that end around the limit, failed or not: each is written and told once, or returned."""
    monkeypatch.setattr(late_writes, "ANSWER_S", 0.002)
    returned = []

    def call_of(n):
        failed = []

        def call():
            time.sleep(0.0015 + (n % 11) / 10_000)
            if n % 3 == 0 and not failed:
                failed.append(True)
                raise LedgerUnavailable("away")
            ledger.written.append(n)
            return n

        return call

    for n in range(300):
        until(lambda: not late._is_running and not late._under_way)
        with suppress(LedgerUnavailable):
            returned.append(late.write(call_of(n), ledger.told.append))
    until(lambda: len(returned) + len(ledger.told) == 300)
    assert sorted(returned + ledger.told) == sorted(ledger.written) == list(range(300))


def test_one_that_was_left_and_fails_takes_no_other_out_of_the_queue(ledger, late):
    """The first is left and fails while the second is being written."""
    begun, go_on = threading.Event(), threading.Event()
    first_fails = [True]

    def first():
        begun.wait(5)
        time.sleep(0.05)
        if first_fails.pop() if first_fails else False:
            raise LedgerUnavailable("away")
        ledger.written.append(1)
        return 1

    def second():
        begun.set()
        go_on.wait(5)
        ledger.written.append(2)
        return 2

    def write_first():
        with suppress(LedgerUnavailable):
            late.write(first, ledger.told.append)

    thread = threading.Thread(target=write_first)
    thread.start()
    until(lambda: late._under_way == 1)
    with pytest.raises(LedgerUnavailable):
        late.write(second, ledger.told.append)
    begun.set()
    go_on.set()
    thread.join()
    until(lambda: sorted(ledger.told) == [1, 2])
    assert sorted(ledger.written) == [1, 2]


def test_a_write_that_restrains_is_waited_for_and_kept_if_it_fails(ledger, late):
    ledger.silent = True
    threading.Timer(0.3, setattr, (ledger, "silent", False)).start()
    assert late.write(ledger.write(0), ledger.told.append, patient=True) == 0
    ledger.away = True
    with pytest.raises(LedgerUnavailable):
        late.write(ledger.write(1), ledger.told.append, patient=True)
    with pytest.raises(LedgerUnavailable):
        late.write(ledger.write(2), ledger.told.append)
    with pytest.raises(
        LedgerUnavailable, match="the end of an earlier call, which may exceed a budget, is not in the ledger yet"
    ):
        late.catch_up()
    ledger.away = False
    late.catch_up()
    assert ledger.written[:2] == [0, 1]
    until(lambda: ledger.told == [1, 2])
    late.catch_up()


def test_a_write_that_restrains_is_kept_before_it_is_begun_and_others_wait_for_it(ledger, late):
    """Whoever is killed meanwhile leaves it behind; a charge that comes meanwhile is refused, or waits."""
    ledger.silent = True
    writing = threading.Thread(target=late.write, args=(ledger.write(0), ledger.told.append), kwargs={"patient": True})
    writing.start()
    until(lambda: ledger.attempts)
    assert late.kept == ["h0"]
    with pytest.raises(
        LedgerUnavailable, match="the end of an earlier call, which may exceed a budget, is not in the ledger yet"
    ):
        late.catch_up()
    ledger.silent = False
    late.catch_up()
    assert ledger.written == [0]
    writing.join()
    assert late.kept == []


def test_what_restrains_is_never_dropped(ledger, late, monkeypatch):
    monkeypatch.setattr(late_writes, "MOST_WAITING", 1)
    ledger.away = True
    for n in range(4):
        with pytest.raises(LedgerUnavailable):
            late.write(ledger.write(n), ledger.told.append, patient=n % 2 == 0)
    ledger.away = False
    until(lambda: ledger.told == [0, 2])
    late.catch_up()


def test_what_the_ledger_can_never_take_is_not_kept(ledger, late, caplog):
    """PostgreSQL keeps no NUL: such an end would stop all others, and the next opening as well."""
    error = LedgerUnavailable("unsupported Unicode escape sequence")
    error.retry = "no"

    def never():
        raise error

    for patient in (False, True):
        with pytest.raises(LedgerUnavailable, match="unsupported"):
            late.write(never, ledger.told.append, patient=patient)
    ledger.away = True
    for call in (never, ledger.write(0)):
        with pytest.raises(LedgerUnavailable):
            late.write(call, ledger.told.append)
    ledger.away = False
    until(lambda: ledger.told == [0])
    assert (list(late._waiting), late.kept) == ([], [])


def test_where_no_file_takes_it_the_log_says_so(ledger, late, caplog):
    ledger.away = late.full = True
    with pytest.raises(LedgerUnavailable):
        late.write(ledger.write(0), ledger.told.append)
    late.close()
    assert "1 of them are in no file" in caplog.text
    with pytest.raises(LedgerUnavailable):
        late.write(ledger.write(1), ledger.told.append)
    assert "1 more are dropped: their holds count in full" in caplog.text


def test_where_no_thread_can_be_started_it_is_written_by_its_caller(ledger, late, monkeypatch):
    def none(*_, **__):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(late_writes.Aside, "_start", none)
        assert late.write(ledger.write(0), ledger.told.append) == 0
        ledger.away = True
        patch.setattr(late_writes.threading, "Thread", none)
        with pytest.raises(LedgerUnavailable):
            late.write(ledger.write(1), ledger.told.append)
    ledger.away = False
    with pytest.raises(LedgerUnavailable):
        late.write(ledger.write(2), ledger.told.append)
    until(lambda: ledger.told == [1, 2])
    with pytest.raises(RuntimeError, match="mine"):
        late.write(lambda: (_ for _ in ()).throw(RuntimeError("mine")), ledger.told.append)


def test_after_its_end_no_thread_is_left(ledger, late):
    ledger.away = True
    for n in range(2):
        with pytest.raises(LedgerUnavailable):
            late.write(ledger.write(n), ledger.told.append)
    late.close()
    until(lambda: not late._is_running)
    attempts = ledger.attempts
    time.sleep(0.1)
    assert ledger.attempts == attempts


def test_it_runs_with_what_its_caller_had_in_context(ledger, late):
    who = ContextVar("who")
    who.set("me")
    seen = []

    def call():
        seen.append(who.get("none"))
        if len(seen) < 3:
            raise LedgerUnavailable("away")

    with pytest.raises(LedgerUnavailable):
        late.write(call, lambda _: seen.append(who.get("none")))
    until(lambda: len(seen) == 4)
    assert seen == ["me"] * 4
