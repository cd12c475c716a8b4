"""Where bytes of strangers enter: each entry takes any bytes, and lets nothing out but what it may.

The same entries are driven by hypothesis (``test_fuzz.py``) and by atheris (``fuzz_harness.py``).
"""

import base64
import json
from contextlib import contextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.ledger import a_hold, an_intent
from x402guard import ConfigError, ProtocolError
from x402guard.assets import AssetRegistry
from x402guard.chain.reader import Chain, RpcChainReader
from x402guard.flow.effects import PeekBody, Reply
from x402guard.flow.ports import Funds
from x402guard.frozen import replace
from x402guard.kernel.rows import Claim, Nanos
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.findings import Cancelled, Settled, Unreadable, Unused, Used
from x402guard.llm.answer import AnswerReader
from x402guard.testing import Server
from x402guard.x402.challenge import read_challenge
from x402guard.x402.offer import Offer, normalise
from x402guard.x402.wire import decode_payment_required, decode_receipt

REGISTRY = AssetRegistry()
RECEIPT_NAMES = ("payment-response", "x-payment-response")
FLAVOURS = ("chat", "responses", "messages", "gemini", "cohere")
PIECE = 7
TX = "0x" + "ab" * 32


def _offers(required):
    for offer in normalise(required, REGISTRY):
        assert isinstance(offer, (Offer, Refusal))
        if isinstance(offer, Offer):
            assert 0 < offer.amount_atomic < 2**256


def required_header(raw):
    """Any bytes as PAYMENT-REQUIRED."""
    try:
        _offers(decode_payment_required(raw.decode("latin-1")))
    except ProtocolError as error:
        assert not error.money_may_have_moved
        assert len(str(error)) < 2_000


def required_json(raw):
    """Any bytes in base64 as PAYMENT-REQUIRED."""
    required_header(base64.b64encode(raw))


def receipt_header(raw):
    """Any bytes as PAYMENT-RESPONSE, as X-PAYMENT-RESPONSE, and as both."""
    value = raw.decode("latin-1")
    for names in ((RECEIPT_NAMES[0],), (RECEIPT_NAMES[1],), RECEIPT_NAMES, RECEIPT_NAMES[:1] * 2):
        try:
            decode_receipt([(name, value) for name in names])
        except ProtocolError as error:
            assert error.field


def receipt_json(raw):
    """Any bytes in base64 as a receipt."""
    receipt_header(base64.b64encode(raw))


def body_402(raw):
    """Any bytes as the JSON body of a 402."""
    flow = read_challenge(Reply(402, (("content-type", "application/json"),)))
    try:
        assert isinstance(next(flow), PeekBody)
        flow.send(raw)
    except StopIteration as done:
        if done.value is not None:
            _offers(done.value.required)
    except ProtocolError as error:
        assert error.field


def _read_along(raw, content_type, *, packed):
    head, stream = raw[:2].ljust(2, b"\0"), raw[2:]
    flavour = FLAVOURS[head[0] % len(FLAVOURS)]
    encoding = "gzip" if packed else ""
    hides = bool(head[1] & 1)
    reader = AnswerReader(flavour, content_type, encoding, hides_usage=hides, keeps_text=bool(head[1] & 2))
    size = PIECE if head[1] & 4 else max(len(stream), 1)
    handed = b"".join(reader.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + reader.rest()
    answer = reader.answer(ended=bool(head[1] & 8))
    assert answer.body is None or isinstance(answer.body, dict)
    assert answer.final or answer.why
    assert len(handed) <= len(stream)
    if not hides:
        assert handed == stream


def events(raw):
    """Any bytes as a stream of server-sent events; the first two choose flavour and pieces."""
    _read_along(raw, "text/event-stream", packed=False)


def whole_answer(raw):
    """Any bytes as a whole answer of an LLM."""
    _read_along(raw, "application/json", packed=False)


def packed_answer(raw):
    """Any bytes as a packed one."""
    _read_along(raw, "text/event-stream", packed=True)


class Node:
    """A JSON-RPC node on loopback: ``answers`` maps a method to the bytes that it answers, or to a ``Response``."""

    def __init__(self):
        self.answers = {}
        self.asked = []
        self.app = Starlette(routes=[Route("/", self.answer, methods=["POST"])])

    async def answer(self, request: Request) -> Response:
        call = json.loads(await request.body())
        self.asked.append(call["method"])
        given = self.answers.get(call["method"], self.answers.get("*"))
        if given is None:
            given = json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": TRUE[call["method"]]}).encode()
        return given if isinstance(given, Response) else Response(given, media_type="application/json")


TRUE = {
    "eth_chainId": hex(84532),
    "eth_call": "0x" + f"{1:064x}",
    "eth_getBlockByNumber": {"hash": "0x" + "11" * 32, "number": "0x20", "timestamp": "0x65000000"},
    "eth_getTransactionByHash": {"to": an_intent().token, "input": "0x"},
    "eth_getTransactionReceipt": {"status": "0x1", "blockNumber": "0x10", "logs": []},
    "eth_blockNumber": "0x20",
    "eth_getLogs": [],
}
METHODS = tuple(TRUE)


@contextmanager
def node():
    made = Node()
    with Server(made.app) as server:
        made.url = server.url
        yield made


def holds():
    claim = Claim(transaction=TX, amount=Nanos(1_000))
    for method in ("eip3009", "permit2"):
        yield replace(a_hold(intent=an_intent(method=method)), claim=claim)


def read_chain(world):
    """What a reader makes of the node's answers: a finding each, and never an error."""
    reader = RpcChainReader({"eip155:84532": Chain(world.url, timeout_s=2.0)}, pause=lambda seconds: None)
    try:
        found = [reader.read(hold) for hold in holds()]
        try:
            funds = reader.funds("eip155:84532", an_intent().token, an_intent().payer)
        except ConfigError as error:
            assert "serves chain" in str(error)
            funds = None
    finally:
        reader.close()
    for finding in found:
        assert isinstance(finding, (Settled, Used, Cancelled, Unused, Unreadable))
    assert funds is None or isinstance(funds, Funds)
    return found


def rpc(world, raw):
    """Any bytes as the answer to one method, which the first chooses; or to all."""
    chosen = (*METHODS, "*")[raw[0] % (len(METHODS) + 1)] if raw else "*"
    world.answers = {chosen: raw[1:]}
    read_chain(world)


PURE = {
    entry.__name__: entry
    for entry in (
        required_header, required_json, receipt_header, receipt_json, body_402, events, whole_answer, packed_answer,
    )
}  # fmt: skip


def any_entry(raw):
    """One of them, which the first byte chooses."""
    if raw:
        list(PURE.values())[raw[0] % len(PURE)](raw[1:])


SEEDS = (
    b'{"x402Version":2,"accepts":[{"scheme":"exact","amount":"1"}]}',
    b'{"success":true,"transaction":"0x","network":"eip155:84532","amount":"1"}',
    b'\0\0data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\ndata: [DONE]\n\n',
    b'\0{"jsonrpc":"2.0","id":0,"result":"0x14a34"}',
)
