"""What an error becomes as a tool's answer: in the vendors' own types, with what an agent can act on."""

import json
import pickle

import pytest
from anthropic.types import ToolResultBlockParam
from openai.types.chat import ChatCompletionToolMessageParam
from openai.types.responses.response_input_param import FunctionCallOutput
from pydantic import TypeAdapter

import x402guard
from tests.support.merchant import make_guard
from x402guard import (
    BudgetExhausted,
    CallTimeout,
    CircuitOpen,
    ConfigError,
    PaidNotDelivered,
    PaymentRefused,
    ProtocolError,
    SettlementUncertain,
    X402GuardError,
)
from x402guard.errors import quoted

DIALECTS = {
    "anthropic": (ToolResultBlockParam, "toolu_01", "tool_use_id", "content"),
    "openai": (ChatCompletionToolMessageParam, "call_1", "tool_call_id", "content"),
    "openai_responses": (FunctionCallOutput, "call_1", "call_id", "output"),
}
OPEN = CircuitOpen("breaker_open: host shop.example has failed", rule="breaker_open", retry_after=30)


def errors():
    """One of every kind that there is."""
    kinds = [
        kind
        for kind in vars(x402guard.errors).values()
        if isinstance(kind, type) and issubclass(kind, x402guard.X402GuardError)
    ]
    for kind in kinds:
        if issubclass(kind, PaymentRefused):
            yield kind("no", rule="a_rule")
        elif issubclass(kind, SettlementUncertain):
            yield kind("perhaps", hold_id="h", deadline=1)
        elif issubclass(kind, ProtocolError):
            yield kind("bad", field="body")
        else:
            yield kind("wrong")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("error", [*errors(), OPEN], ids=lambda error: type(error).__name__)
def test_every_error_is_an_answer_in_the_vendors_own_types(error, dialect):
    kind, call_id, named, said = DIALECTS[dialect]
    result = error.as_tool_result(call_id, dialect=dialect)
    TypeAdapter(kind).validate_python(result, strict=True)
    assert set(result) <= set(kind.__annotations__)
    assert result[named] == call_id
    told = json.loads(result[said])
    assert (told["error"], told["retry"], told["advice"]) == (error.code, error.retry, error.advice)
    assert told["message"] == str(error)
    assert told.get("money_may_have_moved", False) is error.money_may_have_moved
    assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize(
    ("call_id", "kind"),
    [
        ("toolu_01A", ToolResultBlockParam),
        ("call_abc", ChatCompletionToolMessageParam),
        ("fc_abc", ChatCompletionToolMessageParam),
    ],
)
def test_the_id_says_whose_answer_it_is(call_id, kind):
    result = OPEN.as_tool_result(call_id)
    TypeAdapter(kind).validate_python(result, strict=True)
    assert ("is_error" in result) is (kind is ToolResultBlockParam)
    assert call_id in result.values()


def test_anthropics_is_marked_as_an_error():
    assert OPEN.as_tool_result("toolu_1")["is_error"] is True


@pytest.mark.parametrize(("wait", "told"), [(30, 30), (0, 0), (None, None)])
def test_how_long_to_wait_is_told_where_it_is_known(wait, told):
    error = CircuitOpen("no", rule="breaker_open", retry_after=wait)
    assert json.loads(error.as_tool_result("call_1")["content"]).get("retry_after") == told


@pytest.mark.parametrize("error", [CallTimeout("late"), SettlementUncertain("?", hold_id="h", deadline=1)])
def test_an_agent_is_told_where_money_may_have_moved(error):
    assert json.loads(error.as_tool_result("call_1")["content"])["money_may_have_moved"] is True


@pytest.mark.parametrize("bad", ["", None, 7, b"call_1"])
def test_what_is_no_id_is_an_error(bad):
    with pytest.raises(ValueError, match="tool_use_id"):
        OPEN.as_tool_result(bad)


@pytest.mark.parametrize("dialect", ["", "Anthropic", "gemini", 1])
def test_a_dialect_that_nobody_speaks_is_an_error(dialect):
    with pytest.raises(ValueError, match="anthropic, openai, openai_responses"):
        OPEN.as_tool_result("call_1", dialect=dialect)


@pytest.mark.parametrize("message", ["naïve 漢字 🎈", 'quotes " and \\ and \n', "half \ud800 a character"])
def test_whatever_a_message_says_can_be_sent(message):
    result = X402GuardError(message).as_tool_result("toolu_1")
    sent = json.dumps(result, ensure_ascii=False).encode()  # as the vendors' clients write their bodies
    assert json.loads(sent)["tool_use_id"] == "toolu_1"


def test_a_refusal_out_of_a_session_says_what_to_do():
    with make_guard() as guard, guard.session("s", budget="$0.01") as session:
        with pytest.raises(BudgetExhausted) as refused:
            session.charge("serp", "$0.02")
    told = json.loads(refused.value.as_tool_result("call_1")["content"])
    assert told["error"] == "budget_exhausted"
    assert "0.02" in told["message"]
    assert told["advice"]


def test_a_purchase_that_was_lost_is_not_to_be_asked_again():
    told = json.loads(PaidNotDelivered("gone", hold_id="h", deadline=1).as_tool_result("call_1")["content"])
    assert (told["retry"], told["money_may_have_moved"]) == ("no", True)
    assert ConfigError("x").as_tool_result("call_1")["role"] == "tool"


@pytest.mark.parametrize("spendable", ["0x" + "ab" * 65, "ab" * 65, "eyJ4NDAyVmVyc2lvbiI6" + "A" * 100])
def test_words_of_a_peer_say_no_signature_even_where_they_are_cut(spendable):
    for words in (f"invalid signature {spendable}", "x " * 60 + spendable, f"{spendable} {spendable}"):
        shown = quoted(words)
        assert spendable[:79] not in shown
        assert "[redacted]" in shown
    transaction = "0x" + "ab" * 32
    assert transaction in quoted(f"see {transaction}")


KEY = "4c0883a69102937d6231471b5dbb6204fe5129617082792ae468d01a3f362318"


@pytest.mark.parametrize(
    "shown", [KEY, f"0x{KEY}", f"0x{KEY}"[:40], f"0x{KEY}"[:60], KEY[:33], KEY[:40], f"{{'{KEY}': 'a"]
)
def test_a_key_in_the_wrong_setting_is_not_shown(shown):
    error = ConfigError(f"budget: {shown!r} is not a dollar amount")
    assert KEY[6:12] not in str(error)
    assert "4c0883…" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301 - our own


@pytest.mark.parametrize(
    "shown", ["0x857b06519E91e3A54538791bDbb0E22373e36b66", "eip155:84532", "0x" + "0123456789" * 4]
)
def test_an_address_in_a_setting_is_shown(shown):
    assert shown in str(ConfigError(f"payee: {shown} is not this wallet's"))
