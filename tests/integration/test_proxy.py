"""The proxy over real HTTP: what a caller in any language gets, and what is in the ledger afterwards."""

import gzip
import json
import os
import re
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.support import proxy
from tests.support.proxy import KEY, Proxied, asked, books, connected, curl, go, needs_go, needs_node, node
from tests.support.slow_server import CHUNKED, HEAD, once_paid, paid_head
from x402guard import PaidNotDelivered, SettlementUncertain
from x402guard.http.refusal_from import refusal_from
from x402guard.web.upstream import PROVIDERS

pytestmark = pytest.mark.chain
proxied, shop = proxy.proxied, proxy.shop


def test_curl_buys_a_page_and_a_dear_one_is_refused(net, tmp_path):
    before = net.balance(net.payer)
    page = f"{net.merchant.url}{net.merchant.routes['documents'].format(n=4242)}"
    settings = {"X402GUARD_PRIVATE_KEY": net.payer_key, "X402GUARD_CHAINS": json.dumps({net.network: net.rpc})}
    with Proxied(tmp_path, "--budget", "0.15", **settings) as proxy:
        header = ("-H", f"X402guard-Session: {proxy.token}")
        status, body, headers = curl(*header, proxy.url + page)
        assert (status, bool(json.loads(body))) == (200, True)
        receipt = json.loads(headers["x402guard-receipt"])
        assert (receipt["amount"], receipt["state"], receipt["presented"]) == ("0.10", "captured", 0)
        assert "payment-response" in headers
        status, body, headers = curl(*header, proxy.url + page + "-second")
        assert (status, headers["content-type"]) == (402, "application/problem+json")
        problem = json.loads(body)
        assert (problem["code"], problem["requested"], problem["available"]) == ("budget_exhausted", "0.10", "0.05")
        assert problem["money_may_have_moved"] is False
    assert before - net.balance(net.payer) == 100_000
    assert books(tmp_path) == {"proxy": ("0.10", "0.00")}


@needs_go
def test_gos_default_client_buys_reads_a_stream_and_is_refused(shop, tmp_path):
    def two_lines(line):
        line.send(paid_head(CHUNKED))
        for piece in (b"first\n", b"second\n"):
            line.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        line.send(b"0\r\n\r\n")

    shop.answers["/maps"] = once_paid(two_lines)
    with Proxied(tmp_path, "--budget", "0.02", X402GUARD_PRIVATE_KEY=KEY) as proxy:
        first, second, third = go("buy.go", tmp_path, proxy.url, proxy.token, f"{shop.url}/maps")
    for bought in (first, second):
        assert (bought["status"], bought["lines"]) == (200, ["first", "second"])
        assert json.loads(bought["receipt"])["amount"] == "0.01"
    assert (third["status"], third["type"], third["receipt"]) == (402, "application/problem+json", "")
    assert json.loads("".join(third["lines"]))["code"] == "budget_exhausted"
    assert books(tmp_path) == {"proxy": ("0.02", "0.00")}


def test_many_callers_never_spend_the_same_dollar(shop, proxied, tmp_path):
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda n: asked(proxied, f"{shop.url}/page/{n}"), range(20)))
    assert sorted(answer.status_code for answer in answers) == [200] * 10 + [402] * 10
    assert len(set(shop.nonces)) == len(shop.nonces) == 10
    assert {answer.text for answer in answers if answer.status_code == 200} == {"sold"}


def test_each_token_has_a_budget_of_its_own(shop, tmp_path):
    options = ("--session", "poor=0.01", "--session", "a rich=one=0.10")
    with Proxied(tmp_path, *options, X402GUARD_PRIVATE_KEY=KEY) as proxy:
        found = {
            name: [
                httpx.get(f"{proxy.url}{shop.url}/{n}/{name}", headers={"authorization": f"Bearer {token}"}).status_code
                for n in range(2)
            ]
            for name, token in proxy.tokens.items()
        }
    assert found == {"poor": [200, 402], "a rich=one": [200, 200]}
    assert {name: spent for name, (spent, _) in books(tmp_path).items()} == {"poor": "0.01", "a rich=one": "0.02"}


def test_a_lost_answer_presents_the_same_payment_again(shop, proxied):
    shop.answers["/lost"] = once_paid(lambda _: False)  # the connection closes
    first, second = (asked(proxied, f"{shop.url}/lost") for _ in range(2))
    for answer in (first, second):
        problem = answer.json()
        assert (answer.status_code, problem["code"], problem["retry"]) == (502, "settlement_uncertain", "same_request")
        assert problem["money_may_have_moved"] is True
        assert answer.headers["x-should-retry"] == "false"
    assert len(shop.nonces) == 2
    assert len(set(shop.nonces)) == 1
    del shop.answers["/lost"]
    third = asked(proxied, f"{shop.url}/lost")
    assert (third.status_code, third.text) == (200, "sold")
    assert json.loads(third.headers["x402guard-receipt"])["presented"] == 2


def test_a_doubt_that_came_through_the_proxy_is_no_refusal():
    told = {"type": "urn:x402guard:x", "detail": "lost", "money_may_have_moved": True, "hold_id": "0xab", "deadline": 7}
    found = refusal_from(_FailedError(told | {"code": "settlement_uncertain"}))
    assert (type(found), found.hold_id, found.deadline) == (SettlementUncertain, "0xab", 7)
    assert type(refusal_from(_FailedError(told | {"code": "paid_not_delivered"}))) is PaidNotDelivered


class _FailedError(Exception):
    def __init__(self, body):
        super().__init__("failed")
        self.body = body


def test_what_a_caller_wishes_is_kept(shop, proxied):
    dear = asked(proxied, f"{shop.url}/a", headers={"X402guard-Max-Price": "$0.005"})
    assert (dear.status_code, dear.json()["rule"]) == (402, "price_above_quote")
    named = [asked(proxied, f"{shop.url}/b", headers={"Idempotency-Key": "order 7"}) for _ in range(2)]
    assert [(each.status_code, each.text if each.status_code == 200 else each.json()["code"]) for each in named] == [
        (200, "sold"), (402, "already_paid"),
    ]  # fmt: skip
    shop.answers["/c"] = once_paid(lambda _: False)
    assert asked(proxied, f"{shop.url}/c").status_code == 502
    asked(proxied, f"{shop.url}/c", headers={"X402guard-Pay-Again": "true"})
    assert len(set(shop.nonces)) == 3


# -- what is passed on ---------------------------------------------------------------------------------------------------------


def test_what_is_sent_and_what_comes_back_is_untouched(shop, proxied):
    packed = gzip.compress(b"a long text " * 50)
    shop.answers["/raw?q=%2F&q=a%20b"] = lambda line: line.send(
        HEAD
        + f"content-encoding: gzip\r\nx-many: 1\r\nx-many: 2\r\nset-cookie: a=b\r\nconnection: x-hop\r\nx-hop: 1\r\n"
        f"content-length: {len(packed)}\r\n\r\n".encode()
        + packed
    )
    sent = {"authorization": "Bearer of the seller", "x-own": "yes", "connection": "x-mine", "x-mine": "1"}
    with httpx.stream(
        "POST", f"{proxied.url}{shop.url}/raw?q=%2F&q=a%20b", headers={**proxied.header, **sent}, content=b"\x00body"
    ) as answer:
        raw = b"".join(answer.iter_raw())
    assert raw == packed
    assert answer.headers.get_list("x-many") == ["1", "2"]
    assert answer.headers["content-encoding"] == "gzip"
    assert not {"set-cookie", "x-hop", "server", "date"} & answer.headers.keys()
    [request] = shop.asked
    assert request.body == b"\x00body"
    assert (request.header("authorization"), request.header("x-own")) == ("Bearer of the seller", "yes")
    assert request.header("host") == shop.host
    assert not {"x402guard-session", "x-mine", "via", "x-forwarded-for"} & request.headers.keys()
    assert proxied.token not in json.dumps(request.headers)


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "x-goog-api-key", "api-key"])
def test_a_token_as_the_key_of_an_api_goes_no_further(shop, proxied, name):
    shop.answers["/"] = lambda line: line.send(HEAD + b"content-length: 0\r\n\r\n")
    value = f"Bearer {proxied.token}" if name == "authorization" else proxied.token
    assert httpx.get(f"{proxied.url}{shop.url}/", headers={name: value}).status_code == 200
    assert name not in shop.asked[0].headers


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("/next?a=1", "/{shop}/next?a=1"),
        ("there", "/{shop}/there"),
        ("https://other.example/x", "/_hop/{hop}/https://other.example/x"),
    ],
)
def test_a_redirect_leads_through_the_proxy(shop, proxied, location, expected):
    shop.answers["/old"] = lambda line: line.send(
        f"HTTP/1.1 302 Found\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()
    )
    answer = asked(proxied, f"{shop.url}/old")
    expected = re.escape(expected.replace("{shop}", shop.url)).replace(re.escape("{hop}"), "[0-9a-f]{16}")
    assert answer.status_code == 302
    assert re.fullmatch(expected, answer.headers["location"])


def test_a_stream_comes_piece_by_piece_and_byte_for_byte(shop, proxied):
    go_on, pieces = threading.Event(), [b"data: \xf0\x9f", b"\x8c\x8d\n\n", b"data: [DONE]\n\n"]

    def trickle(line):
        line.send(HEAD + CHUNKED)
        for piece in pieces:
            line.send(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            assert go_on.wait(20)
            go_on.clear()
        line.send(b"0\r\n\r\n")

    shop.answers["/stream"] = trickle
    with httpx.stream("GET", f"{proxied.url}{shop.url}/stream", headers=proxied.header, timeout=20) as answer:
        read = answer.iter_raw()
        for piece in pieces:
            assert next(read) == piece  # before the next one was sent
            go_on.set()
        assert list(read) == []


@pytest.mark.parametrize("when", ["before the head", "in the body"])
def test_a_caller_that_goes_away_is_felt_by_the_seller(shop, proxied, when):
    gone = threading.Event()

    def hang(line):
        if when == "in the body":
            line.send(HEAD + CHUNKED + b"1\r\nx\r\n")
        line.connection.settimeout(20)
        if line.connection.recv(1) == b"":
            gone.set()
        return False

    shop.answers["/hang"] = hang
    with closing(connected(proxied)) as connection:
        connection.sendall(
            f"GET /{shop.url}/hang HTTP/1.1\r\nhost: 127.0.0.1\r\nx402guard-session: {proxied.token}\r\n\r\n".encode()
        )
        while not shop.asked:
            time.sleep(0.01)
        if when == "in the body":
            assert b"200 OK" in connection.recv(4096)
        assert not gone.is_set()
    assert gone.wait(20)


def test_a_body_that_breaks_is_not_taken_for_a_whole_one(shop, proxied):
    shop.answers["/cut"] = once_paid(lambda line: line.send(paid_head(CHUNKED) + b"4\r\nhalf\r\n") or False)
    with pytest.raises(httpx.RemoteProtocolError):
        asked(proxied, f"{shop.url}/cut")
    del shop.answers["/cut"]
    again = asked(proxied, f"{shop.url}/cut")
    assert (again.status_code, again.text) == (200, "sold")
    assert len(shop.nonces) == 2
    assert len(set(shop.nonces)) == 1


@needs_node
def test_fetch_under_node_buys_and_reads_the_refusal(shop, proxied):
    shop.answers["/page"] = once_paid(lambda line: line.send(paid_head(b"content-length: 2\r\n\r\n42")))
    bought, refused = node("fetch.mjs", proxied.url, proxied.token, f"{shop.url}/page", "openai-but-wrong/x")
    assert (bought["status"], bought["body"], bought["receipt"]["amount"]) == (200, 42, "0.01")
    assert (refused["status"], refused["receipt"]) == (404, None)


PAGE = (Path(__file__).parents[2] / "docs/how-to/any-language.md").read_text()


def test_the_blocks_of_the_page_do_what_they_say(shop, proxied):
    """As they stand there, but for the address of the proxy and of the seller."""
    _, curled, _, _ = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    [fetched] = re.findall(r"```js\n(.*?)```", PAGE, re.DOTALL)
    runs = [(["sh"], curled, "sold")]
    runs += [(["node", "--input-type=module"], fetched, "200 sold")] if shutil.which("node") else []
    for command, written, printed in runs:
        source = written.replace("http://127.0.0.1:8403/", proxied.url).replace("https://seller.example", shop.url)
        done = subprocess.run(
            command, input=source, capture_output=True, text=True, check=False, timeout=60,
            env={"PATH": os.environ["PATH"], "TOKEN": proxied.token},
        )  # fmt: skip
        assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr
    assert len(set(shop.nonces)) == len(runs)


def test_the_pages_table_has_each_provider():
    rows = re.findall(r"\| `/([\w-]+)` \| `(\S+)` \| `(\w+)` \|", PAGE)
    assert rows == [(name, each.base, each.key) for name, each in PROVIDERS.items()]
