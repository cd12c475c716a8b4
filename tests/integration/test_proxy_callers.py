"""Callers of the proxy that go away before they have their answer: killed, timed out, or with bytes sent ahead."""

import socket
import threading
import time

import httpx
import pytest

from tests.support import proxy
from tests.support.proxy import asked, connected
from tests.support.slow_server import once_paid, paid_head

pytestmark = pytest.mark.chain
proxied, shop = proxy.proxied, proxy.shop


def asks(proxied, url):
    connection = connected(proxied)
    connection.sendall(f"GET /{url} HTTP/1.1\r\nhost: 127.0.0.1\r\nx402guard-session: {proxied.token}\r\n\r\n".encode())
    return connection


def waits(proxied, shop):
    """Return a caller whose payment the shop has, and what lets the shop answer."""
    paid, go_on = threading.Event(), threading.Event()

    def slow(line):
        if not paid.is_set():
            paid.set()
            assert go_on.wait(20)
        line.send(paid_head(b"content-length: 4\r\n\r\nsold"))

    shop.answers["/buy"] = once_paid(slow)
    caller = asks(proxied, f"{shop.url}/buy")
    assert paid.wait(20)
    return caller, go_on


def bought_again_by(proxied, shop):
    """Ask for it until its answer comes, and return how many payments the shop has seen."""
    give_up = time.monotonic() + 20
    while asked(proxied, f"{shop.url}/buy").status_code != 200:
        assert time.monotonic() < give_up
    return len(set(shop.nonces))


@pytest.mark.parametrize("size", [20_000, 1_000_000, 20_000_000])
def test_one_that_is_killed_before_it_has_read_its_answer_is_given_it_again(shop, proxied, size):
    sent = threading.Event()

    def large(line):
        line.send(paid_head(f"content-length: {size}\r\n\r\n".encode()))
        line.send(b"x" * size)
        sent.set()

    shop.answers["/buy"] = once_paid(large)
    caller = asks(proxied, f"{shop.url}/buy")
    assert caller.recv(1_024)
    if size < 10_000_000:  # more than that is in no buffer on the way
        assert sent.wait(20)
    assert caller.recv(1, socket.MSG_PEEK)
    caller.close()  # with what is unread: the connection is reset
    time.sleep(0.2)
    assert bought_again_by(proxied, shop) == 1


@pytest.mark.parametrize(
    "ahead", [b"", b"\r\n", b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"], ids=["no", "a line", "all"]
)
def test_one_that_has_sent_bytes_ahead_is_felt_when_it_goes_away(shop, proxied, ahead):
    caller, go_on = waits(proxied, shop)
    caller.sendall(ahead)
    time.sleep(0.1)
    caller.close()
    time.sleep(0.3)
    go_on.set()
    assert bought_again_by(proxied, shop) == 1


@pytest.mark.parametrize("size", [70_000, 300_000])
def test_a_large_request_that_follows_on_the_same_connection_is_answered(shop, proxied, size):
    """A client that knows the length of an answer sends its next request before the proxy has written the end of this one."""
    body = b"x" * 100_000
    shop.answers["/buy"] = once_paid(lambda line: line.send(paid_head(b"content-length: 100000\r\n\r\n") + body))
    with httpx.Client(headers=proxied.header, timeout=30) as http:
        for number in range(4):
            assert http.get(f"{proxied.url}{shop.url}/buy").content == body
            assert http.post(f"{proxied.url}{shop.url}/free/{number}", content=b"y" * size).status_code == 200


def test_one_that_sends_a_flood_ahead_waits(shop, proxied):
    caller, go_on = waits(proxied, shop)
    caller.settimeout(0.5)
    with pytest.raises(TimeoutError):
        for _ in range(1_000):
            caller.sendall(b"GET / HTTP/1.1\r\n" * 4_096)
    go_on.set()
    caller.close()
