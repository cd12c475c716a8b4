"""Redirects through the proxy: a client follows them as requests of its own, and they stay hops of one call."""

import json
import time

import httpx
import pytest

from tests.support import proxy
from tests.support.merchant import b64, receipt
from tests.support.proxy import KEY, Proxied, asked, books, curl
from tests.support.slow_server import CHUNKED, HEAD, Trickler, once_paid
from x402guard.web.hops import Hop, Hops

pytestmark = pytest.mark.chain
proxied, shop = proxy.proxied, proxy.shop


def redirect(where, *, paid=False):
    shown = f"PAYMENT-RESPONSE: {b64(receipt())}\r\n" if paid else ""
    return f"HTTP/1.1 302 Found\r\nlocation: {where}\r\n{shown}content-length: 0\r\n\r\n".encode()


@pytest.fixture
def following(proxied):
    """A client that follows redirects, as curl -L, fetch and Go's do."""
    with httpx.Client(follow_redirects=True, trust_env=False, headers=proxied.header, timeout=30) as http:
        yield lambda url, **more: http.get(f"{proxied.url}{url}", **more)


def test_a_paid_download_that_breaks_behind_its_redirect_is_paid_once(shop, following, tmp_path):
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/download", paid=True)))
    shop.answers["/download"] = lambda line: line.send(HEAD + CHUNKED + b"4\r\nhalf\r\n") or False
    for _ in range(2):
        with pytest.raises(httpx.RemoteProtocolError):
            following(f"{shop.url}/buy")
    shop.answers["/download"] = lambda line: line.send(HEAD + b"content-length: 4\r\n\r\nsold")
    assert following(f"{shop.url}/buy").status_code == 200
    assert (len(shop.nonces), len(set(shop.nonces))) == (3, 1)
    assert books(tmp_path) == {"proxy": ("0.01", "0.00")}


def test_a_download_that_came_whole_is_bought_anew(shop, following):
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/download", paid=True)))
    shop.answers["/download"] = lambda line: line.send(HEAD + b"content-length: 4\r\n\r\nsold")
    assert [following(f"{shop.url}/buy").text for _ in range(2)] == ["sold", "sold"]
    assert len(set(shop.nonces)) == 2


def test_one_call_pays_at_one_hop(shop, following, tmp_path):
    shop.answers["/buy"] = once_paid(lambda line: line.send(redirect("/again", paid=True)))
    refused = following(f"{shop.url}/buy")
    assert (refused.status_code, refused.json()["rule"]) == (402, "one_payment_per_request")
    assert books(tmp_path) == {"proxy": ("0.01", "0.00")}


@pytest.mark.parametrize("hops", [["{other}/1"], ["{other}/1", "/2"], ["/1", "{other}/2", "/3"]], ids=len)
def test_no_host_is_paid_that_a_redirect_has_led_to(shop, following, hops):
    with Trickler() as other:
        places = ["/start", *(hop.removeprefix("{other}") for hop in hops)]
        for place, hop in zip(places, hops, strict=False):
            answer = redirect(hop.format(other=other.url))
            shop.answers[place] = other.answers[place] = lambda line, answer=answer: line.send(answer)
        refused = following(f"{shop.url}/start")
        assert (refused.status_code, refused.json()["rule"]) == (402, "redirect")
        assert (shop.nonces, other.nonces) == ([], [])


SECRETS = {"authorization": "Bearer of-the-shop", "cookie": "sid=1", "x-api-key": "of-the-shop"}


@pytest.mark.parametrize("hops", [["{other}/end"], ["{other}/1", "/end"]], ids=["one hop", "a second one within"])
def test_what_is_meant_for_one_host_goes_to_no_other_one(shop, following, hops):
    with Trickler() as other:
        shop.answers["/start"] = lambda line: line.send(redirect(hops[0].format(other=other.url)))
        other.answers["/1"] = lambda line: line.send(redirect("/end"))
        other.answers["/end"] = lambda line: line.send(HEAD + b"content-length: 2\r\n\r\nok")
        assert following(f"{shop.url}/start", headers=SECRETS).text == "ok"
        assert {name: shop.asked[-1].header(name) for name in SECRETS} == SECRETS
        assert {other.asked[-1].header(name) for name in SECRETS} == {None}
        assert following(f"{other.url}/end", headers=SECRETS).text == "ok"
        assert {name: other.asked[-1].header(name) for name in SECRETS} == SECRETS, "one of its own is no hop"


def test_curl_that_follows_takes_no_credentials_along(shop, proxied):
    with Trickler() as other:
        shop.answers["/start"] = lambda line: line.send(redirect(f"{other.url}/end"))
        other.answers["/end"] = lambda line: line.send(HEAD + b"content-length: 2\r\n\r\nok")
        token = ("-H", f"X402guard-Session: {proxied.token}", "-H", "authorization: Bearer of-the-shop")
        curl("-L", *token, f"{proxied.url}{shop.url}/start")
        assert other.asked[-1].header("authorization") is None


def test_a_redirect_below_the_endpoint_of_its_owner_keeps_the_key(tmp_path, shop):
    settings = {
        "X402GUARD_METERING": json.dumps({"endpoints": {f"{shop.url}/v1": "openai"}}),
        "OPENAI_API_KEY": "sk-owner",
    }
    shop.answers["/v1/models/"] = lambda line: line.send(redirect("/v1/models"))
    shop.answers["/v1/models"] = lambda line: line.send(HEAD + b"content-length: 2\r\n\r\nok")
    shop.answers["/v1/out"] = lambda line: line.send(redirect("/v1/..%2fadmin"))
    with Proxied(tmp_path, "--budget", "1.00", X402GUARD_PRIVATE_KEY=KEY, **settings) as proxy:
        assert asked(proxy, "openai/models/").headers["location"] == "/openai/models"
        assert asked(proxy, "openai/models/", follow_redirects=True).text == "ok"
        assert shop.asked[-1].header("authorization") == "Bearer sk-owner"
        assert asked(proxy, "openai/out").headers["location"] == f"/{shop.url}/v1/..%2fadmin"


def test_a_hop_is_taken_once_by_its_caller_and_within_a_minute():
    now = [time.monotonic()]
    hops, hop = Hops(lambda: now[0]), Hop(None, crosses=True)
    hops.note("a", "place", hop)
    assert [hops.take(*key) for key in (("b", "place"), ("a", "other"), ("a", "place"), ("a", "place"))] == [
        None, None, hop, None,
    ]  # fmt: skip
    hops.note("a", "place", hop)
    now[0] += 61
    assert hops.take("a", "place") is None
    for number in range(2_000):
        hops.note("a", str(number), hop)
    assert [hops.take("a", str(number)) for number in (999, 1_000)] == [None, hop]
