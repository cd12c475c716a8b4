"""``TokenBudget`` by itself: what it grants, counts, suggests and cuts, against numbers worked out by hand."""

import copy
import json
import logging
import pickle

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.ledger import Clock
from x402guard import BudgetExhausted, CharsPerToken, ConfigError, TiktokenCounter, TokenBudget
from x402guard.stores import open_store
from x402guard.tools import Allocation
from x402guard.tools import token_budget as context

MODES = ["raw", "table", "summary", "handle_only"]


@pytest.fixture
def clock(monkeypatch):
    """The clock of budgets that are made under it; it passes only when told to."""
    clock = Clock()
    monkeypatch.setattr(context, "open_store", lambda url: open_store(url, clock_ms=clock))
    return clock


def balance(budget):
    return budget.used, budget.reserved, budget.remaining


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if (r.name, r.levelno) == ("x402guard", logging.WARNING)]


# -- granting and counting ------------------------------------------------------------------------------------------------


def test_a_budget_is_of_a_hundred_thousand_tokens_unless_told_otherwise():
    budget = TokenBudget()
    assert (budget.total, budget.usage_fraction, *balance(budget)) == (100_000, 0, 0, 0, 100_000)


def test_many_small_invocations_add_up():
    budget = TokenBudget(total=1_000)
    for number in range(1, 201):
        granted = budget.allocate(10)
        budget.record_usage(5, granted)
        wanted = (5 if number == 200 else 10, 5 * number, 1_000 - 5 * number)
        assert (granted, budget.used, budget.remaining) == wanted
    with pytest.raises(BudgetExhausted):
        budget.allocate(1)


def test_what_remains_is_right_after_every_step():
    budget, mine = TokenBudget(total=1_000), {}
    steps = [
        ("allocate", "a", 300, (0, 300, 700)),
        ("record", None, 50, (50, 300, 650)),
        ("allocate", "b", 400, (50, 700, 250)),
        ("record", "a", 120, (170, 400, 430)),  # less than was reserved
        ("allocate", "c", 430, (170, 830, 0)),
        ("release", "b", 0, (170, 430, 400)),
        ("allocate", "d", 900, (170, 830, 0)),  # 400 of them
        ("record", "c", 500, (670, 400, 0)),  # more than was reserved: 70 past the total
        ("record", None, 30, (700, 400, 0)),
        ("release", "d", 0, (700, 0, 300)),
        ("record", None, 0, (700, 0, 300)),
        ("record", None, 400, (1_100, 0, 0)),  # past the total
        ("record", None, 900, (2_000, 0, 0)),
    ]
    for verb, name, tokens, after in steps:
        if verb == "allocate":
            mine[name] = budget.allocate(tokens)
        elif verb == "record":
            budget.record_usage(tokens, mine.get(name))
        else:
            budget.release(mine[name])
        assert balance(budget) == after, (verb, name, tokens)
    assert (budget.total, budget.usage_fraction) == (1_000, 2)
    assert mine == {"a": 300, "b": 400, "c": 430, "d": 400}


@pytest.mark.parametrize(("asked", "granted"), [(1, 1), (99, 99), (100, 100), (101, 100), (10**15, 100)])
def test_a_grant_is_what_is_left_where_more_was_asked_for(asked, granted):
    budget = TokenBudget(total=300)
    budget.record_usage(150)
    budget.allocate(50)
    got = budget.allocate(asked)
    assert (got, got.requested, budget.reserved, budget.remaining) == (granted, asked, 50 + granted, 100 - granted)


@pytest.mark.parametrize(("used", "reserved"), [(100, 0), (250, 0), (0, 100), (60, 40)])
def test_nothing_is_granted_once_nothing_is_left(used, reserved):
    budget = TokenBudget(total=100)
    budget.record_usage(used)
    if reserved:
        budget.allocate(reserved)
    with pytest.raises(BudgetExhausted, match=r"^tokens: nothing is left of 100 tokens .* 7 were requested$") as caught:
        budget.allocate(7)
    error = caught.value
    assert (error.rule, error.session, error.requested, error.available) == ("tokens", None, None, None)
    assert error.money_may_have_moved is False
    assert balance(budget) == (used, reserved, 0)


def test_what_is_released_can_be_granted_again():
    budget = TokenBudget(total=100)
    first = budget.allocate(100)
    budget.release(first)
    assert (balance(budget), budget.allocate(60)) == ((0, 0, 100), 60)
    assert (budget.usage_fraction, balance(budget)) == (0, (0, 60, 40))  # what is reserved is not used


def test_usage_is_counted_past_the_total():
    budget = TokenBudget(total=80)
    budget.record_usage(20)
    assert budget.usage_fraction == 0.25
    budget.record_usage(100, budget.allocate(10))
    assert (budget.usage_fraction, *balance(budget)) == (1.5, 120, 0, 0)
    budget.record_usage(40)
    assert (budget.usage_fraction, budget.total) == (2, 80)
    assert {budget.suggested_mode(mode) for mode in MODES} == {"handle_only"}


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_awaited_verbs_do_the_same(backend):
    async def main():
        budget = TokenBudget(total=100)
        first, second = await budget.aallocate(70), await budget.aallocate(70)
        assert (first, second, balance(budget)) == (70, 30, (0, 100, 0))
        with pytest.raises(BudgetExhausted):
            await budget.aallocate(1)
        await budget.arecord_usage(20, first)
        await budget.arelease(second)
        await budget.arecord_usage(5)
        assert balance(budget) == (25, 0, 75)
        for again in (budget.arecord_usage(1, first), budget.arelease(second)):
            with pytest.raises(ConfigError, match=r"^reservation: "):
                await again

    anyio.run(main, backend=backend)


# -- reservations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["record", "release"])
@pytest.mark.parametrize("second", ["record", "release"])
def test_a_reservation_is_used_once(first, second):
    budget = TokenBudget(total=100)
    verbs = {"record": lambda granted: budget.record_usage(30, granted), "release": budget.release}
    granted = budget.allocate(40)
    verbs[first](granted)
    before = balance(budget)
    with pytest.raises(ConfigError, match=r"^reservation: .*already"):
        verbs[second](granted)
    assert balance(budget) == before


def test_a_reservation_of_another_budget_is_refused_by_both_verbs():
    mine, other = TokenBudget(total=100), TokenBudget(total=100)
    granted = other.allocate(40)
    for use in (lambda: mine.record_usage(10, granted), lambda: mine.release(granted)):
        with pytest.raises(ConfigError, match=r"^reservation: .*another budget"):
            use()
    assert (balance(mine), balance(other)) == ((0, 0, 100), (0, 40, 60))


def test_a_reservation_counts_as_used_once_900_seconds_have_passed(clock):
    budget = TokenBudget(total=100)
    budget.allocate(60)
    clock.tick(900)
    assert (budget.allocate(10), balance(budget)) == (10, (0, 70, 30))
    clock.tick(1)
    assert (budget.allocate(10), balance(budget)) == (10, (60, 20, 20))
    clock.tick(900)
    assert (budget.allocate(10), balance(budget)) == (10, (70, 20, 10))  # the first ten were a second older


@pytest.mark.parametrize(("late", "used"), [(0, 60), (59, 60), (60, 60), (61, 61), (150, 150), (None, 60)])
def test_after_its_deadline_more_is_added_and_less_gives_nothing_back(clock, late, used):
    budget = TokenBudget(total=100)
    granted = budget.allocate(60)
    clock.tick(901)
    budget.release(budget.allocate(1))  # whoever asks next finds it lapsed
    budget.release(granted) if late is None else budget.record_usage(late, granted)
    assert balance(budget) == (used, 0, max(0, 100 - used))


def test_a_reservation_that_lapsed_is_used_once_too(clock):
    budget = TokenBudget(total=1_000)
    granted = budget.allocate(60)
    clock.tick(901)
    budget.release(budget.allocate(1))
    budget.record_usage(150, granted)
    with pytest.raises(ConfigError, match=r"^reservation: .*already"):
        budget.record_usage(200, granted)
    assert budget.used == 150


def test_an_allocation_is_a_whole_number_that_survives_pickling_and_copying():
    budget = TokenBudget(total=100)
    granted = budget.allocate(150)
    assert isinstance(granted, int)
    assert (repr(granted), json.dumps(granted), type(granted + 1)) == ("Allocation(100 of 150)", "100", int)
    pickled = pickle.loads(pickle.dumps(granted))  # noqa: S301 - our own
    for again in (pickled, copy.copy(granted), copy.deepcopy([granted])[0]):
        assert (again, again.reservation, again.requested) == (100, granted.reservation, 150)
        assert type(again) is Allocation
    budget.record_usage(30, pickled)
    assert balance(budget) == (30, 0, 70)


# -- the soft limit -----------------------------------------------------------------------------------------------------


def test_the_soft_limit_warns_once_when_it_is_reached(caplog):
    TokenBudget(total=10).record_usage(1_000)  # it has none
    budget = TokenBudget(soft=40_000, total=80_000)
    granted = budget.allocate(40_001)  # what is reserved is not used
    budget.record_usage(39_999)
    assert warnings(caplog) == []
    budget.release(granted)
    budget.record_usage(1, budget.allocate(5))
    assert warnings(caplog) == ["tokens: 40,000 of 80,000 are used in 'tokens'; the soft limit is 40,000"]
    budget.record_usage(100_000)
    assert len(warnings(caplog)) == 1


def test_what_lapsed_reaches_the_soft_limit_with_the_next_allocation(caplog, clock):
    budget = TokenBudget(total=100, soft=60)
    budget.allocate(60)
    clock.tick(901)
    budget.release(budget.allocate(1))
    assert (len(warnings(caplog)), budget.used) == (1, 60)


# -- modes ----------------------------------------------------------------------------------------------------------------

FLOORS = [
    (100, 100, "raw"), (51, 100, "raw"), (50_001, 100_000, "raw"), (2, 3, "raw"), (500_000_000_000_001, 10**15, "raw"),
    (50, 100, "table"), (1, 2, "table"), (49, 100, "table"), (1, 3, "table"), (21, 100, "table"),
    (20_001, 100_000, "table"), (20, 100, "summary"), (1, 5, "summary"), (19, 100, "summary"), (6, 100, "summary"),
    (5_001, 100_000, "summary"), (5, 100, "summary"), (1, 20, "summary"), (499, 10_000, "handle_only"),
    (49_999_999_999_999, 10**15, "handle_only"), (1, 21, "handle_only"), (0, 100, "handle_only"),
]  # fmt: skip


@pytest.mark.one_in(5)
@pytest.mark.parametrize("how", ["used", "reserved"])
@pytest.mark.parametrize("requested", MODES)
@pytest.mark.parametrize(("left", "total", "floor"), FLOORS)
def test_the_mode_follows_what_remains_and_never_relaxes_what_was_asked(left, total, floor, requested, how):
    budget = TokenBudget(total=total)
    if left < total:
        budget.record_usage(total - left) if how == "used" else budget.allocate(total - left)
    assert budget.remaining == left
    assert budget.suggested_mode(requested) == MODES[max(MODES.index(floor), MODES.index(requested))]


# -- counters and cuts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "tokens"), [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("ü" * 8, 2), ("x" * 9, 3)])
def test_four_characters_are_a_token_rounded_up_unless_told_otherwise(text, tokens):
    assert TokenBudget().count(text) == tokens


class Halves:
    def count(self, text):
        return -(-len(text) // 2)


def test_a_counter_is_an_object_or_a_function():
    for counter, tokens in ((CharsPerToken(1), 13), (CharsPerToken(5), 3), (TiktokenCounter(), 4), (Halves(), 7)):
        assert TokenBudget(counter=counter).count("Hello, world!") == tokens
    assert TokenBudget(counter=lambda text: len(text.split())).count("Hello, world!") == 2


def test_tiktoken_counts_as_openai_does_and_by_bytes_what_it_gives_up_on():
    budget = TokenBudget(counter=TiktokenCounter())
    assert budget.count("tiktoken is great!") == 6
    assert budget.count("ü" + " " * 1_000_000) == 1_000_002
    assert TokenBudget(counter=TiktokenCounter("gpt-4")).count("Grüße, 世界") == 8  # cl100k_base
    assert budget.count("Grüße, 世界") == 5


def raising(error):
    def count(text):
        raise error

    return count


@pytest.mark.parametrize("error", [ValueError("a megabyte of spaces"), LookupError("no vocabulary"), KeyError("x")])
def test_what_a_counter_cannot_count_is_as_many_tokens_as_bytes(error):
    budget = TokenBudget(counter=raising(error))
    assert (budget.count("ü\ud800"), budget.count("")) == (5, 0)
    assert budget.cut("grüße", 4) == "g…"  # "…" is three bytes


@pytest.mark.parametrize("error", [AttributeError("a bug"), TypeError("a bug"), RuntimeError("a bug")])
def test_a_bug_in_a_counter_comes_through(error):
    with pytest.raises(type(error), match="a bug"):
        TokenBudget(counter=raising(error)).count("text")


@pytest.mark.parametrize("counted", [1.0, -1, "3", None, True])
def test_a_counter_that_returns_no_count_is_a_clear_error(counted):
    with pytest.raises(ConfigError, match=r"^counter: .*returned"):
        TokenBudget(counter=lambda text: counted).cut("text", 3)


TIKTOKEN = TiktokenCounter()
COUNTERS = {
    "chars/4": CharsPerToken(4).count,
    "chars/1": len,
    "chars/1000": CharsPerToken(1_000).count,
    "words": lambda text: len(text.split()),
    "bytes": lambda text: len(text.encode("utf-8", "surrogatepass")),
    "heavy letters": lambda text: sum(7 if char in "aß" else 1 for char in text),
    "nothing": lambda text: 0,
    "tiktoken": TIKTOKEN.count,
    "gives up now and then": lambda text: len(text) // 9 if len(text) % 3 else int("no number"),
    "not monotone": lambda text: len(text) * (1 + len(text) % 2),
    "a dear beginning": lambda text: len(text) + 5,
}
MONOTONE = ["chars/4", "chars/1", "chars/1000", "words", "bytes", "heavy letters", "nothing"]
texts = st.text(st.characters(codec="utf-8"), max_size=300) | st.text("aß 世", min_size=60, max_size=900)


@pytest.mark.parametrize("counter", COUNTERS)
@given(text=texts, tokens=st.integers(1, 90))
@example(text="a" * 2_000, tokens=1)
@example(text=" a" * 500, tokens=13)
def test_a_cut_text_is_never_above_the_grant(counter, text, tokens):
    budget = TokenBudget(counter=COUNTERS[counter])
    kept = budget.cut(text, tokens)
    assert budget.count(kept) <= tokens or not kept
    assert kept == text or text.startswith(kept.removesuffix("…"))
    if counter in MONOTONE and budget.count(text) <= tokens:
        assert kept == text


@given(text=texts, tokens=st.integers(1, 90))
def test_as_much_is_kept_as_fits_with_the_mark_of_the_cut(text, tokens):
    kept = TokenBudget().cut(text, tokens)
    assert kept == (text if len(text) <= 4 * tokens else text[: 4 * tokens - 1] + "…")


@pytest.mark.parametrize(("a_token", "tokens"), [(4, 100), (1, 100), (200, 50), (1, 1), (4, 400_000)])
def test_little_more_is_counted_than_is_kept_of_ten_megabytes(a_token, tokens):
    shown = []
    budget = TokenBudget(counter=lambda text: shown.append(len(text)) or -(-len(text) // a_token))
    kept = budget.cut("x" * 10_000_000, tokens)
    assert len(kept) == a_token * tokens
    assert max(shown) <= max(64, 8 * tokens, 2 * len(kept)) + 1
    assert sum(shown) <= 40 * max(64, 8 * tokens, len(kept))


# -- bad input ----------------------------------------------------------------------------------------------------------

NO_COUNTS = [0, -1, 1.5, 100.0, float("nan"), True, "100", None, 10**15 + 1, [], Halves]
NO_COUNTERS = ["cl100k_base", 4, [], {}, object(), str, Halves, CharsPerToken]


@pytest.mark.parametrize(
    ("field", "make"),
    [
        *(("total", lambda bad=bad: TokenBudget(bad)) for bad in NO_COUNTS if bad is not None),
        *(("soft", lambda bad=bad: TokenBudget(100, soft=bad)) for bad in [*NO_COUNTS, 101] if bad is not None),
        *(("counter", lambda bad=bad: TokenBudget(100, counter=bad)) for bad in NO_COUNTERS),
        *(("chars", lambda bad=bad: CharsPerToken(bad)) for bad in (0, -4, 4.0, True, "4", None)),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(field, make):
    with pytest.raises(ConfigError, match=f"^{field}: "):
        make()


@pytest.mark.parametrize(
    ("field", "use"),
    [
        *(("requested", lambda budget, bad=bad: budget.allocate(bad)) for bad in NO_COUNTS),
        *(("actual", lambda budget, bad=bad: budget.record_usage(bad)) for bad in NO_COUNTS if bad != 0),
        *(("reservation", lambda budget, bad=bad: budget.release(bad)) for bad in [40, "x", None, Allocation(40)]),
        *(("reservation", lambda budget, bad=bad: budget.record_usage(5, bad)) for bad in [40, "x", Allocation(40)]),
        *(("requested", lambda budget, bad=bad: budget.suggested_mode(bad)) for bad in ["RAW", "", None, 1, []]),
        *(("tool", lambda budget, bad=bad: budget.allocate(5, tool=bad)) for bad in [5, b"t", object()]),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name_and_nothing_is_held(field, use):
    budget = TokenBudget(total=100)
    granted = budget.allocate(40)
    with pytest.raises(ConfigError, match=f"^{field}: "):
        use(budget)
    assert balance(budget) == (0, 40, 60)
    budget.record_usage(40, granted)
