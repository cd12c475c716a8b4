"""A78: a caller of the proxy, or a model, reads what only this machine can reach."""

import json
import socket

import httpx
import pytest

from tests.integration.test_proxy_refusals import OWNED
from tests.support import proxy as support
from tests.support.merchant import KEY
from tests.support.proxy import Proxied, asked
from tests.support.slow_server import HEAD
from x402guard import Owner

pytestmark = pytest.mark.chain
shop = support.shop

INSIDE = [
    "https://127.0.0.1/", "https://localhost/", "https://[::1]/", "https://169.254.169.254/latest/meta-data/",
    "https://10.0.0.1/", "https://[::ffff:10.0.0.1]/", "https://2130706433/", "https://0x7f.1/", "http://example.com/",
    "https://localhost.:8080/", "https://[fe80::1]/", "https://127.0.0.1:{port}/free",
]  # fmt: skip


def none_of(url, **more):
    """A proxy with the settings of a user who has listed nothing."""
    return Proxied(url, "--budget", "1.00", X402GUARD_PRIVATE_KEY=KEY, X402GUARD_POLICY__HOSTS="", **more)


def test_a78_without_a_list_only_the_internet_is_reached_and_by_https(tmp_path, shop):
    port = httpx.URL(shop.url).port
    with none_of(tmp_path) as proxy:
        for url in (*INSIDE, f"{shop.url}/free"):
            answer = asked(proxy, url.format(port=port))
            told = answer.json()
            assert answer.headers["x402guard-answered"] == "true", url
            assert (answer.status_code, told.get("rule")) == (402, "hosts") or answer.status_code == 502, (url, told)
    assert shop.asked == []
    with Owner(tmp_path / "x402guard.db", read_only=True) as owner:
        [row] = owner.report("proxy").to_dict()["refusals"]
        assert (row["rule"], row["count"] >= len(INSIDE) - 2) == ("hosts", True)


def test_a78_the_owners_list_holds_for_every_request_and_not_for_payments_alone(tmp_path, shop):
    shop.answers["/free"] = lambda line: line.send(HEAD + b"content-length: 2\r\n\r\nok")
    hosts = json.dumps([shop.host])
    with Proxied(tmp_path, "--budget", "1.00", X402GUARD_PRIVATE_KEY=KEY, X402GUARD_POLICY__HOSTS=hosts) as proxy:
        assert asked(proxy, f"{shop.url}/free").text == "ok"
        for url in ("https://example.com/", f"http://127.0.0.1:{httpx.URL(shop.url).port + 1}/"):
            answer = asked(proxy, url)
            assert (answer.status_code, answer.json()["rule"]) == (402, "hosts")
            assert "is not in policy.hosts" in answer.json()["detail"]


def test_a78_an_endpoint_of_the_settings_is_the_owners_word_too(tmp_path, shop):
    shop.answers["/v1/models"] = lambda line: line.send(HEAD + b"content-length: 2\r\n\r\nok")
    endpoints = json.dumps({"endpoints": {f"{shop.url}/v1": OWNED}})
    with none_of(tmp_path, X402GUARD_METERING=endpoints, OPENAI_API_KEY="sk-owner") as proxy:
        assert asked(proxy, "openai/models").text == "ok"
        assert asked(proxy, f"{shop.url}/v1/models").text == "ok"


def test_a78_a_redirect_leads_to_no_host_inside(tmp_path, shop):
    shop.answers["/away"] = lambda line: line.send(
        b"HTTP/1.1 302 Found\r\nlocation: https://169.254.169.254/latest/\r\ncontent-length: 0\r\n\r\n"
    )
    with Proxied(
        tmp_path, "--budget", "1.00", X402GUARD_PRIVATE_KEY=KEY, X402GUARD_POLICY__HOSTS=json.dumps([shop.host])
    ) as proxy:
        answer = asked(proxy, f"{shop.url}/away", follow_redirects=True)
        assert (answer.status_code, answer.json()["rule"]) == (402, "hosts")


def test_a78_the_places_of_one_token_are_not_those_of_another(tmp_path, shop, monkeypatch):
    """Four hundred and fifty slow requests are the share of each of two; the next one of the same token is told so."""
    shop.answers["/slow"] = lambda line: line.server.done.wait(60)
    shop.answers["/free"] = lambda line: line.send(HEAD + b"content-length: 2\r\n\r\nok")
    with Proxied(tmp_path, "--session", "a=1.00", "--session", "b=1.00") as proxy:
        where, open_now = httpx.URL(proxy.url), []
        try:
            for _ in range(300):  # silent ones, which say nothing
                open_now.append(socket.create_connection((where.host, where.port), timeout=10))
            for number in range(460):
                line = socket.create_connection((where.host, where.port), timeout=10)
                head = f"GET /{shop.url}/slow HTTP/1.1\r\nHost: {where.host}:{where.port}\r\n"
                line.sendall(f"{head}X402guard-Session: {proxy.tokens['a']}\r\n\r\n".encode())
                open_now.append(line)
                if number % 50 == 49:
                    told = httpx.get(f"{proxy.url}{shop.url}/free", headers={"X402guard-Session": proxy.tokens["b"]})
                    assert told.text == "ok", number
            told = httpx.get(f"{proxy.url}{shop.url}/free", headers={"X402guard-Session": proxy.tokens["a"]})
            assert (told.status_code, "450 requests with this token are under way" in told.text) == (503, True)
        finally:
            for line in open_now:
                line.close()
