"""The models of November 2026: each is priced, or its refusal has a line that prices it, with no number of ours."""

import re
from pathlib import Path

import httpx
import pytest

from tests.support.merchant import client, make_guard
from x402guard import ConfigError, Metering, ModelPrice, PaymentRefused

MODELS = [
    line.split()
    for line in (Path(__file__).parents[1] / "data" / "models_of_november_2026.txt").read_text().splitlines()
]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20_000}
USED = {"prompt_tokens": 410, "completion_tokens": 900}
DONE = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
HOSTS = {
    "groq": "https://api.groq.com/openai/v1",
    "x-ai": "https://api.x.ai/v1",
    "deepseek": "https://api.deepseek.com",
    "perplexity": "https://api.perplexity.ai",
    "moonshotai": "https://api.moonshot.ai/v1",
    "zai": "https://api.z.ai/api/paas/v4",
    "openrouter": "https://openrouter.ai/api/v1",
    "mistral": "https://api.mistral.ai/v1",
    "openai": "https://api.openai.com/v1",
}
NEEDS = {"web_search": "$0.01", "provider_tool": "$0.01", "image_generation": "$0.01", "model_fallback": "$0.01"}


def asked(kind, model):
    """The URL and the body of a call to a model."""
    if kind == "responses":
        return "https://api.openai.com/v1/responses", {"model": model, "input": "hi", "max_output_tokens": 20_000}
    if kind == "embeddings":
        return "https://api.openai.com/v1/embeddings", {"model": model, "input": "hi"}
    if kind == "anthropic":
        return "https://api.anthropic.com/v1/messages", {"model": model, **CHAT}
    if kind == "google":
        contents = {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 20_000}}
        return f"https://generativelanguage.googleapis.com/v1beta/models/{model}:generateContent", contents
    if kind == "cohere":
        return "https://api.cohere.com/v2/chat", {"model": model, **CHAT}
    return f"{HOSTS[kind]}/chat/completions", {"model": model, **CHAT}


def called(kind, model, answer=None, **metering):
    """What a call to a model is held at, in nano-dollars, and what is booked."""
    url, body = asked(kind, model)
    held = []

    def server(_request):
        held.append(session.held)
        return httpx.Response(200, json=answer or {})

    allowed = {"allowances": NEEDS, **metering}
    with make_guard(metering=Metering(**allowed)) as guard, guard.session("s", budget="$900.00") as session:
        client(session, server).post(url, json=body)
        return int(held[0] * 10**9), int(session.spent * 10**9)


def line_in(refusal):
    """The line of a refusal that prices the model, as it is pasted."""
    return re.search(r"Metering\(models=\{.*?\)\}\)", refusal)[0]


@pytest.mark.parametrize(("kind", "model"), MODELS)
def test_a_model_is_priced_or_its_refusal_has_a_line_that_prices_it(kind, model):
    try:
        assert called(kind, model)[0] > 0
        return
    except PaymentRefused as refused:
        said = str(refused)
    assert "has no price for" in said
    assert "x402guard prices update" in said
    pasted = eval(line_in(said), {"Metering": Metering, "ModelPrice": ModelPrice})  # noqa: S307 - as a reader pastes it
    assert called(kind, model, models=pasted.models)[0] > 0


def test_the_list_is_whole():
    assert len(MODELS) == 103


@pytest.mark.parametrize(
    ("model", "bill"),
    [("gpt-6.2-sol", 9_820_000), ("ft:gpt-4.1-mini-2025-04-14:court::abc", 3_208_000)],
)
def test_the_line_that_is_pasted_books_the_price_of_the_family(model, bill):
    with pytest.raises(PaymentRefused) as refused:
        called("openai", model)
    pasted = eval(line_in(str(refused.value)), {"Metering": Metering, "ModelPrice": ModelPrice})  # noqa: S307
    answer = {"model": model, "usage": USED, **DONE}
    assert called("openai", model, answer, models=pasted.models, price_context={"service_tier": "default"})[1] == bill


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (
            "https://api.openai.com/v1/images/generations",
            'fixed_prices={"https://api.openai.com/v1/images/generations": "…"}',
        ),
        ("https://api.openai.com/v1/batches", 'fixed_prices={"https://api.openai.com/v1/batches": "…"}'),
        (
            "https://api.mistral.ai/anthropic/v1/messages",
            'Metering(endpoints={"https://api.mistral.ai/anthropic": "anthropic"})',
        ),
    ],
)
def test_the_hint_of_a_path_has_no_number_and_cannot_be_pasted_into_a_wrong_price(url, says):
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, pytest.raises(PaymentRefused) as refused:
        client(session, lambda _: httpx.Response(200)).post(url, json={"model": "gpt-4o"})
    said = str(refused.value)
    assert says in said
    assert "$" not in said.partition("Nothing was paid")[0]
    with pytest.raises(ConfigError, match="dollar amount"):
        Metering(fixed_prices={url: "…"})


def test_a_batch_costs_the_sum_of_its_parts_at_the_prices_of_a_batch():
    """1,000 x (1 in at most a few hundred tokens, 100,000 out) of fable-5 at 25 dollars a million: 2,500 dollars and some."""
    part = {"model": "claude-fable-5", "max_tokens": 100_000, "messages": [{"role": "user", "content": "hi"}]}
    url, body = (
        "https://api.anthropic.com/v1/messages/batches",
        {"requests": [{"custom_id": str(n), "params": part} for n in range(1_000)]},
    )
    seen = []

    def server(_request):
        seen.append(session.held)
        return httpx.Response(200, json={"id": "msgbatch_1", "processing_status": "in_progress"})

    with make_guard() as guard, guard.session("s", budget="$2600.00") as session:
        client(session, server).post(url, json=body)
        assert 2_500 < seen[0] < 2_501
        assert session.spent == seen[0]
        with pytest.raises(PaymentRefused, match="does not fit"):
            client(session, server).post(url, json=body)
        body["requests"][3]["params"] = {**part, "model": "claude-muse-9"}
        with pytest.raises(PaymentRefused, match=r"requests\[3\]\.model: anthropic has no price for 'claude-muse-9'"):
            client(session, server).post(url, json=body)
