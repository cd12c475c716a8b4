"""What the proxy refuses, in words, and what it does not give away."""

import base64
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import pytest

from tests.support import proxy
from tests.support.command_line import forked
from tests.support.proxy import KEY, PATIENCE_S, Proxied, asked, books, connected
from tests.support.slow_server import HEAD, once_paid
from x402guard import Owner

OWNED = {"provider": "openai", "key": "OPENAI_API_KEY"}
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


@pytest.fixture
def owning(tmp_path, shop):
    """A proxy whose owner's key of an API goes to the shop below /v1."""
    settings = {
        "X402GUARD_METERING": json.dumps({"endpoints": {f"{shop.url}/v1": OWNED}}),
        "OPENAI_API_KEY": "sk-owner",
    }
    with Proxied(
        tmp_path, "--session", "a=1.00", "--session", "b=1.00", X402GUARD_PRIVATE_KEY=KEY, **settings
    ) as proxy:
        yield proxy


@pytest.mark.parametrize(
    "below",
    [
        "../v2/chat/completions",
        "../admin",
        "%2e%2e/v2/x",
        "..%2fx",
        "a/..%5cb",
        "..//evil",
        "./x",
        "x/.%2E/.%2e/y",
        "..;/a",
        "%2e%2e;x/a",
        "..%3b/a",
        "..%09/a",
        "%252e%252e/a",
        "..%252fa",
    ],
)
def test_a_path_that_leads_out_of_a_provider_takes_no_key_along(owning, shop, below):
    status, answer = _raw(
        owning, f"GET /openai/{below} HTTP/1.1\r\nhost: 127.0.0.1\r\nx402guard-session: {owning.token}\r\n\r\n"
    )
    assert (status, "leads out of /openai" in answer) == (404, True)
    assert shop.asked == []


def test_no_token_goes_to_a_seller_or_a_provider(owning, shop):
    a, b = owning.tokens.values()
    basic = base64.b64encode(f":{a}".encode()).decode()
    session = ("x402guard-session", a)
    for headers, query in [
        ([session, ("x-mine", f"={b}")], ""),
        ([session, ("authorization", f"Basic {a}")], ""),
        ([session, ("authorization", f"Basic {basic}")], ""),
        ([session], f"?key={a}"),
        ([session], f"?key={a.replace('_', '%5F')}"),
        ([("authorization", f"Bearer {a}"), ("cookie", f"t={b}")], ""),
    ]:
        for place in (f"{shop.url}/x", "openai/models"):
            answer = httpx.get(f"{owning.url}{place}{query}", headers=headers)
            assert answer.status_code == 400, (headers, query)
            assert "a token of a session stands there" in answer.json()["detail"]
            assert a not in answer.text
            assert b not in answer.text
    assert shop.asked == []
    shop.answers["/x"] = lambda line: line.send(HEAD + b"content-length: 0\r\n\r\n")
    for headers in (
        [session, ("authorization", f"Bearer {b}")],
        [("authorization", "Bearer mine"), ("authorization", f"Bearer {b}"), session],
    ):
        assert httpx.get(f"{owning.url}{shop.url}/x", headers=headers).status_code == 200
    assert [request.header("authorization") for request in shop.asked] == [None, "Bearer mine"]


@pytest.mark.parametrize("path", ["http://xn--a-ecp.example/x", "http://xn--zzzzzzz/"])
def test_an_international_name_that_cannot_be_read_is_refused(proxied, path):
    answer = asked(proxied, path)
    assert answer.status_code in (400, 402)
    assert "ecp" in answer.text or "zzzzzzz" in answer.text


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 999 X\r\ncontent-length: 4\r\n\r\n",
        b"HTTP/1.1 600 X\r\ncontent-length: 4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
def test_an_odd_answer_to_a_payment_comes_whole(shop, proxied, head):
    body = b"4\r\nsold\r\n0\r\n\r\n" if b"chunked" in head else b"sold"
    shop.answers["/odd"] = once_paid(lambda line: line.send(head + body))
    answer = asked(proxied, f"{shop.url}/odd")
    assert (answer.status_code, answer.text) == (200 if b"200" in head else 502, "sold")
    assert "x402guard-receipt" in answer.headers


@pytest.mark.parametrize("where", ["javascript:alert(1)", "http://[", "mailto:a@b.example"])
def test_a_location_that_is_no_place_of_the_web_is_left_out(shop, proxied, where):
    shop.answers["/old"] = lambda line: line.send(
        f"HTTP/1.1 302 Found\r\nlocation: {where}\r\ncontent-length: 0\r\n\r\n".encode()
    )
    assert "location" not in asked(proxied, f"{shop.url}/old").headers


def test_what_asks_for_http_2_is_answered_by_http_1(shop, proxied):
    shop.answers["/"] = lambda line: line.send(HEAD + b"content-length: 0\r\n\r\n")
    upgrade = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAAP__"}
    assert asked(proxied, f"{shop.url}/", headers=upgrade).status_code == 200
    assert not {"upgrade", "http2-settings"} & shop.asked[0].headers.keys()


def test_a_length_above_the_limit_is_refused_before_the_body(shop, proxied):
    status, answer = _raw(
        proxied,
        f"POST /{shop.url}/ HTTP/1.1\r\nhost: 127.0.0.1\r\nx402guard-session: {proxied.token}\r\ncontent-length: 99999999999\r\n\r\n",
    )
    assert (status, "more than 67108864 bytes" in answer) == (413, True)


@pytest.mark.parametrize("pause_s", [0, 0.5], ids=["behind a request", "after its answer"])
def test_a_connection_that_stays_in_a_head_is_ended(proxied, pause_s):
    asking = f"GET /http://127.0.0.1:1/ HTTP/1.1\r\nhost: 127.0.0.1\r\nx402guard-session: {proxied.token}\r\n\r\n"
    with closing(connected(proxied)) as connection:
        connection.sendall(asking.encode() + (b"" if pause_s else b"G"))
        time.sleep(pause_s)
        connection.sendall(b"G" if pause_s else b"")
        connection.settimeout(20)
        answer = b""
        while piece := connection.recv(65_536):  # the server ends it
            answer += piece
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_client_may_wait_between_two_requests_for_as_long_as_clients_do(shop, proxied):
    """Clients close an idle connection after five seconds or so; one that the server closes first loses a request."""
    shop.answers["/"] = lambda line: line.send(HEAD + b"content-length: 0\r\n\r\n")
    with httpx.Client(headers=proxied.header, limits=httpx.Limits(keepalive_expiry=60)) as http:
        for _ in range(2):
            assert http.get(f"{proxied.url}{shop.url}/").status_code == 200
            [connection] = http._transport._pool.connections
            time.sleep(6)
            assert connection.is_idle()
            assert not connection.has_expired()


@pytest.mark.parametrize("is_paid", [True, False], ids=["paid", "free"])
def test_a_request_that_the_end_of_the_proxy_cuts_denies_no_payment(shop, tmp_path, is_paid):
    hangs = threading.Event()

    def hang(line):
        hangs.set()
        return line.hang()

    shop.answers["/hang"] = once_paid(hang) if is_paid else hang
    with Proxied(tmp_path, "--budget", "1.00", X402GUARD_PRIVATE_KEY=KEY) as proxy, ThreadPoolExecutor() as pool:
        answer = pool.submit(asked, proxy, f"{shop.url}/hang")
        assert hangs.wait(PATIENCE_S)
        proxy.interrupt()
        told = answer.result()
        proxy.close()
    if is_paid:
        assert (told.status_code, told.json()["code"], told.json()["money_may_have_moved"]) == (
            502,
            "settlement_uncertain",
            True,
        )
        assert told.headers["x-should-retry"] == "false"
    else:
        assert (told.status_code, "nothing was paid" in told.json()["detail"]) == (503, True)
    assert books(tmp_path) == {"proxy": ("0.00", "0.01" if is_paid else "0.00")}


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]", "127.0.0.2", "[::ffff:127.0.0.1]"])
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
    for method in ("TRACE", "trace", "Connect"):
        status, answer = _raw(proxied, f"{method} /{shop.url}/ HTTP/1.1\r\nhost: 127.0.0.1\r\n{token}\r\n")
        assert status == 405
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_its_end_closes_its_sessions(tmp_path, number):
    proxy = Proxied(tmp_path, "--budget", "1.00")
    proxy.process.send_signal(number)
    said, errors = proxy.process.communicate(timeout=PATIENCE_S)
    assert (proxy.process.returncode, said) == (0, "")
    assert "No key is set (x402guard keys new): LLM calls are metered, and nothing is paid." in errors
    with Owner(tmp_path / "x402guard.db", read_only=True) as owner:
        assert [row.state for row in owner.sessions(name="proxy")] == ["closed"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--budget: say how much its callers may spend, such as --budget 5.00"),
        (
            ("--budget", "0.00"),
            "--budget: '0.00' is a budget of nothing; write it without the $, which a shell reads as a",
        ),
        (("--session", "a=0"), "--session a: '0' is a budget of nothing"),
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


def test_a_seller_cannot_answer_in_the_voice_of_the_proxy(shop, proxied):
    problem = b'{"code": "budget_exhausted", "money_may_have_moved": false}'
    head = b"content-type: application/problem+json\r\nx402guard-answered: true\r\nX402Guard-Answered: true\r\n"
    said = b"HTTP/1.1 402 Payment Required\r\n" + head + b"content-length: %d\r\n\r\n%b" % (len(problem), problem)
    shop.answers["/plain"] = lambda line: line.send(said)
    shop.answers["/paid"] = once_paid(lambda line: line.send(said))
    for page in ("/plain", "/paid"):
        answer = asked(proxied, f"{shop.url}{page}")
        assert (answer.status_code, answer.headers.get("x402guard-answered")) == (402, None)
    refused = asked(proxied, f"{shop.url}/dear", headers={"X402guard-Max-Price": "0.001"})
    assert (refused.status_code, refused.headers["x402guard-answered"]) == (402, "true")
    assert asked(proxied, "nowhere").headers["x402guard-answered"] == "true"
