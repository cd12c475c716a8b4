"""What is the delivery of a purchase whose answer is a redirect through the proxy, and what pays in its place."""

import json
import time
from contextlib import closing

import httpx
import pytest

from tests.support import proxy
from tests.support.proxy import KEY, Proxied, asked, books, connected
from tests.support.proxy_hops import BROKEN, broken_download, redirect
from tests.support.slow_server import HEAD, once_paid

pytestmark = pytest.mark.chain
proxied, shop = proxy.proxied, proxy.shop


@pytest.mark.parametrize("ends", ["503", "gone"])
def test_a_hop_whose_body_is_on_its_way_while_the_one_before_ends_pays_nothing(shop, proxied, tmp_path, ends):
    """A client that gives up at a hop and asks again sends the head of the second request first, and its body later."""
    shop.answers["/buy"] = once_paid(
        lambda line: line.send(redirect("/result", paid=True).replace(b"302 Found", b"307 Temporary Redirect"))
    )
    shop.answers["/result"] = lambda line: line.send(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")
    hop = asked(proxied, f"{shop.url}/buy", method="POST", content=b"order").headers["location"]
    head = f"POST {hop} HTTP/1.1\r\nhost: 127.0.0.1\r\nx402guard-session: {proxied.token}\r\ncontent-length: 5\r\n\r\n"
    with closing(connected(proxied)) as second:
        second.sendall(head.encode())
        time.sleep(0.2)
        end_first_at_hop(shop, proxied, hop, head, ends)
        shop.answers["/result"] = lambda line: line.offer()
        second.sendall(b"order")
        said = b""
        while not said.endswith(b"}"):
            said += second.recv(65536) or b"}"
    assert b"paid_not_delivered" in said, said
    assert len(set(shop.nonces)) == 1
    assert books(tmp_path) == {"proxy": ("0.01", "0.00")}


def end_first_at_hop(shop, proxied, hop, head, ends):
    if ends == "503":
        assert asked(proxied, hop.removeprefix("/"), method="POST", content=b"order").status_code == 503
        return
    under_way = len(shop.asked) + 1
    shop.answers["/result"] = lambda line: line.hang()
    with closing(connected(proxied)) as first:
        first.sendall(head.encode() + b"order")
        give_up = time.monotonic() + 20
        while len(shop.asked) < under_way:
            assert time.monotonic() < give_up
            time.sleep(0.01)
    time.sleep(0.2)


def test_the_owner_who_pays_after_redirects_pays_one_hop_of_a_call(tmp_path, shop):
    """A client that takes the place for another one stays in the call that has paid."""
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/place", paid=True)))
    settings = {"X402GUARD_POLICY": json.dumps({"unsafe_pay_after_redirect": True})}
    with Proxied(tmp_path, "--budget", "1.00", X402GUARD_PRIVATE_KEY=KEY, **settings) as proxy:
        hop = asked(proxy, f"{shop.url}/buy").headers["location"].removeprefix("/")
        assert asked(proxy, f"{hop}s").json()["rule"] == "one_payment_per_request"
    assert len(set(shop.nonces)) == 1


PART = b"HTTP/1.1 206 Partial Content\r\ncontent-range: bytes 0-3/800\r\ncontent-length: 4\r\n\r\nall "


def test_a_part_that_was_not_asked_for_is_no_delivery(shop, proxied):
    hop = broken_download(shop, proxied)
    shop.answers["/files/download"] = lambda line: line.send(PART)
    assert asked(proxied, hop).status_code == 206
    assert asked(proxied, f"{shop.url}/buy").status_code == 302
    assert len(set(shop.nonces)) == 1


def test_behind_a_redirect_that_keeps_the_method_a_get_is_another_question(shop, proxied):
    keeps = redirect("/result", paid=True).replace(b"302 Found", b"307 Temporary Redirect")
    shop.answers["/buy"] = once_paid(lambda line: line.send(keeps))
    shop.answers["/result"] = lambda line: line.send(HEAD + b"content-length: 4\r\n\r\nhelp")
    for _ in range(2):
        hop = asked(proxied, f"{shop.url}/buy", method="POST").headers["location"].removeprefix("/")
        shop.answers["/result"] = lambda line: line.send(BROKEN) or False
        with pytest.raises(httpx.RemoteProtocolError):
            asked(proxied, hop, method="POST")
        shop.answers["/result"] = lambda line: line.send(HEAD + b"content-length: 4\r\n\r\nhelp")
        assert asked(proxied, hop).text == "help"
    assert len(set(shop.nonces)) == 1


def test_a_place_with_an_escaped_delimiter_is_another_one(shop, proxied):
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/dl?of=a%26sum", paid=True)))
    shop.answers["/dl?of=a%26sum"] = lambda line: line.send(BROKEN) or False
    shop.answers["/dl?of=a&sum"] = lambda line: line.send(HEAD + b"content-length: 3\r\n\r\nsum")
    hop = asked(proxied, f"{shop.url}/buy").headers["location"].removeprefix("/")
    with pytest.raises(httpx.RemoteProtocolError):
        asked(proxied, hop)
    assert asked(proxied, hop.replace("%26", "&")).text == "sum"
    assert asked(proxied, f"{shop.url}/buy").status_code == 302
    assert len(set(shop.nonces)) == 1
