"""What the proxy refuses, in words, and what it does not give away."""

import json
import signal
import socket
from contextlib import closing

import httpx
import pytest

from tests.support import proxy
from tests.support.command_line import forked
from tests.support.proxy import KEY, Proxied, asked, connected
from x402guard import Owner

pytestmark = pytest.mark.chain
proxied, shop = proxy.proxied, proxy.shop


def _raw(proxy, text):
    with closing(connected(proxy)) as connection:
        connection.sendall(text.encode())
        answer = b""
        while b"}" not in answer and (piece := connection.recv(65_536)):
            answer += piece
    return int(answer.split()[1]), answer.decode()


def test_without_the_token_of_a_session_here_nothing_is_sent(shop, proxied, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    with Proxied(other, "--budget", "1.00", X402GUARD_PRIVATE_KEY=KEY) as elsewhere:
        for headers, words in [
            ({}, "no token of a session here: send it in the header x402guard-session, or as the key of the API"),
            ({"authorization": "Bearer x402_guess"}, "no token of a session here: "),
            ({"x402guard-session": ""}, "x402guard-session: it is the token of no session here"),
            (elsewhere.header, "x402guard-session: it is the token of no session here"),
            ({"authorization": f"Basic {proxied.token}"}, "no token of a session here: "),
        ]:
            answer = httpx.get(f"{proxied.url}{shop.url}/", headers=headers)
            assert (answer.status_code, answer.json()["detail"][: len(words)]) == (401, words)
    assert shop.asked == []


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("", 404, "the path names no URL; write /https://host/path"),
        ("https:", 404, "'https:' is neither a URL nor a provider"),
        ("https://", 404, "the path names no URL"),
        ("opnai/v1/chat", 404, "'opnai' is neither a URL nor a provider; write /https://host/path, or one of /openai, /anthropic"),
        ("ftp://seller.example/x", 404, "'ftp:' is neither a URL nor a provider"),
        ("https://[::1/x", 400, "'https://[::1/x' is no URL: "),
        ("http://:80/x", 400, "'http://:80/x' is no URL: it names no host"),
    ],
)  # fmt: skip
def test_a_path_that_leads_nowhere_is_refused_in_words(proxied, path, status, words):
    answer = asked(proxied, path)
    assert answer.status_code == status, answer.text
    assert answer.json()["detail"].startswith(words)
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]", "127.0.0.2"])
def test_a_request_that_leads_back_is_refused(proxied, name):
    port = httpx.URL(proxied.url).port
    answer = asked(proxied, f"http://{name}:{port}/https://seller.example/")
    assert (answer.status_code, answer.json()["detail"]) == (
        508, "the request leads back to this proxy, and would go round for ever",
    )  # fmt: skip


def test_what_is_no_request_of_ours_is_refused_in_words(shop, proxied):
    token = f"x402guard-session: {proxied.token}\r\n"
    status, answer = _raw(proxied, f"CONNECT seller.example:443 HTTP/1.1\r\nhost: 127.0.0.1\r\n{token}\r\n")
    assert (status, "opens no TLS connection" in answer) == (405, True)
    status, answer = _raw(proxied, f"GET {shop.url}/ HTTP/1.1\r\nhost: 127.0.0.1\r\n{token}\r\n")
    assert (status, "this is no forward proxy" in answer) == (405, True)
    upgrade = "connection: upgrade\r\nupgrade: websocket\r\n"
    status, answer = _raw(proxied, f"GET /{shop.url}/ HTTP/1.1\r\nhost: 127.0.0.1\r\n{upgrade}{token}\r\n")
    assert (status, "no WebSocket" in answer) == (501, True)
    status, answer = _raw(proxied, f"GET /{shop.url}/ HTTP/1.1\r\nhost: evil.example\r\n{token}\r\n")
    assert (status, "for another address" in answer) == (403, True)
    assert shop.asked == []


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"X402guard-Max-Price": "cheap"}, "x402guard-max-price: 'cheap' is not a dollar amount"),
        ({"X402guard-Pay-Again": "yes"}, "x402guard-pay-again: 'yes' is not true; leave the header out otherwise"),
    ],
)
def test_a_wish_that_cannot_be_read_is_refused(shop, proxied, headers, words):
    answer = asked(proxied, f"{shop.url}/", headers=headers)
    assert (answer.status_code, answer.json()["detail"][: len(words)]) == (400, words)
    assert shop.asked == []


def test_a_body_above_the_limit_is_refused(shop, proxied):
    answer = asked(proxied, f"{shop.url}/", method="POST", content=bytes(67_108_865))
    assert (answer.status_code, answer.json()["detail"]) == (413, "the body has more than 67108864 bytes")
    assert shop.asked == []


def test_a_seller_that_is_not_there_is_told(proxied):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    answer = asked(proxied, f"http://127.0.0.1:{port}/")
    assert (answer.status_code, answer.json()["detail"]) == (502, "127.0.0.1: no answer came (ConnectError)")


def test_a_tripped_session_says_so(shop, proxied, tmp_path):
    forked("trip", "proxy", "--reason", "enough", cwd=tmp_path)
    answer = asked(proxied, f"{shop.url}/page")
    assert (answer.status_code, answer.json()["code"]) == (402, "session_tripped")
    assert shop.nonces == []


def test_no_key_and_no_token_is_printed_or_kept(shop, tmp_path):
    with Proxied(tmp_path, "--budget", "1.00", X402GUARD_PRIVATE_KEY=KEY, OPENAI_API_KEY="sk-owner") as proxy:
        assert asked(proxy, f"{shop.url}/page").status_code == 200
        asked(proxy, "openai/nothing")
        proxy.close()
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    for secret in (KEY[2:], proxy.token, "sk-owner", "PAYMENT-SIGNATURE"):
        assert secret not in proxy.printed
        assert secret.encode() not in kept


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_its_end_closes_its_sessions(tmp_path, number):
    proxy = Proxied(tmp_path, "--budget", "1.00")
    proxy.process.send_signal(number)
    said, errors = proxy.process.communicate(timeout=30)
    assert (proxy.process.returncode, said) == (0, "")
    assert "No key is set (x402guard keys new): LLM calls are metered, and nothing is paid." in errors
    with Owner(tmp_path / "x402guard.db", read_only=True) as owner:
        assert [row.state for row in owner.sessions(name="proxy")] == ["closed"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--budget: say how much its callers may spend, such as --budget 5.00"),
        (("--budget", "much"), "--budget: 'much' is not a dollar amount"),
        (("--session", "research"), "--session: 'research' is not NAME=DOLLARS, such as research=5.00"),
        (("--session", "a=1", "--session", "a=2"), "--session: 'a' is given twice; each session has its own name"),
        (("--budget", "1", "--host", "nowhere.invalid"), "--host: nowhere.invalid is no address of this machine"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(tmp_path, options, words):
    done = forked("proxy", "--port", "0", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_two_endpoints_of_one_name_are_refused(tmp_path):
    endpoints = {"http://127.0.0.1:1/v1": "openai", "http://127.0.0.1:2/v1": "openai"}
    settings = {"X402GUARD_METERING": json.dumps({"endpoints": endpoints})}
    done = forked("proxy", "--port", "0", "--budget", "1.00", cwd=tmp_path, **settings)
    assert done.returncode == 2
    assert "are both 'openai', so /openai is neither" in " ".join(done.stderr.split())
