"""Threads, tasks, processes and Ctrl-C on one budget of tokens: no more is granted than there is, and none is lost."""

import json
import random
import signal
import sys
import textwrap
import threading
import time
from contextlib import ExitStack

import anyio
import pytest

from tests.support import processes
from tests.support.ledger import Clock
from tests.support.llm_provider import BOOK, COUNTER, SYNC, Provider, completion
from x402guard import BudgetExhausted, Guard, Metering, TokenBudget
from x402guard.kernel.rows import HoldState
from x402guard.stores import open_store

pytestmark = pytest.mark.xdist_group("tokens-oversell")

TOTAL, WORKERS = 20_000, 32


@pytest.fixture(params=["alone", "memory", "sqlite"])
def tokens(request, tmp_path):
    """A budget of 20,000 by itself, or of a session."""
    if request.param == "alone":
        yield TokenBudget(TOTAL)
        return
    with Guard(ledger="memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'spend.db'}") as guard:
        yield guard.session("fleet", budget="$1", tokens=TokenBudget(TOTAL, soft=TOTAL // 2)).tokens


def check(tokens, counted):
    """The books say what the workers counted; and at no entry were more tokens out than there are."""
    assert (tokens.used, tokens.reserved, tokens.remaining) == (sum(counted), 0, TOTAL - sum(counted))
    out = most = entries = 0
    for entry in tokens._keep().store.entries(tokens.limit.node_id):
        out, entries = out + entry.held + entry.captured, entries + 1
        most = max(most, out)
    assert (out, most, entries) == (sum(counted), TOTAL, 1 + 2 * len(counted))


def in_threads(work):
    barrier, failed = threading.Barrier(WORKERS), []

    def guarded(number):
        try:
            barrier.wait()
            work(number)
        except BaseException as error:
            failed.append(repr(error))

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(WORKERS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # turns change in the middle of everything
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []


def end_of(granted, dice):
    """How a worker ends a reservation: all of it used, a part, or none."""
    return dice.choice([int(granted), dice.randrange(granted), None])


def test_32_threads_are_granted_no_more_than_there_is(tokens):
    counted, crowded = [], threading.Barrier(WORKERS)

    def work(number):
        dice = random.Random(number)
        for turn in range(12):
            try:
                granted = tokens.allocate(dice.randint(1, 2_000))
            except BudgetExhausted:
                granted = None
            if turn == 0:
                crowded.wait()  # all hold at once: 32 of a thousand each do not fit
            if granted is None:
                continue
            used = end_of(granted, dice)
            tokens.release(granted) if used is None else tokens.record_usage(used, granted)
            counted.append(used or 0)

    in_threads(work)
    check(tokens, counted)


def test_32_threads_that_keep_what_they_get_get_exactly_all_of_it(tokens):
    got, refused = [], []

    def work(number):
        dice = random.Random(number)
        while True:
            try:
                got.append(tokens.allocate(dice.randint(1, 300)))
            except BudgetExhausted:
                refused.append(number)
                return

    in_threads(work)
    assert (sum(got), sorted(refused)) == (TOTAL, [*range(WORKERS)])
    assert (tokens.used, tokens.reserved, tokens.remaining) == (0, TOTAL, 0)
    assert len({granted.reservation for granted in got}) == len(got)


def test_what_many_threads_record_without_a_reservation_is_all_counted(tokens):
    in_threads(lambda number: [tokens.record_usage(number) for _ in range(10)])
    assert tokens.used == 10 * sum(range(WORKERS))


def test_1000_tasks_are_granted_no_more_than_there_is(tokens):
    counted, refused = [], []

    async def work(number, crowded):
        dice = random.Random(number)
        try:
            granted = await tokens.aallocate(dice.randint(1, 100))
        except BudgetExhausted:
            refused.append(number)
            crowded.set()
            return
        await crowded.wait()  # nothing is given back before somebody has found nothing left
        used = end_of(granted, dice)
        await (tokens.arelease(granted) if used is None else tokens.arecord_usage(used, granted))
        counted.append(used or 0)

    async def main():
        async with anyio.create_task_group() as tasks:
            crowded = anyio.Event()
            for number in range(1_000):
                tasks.start_soon(work, number, crowded)

    anyio.run(main)
    assert len(counted) + len(refused) == 1_000
    check(tokens, counted)


def test_one_budget_of_its_own_is_made_once_however_many_threads_ask_first():
    for _ in range(20):
        tokens = TokenBudget(WORKERS)
        in_threads(lambda number, tokens=tokens: tokens.allocate(1))
        assert (tokens.reserved, tokens.remaining) == (WORKERS, 0)


# -- interrupted -----------------------------------------------------------------------------------------------------------

VERBS = {
    "allocate": (lambda session, held: session.tokens.allocate(50), (0, 100)),
    "record": (lambda session, held: session.tokens.record_usage(30), (30, 100)),
    "record what was reserved": (lambda session, held: session.tokens.record_usage(30, held), (30, 0)),
    "release": (lambda session, held: session.tokens.release(held), (0, 0)),
    "a call": (lambda session, held: SYNC.post(session, Provider(session)), (25, 100)),
    "a reported call": (lambda session, held: session.wrap(completion()), (25, 100)),
}


@pytest.mark.parametrize("written", [True, False], ids=["written", "not begun"])
@pytest.mark.parametrize(("verb", "after"), VERBS.values(), ids=VERBS)
def test_what_ctrl_c_interrupts_is_counted_once(monkeypatch, verb, after, written):
    """Ctrl-C comes in the verb's last transaction, before it was written or just after."""
    store = open_store("memory://", clock_ms=Clock())
    transact, left = store.transact, [2 if verb is VERBS["a call"][0] else 1]

    def interrupted(scope, change):
        left[0] -= 1
        if left[0] == 0 and not written:
            raise KeyboardInterrupt
        result = transact(scope, change)
        if left[0] == 0:
            raise KeyboardInterrupt
        return result

    with Guard(ledger=store, metering=Metering(counter=COUNTER, prices=BOOK)) as guard:
        session = guard.session("s", budget="$5", tokens=1_000)
        held = session.tokens.allocate(100)
        monkeypatch.setattr(store, "transact", interrupted)
        with pytest.raises(KeyboardInterrupt):
            verb(session, held)
        assert ((session.tokens.used, session.tokens.reserved), session.held) == (after, 0)


# -- processes -------------------------------------------------------------------------------------------------------------

ROUNDS = 12
ALLOCATES = textwrap.dedent("""
    import random, sys
    from x402guard import BudgetExhausted, Guard, TokenBudget

    ledger, number = sys.argv[1:]
    dice, held, counted, refused = random.Random(int(number)), [], [], 0
    with Guard(ledger="sqlite:///" + ledger) as guard:
        tokens = guard.session("fleet", id="fleet", tokens=TokenBudget(20_000, soft=10_000)).tokens
        print("ready", flush=True)
        while sys.stdin.readline() == "go\\n":
            before, held = held, []
            for _ in range(3):
                try:
                    held.append(tokens.allocate(dice.randint(1, 1_200)))
                except BudgetExhausted:
                    refused += 1
            for granted in before:
                used = dice.choice([int(granted) // 4, dice.randrange(granted) // 4, None])
                tokens.release(granted) if used is None else tokens.record_usage(used, granted)
                counted.append(used or 0)
            print("ready", flush=True)
        for granted in held:
            tokens.record_usage(int(granted), granted)
            counted.append(int(granted))
    print(counted, refused, sep=";", flush=True)
""")


def test_8_processes_are_granted_no_more_than_there_is_and_warned_once(tmp_path):
    ledger = tmp_path / "spend.db"
    with Guard(ledger=f"sqlite:///{ledger}") as guard, ExitStack() as stack:
        session = guard.session("fleet", budget="$1", id="fleet", tokens=TOTAL)
        workers = [stack.enter_context(processes.start(ALLOCATES, ledger, number)) for number in range(8)]
        for _ in range(ROUNDS):
            for worker in workers:
                assert worker.stdout.readline() == "ready\n"
            for worker in workers:  # all at once, round after round
                worker.stdin.write("go\n")
                worker.stdin.flush()
        said = [worker.communicate(timeout=60) for worker in workers]
        ends = [line.splitlines()[-1].partition(";")[::2] for line, _ in said]
        counted = [used for end, _ in ends for used in json.loads(end)]
        refused = sum(int(count) for _, count in ends)
        assert (len(counted) + refused, refused > 0) == (8 * 3 * ROUNDS, True)
        check(session.tokens, counted)
        shown = session.report().to_dict()["events"]
        events = [event["event"] for event in shown if "percent" not in event]  # those of the policy's parts apart
        assert (events.count("tokens_soft_limit"), sum(told.count("soft limit") for _, told in said)) == (1, 1)


DIES = textwrap.dedent("""
    import os, signal, sys
    from x402guard import Guard

    guard = Guard(ledger="sqlite:///" + sys.argv[1])
    tokens = guard.session("fleet", id="fleet").tokens
    print(tokens.allocate(600).reservation, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
""")


def test_what_a_killed_process_had_reserved_is_held_for_900_seconds_and_used_after(tmp_path):
    ledger, clock = tmp_path / "spend.db", Clock(time.time_ns() // 1_000_000)
    store = open_store(f"sqlite:///{ledger}", clock_ms=clock)
    with Guard(ledger=store) as guard:
        tokens = guard.session("fleet", budget="$1", id="fleet", tokens=1_000).tokens
        with processes.start(DIES, ledger) as worker:
            reservation = worker.communicate(timeout=60)[0].strip()
        assert worker.returncode == -signal.SIGKILL
        deadline = store.hold(reservation).deadline_unix
        assert 0 <= deadline - clock.now_ms // 1000 - 900 < 60
        tokens.release(tokens.allocate(1))
        assert (tokens.used, tokens.reserved, tokens.remaining) == (0, 600, 400)
        clock.now_ms = deadline * 1000 + 999
        rest = tokens.allocate(1_000)
        assert (rest, tokens.used, tokens.reserved, tokens.remaining) == (400, 0, 1_000, 0)
        tokens.release(rest)
        clock.tick(1)
        tokens.release(tokens.allocate(1_000))
        assert (tokens.used, tokens.reserved, tokens.remaining) == (600, 0, 400)
        assert store.hold(reservation).state is HoldState.CAPTURED
    store.close()


def test_a_reservation_may_be_ended_by_another_process_than_made_it(tmp_path):
    stores = [open_store(f"sqlite:///{tmp_path / 'spend.db'}") for _ in range(2)]
    with Guard(ledger=stores[0]) as one, Guard(ledger=stores[1]) as other:
        mine = one.session("fleet", budget="$1", id="fleet", tokens=1_000).tokens
        theirs = other.session("fleet", id="fleet").tokens
        theirs.record_usage(70, mine.allocate(100))
        assert (mine.used, mine.reserved, theirs.remaining) == (70, 0, 930)
    for store in stores:
        store.close()
