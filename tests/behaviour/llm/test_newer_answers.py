"""What newer answers state beside what was known: compactions alone, measures that are no counts, tiers, and tools by use."""

from decimal import Decimal

import httpx
import pytest

from tests.support.merchant import make_guard
from x402guard import GuardedTransport, Metering, ModelPrice
from x402guard.errors import Unpriced
from x402guard.llm.events import event_reader
from x402guard.vendors.routes import find_endpoint

CLAUDE, OPENAI = "https://api.anthropic.com/v1/messages", "https://api.openai.com/v1"
HI = [{"role": "user", "content": "hi"}]


def booked(url, asked, answer, **metering):
    """Return what a call is booked at, in dollars, and how many holds are out after it."""
    with make_guard(metering=Metering(**metering)) as guard, guard.session("s", budget="$50.00") as session:
        inner = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
        with httpx.Client(transport=GuardedTransport(session, inner)) as http:
            assert http.post(url, json=asked).status_code == 200
        return session.spent, session.report().to_dict()


def test_a_compaction_alone_is_booked_by_its_round():
    """Its tokens are not in the total: https://docs.claude.com/en/api/messages, usage.iterations."""
    used = {
        "input_tokens": 25_000,
        "output_tokens": 2_000,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
    answer = {
        "id": "m", "type": "message", "role": "assistant", "model": "claude-sonnet-4-5", "content": [],
        "usage": {"input_tokens": 0, "output_tokens": 0, "iterations": [{"type": "compaction", **used}]},
    }  # fmt: skip
    spent, _ = booked(CLAUDE, {"model": "claude-sonnet-4-5", "max_tokens": 3_000, "messages": HI}, answer)
    assert str(spent) == "0.105"  # 25,000 × $3 and 2,000 × $15 a million


def test_a_usage_of_nothing_costs_the_ceiling():
    answer = {
        "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0},
    }
    spent, report = booked(f"{OPENAI}/chat/completions", {"model": "gpt-4o", "messages": HI, "max_tokens": 100}, answer)
    assert spent > 0
    assert "a usage of nothing" in str(report["events"])


@pytest.mark.parametrize(
    "measure",
    [
        {"estimated_cost": 1.2e-05},
        {"time_to_first_token": 0.21, "total_tokens_per_sec": 120.3},
    ],
)
def test_a_measure_that_is_no_count_disputes_nothing(measure):
    counts = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    answer = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": counts | measure}
    asked = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi " * 200}], "max_tokens": 100}
    spent, report = booked(f"{OPENAI}/chat/completions", asked, answer, disputes="latch")
    assert (str(spent), report["trip_reason"]) == ("0.00035", None)


@pytest.mark.parametrize("tier", ["priority-plus", "turbo"])
def test_a_tier_that_is_not_known_is_refused_before_it_is_bought(tier):
    asked = {"model": "gpt-4o", "messages": HI, "max_tokens": 100, "service_tier": tier}
    with pytest.raises(Unpriced, match=f"service_tier: the price of '{tier}'"):
        booked(f"{OPENAI}/chat/completions", asked, {})


@pytest.mark.parametrize(("ran", "cents"), [(0, 3), (1, 3), (3, 9)])
def test_a_tool_without_a_price_is_booked_for_each_use(ran, cents):
    answer = {
        "id": "r", "status": "completed", "model": "gpt-4o", "usage": {"input_tokens": 0, "output_tokens": 1, "total_tokens": 1},
        "output": [{"type": "code_interpreter_call", "id": str(n)} for n in range(ran)],
    }  # fmt: skip
    asked = {
        "model": "gpt-4o", "input": "hi", "max_output_tokens": 100,
        "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}],
    }  # fmt: skip
    spent, _ = booked(f"{OPENAI}/responses", asked, answer, allowances={"code_execution": "$0.03"})
    assert str(spent) == f"0.0{cents}001"


def test_queries_of_all_chunks_count_once_each():
    reader = event_reader("gemini")
    chunks = [{"webSearchQueries": ["a", "b"]}, {"webSearchQueries": ["b", "c"]}, {"groundingSupports": [1]}, {}]
    for metadata in chunks:
        reader.take({"candidates": [{"groundingMetadata": metadata}]})
    reader.take({"usageMetadata": {"promptTokenCount": 1}, "candidates": [{"finishReason": "STOP"}]})
    reader.end(done=True)
    [candidate] = reader._body["candidates"]
    assert candidate["groundingMetadata"] == {"webSearchQueries": ["a", "b", "c"], "groundingSupports": [1]}


@pytest.mark.parametrize(
    "host",
    ["aiplatform.us.rep.googleapis.com", "aiplatform.eu.rep.googleapis.com", "us-central1-aiplatform.mtls.googleapis.com",
     "aiplatform.mtls.googleapis.com", "us-central1-aiplatform.googleapis.com"],
)  # fmt: skip
def test_every_form_of_a_providers_host_is_metered(host):
    found = find_endpoint(
        host, "/v1/projects/p/locations/us/publishers/google/models/gemini-2.5-pro:generateContent", ()
    )
    assert found is not None
    assert found.provider == "google"


@pytest.mark.parametrize(("ticks", "dollars"), [(375_000_000, "0.0375"), (1, "0.000000001"), (None, "0.0002")])
def test_what_xai_charges_counts_with_its_tools(ticks, dollars):
    used = {"prompt_tokens": 100, "completion_tokens": 100, "total_tokens": 200} | (
        {"cost_in_usd_ticks": ticks} if ticks else {}
    )
    answer = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": used}
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi " * 100}], "max_tokens": 100}
    spent, _ = booked(
        "https://api.x.ai/v1/chat/completions", asked, answer, models={"m": ModelPrice(input="$1", output="$1")}
    )
    assert spent == Decimal(dollars)
