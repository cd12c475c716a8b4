"""What is reported of calls that no transport saw: a count that cannot be read is none, and what is owed is booked."""

from decimal import Decimal

import pytest

from tests.support.faults import FailingFrom
from tests.support.merchant import make_guard
from x402guard import ConfigError, Guard, LedgerUnavailable, Metering, SessionTripped, TokenBudget, Unpriced
from x402guard.stores import open_store

MINI = ("openai", "gpt-4o-mini")
FLASH = ("google", "gemini-2.5-flash")
CLAUDE = ("anthropic", "claude-sonnet-4-5")


@pytest.fixture
def guard(ledger_url):
    with make_guard(ledger_url) as guard:
        yield guard


@pytest.fixture
def session(guard):
    with guard.session("s", budget="$1.00") as session:
        yield session


def assert_nothing_booked(session):
    assert (session.spent, session.held, session.tokens.used) == (0, 0, 0)
    assert session.report().to_dict()["llm"]["calls"] == 0


@pytest.mark.parametrize(
    ("model", "usage", "names"),
    [
        (MINI, {"prompt_tokens": 100, "total_tokens": 5_000}, "total_tokens is 5000, but the sum .* is 100"),
        (MINI, {"prompt_tokens": 10, "completion_tokens": 0, "total_tokens": 99_999}, "total_tokens is 99999"),
        (FLASH, {"promptTokenCount": 200, "candidatesTokenCount": "100000"}, "candidatesTokenCount is a str"),
        (FLASH, {"promptTokenCount": 10, "totalTokenCount": 9_015}, "totalTokenCount is 9015"),
        (
            CLAUDE,
            {"input_tokens": 5, "output_tokens": 5, "cache_read_input_tokens": "100000"},
            "cache_read_input_tokens",
        ),
    ],
)
def test_counts_that_contradict_each_other_are_refused(session, model, usage, names):
    with pytest.raises(ValueError, match=f"^usage: .*{names}"):
        session.record_usage(*model, usage)
    assert_nothing_booked(session)


@pytest.mark.parametrize(
    ("model", "usage", "dollars"),
    [  # gpt-4o-mini: $0.60 a million at the dearest; gemini-2.5-flash: $2.50
        (MINI, {"prompt_tokens": 200, "output_tokens": 100_000}, "0.06"),
        (MINI, {"prompt_tokens": 200, "completion_tokenz": 100_000}, "0.06"),
        (MINI, {"input_tokens": 200, "output_tokens": 100, "thinking_tokens": 500_000}, "0.3"),
        (FLASH, {"promptTokenCount": 200, "candidates_token_count": 100_000}, "0.25"),
    ],
)
def test_a_count_that_nobody_reads_is_no_count_of_zero(session, model, usage, dollars):
    receipt = session.record_usage(*model, usage)
    assert Decimal(dollars) < receipt.amount < Decimal(dollars) + Decimal("0.001")
    assert receipt.evidence == "estimate"


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


def test_a_number_that_lies_about_itself_lifts_no_limit(guard, session):
    assert session.tokens.allocate(Boundless(10**6)) == 100_000
    with pytest.raises(ConfigError, match="lowered and never raised"):
        guard.session("s", id=session.id, tokens=TokenBudget(Boundless(10**9)))


def test_ten_reports_of_more_tokens_than_there_are_leave_the_books_open(session):
    session.register_model("free", input="$0", output="$0")
    for _ in range(10):
        with pytest.raises(ValueError, match=r"^usage: more than 1,000,000,000,000,000 input_tokens"):
            session.record_usage("my-lab", "free", {"input_tokens": 6 * 10**15})
        session.record_usage("my-lab", "free", {"input_tokens": 10**15})
    session.record_usage(*MINI, {"input_tokens": 10})
    assert session.tokens.used == 10**15


@pytest.mark.parametrize("after_commit", [False, True])
def test_what_is_owed_is_never_said_to_be_unpaid(after_commit):
    store = FailingFrom(open_store("memory://"), after_commit=after_commit)
    with Guard(ledger=store) as guard:
        session = guard.session("s", budget="$1.00")
        for use in (lambda: session.record_usage(*MINI, {"input_tokens": 10}), lambda: session.charge("serp", "$0.01")):
            store.at, store.count = 1, 0
            with pytest.raises(LedgerUnavailable) as failed:
                use()
            assert "check session.spent before you re" in failed.value.advice
            store.at = None


def test_a_call_reported_to_a_latched_session_is_said_to_be_booked(session):
    session.record_usage(*MINI, {"input_tokens": 10**7})
    with pytest.raises(SessionTripped, match="this call is in the ledger") as told:
        session.record_usage(*MINI, {"input_tokens": 10})
    assert told.value.advice.startswith("This call is in the ledger")
    assert told.value.money_may_have_moved


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
