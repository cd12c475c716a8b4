"""A65 to A69: edges where a word decided that was not the owner's."""

import os
import pty
import socketserver
import subprocess
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler

import httpx
import pytest

from tests.support.merchant import URL, Shop, client, make_guard, required
from x402guard import ConfigError, GuardedTransport, Policy, PolicyDenied, refusal_from
from x402guard.errors import ProtocolError
from x402guard.kernel.rows import NOTHING, HoldKind
from x402guard.policy.risk import Risk
from x402guard.policy.verdicts import Subject

HOSTILE = b"hello \x1b]0;OWNED\x07\x1b[2J\x1b[8m hidden \xc2\x9b31m\nsecond line\n"


class Seller(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/plain")
        self.send_header("content-length", str(len(HOSTILE)))
        self.end_headers()
        self.wfile.write(HOSTILE)

    def log_message(self, *_):
        pass


@pytest.fixture
def seller():
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Seller) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/x"
        server.shutdown()
        thread.join()


def typed_at_a_terminal(*words, cwd):
    """What a terminal shows of a command: both of its outputs."""
    ours, its = pty.openpty()
    keys = {"X402GUARD_CONFIG": "none", "X402GUARD_LEDGER": "memory://", "X402GUARD_PRIVATE_KEY": "0x" + "11" * 32}
    command = [sys.executable, "-m", "x402guard", *words]
    with subprocess.Popen(command, cwd=cwd, env=os.environ | keys, stdin=its, stdout=its, stderr=its):
        os.close(its)
        shown = b""
        with suppress(OSError):  # its end, on Linux
            while part := os.read(ours, 65_536):
                shown += part
    os.close(ours)
    return shown


def test_a65_what_a_seller_says_does_nothing_to_a_terminal_and_reaches_a_pipe_whole(tmp_path, seller):
    from tests.support.command_line import as_process

    shown = typed_at_a_terminal("pay", seller, "--budget", "0.05", cwd=tmp_path)
    assert b"hello" in shown
    assert b"second line" in shown
    for does in (b"\x1b]0;", b"\x1b[2J", b"\x07", b"\xc2\x9b"):
        assert does not in shown
    piped = as_process("pay", seller, "--budget", "0.05", cwd=tmp_path, X402GUARD_LEDGER="memory://",
                       X402GUARD_PRIVATE_KEY="0x" + "11" * 32)  # fmt: skip
    assert piped.stdout.encode() == HOSTILE


def test_a66_where_hosts_are_listed_a_sellers_word_is_no_place():
    with make_guard(policy=Policy(hosts=["courts.example"])) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(
            ConfigError, match=r"place: policy\.hosts is set, and the offer's own resource is its seller's word"
        ):
            session.pay(required())
        assert session.held == 0
        with pytest.raises(PolicyDenied, match="hosts"):
            session.pay(required(), place="https://elsewhere.example/x")
        session.pay(required(), place=URL).failed()


def test_a67_a_request_with_two_names_of_its_purchase_is_refused():
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, client(session, shop) as http:
        with pytest.raises(ConfigError, match="Idempotency-Key: the request has two"):
            http.get(URL, headers=[("Idempotency-Key", "a"), ("idempotency-key", "b")])
        with pytest.raises(ConfigError, match="Idempotency-Key: the request has two"):
            http.get(URL, headers=[("Idempotency-Key", "a"), ("Idempotency_Key", "b")], extensions={"purchase": "x"})
        assert shop.payments == []
        assert http.get(URL, headers={"Idempotency-Key": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("files_rm", "HIGH"),
        ("users_delete", "HIGH"), ("usersDelete", "HIGH"), ("purge_db", "HIGH"), ("db_purge", "HIGH"), ("wire_transfer", "HIGH"),
        ("bank_wire", "HIGH"), ("exec_shell", "HIGH"), ("shell.exec", "HIGH"), ("run_sql", "HIGH"), ("rm", "HIGH"), ("rm_file", "HIGH"),
        ("table_drop", "CRITICAL"), ("invoice_pay", "HIGH"), ("search_deleted", "LOW"), ("get_transfer", "LOW"), ("list_wire", "LOW"),
        ("read_road_sign", "MEDIUM"), ("price_swap", "MEDIUM"), ("firmware", "MEDIUM"), ("lookup", "MEDIUM"),
    ],
)  # fmt: skip
def test_a68_a_verb_behind_its_noun_is_one(name, level):
    assert Risk().level_of(Subject(HoldKind.TOOL, (name,), NOTHING)) == level


@pytest.mark.parametrize("url", ["https://.shop.example/x", "https://./x", "http://.127.0.0.1/x"])
def test_a69_a_host_that_begins_with_a_dot_is_none(url):
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, client(session, shop) as http:
        with pytest.raises((PolicyDenied, httpx.InvalidURL)) as caught:
            http.get(url)
        assert getattr(caught.value, "rule", "host") == "host"
    assert shop.payments == []


def test_a69_terms_that_cannot_be_read_are_a_response_like_every_other_no():
    def seller(request):
        return httpx.Response(402, headers={"payment-required": "bm90IGpzb24="}, request=request)

    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        transport = GuardedTransport(session, httpx.MockTransport(seller), on_refusal="respond")
        with httpx.Client(transport=transport) as http:
            answer = http.get(URL)
        assert (answer.status_code, answer.headers["content-type"]) == (402, "application/problem+json")
        assert answer.json()["code"] == ProtocolError.code
        assert "payment-required" not in answer.headers
        with pytest.raises(httpx.HTTPStatusError) as caught:
            answer.raise_for_status()
        assert isinstance(refusal_from(caught.value), ProtocolError)
