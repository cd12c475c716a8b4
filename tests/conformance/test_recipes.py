"""The recipes of ``docs/how-to/sellers.md``, as they are written there, against a seller of each kind over real HTTP."""

import itertools
import json
import re
import threading
import tomllib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.support.merchant import Shop, accept, b64, make_guard, receipt, required, required_v1, upto
from tests.support.words import WORDS
from x402guard import GuardedTransport, PaymentRefused, Policy
from x402guard.guard.settings import PolicySettings

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "sellers.md").read_text()
TABLES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
PRESETS = ("default", "careful")


@contextmanager
def selling(shop):
    """Serve a shop, a function from request to response, on the loopback; yields its URL."""

    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            answer = shop(httpx.Request(self.command, f"{url}{self.path}", headers=self.headers.items(), content=body))
            self.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name not in ("content-length", "transfer-encoding"):
                    self.send_header(name, value)
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = answer  # noqa: N815 - the names of the library

        def log_message(self, *_said):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield url
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sellers_of(named):
    """What the page says of a seller, for the loopback."""
    [table] = [each for each in TABLES if named in each]
    table = re.sub(r'sellers\."[^"]*"', 'sellers."127.0.0.1"', table)
    return PolicySettings(**tomllib.loads(table)["policy"]).build().sellers


def policy_of(preset, **changes):
    return {"default": Policy, "careful": Policy.careful}[preset](**changes)


def buying(policy, url, asks, **more):
    """How many requests are paid with 200, and the rule that has refused the first other one."""
    with make_guard(policy=policy, **more) as guard, guard.session("s", budget="$5.00") as session:
        with httpx.Client(transport=GuardedTransport(session), base_url=url) as http:
            for number, (method, path, body) in enumerate(asks):
                try:
                    assert http.request(method, path, json=body).status_code == 200
                except PaymentRefused as refused:
                    return number, refused.rule
    return len(asks), ""


def sale(word):
    return "POST", "/v1/sale", {"item": word}


@pytest.mark.parametrize(
    ("preset", "without"), [("default", (5, "new_payees_per_day")), ("careful", (1, "payee_change"))]
)
def test_a_processor_that_names_a_fresh_address_for_each_sale(preset, without):
    fresh = itertools.count(1)
    asks = [sale(word) for word in WORDS[:15]]
    with selling(Shop(lambda r: required(accept(payTo=f"0x{next(fresh):040x}"), url=str(r.url)))) as url:
        assert buying(policy_of(preset, sellers=sellers_of("stripe")), url, asks) == (15, "")
        assert buying(policy_of(preset), url, asks) == without


@pytest.mark.parametrize("preset", PRESETS)
def test_a_marketplace_of_twelve(preset):
    def terms(request):
        return required(accept(payTo=f"0x{WORDS.index(request.url.path[1:]) + 1:040x}"), url=str(request.url))

    asks = [("GET", f"/{word}", None) for word in WORDS[:12]]
    with selling(Shop(terms)) as url:
        assert buying(policy_of(preset, sellers=sellers_of("market")), url, asks) == (12, "")
        assert buying(policy_of(preset), url, asks)[0] < 12


def test_a_gateway_with_a_pool_of_facilitators_and_two_versions():
    turns = itertools.count()

    def terms(request):
        number = next(turns)
        if request.url.path == "/v1/models":
            return (required_v1 if number % 2 else required)(url=str(request.url))
        return required(upto(facilitator=f"0x{0x1000 + number % 20:040x}"), url=str(request.url))

    def paid(request, _shop):
        more = {} if request.url.path == "/v1/models" else {"amount": "1000"}
        name = "X-PAYMENT-RESPONSE" if "x-payment" in request.headers else "PAYMENT-RESPONSE"
        return httpx.Response(200, headers={name: b64(receipt(**more))})

    chats = [("POST", "/v1/chat", {"model": "small", "text": f"{WORDS[n % 16]} {n}"}) for n in range(40)]
    lists = [("GET", f"/v1/models?page={word}", None) for word in WORDS[:6]]
    policy = Policy(sellers=sellers_of("gateway"))
    with selling(Shop(terms, paid=paid)) as url:
        assert buying(policy, url, chats, unsafe_trust_receipts=True) == (40, "")
        assert buying(policy, url, lists) == (6, "")
        assert buying(Policy(), url, chats, unsafe_trust_receipts=True) == (3, "facilitators")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_chat_that_is_sold_by_the_token(preset):
    """Sixteen turns, 1,500 tokens more each: no setting of sellers."""

    def terms(request):
        return required(accept(max(1, len(request.content) // 4)), url=str(request.url))

    said, asks = [], []
    for word in WORDS:
        said.append({"role": "user", "content": f"{word} " * (6_000 // (len(word) + 1))})
        asks.append(("POST", "/v1/chat", {"model": "small", "messages": list(said)}))
    more = {"approvals": Policy().approvals} if preset == "careful" else {}
    with selling(Shop(terms)) as url:
        assert buying(policy_of(preset, **more), url, asks) == (16, "")


def test_the_loop_of_the_page_polls_a_job_with_one_signature():
    left = [3]

    def paid(request, _shop):
        if request.url.path == "/films":
            return httpx.Response(202, json={"poll_url": "/films/7"})
        left[0] -= 1
        if left[0]:
            return httpx.Response(200, json={"status": "pending"})
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())}, json={"status": "done"})

    shop = Shop(lambda r: required(accept(200_000), url=str(r.url)), paid=paid)
    *_, code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = code.replace("import time\n", "")
    with selling(shop) as url, make_guard(policy=Policy()) as guard, guard.session("s", budget="$5.00") as session:
        with httpx.Client(transport=GuardedTransport(session)) as http:

            class NoTime:
                sleep = staticmethod(lambda _s: None)

            names = {"http": http, "session": session, "time": NoTime, "json": json}
            exec(compile(code.replace("https://render.example", url), "sellers.md", "exec"), names)  # noqa: S102 - our page
        assert names["film"].json() == {"status": "done"}
        assert (len(shop.nonces), len(shop.payments)) == (1, 4)
        assert str(session.held + session.spent) == "0.20"
