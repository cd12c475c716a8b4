"""What metering books is what the provider charges: every row of ``tests/data/bills.py``, blocking and awaiting."""

import json
import math
import re
from contextlib import contextmanager
from decimal import Decimal

import anyio
import genai_prices
import httpx
import pytest

import x402guard
from tests.data.bills import AT, BILLS, CEILING, text
from tests.support.ledger import Clock
from x402guard import AsyncGuardedTransport, Guard, GuardedTransport
from x402guard.stores import MemoryStore

ALLOWANCES = {"web_search": "$0.50", "file_search": "$0.50", "code_execution": "$0.50"}
EVIDENCE = ("chain", "claimed", "provider_usage", "estimate", "assumed")

each_bill = pytest.mark.parametrize("bill", BILLS, ids=lambda bill: bill.name)


def nanos(dollars):
    return int(Decimal(dollars).scaleb(9))


@contextmanager
def metered(price_context=None):
    store = MemoryStore(clock_ms=Clock(int(AT.timestamp()) * 1000))
    metering = x402guard.Metering(allowances=ALLOWANCES, price_context=price_context or {})
    with Guard(signer=None, ledger=store, metering=metering) as guard, guard.session("s", budget="$1000") as session:
        yield session
    store.close()


class Sevens(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in chunks of seven bytes, which end within words, within characters and within ends of lines."""

    def __init__(self, body):
        self.body = body

    def __iter__(self):
        for start in range(0, len(self.body), 7):
            yield self.body[start : start + 7]

    async def __aiter__(self):
        for chunk in self:
            yield chunk


class Provider:
    """Answers with a row's body, and remembers what was held while it was asked."""

    def __init__(self, bill, session):
        self.bill, self.session, self.held = bill, session, None

    def __call__(self, request):
        self.held = nanos(self.session.report().to_dict()["held"])
        headers = {"content-type": self.bill.content_type}
        if self.bill.stream is None:
            return httpx.Response(200, headers=headers, content=self.bill.body)
        return httpx.Response(200, headers=headers, stream=Sevens(self.bill.body))

    def check(self, read):
        assert read == self.bill.body, "the caller reads what was sent, byte for byte"
        report = self.session.report().to_dict()
        cost = self.held if self.bill.nanos == CEILING else self.bill.nanos
        assert nanos(report["llm"]["total"]) == cost
        assert {key: nanos(amount) for key, amount in report["evidence"].items()} == {
            key: cost if key == self.bill.evidence else 0 for key in EVIDENCE
        }
        assert (report["llm"]["calls"], nanos(report["held"])) == (1, 0)
        least = summed(self.bill.arithmetic) if self.bill.nanos == CEILING else cost
        assert self.bill.beyond or self.held >= least, "less was held than the call may cost"


@each_bill
def test_a_call_costs_what_its_bill_says(bill):
    with metered(bill.price_context) as session:
        provider = Provider(bill, session)
        transport = GuardedTransport(session, transport=httpx.MockTransport(provider))
        with httpx.Client(transport=transport) as http, http.stream("POST", bill.url, json=bill.request) as response:
            read = b"".join(response.iter_bytes())
        provider.check(read)


@pytest.mark.one_in(3)
@each_bill
def test_a_call_costs_what_its_bill_says_async(bill):
    async def main(session):
        provider = Provider(bill, session)
        transport = AsyncGuardedTransport(session, transport=httpx.MockTransport(provider))
        async with httpx.AsyncClient(transport=transport) as http:
            async with http.stream("POST", bill.url, json=bill.request) as response:
                read = b"".join([chunk async for chunk in response.aiter_bytes()])
        provider.check(read)

    with metered(bill.price_context) as session:
        anyio.run(main, session)


def test_a_session_says_what_each_model_cost():
    calls = [("gpt-4o-mini", into, 18) for into in (20, 20, 21, 24)] + [("gpt-4o", 100, 160)] * 2
    dated = {"gpt-4o-mini": "gpt-4o-mini-2024-07-18", "gpt-4o": "gpt-4o-2024-08-06"}
    tokens = iter(calls)

    def provider(request):
        model, into, out = next(tokens)
        assert json.loads(request.content)["model"] == model
        usage = {"prompt_tokens": into, "completion_tokens": out, "total_tokens": into + out}
        message = {"role": "assistant", "content": "Yes.", "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        answer = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1795348800, "model": dated[model]}
        return httpx.Response(200, json={**answer, "choices": [choice], "usage": usage, "service_tier": "default"})

    with metered() as session:
        with httpx.Client(transport=GuardedTransport(session, transport=httpx.MockTransport(provider))) as http:
            for model, into, _ in calls:
                messages = [{"role": "user", "content": text(into)}]
                request = {"model": model, "messages": messages, "max_completion_tokens": 200}
                assert http.post("https://api.openai.com/v1/chat/completions", json=request).status_code == 200
        llm = session.report().to_dict()["llm"]
    # (20 + 20 + 21 + 24) x 150 + 4 x 18 x 600 = 55,950 and 2 x (100 x 2,500 + 160 x 10,000) = 3,700,000 nano-dollars.
    by_model = {model: Decimal(row["amount"]) for model, row in llm["by_model"].items()}
    assert by_model == {"gpt-4o-mini": Decimal("0.000055950"), "gpt-4o": Decimal("0.003700000")}
    assert (Decimal(llm["total"]), llm["calls"]) == (Decimal("0.003755950"), 6)
    sums = {model: (row["calls"], row["tokens_in"], row["tokens_out"]) for model, row in llm["by_model"].items()}
    assert sums == {"gpt-4o-mini": (4, 85, 72), "gpt-4o": (2, 200, 320)}


# The table itself: its sums add up, and genai-prices comes to the same but where a row says why not.

SUM = re.compile(r"(?P<terms>.+) = (?P<total>[\d,.]+)(?:, up to (?P<up>[\d,]+))?")


def number(text):
    return Decimal(text.replace(",", ""))


def summed(arithmetic):
    """The sum of a row's arithmetic, done again, in whole nano-dollars."""
    done = SUM.fullmatch(arithmetic)
    terms = [term.split(" x ") for term in done["terms"].split(" + ")]
    total = sum(number(count.split()[0]) * number(price) for count, price in terms)
    assert total == number(done["total"])
    assert math.ceil(total) == number(done["up"] or done["total"])
    return math.ceil(total)


@pytest.mark.one_in(3)
@each_bill
def test_the_arithmetic_of_a_bill_adds_up(bill):
    total = summed(bill.arithmetic)
    assert (bill.nanos == CEILING) == (bill.evidence == "assumed")
    assert bill.nanos in (total, CEILING)


FLAVORS = [
    ("https://api.openai.com/v1/chat/completions", "openai", "chat"),
    ("https://api.openai.com/v1/responses", "openai", "responses"),
    ("https://api.openai.com/v1/embeddings", "openai", "embeddings"),
    ("https://myres.openai.azure.com/", "azure", "chat"),
    ("https://api.anthropic.com/v1/messages", "anthropic", "default"),
    ("https://generativelanguage.googleapis.com/", "google", "default"),
    ("https://api.mistral.ai/", "mistral", "default"),
    ("https://api.cohere.com/v2/chat", "cohere", "default"),
    ("https://api.cohere.com/v2/embed", "cohere", "embeddings"),
    ("https://api.groq.com/", "groq", "default"),
    ("https://api.deepseek.com/", "deepseek", "chat"),
    ("https://openrouter.ai/", "openrouter", "chat"),
]


def streamed(stream):
    """Every event of a stream that came whole, in order."""
    for line in re.findall(r"^data: (.*)$", stream.replace("\r\n", "\n"), re.MULTILINE):
        try:
            event = json.loads(line)
        except ValueError:
            continue  # [DONE], or where the stream broke off
        yield event


def whole_answer(bill):
    """The answer as it would have come in one piece: what genai-prices reads, which reads no streams."""
    answer = bill.answer or {}
    for event in streamed(bill.stream or ""):
        if event.get("type") == "message_start":
            answer = event["message"]
        elif event.get("type") == "message_delta":
            answer = {**answer, "usage": {**answer["usage"], **event["usage"]}}
        elif event.get("type") == "message-end":
            answer = {"usage": event["delta"]["usage"]}
        elif event.get("response", {}).get("usage"):
            answer = event["response"]
        elif event.get("x_groq", {}).get("usage"):
            answer = {**event, "usage": event["x_groq"]["usage"]}
        elif event.get("usage") or event.get("usageMetadata"):
            answer = event
    return answer


def priced_by_genai(bill, context=None):
    """What genai-prices makes of an answer, in whole nano-dollars; None where it cannot price it."""
    answer = whole_answer(bill)
    provider, flavor = next((provider, flavor) for url, provider, flavor in FLAVORS if bill.url.startswith(url))
    try:
        found = genai_prices.extract_usage(answer, provider_id=provider, api_flavor=flavor)
    except (LookupError, ValueError):
        return None
    model = answer.get("model") or answer.get("modelVersion") or bill.request["model"]  # Cohere's answer names none
    price = genai_prices.calc_price(
        found.usage, model, provider_id=provider, genai_request_timestamp=AT, price_context=context
    )
    return math.ceil(price.total_price.scaleb(9))


@each_bill
def test_genai_prices_agrees_but_where_a_bill_says_why_not(bill):
    assert (priced_by_genai(bill) == bill.nanos) == (bill.genai is None), priced_by_genai(bill)
