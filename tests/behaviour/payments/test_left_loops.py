"""A loop over a streamed answer that its reader leaves by choice has got what it wanted; one that an error leaves has not."""

import itertools
import threading
from contextlib import suppress

import httpx
import httpx2
import pytest

import x402guard
import x402guard.httpx2
from tests.support.merchant import make_guard
from tests.support.slow_server import Trickler, once_paid, paid_head
from x402guard import X402GuardError

LOCK = threading.Lock()
LIBRARIES = {httpx: x402guard, httpx2: x402guard.httpx2}
EVENTS = b"data: 1\n\n" * 3 + b"data: [DONE]\n\n"


class CallersError(Exception):
    """Of the caller's own."""


def lines(response):
    yield from response.iter_lines()


def parsed(response):
    for line in response.iter_lines():
        if line:
            yield line


def closing(response):
    try:
        yield from response.iter_text()
    finally:
        response.close()


def until_done(response):
    """As the SDKs of models read a stream."""
    for line in response.iter_lines():
        if "[DONE]" in line:
            break
        yield line


READERS = {
    "lines": lambda response: response.iter_lines(),
    "text": lambda response: response.iter_text(),
    "raw": lambda response: response.iter_raw(),
    "a generator": lines,
    "a generator with a loop": parsed,
    "a generator in a generator": lambda response: (piece for piece in parsed(response)),
    "a generator that closes": closing,
}


def by_break(pieces):
    for _ in pieces():
        break


def by_return(pieces):
    for piece in pieces():
        return piece
    return None


def by_break_in_with(pieces):
    for _ in pieces():
        with LOCK:
            break


def by_break_after_an_error(pieces):
    for _ in pieces():
        try:
            raise CallersError
        except CallersError:
            break


def by_raise(pieces):
    for _ in pieces():
        raise CallersError


def by_a_call(pieces):
    for _ in pieces():
        int("x")


def by_a_key(pieces):
    for _ in pieces():
        {}["key"]


def by_raise_in_with(pieces):
    for _ in pieces():
        with LOCK:
            raise CallersError


def by_raise_again(pieces):
    for _ in pieces():
        try:
            raise CallersError
        except CallersError:
            raise ValueError from None


def by_raise_through_finally(pieces):
    for _ in pieces():
        try:
            raise CallersError
        finally:
            len("x")


def by_interrupt(pieces):
    for _ in pieces():
        raise KeyboardInterrupt


CHOSEN = (by_break, by_return, by_break_in_with, by_break_after_an_error)
FORCED = (
    by_raise, by_a_call, by_a_key, by_raise_in_with, by_raise_again, by_raise_through_finally, by_interrupt,
)  # fmt: skip
MINE = (CallersError, ValueError, KeyError, KeyboardInterrupt)


@pytest.fixture
def shop():
    def answer(line):
        with suppress(OSError):
            line.send(paid_head(b"content-type: text/event-stream\r\n\r\n") + EVENTS)
        return False

    with Trickler() as shop:
        shop.answers["/page"] = once_paid(answer)
        yield shop


@pytest.fixture
def session():
    with make_guard(budget="$1.00") as guard, guard.session("s", budget="$1.00") as session:
        yield session


def read(library, session, url, reader, leaves):
    with library.Client(transport=LIBRARIES[library].GuardedTransport(session), trust_env=False) as http:
        with http.stream("GET", url) as response:
            leaves(lambda: reader(response))


def events(http, url):
    """Open the stream inside a generator, as SDKs do."""
    with http.stream("GET", url) as response:
        yield from until_done(response)


def read_inside(library, session, url, leaves):
    with library.Client(transport=LIBRARIES[library].GuardedTransport(session), trust_env=False) as http:
        leaves(lambda: events(http, url))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("reader", "leaves"), list(itertools.product(READERS, CHOSEN)))
def test_what_is_left_by_choice_was_handed_over(library, reader, leaves, shop, session):
    for number in range(1, 4):
        read(library, session, f"{shop.url}/page", READERS[reader], leaves)
        assert len(set(shop.nonces)) == number


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("reader", "leaves"), list(itertools.product(READERS, FORCED)))
def test_what_is_left_by_an_error_is_lost(library, reader, leaves, shop, session):
    for _ in range(3):
        with pytest.raises((*MINE, X402GuardError)):
            read(library, session, f"{shop.url}/page", READERS[reader], leaves)
    assert len(set(shop.nonces)) == 1
    assert str(session.spent + session.held) == "0.01"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("leaves", CHOSEN)
def test_a_stream_that_a_generator_opens_and_its_reader_leaves_was_handed_over(library, leaves, shop, session):
    for number in range(1, 4):
        read_inside(library, session, f"{shop.url}/page", leaves)
        assert len(set(shop.nonces)) == number


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("leaves", FORCED)
def test_a_stream_that_a_generator_opens_and_an_error_leaves_is_lost(library, leaves, shop, session):
    for _ in range(3):
        with pytest.raises((*MINE, X402GuardError)):
            read_inside(library, session, f"{shop.url}/page", leaves)
    assert len(set(shop.nonces)) == 1


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_stream_read_to_its_mark_is_handed_over_each_time(library, shop, session):
    for number in range(1, 4):
        read(library, session, f"{shop.url}/page", until_done, lambda pieces: [*pieces()])
        assert len(set(shop.nonces)) == number
