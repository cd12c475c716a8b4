"""Prices: from what is on this machine and nowhere else, on every hold's line, and taken in only as the owner saw them."""

import copy
import json
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal

import genai_prices
import httpx
import pytest
from genai_prices.data_snapshot import DataSnapshot, set_custom_snapshot

from tests.support.ledger import START_MS, Clock
from x402guard import ConfigError, Guard, GuardedTransport, Metering, ModelPrice
from x402guard.llm.meter import Meter
from x402guard.stores import MemoryStore
from x402guard.vendors.genai_prices import GenaiPriceBook
from x402guard.vendors.price_file import PriceChange, compare, open_book, read_prices, write_prices
from x402guard.vendors.prices import RegisteredBook
from x402guard.vendors.tiktoken_counter import TiktokenCounter

NOW = START_MS // 1000  # 2027-01-15
BOOK = GenaiPriceBook()
MILLION = {"input_tokens": 1_000_000, "output_tokens": 1_000_000}


def cost(book, provider, model, usage, context=None, at=NOW):
    return book.cost(book.find(provider, model, at), usage, context or {})


# The book.

OFFLINE = """
import sys, threading
def refuse(event, args):
    if event.startswith(("socket.", "urllib.")):
        raise SystemExit(f"{event} {args}")
sys.addaudithook(refuse)
from x402guard.vendors.genai_prices import GenaiPriceBook
book = GenaiPriceBook()
assert not book.ready
rows = list(book.listing(1_800_000_000))
priced = book.find("openai", "gpt-4o", 1_800_000_000)
book.cost(priced, {"input_tokens": 5}, {})
book.extract("openai", "chat", {"usage": {"prompt_tokens": 5, "completion_tokens": 1}})
assert book.find("openai", "gpt-99", 1_800_000_000) is None
print(book.ready, len(rows) > 2000, threading.active_count())
"""


def test_prices_are_read_without_a_socket_or_a_thread():
    done = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["True", "True", "1"], done.stdout + done.stderr


def test_another_part_of_the_program_that_lets_prices_be_fetched_changes_none_of_ours():
    set_custom_snapshot(DataSnapshot(providers=[], from_auto_update=True))
    try:
        assert cost(GenaiPriceBook(), "openai", "gpt-4o", MILLION) == Decimal("12.5")
    finally:
        set_custom_snapshot(None)


def test_a_price_says_where_it_is_from_and_what_it_covers():
    found = BOOK.find("openai", "gpt-4o", NOW)
    assert (found.provider, found.model, found.at_unix) == ("openai", "gpt-4o", NOW)
    assert (found.source, found.version) == ("genai-prices", genai_prices.__version__)
    assert found.context_window == 128_000
    assert {"input_tokens", "output_tokens", "cache_read_tokens", "web_searches"} <= found.units
    assert ("service_tier", "priority") in found.contexts
    assert "cache_write_1h_tokens" in BOOK.find("anthropic", "claude-sonnet-4-5", NOW).units


@pytest.mark.parametrize(
    ("provider", "model"),
    [
        ("openai", "gpt-99"),
        ("openai", "gpt-4ooo"),
        ("openai", ""),
        ("nobody", "gpt-4o"),
        ("anthropic", "gpt-4o"),
        ("openai", "x" * 300),
    ],
)
def test_what_the_book_does_not_know_has_no_price(provider, model):
    assert BOOK.find(provider, model, NOW) is None


@pytest.mark.parametrize(
    ("provider", "model", "usage", "context", "dollars"),
    [
        ("openai", "gpt-4o", MILLION, {}, "12.5"),
        ("openai", "gpt-4o", {"input_tokens": 1_000, "cache_read_tokens": 400}, {}, "0.002"),
        ("openai", "gpt-4o", MILLION, {"service_tier": "priority"}, "21.25"),
        ("openai", "gpt-4o", MILLION, {"processing": "batch"}, "6.25"),
        ("openai", "gpt-4o", MILLION, {"service_tier": "turbo"}, "12.5"),
        ("openai", "gpt-4o", {"web_searches": 3}, {}, "0.03"),
        ("google", "gemini-2.5-pro", {"input_tokens": 100_000}, {}, "0.125"),
        ("google", "gemini-2.5-pro", {"input_tokens": 300_000}, {}, "0.75"),
        ("anthropic", "claude-sonnet-4-0", {"input_tokens": 3_000, "cache_write_tokens": 2_000, "cache_write_1h_tokens": 1_000}, {},
         "0.01275"),
    ],
)  # fmt: skip
def test_a_cost_is_exact(provider, model, usage, context, dollars):
    assert cost(BOOK, provider, model, usage, context) == Decimal(dollars)


def test_a_cost_is_of_the_day_and_the_hour():
    assert cost(BOOK, "openai", "o3", MILLION, at=1_749_513_599) == 50
    assert cost(BOOK, "openai", "o3", MILLION, at=1_749_513_600) == 10  # 2025-06-10
    half_past, hour = 1_800_000_000 // 86_400 * 86_400 + 1_800, 3_600
    assert cost(BOOK, "deepseek", "deepseek-chat", MILLION, at=half_past + hour) != cost(
        BOOK, "deepseek", "deepseek-chat", MILLION, at=half_past - hour
    )


@pytest.mark.parametrize(
    "usage",
    [{"input_tokens": 5, "cache_read_tokens": 6}, {"input_tokens": 5, "cache_write_tokens": 3, "cache_read_tokens": 3}],
)
def test_counts_that_contradict_each_other_have_no_cost(usage):
    with pytest.raises(ValueError, match="cache"):
        cost(BOOK, "anthropic", "claude-sonnet-4-5", usage)


def test_a_price_of_another_book_is_not_mistaken_for_ours():
    with pytest.raises(ValueError, match="was not found in this book"):
        GenaiPriceBook().cost(BOOK.find("openai", "gpt-4o", NOW), MILLION, {})


CHAT = {
    "model": "m",
    "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}},
}
CLAUDE = {
    "model": "m",
    "usage": {"input_tokens": 2, "output_tokens": 4, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 4},
}
GEMINI = {
    "modelVersion": "m",
    "usageMetadata": {"promptTokenCount": 9, "candidatesTokenCount": 3, "thoughtsTokenCount": 1},
}


@pytest.mark.parametrize(
    "provider", ["openai", "azure", "mistral", "groq", "deepseek", "openrouter", "x-ai", "google", "mine"]
)
def test_openais_shape_is_read_for_whoever_speaks_it(provider):
    usage = BOOK.extract(provider, "chat", CHAT)
    assert (usage["input_tokens"], usage["output_tokens"]) == (9, 4)


@pytest.mark.parametrize(
    ("provider", "flavour", "answer", "cached"),
    [("anthropic", "messages", CLAUDE, 3), ("azure", "messages", CLAUDE, 3), ("google", "gemini", GEMINI, 0)],
)
def test_each_shape_is_read_as_its_provider_means_it(provider, flavour, answer, cached):
    usage = BOOK.extract(provider, flavour, answer)
    assert (usage["input_tokens"], usage["output_tokens"], usage.get("cache_read_tokens", 0)) == (9, 4, cached)


@pytest.mark.parametrize("answer", [{}, {"usage": None}, {"usage": "many"}, {"usage": {"prompt_tokens": "9"}}])
def test_an_answer_that_states_nothing_has_no_usage(answer):
    with pytest.raises(ValueError):
        BOOK.extract("openai", "chat", answer)


def test_a_meter_is_ready_once_its_book_has_loaded_and_not_before():
    counter = TiktokenCounter()
    book = GenaiPriceBook()
    meter = Meter(Metering(), RegisteredBook(book), counter)
    assert not meter.ready, "the first call would load the prices on the event loop"
    meter.warm()
    assert meter.ready
    assert not meter.loads("openai", "gpt-4o")


# On the hold's line.


def held(metering, model="gpt-4o", path="/v1/chat/completions", register=None):
    """The journal's line of a call's hold."""
    store = MemoryStore(clock_ms=Clock())
    with Guard(ledger=store, metering=metering) as guard:
        session = guard.session("s", budget="$5")
        if register:
            session.register_model(model, **register)
        answer = httpx.MockTransport(lambda request: httpx.Response(200, json=CHAT))
        with httpx.Client(transport=GuardedTransport(session, answer)) as http:
            http.post(f"https://api.openai.com{path}", json={"model": model, "max_tokens": 5, "messages": []})
        [line] = [entry for entry in store.entries(session.id) if entry.event == "authorize"]
    return json.loads(line.data)


BUNDLED = {"source": "genai-prices", "version": genai_prices.__version__, "date": "2027-01-15"}
OWN = {"version": "", "date": "2027-01-15"}


@pytest.mark.parametrize(
    ("metering", "model", "register", "price"),
    [
        ({}, "gpt-4o", None, {**BUNDLED, "model": "gpt-4o"}),
        ({}, "gpt-4o-2024-11-20", None, {**BUNDLED, "model": "gpt-4o"}),
        ({}, "gpt-4o-2025-06-15", None, {**BUNDLED, "model": "gpt-4o", "based_on": "gpt-4o"}),
        ({"aliases": {"mine": "gpt-4o-mini"}}, "mine", None, {**BUNDLED, "model": "gpt-4o-mini"}),
        (
            {"models": {"mine": ModelPrice(input=1, output=2)}},
            "mine",
            None,
            {**OWN, "source": "owner", "model": "mine"},
        ),
        ({}, "mine", {"input": 1, "output": 2}, {**OWN, "source": "session", "model": "mine"}),
    ],
)
def test_the_hold_says_by_whose_prices_it_was_worked_out(metering, model, register, price):
    line = held(Metering(**metering), model, register=register)
    assert line["price"] == price
    assert (line["model"], line["provider"]) == (model, "openai")
    assert (line["ceiling"]["output_tokens"], line["ceiling"]["estimate"]) == (5, False)


def test_a_fixed_price_is_its_owners():
    line = held(Metering(fixed_prices={"https://api.openai.com/v1/images": "$0.04"}), path="/v1/images")
    assert (line["price"], line["amount"]) == ({"source": "owner", "fixed": True}, 40_000_000)


# Price files.


def provider(prices, **model):
    """A list of one provider with one model, in genai-prices' own format."""
    roadrunner = {"id": "roadrunner", "match": {"equals": "roadrunner"}, "prices": prices, **model}
    return [{"id": "openai", "name": "Acme", "api_pattern": r"https://api\.acme\.example", "models": [roadrunner]}]


PLAIN = {"input_mtok": 1, "output_mtok": 2}


@pytest.fixture
def put(tmp_path):
    def put(content, name="new.json"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    return put


def test_a_price_file_is_read_with_its_hash(put):
    book, sha256 = read_prices(put(provider(PLAIN)))
    found = book.find("openai", "roadrunner", NOW)
    assert (found.source, found.version) == ("new.json", f"sha256:{sha256[:12]}")
    assert len(sha256) == 64
    assert cost(book, "openai", "roadrunner", MILLION) == 3
    assert read_prices(put({"providers": provider(PLAIN)}))[1] == sha256, "the hash is of the prices, however wrapped"
    assert read_prices(put(provider({"input_mtok": 1, "output_mtok": 3})))[1] != sha256


def test_what_was_taken_in_is_what_is_priced_by_and_the_hold_says_so(put, tmp_path):
    target = tmp_path / "taken.json"
    sha256 = write_prices(put(provider(PLAIN)), target)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    line = held(Metering(prices=str(target)), "roadrunner")
    assert line["price"]["source"] == "taken.json"
    assert line["price"]["version"] == f"sha256:{sha256[:12]}"
    assert line["amount"] == line["ceiling"]["input_tokens"] * 1_000 + 5 * 2_000


@pytest.mark.parametrize(
    "change", [("providers", provider({"input_mtok": 0, "output_mtok": 0})), ("sha256", "00" * 32), ("sha256", None)]
)
def test_a_file_that_was_changed_since_it_was_taken_in_is_refused(put, tmp_path, change):
    target = tmp_path / "taken.json"
    write_prices(put(provider(PLAIN)), target)
    key, value = change
    target.write_text(json.dumps({**json.loads(target.read_text()), key: value}))
    with pytest.raises(ConfigError, match=r"taken\.json was changed after its import: its hash is"):
        open_book(str(target))


def test_a_file_that_was_never_taken_in_is_refused(put):
    for content in (provider(PLAIN), {"format": "other", "providers": provider(PLAIN)}, 5, []):
        with pytest.raises(ConfigError, match=r"new\.json was not written by `x402guard prices update`"):
            open_book(str(put(content)))


GARBAGE = {
    "nothing": b"",
    "no json": b"nul",
    "no text": b"\xff\xfe\0",
    "half a letter": b'[{"id": "\\ud800"}]',
    "too deep": b"[" * 100_000,
    "no list": b"5",
    "no providers": b"[]",
    "wrapped nothing": b"{}",
    "empty providers": b"[{}]",
    "words for prices": provider({"input_mtok": "much"}),
    "no number": provider({"input_mtok": float("nan"), "output_mtok": 2}),
    "infinite": provider({"input_mtok": float("inf"), "output_mtok": 2}),
    "below zero": provider({"input_mtok": -1, "output_mtok": 2}),
    "a tier below zero": provider({"input_mtok": {"base": 1, "tiers": [{"start": 9, "price": -1}]}, "output_mtok": 2}),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_no_price_file(put, tmp_path, name):
    source = put(GARBAGE[name])
    for take in (read_prices, lambda path: write_prices(path, tmp_path / "taken.json")):
        with pytest.raises(ConfigError, match=r"^prices: .*new\.json"):
            take(source)
    assert not (tmp_path / "taken.json").exists()


def test_a_huge_file_or_none_at_all_is_named(put, tmp_path):
    huge = put(b"[")
    with huge.open("r+b") as file:
        file.truncate(100_000_000)
    for path, says in (
        (huge, "is too large for a price file"),
        (tmp_path / "none.json", "cannot be read"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_prices(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_prices(put(provider(PLAIN)), tmp_path / "no folder" / "taken.json")


def changes(put, before, after):
    return list(compare(read_prices(put(before, "old.json"))[0], read_prices(put(after))[0], NOW))


def test_every_price_that_differs_is_shown(put):
    assert changes(put, provider(PLAIN), provider(PLAIN)) == []
    after = provider({"input_mtok": "0.4", "cache_read_mtok": "0.1", "output_mtok": 2})
    found = changes(put, provider(PLAIN), after)
    assert found == [
        PriceChange("openai", "roadrunner", "cache_read_tokens", None, Decimal("0.1")),
        PriceChange("openai", "roadrunner", "input_tokens", Decimal(1), Decimal("0.4")),
    ]
    assert [change.falls_by_half for change in found] == [False, True]


@pytest.mark.parametrize(
    ("before", "after", "falls"),
    [
        ("1", "0.4999", True),
        ("1", "0.5", False),
        ("1", "2", False),
        ("1", "0", True),
        ("0", "0", False),
        (None, "1", False),
    ],
)
def test_a_price_falls_by_half_when_less_than_half_is_left(before, after, falls):
    prices = [None if price is None else Decimal(price) for price in (before, after)]
    assert PriceChange("p", "m", "u", *prices).falls_by_half == falls


def tiered(price):
    return {"input_mtok": {"base": 1, "tiers": [{"start": 200_000, "price": price}]}, "output_mtok": 2}


BATCH = {"when": {"processing": "batch"}, "prices": {"input_mtok": "0.5", "output_mtok": 1}}
FREE_BATCH = {**BATCH, "prices": {"input_mtok": 0, "output_mtok": 0}}
LATER = {"constraint": {"start_date": "2027-02-01"}, "prices": {"input_mtok": 0, "output_mtok": 0}}
OTHER = {"id": "free", "match": {"equals": "roadrunner"}, "prices": {"input_mtok": 0, "output_mtok": 0}}


def with_another(rows, other):
    rows = copy.deepcopy(rows)
    rows[0]["models"][0]["match"] = {"equals": "beep beep"}
    rows[0]["models"].append(other)
    return rows


HIDDEN = {
    "in a tier": (provider(tiered(2)), provider(tiered("0.1")), {"input_tokens": 300_000}, {}, NOW),
    "in a batch": (provider(PLAIN, price_variants=[BATCH]), provider(PLAIN, price_variants=[FREE_BATCH]), MILLION,
                   {"processing": "batch"}, NOW),
    "in a month": (provider(PLAIN), provider([{"prices": PLAIN}, LATER]), MILLION, {}, NOW + 30 * 86_400),
    "by leaving out what pictures cost": (provider({**PLAIN, "output_image_mtok": 30}), provider(PLAIN),
                                          {"output_tokens": 9, "output_image_tokens": 9}, {}, NOW),
    "behind another model's name": (provider(PLAIN), with_another(provider(PLAIN), OTHER), MILLION, {}, NOW),
}  # fmt: skip


@pytest.mark.parametrize("where", HIDDEN)
def test_a_price_that_falls_needs_a_yes_wherever_it_falls(put, where):
    *files, usage, context, at = HIDDEN[where]
    before, after = (read_prices(put(rows))[0] for rows in files)
    was, is_now = (cost(book, "openai", "roadrunner", usage, context, at) for book in (before, after))
    assert is_now < was / 2
    assert any(change.falls_by_half for change in compare(before, after, NOW))


@pytest.mark.long
def test_a_price_that_changes_with_time_is_asked_for_at_its_time():
    from genai_prices import Usage as Counts

    book = GenaiPriceBook()
    named = {(provider, name): book._look_up(provider, name) for provider, name in book.names()}
    found = [names for names, model in named.items() if model is not None and isinstance(model[1].prices, list)]
    assert found
    million = {"output_tokens": 1_000_000}
    for provider, name in found:
        info = named[provider, name][1]
        for at in range(NOW - 3 * 365 * 86_400, NOW, 30 * 86_400 + 3_600):
            now = datetime.fromtimestamp(at, UTC)
            if quiet(provider, now):
                continue
            expected = info.get_prices(now).calc_price(Counts(**million))["total_price"]
            assert book.cost(book.find(provider, name, at), million, {}) == expected, (provider, name, now)


def quiet(provider, now):
    """True where DeepSeek has the prices of its quiet hours all day, which the library does not know."""
    return provider == "deepseek" and now.weekday() >= 5


def test_deepseeks_weekends_have_the_prices_of_its_quiet_hours():
    book, million = GenaiPriceBook(), {"output_tokens": 1_000_000}

    def cost(day, hour):
        at = int(datetime(2026, 11, day, hour, tzinfo=UTC).timestamp())
        return book.cost(book.find("deepseek", "deepseek-v4-pro", at), million, {})

    assert cost(27, 2) == cost(30, 9) == 2 * cost(27, 12)  # a Friday and a Monday
    assert {cost(day, hour) for day in (28, 29) for hour in range(24)} == {cost(27, 12)}


def moments(condition):
    """The seconds before, at and after which a condition of a price holds or holds no more."""
    if (day := getattr(condition, "start_date", None)) is not None:
        starts = [datetime(day.year, day.month, day.day, tzinfo=UTC)]
    else:
        today = datetime.fromtimestamp(NOW, UTC).date()
        starts = [datetime.combine(today, each) for each in (condition.start_time, condition.end_time)]
    return [int(start.timestamp()) + seconds for start in starts for seconds in (-1, 0, 1)]


@pytest.mark.long
def test_what_is_known_of_a_model_is_what_its_conditions_say_at_each_second_around_them():
    book, seen = GenaiPriceBook(), 0
    for provider, name in book.names():
        home, info = book._look_up(provider, name) or (None, None)
        if info is None:
            continue
        conditions = book._know(home, info).conditions
        for at in {at for condition in conditions for at in moments(condition)}:
            if quiet(provider, datetime.fromtimestamp(at, UTC)):
                continue
            priced, asked_anew = book.find(provider, name, at), book._priced_model(home, info, at)
            assert priced == asked_anew, (provider, name, at)
            for context in ({}, *({key: value} for key, value in priced.contexts)):
                prices = info.get_prices(datetime.fromtimestamp(at, UTC), context or None)
                assert book._rates_of(priced, book._know(home, info), context)[0] == prices, (provider, name, at)
                seen += 1
    assert seen > 1_000


def test_two_models_with_one_id_keep_their_own_prices():
    """The book lists two as google's claude-3-5-sonnet; one of them has a price for searches."""
    both = ("regional.anthropic.claude-3-5-sonnet-20240620-v1:0", "claude-3.5-sonnet")
    usage = {"input_tokens": 1_000, "web_searches": 1_000}
    for names in (both, both[::-1]):
        book = GenaiPriceBook()
        costs = {name: book.cost(book.find("google", name, NOW), usage, {}) for name in names}
        assert costs[both[1]] == Decimal("10.003")
