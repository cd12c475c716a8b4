"""What is stated and not understood is never nothing: each count of a usage moves the bill, or stands in a table with its reason."""

import json
import tracemalloc
import types
import typing
from decimal import Decimal

import httpx
import pytest
from pydantic import BaseModel

from tests.support.merchant import make_guard
from x402guard import GuardedTransport, Metering
from x402guard.llm.leaves import INSIDE, KNOWN, UNIT_OF, counts_of
from x402guard.vendors.genai_prices import GenaiPriceBook

WORDS = "hi " * 12_000
HI = [{"role": "user", "content": WORDS}]
OPENAI = "https://api.openai.com/v1"
GEMINI = "https://generativelanguage.googleapis.com/v1beta/models/gemini-2.5-flash:generateContent"
CHATTED = {"prompt_tokens": 9_000, "completion_tokens": 9_000}
RESPONDED = {"input_tokens": 9_000, "output_tokens": 9_000}
TOLD = "usage_not_read"


def asks(model, **more):
    return {"model": model, "messages": HI, "max_tokens": 16_000, **more}


def booked(url, asked, usage, *, field="usage", disputes="book", allowances=None, **around):
    """What an answer with this usage is booked at, in nano-dollars, and the counts that the owner was told of."""
    answer = {"model": asked.get("model", ""), field: usage, **around}
    notices = []
    with (
        make_guard(
            metering=Metering(disputes=disputes, allowances=allowances or {}), on_notice=notices.append
        ) as guard,
        guard.session("s", budget="$500.00") as session,
        httpx.Client(
            transport=GuardedTransport(session, httpx.MockTransport(lambda _: httpx.Response(200, json=answer)))
        ) as http,
    ):
        for _ in range(2):
            assert http.post(url, json=asked).status_code == 200
        assert session.report().to_dict()["trip_reason"] is None
        spent = int(session.spent * 10**9)
    assert spent % 2 == 0
    return spent // 2, [notice.facts["counts"] for notice in notices if notice.kind == TOLD]


CHAT_DONE = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}


def chat(usage, model="gpt-4o", url=f"{OPENAI}/chat/completions", **more):
    return booked(url, asks(model), usage, **CHAT_DONE, **more)


@pytest.mark.parametrize("sound", [0, 375])
@pytest.mark.parametrize(("seconds", "bill"), [(600, 40_021_000), (30, 2_021_000)])
def test_seconds_of_audio_are_read_and_billed_and_its_tokens_in_the_total_are_not(seconds, bill, sound):
    usage = {"prompt_tokens": 10, "prompt_audio_seconds": seconds, "completion_tokens": 50, "total_tokens": 60 + sound}
    url = "https://api.mistral.ai/v1/chat/completions"
    assert chat(usage, "voxtral-small-latest", url) == (bill, [])


@pytest.mark.parametrize(
    ("usage", "bill"),
    [
        (
            {
                "input_tokens": 300,
                "output_tokens": 200,
                "input_token_details": {"audio_tokens": 200, "text_tokens": 100},
                "output_token_details": {"audio_tokens": 90},
            },
            14_320_000,  # 200 × $32, 100 × $4, 90 × $64 and 110 × $16 a million
        ),
    ],
)
def test_the_details_of_realtime_are_read(usage, bill):
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        session.record_usage("openai", "gpt-realtime", usage)
        assert int(session.spent * 10**9) == bill


@pytest.mark.parametrize(
    "name", ["prompt_holograms", "avatar_seconds", "scent_requests", "prompt_tokens_details.smell_tokens", "x"]
)
def test_a_count_with_no_name_that_we_know_is_booked_at_the_dearest_and_told_once(name):
    plain, _ = chat(CHATTED)
    outer, _, inner = name.rpartition(".")
    leaf = {inner: 500}
    amount, told = chat(CHATTED | ({outer: leaf} if outer else leaf))
    assert amount >= plain + 500 * 10_000  # at the price of output, $10 a million
    assert told == [name]


def test_a_count_is_at_most_what_the_model_can_take_and_trips_nothing_by_itself():
    plain, _ = chat(CHATTED)
    amount, _ = chat(CHATTED | {"holograms": 10**15}, disputes="latch")
    assert plain < amount < plain + 10 * 10**9


def test_a_call_that_is_reported_tells_as_well():
    notices = []
    with make_guard(on_notice=notices.append) as guard, guard.session("s", budget="$5.00") as session:
        for _ in range(2):
            session.record_usage("openai", "gpt-4o", {**CHATTED, "prompt_tokens_details": {"smell_tokens": 100}})
        assert int(session.spent * 10**9) == 2 * (9_000 * 12_500 + 100 * 10_000)
    assert [notice.facts["counts"] for notice in notices if notice.kind == TOLD] == [
        "prompt_tokens_details.smell_tokens"
    ]


# -- the exam: each count in the types of the vendors' SDKs ------------------------------------------------------------


def leaves(model, path=(), depth=0):
    """Yield the path of each number in a type, with True where a list stands."""
    for name, info in model.model_fields.items():
        alias = info.alias or name
        for kind, is_list in kinds(info.annotation):
            here = (*path, (alias, is_list))
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                if depth < 4:
                    yield from leaves(kind, here, depth + 1)
            elif kind in (int, float):
                yield here


def kinds(annotation, is_list=False):
    origin = typing.get_origin(annotation)
    if origin in (list, list):
        for each in typing.get_args(annotation):
            yield from kinds(each, True)
    elif origin is typing.Annotated:
        yield from kinds(typing.get_args(annotation)[0], is_list)
    elif origin in (typing.Union, types.UnionType):
        for each in typing.get_args(annotation):
            yield from kinds(each, is_list)
    else:
        yield annotation, is_list


def placed(usage, path, count):
    """The usage with one leaf set."""
    (name, is_list), *rest = path
    before = usage.get(name)
    if not rest:
        return {**usage, name: (before or 0) + count if isinstance(before, int) else count}
    inner = placed(before if isinstance(before, dict) else {}, rest, count)
    if is_list and name.endswith("Details"):
        inner = {"modality": "AUDIO", **inner}
    return {**usage, name: [inner] if is_list else inner}


def answered_chat(usage):
    return chat(usage)


def answered_mistral(usage):
    return chat(usage, "mistral-large-latest", "https://api.mistral.ai/v1/chat/completions")


def answered_responses(usage):
    asked = {"model": "gpt-4o", "input": WORDS, "max_output_tokens": 20_000}
    return booked(f"{OPENAI}/responses", asked, usage, status="completed", output=[], object="response")


def answered_anthropic(usage):
    around = {"id": "m", "type": "message", "role": "assistant", "content": [], "stop_reason": "end_turn"}
    return booked("https://api.anthropic.com/v1/messages", asks("claude-sonnet-4-5"), usage, **around)


def answered_gemini(usage):
    asked = {"contents": [{"parts": [{"text": WORDS}]}], "generationConfig": {"maxOutputTokens": 20_000}}
    done = {"candidates": [{"content": {"parts": [{"text": "hi"}]}, "finishReason": "STOP"}]}
    return booked(GEMINI, asked, usage, field="usageMetadata", **done)


def answered_cohere(usage):
    around = {"id": "m", "finish_reason": "COMPLETE", "message": {"role": "assistant", "content": []}}
    return booked("https://api.cohere.com/v2/chat", asks("command-a-03-2025"), usage, **around)


def answered_groq(usage):
    return chat(usage, "llama-3.3-70b-versatile", "https://api.groq.com/openai/v1/chat/completions")


def answered_with_tools(usage):
    made = [{"type": "image_generation_call", "id": "i", "status": "completed"}]
    asked = {"model": "gpt-4o", "input": WORDS, "max_output_tokens": 20_000, "tools": [{"type": "image_generation"}]}
    around = {"status": "completed", "output": made, "object": "response", "tool_usage": usage}
    return booked(f"{OPENAI}/responses", asked, RESPONDED, allowances={"image_generation": "$0.001"}, **around)


def answered_realtime(usage):
    notices = []
    with make_guard(on_notice=notices.append) as guard, guard.session("s", budget="$50.00") as session:
        session.record_usage("openai", "gpt-realtime", usage)
        return int(session.spent * 10**9), [each.facts["counts"] for each in notices if each.kind == TOLD]


def answered_transcription(usage):
    answer = {"text": "hi", "usage": usage}
    with make_guard() as guard, guard.session("s", budget="$50.00") as session:
        inner = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
        with httpx.Client(transport=GuardedTransport(session, inner)) as http:
            form = {"data": {"model": "gpt-4o-transcribe"}, "files": {"file": ("a.mp3", b"a" * 200_000)}}
            assert http.post(f"{OPENAI}/audio/transcriptions", **form).status_code == 200
        return int(session.spent * 10**9), []


def exam():
    from anthropic.types import Usage as Claude
    from anthropic.types.beta import BetaUsage
    from cohere.types.usage import Usage as Cohere
    from google.genai.types import GenerateContentResponseUsageMetadata
    from groq.types import CompletionUsage as Groq
    from mistralai.client.models import UsageInfo
    from openai.types import CompletionUsage
    from openai.types.audio.transcription import UsageTokens
    from openai.types.realtime import RealtimeResponseUsage
    from openai.types.responses.response import ToolUsage
    from openai.types.responses.response_usage import ResponseUsage

    cohere = {"billed_units": {"input_tokens": 9_000, "output_tokens": 9_000}}
    gemini = {"promptTokenCount": 9_000, "candidatesTokenCount": 9_000}
    rows = [
        ("chat", CompletionUsage, CHATTED, answered_chat),
        ("chat", Groq, CHATTED, answered_groq),
        ("chat", UsageInfo, CHATTED, answered_mistral),
        ("responses", ToolUsage, {}, answered_with_tools),
        ("responses", RealtimeResponseUsage, RESPONDED, answered_realtime),
        ("responses", UsageTokens, {"type": "tokens", **RESPONDED}, answered_transcription),
        ("responses", ResponseUsage, RESPONDED, answered_responses),
        ("messages", Claude, RESPONDED, answered_anthropic),
        ("messages", BetaUsage, RESPONDED, answered_anthropic),
        ("gemini", GenerateContentResponseUsageMetadata, gemini, answered_gemini),
        ("cohere", Cohere, cohere, answered_cohere),
    ]
    for flavour, model, plain, answered in rows:
        for path in dict.fromkeys(leaves(model)):
            dotted = ".".join(name for name, _ in path)
            yield pytest.param(
                flavour, path, plain, answered, id=f"{model.__module__.split('.')[0]} {model.__name__} {dotted}"
            )


@pytest.mark.parametrize(("flavour", "path", "plain", "answered"), list(exam()))
def test_no_count_that_a_vendors_library_knows_is_dropped(flavour, path, plain, answered):
    before, _ = answered(plain)
    after, told = answered(placed(plain, path, 700))
    name = ".".join(each for each, _ in path)
    in_table = name.removeprefix("iterations.") in {*KNOWN[flavour], *UNIT_OF, *plain} or path[0][0] in {
        *INSIDE,
        "server_tool_use",
    }
    assert after != before or in_table or told, "it is read by nothing, and no table says why"
    lowers = (
        in_table or "cache" in name.lower() or answered is answered_transcription
    )  # which is all sound, unless said
    assert after >= before or lowers, "a part of the input at a lower price"


# -- what fresh eyes have found ----------------------------------------------------------------------------------------

SECONDS_OF_AZURE = {
    "engine_ttlt_ms": 19_000,
    "service_ttft_ms": 900,
    "total_duration_ms": 20_000,
    "user_visible_ttft_ms": 901,
}


@pytest.mark.parametrize(
    "beside",
    [
        {"latency_checkpoint": SECONDS_OF_AZURE},
        {"num_cached_tokens": 100},
        {"request_id": "123456789", "created": "1700000000"},
        {"server_side_tool_usage_details": {"web_search_calls": 0}, "num_sources_used": 0},
        {"holograms": 0, "on": True, "nothing": None, "never": -0.0},
    ],
    ids=str,
)
def test_what_costs_nothing_by_itself_is_booked_at_nothing(beside):
    assert chat(CHATTED | beside, disputes="latch") == (112_500_000, [])


@pytest.mark.parametrize(
    ("beside", "at_least"),
    [
        ({"holograms": 1_000_000, **{f"z{n}": 0 for n in range(300)}}, 500_000_000),
        ({f"z{n}": 1 for n in range(300)}, 1_000_000_000),
        ({"hologram_tokens": "50000"}, 500_000_000),
        ({"server_tool_use": {"web_search_requests": 10}}, 500_000_000),
        ({"server_tool_use.x": 50_000}, 500_000_000),
        ({"iterations": [{"prompt_tokens": 50_000}]}, 500_000_000),
        ({"webSearchRequests": 10}, 500_000_000),
        ({"web_search_count": 10}, 500_000_000),
        ({"num_sources_used": 10}, 500_000_000),
        ({"images_generated": 3}, 300_000_000),
        ({"prompt_audio_ms": 50_000}, 500_000_000),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_costs_money_is_booked_whatever_is_beside_it(beside, at_least):
    amount, told = chat(CHATTED | beside)
    assert amount >= 112_500_000 + at_least
    assert told


@pytest.mark.parametrize("name", ["z{}_requests", "z{}_tokens", "z{}_seconds"])
def test_all_counts_together_are_bounded(name):
    amount, _ = chat(CHATTED | {name.format(n): 10**15 for n in range(199)})
    assert amount < 55 * 10**9


def test_a_long_recording_is_billed_and_disputes_nothing():
    usage = {"prompt_tokens": 10, "prompt_audio_seconds": 2_400, "completion_tokens": 50, "total_tokens": 60}
    url = "https://api.mistral.ai/v1/chat/completions"
    assert chat(usage, "voxtral-small-latest", url, disputes="latch") == (160_021_000, [])


def test_a_part_that_is_more_than_its_total_trips_nothing_by_itself():
    amount, told = chat(CHATTED | {"prompt_tokens_details": {"image_tokens": 9_500}}, disputes="latch")
    assert (amount, told) == (112_500_000 + 9_500 * 10_000, ["input_image_tokens"])


def nested(levels, inner):
    for _ in range(levels):
        inner = {"k" * 60: inner}
    return inner


@pytest.mark.parametrize(
    ("usage", "names"),
    [
        ({"A" * 300_000: {f"k{n}": {} for n in range(3_000)}, "B": [{}] * 100_000}, ["more_counts"]),
        (nested(300, {f"k{n}": {} for n in range(3_000)}), []),
        ({"A": [[0] * 2_000] * 2_000}, ["more_counts"]),
    ],
    ids=["a long name", "deep", "wide"],
)
def test_a_usage_of_any_size_takes_bounded_memory_and_time(usage, names):
    tracemalloc.start()
    assert [name for name, _ in counts_of(usage)] == names
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


def test_each_name_is_told_once_the_first_ones_alone_and_none_in_a_report():
    notices, number = [], iter(range(1_000))
    words = "IGNORE_ALL_PREVIOUS"

    def answer(_request):
        usage = CHATTED | {f"{words}_{next(number)}": 1, f"{words}_x": 1}
        return httpx.Response(200, json={"model": "gpt-4o", "usage": usage, **CHAT_DONE})

    with make_guard(on_notice=notices.append) as guard, guard.session("s", budget="$50.00") as session:
        with httpx.Client(transport=GuardedTransport(session, httpx.MockTransport(answer))) as http:
            for n in range(30):
                asked = asks("gpt-4o", messages=[{"role": "user", "content": f"{n} {WORDS}"}])
                assert words not in str(http.post(f"{OPENAI}/chat/completions", json=asked).extensions)
        assert words not in json.dumps(session.report().to_dict(), default=str)
    told = [name for each in notices if each.kind == TOLD for name in each.facts["counts"].split(", ")]
    assert len(told) == len(set(told)) == 20


def test_unread_seconds_cost_what_seconds_of_the_model_cost():
    url, usage = "https://api.mistral.ai/v1/chat/completions", {"prompt_tokens": 10, "completion_tokens": 50}
    plain, _ = chat(usage, "voxtral-small-latest", url)
    amount, told = chat(usage | {"avatar_seconds": 600}, "voxtral-small-latest", url)
    assert (amount - plain, told) == (40_000_000, ["avatar_seconds"])
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        session.record_usage("mistral", "voxtral-small-latest", usage | {"avatar_seconds": 600})
        assert session.spent > Decimal("0.04")


class OwnBook:
    """A user's own book, as it was written before books said what they read."""

    def __init__(self):
        self._book = GenaiPriceBook()

    def __getattr__(self, name):
        if name == "reads":
            raise AttributeError(name)
        return getattr(self._book, name)


@pytest.mark.parametrize("usage", [RESPONDED, {**RESPONDED, "cache_read_input_tokens": 500}], ids=len)
def test_a_users_own_book_books_no_count_twice(usage):
    spent = []
    for book in (GenaiPriceBook(), OwnBook()):
        with make_guard(metering=Metering(prices=book)) as guard, guard.session("s", budget="$5.00") as session:
            session.record_usage("anthropic", "claude-sonnet-4-5", {"cache_creation_input_tokens": 0, **usage})
            spent.append(session.spent)
    assert spent[0] == spent[1]
