"""Reading along: what is kept of an answer of each shape, when the provider has said all, and when nothing was said."""

import gzip
import json
import tracemalloc
import zlib

import pytest

from x402guard.llm import answer as reading
from x402guard.llm.answer import AnswerReader

SSE, JSON = "text/event-stream; charset=utf-8", "application/json"
USAGE = {"prompt_tokens": 20, "completion_tokens": 18, "total_tokens": 38}


def reader(flavour="chat", content_type=SSE, encoding="", *, hides=False, keeps=False):
    return AnswerReader(flavour, content_type, encoding, hides_usage=hides, keeps_text=keeps)


def sse(*events, end="\n"):
    lines = (event if isinstance(event, str) else json.dumps(event, ensure_ascii=False) for event in events)
    return "".join(f"data: {line}{end}{end}" for line in lines).encode()


def read(flavour, body, content_type=SSE, *, ended=True, **more):
    """(what was handed on, the answer) of a body that comes in one piece."""
    along = reader(flavour, content_type, **more)
    handed = along.feed(body)
    handed += along.rest() if ended else b""
    return handed, along.answer(ended=ended)


# Streams: what states the usage, and whether it is the whole call's.


def choice(text="", finish=None):
    return [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]


SAID = {"model": "gpt-4o", "choices": choice("Hi"), "usage": None}
STOP = {"model": "gpt-4o", "choices": choice(finish="stop")}
LAST = {"model": "gpt-4o", "choices": [], "usage": USAGE, "service_tier": "default"}
START = {"type": "message_start", "message": {"model": "claude-x", "usage": {"input_tokens": 9, "output_tokens": 1}}}
DELTA = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 15}}
PAUSED = {"type": "message_delta", "delta": {"stop_reason": None}, "usage": {"output_tokens": 7}}
DONE = {"type": "response.completed", "response": {"model": "gpt-4o", "usage": {"input_tokens": 3}}}
FAILED = {"type": "response.failed", "response": {"model": "gpt-4o", "usage": None}}
END = {"type": "message-end", "delta": {"usage": {"tokens": {"input_tokens": 5}}}}


def part(count, finish=None, **more):
    candidate = {"content": {"parts": [{"text": "a"}]}, **({"finishReason": finish} if finish else {}), **more}
    return {"candidates": [candidate], "usageMetadata": {"candidatesTokenCount": count}, "modelVersion": "g"}


STREAMS = [
    ("chat: usage at the end", "chat", [SAID, STOP, LAST, "[DONE]"], USAGE),
    ("chat: usage with the last choice, as Mistral", "chat", [SAID, {**STOP, "usage": USAGE}, "[DONE]"], USAGE),
    ("chat: usage so far on every chunk", "chat", [{**SAID, "usage": {"prompt_tokens": 1}}, {**STOP, "usage": USAGE}], USAGE),
    ("chat: Groq's own place", "chat", [SAID, {**STOP, "x_groq": {"id": "r", "usage": USAGE}}, "[DONE]"], USAGE),
    ("chat: Azure's filter comes first", "chat", [{"choices": [], "prompt_filter_results": []}, SAID, LAST], USAGE),
    ("chat: a comment between", "chat", [": OPENROUTER PROCESSING", SAID, LAST, "[DONE]"], USAGE),
    ("completions", "completions", [{"choices": [{"text": "Hi"}]}, LAST, "[DONE]"], USAGE),
    ("responses", "responses", [{"type": "response.created", "response": {"usage": None}}, DONE], {"input_tokens": 3}),
    ("responses: stopped at the limit", "responses", [{**DONE, "type": "response.incomplete"}], {"input_tokens": 3}),
    ("messages: counts are cumulative", "messages", [START, PAUSED, DELTA, {"type": "message_stop"}],
     {"input_tokens": 9, "output_tokens": 15}),
    ("messages: nulls say nothing", "messages", [START, {**DELTA, "usage": {"output_tokens": 2, "input_tokens": None}}],
     {"input_tokens": 9, "output_tokens": 2}),
    ("gemini", "gemini", [part(1), part(4, "STOP")], {"candidatesTokenCount": 4}),
    ("gemini: usage after the end", "gemini", [part(1), part(4, "STOP"), {"usageMetadata": {"thoughtsTokenCount": 7}}],
     {"candidatesTokenCount": 4, "thoughtsTokenCount": 7}),
    ("gemini: a prompt that was blocked", "gemini",
     [{"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 4}}], {"promptTokenCount": 4}),
    ("cohere", "cohere", [{"type": "content-delta"}, END], {"tokens": {"input_tokens": 5}}),
]  # fmt: skip


def stated(answer):
    body = answer.body or {}
    return body.get("usage", body.get("usageMetadata"))


@pytest.mark.parametrize(("name", "flavour", "events", "usage"), STREAMS, ids=[name for name, *_ in STREAMS])
def test_a_whole_stream_ends_with_the_usage_that_stands(name, flavour, events, usage):
    _, answer = read(flavour, sse(*events))
    assert (answer.final, answer.why, stated(answer)) == (True, "", usage)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(
    ("flavour", "events"),
    [
        ("chat", []),
        ("chat", [SAID, STOP, "[DONE]"]),
        ("chat", [SAID]),
        ("responses", [{"type": "response.created", "response": {"usage": {"input_tokens": 1}}}]),
        ("responses", [FAILED]),
        ("messages", [START]),
        ("messages", [START, PAUSED]),
        ("messages", [START, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}]),
        ("gemini", [part(1), part(4)]),
        ("gemini", [{"candidates": [{"finishReason": "STOP"}]}]),
        ("cohere", [{"type": "content-delta"}, {"type": "message-end", "delta": {}}]),
        ("chat", ['{"usage": ', "not json", "[1]", '{"a": 1, "a": 2}']),
    ],
)
def test_a_stream_that_does_not_say_all_is_not_final(flavour, events, ended):
    _, answer = read(flavour, sse(*events), ended=ended)
    assert not answer.final
    assert answer.why == ("the stream ended without its usage" if ended else "the stream was cut off or abandoned")


@pytest.mark.parametrize(("name", "flavour", "events", "usage"), STREAMS, ids=[name for name, *_ in STREAMS])
def test_a_stream_that_was_cut_before_its_usage_is_not_final(name, flavour, events, usage):
    whole = sse(*events)
    _, full = read(flavour, whole)
    for length in range(0, len(whole), 3):
        _, answer = read(flavour, whole[:length], ended=False)
        assert not answer.final or stated(answer) is not None
        if answer.final and flavour != "gemini":
            assert answer.body == full.body, "what is final does not change after it"


def test_usage_so_far_is_not_the_calls_where_the_stream_is_cut():
    sofar = {**SAID, "usage": {"prompt_tokens": 20, "completion_tokens": 1}}
    assert not read("chat", sse(SAID, sofar), ended=False)[1].final
    assert not read("chat", sse(SAID, sofar))[1].final, (
        "it broke off: no choice has ended, nothing says that it is done"
    )
    assert read("chat", sse(SAID, sofar) + b"data: [DONE]\n\n", ended=False)[1].final
    two = {**LAST, "choices": [*choice(finish="stop"), {"index": 1, "finish_reason": None}]}
    assert not read("chat", sse(two), ended=False)[1].final, "one choice goes on"


def test_an_end_of_a_stream_without_its_last_empty_line_is_read_all_the_same():
    body = sse(SAID, LAST).rstrip(b"\n")
    handed, answer = read("chat", body)
    assert (handed, answer.final, stated(answer)) == (body, True, USAGE)
    assert read("chat", body, hides=True)[0] == sse(SAID)


def test_the_tier_and_the_model_of_the_answer_are_kept():
    body = read("chat", sse(SAID, {**LAST, "service_tier": "flex"}))[1].body
    assert (body["model"], body["service_tier"]) == ("gpt-4o", "flex")


def test_data_over_several_lines_is_one_event():
    raw = b'event: x\ndata: {"choices": [],\ndata:"usage": {"prompt_tokens": 1}}\nid: 1\n\n'
    assert stated(read("chat", raw)[1]) == {"prompt_tokens": 1}


# Answers in one piece.


def test_an_answer_in_one_piece_is_read_when_it_has_ended():
    body = json.dumps({"usage": USAGE}).encode()
    handed, answer = read("chat", body, JSON)
    assert (handed, answer.final, answer.body) == (body, True, {"usage": USAGE})
    assert read("chat", body, JSON, ended=False)[1].why == "the answer was cut off or abandoned"


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b"null", b'{"usage": {"a": 1, "a": 2}}', b'{"usage": NaN}', b"\xff"]
)
def test_an_answer_that_cannot_be_read_is_not_final_and_handed_on(body):
    handed, answer = read("chat", body, JSON)
    assert (handed, answer.final) == (body, False)
    assert answer.why.startswith("the answer cannot be read: ")


def test_gemini_streams_an_array_where_no_events_were_asked_for():
    body = json.dumps([part(1), part(4, "STOP")]).encode()
    assert stated(read("gemini", body, JSON)[1]) == {"candidatesTokenCount": 4}
    assert not read("gemini", json.dumps([part(1)]).encode(), JSON)[1].final


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("x-gzip", gzip.compress), ("deflate", zlib.compress), ("GZIP ", gzip.compress)],
)
@pytest.mark.parametrize("content_type", [SSE, JSON])
def test_a_packed_answer_is_unpacked_for_the_books_and_handed_on_packed(encoding, pack, content_type):
    packed = pack(sse(SAID, LAST) if content_type == SSE else json.dumps({"usage": USAGE}).encode())
    along = reader("chat", content_type, encoding, hides=True)
    handed = b"".join(along.feed(packed[at : at + 3]) for at in range(0, len(packed), 3)) + along.rest()
    answer = along.answer(ended=True)
    assert (handed, answer.final, stated(answer)) == (packed, True, USAGE)


@pytest.mark.parametrize(
    ("encoding", "body", "why"),
    [
        ("br", b"\x1b\0", "an answer with encoding br is not read"),
        ("gzip", b"no gzip", "the answer cannot be decompressed"),
        ("zstd", b"", "zstd"),
    ],
)
@pytest.mark.parametrize("content_type", [SSE, JSON])
def test_what_does_not_unpack_is_handed_on_and_not_read(encoding, body, why, content_type):
    handed, answer = read("chat", body, content_type, encoding=encoding, hides=True)
    assert (handed, answer.final, answer.body) == (body, False, None)
    assert why in answer.why


# Memory.


@pytest.fixture
def _small(monkeypatch):
    monkeypatch.setattr(reading, "MAX_ANSWER_BYTES", 10_000)
    monkeypatch.setattr(reading, "MAX_EVENT_BYTES", 5_000)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize(
    ("content_type", "why"), [(JSON, "an answer of more than 10000 bytes"), (SSE, "an event of more than 5000")]
)
def test_an_answer_too_large_to_read_is_handed_on_and_let_go(content_type, why, hides):
    along, chunk = reader("chat", content_type, hides=hides), b"x" * 1_000
    handed = b"".join(along.feed(chunk) for _ in range(100)) + along.rest()
    answer = along.answer(ended=True)
    assert (handed, answer.final) == (chunk * 100, False)
    assert answer.why.startswith(why)
    assert not along._pending


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("content_type", [SSE, JSON])
def test_a_packed_answer_that_unfolds_without_end_is_let_go(content_type):
    along = reader("chat", content_type, "gzip")
    bomb = gzip.compress(bytes(5_000_000))
    assert along.feed(bomb) == bomb
    assert "is not read" in along.answer(ended=True).why
    assert not along._pending


@pytest.mark.parametrize("keeps", [False, True])
def test_a_stream_without_end_takes_no_more_memory_than_one_answer(keeps, monkeypatch):
    monkeypatch.setattr(reading, "MAX_ANSWER_BYTES", 100_000)
    along, chunk = reader("chat", hides=True, keeps=keeps), sse({"choices": choice("x" * 5_000)})
    tracemalloc.start()
    for _ in range(600):
        along.feed(chunk)
    now, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert now < 1_000_000


def test_text_is_kept_only_where_it_is_to_be_counted():
    tool = [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": '{"a'}}]}}]
    body = sse(SAID, {"choices": tool}, {"choices": [{"text": "old"}]}, "[DONE]")
    assert read("chat", body)[1].text == ""
    kept = read("chat", body, keeps=True)[1].text
    assert all(text in kept for text in ("Hi", "f", '{"a', "old"))
    assert read("chat", body, keeps=True, ended=False)[1].text == kept, "[DONE] says that nothing more is coming"
    assert read("chat", body[:-14], keeps=True, ended=False)[1].text == ""
