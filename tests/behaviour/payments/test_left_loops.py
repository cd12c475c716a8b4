"""A loop over a streamed answer that is left early: its answer is lost, unless its reader has closed it before."""

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


READERS = {
    "lines": lambda response: response.iter_lines(),
    "text": lambda response: response.iter_text(),
    "raw": lambda response: response.iter_raw(),
    "a generator": lines,
    "a generator with a loop": parsed,
    "a generator in a generator": lambda response: (piece for piece in parsed(response)),
    "a generator that closes": closing,
}


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


def by_pop_while_it_goes_up(pieces):
    """The statement that drops the generator is no part of the loop."""
    opened = {"it": pieces()}

    def reads():
        for _ in opened["it"]:
            raise ValueError

    try:
        reads()
    finally:
        opened.pop("it")


def by_a_result_that_is_dropped(pieces):
    def tries():
        try:
            by_raise(pieces)
        except CallersError as error:
            return error
        return None

    tries()
    raise CallersError


def by_a_with_that_swallows(pieces):
    with suppress(CallersError):
        by_raise(pieces)
    raise CallersError


FORCED = (
    by_raise, by_a_call, by_a_key, by_raise_in_with, by_raise_again, by_raise_through_finally, by_interrupt,
    by_pop_while_it_goes_up, by_a_result_that_is_dropped, by_a_with_that_swallows,
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
        yield from parsed(response)


def read_inside(library, session, url, leaves):
    with library.Client(transport=LIBRARIES[library].GuardedTransport(session), trust_env=False) as http:
        leaves(lambda: events(http, url))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("reader", "leaves"), list(itertools.product(READERS, FORCED)))
def test_what_is_left_by_an_error_is_lost(library, reader, leaves, shop, session):
    for _ in range(3):
        with pytest.raises((*MINE, X402GuardError)):
            read(library, session, f"{shop.url}/page", READERS[reader], leaves)
    assert len(set(shop.nonces)) == 1
    assert str(session.spent + session.held) == "0.01"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("leaves", FORCED)
def test_a_stream_that_a_generator_opens_and_an_error_leaves_is_lost(library, leaves, shop, session):
    for _ in range(3):
        with pytest.raises((*MINE, X402GuardError)):
            read_inside(library, session, f"{shop.url}/page", leaves)
    assert len(set(shop.nonces)) == 1


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_that_has_enough_closes_the_answer(library, reader, shop, session):
    """A ``break`` through a generator looks as an error does to all code below, so the reader says it."""
    for number in range(1, 4):
        with library.Client(transport=LIBRARIES[library].GuardedTransport(session), trust_env=False) as http:
            with http.stream("GET", f"{shop.url}/page") as response:
                for _ in READERS[reader](response):
                    response.close()
                    break
        assert len(set(shop.nonces)) == number


def test_a_break_in_a_loop_of_httpx2_is_lost_and_is_not_paid_again(shop, session):
    url, ours = f"{shop.url}/page", x402guard.httpx2.GuardedTransport
    for _ in range(3):
        with suppress(X402GuardError), httpx2.Client(transport=ours(session), trust_env=False) as http:
            with http.stream("GET", url) as response:
                for _ in response.iter_lines():
                    break
    assert len(set(shop.nonces)) == 1
