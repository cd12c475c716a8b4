"""Streams are handed on chunk by chunk, unchanged and at once; only the usage chunk that we asked for stays with us."""

import json
from contextlib import suppress

import pytest

from tests.support.llm_provider import (
    CHAT,
    COST,
    SYNC,
    USED,
    WAYS,
    Answer,
    Provider,
    ask,
    both_modes,
    chunk,
    completion,
    every_way,
    metered,
    sse,
)
from x402guard import Unpriced

ASKED = {"stream": True, "stream_options": {"include_usage": True}}
ENDS = {"LF": "\n", "CRLF": "\r\n", "CR": "\r"}
SAID = [chunk("Grüße, "), chunk("世界 🌍"), chunk(finish="stop", service_tier="default")]
USAGE = chunk(choices=[], usage=USED)

each_end = pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)


def stream(end="\n"):
    """(what the provider sends, the same without its usage chunk)"""
    before, after = sse(*SAID, end=end), sse("[DONE]", end=end)
    comment = f": OPENROUTER PROCESSING{end}{end}".encode()
    return b"".join([comment, *before, *sse(USAGE, end=end), *after]), b"".join([comment, *before, *after])


def sliced(body, size):
    return [body[start : start + size] for start in range(0, len(body), size)]


def handed(way, body, pieces):
    """What a caller gets of these pieces, having asked with *body*; the call has cost what its usage says."""
    with metered() as session:
        provider = Provider(session, Answer.stream(*pieces))
        _, chunks = way.post(session, provider, body)
        assert provider.outcome == "usage"
        assert [sent["stream_options"] for sent in provider.bodies] == [{"include_usage": True}]
        return b"".join(chunks)


# -- the usage chunk -------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@every_way
@each_end
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000], ids=lambda size: f"{size} bytes")
def test_a_usage_chunk_that_we_asked_for_is_not_handed_on(way, end, size):
    sent, without = stream(end)
    assert handed(way, ask(stream=True), sliced(sent, size)) == without


@pytest.mark.one_in(3)
@each_end
def test_it_is_not_handed_on_wherever_the_stream_is_split(end):
    sent, without = stream(end)
    for at in range(sent.index(b'"usage"') - 100, len(sent)):
        assert handed(SYNC, ask(stream=True), [sent[:at], sent[at:]]) == without, sent[at - 20 : at]


@every_way
@each_end
@pytest.mark.parametrize("size", [1, 7, 1000], ids=lambda size: f"{size} bytes")
def test_a_usage_chunk_that_the_caller_asked_for_is_handed_on(way, end, size):
    sent, _ = stream(end)
    assert handed(way, ask(**ASKED), sliced(sent, size)) == sent


@both_modes
@pytest.mark.parametrize(
    "options", [None, {}, {"include_usage": False}, {"include_usage": None, "include_obfuscation": False}]
)
def test_the_callers_other_stream_options_are_kept(way, options):
    with metered() as session:
        provider = Provider(session, Answer.stream(*sse(*SAID, USAGE, "[DONE]")))
        _, chunks = way.post(session, provider, ask(stream=True, stream_options=options))
        [sent] = provider.bodies
        assert sent == ask(stream=True, stream_options={**(options or {}), "include_usage": True})
        assert b"".join(chunks) == b"".join(sse(*SAID, "[DONE]"))


@both_modes
def test_a_body_that_we_write_anew_says_the_same(way):
    """Every number, every escape and the order of the keys; and its length is stated right."""
    given = (
        '{"model": "gpt-4o", "temperature": 0.10, "seed": 12345678901234567890, "stream": true, "logit_bias": {"1": -1.5e-3},'
        ' "messages": [{"role": "user", "content": "\\u00fc \\ud83c\\udf0d \\ud800 \\u0000"}], "max_completion_tokens": 100}'
    )
    with metered() as session:
        provider = Provider(session, Answer.stream(*sse(*SAID, USAGE, "[DONE]")))
        way.post(session, provider, given.encode())
        [request] = provider.requests
        sent = json.loads(request.content)
        assert sent.pop("stream_options") == {"include_usage": True}
        assert (sent, list(sent)) == (json.loads(given), list(json.loads(given)))
        assert request.headers["content-length"] == str(len(request.content))
        assert "transfer-encoding" not in request.headers


@both_modes
@pytest.mark.parametrize("number", ["1e400", "-1e400", "1e308", "1e-400"])
def test_a_body_that_we_write_anew_stays_json(way, number):
    """``Infinity`` is nothing that a server reads."""
    body = f'{json.dumps(ask(stream=True))[:-1]}, "temperature": {number}}}'.encode()
    with metered() as session:
        provider = Provider(session, Answer.stream(*sse(*SAID, USAGE, "[DONE]")))
        with suppress(Unpriced):
            way.post(session, provider, body)
        assert not any(b"Infinity" in request.content for request in provider.requests)
        assert session.held == 0


KEPT = {
    "no usage in it": chunk(choices=[], usage=None),
    "Azure's first": {"choices": [], "prompt_filter_results": [{"prompt_index": 0}], "model": "", "id": ""},
    "usage beside words": chunk("!", usage=USED),
    "not JSON": '{"choices": [], "usage": {"prompt_tokens": 1',
}


@pytest.mark.parametrize("event", KEPT.values(), ids=KEPT)
def test_only_the_usage_chunk_is_kept_back(event):
    sent = sse(*SAID[:2], event, SAID[2], USAGE, "[DONE]")
    assert handed(SYNC, ask(stream=True), sent) == b"".join([*sent[:4], sent[5]])


@every_way
def test_what_comes_after_the_last_line_end_is_handed_on(way):
    """A stream that stops without the empty line that ends an event: a client's parser may still want its rest."""
    sent = [*sse(*SAID, USAGE), b"data: [DONE]"]
    assert handed(way, ask(stream=True), sent) == b"".join([*sent[:3], sent[4]])


@every_way
def test_a_usage_chunk_that_ends_the_stream_without_an_empty_line_is_kept_back_too(way):
    sent = sse(*SAID, USAGE)
    assert handed(way, ask(stream=True), [*sent[:3], sent[3].rstrip()]) == b"".join(sent[:3])


def test_the_setting_turns_it_off():
    with metered(include_usage=False) as session:
        provider = Provider(session, Answer.stream(*sse(*SAID, "[DONE]")))
        _, chunks = SYNC.post(session, provider, ask(stream=True))
        assert provider.bodies == [ask(stream=True)]
        assert b"".join(chunks) == b"".join(sse(*SAID, "[DONE]"))
        # gpt-4o hides no output: what it said is counted here, and marked so.
        report = session.report().to_dict()
        assert report["evidence"]["estimate"] == report["spent"] != "0.00"
        assert session.spent < provider.held[0]


def test_without_usage_a_model_that_reasons_costs_its_ceiling():
    with metered(include_usage=False) as session:
        provider = Provider(session, Answer.stream(*sse(*SAID, "[DONE]")))
        SYNC.post(session, provider, ask(model="o4-mini", stream=True))
        assert provider.outcome == "ceiling"


def test_a_call_that_does_not_stream_goes_out_as_it_was_written():
    written = json.dumps(ask(), indent=3).encode() + b"\n"
    with metered() as session:
        provider = Provider(session)
        SYNC.post(session, provider, written)
        assert provider.requests[0].content == written


def test_mistral_is_asked_for_nothing_that_it_does_not_know():
    with metered() as session:
        provider = Provider(session, Answer.stream(*sse(*SAID, chunk(finish="stop", usage=USED), "[DONE]")))
        body = ask(model="mistral-small-latest", stream=True, max_tokens=100, max_completion_tokens=None)
        SYNC.post(session, provider, body, url="https://api.mistral.ai/v1/chat/completions")
        assert provider.bodies == [body]
        assert session.report().to_dict()["evidence"]["provider_usage"] != "0.00"


# -- at once ---------------------------------------------------------------------------------------------------------------


def read_of(way, body, pieces, **settings):
    """For every chunk that the caller got: how many pieces had been asked of the provider by then."""
    answer, asked = Answer.stream(*pieces), []
    with metered(**settings) as session:
        way.post(session, Provider(session, answer), body, each=lambda: asked.append(answer.asked))
        assert session.spent > 0
    return asked


@every_way
@pytest.mark.parametrize("body", [ask(**ASKED), ask()], ids=["usage asked for", "not asked to stream"])
@pytest.mark.parametrize("size", [1, 5, 300], ids=lambda size: f"{size} bytes")
def test_every_chunk_is_handed_on_before_the_next_is_asked_for(way, body, size):
    pieces = sliced(stream()[0], size)
    assert read_of(way, body, pieces) == list(range(1, len(pieces) + 1))


@every_way
def test_every_event_is_handed_on_at_once_although_we_keep_the_usage_back(way):
    assert read_of(way, ask(stream=True), sse(*SAID, USAGE, "[DONE]")) == [1, 2, 3, 5]


@every_way
@each_end
def test_an_event_in_pieces_is_handed_on_with_its_last_piece(way, end):
    """Whether it is the usage chunk shows only at its end; nothing waits for longer than that."""
    events = sse(*SAID, "[DONE]", end=end)
    pieces = [half for event in events for half in (event[:9], event[9:])]
    assert read_of(way, ask(stream=True), pieces) == [2, 4, 6, 8]


@every_way
def test_a_whole_answer_in_pieces_is_handed_on_at_once(way):
    body = json.dumps(completion()).encode()
    answer, asked = Answer(200, sliced(body, 50), {"content-type": "application/json"}), []
    with metered() as session:
        provider = Provider(session, answer)
        way.post(session, provider, each=lambda: asked.append(answer.asked))
        assert (asked, provider.outcome) == (list(range(1, len(answer.pieces) + 1)), "usage")


@every_way
def test_nothing_is_read_ahead_of_the_caller(way):
    answer = Answer.stream(*sse(*SAID, USAGE, "[DONE]"))
    with metered() as session:
        way.post(session, Provider(session, answer), ask(stream=True), take=0)
        assert (answer.asked, answer.closed) == (0, True)
        way.post(session, Provider(session, answer), ask(stream=True), take=1)
        assert answer.asked == 1


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_last_receipt_stands_in_the_responses_extensions(way):
    with metered() as session:
        provider = Provider(session, Answer.stream(*sse(*SAID, USAGE, "[DONE]")))
        response, _ = way.post(session, provider, ask(stream=True), url=CHAT)
        receipt = response.extensions["x402guard"]
        assert (receipt.state, receipt.evidence, receipt.amount) == ("captured", "provider_usage", COST)
        assert dict(receipt.usage) == {"input_tokens": 20, "output_tokens": 5}
