"""The two-line drop-in: every client of the process is guarded, each request in its own session, and all of it is undone."""

import asyncio
import contextlib
import threading

import anthropic
import anyio
import cohere
import httpx
import httpx2
import openai
import pytest
from google import genai
from google.genai.types import HttpOptions
from langchain_openai import ChatOpenAI
from mistralai.client import Mistral

import x402guard
import x402guard.httpx2
from tests.support import sdks
from tests.support.merchant import URL, Shop, make_guard
from tests.support.sdks import HI, LARGE, LIMITED, MINI, TEXT, ask_openai, calls, dollars, metering
from x402guard import BudgetExhausted, Guard
from x402guard.testing import Completion

running, server, install = sdks.running, sdks.server, sdks.install

pytestmark = [
    pytest.mark.xdist_group("install"),
    pytest.mark.filterwarnings(sdks.ALL_LOADED),
    pytest.mark.filterwarnings("ignore:The model 'claude-sonnet-4-5' is deprecated:DeprecationWarning"),
]

UNLIMITED = {"model": "gpt-4o", "messages": HI}
LIBRARIES = pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
OURS = {httpx: x402guard, httpx2: x402guard.httpx2}


# ---- which clients ----


def test_the_two_lines_guard_a_client_made_before_and_one_made_after(install, server):
    with openai.OpenAI() as before:
        assert ask_openai(before) == TEXT
        session = install()
        with openai.OpenAI() as after:
            assert [ask_openai(before), ask_openai(after)] == [TEXT, TEXT]
            assert (session.spent, session.held, calls(session)) == (2 * MINI, 0, 2)  # 27.6 millionths
            x402guard.uninstall()
            assert [ask_openai(before), ask_openai(after)] == [TEXT, TEXT]
    assert (session.spent, len(server.calls)) == (2 * MINI, 5)


class _Recording:
    """Adds to a transport of either library a list of what it sent."""

    def __init__(self):
        super().__init__(trust_env=False)
        self.seen = []

    def handle_request(self, request):
        self.seen.append(request)
        return super().handle_request(request)

    async def handle_async_request(self, request):
        self.seen.append(request)
        return await super().handle_async_request(request)


def recording(library, asynchronous):
    kind = library.AsyncHTTPTransport if asynchronous else library.HTTPTransport
    return type("Recording", (_Recording, kind), {})()


def post(client, url, **asked):
    """One chat over a bare client of either library and either kind; the answer."""
    path, body = f"{url}/v1/chat/completions", asked or LIMITED

    async def main():
        async with client as http:
            return await http.post(path, json=body)

    if isinstance(client, (httpx.AsyncClient, httpx2.AsyncClient)):
        return anyio.run(main)
    with client as http:
        return http.post(path, json=body)


WAYS = {
    "transport": lambda own: {"transport": own},
    "mount": lambda own: {"mounts": {"all://127.0.0.1": own}},
    "plain": lambda own: {},
}


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
@LIBRARIES
def test_every_client_is_guarded_whatever_it_sends_by(install, server, library, kind, way, made):
    session = install() if made == "after" else None
    own = recording(library, kind == "AsyncClient")
    client = getattr(library, kind)(trust_env=False, **WAYS[way](own))
    session = session or install()
    answer = post(client, server.base("openai"))
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    assert answer.extensions["x402guard"].model == "gpt-4o-mini"
    assert len(own.seen) == (0 if way == "plain" else 1)
    assert (session.spent, session.held) == (MINI, 0)


@LIBRARIES
def test_a_transport_that_is_none_of_the_librarys_family_goes_on_working(install, server, library):
    """Clients take whatever has the method; what worked before `install` has to work under it, and be guarded."""

    class Duck:
        def __init__(self):
            self.inner = library.HTTPTransport(trust_env=False)

        def handle_request(self, request):
            return self.inner.handle_request(request)

        def close(self):
            self.inner.close()

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.close()

    session = install()
    assert post(library.Client(transport=Duck(), trust_env=False), server.base("openai")).status_code == 200
    assert session.spent == MINI


VENDORS = {
    "anthropic": (
        lambda s: anthropic.Anthropic(api_key="k", base_url=s.base("anthropic")),
        lambda c: c.messages.create(model="claude-sonnet-4-5", messages=HI, max_tokens=100).content[0].text,
        dollars((20, "3"), (18, "15")),
    ),
    "google": (
        lambda s: genai.Client(api_key="k", http_options=HttpOptions(base_url=s.base("google"))),
        lambda c: c.models.generate_content(model="gemini-2.5-flash", contents="hi").text,
        dollars((20, "0.30"), (18, "2.50")),
    ),
    "mistral": (
        lambda s: Mistral(api_key="k", server_url=s.base("mistral")),
        lambda c: c.chat.complete(model="mistral-small-latest", messages=HI, max_tokens=100).choices[0].message.content,
        dollars((20, "0.15"), (18, "0.60")),
    ),
    "cohere": (
        lambda s: cohere.ClientV2(api_key="k", base_url=s.base("cohere")),
        lambda c: c.chat(model="command-a-03-2025", messages=HI, max_tokens=100).message.content[0].text,
        dollars((20, "2.50"), (18, "10")),
    ),
}


@contextlib.contextmanager
def closing(client):
    """Close a vendor's client, each of which has another way to it."""
    yield client
    if isinstance(client, cohere.ClientV2):
        client._client_wrapper.httpx_client.httpx_client.close()
    elif isinstance(client, Mistral):
        client.__exit__(None, None, None)
    else:
        client.close()


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_every_vendors_default_client_is_guarded(install, server, vendor, made):
    make, ask, cost = VENDORS[vendor]
    session = install() if made == "after" else None
    with closing(make(server)) as client:
        session = session or install()
        assert ask(client) == TEXT
        assert (session.spent, session.held, calls(session)) == (cost, 0, 1)


def test_langchain_is_guarded_both_ways(install):
    session = install()
    model = ChatOpenAI(model="gpt-4o-mini")

    async def main():
        text = (await model.ainvoke("hi")).content
        await model.root_async_client.close()
        return text

    assert [model.invoke("hi").content, anyio.run(main)] == [TEXT, TEXT]
    assert (session.spent, session.held) == (2 * MINI, 0)
    model.root_client.close()


def test_openais_aiohttp_client_is_one_of_httpx2s_and_guarded(install):
    session = install()

    async def main():
        async with openai.AsyncOpenAI(http_client=openai.DefaultAioHttpClient()) as client:
            return (await client.chat.completions.create(**LIMITED)).choices[0].message.content

    assert anyio.run(main) == TEXT
    assert (session.spent, session.held) == (MINI, 0)


def around(library, transport, **attributes):
    """A transport of somebody's own that sends by another: a retry, a cache."""
    methods = {name: staticmethod(getattr(transport, name)) for name in ("handle_request", "close")}
    outer = type("Outer", (library.BaseTransport,), methods)()
    vars(outer).update(attributes)
    return outer


@pytest.mark.parametrize("wrapped", [False, True], ids=["its transport", "inside a transport of its own"])
@LIBRARIES
def test_a_client_that_is_guarded_already_keeps_its_session_and_holds_once(install, running, server, library, wrapped):
    session = install()
    with running[1].session("own", budget="$1.00") as own:
        transport = OURS[library].GuardedTransport(own)
        if wrapped:
            transport = around(library, transport, _transport=transport)
        assert post(library.Client(transport=transport, trust_env=False), server.base("openai")).status_code == 200
    assert (own.spent, session.spent, calls(own), calls(session)) == (MINI, 0, 1, 0)


@LIBRARIES
def test_a_guard_that_nobody_can_see_from_outside_holds_nothing_twice(install, running, server, library):
    session = install()
    with running[1].session("own", budget="$1.00") as own:
        transport = around(library, OURS[library].GuardedTransport(own))
        assert post(library.Client(transport=transport, trust_env=False), server.base("openai")).status_code == 200
    assert (own.spent, session.spent, calls(own), calls(session)) == (MINI, 0, 1, 0)


def test_a_paid_api_is_paid_out_of_the_installed_session():
    shop = Shop()
    with make_guard() as guard, httpx.Client(transport=httpx.MockTransport(shop)) as http:
        session = x402guard.install(budget="$0.01", guard=guard)
        try:
            assert http.get(URL).json()["paid"] == 10_000
            with pytest.raises(BudgetExhausted):
                http.get(f"{URL}/2")
        finally:
            x402guard.uninstall()
        assert http.get(f"{URL}/3").status_code == 402
        assert (str(session.spent + session.held), shop.signed) == ("0.01", 10_000)


def test_our_own_way_to_a_chain_is_not_guarded(server, install):
    """A guarded request to an unpriced path of a metered host is refused; the chain reader's goes out."""
    url, session = server.base("openai") + "/rpc", install()
    with Guard(ledger="memory://", chains={"base-sepolia": url}, metering=metering(server)) as guard:
        assert guard.shell.chain.funds("eip155:84532", "0x" + "11" * 20, "0x" + "22" * 20) is None
    assert {call.path for call in server.calls} == {"/rpc"}
    asked = len(server.calls)
    with httpx.Client() as http, pytest.raises(x402guard.Unpriced):
        http.post(url)
    assert len(server.calls) == asked
    assert session.report().to_dict()["refusals"][0]["count"] == 1


# ---- without an output limit ----


@pytest.mark.parametrize("budget", ["$5.00", "$0.40"])
def test_gpt_4o_without_a_limit_completes_alone_and_three_at_once_in_threads(install, server, budget):
    session, together = install(budget), threading.Barrier(3)
    with openai.OpenAI() as client:
        assert ask_openai(client, **UNLIMITED) == TEXT
        server.reply = lambda call: together.wait(timeout=20) is not None and Completion()
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(ask_openai(client, **UNLIMITED))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [TEXT] * 3
    assert (session.spent, session.held, calls(session)) == (4 * LARGE, 0, 4)  # 920 millionths
    limits = sorted(call.body.get("max_completion_tokens", 16_384) for call in server.calls)
    # 16,384 tokens at $10 are $0.164: three fit into $5, and two into $0.40; the third takes a quarter of what is left
    assert limits[1:] == [16_384] * 3
    assert limits[0] == 16_384 if budget == "$5.00" else 1_024 <= limits[0] < 2_000


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_gpt_4o_without_a_limit_completes_three_at_once_in_tasks(install, server, stream):
    session, together = install(), threading.Barrier(3)
    server.reply = lambda call: together.wait(timeout=20) is not None and Completion()

    async def ask(client):
        answer = await client.chat.completions.create(**UNLIMITED, stream=stream)
        if not stream:
            return answer.choices[0].message.content
        return "".join([part.choices[0].delta.content or "" async for part in answer])

    async def main():
        async with openai.AsyncOpenAI() as client:
            return await asyncio.gather(*(ask(client) for _ in range(3)))

    assert asyncio.run(main()) == [TEXT] * 3
    assert (session.spent, session.held, calls(session)) == (3 * LARGE, 0, 3)  # 690 millionths
