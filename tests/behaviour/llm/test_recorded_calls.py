"""Calls that no transport saw: what is reported of them is booked in full, past the limit too, and nothing is booked on nonsense."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from urllib.parse import urlsplit

import anyio
import pytest

from tests.data.bills import AT, BILLS
from tests.support import llm_provider as llm
from tests.support.ledger import Clock
from x402guard import ConfigError, ModelPrice, SessionTripped, Unpriced

# What the request does not show is the metered call's business: a report is taken as it is stated.
WHOLE = [bill for bill in BILLS if bill.answer is not None and not bill.name.startswith("hidden-")]
each_bill = pytest.mark.parametrize("bill", WHOLE, ids=lambda bill: bill.name)
PROVIDERS = {
    "api.openai.com": "openai", "myres.openai.azure.com": "azure", "api.anthropic.com": "anthropic",
    "generativelanguage.googleapis.com": "google", "api.mistral.ai": "mistral", "api.groq.com": "groq",
    "api.deepseek.com": "deepseek", "api.cohere.com": "cohere", "openrouter.ai": "openrouter",
}  # fmt: skip

USAGE = {"prompt_tokens": 20, "completion_tokens": 18}
SPOKEN = {**USAGE, "completion_tokens_details": {"audio_tokens": 5}}
COST = Decimal("0.00023")  # gpt-4o, $2.50 in and $10 out a million: 20 x 2,500 + 18 x 10,000 = 230,000 nano-dollars
OWN = {  # a dollar for a million tokens is 1,000 nano-dollars a token
    "mine": ModelPrice(input="1", output="2", cached_input="0.5"),
    "nano": ModelPrice(input="0.001", output="0.001"),
    "free": ModelPrice(input="0", output="0"),
}


def metered(ledger="memory://", **settings):
    """A session at the moment of the bills, whose prices hang on the day and the hour."""
    return llm.metered(ledger, clock=Clock(int(AT.timestamp()) * 1000), **settings)


def nanos(dollars):
    return int(Decimal(dollars).scaleb(9))


def accounts(session):
    return session.report().to_dict()


def assert_nothing_booked(session, *, refusals=()):
    report = accounts(session)
    assert (session.spent, session.held, session.tokens.used) == (0, 0, 0)
    assert (report["events"], report["outstanding"], report["llm"]["calls"]) == ([], [], 0)
    assert [(row["rule"], row["count"]) for row in report["refusals"]] == [(rule, 1) for rule in refusals]


SAID = ("model", "usage")
WAYS = {
    "record": lambda session, *told: session.record_usage(*told),
    "arecord": lambda session, *told: anyio.run(session.arecord_usage, *told),
    "wrap": lambda session, provider, *told: session.wrap(dict(zip(SAID, told, strict=True)), provider=provider),
    "awrap": lambda session, provider, *told: anyio.run(
        partial(session.awrap, provider=provider), dict(zip(SAID, told, strict=True))),
}  # fmt: skip


@pytest.fixture(params=WAYS)
def report_call(request):
    def report_call(session, model="gpt-4o", usage=USAGE, provider="openai"):
        WAYS[request.param](session, provider, model, usage)

    return report_call


# ---- the bills: what is reported costs what the same answer costs over the wire ----


def asked(bill):
    """(provider, model as it was asked for), the model in the URL where it is not in the body."""
    url = urlsplit(bill.url)
    named = re.search(r"/(?:models|deployments)/([^/:]+)", url.path)
    return PROVIDERS[url.hostname], bill.request["model"] if named is None else named[1]


@each_bill
def test_a_whole_answer_costs_what_its_bill_says(bill):
    """Every one, with no exception: their prices hang on what the answer shows. What hangs on the request is shown below."""
    provider, model = asked(bill)
    with metered(price_context=bill.price_context, budget="$1000") as session:
        session.wrap(bill.answer, provider=provider, model=model)
        report = accounts(session)
        if {"model", "modelVersion"} & set(bill.answer):  # all but Cohere's
            session.wrap(bill.answer, provider=provider)
            assert nanos(session.spent) == 2 * bill.nanos
    booked = {kind: nanos(amount) for kind, amount in report["evidence"].items() if nanos(amount)}
    assert booked == ({"provider_usage": bill.nanos} if bill.nanos else {})
    assert {name: nanos(row["amount"]) for name, row in report["llm"]["by_model"].items()} == {model: bill.nanos}
    assert (report["llm"]["calls"], nanos(report["held"]), report["refusals"]) == (1, 0, [])


TIER, ITEMS = "the tier stands in the answer, beside the usage", "searches are items of the answer's output"
USAGE_IS_NOT_ALL = {
    "openai-chat-auto-became-priority": TIER, "openai-chat-auto-became-flex": TIER, "responses-auto-became-flex": TIER,
    "responses-two-searches": ITEMS, "responses-a-page-opened-is-no-search": ITEMS, "responses-two-file-searches": ITEMS,
}  # fmt: skip


@each_bill
def test_the_usage_alone_costs_the_same_but_where_the_rest_of_the_answer_says_more(bill):
    usage = bill.answer.get("usage") or bill.answer.get("usageMetadata") or bill.answer.get("meta")
    with metered(price_context=bill.price_context, budget="$1000") as session:
        cost = nanos(session.record_usage(*asked(bill), usage).amount)
    assert (cost == bill.nanos) == (bill.name not in USAGE_IS_NOT_ALL), cost


@pytest.mark.parametrize(
    ("body", "answer", "wire", "reported"),
    [
        # gpt-4o-mini at 150 and 600: 20 x 150 + 18 x 600 = 13,800; a search costs $10 per 1,000 at every call that may search
        ({"model": "gpt-4o-mini-search-preview", "web_search_options": {}}, {}, 10_013_800, 13_800),
        # gpt-4o: a dearer tier is believed on the request's word alone: 20 x 4,250 + 18 x 17,000 = 391,000
        ({"model": "gpt-4o", "service_tier": "priority"}, {}, 391_000, 230_000),
        ({"model": "gpt-4o", "service_tier": "priority"}, {"service_tier": "priority"}, 391_000, 391_000),
    ],
    ids=["searches", "tier-asked-for", "tier-granted"],
)
def test_what_only_the_request_says_is_not_in_a_reported_call(body, answer, wire, reported):
    whole = llm.completion(usage=USAGE, **answer) | {"model": body["model"]}
    with metered(allowances={"web_search": "$0.05"}) as session:
        llm.SYNC.post(session, llm.Provider(session, llm.Answer.of(whole)), llm.ask(**body))
        over_the_wire = nanos(session.spent)
        session.wrap(whole)
        assert (over_the_wire, nanos(session.spent) - over_the_wire) == (wire, reported)


# ---- usage in units, and in each provider's own words; prices of `x402guard prices list`, in dollars a million ----

GPT, SONNET, FLASH = ("openai", "gpt-4o"), ("anthropic", "claude-sonnet-4-5"), ("google", "gemini-2.5-flash")
HERE = ("aws", "anthropic.claude-sonnet-4-5-20250929-v1:0")
ROUTER = ("openrouter", "openai/gpt-4o-mini")
CONVERSED = {"inputTokens": 20, "outputTokens": 18, "cacheReadInputTokens": 60, "cacheWriteInputTokens": 40}
USAGES = {
    # gpt-4o: 2.50 in, 1.25 cached, 10 out
    "units": (GPT, {"input_tokens": 20, "output_tokens": 18}, 20 * 2_500 + 18 * 10_000),
    "units-cached-within": (GPT, {"input_tokens": 100, "cache_read_tokens": 64, "output_tokens": 18}, 36 * 2_500 + 64 * 1_250 + 18 * 10_000),
    "chat": (GPT, {**USAGE, "total_tokens": 38, "prompt_tokens_details": None}, 230_000),
    "chat-details": (GPT, {"prompt_tokens": 100, "completion_tokens": 18, "prompt_tokens_details": {"cached_tokens": 64, "audio_tokens": 0},
                     "completion_tokens_details": {"reasoning_tokens": 9}}, 36 * 2_500 + 64 * 1_250 + 18 * 10_000),
    "responses": (GPT, {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 64}, "output_tokens": 18,
                  "output_tokens_details": {"reasoning_tokens": 9}, "total_tokens": 118}, 36 * 2_500 + 64 * 1_250 + 18 * 10_000),
    # text-embedding-3-small: 0.02
    "embeddings": (("openai", "text-embedding-3-small"), {"prompt_tokens": 8, "total_tokens": 8}, 8 * 20),
    # claude-sonnet-4-5: 3 in, 0.30 read, 3.75 written for five minutes, 6 for an hour, 15 out; 10 a thousand searches
    "units-searches": (SONNET, {"web_searches": 2}, 2 * 10_000_000),
    "units-written-within": (SONNET, {"input_tokens": 98, "cache_read_tokens": 64, "cache_write_tokens": 9, "cache_write_1h_tokens": 4,
                             "output_tokens": 18}, 25 * 3_000 + 64 * 300 + 5 * 3_750 + 4 * 6_000 + 18 * 15_000),
    "messages-cached-beside": (SONNET, {"input_tokens": 20, "cache_creation_input_tokens": 9, "cache_read_input_tokens": 64, "output_tokens": 18,
                               "cache_creation": {"ephemeral_5m_input_tokens": 5, "ephemeral_1h_input_tokens": 4}},
                               20 * 3_000 + 64 * 300 + 5 * 3_750 + 4 * 6_000 + 18 * 15_000),
    "messages-nulls": (SONNET, {"input_tokens": 20, "cache_creation_input_tokens": 9, "cache_read_input_tokens": None, "cache_creation": None,
                       "output_tokens": 18, "server_tool_use": None}, 20 * 3_000 + 9 * 3_750 + 18 * 15_000),
    "messages-searched": (SONNET, {"input_tokens": 20, "output_tokens": 18, "server_tool_use": {"web_search_requests": 2}},
                          20 * 3_000 + 18 * 15_000 + 2 * 10_000_000),
    # gemini-2.5-flash: 0.30 in, 0.03 cached, 2.50 out; thoughts come on top
    "gemini": (FLASH, {"promptTokenCount": 100, "cachedContentTokenCount": 64, "candidatesTokenCount": 18, "thoughtsTokenCount": 40,
               "totalTokenCount": 158}, 36 * 300 + 64 * 30 + 58 * 2_500),
    "gemini-snake": (FLASH, {"prompt_token_count": 100, "cached_content_token_count": 64, "candidates_token_count": 18,
                     "thoughts_token_count": 40, "total_token_count": 158}, 36 * 300 + 64 * 30 + 58 * 2_500),
    # command-a: 2.50 in, 10 out; only what is billed, and Cohere's own package counts in floats
    "cohere": (("cohere", "command-a-03-2025"), {"billed_units": {"input_tokens": 5, "output_tokens": 18},
               "tokens": {"input_tokens": 71, "output_tokens": 18}}, 5 * 2_500 + 18 * 10_000),
    "cohere-floats": (("cohere", "command-a-03-2025"), {"billed_units": {"input_tokens": 5.0, "output_tokens": 18.0}}, 5 * 2_500 + 18 * 10_000),
    # nova-lite: 0.06 in, 0.24 out
    "converse": (("aws", "amazon.nova-lite-v1:0"), {"inputTokens": 20, "outputTokens": 18, "totalTokens": 38}, 20 * 60 + 18 * 240),
    # sonnet in one region of Bedrock: 3.30 in, 0.33 read, 16.50 out, 4.125 written; global: 3, 0.30, 15, 3.75. The cache comes on top
    "converse-cached": (HERE, {**CONVERSED, "totalTokens": 138}, 20 * 3_300 + 60 * 330 + 40 * 4_125 + 18 * 16_500),
    "converse-global": (("aws", f"global.{HERE[1]}"), CONVERSED, 20 * 3_000 + 60 * 300 + 40 * 3_750 + 18 * 15_000),
    "converse-own": (("my-lab", "mine"), CONVERSED, 20 * 1_000 + 60 * 500 + 40 * 1_000 + 18 * 2_000),
    # OpenRouter says what it took, whatever its model's tokens come to
    "router": (ROUTER, {**USAGE, "cost": Decimal("0.0000616")}, 61_600),
    "router-float": (ROUTER, {**USAGE, "cost": 0.0000616}, 61_600),
    # deepseek-reasoner by day: 0.55 in, 0.14 cached, 2.19 out
    "deepseek": (("deepseek", "deepseek-reasoner"), {"prompt_tokens": 500, "completion_tokens": 900, "prompt_cache_hit_tokens": 384,
                 "prompt_cache_miss_tokens": 116}, 116 * 550 + 384 * 140 + 900 * 2_190),
    # prices of one's own: 1 in, 0.50 cached, 2 out, in the words of a provider that nobody knows
    "own": (("my-lab", "mine"), {"prompt_tokens": 20, "completion_tokens": 18, "prompt_tokens_details": {"cached_tokens": 10}},
            10 * 1_000 + 10 * 500 + 18 * 2_000),
}  # fmt: skip


@pytest.mark.parametrize(("model", "usage", "cost"), USAGES.values(), ids=USAGES)
def test_a_usage_costs_what_its_provider_charges(model, usage, cost):
    with metered(models=OWN) as session:
        receipt = session.record_usage(*model, usage)
        assert (nanos(receipt.amount), nanos(session.spent)) == (cost, cost)
        assert (receipt.model, receipt.evidence, receipt.state) == (model[1], "provider_usage", "captured")
        used = receipt.usage.get("input_tokens", 0) + receipt.usage.get("output_tokens", 0)
        assert (session.tokens.used, used > 0) == (used, "web_searches" not in usage)


# ---- where it is booked ----


def test_a_reported_call_stands_in_the_books_like_any_other(ledger_url, report_call):
    with metered(ledger_url) as session:
        report_call(session)
        session.charge("search", "0.01")
        report_call(session, "gpt-4o-mini", {"input_tokens": 20, "output_tokens": 18})  # 3,000 + 10,800 = 13,800
        report = accounts(session)
        assert (session.spent, session.held, session.tokens.used) == (COST + Decimal("0.0100138"), 0, 76)
    held, captured, *_ = report["events"]
    assert {"event": "authorize", "model": "gpt-4o", "provider": "openai", "recorded": True}.items() <= held.items()
    assert {"source": "genai-prices", "date": "2026-11-22", "model": "gpt-4o"}.items() <= held["price"].items()
    assert {"event": "capture", "evidence": "provider_usage", "amount": "0.00023"}.items() <= captured.items()
    assert captured["usage"] == {"input_tokens": 20, "output_tokens": 18}
    assert {model: row["amount"] for model, row in report["llm"]["by_model"].items()} == {
        "gpt-4o": "0.00023",
        "gpt-4o-mini": "0.0000138",
    }
    assert (report["llm"]["total"], report["llm"]["calls"]) == ("0.0002438", 2)
    assert (report["tools"]["total"], report["tools"]["calls"]) == ("0.01", 1)
    assert (report["evidence"]["provider_usage"], report["refusals"]) == ("0.0002438", [])


def test_the_innermost_budget_pays(ledger_url, report_call):
    with metered(ledger_url) as session:
        with session.scope("$1") as scope:
            report_call(session)
            assert scope.spent == COST
        with session.child("c", budget="$1", tokens=1_000) as child:
            report_call(session)
            assert (child.spent, child.tokens.used) == (COST, 38)
        report_call(session)
        assert (scope.spent, child.spent, session.spent) == (COST, COST, 3 * COST)
        assert session.tokens.used == 76, "the child has a context of its own"


def test_what_is_owed_is_booked_after_the_end_too(ledger_url, report_call):
    with metered(ledger_url) as session:
        with session.scope("$1") as scope:
            pass
        with session.child("c", budget="$1") as child:
            pass
        report_call(scope)
        report_call(child)
        session.close()
        report_call(session)
        report = accounts(session)
        assert (scope.spent, child.spent, session.spent) == (COST, COST, 3 * COST)
    assert (report["state"], report["llm"]["calls"], report["refusals"]) == ("closed", 3, [])


def test_a_call_past_the_limit_is_booked_and_trips_what_it_exceeds(ledger_url, report_call):
    with metered(ledger_url, budget="$0.0002", guard={"budget": "$0.0001"}) as session:
        inside = session.child("inside", budget="$1")
        report_call(inside)
        assert (inside.spent, session.spent, session.held, session.remaining) == (COST, COST, 0, 0)
        above = {node.id: (node.state, node.terminated_by) for node in session.shell.store.nodes(session.id)}
        assert above[session.id] == above["wallet"] == ("tripped", "overshoot")
        assert above[inside.id] == ("open", None), "it stands within its own limit"
        with pytest.raises(SessionTripped):
            session.charge("search", "0")
    with metered(budget=COST) as session:
        report_call(session)
        assert (accounts(session)["state"], session.remaining) == ("open", 0), "all of it is not past it"


def test_a_call_in_what_was_tripped_before_is_booked_and_told(ledger_url, report_call):
    with metered(ledger_url, budget="$0.0001") as session:
        inside = session.child("inside", budget="$1")
        report_call(session)
        for number, where in ((2, session), (3, inside)):
            with pytest.raises(
                SessionTripped, match=r"tripped \(overshoot: .* used of .*\).*; this call is in the ledger"
            ):
                report_call(where)
            assert (session.spent, session.held, session.tokens.used) == (number * COST, 0, number * 38)
        report = accounts(session)
    assert (report["terminated_by"], report["llm"]["calls"]) == ("overshoot", 3)
    assert report["refusals"] == []  # they are in the books
    assert [event["event"] for event in report["events"]].count("trip") == 1


def test_a_call_of_nothing_fits_a_full_budget_and_one_nano_dollar_does_not(ledger_url, report_call):
    with metered(ledger_url, budget="$0.000001", models=OWN) as session:
        report_call(session, "nano", {"prompt_tokens": 1_000})
        report_call(session, "free", {"prompt_tokens": 1_000})
        report = accounts(session)
        assert (session.remaining, session.spent, report["state"]) == (0, Decimal("0.000001"), "open")
        assert (report["llm"]["calls"], report["llm"]["by_model"]["free"]["amount"]) == (2, "0.00")
        report_call(session, "nano", {"prompt_tokens": 1})
        assert (session.spent, accounts(session)["terminated_by"]) == (Decimal("0.000001001"), "overshoot")


def test_prices_are_the_owners_the_sessions_and_those_of_a_dated_names_base(ledger_url, report_call):
    with metered(ledger_url, models=OWN, aliases={"deployed": "gpt-4o"}) as session:
        session.register_model("ours", input="1", output="2")
        child = session.child("c", budget="$1")
        report_call(child, "ours", provider="my-lab")  # 20 x 1,000 + 18 x 2,000 = 56,000, as the owner's
        report_call(session, "mine", provider="my-lab")
        report_call(session, "gpt-4o-2025-06-15")  # a day that the book does not know
        report_call(session, "deployed", provider="azure")
        report = accounts(session)
    prices = {event["model"]: event["price"] for event in report["events"] if event["event"] == "authorize"}
    costs = {name: nanos(row["amount"]) for name, row in report["llm"]["by_model"].items()}
    assert costs == {"ours": 56_000, "mine": 56_000, "gpt-4o-2025-06-15": 230_000, "deployed": 230_000}
    assert [prices[name]["source"] for name in ("ours", "mine")] == ["session", "owner"]
    assert (prices["gpt-4o-2025-06-15"]["based_on"], "based_on" in prices["deployed"]) == ("gpt-4o", False)


@pytest.mark.parametrize(
    ("provider", "model", "usage", "why"),
    [
        ("openai", "gpt-99", USAGE, r"model: openai has no price for 'gpt-99'.*ModelPrice\(like='o1-pro'\)"),
        ("anthropic", "gpt-4o", USAGE, r"model: anthropic has no price for 'gpt-4o'; it is openai's\. .*ModelPrice"),
        ("openai", "text-embedding-3-small", USAGE, "model: .* has no price for text tokens"),
    ],
)
def test_what_has_no_price_is_not_booked_but_counted(ledger_url, report_call, provider, model, usage, why):
    with metered(ledger_url) as session:
        with pytest.raises(Unpriced, match=f"^unpriced: {why}") as caught:
            report_call(session, model, usage, provider)
        assert (caught.value.rule, caught.value.session) == ("unpriced", session.id)
        assert_nothing_booked(session, refusals=["unpriced"])


def test_calls_reported_at_once_all_count(ledger_url):
    with metered(ledger_url, budget="$0.001") as session, ThreadPoolExecutor(4) as pool:
        done = [pool.submit(session.record_usage, *GPT, USAGE) for _ in range(12)]
        told = [type(each.exception()) for each in done if each.exception() is not None]
        assert (session.spent, session.tokens.used, session.held) == (12 * COST, 12 * 38, 0)
    assert (set(told), len(told)) == ({SessionTripped}, 7), "five calls: $0.00115, and the fifth trips"


def test_a_task_that_is_cancelled_still_owes_its_call(ledger_url):
    async def main(session):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await session.arecord_usage("openai", "gpt-4o", USAGE)

    with metered(ledger_url) as session:
        anyio.run(main, session)
        assert (session.spent, session.held, session.tokens.used, accounts(session)["llm"]["calls"]) == (COST, 0, 38, 1)


# ---- what nobody can book ----

OTHER = {"list": [USAGE], "NoneType": None, "str": "20", "int": 38, "generator": (each for each in USAGE)}


@pytest.mark.parametrize(("kind", "usage"), OTHER.items(), ids=OTHER)
def test_a_usage_is_an_object(kind, usage):
    with metered() as session:
        with pytest.raises(TypeError, match=rf"^usage: a value of type {kind} .*write \{{"):
            session.record_usage("openai", "gpt-4o", usage)
        assert_nothing_booked(session)


cached = lambda count: {**USAGE, "prompt_tokens_details": {"cached_tokens": count}}
prompted = lambda count, **more: {**USAGE, "prompt_tokens": count, **more}
MORE, VAST, FREE = "it would cost more than a billion", 10**5_000, ("my-lab", "free")
NONSENSE = {
    "empty": ({}, r".*write \{"), "foo": ({"foo": 1}, r"foo.*write \{"), "total": ({"total_tokens": 38}, r"total.*write \{"),
    "keys": ({1: 2}, r"1 .*write \{"), "zeros": ({"input_tokens": 0}, r"it counts nothing; write \{"),
    "zeros-own": (prompted(0, completion_tokens=0), r"it counts nothing; write \{"),
    "half": ({"completion_tokens": 18}, ".*prompt_tokens"), "unit": ({"input_foo_tokens": 5, "input_tokens": 5}, ".*foo"),
    "below": ({"input_tokens": -1}, "input_tokens is -1"), "below-own": (prompted(-1), ".*prompt_tokens.* -1"),
    "below-part": (cached(-1), ".*cached_tokens.* -1"), "fraction": ({"input_tokens": 1.5}, "input_tokens is 1.5"),
    "fraction-own": (prompted(20.5), ".*prompt_tokens.* 20.5"), "fraction-part": (cached(2.5), ".*cached_tokens.* 2.5"),
    "fraction-converse": ({**CONVERSED, "inputTokens": 20.5}, ".*inputTokens.* 20.5", HERE),
    "fraction-gemini": ({"promptTokenCount": 20.5}, ".*promptTokenCount.* 20.5", FLASH),
    "bool": ({"input_tokens": True}, "input_tokens is True"), "bool-own": (prompted(True), ""),
    "digits": ({"input_tokens": "5"}, "input_tokens is '5'"), "digits-own": (prompted("20"), ".*prompt_tokens"),
    "null-own": (prompted(None), ".*prompt_tokens"), "infinite-own": (prompted(float("inf")), ""),
    "nan": ({"input_tokens": float("nan")}, "input_tokens is NaN"), "nan-own": (prompted(float("nan")), ""),
    "part": ({"input_tokens": 5, "cache_read_tokens": 6}, "6 cache_read_tokens are more than the total of 5"),
    "part-own": (cached(21), "21 cache_read_tokens are more than the total of 20"),
    "part-out": ({"input_tokens": 5, "output_audio_tokens": 1}, "1 output_audio_tokens are more than the total of 0"),
    "huge": ({"input_tokens": 10**30}, MORE), "huge-own": (prompted(10**30), MORE),
    "huge-free": ({"input_tokens": 10**30}, ".*input_tokens", FREE), "vast": ({"input_tokens": VAST}, MORE),
    "huge-charged": (prompted(10**30, cost=Decimal("0.01")), "", ROUTER), "vast-below": ({"input_tokens": -VAST}, ""),
    "charge-below": (prompted(20, cost=Decimal("-0.01")), "cost is -0.01", ROUTER),
    "charge-below-float": (prompted(20, cost=-0.01), "cost is -0.01", ROUTER),
}  # fmt: skip


@pytest.mark.parametrize(("usage", "why", "model"), [(*row, GPT)[:3] for row in NONSENSE.values()], ids=NONSENSE)
def test_a_usage_that_no_call_can_have_is_refused_by_name(ledger_url, usage, why, model):
    with metered(ledger_url, models=OWN) as session:
        begun = time.monotonic()
        with pytest.raises(ValueError, match=f"^usage: {why}"):
            session.record_usage(*model, usage)
        assert time.monotonic() - begun < 2
        assert_nothing_booked(session)


@pytest.mark.parametrize("name", ["", "  ", None, 5, b"gpt-4o", ["gpt-4o"]], ids=repr)
@pytest.mark.parametrize(("field", "such"), [("provider", "'openai'"), ("model", "'gpt-4o-mini'")])
def test_a_provider_and_a_model_are_named_by_text(field, such, name):
    named = {"provider": "openai", "model": "gpt-4o", field: name}
    with metered() as session:
        with pytest.raises(ConfigError, match=rf"^{field}: .* is not the name of a {field}; write text such as {such}"):
            session.record_usage(**named, usage=USAGE)
        assert_nothing_booked(session)
