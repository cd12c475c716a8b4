"""Tokens of sessions that are nested, resumed, used up or left: one account, beside that of dollars."""

import asyncio
import threading

import pytest

from tests.support import processes
from tests.support.merchant import make_guard
from x402guard import ConfigError, TokenBudget

MINI = ("openai", "gpt-4o-mini")


@pytest.fixture
def session(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1.00") as session:
        yield session


def test_a_child_has_no_more_tokens_than_the_session_around_it(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1.00", tokens=1_000) as session:
        for tokens in (1_001, TokenBudget(10**9), TokenBudget()):
            with pytest.raises(ConfigError, match=r"^tokens: .* more than the 1,000 of the session around it"):
                session.child("c", budget="$0.10", tokens=tokens)
        assert session.child("c", budget="$0.10", tokens=1_000).tokens.total == 1_000


def test_a_resumed_session_takes_a_soft_limit_without_a_total(ledger_url):
    with make_guard(ledger_url) as guard:
        guard.session("s", budget="$1", id="run", tokens=50_000)
        assert guard.session("s", id="run", tokens=TokenBudget(soft=10_000)).tokens.total == 50_000


INTERRUPTED = """
import signal, sys, time
from x402guard import Guard

def use(session, pause):
    try:
        signal.setitimer(signal.ITIMER_REAL, pause)  # it goes off once
        with session.hold("x", up_to="$0.01") as job:
            job.void()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return 1
    return 0

with Guard(ledger=sys.argv[1]) as guard, guard.session("s", budget="$100", id="run") as session:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    ended, cut, calls = time.monotonic() + 30, 0, 0
    while cut <= 200 and time.monotonic() < ended:
        calls += 1
        cut += use(session, 0.00005 + calls % 40 * 0.00005)
    session.charge("last", "$0.01")
    print(cut > 200)
"""


def test_ctrl_c_at_any_moment_leaves_no_lock_behind(tmp_path, ledger_url):
    done = processes.run(INTERRUPTED, ledger_url, cwd=tmp_path)
    assert done.stdout == "True\n", done.stderr[-2000:]


def test_a_large_result_is_cut_and_counted_off_the_event_loop():
    def count(text):
        seen.add(threading.get_ident())
        assert goes_on.wait(20), "the event loop stands still meanwhile"
        return len(text)

    seen, goes_on = set(), threading.Event()
    with make_guard() as guard, guard.session("s", budget="$1.00", tokens=TokenBudget(100, counter=count)) as session:

        @session.tool(mode="raw", render=lambda result, _mode: result, max_tokens=10)
        async def read(size):
            return "x" * size

        async def main():
            task = asyncio.create_task(read(30_000))
            while not task.done():
                await asyncio.sleep(0)
                if seen:
                    goes_on.set()
            return await task

        text = asyncio.run(main())
    assert text == "x" * 9 + "…"
    assert threading.get_ident() not in seen


def test_exhausted_tokens_are_no_exhausted_dollars(ledger_url):
    with make_guard(ledger_url) as guard:
        session = guard.session("s", budget="$1.00", tokens=10)
        with pytest.raises(Exception, match="nothing is left of 10 tokens"), session:
            session.tokens.record_usage(10)
            session.tokens.allocate(1)
        assert session.report().to_dict()["terminated_by"] == "error"


def test_tokens_add_up_in_the_report(session):
    session.record_usage(*MINI, {"input_tokens": 10, "output_tokens": 1})
    session.tokens.record_usage(777)
    session.tokens.record_usage(5, session.tokens.allocate(10, tool="llm"))
    tokens = session.report().to_dict()["tokens"]
    assert tokens["llm"] + sum(tokens["by_tool"].values()) + tokens["other"] == tokens["used"] == 793
    rows = [line.split() for line in session.report().to_text().splitlines()]
    shown = [row for row in rows if row and row[0] in ("llm", "other") and len(row) == 2]
    assert shown == [["llm", "11"], ["llm", "5"], ["other", "777"]]
