"""The dearest tier that a project may have, gateways that choose an endpoint, models that answer under other names."""

import json
from decimal import Decimal

import pytest

from tests.support.llm_provider import CHAT, SYNC, Answer, Provider, ask, completion, metered
from tests.support.llm_replies import posted, used
from x402guard import Policy, PolicyDenied, Rule

AZURE = "https://res.openai.azure.com/openai/deployments/gpt-4o/chat/completions?api-version=2024-10-21"
OPENROUTER = "https://openrouter.ai/api/v1/chat/completions"
VERTEX = "https://aiplatform.googleapis.com/v1/projects/p/locations/global/publishers/google/models/gemini-3.8-flash-tts:generateContent"
ROUTED = ask(model="openai/gpt-4o", max_tokens=100, max_completion_tokens=None)


def held_for(url, body, headers=(), **settings):
    with metered(**settings) as session:
        provider = Provider(session)
        SYNC.post(session, provider, body, url=url, headers=headers)
        return provider.held[0]


@pytest.mark.parametrize(
    ("asked", "context", "dearest"),
    [
        (None, {}, True),
        ("auto", {}, True),
        ("priority", {}, True),
        ("default", {}, False),
        ("flex", {}, False),
        (None, {"service_tier": "default"}, False),
        (None, {"processing": "batch"}, False),
        ("auto", {"service_tier": "default"}, True),
    ],
)
def test_a_call_that_names_no_tier_is_held_at_the_dearest_that_its_project_may_have(asked, context, dearest):
    """gpt-4o: $4.25 and $17.00 with priority, $2.50 and $10.00 without."""
    held = held_for(CHAT, ask(service_tier=asked), price_context=context)
    batch = Decimal("0.5") if context == {"processing": "batch"} else 1
    tokens = (held / batch - Decimal("0.001")) / Decimal("0.0000025")
    if dearest:
        tokens = (held - Decimal("0.0017")) / Decimal("0.00000425")
    assert tokens == int(tokens) < 60  # of "hi", and the frame of a message


TIERS = [
    ("priority", "0.00017"),
    ("default", "0.0001"),
    (None, "0.0001"),
    ("turbo", "0.00025"),
    ("scale", "0.00025"),
    ("ultrafast", "0.0006"),
]


@pytest.mark.parametrize(("said", "cost"), TIERS)
def test_the_answers_tier_is_billed_and_one_without_a_price_at_the_dearest_of_the_provider(said, cost):
    with metered(price_context={}) as session:
        answer = completion(service_tier=said) if said else completion()
        _, report = posted(session, CHAT, ask(), answer)
        assert (report["spent"], report["state"]) == (cost, "open")
        unknown = said in ("turbo", "scale", "ultrafast")
        assert Decimal(report["evidence"]["estimate" if unknown else "provider_usage"]) == Decimal(cost)


@pytest.mark.parametrize("by", ["header", "body", "body, in Google's spelling"])
def test_geminis_priority_is_held_for_by_header_and_by_body(by):
    body = {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 100}}
    plain = held_for(VERTEX, body)
    headers = {"X-Vertex-AI-LLM-Shared-Request-Type": "priority"} if by == "header" else {}
    tier = {"body": {"serviceTier": "priority"}, "header": {}}.get(by, {"serviceTier": "SERVICE_TIER_PRIORITY"})
    assert held_for(VERTEX, body | tier, headers) == plain * Decimal("1.8")


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (None, (Decimal("2.5"), 10)),
        ({"order": ["Azure"]}, (Decimal("2.5"), 10)),
        ({"max_price": {"prompt": 1, "completion": 99}}, (1, 10)),
        ({"max_price": {"prompt": "cheap", "completion": -1}}, (Decimal("2.5"), 10)),
        ({"max_price": "none"}, (Decimal("2.5"), 10)),
    ],
)
def test_no_endpoint_dearer_than_the_hold_may_answer_through_openrouter(given, sent):
    with metered() as session:
        provider = Provider(session)
        SYNC.post(session, provider, ROUTED | ({"provider": given} if given else {}), url=OPENROUTER)
        [body] = provider.bodies
        caps = body["provider"]["max_price"]
        assert (caps["prompt"], caps["completion"]) == pytest.approx(tuple(map(float, sent)))
        assert body["provider"].get("order") == (given or {}).get("order")


@pytest.mark.parametrize(
    ("asked", "named", "cost"),
    [
        ("gpt-4o-mini", "gpt-4o-2024-08-06", "0.0001"),  # billed as gpt-4o: 20 x 2,500 + 5 x 10,000
        ("gpt-4o-mini", "gpt-4o-mini-2024-07-18", "0.000006"),  # 20 x 150 + 5 x 600
        ("gpt-4o", "gpt-4o-mini", "0.0001"),
        ("gpt-4o-mini", "a-name-of-its-own", "0.000006"),
        ("gpt-4o-mini", None, "0.000006"),
    ],
)
def test_an_answer_that_names_a_dearer_model_is_billed_as_that_one(asked, named, cost):
    with metered() as session:
        _, report = posted(session, CHAT, ask(model=asked), completion(model=named))
        assert report["spent"] == cost


FILTERED = {"error": {"code": "content_filter", "message": "The prompt was filtered.", "status": 400}}


@pytest.mark.parametrize(
    ("body", "billed"),
    [(FILTERED, True), ({"error": {"message": "?"}}, True), (b"no json", True),
     ({"error": {"code": "invalid_request", "message": "n is wrong"}}, False)],
)  # fmt: skip
def test_a_400_of_azure_costs_its_input_unless_it_says_that_nothing_was_read(body, billed):
    with metered() as session:
        provider = Provider(session, Answer.of(body, 400))
        response, chunks = SYNC.post(session, provider, ask(), url=AZURE)
        said = b"".join(chunks)
        assert (response.status_code, said) == (400, body if isinstance(body, bytes) else json.dumps(body).encode())
        [held] = provider.held
        assert session.spent == (held - Decimal("0.001") if billed else 0)  # without the 100 tokens of output
        assert session.held == 0


def test_a_400_of_others_costs_nothing():
    with metered() as session:
        SYNC.post(session, Provider(session, Answer.of(FILTERED, 400)), ask())
        assert session.spent == 0


@pytest.mark.parametrize("match", ["gpt-4o", "openai/gpt-4o", "GPT-4o", "POST openrouter.ai/*"])
def test_a_rule_about_a_model_sees_it_behind_a_gateways_name(match):
    policy = Policy(rules=[Rule(name="no 4o", action="deny", match=match)], breaker=None)
    with metered(guard={"policy": policy}) as session:
        provider = Provider(session)
        with pytest.raises(PolicyDenied) as caught:
            SYNC.post(session, provider, ROUTED, url=OPENROUTER)
        assert (caught.value.rule, provider.requests) == ("no 4o", [])


def test_a_rule_about_the_model_that_a_dated_or_named_one_is_priced_as_sees_it():
    policy = Policy(rules=[Rule(name="no 4o", action="deny", match="gpt-4o")], breaker=None)
    for url, model, settings in ((CHAT, "gpt-4o-2024-08-06", {}), (AZURE, "mine", {"aliases": {"gpt-4o": "gpt-4o"}})):
        with metered(guard={"policy": policy}, **settings) as session, pytest.raises(PolicyDenied):
            SYNC.post(session, Provider(session), ask(model=model), url=url)


def test_an_unstated_usage_after_a_priority_call_costs_what_was_held():
    with metered(price_context={}) as session:
        provider = Provider(session, Answer.of({"choices": []}))
        SYNC.post(session, provider, ask())
        assert session.spent == provider.held[0]


def test_a_gateways_own_charge_is_booked_as_it_states_it():
    with metered() as session:
        _, report = posted(session, OPENROUTER, ROUTED, completion({**used(20, 5), "cost": 0.31}))
        assert (report["spent"], report["terminated_by"]) == ("0.31", None)
