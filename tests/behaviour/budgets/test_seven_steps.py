"""An agent in seven steps, three of them a model's and four of them tools: one report, to the nano-dollar."""

import asyncio
import json
from decimal import Decimal

import httpx
import pytest

from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import async_client, client, make_guard

CALLS = [(200, 100), (80, 40), (40, 10)]
PROMPT = [{"role": "user", "content": "Which case is next? " * 60}]  # long enough for 200 tokens to be possible


def usage(step):
    into, out = CALLS[step]
    return {"prompt_tokens": into, "completion_tokens": out, "total_tokens": into + out}


def answer_of(request):
    return httpx.Response(200, json=completion(usage(json.loads(request.content)["seed"]), model="gpt-4o-mini"))


async def answer_awaited(request):
    return answer_of(request)


def question(step):
    return ask(model="gpt-4o-mini", messages=PROMPT, seed=step)


def over_the_transport(session, step):
    client(session, answer_of).post(CHAT, json=question(step)).raise_for_status()


def as_reported(session, step):
    into, out = CALLS[step]
    session.record_usage("openai", "gpt-4o-mini", {"input_tokens": into, "output_tokens": out})


def as_wrapped(session, step):
    answer = completion(usage(step), model="gpt-4o-mini")
    assert session.wrap(answer) is answer


async def over_the_transport_awaited(session, step):
    async with async_client(session, answer_awaited) as http:
        (await http.post(CHAT, json=question(step))).raise_for_status()


async def as_reported_awaited(session, step):
    into, out = CALLS[step]
    await session.arecord_usage("openai", "gpt-4o-mini", {"input_tokens": into, "output_tokens": out})


async def as_wrapped_awaited(session, step):
    answer = completion(usage(step), model="gpt-4o-mini")
    assert await session.awrap(answer) is answer


def seven_steps(session, think):
    @session.tool(cost="$0.02")
    def geocode(place):
        return place

    @session.tool(cost=lambda pages: f"{0.001 * pages:.3f}", up_to="$0.05")
    def scan(pages):
        return pages

    think(session, 0)
    session.charge("serp", "$0.01", arguments={"q": "Roe"})
    geocode("Boston")
    think(session, 1)
    with session.hold("render", up_to="$0.50") as job:
        job.capture("$0.04")
    scan(3)
    think(session, 2)


async def seven_steps_awaited(session, think):
    @session.tool(cost="$0.02")
    async def geocode(place):
        return place

    @session.tool(cost=lambda pages: f"{0.001 * pages:.3f}", up_to="$0.05")
    async def scan(pages):
        return pages

    await think(session, 0)
    await session.acharge("serp", "$0.01", arguments={"q": "Roe"})
    await geocode("Boston")
    await think(session, 1)
    async with session.hold("render", up_to="$0.50") as job:
        job.capture("$0.04")
    await scan(3)
    await think(session, 2)


def check_accounts(session):
    report = session.report().to_dict()
    assert session.spent == Decimal("0.073138000")
    assert session.held == 0
    assert (report["llm"]["total"], report["llm"]["calls"]) == ("0.000138", 3)
    assert report["tools"]["total"] == "0.073"
    assert report["tools"]["calls"] == 4
    assert {tool: row["amount"] for tool, row in report["tools"]["by_tool"].items()} == {
        "geocode": "0.02",
        "render": "0.04",
        "scan": "0.003",
        "serp": "0.01",
    }
    assert {key: amount for key, amount in report["evidence"].items() if amount != "0.00"} == {
        "provider_usage": "0.000138",
        "estimate": "0.073",
    }
    assert report["tokens"]["used"] == report["tokens"]["llm"] == 470
    rows = [line.split()[:3] for line in session.report().to_text().splitlines()]
    assert ["tools", "4", "$0.073"] in rows
    assert ["models", "3", "$0.000138"] in rows


@pytest.mark.parametrize("think", [over_the_transport, as_reported, as_wrapped])
def test_seven_steps_are_one_report(ledger_url, think):
    with make_guard(ledger_url) as guard, guard.session("agent", budget="$1.00") as session:
        seven_steps(session, think)
        check_accounts(session)


@pytest.mark.parametrize("think", [over_the_transport_awaited, as_reported_awaited, as_wrapped_awaited])
def test_seven_steps_are_one_report_when_awaited(ledger_url, think):
    async def run():
        async with make_guard(ledger_url) as guard, guard.session("agent", budget="$1.00") as session:
            await seven_steps_awaited(session, think)
            check_accounts(session)

    asyncio.run(run())


def test_a_step_that_does_not_fit_is_refused_and_the_report_says_which(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("agent", budget="$0.06") as session:
        with pytest.raises(Exception, match="does not fit"):
            seven_steps(session, as_reported)
        report = session.report().to_dict()
    assert [(row["rule"], row["requested"]) for row in report["refusals"]] == [("budget", "0.50")]
    assert report["spent"] == "0.030126"
