"""What owners and sessions may say about LLM calls: wrong words are named at once, and no session lowers a price."""

import json
from decimal import Decimal

import httpx
import pytest

from tests.support.ledger import START_MS, Clock
from tests.support.settings import owners_file
from x402guard import CharsPerToken, ConfigError, Guard, GuardedTransport, Metering, ModelPrice, PaymentRefused
from x402guard.guard.settings import load_settings
from x402guard.llm.ceiling import find_ceiling
from x402guard.llm.request import read_call
from x402guard.stores import MemoryStore
from x402guard.vendors.genai_prices import GenaiPriceBook
from x402guard.vendors.prices import RegisteredBook
from x402guard.vendors.routes import METERED_HOSTS, find_endpoint, find_route
from x402guard.vendors.tiktoken_counter import TiktokenCounter

URL = "https://llm.example/v1"
NOW = START_MS // 1000
BOOK = GenaiPriceBook()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"unbounded_output": "clamp"}, "metering.unbounded_output: 'clamp' is none of fit, model_max, average, refuse"),
        ({"unbounded_output": None}, "metering.unbounded_output: None"),
        ({"unbounded_output": ["fit"]}, "metering.unbounded_output"),
        ({"include_usage": "no"}, "metering.include_usage: 'no' is neither True nor False"),
        ({"endpoints": [URL]}, "metering.endpoints: .* is not a mapping"),
        ({"endpoints": {URL: None}}, "metering.endpoints: .*: write a URL → a provider's name or Endpoint"),
        ({"disputes": "ignore"}, "metering.disputes: 'ignore' is not one of 'book', 'latch'"),
        ({"endpoints": {5: "openai"}}, "metering.endpoints"),
        ({"endpoints": {"llm.example/v1": "openai"}}, "metering.endpoints: 'llm.example/v1' is not a URL such as"),
        ({"endpoints": {"ftp://llm.example": "openai"}}, "metering.endpoints"),
        ({"endpoints": {"https://llm.example:99999/v1": "openai"}}, "metering.endpoints"),
        ({"endpoints": {"https://llm.example/v1?key=1": "openai"}}, "metering.endpoints"),
        ({"endpoints": {"https://me@llm.example/v1": "openai"}}, "metering.endpoints"),
        ({"endpoints": {"http://[::1/v1": "openai"}}, "metering.endpoints"),
        ({"aliases": "gpt-4o"}, "metering.aliases: 'gpt-4o' is not a mapping"),
        ({"aliases": {"mine": 4}}, "metering.aliases: 'mine' → 4"),
        ({"models": {"m": {"input": "$1"}}}, "metering.models: 'm' needs a ModelPrice"),
        ({"models": [ModelPrice(input=1, output=1)]}, "metering.models: .* is not a mapping"),
        ({"free": f"{URL}/files"}, "metering.free: write a list of URLs"),
        ({"free": None}, "metering.free: write a list of URLs"),
        ({"free": [5]}, "metering.free: 5 is not a URL"),
        ({"free": ["/v1/files"]}, "metering.free: '/v1/files' is not a URL"),
        ({"free": ["http://[::1"]}, "metering.free"),
        ({"fixed_prices": [URL]}, "metering.fixed_prices: .* is not a mapping"),
        ({"fixed_prices": {"files": "$1"}}, "metering.fixed_prices: 'files' is not a URL"),
        ({"fixed_prices": {URL: 0.04}}, 'metering.fixed_prices.*never a float; write it as text, "\\$0.04"'),
        ({"fixed_prices": {URL: "-1"}}, "metering.fixed_prices.*'-1' is not a dollar amount"),
        ({"allowances": {"websearch": "$1"}}, "metering.allowances: 'websearch' is none of audio, "),
        ({"allowances": {1: "$1", "x": "$1"}}, "metering.allowances"),
        ({"allowances": ["web_search"]}, "metering.allowances: .* is not a mapping"),
        ({"allowances": {"web_search": 0.01}}, 'metering.allowances.*never a float; write it as text, "\\$0.01"'),
        ({"price_context": {"processing": True}}, "metering.price_context: 'processing' → True"),
        ({"counter": len}, "metering.counter: .* has no count"),
        ({"counter": CharsPerToken(4)}, "metering.counter: .* cannot be used to hold money"), ({"prices": 5}, "prices: 5 is ne"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named_when_it_is_written_down(settings, says):
    with pytest.raises(ConfigError, match=says):
        Metering(**settings)


@pytest.mark.parametrize(
    ("price", "says"),
    [
        ({"input": 3.0}, 'input: money is never a float; write it as text, "\\$3.00".*per million tokens'),
        ({"output": 1.5}, 'output: money is never a float; write it as text, "\\$1.50"'),
        ({"cached_input": 0.3}, 'cached_input: money is never a float; write it as text, "\\$0.30"'),
        ({"input": "-1"}, "input: '-1' is not a dollar amount"),
        ({"input": "free"}, "input: 'free'"),
        ({"input": None}, "input: it is missing"),
        ({"output": float("nan")}, "output: money is never a float"),
        ({"output": Decimal("NaN")}, "output: 'NaN' is not a dollar amount"),
        ({"output": True}, "output: money is never a bool"),
        ({"output": "0.0000000001"}, "output: .*at most nine decimals"),
        ({"max_output": 0}, "max_output: 0"),
        ({"max_output": 1e3}, "max_output: 1000.0"),
        ({"max_output": True}, "max_output: True"),
        ({"max_output": "4k"}, "max_output: '4k'"),
    ],
)
def test_a_wrong_price_is_named_with_how_to_write_it(price, says):
    with pytest.raises(ConfigError, match=says):
        ModelPrice(**{"input": "$1", "output": "$2", **price})
    with Guard(ledger="memory://") as guard, pytest.raises(ConfigError, match=says):
        guard.session("s", budget="$1").register_model("mine", **{"input": "$1", "output": "$2", **price})


@pytest.mark.parametrize("written", ["$3.00", "3", 3, Decimal(3), " $3.0 "])
def test_prices_are_written_as_money_is(written):
    assert ModelPrice(input=written, output="0").rates == (3, 0, 3)


def test_a_price_is_for_a_million_tokens_and_cached_ones_lie_inside_the_input():
    price = ModelPrice(input="$3.00", output="$15.00", cached_input="$0.30")
    usage = {"input_tokens": 1_000, "cache_read_tokens": 400, "output_tokens": 10}
    assert price.cost(usage) == Decimal("0.0018") + Decimal("0.00012") + Decimal("0.00015")
    with pytest.raises(ValueError, match="401 cached tokens are more than all input"):
        price.cost({"input_tokens": 400, "cache_read_tokens": 401})


@pytest.mark.parametrize("metering", [{"unbounded_output": "fit"}, "fit", Metering])
def test_a_guard_takes_settings_of_the_right_kind(metering):
    with pytest.raises(ConfigError, match=r"metering: .* is not a Metering"):
        Guard(ledger="memory://", metering=metering)


def test_a_price_file_that_is_not_there_is_named_when_the_guard_is_made(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json cannot be read"):
        Guard(ledger="memory://", metering=Metering(prices=str(tmp_path / "none.json")))


# Prices of a session's own: for what nobody has a price for, or dearer; never cheaper.


def registered(name, price, book=None):
    return (book or RegisteredBook(BOOK)).register(name, ModelPrice(**price), NOW)


def cost(book, name, provider="openai", **usage):
    return book.cost(book.find(provider, name, NOW), usage, {})


MILLION = {"input_tokens": 1_000_000}


def test_what_nobody_has_a_price_for_takes_the_sessions():
    book = registered("mine", {"input": "$3.00", "output": "$15.00", "cached_input": "$0.30"})
    priced = book.find("anybody", "mine", NOW)
    assert (priced.source, priced.units) == ("session", {"input_tokens", "output_tokens", "cache_read_tokens"})
    assert book.cost(priced, MILLION, {}) == 3
    cached = {"input_tokens": 1_000_000, "cache_read_tokens": 1_000_000, "output_tokens": 1_000_000}
    assert book.cost(priced, cached, {}) == Decimal("15.3")
    assert book.find("openai", "gpt-99", NOW) is None
    assert cost(book, "gpt-4o", **MILLION) == Decimal("2.5"), "the book's own prices stand"


def test_a_model_that_a_session_makes_up_costs_no_less_than_its_providers_dearest_one():
    free = {"input": "$0", "output": "$0"}
    book = registered("mine", free)
    # o1-pro: $150 and $600 for a million tokens
    assert cost(book, "mine", input_tokens=1_000_000, output_tokens=1_000_000) == 750
    assert cost(registered("mine", {"input": "$200", "output": "$700"}), "mine", **MILLION) == 200
    listed = RegisteredBook(BOOK, owner_prices={"mine": ModelPrice(input="$1", output="$2")})
    assert cost(listed, "mine", **MILLION) == 1, "the owner may name any price"
    assert cost(registered("mine", {"input": "$3", "output": "$3"}, listed), "mine", **MILLION) == 3


def test_endpoints_are_written_in_the_file_as_a_name_or_as_a_table(tmp_path, monkeypatch):
    owners_file(
        tmp_path,
        '[metering]\ndisputes = "latch"\n[metering.endpoints]\n"http://127.0.0.1:8000/v1" = {provider = "openai", '
        'hidden_input = 2000}\n"http://127.0.0.1:8001/v1" = "openai"\n',
    )
    monkeypatch.chdir(tmp_path)
    metering = load_settings().metering.build()
    hosts = {host.host: (host.provider, host.hidden_input) for host in metering.hosts}
    assert hosts == {"127.0.0.1:8000": ("openai", 2_000), "127.0.0.1:8001": ("openai", 0)}
    assert metering.disputes == "latch"


def test_a_model_needs_a_name():
    for name in ("", "  ", None, 5):
        with pytest.raises(ConfigError, match="is not the name of a model"):
            registered(name, {"input": 1, "output": 1})


LOWER = [
    {"input": "$2.49", "output": "$99"},
    {"input": "$99", "output": "$9.99"},
    {"input": "$99", "output": "$99", "cached_input": "$1"},
]


@pytest.mark.parametrize("price", LOWER)
def test_a_session_cannot_lower_one_of_the_books_prices(price):
    with pytest.raises(ConfigError, match=r"price for 'gpt-4o' \(\w+\); only the owner can lower it"):
        registered("gpt-4o", price)


def test_a_session_can_raise_the_books_price():
    assert cost(registered("gpt-4o", {"input": "$5", "output": "$20"}), "gpt-4o", **MILLION) == 5


PROVIDERS = sorted({endpoint.provider for endpoint in METERED_HOSTS})


def priced_by(provider):
    """Names that a provider's calls are priced by, by tokens."""
    home = next(home for home in BOOK.snapshot.providers if home.id == provider)
    found = {info.id: BOOK.find(provider, info.id, NOW) for info in home.models}
    return [name for name, priced in found.items() if priced and {"input_tokens", "output_tokens"} <= priced.units]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_no_session_makes_any_metered_model_cheaper(provider):
    lowered = []
    for name in priced_by(provider)[:40]:
        if cost(RegisteredBook(BOOK), name, provider, **MILLION, output_tokens=1_000_000) == 0:
            continue
        try:
            registered(name, {"input": 0, "output": 0})
        except ConfigError:
            continue
        lowered.append(name)
    assert lowered == []


def test_a_dated_name_has_its_base_models_price_already():
    with pytest.raises(ConfigError, match="gpt-4o"):
        registered("gpt-4o-2025-06-15", {"input": 0, "output": 0})


@pytest.mark.parametrize(
    "usage",
    [
        {"input_tokens": 300_000, "cache_read_tokens": 100_000, "output_tokens": 10},
        {"input_tokens": 1_000, "cache_write_tokens": 1_000, "cache_write_1h_tokens": 1_000},
        {"input_tokens": 300_000, "cache_write_tokens": 300_000},
        {"input_tokens": 300_000, "output_tokens": 300_000},
    ],
)
def test_whatever_a_session_could_register_bills_no_less_than_the_book(usage):
    try:
        book = registered("claude-sonnet-4-5", {"input": "$6", "output": "$15", "cached_input": "$0.6"})
    except ConfigError:
        return  # refused: as good
    before = cost(RegisteredBook(BOOK), "claude-sonnet-4-5", "anthropic", **usage)
    assert cost(book, "claude-sonnet-4-5", "anthropic", **usage) >= before


def test_the_owner_may_say_anything_and_a_session_only_more():
    owned = RegisteredBook(BOOK, owner_prices={"gpt-4o": ModelPrice(input="$1", output="$2")})
    assert cost(owned, "gpt-4o", **MILLION) == 1
    assert owned.find("openai", "gpt-4o", NOW).source == "owner"
    with pytest.raises(ConfigError, match="has a price already; only the owner can lower it"):
        registered("gpt-4o", {"input": "$0.99", "output": "$2"}, owned)
    assert cost(registered("gpt-4o", {"input": "$9", "output": "$9"}, owned), "gpt-4o", **MILLION) == 9


def test_a_second_word_of_a_session_is_no_lower_than_its_first():
    once = registered("mine", {"input": "$3", "output": "$3"})
    with pytest.raises(ConfigError, match="has a price already"):
        registered("mine", {"input": "$2", "output": "$9"}, once)
    again = registered("mine", {"input": "$3", "output": "$4"}, once)
    assert again.cost(again.find("anybody", "mine", NOW), {"output_tokens": 1_000_000}, {}) == 4


# On a guard.


def answer(request):
    usage = {"prompt_tokens": 1_000, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 500}}
    return httpx.Response(200, json={"model": "mine", "choices": [{"finish_reason": "stop"}], "usage": usage})


def ask(session, model="mine"):
    body = {"model": model, "max_tokens": 100, "messages": [{"role": "user", "content": "word " * 1_000}]}
    with httpx.Client(transport=GuardedTransport(session, httpx.MockTransport(answer))) as http:
        return http.post("https://api.openai.com/v1/chat/completions", json=body)


@pytest.fixture
def guard():
    with Guard(ledger=MemoryStore(clock_ms=Clock())) as made:
        yield made


def test_a_sessions_price_holds_for_it_and_all_below_it_and_for_nobody_else(guard):
    session, other = guard.session("s", budget="$5"), guard.session("other", budget="$5")
    session.register_model("mine", input="$3.00", output="$15.00", cached_input="$0.30")
    ask(session)
    # 1,000 x 150,000 + 100 out x 600,000 nano-dollars: OpenAI's dearest model, o1-pro, is the floor
    assert session.spent == Decimal("0.21")
    child = session.child("c", budget="$1")
    ask(child)
    assert child.spent == Decimal("0.21")
    with pytest.raises(PaymentRefused, match=r"no price for 'mine'.*ModelPrice\(like='o1-pro'\)"):
        ask(other)
    assert other.spent == 0


def test_a_child_may_raise_what_its_parent_registered_and_not_lower_it(guard):
    session = guard.session("s", budget="$5")
    session.register_model("mine", input="$3", output="$3")
    child = session.child("c", budget="$2")
    with pytest.raises(ConfigError, match="has a price already"):
        child.register_model("mine", input="$1", output="$3")
    child.register_model("mine", input="$200", output="$700")
    ask(child)
    assert child.spent == Decimal("0.27")


def test_a_session_cannot_lower_a_price_for_a_call_it_is_about_to_make(guard):
    session = guard.session("s", budget="$5")
    with pytest.raises(ConfigError, match="only the owner can lower it"):
        session.register_model("gpt-4o", input="$0", output="$0")
    ask(session, "gpt-4o")
    # 500 x 2,500 + 500 cached x 1,250 + 100 out x 10,000 nano-dollars
    assert session.spent == Decimal("0.002875")


# Allowances: what the size of a request does not bound is named with its field, and with the line that allows it.

PLACES = {
    "chat": ("api.openai.com", "/v1/chat/completions"),
    "responses": ("api.openai.com", "/v1/responses"),
    "messages": ("api.anthropic.com", "/v1/messages"),
    "gemini": ("generativelanguage.googleapis.com", "/v1beta/models/gemini-2.5-pro:generateContent"),
    "mistral": ("api.mistral.ai", "/v1/chat/completions"),
    "cohere": ("api.cohere.com", "/v2/chat"),
    "azure": ("r.openai.azure.com", "/openai/deployments/my-gpt/chat/completions"),
    "x-ai": ("api.x.ai", "/v1/chat/completions"),
    "openrouter": ("openrouter.ai", "/api/v1/chat/completions"),
    "groq": ("api.groq.com", "/openai/v1/chat/completions"),
}


def read(place, body):
    host, path = PLACES[place]
    raw = json.dumps({"model": "mine", "max_tokens": 5, **body}).encode()
    return read_call(find_route(find_endpoint(host, path, ()), path), raw)


def ceiling(place, body, **allowances):
    call = read(place, body)
    book = RegisteredBook(BOOK, owner_prices={call.model: ModelPrice(input=1, output=1)})
    return find_ceiling(call, Metering(allowances=allowances), book, TiktokenCounter(), NOW)


UNBOUNDED = [
    ("chat", {"messages": [{"content": [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}]}]},
     ["messages[0].content[0].image_url.url image_url"]),
    ("chat", {"messages": [{"content": [{"type": "file", "file": {"file_id": "file-1"}}]}]},
     ["messages[0].content[0].file.file_id document"]),
    ("chat", {"web_search_options": {"search_context_size": "low"}}, ["web_search_options web_search"]),
    ("chat", {"web_search_options": {}}, ["web_search_options web_search"]),
    ("chat", {"model": "gpt-4o-search-preview"}, ["model web_search"]),
    ("chat", {"model": "gpt-5-search-api"}, ["model web_search"]),
    ("x-ai", {"search_parameters": {"mode": "on"}}, ["search_parameters web_search"]),
    ("x-ai", {"search_parameters": {}}, ["search_parameters web_search"]),
    ("openrouter", {"model": "openai/gpt-4o:online"}, ["model web_search"]),
    ("openrouter", {"plugins": [{"id": "web"}], "models": ["a", "b"]}, ["models model_fallback", "plugins[0] web_search"]),
    ("groq", {"model": "groq/compound"}, ["model provider_tool"]),
    ("groq", {"tools": [{"type": "browser_search"}]}, ["tools[0].type web_search"]),
    ("mistral", {"messages": [{"content": [{"type": "document_url", "document_url": "https://a/b.pdf"}]}]},
     ["messages[0].content[0].document_url document"]),
    ("mistral", {"messages": [{"content": [{"type": "image_url", "image_url": "https://a/b.png"}]}]},
     ["messages[0].content[0].image_url image_url"]),
    ("responses", {"input": [{"type": "input_image", "image_url": "https://a/b.png"}]}, ["input[0].image_url image_url"]),
    ("responses", {"input": [{"type": "input_file", "file_url": "https://a/b.pdf"}]}, ["input[0].file_url document"]),
    ("responses", {"previous_response_id": "resp_1"}, ["previous_response_id stored_conversation"]),
    ("responses", {"conversation": {"id": "conv_1"}}, ["conversation stored_conversation"]),
    ("responses", {"prompt": {"id": "pmpt_1"}}, ["prompt stored_conversation"]),
    ("responses", {"tools": [{"type": "web_search"}, {"type": "file_search"}, {"type": "code_interpreter"}]},
     ["tools[0].type web_search", "tools[1].type file_search", "tools[2].type code_execution"]),
    ("responses", {"tools": [{"type": "image_generation"}, {"type": "mcp"}, {"type": "new_thing"}]},
     ["tools[0].type image_generation", "tools[1].type mcp", "tools[2].type provider_tool"]),
    ("messages", {"messages": [{"content": [{"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}]}]},
     ["messages[0].content[0].source.url image_url"]),
    ("messages", {"messages": [{"content": [{"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}}]}]},
     ["messages[0].content[0].source.url document"]),
    ("messages", {"messages": [{"content": [{"type": "document", "source": {"type": "file", "file_id": "file_1"}}]}]},
     ["messages[0].content[0].source.file_id document"]),
    ("messages", {"tools": [{"type": "web_search_20250305"}, {"type": "web_fetch_20250910"}, {"type": "code_execution_20250825"}]},
     ["tools[0].type web_search", "tools[1].type web_fetch", "tools[2].type code_execution"]),
    ("messages", {"mcp_servers": [{"type": "url"}], "container": "c_1"}, ["mcp_servers mcp", "container code_execution"]),
    ("gemini", {"contents": [{"parts": [{"fileData": {"fileUri": "gs://a/b"}}]}]},
     ["contents[0].parts[0].fileData.fileUri document"]),
    ("gemini", {"contents": [{"parts": [{"file_data": {"file_uri": "https://a/b"}}]}]},
     ["contents[0].parts[0].file_data.file_uri document"]),
    ("gemini", {"tools": [{"googleSearch": {}}, {"urlContext": {}}, {"code_execution": {}}], "cachedContent": "c/1"},
     ["cachedContent cached_content", "tools[0].googleSearch web_search", "tools[1].urlContext web_fetch",
      "tools[2].code_execution code_execution"]),
    ("cohere", {"connectors": [{"id": "web-search"}]}, ["connectors web_search"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "body", "shown"), UNBOUNDED, ids=[f"{place}: {row[0]}" for place, _, row in UNBOUNDED]
)
def test_what_the_size_of_a_body_does_not_bound_is_named_and_refused(place, body, shown):
    found = [f"{part.field} {part.kind}" for part in read(place, body).unbounded]
    assert found == shown
    field, kind = found[0].split()
    refusal = ceiling(place, body)
    assert (refusal.rule, refusal.reason.partition(": ")[0]) == ("unbounded_input", field)
    assert f'Metering(allowances={{"{kind}": ' in refusal.reason
    kinds = {part.split()[1] for part in found}
    allowed = ceiling(place, body, **dict.fromkeys(kinds, "$2.00"))
    assert allowed.fixed - Decimal(allowed.input_tokens) / 10**6 == 2 * len(found)


@pytest.mark.parametrize(
    ("place", "body", "field"),
    [
        ("responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ("responses", {"input": [{"id": "msg_1"}]}, "input[0]"),  # the type may be left out
        ("chat", {"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]}, "messages[0].audio"),
        ("azure", {"data_sources": [{"type": "azure_search", "parameters": {}}]}, "data_sources"),
    ],
)
def test_what_a_provider_adds_from_its_own_stores_is_not_bounded_either(place, body, field):
    refusal = ceiling(place, body)
    assert getattr(refusal, "rule", "held") == "unbounded_input"
    assert refusal.reason.startswith(field)


@pytest.mark.parametrize(
    ("place", "body"),
    [
        ("chat", {"tools": [{"type": "function"}, {"type": "custom"}], "plugins": [], "web_search_options": None}),
        ("responses", {"tools": [{"type": "function"}, {"type": "custom"}, {"type": "local_shell"}, {"type": "computer"}]}),
        ("messages", {"tools": [{"name": "f"}, {"type": "custom"}, {"type": "bash_20250124"}, {"type": "memory_20250818"}]}),
        ("messages", {"tools": [{"type": "text_editor_20250728"}, {"type": "computer_20250124"}], "mcp_servers": []}),
        ("gemini", {"tools": [{"functionDeclarations": []}, {"googleSearch": None}], "cachedContent": ""}),
    ],
)  # fmt: skip
def test_tools_that_the_caller_runs_need_no_allowance(place, body):
    assert read(place, body).unbounded == ()
