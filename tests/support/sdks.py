"""What the tests of real SDKs share: a server that speaks the providers' wire formats, a guard that meters it, hand-made accounts."""

from contextlib import ExitStack
from decimal import Decimal

import httpx
import httpx2
import pytest

import x402guard.httpx2
from tests.support import llm_server
from x402guard import AsyncGuardedTransport, BudgetExhausted, Guard, GuardedTransport, Metering, Policy
from x402guard.http.refusal_from import refusal_from
from x402guard.testing import Completion, Failure, LlmServer
from x402guard.testing.llm import PROVIDERS

TEXT = "The motion was granted in part."
"""What the server answers, with 20 tokens in and 18 out, unless a test says otherwise."""
HI = [{"role": "user", "content": "hi"}]
DOCKET = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

MINI = Decimal("0.0000138")  # gpt-4o-mini: 20 × 0.15 + 18 × 0.60 = 3.0 + 10.8 millionths
LARGE = Decimal("0.00023")  # gpt-4o: 20 × 2.50 + 18 × 10 = 50 + 180 millionths
LIMITED = {"model": "gpt-4o-mini", "messages": HI, "max_completion_tokens": 100}

SOON = {"retry-after-ms": "1", "retry-after": "0"}
"""Headers that have an SDK try again at once."""
TROUBLES = [500, 429]
"""Statuses that every SDK tries again after, and that cost nothing."""

_KINDS = {
    "httpx": (httpx.Client, GuardedTransport, httpx.AsyncClient, AsyncGuardedTransport),
    "httpx2": (
        httpx2.Client,
        x402guard.httpx2.GuardedTransport,
        httpx2.AsyncClient,
        x402guard.httpx2.AsyncGuardedTransport,
    ),
}
FAMILIES = tuple(_KINDS)


def dollars(*counted):
    """Dollars for pairs of tokens and dollars a million, by hand: nothing of the library's is in this."""
    return sum((Decimal(tokens) * Decimal(price) for tokens, price in counted), Decimal(0)) / 1_000_000


def metering(server, **more):
    """Settings that take each of the server's prefixes for the origin of its provider."""
    standard = {"price_context": {"service_tier": "default"}}
    return Metering(endpoints={server.base(name): name for name in PROVIDERS}, **(standard | more))


class Till:
    """One open session; closes the clients that it made."""

    def __init__(self, server, guard, budget="$5.00"):
        self.server = server
        self.session = guard.session("sdk", budget=budget)
        self._closing = ExitStack()

    def __enter__(self):
        self._closing.__enter__()
        return self

    def __exit__(self, *error):
        self._closing.__exit__(*error)
        self.session.close()

    def keep(self, closable):
        """Close something at the end, too."""
        return self._closing.enter_context(closable)

    def http(self, family="httpx2", **more):
        """A blocking client with a guarded transport of this session's."""
        kind, transport, _, _ = _KINDS[family]
        return self.keep(kind(transport=transport(self.session, **more), trust_env=False))

    def async_http(self, family="httpx2", **more):
        """An asynchronous one; the test closes it, on its loop."""
        _, _, kind, transport = _KINDS[family]
        return kind(transport=transport(self.session, **more), trust_env=False)

    # ---- the accounts ----

    @property
    def events(self):
        """What the journal says, as (event, amount in dollars); of a hold that ends by nothing the amount is None."""
        shown = [event for event in self.session.report().to_dict()["events"] if event["hold_id"]]
        return [(event["event"], event.get("amount") and Decimal(event["amount"])) for event in shown]

    def settled(self, cost, *, calls=1, evidence="provider_usage", tries=None):
        """Assert that so many calls cost so much by that evidence, that each try had a hold, and that none is left."""
        report = self.session.report().to_dict()
        assert Decimal(report["llm"]["total"]) == Decimal(report["spent"]) == cost
        assert report["llm"]["calls"] == calls
        totals = {kind: Decimal(total) for kind, total in report["evidence"].items()}
        assert {kind: total for kind, total in totals.items() if total} == {evidence: cost}
        captures = [event for event in report["events"] if event["event"] == "capture"]
        assert [event["evidence"] for event in captures] == [evidence] * calls
        ended = [event["event"] for event in report["events"]]
        assert ended.count("authorize") == (calls if tries is None else tries)
        assert ended.count("void") == ended.count("authorize") - calls
        assert (Decimal(report["held"]), report["outstanding"], report["refusals"]) == (0, [], [])
        assert len(self.server.calls) == ended.count("authorize")

    def ceiling(self, into, out):
        """What the one call of the journal holds at most, by hand from what it was held for, at prices a million."""
        [held] = [event for event in self.session.report().to_dict()["events"] if event["event"] == "authorize"]
        counted = held["ceiling"]
        assert counted["input_tokens"] >= 2
        by_hand = dollars((counted["input_tokens"], into), (counted["output_tokens"], out))
        assert Decimal(held["amount"]) == by_hand
        return by_hand

    def refused(self, error, kind, *, tries=1):
        """Assert that nothing left, that the SDK asked so often, and that the typed refusal comes back; return it."""
        refusal = refusal_from(error)
        assert type(refusal) is kind
        report = self.session.report().to_dict()
        assert (Decimal(report["spent"]), Decimal(report["held"]), report["events"]) == (0, 0, [])
        assert self.server.calls == []
        assert [row["count"] for row in report["refusals"]] == [tries]
        assert refusal.rule == report["refusals"][0]["rule"]
        assert refusal.session == self.session.id
        return refusal

    def exhausted(self, error, *, tries=1):
        """Assert that the refusal is one for lack of budget, with both amounts, and that they stand in the report."""
        refusal = self.refused(error, BudgetExhausted, tries=tries)
        [row] = self.session.report().to_dict()["refusals"]
        assert (refusal.requested, refusal.available) == (Decimal(row["requested"]), Decimal(row["available"]))
        assert refusal.requested > refusal.available > 0
        return refusal


@pytest.fixture(scope="module")
def running():
    """A server, and a guard on books in memory that meters it: making either takes a while."""
    with (
        LlmServer() as server,
        Guard(
            ledger="memory://", metering=metering(server), policy=Policy(breaker=None)
        ) as guard,  # they fail on purpose
    ):
        yield server, guard


server = llm_server.server


@pytest.fixture
def till(running, server):
    with Till(*running) as till:
        yield till


@pytest.fixture
def poor(running, server):
    """A till with a ten-thousandth of a cent in it."""
    with Till(*running, budget="$0.000001") as till:
        yield till


def then(first, second=None):
    """A reply that is `first` to the first call, and `second` to every other."""
    replies = [first]

    def reply(call):
        return replies.pop() if replies else second or Completion()

    return reply


def trouble(status):
    """A provider's error that an SDK tries again after, at once."""
    return Failure(status, SOON)


# ---- the drop-in ----

ALL_LOADED = "ignore:loaded, and not seen by x402guard:UserWarning"
"""This process has loaded whatever the whole suite tests with; the tests of the warning catch it themselves."""


def seams():
    """What install replaces in every client and lowest transport: the attributes themselves, not bound to anything."""
    kinds = (httpx.Client, httpx.AsyncClient, httpx2.Client, httpx2.AsyncClient)
    lowest = [
        library.__dict__[kind].__dict__[name]
        for library in (httpx, httpx2)
        for kind, name in (("HTTPTransport", "handle_request"), ("AsyncHTTPTransport", "handle_async_request"))
    ]
    return [*(kind.__dict__["_transport_for_url"] for kind in kinds), *lowest]


UNTOUCHED = seams()


@pytest.fixture
def install(running, server, monkeypatch):
    """Install with books in memory; OpenAI's own settings point at the server. Undone after the test."""
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setenv("OPENAI_BASE_URL", server.base("openai") + "/v1")

    def install(budget="$5.00", **more):
        return x402guard.install(**{"budget": budget, "guard": running[1]} | more)

    yield install
    x402guard.uninstall()
    assert all(now is before for now, before in zip(seams(), UNTOUCHED, strict=True))


def calls(session):
    """How many LLM calls a session has paid for."""
    return session.report().to_dict()["llm"]["calls"]


def ask_openai(client, **asked):
    return client.chat.completions.create(**asked or LIMITED).choices[0].message.content
