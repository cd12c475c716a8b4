"""What a session's context takes: fed by metered calls, by reported ones and by tools; one account, on every ledger."""

import json
import logging
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import anyio
import pytest
from jsonschema import Draft202012Validator

from tests.support import llm_provider as llm
from tests.support.ledger import Clock
from tests.support.llm_provider import SYNC, USED, Answer, Provider, ask, both_modes, chunk, completion, sse
from tests.support.merchant import make_guard
from x402guard import BudgetExhausted, ConfigError, Metering, SessionTripped, TokenBudget
from x402guard.stores import open_store

SCHEMA = Draft202012Validator(
    json.loads((Path(__file__).parents[3] / "docs" / "reference" / "report.schema.json").read_text())
)
STREAM = Answer.stream(*sse(chunk("Yes."), chunk(choices=[], usage=USED), "[DONE]"))
kinds = pytest.mark.parametrize("kind", ["def", "async def"])


clock = pytest.fixture(lambda: Clock())


@pytest.fixture
def make(ledger_url, clock):
    """Opens guards on one ledger: a file is opened anew by each, what is in memory is shared."""
    with ExitStack() as stack:
        stores = []

        def make():
            if not stores or ledger_url != "memory://":
                stores.append(stack.enter_context(closing(open_store(ledger_url, clock_ms=clock))))
            return stack.enter_context(
                make_guard(
                    stores[-1],
                    metering=Metering(counter=llm.COUNTER, prices=llm.BOOK, price_context={"service_tier": "default"}),
                )
            )

        yield make


@pytest.fixture
def guard(make):
    return make()


@pytest.fixture
def session(guard):
    return guard.session("s", budget="$5", tokens=TokenBudget(1_000))


def balance(session):
    tokens = session.tokens
    return tokens.used, tokens.reserved, tokens.remaining


def report(session):
    values = session.report().to_dict()
    SCHEMA.validate(values)
    return values


def warned(caplog):
    return [r.getMessage() for r in caplog.records if (r.name, r.levelno) == ("x402guard", logging.WARNING)]


def soft_events(session):
    return [event for event in report(session)["events"] if event["event"] == "tokens_soft_limit"]


def called(session, *answers, body=None, way=SYNC, **more):
    """One metered call, whatever becomes of it; returns what it might have used at most."""
    with suppress(way.library.HTTPError):
        way.post(session, Provider(session, *answers), body, **more)
    ceiling = [event for event in report(session)["events"] if event["event"] == "authorize"][-1]["ceiling"]
    choices = 1 if body is None else body.get("n", 1)
    return ceiling["input_tokens"] + ceiling["output_tokens"] * choices


def tool(session, kind, body, **terms):
    """A decorated tool, plain or async, to be called like any function."""
    if kind == "def":
        return session.tool(**terms)(body)

    async def awaited(*args):
        return body(*args)

    decorated = session.tool(**{"name": body.__name__, **terms})(awaited)
    return lambda *args: anyio.run(decorated, *args)


in_full = lambda result, mode: f"{mode}: " + "x" * 10_000


@both_modes
def test_every_metered_call_counts_what_it_read_and_wrote(session, way):
    for number in (1, 2, 3):
        called(session, way=way)
        assert balance(session) == (25 * number, 0, 1_000 - 25 * number)
    called(session, STREAM, body=ask(stream=True), way=way)
    assert (balance(session), session.tokens.usage_fraction) == ((100, 0, 900), 0.1)


ENDS = {
    "cut stream": (Answer.stream(*sse(chunk("Yes.")), breaks="ReadError"), ask(stream=True), {}),
    "left stream": (STREAM, ask(stream=True), {"take": 1}),
    "no answer": ("ReadError", ask(), {}),
    "two choices": ("ReadError", ask(n=2), {}),
    "no usage": (Answer.of(completion(usage=None)), ask(), {}),
    "5xx": (Answer.of(b"", 503), ask(), {}),
}
FREE = {f"{status} {body}"[:9]: (Answer.of(body, status), ask(), {}) for body, status in
        ((llm.ERROR, 400), (llm.ERROR, 429), (llm.ERROR, 503), (b"", 301))}  # fmt: skip


@both_modes
@pytest.mark.parametrize("end", [*ENDS, *FREE])
def test_what_nobody_states_counts_in_full_and_what_is_not_billed_counts_nothing(session, way, end):
    answer, body, more = {**ENDS, **FREE}[end]
    most = called(session, answer, body=body, way=way, **more)
    used = most if end in ENDS else 0
    assert (most > 100, balance(session), session.held) == (True, (used, 0, 1_000 - used), 0)


def test_a_disputed_usage_counts_up_to_the_most_that_the_model_can_take(session):
    called(session, Answer.of(completion({"prompt_tokens": 20, "completion_tokens": 10**9})))
    assert balance(session) == (128_000 + 16_384, 0, 0)


def test_reported_calls_count_too(session):
    session.record_usage("openai", "gpt-4o", {"input_tokens": 20, "output_tokens": 5})
    anyio.run(session.arecord_usage, "anthropic", "claude-sonnet-4-5", {"input_tokens": 7, "output_tokens": 3})
    session.wrap(completion())
    anyio.run(session.awrap, completion())
    assert balance(session) == (85, 0, 915)


def test_no_call_is_refused_for_tokens(guard):
    assert guard.session("s", budget="$5").tokens.total == 100_000  # unless told otherwise
    session = guard.session("s", budget="$5", tokens=1)
    for number in (1, 2, 3):
        called(session)
        session.wrap(completion())
        assert (balance(session), report(session)["refusals"]) == ((50 * number, 0, 0), [])
    assert (session.tokens.usage_fraction, report(session)["state"]) == (150, "open")


@pytest.mark.parametrize(("said", "wanted"), [("used", 50), ("by_tool", {})])
def test_a_call_that_ends_after_it_lapsed_counts_once_and_as_a_call(session, clock, said, wanted):
    def slow(request):
        clock.tick(901)
        called(session)
        return Answer.of()

    called(session, slow)
    assert report(session)["tokens"][said] == wanted


# -- whose they are -------------------------------------------------------------------------------------------------------


def test_a_child_and_a_scope_share_the_context_around_them_unless_given_their_own(session):
    shares, own = session.child("shares", budget="$1"), session.child("own", budget="$1", tokens=TokenBudget(500))
    grandchild = own.child("g", budget="$0.50")
    for payer in (shares, own, grandchild):
        called(payer)
    with session, session.scope("$1") as scope:
        called(session)
        assert scope.tokens is session.tokens
    assert (shares.tokens, grandchild.tokens) == (session.tokens, own.tokens)
    assert (balance(session), balance(own)) == ((50, 0, 950), (50, 0, 450))
    accounts = [report(one)["tokens"] for one in (session, shares, own, grandchild)]
    assert [account["total"] for account in accounts] == [1_000, 1_000, 500, 500]
    with pytest.raises(ConfigError, match=r"^reservation: .*another budget"):
        session.tokens.record_usage(5, own.tokens.allocate(5))


def test_a_budget_of_another_session_is_refused_and_nothing_opened(guard, session):
    inside = session.child("inside", budget="$1", tokens=TokenBudget(500))
    for opening in (guard.session, session.child):
        with pytest.raises(ConfigError, match=r"^tokens: .*in use elsewhere"):
            opening("other", budget="$1", tokens=inside.tokens)
    assert "other" not in {node.name for node in guard.shell.store.nodes()}
    assert inside.child("c", budget="$1", tokens=inside.tokens).tokens is inside.tokens


@pytest.mark.parametrize(("again", "total"), [(1_000, 1_000), (400, 400), (20, 20), (None, 1_000)])
@pytest.mark.parametrize("given", [TokenBudget, int], ids=["budget", "number"])
def test_a_resumed_session_goes_on_with_what_it_has_left(make, again, total, given):
    with make().session("s", budget="$5", id="run", tokens=1_000) as before:
        called(before)
    after = make().session("s", id="run", tokens=again and given(again))
    assert (after.tokens.total, *balance(after)) == (total, 25, 0, max(0, total - 25))


def test_a_budget_of_tokens_is_never_raised(make):
    with make().session("s", budget="$5", id="run", tokens=1_000):
        pass
    with pytest.raises(ConfigError, match=r"^tokens: .*1,000 tokens.* never raised, but 1,001 were requested"):
        make().session("s", id="run", tokens=1_001)
    lowered = make().session("s", id="run", tokens=400)
    with pytest.raises(ConfigError, match=r"^tokens: .*400 tokens"):
        make().session("s", budget="$1", id="run", tokens=TokenBudget(1_000))
    assert (lowered.tokens.total, str(lowered.limit)) == (400, "5.00")


@pytest.mark.parametrize("use", [lambda tokens: tokens.record_usage(1), lambda tokens: tokens.remaining])
def test_a_budget_that_was_used_before_the_session_is_refused(guard, use):
    use(tokens := TokenBudget(1_000))
    with pytest.raises(ConfigError, match=r"^tokens: "):
        guard.session("s", budget="$5", tokens=tokens)
    assert [node.id for node in guard.shell.store.nodes()] == ["wallet"]


def test_a_budget_of_another_ledger_is_refused(session):
    with make_guard() as other, pytest.raises(ConfigError, match=r"^tokens: .*in use elsewhere"):
        other.session("s", budget="$5", tokens=session.tokens)


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "1000", 10**15 + 1, [], TokenBudget])
def test_what_is_no_budget_of_tokens_is_refused_by_its_name(guard, session, bad):
    for opening in (guard.session, session.child):
        with pytest.raises(ConfigError, match=r"^tokens: "):
            opening("t", budget="$1", tokens=bad)


def test_the_soft_limit_is_said_once_in_the_log_and_in_the_report(guard, caplog):
    session = guard.session("s", budget="$5", tokens=TokenBudget(total=80_000, soft=40_000))
    session.tokens.record_usage(39_974)
    called(session.child("c", budget="$1"), Answer.of(llm.ERROR, 400))
    assert (warned(caplog), soft_events(session)) == ([], [])
    called(session.child("c", budget="$1"), Answer.of(completion({"prompt_tokens": 20, "completion_tokens": 6})))
    session.tokens.record_usage(15_000)
    session.tokens.record_usage(15_000, session.tokens.allocate(5))
    session.wrap(completion())
    [warning], [event] = warned(caplog), soft_events(session)
    assert warning == "tokens: 40,000 of 80,000 are used in 's'; the soft limit is 40,000"
    assert (event["used_tokens"], event["soft_tokens"]) == (40_000, 40_000)


CROSSES = {
    "call": called,
    "awaited call": lambda session: called(session, way=llm.WAYS[1]),
    "reported call": lambda session: session.wrap(completion()),
    "tool": lambda session: tool(session, "def", lambda: 1, mode="raw", render=lambda *_: "x" * 100)(),
}


@pytest.mark.parametrize("cross", CROSSES.values(), ids=CROSSES)
def test_whatever_crosses_the_soft_limit_says_so(guard, caplog, cross):
    session = guard.session("s", budget="$5", tokens=TokenBudget(1_000, soft=25))
    cross(session)
    called(session)
    assert (len(warned(caplog)), [event["used_tokens"] for event in soft_events(session)]) == (1, [25])


def test_the_soft_limit_is_said_once_over_two_guards(make, caplog):
    first = make().session("s", budget="$5", id="run", tokens=TokenBudget(1_000, soft=40))
    second = make().session("s", id="run", tokens=TokenBudget(1_000, soft=40))
    for session in (first, second, first, second):
        called(session)
    make().session("s", id="run", tokens=TokenBudget(1_000, soft=40)).tokens.record_usage(1)
    assert (len(warned(caplog)), len(soft_events(first)), balance(second)[0]) == (1, 1, 101)


def test_two_guards_with_different_soft_limits_say_each_once(make):
    first = make().session("s", budget="$5", id="run", tokens=TokenBudget(1_000, soft=40))
    second = make().session("s", id="run", tokens=TokenBudget(1_000, soft=60))
    for session in (first, second) * 4:
        session.tokens.record_usage(20)
    assert [event["soft_tokens"] for event in soft_events(first)] == [40, 60]


def test_the_report_says_what_took_how_many_tokens(session):
    tokens = session.tokens
    assert "tokens" not in session.report().to_text()
    called(session)
    for name, count in (("search", 100), ("browse", 7), ("search", 30), ("unused", 0)):
        tokens.record_usage(count, tokens.allocate(200, tool=name))
    tokens.record_usage(200)
    tokens.allocate(138)
    sums = {"total": 1_000, "used": 362, "reserved": 138, "remaining": 500, "llm": 25}
    values = report(session)
    assert values["tokens"] == {**values["tokens"], **sums, "by_tool": {"browse": 7, "search": 130}}
    assert (values["budget"], values["spent"], values["outstanding"]) == ("5.00", "0.0001", [])  # tokens are no dollars
    lines = [" ".join(line.split()) for line in session.report().to_text().splitlines()]
    assert {"tokens 362 of 1,000 used (36.2 %), 138 reserved, 500 left", "llm 25", "search 130"} <= {*lines}


def test_a_budget_that_is_exhausted_is_among_the_reports_refusals(session):
    session.tokens.record_usage(1_200)
    for _ in range(3):
        with pytest.raises(BudgetExhausted) as caught:
            session.tokens.allocate(10)
    assert (caught.value.rule, caught.value.session) == ("tokens", session.id)
    [row] = report(session)["refusals"]
    assert (row["rule"], row["count"], row["requested"], row["available"]) == ("tokens", 3, None, None)
    assert "nothing is left of 1,000 tokens (1,200 used, 0 reserved)" in row["reason"]
    assert "3 × tokens" in session.report().to_text()


# -- decorated tools ------------------------------------------------------------------------------------------------------

STAGES = [
    (1_000, "raw", "raw"), (501, "raw", "raw"), (500, "raw", "table"), (201, "raw", "table"), (200, "raw", "summary"),
    (50, "raw", "summary"), (49, "raw", "handle_only"), (1, "raw", "handle_only"), (1_000, "summary", "summary"),
    (300, "summary", "summary"), (40, "table", "handle_only"), (1_000, "handle_only", "handle_only"),
]  # fmt: skip


@kinds
@pytest.mark.parametrize(("left", "asked", "shown"), STAGES)
def test_a_tool_is_shown_in_the_suggested_mode_and_cut_to_what_was_granted(session, kind, left, asked, shown):
    if left < 1_000:
        session.tokens.record_usage(1_000 - left)
    seen = []
    render = lambda result, mode: seen.append((result, mode)) or in_full(result, mode)
    text = tool(session, kind, lambda term: [term], name="search", mode=asked, render=render, max_tokens=100)("fees")
    granted = min(100, left)
    assert seen == [(["fees"], shown)]
    assert (text[:-1], text[-1]) == (in_full(None, shown)[: granted * 4 - 1], "…")
    assert balance(session) == (1_000 - left + granted, 0, left - granted)
    assert report(session)["tokens"]["by_tool"] == {"search": granted}


@kinds
def test_modes_escalate_as_the_budget_empties_until_nothing_is_left(session, kind):
    ran = []
    render = lambda result, mode: mode + "x" * (388 - len(mode))  # 97 tokens, 4,000 of them reserved while it runs
    search = tool(session, kind, lambda _: ran.append(balance(session)), mode="raw", render=render, cost="$0.01")
    shown = [search(n).rstrip("x…") for n in range(11)]
    assert shown == ["raw"] * 6 + ["table"] * 3 + ["summary"] + ["handle_only"]
    assert (ran[0], ran[10]) == ((0, 1_000, 0), (970, 30, 0))
    with pytest.raises(BudgetExhausted) as caught:
        search(11)
    assert (caught.value.rule, len(ran), str(session.spent), session.held) == ("tokens", 11, "0.11", 0)


@kinds
def test_dollars_that_are_refused_give_the_tokens_back(session, kind):
    ran = []
    search = tool(session, kind, lambda: ran.append(1), name="t", mode="raw", render=in_full, cost="$6")
    with pytest.raises(BudgetExhausted) as caught:
        search()
    assert (caught.value.rule, ran, balance(session), session.held) == ("budget", [], (0, 0, 1_000), 0)


def fails(*_):
    raise RuntimeError("mine")


BROKEN = {
    "the tool raises": (RuntimeError, fails, {}),
    "render raises": (RuntimeError, lambda: 1, {"render": fails}),
    "render returns no text": (TypeError, lambda: 1, {"render": lambda result, mode: {"rows": 5}}),
    "the cost raises": (RuntimeError, lambda: 1, {"cost": fails, "up_to": "$0.01"}),
}


@kinds
@pytest.mark.parametrize(("error", "body", "terms"), BROKEN.values(), ids=BROKEN)
def test_what_goes_wrong_gives_the_tokens_back_and_keeps_the_dollars(session, kind, error, body, terms):
    search = tool(session, kind, body, **{"name": "t", "mode": "raw", "render": in_full, "cost": "$0.01", **terms})
    with pytest.raises(error):
        search()
    assert (balance(session), str(session.spent), session.held) == ((0, 0, 1_000), "0.01", 0)


def test_a_tripped_session_runs_no_tool_that_costs_nothing(session):
    session.trip("stop")
    before, ran = balance(session), []
    with pytest.raises(SessionTripped):
        tool(session, "def", lambda: ran.append(1), mode="raw", render=in_full)()
    assert (ran, balance(session)) == ([], before)


def test_a_tool_takes_its_tokens_from_the_innermost_session(session):
    search = tool(session, "def", lambda: 1, name="t", mode="raw", render=in_full, max_tokens=10)
    with session, session.child("c", budget="$1", tokens=100) as child:
        search()
        assert (balance(session), balance(child)) == ((0, 0, 1_000), (10, 0, 90))


def test_books_that_are_lost_meanwhile_take_no_result_from_the_caller(tmp_path):
    books, away = tmp_path / "l.db", tmp_path / "away"
    with make_guard(f"sqlite:///{books}") as guard:
        session = guard.session("s", budget="$5")
        find = lambda: books.rename(away) and "found"
        try:
            assert (
                tool(session, "def", find, name="t", cost="$0.01", mode="raw", render=lambda found, _: found)()
                == "found"
            )
        finally:
            away.rename(books)


WRONG = [("tool", "name", bad) for bad in ("", "\ud800", "\x1b[31m", 5, "x" * 201)]
WRONG += [("max_tokens", "max_tokens", bad) for bad in (0, -1, 1.5, True, "100", 10**15 + 1)]


@pytest.mark.parametrize(("field", "setting", "bad"), WRONG)
def test_a_wrong_setting_of_a_tool_is_refused_where_it_is_written_down(session, field, setting, bad):
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        session.tool(**{"mode": "raw", "render": in_full, setting: bad})(lambda: 1)
