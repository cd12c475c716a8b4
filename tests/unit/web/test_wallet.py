"""What the wallet's tools answer when something fails after the money is out."""

import json

import anyio
import pytest
from mcp_types import CallToolRequestParams

from tests.support.merchant import b64, make_guard
from tests.support.slow_server import HEAD, Trickler, once_paid
from x402guard import LedgerUnavailable, Metering, Policy
from x402guard.assets import AssetRegistry
from x402guard.http.explain import Explainer
from x402guard.web import wallet as module
from x402guard.web.wallet import Wallet

JSON = HEAD.replace(b"text/plain", b"application/json")


@pytest.fixture
def shop():
    with Trickler() as shop:
        yield shop


def call(shop, tool, path="/page", **given):
    async def go(session, rules):
        wallet = Wallet(session, Explainer(rules, AssetRegistry(()), asks=False, meter=session.meter))
        params = CallToolRequestParams(name=tool, arguments={"url": shop.url + path, **given})
        try:
            return await wallet._call_tool(None, params)
        finally:
            await wallet._inner.aclose()

    with make_guard(policy=Policy(hosts={shop.host}, breaker=None)) as guard:
        with guard.session("s", budget="$1.00") as session:
            return anyio.run(go, session, guard.policy), session.spent + session.held


def test_what_is_paid_is_handed_over_while_the_ledger_cannot_be_read(shop, monkeypatch):
    async def broken(_):
        raise LedgerUnavailable("the disk is full")

    monkeypatch.setattr(Wallet, "_remaining", broken)
    result, counted = call(shop, "pay_and_fetch")
    assert (bool(result.is_error), result.structured_content["remaining"], str(counted)) == (False, None, "0.01")
    assert result.structured_content["paid"] is not None
    assert "None" not in result.content[0].text


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("odd")])
def test_no_error_after_the_payment_denies_it(shop, monkeypatch, error):
    async def broken(_):
        raise error

    monkeypatch.setattr(Wallet, "_remaining", broken)
    result, counted = call(shop, "pay_and_fetch")
    told = result.structured_content
    assert (result.is_error, told["code"], told["money_may_have_moved"]) == (True, "paid_not_delivered", True)
    assert "would be a new purchase" in json.dumps(told)
    assert str(counted) == "0.01"


@pytest.mark.parametrize(("tool", "may_have"), [("pay_and_fetch", True), ("quote", False)])
def test_a_call_that_takes_too_long_ends_and_denies_no_payment(shop, monkeypatch, tool, may_have):
    monkeypatch.setattr(module, "_LONGEST_S", 1)
    monkeypatch.setattr(module, "_QUOTE_S", 1)
    shop.answers["/hangs"] = once_paid(lambda line: line.hang()) if may_have else (lambda line: line.hang())
    result, counted = call(shop, tool, "/hangs")
    assert result.is_error
    assert result.structured_content["money_may_have_moved"] is may_have
    assert str(counted) == ("0.01" if may_have else "0.00")


DONE = json.dumps(
    {
        "id": "x", "object": "chat.completion", "model": "gpt-4o",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 1000, "total_tokens": 2000},
    }
).encode()  # fmt: skip
ASKED = json.dumps({"model": "gpt-4o", "max_tokens": 1000, "messages": [{"role": "user", "content": "hi"}]})


def call_model(shop, tool, path="/v1/chat/completions"):
    """Call a model of the owner's endpoint with a tool; return the result, and what counts."""

    async def go(session, rules):
        wallet = Wallet(session, Explainer(rules, AssetRegistry(()), asks=False, meter=session.meter))
        arguments = {"url": shop.url + path, "method": "post", "body": ASKED}
        try:
            return await wallet._call_tool(None, CallToolRequestParams(name=tool, arguments=arguments))
        finally:
            await wallet._inner.aclose()

    metering = Metering(endpoints={f"{shop.url}/v1": "openai"})
    with make_guard(policy=Policy(hosts={shop.host}, breaker=None), metering=metering) as guard:
        with guard.session("s", budget="$1.00") as session:
            return anyio.run(go, session, guard.policy), session.spent + session.held


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/images/generations"])
def test_a_quote_sends_no_call_that_a_provider_bills(shop, path):
    shop.answers[path] = lambda line: line.send(JSON + b"content-length: %d\r\n\r\n" % len(DONE) + DONE)
    result, counted = call_model(shop, "quote", path)
    assert (result.is_error, result.structured_content["code"], shop.asked) == (True, "config_error", [])
    assert "pay_and_fetch" in str(result.structured_content)
    assert counted == 0


def test_what_a_call_of_a_model_has_cost_is_told_as_its_bill_says(shop):
    shop.answers["/v1/chat/completions"] = lambda line: line.send(
        JSON + b"content-length: %d\r\n\r\n" % len(DONE) + DONE
    )
    result, counted = call_model(shop, "pay_and_fetch")
    paid = result.structured_content["paid"]
    assert (paid["amount"], paid["state"]) == (str(counted), "captured")
    assert f"${counted} was paid (captured)" in result.content[0].text


SIGNED = b64(
    {"x402Version": 2, "payload": {"signature": "0x" + "ab" * 65, "authorization": {"from": "0x" + "22" * 20}}}
)
PAYS = [
    {"headers": {"Payment-Signature": SIGNED}},
    {"headers": {"X_PAYMENT": SIGNED}},
    {"headers": {"Authorization": f"Payment {SIGNED}"}},
    {"method": "POST", "body": json.dumps({"method": "tools/call", "params": {"_meta": {"x402/payment": {"x402Version": 2}}}})},
    {"method": "connect"},
]  # fmt: skip


@pytest.mark.parametrize("given", PAYS, ids=["v2", "v1", "mpp", "mcp", "connect"])
@pytest.mark.parametrize("tool", ["quote", "pay_and_fetch"])
def test_no_tool_sends_a_payment_that_stands_in_its_arguments(shop, tool, given):
    result, counted = call(shop, tool, **given)
    assert (result.is_error, shop.asked, counted) == (True, [], 0)
    assert result.structured_content["code"] in ("config_error", "policy_denied")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"method": "GÉT"}, "method"),
        ({"method": "\ud800"}, "method"),
        ({"method": ""}, "method"),
        ({"method": "GET /x HTTP/1.1\r\nx: y"}, "method"),
        ({"method": "A" * 200_000}, "method"),
        ({"headers": {"a": "é"}}, "headers"),
        ({"headers": {"é": "a"}}, "headers"),
        ({"headers": {"a": "\ud800"}}, "headers"),
        ({"method": "POST", "body": "\ud800"}, "body"),
    ],
)
@pytest.mark.parametrize("tool", ["quote", "pay_and_fetch"])
def test_what_cannot_be_sent_is_an_error_that_names_it(shop, tool, given, named):
    result, counted = call(shop, tool, **given)
    assert (result.is_error, shop.asked, counted) == (True, [], 0)
    told = result.structured_content
    assert (told["code"], told["detail"].partition(":")[0], told["money_may_have_moved"]) == (
        "config_error",
        named,
        False,
    )


def test_a_call_of_a_model_whose_answer_is_lost_is_not_denied(shop):
    shop.answers["/v1/chat/completions"] = lambda line: False
    result, counted = call_model(shop, "pay_and_fetch")
    assert (result.is_error, result.structured_content["money_may_have_moved"]) == (True, True)
    assert counted > 0


def test_a_call_of_a_model_that_was_never_sent_costs_nothing(shop):
    shop.answers.clear()
    shop.__exit__(None, None, None)  # nothing listens there any more
    result, counted = call_model(shop, "pay_and_fetch")
    assert (result.is_error, result.structured_content["money_may_have_moved"], counted) == (True, False, 0)
