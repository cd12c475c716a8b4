"""What looks like an LLM call to a host that nobody meters goes out, and the report says so."""

import httpx
import pytest

import x402guard.httpx2
from tests.support.merchant import client, make_guard
from x402guard import (
    AsyncGuardedTransport,
    ConfigError,
    Guard,
    GuardedTransport,
    Metering,
    PaymentRefused,
    Policy,
    Seller,
)

LOCAL = "http://127.0.0.1:8000/v1/chat/completions"


def answer(request):
    return httpx.Response(200, json={"usage": {"prompt_tokens": 9, "completion_tokens": 9}})


def unmetered(session):
    return [event["place"] for event in session.report().to_dict()["events"] if event["event"] == "unmetered"]


@pytest.mark.parametrize("metering", [None, Metering(endpoints={"http://127.0.0.1:8001/v1": "openai"})])
def test_it_stands_in_the_report_once_a_host(metering):
    with make_guard(metering=metering) as guard, guard.session("s", budget="$1") as session:
        http = client(session, answer)
        for url in (LOCAL, LOCAL, LOCAL.replace("127.0.0.1", "localhost"), "https://shop.example/documents/1"):
            assert http.post(url, json={"model": "gpt-4o"}).status_code == 200
        assert unmetered(session) == ["127.0.0.1:8000/v1/chat/completions", "localhost:8000/v1/chat/completions"]
        text = " ".join(session.report().to_text().split())
        assert "unmetered 127.0.0.1:8000/v1/chat/completions looks like an LLM call" in text
        assert session.spent == 0


def test_what_is_said_to_be_free_is_not_spoken_of():
    metering = Metering(free=["http://127.0.0.1:8000/*"])
    with make_guard(metering=metering) as guard, guard.session("s", budget="$1") as session:
        client(session, answer).post(LOCAL, json={"model": "gpt-4o"})
        assert unmetered(session) == []


@pytest.mark.parametrize(
    ("url", "body", "fix"),
    [
        (LOCAL, {"model": "m", "messages": []}, 'Metering(endpoints={"http://127.0.0.1:8000/v1": "openai"})'),
        (
            "https://llm.example/api/v1/messages",
            {"model": "m", "messages": [1]},
            '{"https://llm.example/api": "anthropic"}',
        ),
        ("https://llm.example/v2/chat", {"model": "m", "messages": [1]}, '{"https://llm.example": "cohere"}'),
        ("https://vertex.example/models/gemini-3:generateContent", {"contents": []}, '"openai"}'),
    ],
)
def test_a_careful_policy_refuses_an_llm_call_to_an_unknown_host(url, body, fix):
    with make_guard(policy=Policy.careful()) as guard, guard.session("s", budget="$1") as session:
        sent = []
        http = client(session, lambda request: sent.append(request) or answer(request))
        with pytest.raises(PaymentRefused, match=r"policy\.unknown_llm_hosts") as refused:
            http.post(url, json=body)
        assert refused.value.rule == "unknown_llm_host"
        assert fix in str(refused.value)
        assert (sent, session.held) == ([], 0)
        assert http.post(url, json={"to": "bob", "text": "hi"}).status_code == 200  # another API with such a path
    base, _, provider = fix.partition("={")[2].rstrip(")}").partition(": ")
    if base:
        endpoints = {base.strip('"{'): provider.strip('"')}
        with make_guard(policy=Policy.careful(), metering=Metering(endpoints=endpoints)) as guard:
            with guard.session("s", budget="$1") as session, pytest.raises(PaymentRefused, match="model"):
                client(session, answer).post(url, json=body)  # metered now: no such model


def test_a_seller_of_chats_that_the_owner_names_is_no_unknown_host():
    for named in ({"hosts": ["llm.example"]}, {"sellers": {"llm.example": Seller(payees="any", daily="$1")}}):
        with make_guard(policy=Policy.careful(**named)) as guard, guard.session("s", budget="$1") as session:
            sold = client(session, answer).post("https://llm.example/v1/chat/completions", json={"messages": [1]})
            assert sold.status_code == 200


def test_a_wrong_transport_is_named_by_its_library_whatever_an_sdk_calls_its_classes():
    import groq
    import httpx2
    import openai

    assert groq.Groq, openai.OpenAI  # each renames the classes of one library as its own
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(ConfigError, match=r"is not a httpx\.BaseTransport; for httpx\.AsyncClient"):
            GuardedTransport(session, httpx2.HTTPTransport())
        with pytest.raises(ConfigError, match=r"is not a httpx2\.BaseTransport; for httpx2\.AsyncClient"):
            x402guard.httpx2.GuardedTransport(session, httpx.HTTPTransport())


def test_the_owner_is_told_once_a_host():
    notices = []
    with make_guard(on_notice=notices.append) as guard, guard.session("s", budget="$1") as session:
        for _ in range(3):
            client(session, answer).post(LOCAL, json={"model": "m", "messages": []})
    assert [(each.kind, each.facts["place"]) for each in notices if each.kind == "unmetered"] == [
        ("unmetered", "127.0.0.1:8000/v1/chat/completions")
    ]


def test_an_address_is_no_base_url_and_a_slip_of_the_pen_no_provider():
    with pytest.raises(ConfigError, match="write the base URL"):
        Metering(endpoints={LOCAL: "openai"})
    with pytest.raises(ConfigError, match="did you mean 'openai'"):
        Metering(endpoints={"http://127.0.0.1:8000/v1": "opnai"})


def test_a_client_of_the_other_library_or_kind_is_told_what_it_takes():
    import anyio
    import httpx2

    with Guard(ledger="memory://") as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(ConfigError, match=r"client of httpx2 use x402guard\.httpx2\.GuardedTransport"):
            httpx2.Client(transport=GuardedTransport(session)).get("https://a.example")
        with pytest.raises(ConfigError, match=r"client of httpx use x402guard\.GuardedTransport"):
            httpx.Client(transport=x402guard.httpx2.GuardedTransport(session)).get("https://a.example")
        with pytest.raises(ConfigError, match="use GuardedTransport"):
            httpx.Client(transport=AsyncGuardedTransport(session)).get("https://a.example")

        async def blocking_in_async():
            async with httpx.AsyncClient() as http:
                http._transport = GuardedTransport(session)
                try:
                    await http.get("https://a.example")
                finally:
                    http._transport = httpx.AsyncHTTPTransport()

        with pytest.raises(ConfigError, match="use AsyncGuardedTransport"):
            anyio.run(blocking_in_async)
