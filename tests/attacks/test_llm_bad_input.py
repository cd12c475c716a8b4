"""What cannot be priced is refused by name, with nothing sent and nothing held; and no body, asked or answered, takes long."""

import base64
import gzip
import json
import time
from pathlib import Path

import pytest

from tests.support.llm_provider import CHAT, COST, GEMINI, WAYS, Answer, Provider, ask, metered
from x402guard import BudgetExhausted, ModelPrice, PaymentRefused, Unpriced

ROOT = Path(__file__).parents[2]
API = "https://api.openai.com/v1"
RESPONSES = f"{API}/responses"
MESSAGES = "https://api.anthropic.com/v1/messages"
TEXT = json.dumps(ask())


@pytest.fixture
def way(mode):
    return WAYS[0 if mode == "sync" else 1]


@pytest.fixture
def session():
    with metered() as session:
        yield session


@pytest.fixture(params=["memory", "sqlite"])
def written(request, ledger):
    """A session on every ledger: what is refused is written down, be it spelled however."""
    with metered("memory://" if request.param == "memory" else ledger) as session:
        yield session


def assert_refused(way, session, body, *says, url=CHAT, kind=Unpriced, **more):
    """A typed refusal that says these words; nothing sent, nothing held, and counted in the report."""
    provider = Provider(session)
    with pytest.raises(PaymentRefused) as caught:
        way.post(session, provider, body, url=url, **more)
    assert type(caught.value) is kind
    for words in says:
        assert words in str(caught.value)
    assert not caught.value.money_may_have_moved
    assert (provider.requests, session.held, session.spent) == ([], 0, 0)
    report = session.report().to_dict()
    assert ([row["count"] for row in report["refusals"]], report["events"]) == ([1], [])
    return caught.value


def replaced(**values):
    """The call as JSON text, with values that are JSON text themselves."""
    body = {**{key: json.dumps(value) for key, value in ask().items()}, **values}
    return ("{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in body.items()) + "}").encode()


# -- the model -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", ["gpt-99", "gpt-4ooo", "gpt-4o-2025-13-45", "gpt-4o-20250615x", "o", "gpt", "gpt-4o;drop"]
)
def test_a_model_that_nobody_knows_is_refused_by_name(way, written, model):
    fix = f"Metering(models={{{model!r}: ModelPrice(like="
    assert_refused(way, written, ask(model=model), f"model: openai has no price for {model!r}", fix)


def test_the_fix_that_the_refusal_names_is_one(way):
    with metered() as session:
        session.register_model("gpt-99", input="$3.00", output="$15.00")
        way.post(session, Provider(session), ask(model="gpt-99"))
        # A made-up model costs no less than OpenAI's dearest one, o1-pro; the owner may name another price.
        assert session.spent * 10**9 == 20 * 150_000 + 5 * 600_000
    with metered(models={"gpt-99": ModelPrice(input="$3.00", output="$15.00")}) as session:
        way.post(session, Provider(session), ask(model="gpt-99"))
        assert session.spent * 10**9 == 20 * 3_000 + 5 * 15_000


def test_a_dated_name_takes_its_base_models_price_and_the_row_says_so(way):
    with metered() as session:
        provider = Provider(session)
        way.post(session, provider, ask(model="gpt-4o-2025-06-15"))
        assert provider.outcome == "usage"
        [row] = [e.facts() for e in session.shell.store.entries(session.id) if e.event == "authorize"]
        assert (row["model"], row["price"]["model"], row["price"]["based_on"]) == (
            "gpt-4o-2025-06-15",
            "gpt-4o",
            "gpt-4o",
        )
        assert (row["price"]["source"], bool(row["price"]["version"]), row["price"]["date"]) == (
            "genai-prices",
            True,
            "2027-01-15",
        )


NAMELESS = ["null", "[]", '["gpt-4o"]', "{}", "4", "true", '""', '"  "', json.dumps("gpt-4o" * 100)]


@pytest.mark.parametrize("model", [None, *NAMELESS], ids=lambda model: str(model)[:12])
def test_a_call_without_a_models_name_is_refused(way, session, model):
    body = json.dumps(ask(model=None)).encode() if model is None else replaced(model=model)
    assert_refused(way, session, body, "model: ", "names no model")


# -- a body that is not one object -----------------------------------------------------------------------------------------

NOT_ONE_OBJECT = {
    "empty": (b"", "not JSON"),
    "not JSON": (b"model=gpt-4o&max_tokens=10", "not JSON"),
    "an array": (f"[{TEXT}]".encode(), "a JSON list instead of an object"),
    "a text": (b'"gpt-4o"', "a JSON str instead of an object"),
    "null": (b"null", "a JSON NoneType instead of an object"),
    "two": (TEXT.encode() * 2, "not JSON"),
    "half": (TEXT.encode()[:-1], "not JSON"),
    "NaN": (replaced(temperature="NaN"), "NaN is not a JSON number"),
    "infinite": (replaced(temperature="-Infinity"), "-Infinity is not a JSON number"),
    "not utf-8": (TEXT.encode().replace(b"hi", b"\xff"), "not JSON"),
    "multipart": (b"--x\r\ncontent-disposition: form-data\r\n\r\n1\r\n--x--", "not JSON"),
    "a limit twice": (
        TEXT.encode()[:-1] + b', "max_completion_tokens": 100000}',
        "appears twice in one object ('max_completion_tokens')",
    ),
    "a model twice": (TEXT.encode()[:-1] + b', "model": "gpt-4o-mini"}', "appears twice in one object ('model')"),
    "twice by an escape": (
        TEXT.encode()[:-1] + b', "mo\\u0064el": "gpt-4o-mini"}',
        "appears twice in one object ('model')",
    ),
    "a thousand digits": (replaced(seed="1" * 1000), "hundreds of digits"),
    "ten thousand digits": (replaced(seed="1" * 10_000), "hundreds of digits"),
    "more than a float holds": (replaced(max_completion_tokens="1e400"), ""),
    "an endless exponent": (replaced(temperature="1e99999999999999999999"), ""),
}


@pytest.mark.parametrize(("body", "says"), NOT_ONE_OBJECT.values(), ids=NOT_ONE_OBJECT)
def test_a_body_that_is_not_one_json_object_is_refused(way, session, body, says):
    assert_refused(way, session, body, "body: ", says, "a metered call has to be one JSON object")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP", "identity, gzip"])
def test_a_packed_body_is_refused_naming_the_header(way, session, encoding):
    body, headers = gzip.compress(TEXT.encode()), {"content-encoding": encoding}
    assert_refused(way, session, body, "content-encoding: ", "send it uncompressed", headers=headers)


def streamed(pieces, mode):
    def blocking():
        yield from pieces

    async def awaiting():
        for piece in pieces:
            yield piece

    return blocking() if mode == "sync" else awaiting()


def test_a_body_that_streams_past_the_limit_is_refused_and_one_below_it_is_read(way):
    pieces = [TEXT.encode(), b" " * 1000]
    with metered(guard={"max_body_bytes": len(TEXT) + 1000}) as session:
        provider = Provider(session)
        way.post(session, provider, streamed(pieces, way.mode))
        assert provider.outcome == "usage"
        assert provider.requests[0].content == b"".join(pieces)
    with metered(guard={"max_body_bytes": len(TEXT) + 999}) as session:
        assert_refused(way, session, streamed(pieces, way.mode), "body: it streams past max_body_bytes")


# -- numbers ---------------------------------------------------------------------------------------------------------------

NO_COUNTS = ["-1", "0", "1.5", '"10"', "true", "false", "[10]", "{}", str(10**30), "-0", "1e300"]
LIMITS = {
    "max_completion_tokens": (CHAT, replaced),
    "max_tokens": (CHAT, replaced),
    "n": (CHAT, replaced),
    "max_output_tokens": (RESPONSES, lambda **more: replaced(input='"hi"', **more)),
}


@pytest.mark.parametrize("field", LIMITS)
@pytest.mark.parametrize("value", NO_COUNTS)
def test_a_limit_that_is_no_count_is_refused_naming_its_field(way, field, value):
    url, make = LIMITS[field]
    with metered() as session:
        assert_refused(way, session, make(**{field: value}), f"{field}: ", "is not a whole number from 1 on", url=url)


@pytest.mark.parametrize("value", NO_COUNTS)
def test_a_limit_of_geminis_is_refused_naming_its_path(way, value):
    body = f'{{"contents": [{{"parts": [{{"text": "hi"}}]}}], "generationConfig": {{"maxOutputTokens": {value}}}}}'
    with metered() as session:
        url = f"{GEMINI}:generateContent"
        assert_refused(way, session, body.encode(), "generationConfig.maxOutputTokens: ", url=url)


def test_of_two_limits_the_larger_is_held_for(way):
    """Which of them a server obeys is its own affair."""
    with metered() as session:
        provider = Provider(session)
        way.post(session, provider, ask(max_tokens=10_000))
        assert provider.held[0] > 10_000 * COST / 10


@pytest.mark.parametrize("changes", [{"n": 10**9}, {"max_completion_tokens": 10**9}], ids=str)
def test_a_billion_of_anything_does_not_fit(way, written, changes):
    assert assert_refused(way, written, ask(**changes), kind=BudgetExhausted).requested > 5


def test_a_number_of_answers_makes_the_ceiling_as_much_larger(way):
    held = {}
    for n in (1, 7):
        with metered() as session:
            provider = Provider(session)
            way.post(session, provider, ask(n=n))
            held[n] = provider.held[0]
    assert (
        6 * 10 * COST * 2 <= 2 * (held[7] - held[1]) <= 6 * 10 * COST * 2 + COST
    )  # 600 output tokens, and one number to read


# -- what a body's size does not bound -------------------------------------------------------------------------------------


def saying(*parts):
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}]


LINK = {"type": "image_url", "image_url": {"url": "https://courts.example/seal.png"}}
UNBOUNDED = {
    "image link": (CHAT, ask(messages=saying(LINK)), "messages[0].content[1].image_url.url", "image_url"),
    "image link, short": (
        CHAT,
        ask(messages=saying({"type": "image_url", "image_url": "https://courts.example/seal.png"})),
        "messages[0].content[1].image_url",
        "image_url",
    ),
    "stored answer": (
        RESPONSES,
        {"model": "gpt-4o", "input": "hi", "max_output_tokens": 10, "previous_response_id": "resp_1"},
        "previous_response_id",
        "stored_conversation",
    ),
    "stored file": (
        RESPONSES,
        {
            "model": "gpt-4o",
            "input": saying({"type": "input_file", "file_id": "file-1"}),
            "max_output_tokens": 10,
        },
        "input[0].content[1].file_id",
        "document",
    ),
    "web search": (
        RESPONSES,
        {"model": "gpt-4o", "input": "hi", "max_output_tokens": 10, "tools": [{"type": "web_search_preview"}]},
        "tools[0].type",
        "web_search",
    ),
    "search options": (CHAT, ask(web_search_options={"search_context_size": "low"}), "web_search_options", "web_search"),
    "anthropic's web search": (
        MESSAGES,
        ask(
            model="claude-sonnet-4-5",
            max_tokens=100,
            max_completion_tokens=None,
            tools=[{"type": "web_search_20250305", "name": "web_search"}],
        ),
        "tools[0].type",
        "web_search",
    ),
    "gemini's search": (
        f"{GEMINI}:generateContent",
        {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 9}, "tools": [{"googleSearch": {"x": 1}}]},
        "tools[0].googleSearch",
        "web_search",
    ),
    "gemini's empty search": (
        f"{GEMINI}:generateContent",
        {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 9}, "tools": [{"googleSearch": {}}]},
        "tools[0].googleSearch",
        "web_search",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("url", "body", "field", "kind"), UNBOUNDED.values(), ids=UNBOUNDED)
def test_what_has_no_bound_is_refused_naming_field_and_fix(way, url, body, field, kind):
    fix = f'Metering(allowances={{"{kind}": '
    with metered() as session:
        assert_refused(way, session, body, f"{field}: the size of the request does not bound its cost", fix, url=url)


@pytest.mark.parametrize(("url", "body", "field", "kind"), UNBOUNDED.values(), ids=UNBOUNDED)
def test_the_fix_is_one(way, url, body, field, kind):
    with metered(allowances={kind: "$0.25"}) as session:
        provider = Provider(session, Answer.of({"error": "no"}, 400))
        way.post(session, provider, body, url=url)
        assert provider.held[0] > 0.25


@pytest.mark.parametrize("name", ["\ud800", "\u0000", "\u202e", "a" * 10_000, "ü"], ids=ascii)
def test_a_field_of_an_odd_name_is_refused_all_the_same(way, written, name):
    body = ask(messages=[{"role": "user", "content": [{name: {"file_uri": "https://courts.example/1"}}]}])
    assert_refused(way, written, body, "does not bound its cost")


PATHS = ["images/generations", "images/edits", "audio/speech", "audio/translations", "batches", "files", "fine_tuning/jobs",
         "assistants", "threads/t_1/runs", "videos", "realtime/sessions", "uploads", "vector_stores", "", "chat", "chatcompletions",
         "chat/completions/extra"]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
def test_a_path_that_nobody_can_price_is_refused(method, path):
    way = WAYS[0]
    with metered() as session:
        provider = Provider(session)
        with way.library.Client(transport=way.transport(session, provider)) as http:
            with pytest.raises(Unpriced, match="the price of this path of openai is unknown; give it a price"):
                http.request(method, f"{API}/{path}", json=ask())
        assert (provider.requests, session.held) == ([], 0)


# -- bodies that are large, deep or odd ------------------------------------------------------------------------------------


def timed(call):
    begun = time.process_time()
    result = call()
    return time.process_time() - begun, result


def counted_by(session):
    [row] = [e.facts() for e in session.shell.store.entries(session.id) if e.event == "authorize"]
    return row["ceiling"]["counted_by"], row["ceiling"]["input_tokens"]


def test_a_megabyte_of_spaces_is_counted_by_its_bytes_and_soon(way):
    """tiktoken gives up on it, and not with an exception that an ``except Exception`` sees."""
    body = ask(messages=[{"role": "user", "content": " " * 1_000_000}])
    with metered() as session:
        provider = Provider(session)
        took, _ = timed(lambda: way.post(session, provider, body))
        name, tokens = counted_by(session)
        assert (name, provider.outcome) == ("bytes", "usage")
        assert 1_000_000 <= tokens < 1_001_000
        assert took < 5


@pytest.mark.parametrize("text", ["\ud800", "\udfff a \ud800", "\u0000", "\uffff", "\U0010ffff", "🏳️‍🌈"], ids=ascii)
def test_odd_characters_are_counted_and_sent_as_they_are(way, written, text):
    body = json.dumps(ask(messages=[{"role": "user", "content": text}])).encode()
    provider = Provider(written)
    way.post(written, provider, body)
    assert (provider.outcome, provider.requests[0].content) == ("usage", body)


def test_a_body_of_20_megabytes_does_not_fit_and_says_so_soon(way, session):
    body = ask(messages=[{"role": "user", "content": "a b " * 5_000_000}])
    took, error = timed(lambda: assert_refused(way, session, body, kind=BudgetExhausted))
    assert error.requested > 40
    assert took < 5


def test_a_body_of_20_megabytes_that_fits_goes_out_whole(way):
    with metered(budget="$1000") as session:
        provider = Provider(session)
        took, _ = timed(
            lambda: way.post(session, provider, ask(messages=[{"role": "user", "content": "a b " * 5_000_000}]))
        )
        assert (provider.outcome, counted_by(session)[0]) == ("usage", "bytes")
        assert took < 5


@pytest.mark.parametrize("many", [20_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_a_hundred_thousand_messages_are_counted_soon(way, many):
    with metered(budget="$1000") as session:
        provider = Provider(session)
        took, _ = timed(lambda: way.post(session, provider, ask(messages=[{"role": "user", "content": "hi"}] * many)))
        assert provider.outcome == "usage"
        assert took < 8 * many / 100_000


def picture(size):
    """A PNG of 1,024 x 1,024 by its head, and noise for the rest."""
    head = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (1024).to_bytes(4) * 2 + b"\x08\x02\x00\x00\x00"
    return base64.b64encode(head + bytes(range(256)) * (size // 256)).decode()


def test_a_picture_of_a_megabyte_is_not_a_million_tokens(way):
    url = f"data:image/png;base64,{picture(1_000_000)}"
    assert len(url) > 1_300_000
    with metered() as session:
        way.post(session, Provider(session), ask(messages=saying({"type": "image_url", "image_url": {"url": url}})))
        _, tokens = counted_by(session)
        assert 765 <= tokens < 1_000  # four tiles: 85 + 4 x 170
    source = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture(1_000_000)}}
    body = ask(model="claude-sonnet-4-5", max_tokens=100, max_completion_tokens=None, messages=saying(source))
    with metered() as session:
        way.post(session, Provider(session, Answer.of({"error": "no"}, 400)), body, url=MESSAGES)
        assert 1_399 <= counted_by(session)[1] < 5_200
