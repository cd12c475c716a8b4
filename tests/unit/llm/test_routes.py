"""Which request is an LLM call: host and path decide the provider and the shape; what nobody can price is refused."""

from decimal import Decimal

import httpx
import pytest

from x402guard import Metering
from x402guard.http.logical import LogicalRequest
from x402guard.http.request import Incoming, describe_request
from x402guard.ledger.authorize import Refusal
from x402guard.llm.meter import FixedPrice, Meter, Unmetered, classify
from x402guard.llm.settings import place_of
from x402guard.vendors.regions import region_factor
from x402guard.vendors.routes import Route, find_endpoint

OPENAI = "https://api.openai.com"
GEMINI = "https://generativelanguage.googleapis.com/v1beta/models/gemini-2.5-pro"
VERTEX = "projects/p/locations/us-central1/publishers/google/models/gemini-2.5-pro"
AZURE = "https://myres.openai.azure.com/openai"
CHAT = "/v1/chat/completions"


def classified(url, method="POST", **settings):
    """What a request is, its URL put in shape by httpx first, as on its way through the transport."""
    request = httpx.Request(method, url)
    facts = describe_request(Incoming.of(request, LogicalRequest("https://origin:443")), b"")
    return classify(Meter(Metering(**settings), book=None, counter=None), facts.method, facts.host, facts.url)


def shape(found):
    assert isinstance(found, Route), found
    return found.provider, found.flavour, found.model


ROUTES = [
    (f"{OPENAI}/v1/chat/completions", ("openai", "chat", None)),
    (f"{OPENAI}/v1/completions", ("openai", "completions", None)),
    (f"{OPENAI}/v1/responses", ("openai", "responses", None)),
    (f"{OPENAI}/v1/embeddings", ("openai", "embeddings", None)),
    ("https://eu.api.openai.com/v1/chat/completions", ("openai", "chat", None)),
    ("https://api.anthropic.com/v1/messages", ("anthropic", "messages", None)),
    ("https://api.anthropic.com/v1/messages?beta=true", ("anthropic", "messages", None)),
    (f"{GEMINI}:generateContent", ("google", "gemini", "gemini-2.5-pro")),
    (f"{GEMINI}:streamGenerateContent?alt=sse", ("google", "gemini", "gemini-2.5-pro")),
    (f"{GEMINI}:embedContent", ("google", "gemini_embed", "gemini-2.5-pro")),
    (f"{GEMINI}:batchEmbedContents", ("google", "gemini_embed", "gemini-2.5-pro")),
    ("https://generativelanguage.googleapis.com/v1beta/openai/chat/completions", ("google", "chat", None)),
    ("https://generativelanguage.googleapis.com/v1beta/openai/embeddings", ("google", "embeddings", None)),
    (f"https://aiplatform.googleapis.com/v1/{VERTEX}:generateContent", ("google", "gemini", "gemini-2.5-pro")),
    (
        f"https://us-central1-aiplatform.googleapis.com/v1/{VERTEX}:streamGenerateContent",
        ("google", "gemini", "gemini-2.5-pro"),
    ),
    (
        f"https://us-central1.aiplatform.googleapis.com/v1/{VERTEX}:generateContent",
        ("google", "gemini", "gemini-2.5-pro"),
    ),
    ("https://api.mistral.ai/v1/chat/completions", ("mistral", "chat", None)),
    ("https://api.mistral.ai/v1/fim/completions", ("mistral", "completions", None)),
    ("https://codestral.mistral.ai/v1/fim/completions", ("mistral", "completions", None)),
    ("https://api.mistral.ai/v1/embeddings", ("mistral", "embeddings", None)),
    ("https://api.cohere.com/v2/chat", ("cohere", "cohere", None)),
    ("https://api.cohere.ai/v2/chat", ("cohere", "cohere", None)),
    ("https://api.cohere.com/v2/embed", ("cohere", "cohere_embed", None)),
    ("https://api.cohere.com/v1/embed", ("cohere", "cohere_embed", None)),
    ("https://api.groq.com/openai/v1/chat/completions", ("groq", "chat", None)),
    ("https://api.groq.com/openai/v1/responses", ("groq", "responses", None)),
    ("https://api.deepseek.com/chat/completions", ("deepseek", "chat", None)),
    ("https://api.deepseek.com/v1/chat/completions", ("deepseek", "chat", None)),
    ("https://api.deepseek.com/beta/completions", ("deepseek", "completions", None)),
    ("https://openrouter.ai/api/v1/chat/completions", ("openrouter", "chat", None)),
    ("https://openrouter.ai/api/v1/completions", ("openrouter", "completions", None)),
    (f"{AZURE}/deployments/my-gpt/chat/completions?api-version=2024-10-21", ("azure", "chat", "my-gpt")),
    (f"{AZURE}/deployments/my-gpt/completions", ("azure", "completions", "my-gpt")),
    (f"{AZURE}/deployments/my-gpt/embeddings", ("azure", "embeddings", "my-gpt")),
    (f"{AZURE}/deployments/m%20g/chat/completions", ("azure", "chat", "m g")),
    (f"{AZURE}/v1/chat/completions", ("azure", "chat", None)),
    (f"{AZURE}/responses?api-version=preview", ("azure", "responses", None)),
    ("https://r.services.ai.azure.com/models/chat/completions", ("azure", "chat", None)),
    ("https://r.services.ai.azure.com/anthropic/v1/messages", ("azure", "messages", None)),
    ("https://r.cognitiveservices.azure.com/openai/deployments/d/chat/completions", ("azure", "chat", "d")),
    ("https://api.x.ai/v1/chat/completions", ("x-ai", "chat", None)),
    ("https://api.together.xyz/v1/chat/completions", ("together", "chat", None)),
    ("https://api.fireworks.ai/inference/v1/chat/completions", ("fireworks", "chat", None)),
    ("https://api.cerebras.ai/v1/chat/completions", ("cerebras", "chat", None)),
    ("https://api.perplexity.ai/chat/completions", ("perplexity", "chat", None)),
    ("https://api.moonshot.ai/v1/chat/completions", ("moonshotai", "chat", None)),
    ("https://api.novita.ai/openai/v1/chat/completions", ("novita", "chat", None)),
    ("https://api.z.ai/api/paas/v4/chat/completions", ("zai", "chat", None)),
]


@pytest.mark.parametrize(("url", "expected"), ROUTES, ids=[url for url, _ in ROUTES])
def test_host_and_path_name_provider_shape_and_model(url, expected):
    found = classified(url)
    assert shape(found) == expected
    assert found.streams == (":streamGenerateContent" in url)


@pytest.mark.parametrize(
    "url",
    [
        "https://API.OPENAI.COM/v1/chat/completions",
        "HTTPS://Api.OpenAI.com/v1/chat/completions",
        "https://api.openai.com:443/v1/chat/completions",
        "https://api.openai.com:8443/v1/chat/completions",
        "http://api.openai.com/v1/chat/completions",
        "https://api.openai.com/v1/chat/completions/",
        "https://api.openai.com//v1//chat/completions",
        "https://api.openai.com/v1/files/../chat/completions",
        "https://user:pass@api.openai.com/v1/chat/completions",
    ],
)
def test_another_way_to_write_the_same_address_is_metered_all_the_same(url):
    assert shape(classified(url)) == ("openai", "chat", None)


@pytest.mark.parametrize(
    ("url", "flavour"),
    [
        ("https://api.openai.com./v1/chat/completions", "chat"),
        ("https://api.openai.com.:8443/v1/chat/completions", "chat"),
        (f"https://us-central1-aiplatform.googleapis.com:8443/v1/{VERTEX}:generateContent", "gemini"),
        ("https://api.openai.com/v1/%63hat/completions", "chat"),
        ("https://api.openai.com/v1/chat%2Fcompletions", "chat"),
        ("https://api.openai.com/%76%31/responses", "responses"),
        ("https://api.openai.com/v1/x/%2e%2e/chat/completions", "chat"),
    ],
)
def test_what_a_server_may_read_as_a_paid_address_is_metered_as_that_or_refused(url, flavour):
    found = classified(url)
    assert found is not None, "it would be sent, and not counted"
    assert isinstance(found, Refusal) or found.flavour == flavour


@pytest.mark.parametrize(
    "host",
    [
        "api.openai.com.evil.example",
        "evilapi.openai.com",
        "openai.com",
        "api-openai.com",
        "api.openai.co",
        "evil-openai.azure.com",
        "openai.azure.com",
        "aiplatform.googleapis.com.evil.example",
        "us-central1-aiplatform.googleapis.com.evil.example",
        "evil.example/us-central1-aiplatform.googleapis.com",
        "xopenrouter.ai",
    ],
)
def test_a_host_that_only_looks_alike_is_no_provider(host):
    assert isinstance(classified(f"https://{host}{CHAT}"), Unmetered)


UNPRICED = [
    (OPENAI, ["/v1/images/generations", "/v1/audio/speech", "/v1/batches", "/v1/files", "/v1/fine_tuning/jobs", "/v1/videos"]),
    (OPENAI, ["/v1/threads/t/runs", "/v1/assistants", "/v1/realtime/sessions", "/", "/v1", "/v1/chat", "/v1/chat/completions/x"]),
    ("https://api.anthropic.com", ["/v1/complete", "/v1/files", "/messages", "/x/v1/messages"]),
    (GEMINI, [":predict", ":generateAnswer", "", ":rawPredict"]),
    (
        "https://us-east5-aiplatform.googleapis.com",
        ["/v1/projects/p/locations/l/publishers/mistralai/models/mistral-large:rawPredict"],
    ),
    ("https://api.mistral.ai", ["/v1/agents/completions", "/v1/ocr", "/v1/conversations"]),
    ("https://api.cohere.com", ["/v1/chat", "/v1/generate", "/v1/classify", "/compatibility/v1/chat/completions"]),
    ("https://api.groq.com", ["/openai/v1/audio/translations", "/openai/v1/batches"]),
    ("https://openrouter.ai", ["/api/v1/credits/coinbase"]),
    (AZURE, ["/deployments/d/images/generations", "/deployments/d/audio/speech", "/batches"]),
]  # fmt: skip


@pytest.mark.parametrize("url", [base + path for base, paths in UNPRICED for path in paths])
def test_a_path_that_nobody_can_price_is_refused_with_the_line_that_allows_it(url):
    refusal = classified(url)
    assert isinstance(refusal, Refusal)
    assert refusal.rule == "unpriced"
    address = f"https://{place_of(httpx.URL(url).host, httpx.URL(url).path)}"
    assert f'Metering(fixed_prices={{"{address}": ' in refusal.reason
    assert f'Metering(free=["{address}"])' in refusal.reason


@pytest.mark.parametrize("url", [f"{OPENAI}/v1/images/generations", f"{AZURE}/batches", f"{GEMINI}:predict"])
def test_what_a_refusal_tells_to_write_is_what_helps(url):
    advised = classified(url).reason.partition('free=["')[2].partition('"')[0]
    assert classified(url, free=[advised]) is None
    assert classified(url, fixed_prices={advised: "$0.04"}).amount == 40_000_000


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
def test_methods_that_only_look_or_delete_cost_nothing(method):
    assert classified(f"{OPENAI}/v1/chat/completions", method) is None
    assert classified(f"{OPENAI}/v1/files", method) is None


@pytest.mark.parametrize("method", ["post", "PUT", "PATCH", "QUERY"])
def test_any_other_method_may_cost(method):
    assert isinstance(classified(f"{OPENAI}/v1/files", method), Refusal)
    assert shape(classified(f"{OPENAI}/v1/responses", method)) == ("openai", "responses", None)


@pytest.mark.parametrize(
    "url",
    [
        f"{OPENAI}/v1/moderations",
        f"{OPENAI}/v1/responses/input_tokens",
        f"{OPENAI}/v1/responses/resp_1/cancel",
        "https://api.anthropic.com/v1/messages/count_tokens",
        f"{GEMINI}:countTokens",
        "https://api.mistral.ai/v1/chat/moderations",
        "https://api.cohere.com/v1/tokenize",
    ],
)
def test_what_providers_give_away_passes(url):
    assert classified(url) is None


# The owner's word: endpoints, free places, fixed prices.

METERED_HOSTS = {
    "http://127.0.0.1:8000/v1": "openai",
    "https://llm.example/gateway/v1": "groq",
    "https://llm.example/gateway/v1/special": "deepseek",
    "https://claude.example/proxy": "anthropic",
    "https://gemini.example": "google",
    "https://mine.example:9443": "mine",
    "http://[::1]:8000/v1": "openai",
    "https://API.Upper.example/v1/": "openai",
}

CONFIGURED = [
    ("http://127.0.0.1:8000/v1/chat/completions", ("openai", "chat", None)),
    ("http://127.0.0.1:8000/v1/responses", ("openai", "responses", None)),
    ("https://llm.example/gateway/v1/chat/completions", ("groq", "chat", None)),
    ("https://llm.example/gateway/v1/special/chat/completions", ("deepseek", "chat", None)),
    ("https://claude.example/proxy/v1/messages", ("anthropic", "messages", None)),
    ("https://gemini.example/v1beta/models/gemini-2.5-pro:generateContent", ("google", "gemini", "gemini-2.5-pro")),
    ("https://mine.example:9443/v1/chat/completions", ("mine", "chat", None)),
    ("http://[::1]:8000/v1/embeddings", ("openai", "embeddings", None)),
    ("https://api.upper.example/v1/chat/completions", ("openai", "chat", None)),
    (f"{OPENAI}/v1/chat/completions", ("openai", "chat", None)),
]


@pytest.mark.parametrize(("url", "expected"), CONFIGURED)
def test_a_configured_base_url_is_metered_by_its_longest_path(url, expected):
    assert shape(classified(url, endpoints=METERED_HOSTS)) == expected


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8000/health",
        "http://127.0.0.1:8000/v10/chat/completions",
        "http://127.0.0.1:8001/v1/chat/completions",
        "https://llm.example/other",
        "https://mine.example/v1/chat/completions",
    ],
)
def test_what_lies_beside_a_configured_base_url_is_none_of_ours(url):
    assert isinstance(classified(url, endpoints=METERED_HOSTS), Unmetered | None)
    assert classified(url, endpoints=METERED_HOSTS, free=[f"{url}*"]) is None  # said to be free, it is not spoken of


@pytest.mark.parametrize(
    "path", ["//gateway/v1/chat/completions", "/gateway//v1/responses", "/%67ateway/v1/chat/completions"]
)
def test_a_configured_base_url_is_not_left_by_writing_it_in_another_way(path):
    assert classified(f"https://llm.example{path}", endpoints=METERED_HOSTS) is not None


def test_a_configured_endpoint_comes_before_what_is_known_of_its_host():
    endpoints = {"https://api.openai.com/v1/mine": "mine"}
    assert shape(classified(f"{OPENAI}/v1/mine/chat/completions", endpoints=endpoints))[0] == "mine"
    assert shape(classified(f"{OPENAI}/v1/chat/completions", endpoints=endpoints))[0] == "openai"


FREE = ["https://api.openai.com/v1/files", "https://api.openai.com/v1/vector_stores*", "http://127.0.0.1:8000/v1/x/"]


@pytest.mark.parametrize(
    ("url", "free"),
    [
        (f"{OPENAI}/v1/files", True),
        (f"{OPENAI}/v1/files/", True),
        (f"{OPENAI}/v1/files?purpose=x", True),
        (f"{OPENAI}/v1/files/f1/content", False),
        (f"{OPENAI}/v1/files2", False),
        (f"{OPENAI}/v1/vector_stores", True),
        (f"{OPENAI}/v1/vector_stores/v/search", True),
        (f"{OPENAI}:8443/v1/files", False),
        ("https://eu.api.openai.com/v1/files", False),
        ("http://127.0.0.1:8000/v1/x", True),
        (f"{OPENAI}/v1/vector_stores/../images/generations", False),
        (f"{OPENAI}/v1/vector_stores/%2e%2e/images/generations", False),
    ],
)
def test_a_place_is_free_by_its_whole_address_or_by_all_that_follows_a_star(url, free):
    found = classified(url, free=FREE, endpoints={"http://127.0.0.1:8000/v1": "openai"})
    assert (found is None) == free
    assert free or isinstance(found, Refusal)


def test_a_place_with_a_fixed_price_costs_that_whatever_it_would_cost_else():
    prices = {f"{OPENAI}/v1/images/generations": "$0.04", f"{OPENAI}/v1/chat*": "0.5", f"{OPENAI}/v1/videos": 2}
    images = classified(f"{OPENAI}/v1/images/generations", fixed_prices=prices)
    assert images == FixedPrice("openai", "api.openai.com/v1/images/generations", 40_000_000)
    assert classified(f"{OPENAI}/v1/chat/completions", fixed_prices=prices).amount == 500_000_000
    assert classified(f"{OPENAI}/v1/videos", fixed_prices=prices).amount == 2_000_000_000
    assert shape(classified(f"{OPENAI}/v1/responses", fixed_prices=prices)) == ("openai", "responses", None)
    assert classified(f"{OPENAI}/v1/videos", "GET", fixed_prices=prices) is None


REGIONS = {  # documented hosts → the factor of a model that has one
    "openai gpt-6-sol 1.1": ["us", "eu", "ae", "au", "in", "jp", "ca", "sg", "kr", "gb"],
    "google gemini-3.5-flash 1.1": ["us-central1", "europe-west4", "asia-northeast1", "me-central2"],
}
HOSTS_OF_REGIONS = [
    *(("openai", f"{region}.api.openai.com", "gpt-6-sol", "1.1") for region in REGIONS["openai gpt-6-sol 1.1"]),
    *(("openai", f"{region}.api.openai.com", "gpt-5.2", "1") for region in REGIONS["openai gpt-6-sol 1.1"]),
    ("openai", "mtls-us.api.openai.com", "gpt-6-sol", "1.1"),
    ("openai", "gov.api.openai.com", "gpt-3.5-turbo", "1.1"),
    *(
        ("google", f"{region}-aiplatform.googleapis.com", "gemini-3.5-flash", "1.1")
        for region in REGIONS["google gemini-3.5-flash 1.1"]
    ),
    ("google", "aiplatform.eu.rep.googleapis.com", "claude-sonnet-4-5@20250929", "1.1"),
    ("google", "us-east5-aiplatform.googleapis.com", "claude-opus-4-1@20250805", "1"),
    ("google", "us-central1-aiplatform.mtls.googleapis.com", "gemini-3.8-flash", "1.1"),
    ("google", "us-central1-aiplatform.googleapis.com", "gemini-2.5-pro", "1"),
    ("google", "aiplatform.googleapis.com", "gemini-3.8-flash", "1"),
    ("mistral", "api.eu.mistral.ai", "mistral-large-latest", "1.1"),
    ("mistral", "api.us.mistral.ai", "codestral-latest", "1.1"),
    ("x-ai", "us.api.x.ai", "grok-4.6", "1.1"),
    ("x-ai", "eu-west-1.api.x.ai", "grok-4.6", "1.1"),
    ("together", "us-api.together.ai", "openai/gpt-oss-120b", "1.25"),
    ("together", "ca-api.together.ai", "openai/gpt-oss-120b", "1.25"),
    ("fireworks", "us.api.fireworks.ai", "any", "1"),
    ("openrouter", "eu.openrouter.ai", "any", "1"),
    ("aws", "bedrock-runtime.eu-central-1.amazonaws.com", "any", "1"),
    ("aws", "bedrock-runtime-fips.us-gov-west-1.amazonaws.com", "any", "1"),
    ("aws", "bedrock-mantle.us-east-1.api.aws", "any", "1"),
    ("anthropic", "aws-external-anthropic.us-east-1.api.aws", "any", "1"),
]


@pytest.mark.parametrize(("provider", "host", "model", "factor"), HOSTS_OF_REGIONS)
def test_a_documented_host_of_a_region_is_metered_with_its_factor(provider, host, model, factor):
    endpoint = find_endpoint(host, "/v1/chat/completions", ())
    assert endpoint is not None
    assert endpoint.provider == provider
    assert region_factor(endpoint, model) == Decimal(factor)
