"""What a reading of tools, reported calls and token budgets by fresh eyes found; each was so once."""

import asyncio
import datetime as dt
import logging
import subprocess
import sys
import threading
import time
import uuid
from decimal import Decimal

import pytest

from tests.support.ledger import Clock
from tests.support.merchant import make_guard
from x402guard import ConfigError, Guard, LedgerUnavailable, Metering, SessionTripped, TokenBudget, Unpriced
from x402guard.stores import open_store
from x402guard.tools.arguments import fingerprint_of

MINI = ("openai", "gpt-4o-mini")
FLASH = ("google", "gemini-2.5-flash")
CLAUDE = ("anthropic", "claude-sonnet-4-5")


@pytest.fixture
def session(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1.00") as session:
        yield session


def assert_nothing_booked(session):
    assert (session.spent, session.held, session.tokens.used) == (0, 0, 0)
    assert session.report().to_dict()["llm"]["calls"] == 0


@pytest.mark.parametrize(
    ("model", "usage", "names"),
    [
        (MINI, {"prompt_tokens": 200, "output_tokens": 100_000}, "output_tokens"),
        (MINI, {"prompt_tokens": 200, "completion_token": 100_000}, "completion_token"),
        (MINI, {"prompt_tokens": 100, "total_tokens": 5_000}, "total_tokens is 5000, and the parts .* come to 100"),
        (MINI, {"prompt_tokens": 10, "completion_tokens": 0, "total_tokens": 99_999}, "total_tokens is 99999"),
        (MINI, {"input_tokens": 200, "output_tokens": 100, "thinking_tokens": 500_000}, "thinking_tokens"),
        (FLASH, {"promptTokenCount": 200, "candidatesTokenCount": "100000"}, "candidatesTokenCount is a str"),
        (FLASH, {"promptTokenCount": 200, "candidates_token_count": 100_000}, "candidates_token_count"),
        (FLASH, {"promptTokenCount": 10, "totalTokenCount": 9_015}, "totalTokenCount is 9015"),
        (
            CLAUDE,
            {"input_tokens": 5, "output_tokens": 5, "cache_read_input_tokens": "100000"},
            "cache_read_input_tokens",
        ),
    ],
)
def test_a_count_that_nobody_reads_is_no_count_of_zero(session, model, usage, names):
    with pytest.raises(ValueError, match=f"^usage: .*{names}"):
        session.record_usage(*model, usage)
    assert_nothing_booked(session)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"object": "response", "output": [{"type": "code_interpreter_call"}]}, "code_execution"),
        ({"object": "response", "output": [{"type": "image_generation_call"}]}, "image_generation"),
        ({"type": "message", "server_tool_use": {"code_execution_requests": 2}}, "code_execution"),
    ],
)
def test_what_a_provider_ran_beside_the_model_takes_its_allowance_or_is_refused(answer, kind):
    ran = answer.pop("server_tool_use", None)
    used = {"input_tokens": 10, "output_tokens": 10, **({"server_tool_use": ran} if ran else {})}
    told = {**answer, "model": CLAUDE[1] if ran else MINI[1], "usage": used}
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(Unpriced, match=f'Metering\\(allowances={{"{kind}"'):
            session.wrap(told)
        assert_nothing_booked(session)
    metering = Metering(allowances={kind: "$0.05"})
    with make_guard(metering=metering) as guard, guard.session("s", budget="$1.00") as session:
        session.wrap(told)
        assert session.spent > Decimal("0.05")
        assert session.report().to_dict()["evidence"]["estimate"] != "0.00"


def test_tools_that_the_caller_runs_cost_nothing_more(session):
    output = [{"type": "function_call"}, {"type": "message"}, {"type": "reasoning"}]
    usage = {"input_tokens": 10, "output_tokens": 1}
    session.wrap({"object": "response", "model": MINI[1], "output": output, "usage": usage})
    assert session.spent == Decimal("0.0000021")


def test_halves_of_characters_are_written_all_the_same(session):
    with session.hold("render", up_to="$0.50") as job:
        job.void("bad \ud800 news")
    assert (session.held, job.receipt.state) == (0, "voided")
    session.report().to_json().encode()
    with pytest.raises(ValueError, match=r"^model: .* is not the name of a model"):
        session.record_usage("anthropic", "claude-sonnet-4-5-\ud800", {"input_tokens": 1, "output_tokens": 1})
    with pytest.raises(ValueError, match=r"^model: "):
        session.wrap(
            {"type": "message", "model": "claude-3-5-sonnet-\x1b[2J", "usage": {"input_tokens": 1, "output_tokens": 1}}
        )


class Boundless(int):
    """Compares as it likes."""

    __gt__ = __ne__ = __ge__ = lambda _self, other: other == 0
    __le__ = __lt__ = lambda _self, _other: True
    __hash__ = int.__hash__


def test_a_number_that_lies_about_itself_lifts_no_limit(session):
    assert session.tokens.allocate(Boundless(10**6)) == 100_000
    with pytest.raises(ConfigError, match="lowered and never raised"):
        session._guard.session("s", id=session.id, tokens=TokenBudget(Boundless(10**9)))


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


def test_ten_reports_of_more_tokens_than_there_are_leave_the_books_open(session):
    session.register_model("free", input="$0", output="$0")
    for _ in range(10):
        with pytest.raises(ValueError, match=r"^usage: more than 1,000,000,000,000,000 input_tokens"):
            session.record_usage("my-lab", "free", {"input_tokens": 6 * 10**15})
        session.record_usage("my-lab", "free", {"input_tokens": 10**15})
    session.record_usage(*MINI, {"input_tokens": 10})
    assert session.tokens.used == 10**15


class Failing:
    """A store whose books cannot be written from some transaction on; the change was made or not, as told."""

    def __init__(self, store, *, at=None, after_commit=False):
        self.store, self.at, self.after_commit, self.count = store, at, after_commit, 0

    def __getattr__(self, name):
        return getattr(self.store, name)

    def transact(self, scope, change):
        self.count += 1
        fails = self.at is not None and self.count >= self.at
        if fails and not self.after_commit:
            raise LedgerUnavailable("the disk is full")
        result = self.store.transact(scope, change)
        if fails:
            raise LedgerUnavailable("the answer of the commit was lost")
        return result


@pytest.mark.parametrize("after_commit", [False, True])
def test_what_is_owed_is_never_said_to_be_unpaid(after_commit):
    store = Failing(open_store("memory://"), after_commit=after_commit)
    with Guard(ledger=store) as guard:
        session = guard.session("s", budget="$1.00")
        for use in (lambda: session.record_usage(*MINI, {"input_tokens": 10}), lambda: session.charge("serp", "$0.01")):
            store.at, store.count = 1, 0
            with pytest.raises(LedgerUnavailable) as failed:
                use()
            assert "look at session.spent before you re" in failed.value.advice
            store.at = None


def test_a_call_reported_to_a_latched_session_is_said_to_be_booked(session):
    session.record_usage(*MINI, {"input_tokens": 10**7})
    with pytest.raises(SessionTripped, match="this call was booked") as told:
        session.record_usage(*MINI, {"input_tokens": 10})
    assert told.value.advice.startswith("This call is booked")
    assert told.value.money_may_have_moved


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("raises", [False, True])
def test_no_failing_books_take_a_paid_result_or_hide_a_tools_own_error(at, raises, caplog):
    store = Failing(open_store("memory://"))
    with Guard(ledger=store) as guard:
        session = guard.session("s", budget="$1.00")
        ran = []

        @session.tool(cost="$0.01", mode="raw", render=lambda result, _mode: result)
        def serp():
            ran.append(store.count)
            if raises:
                raise ZeroDivisionError
            return "found"

        store.at, store.count = at, 0
        if at <= 2:  # tokens, then dollars: it never ran
            with pytest.raises(LedgerUnavailable):
                serp()
            assert not ran
        elif raises:
            with pytest.raises(ZeroDivisionError):
                serp()
        else:
            assert serp() == "found"
        assert bool(caplog.records) is (at in (2, 3, 4))
        store.at = None


@pytest.mark.parametrize("ledger", ["memory", "sqlite"])
def test_cancelled_while_the_books_fail_is_cancelled_all_the_same(tmp_path, ledger):
    store = Failing(open_store("memory://" if ledger == "memory" else f"sqlite:///{tmp_path / 'l.db'}"))

    async def main():
        with Guard(ledger=store) as guard:
            session = guard.session("s", budget="$1.00")

            async def use():
                async with session.hold("render", up_to="$0.50"):
                    store.at, store.count = 1, 0
                    await asyncio.sleep(10)

            task = asyncio.create_task(use())
            while store.at is None:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            store.at = None

    asyncio.run(main())


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
    ended, cut, calls = time.monotonic() + 3, 0, 0
    while time.monotonic() < ended:
        calls += 1
        cut += use(session, 0.00005 + calls % 40 * 0.00005)
    session.charge("last", "$0.01")
    print(cut > 50)
"""


def test_ctrl_c_at_any_moment_leaves_no_lock_behind(tmp_path, ledger_url):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, ledger_url],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.stdout == "True\n", done.stderr[-2000:]


def test_a_large_result_is_cut_and_counted_off_the_event_loop():
    def count(text):
        time.sleep(0.05)
        seen.add(threading.get_ident())
        return len(text)

    seen = set()
    with make_guard() as guard, guard.session("s", budget="$1.00", tokens=TokenBudget(100, counter=count)) as session:

        @session.tool(mode="raw", render=lambda result, _mode: result, max_tokens=10)
        async def read(size):
            return "x" * size

        async def main():
            longest, before = 0.0, time.monotonic()
            task = asyncio.create_task(read(100_000))
            while not task.done():
                await asyncio.sleep(0)
                longest, before = max(longest, time.monotonic() - before), time.monotonic()
            return await task, longest

        text, longest = asyncio.run(main())
    assert text == "x" * 9 + "…"
    assert longest < 0.04
    assert threading.get_ident() not in seen


def test_one_hold_is_entered_by_one_thread(session):
    entered = []
    for _ in range(50):
        hold, gate = session.hold("x", up_to="$0.001"), threading.Barrier(4)

        def enter(hold=hold, gate=gate):
            gate.wait()
            try:
                with hold:
                    entered.append(1)
            except ConfigError:
                return

        threads = [threading.Thread(target=enter) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert len(entered) == 50


@pytest.mark.parametrize(
    "amount", [Decimal("1E-400000000"), Decimal("1E+400000000"), 10**6_000, Decimal("0E-4000000")], ids=range(4)
)
def test_an_amount_of_endless_digits_is_refused_at_once(session, amount):
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"^cost: .* is not a dollar amount"):
        session.charge("serp", amount)
    assert time.monotonic() - begun < 0.2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a", b"b"),
        (Decimal(1), Decimal(2)),
        (uuid.UUID(int=1), uuid.UUID(int=2)),
        (dt.date(2026, 1, 1), dt.date(2026, 1, 2)),
        ({1: 1}, {"1": 1}),
        ({"a", "b"}, {"a", "c"}),
    ],
)
def test_arguments_are_told_apart(one, other):
    assert fingerprint_of({"x": one}) != fingerprint_of({"x": other})
    assert fingerprint_of({"x": one}) == fingerprint_of({"x": one})


def test_sessions_whose_process_died_are_past_too(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    dies = (
        "import os, sys; from x402guard import Guard; guard = Guard(ledger=sys.argv[1]);"
        "[guard.session('clerk', budget='$9').charge('x', '$5') for _ in range(20)]; os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", dies, url], check=False, timeout=60)
    with make_guard(url) as guard:
        assert str(guard.session("clerk", budget="$9").predict()) == "clerk: p50 $5.00, p95 $5.00, of 20 past sessions"


def test_exhausted_tokens_are_no_exhausted_dollars(ledger_url):
    with make_guard(ledger_url) as guard:
        session = guard.session("s", budget="$1.00", tokens=10)
        with pytest.raises(Exception, match="nothing is left of 10 tokens"), session:
            session.tokens.record_usage(10)
            session.tokens.allocate(1)
        assert session.report().to_dict()["terminated_by"] is None


def test_what_is_reported_inside_anothers_block_is_booked_where_it_is_owed(ledger_url):
    with (
        make_guard(ledger_url) as guard,
        guard.session("a", budget="$1") as one,
        guard.session("b", budget="$1") as other,
    ):
        one.record_usage(*MINI, {"input_tokens": 100})
        with other.scope("$0.50"):
            other.record_usage(*MINI, {"input_tokens": 100})
        assert one.spent == other.spent == Decimal("0.000015")


def test_tokens_add_up_in_the_report(session):
    session.record_usage(*MINI, {"input_tokens": 10, "output_tokens": 1})
    session.tokens.record_usage(777)
    session.tokens.record_usage(5, session.tokens.allocate(10, tool="llm"))
    tokens = session.report().to_dict()["tokens"]
    assert tokens["llm"] + sum(tokens["by_tool"].values()) + tokens["other"] == tokens["used"] == 793
    rows = [line.split() for line in session.report().to_text().splitlines()]
    shown = [row for row in rows if row[0] in ("llm", "other") and len(row) == 2]
    assert shown == [["llm", "11"], ["llm", "5"], ["other", "777"]]


def test_a_soft_limit_crossed_by_a_lapse_is_said(caplog):
    clock = Clock()
    store = open_store("memory://", clock_ms=clock)
    with Guard(ledger=store) as guard, guard.session("s", budget="$1", tokens=TokenBudget(1_000, soft=500)) as session:
        session.tokens.allocate(600)
        clock.tick(901)
        with caplog.at_level(logging.WARNING, "x402guard"):
            session.tokens.allocate(1)
        assert [record.getMessage() for record in caplog.records] == [
            "tokens: 600 of 1,000 are used in 's'; the soft limit is 500"
        ]
