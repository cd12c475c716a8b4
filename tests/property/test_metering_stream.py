"""Reading a stream along changes nothing of it, or exactly one chunk; and what is read does not depend on how it was cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from x402guard.llm.answer import AnswerReader

USAGE = {"prompt_tokens": 20, "completion_tokens": 18}
USAGE_ONLY = json.dumps({"choices": [], "usage": USAGE})
FLAVOURS = ["chat", "completions", "responses", "messages", "gemini", "cohere"]


def reader(flavour="chat", *, hides=False, keeps=False, content_type="text/event-stream", encoding=""):
    return AnswerReader(flavour, content_type, encoding, hides_usage=hides, keeps_text=keeps)


def pieces(body, cuts):
    """*body* in pieces, cut at places that may lie anywhere."""
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    return [body[start:end] for start, end in pairwise(places)]


def run(along, chunks):
    return b"".join([along.feed(chunk) for chunk in chunks] + [along.rest()])


cuts = st.lists(st.integers(0, 10_000), max_size=12)
payloads = st.sampled_from([
    '{"choices":[{"delta":{"content":"Grüße, 世界 🌍"},"finish_reason":null}],"usage":null}',
    '{"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"prompt_tokens":1}}',
    '{"choices":[],"prompt_filter_results":[]}',
    '{"choices":[],"usage":null}',
    '{"type":"message_start","message":{"usage":{"input_tokens":9}}}',
    '{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":5}}',
    '{"type":"response.completed","response":{"usage":{"input_tokens":3}}}',
    '{"candidates":[{"finishReason":"STOP"}],"usageMetadata":{"promptTokenCount":4}}',
    '{"type":"message-end","delta":{"usage":{"tokens":{"input_tokens":5}}}}',
    '{"choices": [], "usage":', "[DONE]", "", "no json", '"usage"',
])  # fmt: skip
shown = st.builds(lambda before, data: [*before, f"data: {data}"], st.lists(st.sampled_from([": ping", "event: x", "id: 1"]), max_size=2), payloads)  # fmt: skip
hidden = st.sampled_from([
    [f"data: {USAGE_ONLY}"], [f"data:{USAGE_ONLY}"], [": ping", "event: x", f"data: {USAGE_ONLY}"],
    [f"data: {USAGE_ONLY[:14]}", f"data: {USAGE_ONLY[14:]}"],
])  # fmt: skip
streams = st.lists(st.tuples(st.just(True), shown) | st.tuples(st.just(False), hidden), max_size=8)


def written(lines, end):
    return "".join(line + end for line in [*lines, ""]).encode()


@pytest.mark.one_in(3)
@given(
    body=st.binary(max_size=300) | st.text('data: {}[]"\r\n\x00é', max_size=300).map(str.encode),
    cuts=cuts,
    hides=st.booleans(),
    flavour=st.sampled_from(FLAVOURS),
)
@pytest.mark.parametrize("content_type", ["text/event-stream", "application/json", "", "TEXT/EVENT-STREAM; charset=x"])
@pytest.mark.parametrize("encoding", ["", "gzip", "br"])
def test_any_bytes_come_out_as_they_went_in(body, cuts, hides, flavour, content_type, encoding):
    along = reader(flavour, hides=hides, keeps=True, content_type=content_type, encoding=encoding)
    assert run(along, pieces(body, cuts)) == body
    along.answer(ended=True)


@given(
    stream=streams,
    cuts=cuts,
    keeps=st.booleans(),
    flavour=st.sampled_from(FLAVOURS),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_without_hiding_each_piece_is_handed_on_at_once(stream, cuts, keeps, flavour, end):
    along = reader(flavour, keeps=keeps)
    for piece in pieces(b"".join(written(lines, end) for _, lines in stream), cuts):
        assert along.feed(piece) == piece
    assert along.rest() == b""


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@given(stream=streams, cuts=cuts)
@example(stream=[(True, ["data: a"]), (False, [f"data: {USAGE_ONLY}"]), (True, ["data: [DONE]"])], cuts=[*range(100)])
def test_hiding_takes_out_the_usage_chunk_and_nothing_else(stream, cuts, end):
    whole = b"".join(written(lines, end) for _, lines in stream)
    left = b"".join(written(lines, end) for stays, lines in stream if stays)
    assert run(reader(hides=True), pieces(whole, cuts)) == left


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])  # after a CR, a LF may follow
@given(stream=streams)
def test_hiding_holds_back_no_event_that_has_come_whole(stream, end):
    along = reader(hides=True)
    for stays, lines in stream:
        assert along.feed(written(lines, end)) == (written(lines, end) if stays else b"")
    assert along.rest() == b""


@given(stream=streams, cuts=cuts, end=st.sampled_from(["\n", "\r\n", "\r"]), length=st.integers(0, 2_000))
def test_of_a_stream_that_is_cut_off_nothing_is_lost_but_the_usage_chunk(stream, cuts, end, length):
    whole = b"".join(written(lines, end) for stays, lines in stream if stays)[:length]
    assert run(reader(hides=True), pieces(whole, cuts)) == whole


@given(
    stream=streams,
    cuts=cuts,
    flavour=st.sampled_from(FLAVOURS),
    end=st.sampled_from(["\n", "\r\n", "\r"]),
    ended=st.booleans(),
    hides=st.booleans(),
    length=st.integers(0, 2_000),
)
def test_what_is_read_does_not_depend_on_how_the_stream_was_cut_nor_on_its_line_ends(
    stream, cuts, flavour, end, ended, hides, length
):
    whole = b"".join(written(lines, end) for _, lines in stream)
    found = []
    for chunks in (
        [whole],
        pieces(whole, cuts),
        [bytes([byte]) for byte in whole],
        [b"".join(written(lines, "\n") for _, lines in stream)],
    ):
        along = reader(flavour, hides=hides, keeps=True)
        run(along, chunks)
        found.append(along.answer(ended=ended))
    assert found[1:] == found[:1] * 3


@given(cuts=cuts, fields=st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=9), max_size=4))
def test_an_answer_in_one_piece_is_the_same_however_it_came(cuts, fields):
    body = json.dumps({**fields, "usage": USAGE}).encode()
    along = reader(content_type="application/json")
    assert run(along, pieces(body, cuts)) == body
    assert along.answer(ended=True).body == {**fields, "usage": USAGE}
    assert not along.answer(ended=False).final


def test_a_large_event_in_single_bytes_is_read_in_a_moment():
    body = f"data: {json.dumps({'choices': [], 'usage': USAGE, 'x': 'y' * 200_000})}\n\n".encode()
    along = reader(hides=True)
    assert run(along, [bytes([byte]) for byte in body]) == b""
    assert along.answer(ended=True).final


odd = st.sampled_from([
    '{"model":"a","choices":[{"delta":{}}]}', '{"model":"b","choices":[{"delta":{},"finish_reason":"length"}]}',
    '{"choices":[{"delta":{}}],"usage":{"prompt_tokens":7}}', '{"choices":[{"delta":{}}],"x_groq":{"usage":{"prompt_tokens":2}}}',
    '{"choices":"none"}', '{"choices":[null]}', "[]", '{"type":7}', '{"type":"content_block_delta","delta":{"text":"a"}}',
    '{"type":"response.output_text.delta","delta":"a"}', '{"type":"content-delta","delta":{}}', '{"type":"message_stop"}',
    '{"choices":[{"delta":{"content":"\\ud800"}}]}', '{"choices":[{"delta":{"n":1e400}}]}', '{"choices":[{"delta":{"n":NaN}}]}',
])  # fmt: skip


@given(flavour=st.sampled_from(FLAVOURS), told=st.lists(payloads | odd, max_size=8), keeps=st.booleans())
def test_what_is_read_leniently_changes_nothing_of_what_is_billed(flavour, told, keeps):
    """An event of content alone is not checked for a key that appears twice; in all others that is still refused."""
    chunks = [f"data: {data}\n\n".encode() for data in told]
    along, strict = reader(flavour, keeps=keeps), reader(flavour, keeps=keeps)
    strict._reader.passes = lambda _: False
    run(along, chunks)
    run(strict, chunks)
    assert along.over == strict.over
    assert along.answer(ended=True) == strict.answer(ended=True)


TWICE = [
    '{"choices":[{"delta":{}}],"usage":{"prompt_tokens":1},"usage":null}',
    '{"choices":[{"delta":{},"finish_reason":"stop","finish_reason":null}],"usage":null}',
    '{"choices":[],"choices":[{"delta":{}}]}',
]


@pytest.mark.parametrize("twice", TWICE)
def test_a_key_that_appears_twice_never_states_a_usage_or_an_end(twice):
    along = reader()
    run(along, [b'data: {"choices":[{"delta":{}}],"usage":{"prompt_tokens":5,"completion_tokens":5}}\n\n'])
    run(along, [f"data: {twice}\n\n".encode(), b"data: [DONE]\n\n"])
    assert not along.answer(ended=True).final  # content came after the usage: the call costs its ceiling
