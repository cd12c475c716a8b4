"""A server may answer anything: the meter takes neither memory nor time, loses no byte, and never takes it for free."""

import json
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.llm_provider import SYNC, WAYS, Answer, Provider, ask, chunk, completion, metered, sse

ROOT = Path(__file__).parents[2]
PIECE = 65_536
JSON, EVENTS = "application/json", "text/event-stream"
ASKED = {"stream_options": {"include_usage": True}}
MEGABYTE = 2**20


@pytest.fixture
def way(mode):
    return WAYS[0 if mode == "sync" else 1]


def timed(way, answer, body=None):
    """(outcome, seconds of computing, bytes handed on) of a call so answered."""
    with metered() as session:
        provider = Provider(session, answer)
        begun = time.process_time()
        _, chunks = way.post(session, provider, body)
        return provider.outcome, time.process_time() - begun, sum(map(len, chunks))


def peak_of(answer, body):
    """Megabytes at most, beyond what the caller keeps of it."""
    tracemalloc.start()
    try:
        _, _, handed = timed(SYNC, answer, body)
        return (tracemalloc.get_traced_memory()[1] - handed) / MEGABYTE
    finally:
        tracemalloc.stop()


# -- bombs -----------------------------------------------------------------------------------------------------------------


def packed(unpacked, megabytes, kind):
    """A gzip that unpacks to so many megabytes, in the pieces that a socket would give."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(unpacked) for _ in range(megabytes)) + packer.flush()
    pieces = [bomb[start : start + PIECE] for start in range(0, len(bomb), PIECE)]
    return Answer(200, pieces, {"content-type": kind, "content-encoding": "gzip"})


BOMBS = {
    "spaces": (JSON, b" " * MEGABYTE, 100),
    "one event": (EVENTS, b" " * MEGABYTE, 100),
    "empty events": (EVENTS, b"\n" * MEGABYTE, 8),
    "comments": (EVENTS, b":\n\n" * (MEGABYTE // 3), 12),
}
part_and_whole = pytest.mark.parametrize(
    "part", [4, pytest.param(1, marks=pytest.mark.long)], ids=["a quarter", "whole"]
)


@pytest.mark.one_in(3)
@part_and_whole
@pytest.mark.parametrize(("kind", "unpacked", "megabytes"), BOMBS.values(), ids=BOMBS)
def test_a_compression_bomb_takes_no_time(way, kind, unpacked, megabytes, part):
    bomb = packed(unpacked, megabytes // part, kind)
    outcome, took, handed = timed(way, bomb, ask(stream=True))
    assert (outcome, handed) == ("ceiling", sum(map(len, bomb.pieces)))
    assert took < 3


def test_what_follows_a_packed_answer_is_not_kept(way):
    """zlib keeps whatever comes after the end, and copies it for every piece more."""
    answer = packed(json.dumps(completion()).encode(), 1, JSON)
    answer.pieces += [b"x" * PIECE] * 800
    outcome, took, handed = timed(way, answer)
    assert (outcome, handed) == ("usage", sum(map(len, answer.pieces)))
    assert took < 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [JSON, EVENTS])
def test_a_compression_bomb_takes_no_memory(kind):
    assert peak_of(packed(b" " * MEGABYTE, 200, kind), ask(stream=True)) < 200


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [JSON, EVENTS])
@pytest.mark.parametrize("more", [{}, ASKED], ids=["usage kept back", "usage asked for"])
def test_a_hundred_megabytes_without_an_end_are_handed_on_and_not_kept(way, kind, more):
    pieces = [b'data: {"choices": [{"delta": {"content": "'] + [b"x" * PIECE] * 1_600
    outcome, took, handed = timed(way, Answer(200, pieces, {"content-type": kind}), ask(stream=True, **more))
    assert (outcome, handed) == ("ceiling", sum(map(len, pieces)))
    assert took < 5


@pytest.mark.parametrize("kind", [JSON, EVENTS])
def test_a_hundred_megabytes_without_an_end_take_no_memory(kind):
    pieces = [b'data: {"choices": [{"delta": {"content": "'] + [b"x" * PIECE] * 1_600
    assert peak_of(Answer(200, pieces, {"content-type": kind}), ask(stream=True, **ASKED)) < 150


def test_a_whole_answer_of_60_megabytes_is_read(way):
    text = "x" * PIECE
    body = json.dumps(completion(filler=[text] * 900)).encode()
    pieces = [body[start : start + PIECE] for start in range(0, len(body), PIECE)]
    outcome, took, handed = timed(way, Answer(200, pieces, {"content-type": JSON}))
    assert (outcome, handed) == ("usage", len(body))
    assert took < 5


# -- in small pieces -------------------------------------------------------------------------------------------------------


def told(text):
    return sse(chunk(text), chunk(finish="stop"), chunk(choices=[], usage=completion()["usage"]), "[DONE]")


LONG = told("x" * 200_000)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("more", [{}, ASKED], ids=["usage kept back", "usage asked for"])
@part_and_whole
def test_two_hundred_thousand_tiny_pieces_of_one_event_are_read_in_linear_time(way, more, part):
    """Looked at from its beginning for every piece, it would take hours; a quarter of it many minutes."""
    events = told("x" * (200_000 // part))
    body = b"".join(events)
    pieces = [body[at : at + 1] for at in range(len(body))]
    outcome, took, handed = timed(way, Answer.stream(*pieces), ask(stream=True, **more))
    assert (outcome, handed) == ("usage", len(body) - (0 if more else len(events[2])))
    assert took < 10 / part


@pytest.mark.one_in(3)
@pytest.mark.parametrize("more", [{}, ASKED], ids=["usage kept back", "usage asked for"])
def test_ten_thousand_events_are_read_in_linear_time(way, more):
    events = sse(
        *[chunk("word ")] * 10_000, chunk(finish="stop"), chunk(choices=[], usage=completion()["usage"]), "[DONE]"
    )
    for pieces in (events, [b"".join(events)]):
        outcome, took, _ = timed(way, Answer.stream(*pieces), ask(stream=True, **more))
        assert outcome == "usage"
        assert took < 10


def test_empty_pieces_change_nothing(way):
    events = sse(chunk("Yes."), chunk(finish="stop"), chunk(choices=[], usage=completion()["usage"]), "[DONE]")
    pieces = [piece for event in events for piece in (b"", event, b"", b"")]
    outcome, _, handed = timed(way, Answer.stream(*pieces), ask(stream=True, **ASKED))
    assert (outcome, handed) == ("usage", sum(map(len, events)))


# -- deep, or many of the same ---------------------------------------------------------------------------------------------

DEEP = """
import sys
from tests.support.llm_provider import *
from x402guard import X402GuardError
depth, where = int(sys.argv[1]), sys.argv[2]
deep = "[" * depth + "]" * depth
with metered() as session:
    answer = Answer.of(json.dumps(completion())[:-1] + ', "x": ' + deep + "}") if where == "answer" else Answer.of()
    provider = Provider(session, answer)
    body = (json.dumps(ask())[:-1] + ', "metadata": ' + deep + "}").encode() if where == "request" else ask()
    try:
        SYNC.post(session, provider, body)
        print(provider.outcome)
    except X402GuardError as error:
        print(type(error).__name__, "body: " in str(error), len(provider.requests), session.held)
"""
NESTED = {"request": "Unpriced True 0 0.00", "answer": "ceiling"}


@pytest.mark.parametrize("where", NESTED)
def test_a_hundred_thousand_levels_are_not_read_and_do_not_end_the_process(where):
    """A dependency of ours lets Python recurse that deep, and the C stack ends before: no exception, and no process."""
    done = processes.run(DEEP, 100_000, where)
    assert (done.returncode, done.stdout.strip()) == (0, NESTED[where]), done.stderr[-300:]


def test_a_key_that_stands_twice_among_many_is_found_soon(way):
    """A server's answer, too: what finds it may not look at every key for every key."""
    keys = ", ".join(f'"k{number}": 1' for number in range(30_000))
    outcome, took, _ = timed(way, Answer.of(json.dumps(completion())[:-1] + f', {keys}, "k29999": 2' + "}"))
    assert outcome == "ceiling"
    assert took < 5
