"""Under the drop-in: whose session a request belongs to, what is left when it is undone, and what it warns of."""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import types
import warnings
from contextvars import ContextVar
from typing import Annotated

import anyio
import httpx
import httpx2
import openai
import pytest
from fastapi import Depends, FastAPI

import x402guard
from tests.support import sdks
from tests.support.command_line import forked
from tests.support.sdks import HI, LARGE, LIMITED, MINI, TEXT, UNTOUCHED, ask_openai, calls, seams
from x402guard import BudgetExhausted, ConfigError, Session, SessionClosed
from x402guard.guard.session import current_session
from x402guard.http.refusal_from import refusal_from
from x402guard.testing import Completion
from x402guard.testing.llm import PROVIDERS

running, server, install = sdks.running, sdks.server, sdks.install

pytestmark = [pytest.mark.xdist_group("install"), pytest.mark.filterwarnings(sdks.ALL_LOADED)]

COSTS = {"gpt-4o-mini": MINI, "gpt-4o": LARGE}


# ---- whose request it is ----


def get(app, *paths):
    """Get all paths at once, in process; the decoded answers in order."""

    async def main():
        answers = {}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as http:

            async def one(path):
                answers[path] = (await http.get(path)).raise_for_status().json()

            async with anyio.create_task_group() as tasks:
                for path in paths:
                    tasks.start_soon(one, path)
        return [answers[path] for path in paths]

    return anyio.run(main)


@pytest.mark.parametrize("handler", ["async", "sync"])
@pytest.mark.parametrize("kind", ["child", "session"])
def test_two_requests_of_a_web_server_at_once_have_each_its_own_session(install, running, server, kind, handler):
    installed, together = install(), threading.Barrier(2)
    server.reply = lambda call: together.wait(timeout=20) is not None and Completion()
    app, (_, guard) = FastAPI(), running

    def opened(model):
        opening = installed.child if kind == "child" else guard.session
        return opening(model, budget="$1.00")

    def told(own, text):
        return {"text": text, "id": own.id, "spent": str(own.spent), "calls": calls(own), "left": str(own.remaining)}

    @app.get("/async/{model}")
    async def ask_async(model: str):
        async with opened(model) as own, openai.AsyncOpenAI() as client:
            answer = await client.chat.completions.create(**LIMITED | {"model": model})
            return told(own, answer.choices[0].message.content)

    @app.get("/sync/{model}")
    def ask(model: str):
        with opened(model) as own, openai.OpenAI() as client:
            return told(own, ask_openai(client, **LIMITED | {"model": model}))

    answers = get(app, *(f"/{handler}/{model}" for model in COSTS))
    for answer, (model, cost) in zip(answers, COSTS.items(), strict=True):
        assert (answer["text"], answer["spent"], answer["calls"]) == (TEXT, f"{cost:f}", 1), model
        assert answer["left"] == f"{1 - cost:f}"
    assert answers[0]["id"] != answers[1]["id"]
    assert installed.spent == (MINI + LARGE if kind == "child" else 0)
    assert (calls(installed), installed.held, current_session()) == (2 if kind == "child" else 0, 0, None)


def test_a_dependency_that_enters_in_one_context_and_leaves_in_another(install, running):
    installed, app, (_, guard), made = install(), FastAPI(), running, []
    probe = ContextVar("probe")

    def payer():
        token = probe.set("here")
        with guard.session("request", budget="$1.00") as own:
            made.append(own)
            yield own
        with pytest.raises(ValueError, match="different Context"):
            probe.reset(token)

    @app.get("/ask")
    def ask(own: Annotated[Session, Depends(payer)]):
        with openai.OpenAI() as client:
            return {"bound": own.bind(ask_openai)(client), "spent": str(own.spent)}

    [answer] = get(app, "/ask")
    assert answer == {"bound": TEXT, "spent": f"{MINI:f}"}
    assert (installed.spent, current_session()) == (0, None)
    with pytest.raises(SessionClosed):
        made[0].innermost()


def test_an_asynchronous_dependency_is_the_handlers_context(install, running):
    installed, app, (_, guard) = install(), FastAPI(), running

    async def payer():
        async with guard.session("request", budget="$1.00") as own:
            yield own

    @app.get("/ask")
    async def ask(own: Annotated[Session, Depends(payer)]):
        async with openai.AsyncOpenAI() as client:
            await client.chat.completions.create(**LIMITED)
            return str(own.spent)

    assert get(app, "/ask") == [f"{MINI:f}"]
    assert (installed.spent, current_session()) == (0, None)


def in_thread(function, *arguments):
    """Run a function in a plain thread, which inherits no context; what it returned or raised."""
    outcome = []

    def run():
        try:
            outcome.append(function(*arguments))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=20)
    return outcome[0]


def test_a_plain_thread_pays_from_the_installed_session_unless_it_is_bound(install):
    installed = install()
    with openai.OpenAI() as client, installed.child("child", budget="$1.00") as child:
        assert in_thread(ask_openai, client) == TEXT
        assert (calls(child), calls(installed)) == (0, 1)
        assert in_thread(child.bind(ask_openai), client) == TEXT
        assert (calls(child), calls(installed)) == (1, 2)
        assert anyio.run(anyio.to_thread.run_sync, ask_openai, client) == TEXT  # it inherits
        assert (calls(child), calls(installed)) == (2, 3)
    assert (child.spent, installed.spent) == (2 * MINI, 3 * MINI)


def test_a_bound_thread_has_its_sessions_budget_and_no_other(install):
    installed = install()
    with openai.OpenAI() as client, installed.child("poor", budget="$0.000001") as poor:
        error = in_thread(poor.bind(ask_openai), client)
        assert type(refusal_from(error)) is BudgetExhausted
        assert refusal_from(error).session == poor.id
        assert in_thread(ask_openai, client) == TEXT
    assert (poor.spent, installed.spent) == (0, MINI)


# ---- how it refuses, and how it is undone ----


def test_a_vendors_sdk_is_answered_whatever_it_is_built_on(install, server):
    """They retry what a transport raises, and hide it; a local 402 is final."""
    session = install("$0.000001")
    for library in (httpx, httpx2):
        with library.Client() as http, openai.OpenAI(http_client=http) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                ask_openai(client)
        assert (caught.value.status_code, type(refusal_from(caught.value))) == (402, BudgetExhausted)
    assert (session.report().to_dict()["refusals"][0]["count"], server.calls) == (2, [])


def test_httpx_raises_and_httpx2_responds_unless_told_otherwise(install, server):
    url = server.base("openai") + "/v1/chat/completions"

    def ask(library):
        with library.Client(trust_env=False) as http:
            return http.post(url, json=LIMITED).status_code

    install("$0.000001")
    with pytest.raises(BudgetExhausted):
        ask(httpx)
    assert ask(httpx2) == 402
    x402guard.uninstall()
    install("$0.000001", on_refusal="respond")
    assert (ask(httpx), ask(httpx2)) == (402, 402)
    x402guard.uninstall()
    install("$0.000001", on_refusal="raise")
    with pytest.raises(BudgetExhausted):
        ask(httpx2)
    assert server.calls == []


def test_uninstall_puts_back_the_very_same_attributes_and_behaviour(install, server):
    with openai.OpenAI() as client:
        session = install("$0.000001")
        assert not any(now is before for now, before in zip(seams(), UNTOUCHED, strict=True))
        with pytest.raises(openai.APIStatusError):
            ask_openai(client)
        assert x402guard.uninstall().to_dict()["refusals"][0]["rule"] == "budget"
        assert all(now is before for now, before in zip(seams(), UNTOUCHED, strict=True))
        assert ask_openai(client, model="gpt-99", messages=HI) == TEXT
        assert "stream_options" not in server.calls[-1].body
        assert "accept-encoding" in server.calls[-1].headers
        assert server.calls[-1].headers["accept-encoding"] != "identity"
    assert x402guard.uninstall() is None
    assert (session.report().to_dict()["state"], session.spent) == ("closed", 0)


def test_a_second_install_is_refused_and_the_first_one_stays(install):
    session = install()
    with pytest.raises(ConfigError, match="installed already"):
        install()
    with openai.OpenAI() as client:
        ask_openai(client)
    assert session.spent == MINI


@pytest.mark.parametrize("wrong", [{"budget": "lots"}, {"name": ""}, {"guard": None}, {"on_refusal": "shrug"}], ids=str)
def test_an_install_that_fails_leaves_nothing_behind(install, wrong, monkeypatch):
    monkeypatch.setenv("X402GUARD_LEDGER", "mysql://nowhere")
    with pytest.raises(ConfigError):
        install(**wrong)
    assert all(now is before for now, before in zip(seams(), UNTOUCHED, strict=True))
    assert install().name == "installed"


def test_an_install_whose_warning_is_made_an_error_leaves_nothing_behind(install, monkeypatch):
    """Under ``-W error``, as tests are run, whoever gets an exception has no session and must not be half installed."""
    monkeypatch.setitem(sys.modules, "boto3", types.ModuleType("boto3"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(UserWarning):
            install()
            return
    assert all(now is before for now, before in zip(seams(), UNTOUCHED, strict=True))


def test_a_stream_that_outlives_the_installation_is_captured_all_the_same(install):
    session = install()
    with openai.OpenAI() as client:
        stream = client.chat.completions.create(**LIMITED, stream=True)
        first = next(stream)
        x402guard.uninstall()
        text = "".join(chunk.choices[0].delta.content or "" for chunk in (first, *stream))
    assert text == TEXT
    assert (session.spent, session.held) == (MINI, 0)


def test_the_environment_makes_the_guard_and_uninstall_closes_it(server, install, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("X402GUARD_LEDGER", "memory://")
    monkeypatch.setenv("X402GUARD_METERING__ENDPOINTS", json.dumps({server.base("openai"): "openai"}))
    with openai.OpenAI() as client:
        session = install("$5.00", guard=None, name="from the environment")
        assert ask_openai(client) == TEXT
        assert (session.name, session.limit, session.spent) == ("from the environment", 5, MINI)
        x402guard.uninstall()
        assert ask_openai(client) == TEXT
    assert session.spent == MINI, "a report can be read after the end"
    with pytest.raises(x402guard.SessionClosed):
        session.charge("serp", "$0.01")


# ---- what it does not see ----


@pytest.mark.parametrize("name", ["boto3", "botocore", "grpc", "pycurl"])
def test_install_warns_of_a_loaded_library_that_it_does_not_see(install, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.warns(UserWarning, match=rf"^loaded, and not seen by x402guard: (.*; )?{name} \(") as caught:
        install()
    assert caught[0].filename == sdks.__file__, "it points at whoever installs"


def python(server, script, *, cwd, **environment):
    """Run a script in a process of its own, where nothing is loaded but what it loads; what it printed, as JSON."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("X402GUARD_")}
    endpoints = json.dumps({server.base(name): name for name in PROVIDERS})
    settings = {"X402GUARD_LEDGER": "memory://", "X402GUARD_METERING__ENDPOINTS": endpoints}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60, cwd=cwd,
        env={**kept, **settings, "GOOGLE": server.base("google"), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


INSTALLED = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    session = x402guard.install(budget="$5.00")
told = [str(each.message) for each in caught]
"""


@pytest.mark.parametrize(("loads", "named"), [("requests", ["requests"]), ("aiohttp", []), ("json", [])])
def test_install_warns_in_a_process_of_its_own(server, tmp_path, loads, named):
    script = f"import {loads}, x402guard{INSTALLED}print(json.dumps(told))"
    told = python(server, script, cwd=tmp_path)
    assert re.findall(r"(?:x402guard: |; )([a-z0-9]+) \(", "".join(told)) == named


ASKS_GOOGLE = """
import asyncio, os
from google import genai
from google.genai.types import HttpOptions
client = genai.Client(api_key="k", http_options=HttpOptions(base_url=os.environ["GOOGLE"], **more))
async def main():
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answer = await client.aio.models.generate_content(model="gemini-2.5-flash", contents="hi")
    finally:
        await client.aio.aclose()
    return answer.text, [str(each.message) for each in caught if "x402guard" in str(each.message)]
try:
    text, later = asyncio.run(main())
except x402guard.X402GuardError as error:
    text, later = None, [str(error)]
print(json.dumps({"text": text, "told": told + later, "spent": str(session.spent)}))
"""


def test_googles_asynchronous_client_is_guarded_where_it_is_given_one_of_httpx2s(server, tmp_path):
    given = 'import httpx2\nmore = {"httpx_async_client": httpx2.AsyncClient()}'
    found = python(server, f"import x402guard{INSTALLED}{given}{ASKS_GOOGLE}", cwd=tmp_path)
    assert (found["text"], found["spent"]) == (TEXT, "0.000051")  # 20 × 0.30 + 18 × 2.50 = 51 millionths


@pytest.mark.parametrize("first", ["google.genai", "x402guard"], ids=["loaded before", "loaded after"])
def test_googles_asynchronous_client_goes_by_aiohttp_and_never_in_silence(server, tmp_path, first):
    """Where aiohttp can be imported (web3 and vendors bring it), google-genai sends by it: guard it, refuse it, or say so."""
    found = python(server, f"import {first}, x402guard{INSTALLED}more = {{}}{ASKS_GOOGLE}", cwd=tmp_path)
    assert found["spent"] == "0.000051" or any("google" in text for text in found["told"]), found


def test_aiohttp_goes_past_the_guard_to_no_metered_host_by_a_base_url_either(install, server):
    import aiohttp

    async def main(path, **more):
        async with aiohttp.ClientSession(**more) as http, http.post(path, json=LIMITED) as answer:
            return answer.status

    session, base = install(), server.base("openai")
    for path, more in ((f"{base}/v1/chat/completions", {}), ("/openai/v1/chat/completions", {"base_url": server.url})):
        with pytest.raises(x402guard.PolicyDenied, match="goes by aiohttp"):
            anyio.run(lambda: main(path, **more))
    assert server.calls == []
    assert [(row["rule"], row["count"]) for row in session.report().to_dict()["refusals"]] == [("unseen", 2)]


def doctor(cwd, *arguments, **environment):
    done = forked("doctor", "--json", *arguments, cwd=cwd, **{"X402GUARD_LEDGER": "memory://", **environment})
    unseen = [finding for finding in json.loads(done.stdout) if finding["check"] == "unseen"]
    return done.returncode, [(finding["verdict"], finding["detail"]) for finding in unseen]


NO_CHAIN = {"X402GUARD_CHAINS": '{"base-sepolia": "http://127.0.0.1:9"}'}


@pytest.mark.parametrize("environment", [{}, NO_CHAIN], ids=["meters only", "a chain configured"])
@pytest.mark.parametrize("library", ["requests", "boto3", "aiohttp", "grpc", "websockets"])
def test_doctor_names_what_an_agent_loads_and_nobody_sees(tmp_path, library, environment):
    if library in ("boto3", "grpc", "websockets"):
        (tmp_path / f"{library}.py").write_text("")
    (tmp_path / "agent.py").write_text(f"import {library}\n")
    code, found = doctor(tmp_path, "--load", "agent", **environment)
    assert [verdict for verdict, detail in found if detail.startswith(f"agent loads {library}, ")] == ["warning"], found
    assert code == (1 if environment else 0)  # that chain is out of reach, which is a problem of its own


def test_doctor_says_so_where_a_module_cannot_be_loaded_or_loads_nothing(tmp_path):
    (tmp_path / "fine.py").write_text("import json, httpx\n")
    (tmp_path / "broken.py").write_text("raise RuntimeError('no key')\n")
    assert doctor(tmp_path, "--load", "fine") == (0, [("ok", "fine loads nothing that the guard does not see")])
    says = "broken cannot be imported: RuntimeError: no key"
    assert doctor(tmp_path, "--load", "broken") == (1, [("problem", says)])
    for wrong in ("./agent.py", "agents/agent", "agent.py", "", ".agent"):
        says = f"--load names a module as Python imports it, such as my_agent or my_package.agent, not {wrong!r}"
        assert doctor(tmp_path, "--load", wrong) == (1, [("problem", says)])
    [(verdict, detail)] = doctor(tmp_path)[1]
    assert (verdict, "requests" in detail, "aiohttp" in detail) == ("ok", True, True)
