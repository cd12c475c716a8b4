"""What looks like an LLM call to a host that nobody meters goes out, and the report says so."""

import httpx
import pytest

import x402guard.httpx2
from tests.support.merchant import client, make_guard
from x402guard import AsyncGuardedTransport, ConfigError, Guard, GuardedTransport, Metering

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
