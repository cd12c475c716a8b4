"""Guards whose endpoint is an ordinary node: a real chain behind one that refuses what such nodes refuse."""

import json
import threading
import time
from contextlib import contextmanager
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from web3 import HTTPProvider, Web3

from tests.support import processes
from tests.support.market import AMOUNTS, CEILING, DIME, TAKEN, market
from x402guard import Chain

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("reconcile"), pytest.mark.usefixtures("inline_notices")]

BLOCKS = 3
"""After how many blocks one is final here."""


class Node(HTTPProvider):
    """``pruned``: no state but that of the newest block. ``no_hashes``: EIP-1898 is unknown. ``per_transaction``: receipts count
    their logs from 0, and say ``status: true``."""

    def __init__(self, url, kind):
        super().__init__(url)
        self.kind = kind

    def make_request(self, method, params):
        block = params[1] if method == "eth_call" else None
        if isinstance(block, dict):
            newest = super().make_request("eth_getBlockByNumber", ["latest", False])["result"]["hash"]
            if self.kind == "no_hashes":
                return {"error": {"code": -32602, "message": "invalid argument 1: json: cannot unmarshal object"}}
            if self.kind == "pruned" and block["blockHash"] != newest:
                return {"error": {"code": -32000, "message": "missing trie node 5f3a"}}
        if (self.kind, method) == ("no_logs", "eth_getLogs"):
            return {"error": {"code": -32601, "message": "the method eth_getLogs does not exist"}}
        if self.kind == "no_final" and params[:1] == ["finalized"]:
            return {"error": {"code": -39001, "message": "finalized block not found"}}
        answer = super().make_request(method, params)
        if self.kind == "per_transaction" and method == "eth_getTransactionReceipt" and answer.get("result"):
            found = dict(answer["result"])
            logs = [{**log, "logIndex": hex(at)} for at, log in enumerate(found["logs"])]
            return {"result": {**found, "logs": logs, "status": True, "transactionIndex": "0x1"}}
        return answer


@pytest.fixture
def shop(make_engine, tmp_path):
    with market(make_engine, f"sqlite:///{tmp_path / 'spend.db'}") as opened:
        yield opened


def guarded(shop, kind):
    chain = Chain(Web3(Node(shop.net.rpc, kind)), finality=BLOCKS)
    return shop.guard(chains={shop.net.network: chain})


KINDS = pytest.mark.parametrize("node", ["pruned", "no_hashes", "per_transaction"])


@KINDS
def test_ten_upto_sales_are_captured_for_what_was_taken(shop, node):
    guard = guarded(shop, node)
    session = guard.session("s", budget="$1.00")
    shop.seller.says = lambda: {"transaction": shop.take(amount=12_345)["transaction"], "amount": "12345"}
    for number in range(10):
        assert shop.ask(session, json={"text": f"motion {number}"}).status_code == 200
    shop.mine(BLOCKS + 1)
    guard.reconcile()
    assert (session.spent, session.held) == (10 * TAKEN, 0)
    found = guard.reconcile()
    assert (found.unexplained, found.contradicted) == ([], [])
    assert Decimal(session.report().to_dict()["evidence"]["chain"]) == 10 * TAKEN


@KINDS
@pytest.mark.parametrize("kind", AMOUNTS)
def test_a_sale_that_failed_is_freed_after_its_deadline(shop, node, kind):
    guard = guarded(shop, node)
    session = guard.session("s", budget="$1.00")
    shop.seller.says = "lost"
    hold = guard.shell.store.hold(shop.ask(session, kind).extensions["x402guard"].hold_id)
    session.reconcile()
    assert session.held == (CEILING if kind == "upto" else DIME)
    shop.net.advance(hold.payment().valid_until - int(time.time()) + 30)
    shop.mine(BLOCKS + 1)
    session.reconcile()
    assert (session.held, session.remaining) == (0, Decimal(1))


@pytest.mark.parametrize(
    ("node", "says", "code"),
    [
        ("pruned", "the node has not the state of the final block: a payment is proven by its receipt", 0),
        (
            "no_hashes",
            "the node has not state at a block's hash (EIP-1898): a nonce is asked for at a block's number",
            0,
        ),
        ("no_final", "the node has not the final block: no payment is ever final; set a number of blocks", 1),
        (
            "no_logs",
            "the node has not eth_getLogs: a payment whose seller names no transaction counts at its ceiling",
            0,
        ),
    ],
)
def test_doctor_names_what_a_node_cannot_tell(shop, tmp_path, node, says, code):
    shop.mine(2)
    finality = "finality = 1" if node == "pruned" else ""  # the final block of a chain of one node is its newest
    with served(Node(shop.net.rpc, node)) as url:
        settings = tmp_path / "x402guard.toml"
        chain = f'[chains."{shop.net.network}"]\nurls = "{url}"\n{finality}\n'
        settings.write_text(f'ledger = "{tmp_path / "own.db"}"\n{chain}')
        done = processes.run("x402guard", "doctor", "--config", str(settings), module=True, cwd=tmp_path)
    assert says in " ".join(done.stdout.split()), done.stdout + done.stderr
    assert done.returncode == code, done.stdout


@contextmanager
def served(node):
    """Serve a node over HTTP on the loopback; yields its URL."""

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = json.dumps(
                {"jsonrpc": "2.0", "id": 1, **node.make_request(asked["method"], asked["params"])}
            ).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_said):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
