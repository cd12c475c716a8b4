"""Whatever costs money or leaks is withstood by the guarded client, and not by a naive one: each check proves both.

A check that the naive client passed would be a check that cannot fail.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import pytest

from tests.support.merchant import KEY, PAYEE, USDC, make_guard
from tests.support.naive_client import NaiveTransport
from tests.support.refusals import events
from x402guard import GuardedTransport, Metering, Policy, X402GuardError
from x402guard.policy.timeouts import Timeouts
from x402guard.testing import BEHAVIOURS, HostileServer

CHAT = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 100}
DOLLAR = 1_000_000


@dataclass
class Run:
    """What a client did with a server that misbehaves: how often it got an answer, for how much, how long it took."""

    server: HostileServer
    http: httpx.Client
    spent: Callable
    answers: list = field(default_factory=list)
    errors: list = field(default_factory=list)
    took_s: float = 0.0

    def ask(self, url, method="GET", **more):
        begun = time.monotonic()
        try:
            self.answers.append(self.http.request(method, url, **more))
        except (X402GuardError, httpx.HTTPError) as error:
            self.errors.append(error)
        self.took_s = max(self.took_s, time.monotonic() - begun)

    @property
    def cheques(self):
        return self.server.cheques


@dataclass(frozen=True)
class Case:
    """What is asked, under which rules, and what must be true of what the server was given.

    ``ends`` is how it ends for the guarded client: the rule or the kind of the last error, None where all is answered;
    ``signs`` how many payments it makes. A client that could not reach the server would end otherwise.
    """

    holds: Callable
    ends: str | None
    signs: int
    urls: tuple = (1,)
    policy: dict = field(default_factory=dict)
    guard: dict = field(default_factory=dict)
    budget: str = "$50.00"
    methods: tuple = ("GET",)


def one_signature(run):
    return len(run.server.nonces) <= 1


def nothing_signed(run):
    return not run.server.cheques


def small_payments(run):
    return all(len(json.dumps(cheque.message)) < 6_000 for cheque in run.server.cheques)


def payees(run):
    return {cheque.payee for cheque in run.cheques}


def told_payee(run):
    return payees(run) <= {PAYEE}


def at_most(atomic):
    return lambda run: run.server.signed <= atomic


def no_steep_price(run):
    amounts = [cheque.amount for cheque in run.cheques]
    return max(amounts) <= 2.5 * min(amounts)


def short_lived(run):
    return all(cheque.valid_until <= time.time() + 300 for cheque in run.cheques)


def no_second_signature(run):
    return all("signature" not in str(cheque.message.get("extensions", {}).get("eip2612GasSponsoring", {}).get("info"))
               for cheque in run.cheques)  # fmt: skip


AGAIN = (1, 1, 1, 1)
CASES = {
    "lost_answer": Case(one_signature, "SettlementUncertain", 1, AGAIN),
    "rechallenge": Case(one_signature, None, 1, AGAIN),
    "failure_after_settling": Case(one_signature, None, 1, AGAIN),
    "withheld": Case(at_most(15_000), "budget", 1, (1, 2, 3), budget="$0.015"),
    "endless_validity": Case(short_lived, None, 1),
    "payto_swap": Case(told_payee, "payee_change", 1, (1, 2), {"payee_change": "refuse"}),
    "new_payees": Case(lambda run: len(payees(run)) <= 10, "new_payees_per_day", 5, range(15)),
    "cheap_then_dear": Case(at_most(DOLLAR), "per_payment_cap", 1, methods=("HEAD", "GET")),
    "price_ramp": Case(no_steep_price, "price_ratio", 18, range(30)),
    "fake_asset": Case(lambda run: {cheque.token for cheque in run.cheques} <= {USDC}, "assets", 0),
    "fake_decimals": Case(at_most(DOLLAR), "asset_domain", 0),
    "poisoned_domain": Case(nothing_signed, "asset_domain", 0),
    "redirect_chain": Case(one_signature, "PaidNotDelivered", 1, (0,)),
    "redirect_across": Case(one_signature, "one_payment_per_request", 1, (0,)),
    "header_leak": Case(lambda run: not run.server.leaked, None, 1),
    "foreign_resource": Case(nothing_signed, "resource_mismatch", 0, policy={"resource_mismatch": "refuse"}),
    "gas_sponsoring": Case(no_second_signature, None, 1),
    "always_ceiling": Case(lambda run: len(run.cheques) <= 20, "upto_at_ceiling", 20, range(25), {"upto_at_ceiling": "refuse", "velocity": None},
                           {"unsafe_trust_receipts": True}),
    "under_report": Case(at_most(100_000), "budget", 2, range(3), budget="$0.10"),
    "rotating_facilitator": Case(lambda run: len({cheque.facilitator for cheque in run.cheques}) <= 3, "facilitators", 3, range(5)),
    "unknown_flow": Case(nothing_signed, "flows", 0),
    "malformed_amount": Case(nothing_signed, "ProtocolError", 0, range(6)),
    "real_money": Case(nothing_signed, "https", 0),
    "duplicate_header": Case(nothing_signed, "ProtocolError", 0),
    "merged_header": Case(nothing_signed, "ProtocolError", 0),
    "huge_header": Case(small_payments, None, 1),
    "deep_json": Case(nothing_signed, "ProtocolError", 0),
    "two_stories": Case(nothing_signed, "header_body_conflict", 0),
    "version_downgrade": Case(told_payee, "version_downgrade", 1, (1, 2)),
    "token_inflation": Case(lambda run: run.spent() < 1, None, 0, ("v1/chat/completions",), methods=("POST",)),
    "slow_drip": Case(lambda run: run.took_s < 2, "CallTimeout", 1, policy={"timeouts": Timeouts(payment_s=1)}),
}  # fmt: skip
COSTS_NOTHING_ALONE = {"same_transaction"}
"""It hides what was not settled; what stands against it is the chain: see ``test_a14…`` and below."""


@pytest.fixture
def hostile():
    with HostileServer(slow_s=3.0) as server:
        yield server


def play(case, run, behaviour):
    for rest in case.urls:
        for method in case.methods:
            more = {"json": CHAT} if method == "POST" else {}
            run.ask(run.server.url_of(behaviour, rest), method, **more)


def guarded(case, server, behaviour):
    metering = Metering(endpoints={f"{server.url}/token_inflation": "openai"})
    policy = Policy(breaker=None, **case.policy)
    with make_guard(policy=policy, metering=metering, **case.guard) as guard:
        with guard.session("attacked", budget=case.budget) as session:
            transport = GuardedTransport(session)
            with httpx.Client(transport=transport, timeout=10, trust_env=False, follow_redirects=True) as http:
                run = Run(server, http, lambda: session.spent)
                play(case, run, behaviour)
                assert (ending(run), len(server.nonces)) == (case.ends, case.signs)
                assert_every_signature_is_in_the_books(run, session)
                return case.holds(run)


def ending(run):
    error = run.errors[-1] if run.errors else None
    return None if error is None else getattr(error, "rule", "") or type(error).__name__


def assert_every_signature_is_in_the_books(run, session):
    """What the server was given was written down before: by nonce, and in full."""
    held = {row["hold_id"]: int(row["atomic"]) for row in events(session, "authorize") if "atomic" in row}
    for cheque in run.cheques:
        assert held[cheque.nonce.removeprefix("0x")] == cheque.amount


def naive(case, server, behaviour):
    transport = NaiveTransport(KEY)
    with httpx.Client(transport=transport, timeout=10, trust_env=False, follow_redirects=True) as http:
        run = Run(server, http, lambda: transport.spent)
        play(case, run, behaviour)
        assert run.answers, "a naive client that gets nothing shows nothing"
        return case.holds(run)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("behaviour", CASES)
def test_the_guarded_client_withstands(hostile, behaviour):
    assert guarded(CASES[behaviour], hostile, behaviour)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("behaviour", CASES)
def test_the_naive_client_does_not(hostile, behaviour):
    assert not naive(CASES[behaviour], hostile, behaviour)


def test_every_behaviour_is_in_the_table():
    assert set(CASES) | COSTS_NOTHING_ALONE == set(BEHAVIOURS)


@pytest.mark.parametrize("client", [guarded, naive])
def test_an_honest_sale_is_one_signature_for_its_price(hostile, client):
    """The two differ under attack alone."""
    case = Case(lambda run: [answer.status_code for answer in run.answers] == [200, 200], None, 2, (1, 2))
    assert client(case, hostile, "honest")
    assert [cheque.amount for cheque in hostile.cheques] == [10_000, 10_000]
    assert len(hostile.nonces) == 2
