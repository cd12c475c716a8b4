"""A scripted agent that never stops, on a real chain: each guard alone stops it at the expected call, and the report names it."""

import json
from decimal import Decimal

import httpx
import pytest
from eth_account import Account

from tests.support.ledger import Clock
from tests.support.testnet import broken
from x402guard import Guard, GuardedTransport, LocalSigner, Loop, PaymentRefused, Policy, Spike, Velocity
from x402guard.policy import Timeouts
from x402guard.stores import open_store
from x402guard.testing import FacilitatorClient, Merchant, Offer, Route, Testnet, default_routes

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("runaway")]

CENT = 10_000
OFF = {
    "loop": None,
    "spike": None,
    "velocity": None,
    "breaker": None,
    "bulkhead": None,
    "risk": None,
    "soft_limits": (),
}
MOST_TRIES = 30


def answer(_request):
    return {}


ROUTES = (
    *default_routes(),
    Route(name="broken", path="/broken/{n}", answer=broken, offers=(Offer(price=CENT),)),
    Route(name="greedy", path="/greedy", answer=answer, methods=("POST",), offers=(Offer(price=CENT, scheme="upto"),)),
    *(
        Route(name=f"tariff {n}", path=f"/tariff/{n}", answer=answer, offers=(Offer(price=CENT * (1 if n < 6 else 5)),))
        for n in range(1, 8)
    ),
)


@pytest.fixture(scope="module")
def net():
    with Testnet(routes=ROUTES) as net:
        yield net


@pytest.fixture(scope="module")
def stranger(net):
    """Another merchant on the same chain, who wants the money elsewhere."""
    payee = str(Account.create().address)
    with Merchant(settler=FacilitatorClient(net.facilitator), payee=payee, chain_id=net.chain_id) as merchant:
        yield merchant


class Runaway:
    """Asks for what its script says, over and over, whatever it is told; its owner may act before a try."""

    def __init__(self, net, folder, policy, *, budget="$5.00", others=()):
        self.net, self.clock = net, Clock(_now_ms())
        self.stop = folder / "stop"
        self.store = open_store(f"sqlite:///{folder / 'spend.db'}", clock_ms=self.clock)
        signer, chains = LocalSigner.from_key(net.payer_key), {net.network: net.rpc}
        self.guard = Guard(
            signer=signer, ledger=self.store, chains=chains, policy=policy, kill_file=self.stop, background_checks=False
        )
        self.session = self.guard.session("runaway", budget=budget)
        self.others = others
        self.moved_before = len(net.transfers())

    def runs(self, script, acts=None, at=0, tries=MOST_TRIES):
        """Return how many tries were let through, up to the first that was not, and the rules of the refusals after it."""
        through, rules = [], []
        with httpx.Client(transport=GuardedTransport(self.session), timeout=30, trust_env=False) as http:
            for number in range(tries):
                if acts is not None and number == at:
                    acts(self)
                method, path = script(number)
                base = (
                    self.others[0].url.replace("127.0.0.1", "localhost")
                    if path.startswith("/elsewhere")
                    else self.net.merchant.url
                )
                url = base + path.removeprefix("/elsewhere")
                try:
                    through.append(http.request(method, url, json={} if method == "POST" else None).status_code)
                except PaymentRefused as refused:
                    rules.append(refused.rule)
                    if len(rules) == 5:
                        break
                else:
                    self.session.reconcile()
        return through, rules

    @property
    def moved(self):
        """What the chain says was moved, in atomic units."""
        return [transfer.amount for transfer in self.net.transfers()[self.moved_before :]]

    def close(self):
        self.guard.close()
        self.store.close()


def _now_ms():
    import time

    return time.time_ns() // 1_000_000


@pytest.fixture
def runaway(net, stranger, tmp_path):
    made = []

    def make(policy, **more):
        made.append(Runaway(net, tmp_path, policy, others=(stranger,), **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def the_same(_number):
    return "GET", "/cents/1"


def in_turn(number):
    return "GET", f"/cents/{number % 2}"


def always_new(number):
    return "GET", f"/cents/{number}"


def dimes(number):
    return "GET", f"/documents/{number}"


def then_a_dime(number):
    return "GET", f"/cents/{number}" if number < 4 else "/documents/1"


def dearer(number):
    return "GET", f"/tariff/{min(number + 1, 7)}"


def greedy(number):
    return "POST", f"/greedy?n={number}"


def elsewhere(number):
    return "GET", f"/cents/{number}" if number < 3 else f"/elsewhere/cents/{number}"


def velocity(**limits):
    return {"velocity": Velocity(**{"new_payees_per_day": None, "price_ratio": None, **limits})}


ROWS = {  # what it does, with which guard, how many are paid for, the rule, and what ends the session
    "loop": (the_same, {"loop": Loop(latch_after=1, calls=5, failures=0)}, 5, "loop_detected", "loop_detected"),
    "cycle": (in_turn, {"loop": Loop(latch_after=1, calls=3, window_s=4, longest_cycle=2, failures=0)}, 7, "loop_detected", "loop_detected"),
    "spike": (then_a_dime, {"spike": Spike(action="trip")}, 4, "spend_spike", "spend_spike"),
    "calls a minute": (always_new, velocity(calls_per_minute=4), 4, "calls_per_minute", None),
    "calls an hour": (always_new, velocity(calls_per_hour=4), 4, "calls_per_hour", None),
    "calls a day": (always_new, velocity(calls_per_day=4), 4, "calls_per_day", None),
    "dollars a minute": (dimes, velocity(dollars_per_minute="$0.35"), 3, "dollars_per_minute", None),
    "dollars an hour": (dimes, velocity(dollars_per_hour="$0.35"), 3, "dollars_per_hour", None),
    "dollars a day": (dimes, velocity(dollars_per_day="$0.35"), 3, "dollars_per_day", None),
    "share of a payee": (dimes, velocity(percent_per_payee=8), 4, "percent_per_payee", None),
    "price": (dearer, velocity(price_ratio=2), 5, "price_ratio", None),
    "new payees": (elsewhere, velocity(new_payees_per_day=1), 3, "new_payees_per_day", None),
    "upto at its ceiling": (greedy, {"upto_at_ceiling": "refuse"}, 20, "upto_at_ceiling", None),
    "max_steps": (always_new, {"max_steps": 6}, 6, "max_steps", None),
    "max_calls": (the_same, {"max_calls": lambda net: {f"GET {net.merchant.url[7:]}/cents/1": 4}}, 4, "max_calls", None),
}  # fmt: skip


def made(net, guards):
    """Return the policy of a row: its guards, all others off."""
    return Policy(**{**OFF, **{name: guard(net) if callable(guard) else guard for name, guard in guards.items()}})


def assert_stopped(run, through, rules, *, paid, rule, word):
    assert (len(through), set(through)) == (paid, {200})
    after = "session_tripped" if word else rule
    assert rules == [rule, *[after] * 4]
    report = run.session.report().to_dict()
    ended = word or ("budget_exhausted" if rule == "budget" else None)
    assert (report["state"], report["terminated_by"]) == ("tripped" if word else "open", ended)
    named = {row["rule"]: row["count"] for row in report["refusals"]}
    assert named[rule] == rules.count(rule)
    assert rule in run.session.report().to_text()
    assert Decimal(report["spent"]) * 10**6 == sum(run.moved)
    assert (report["held"], report["outstanding"]) == ("0.00", [])
    assert report["payments"]["calls"] == len(run.moved) == paid


@pytest.mark.parametrize("name", ROWS)
def test_each_guard_alone_stops_it_at_the_expected_call(net, runaway, name):
    script, guards, paid, rule, word = ROWS[name]
    run = runaway(made(net, guards))

    def slowly(number):
        run.clock.tick(3)  # each of two pages comes once a window: that is a cycle, and no repeated call
        return script(number)

    through = run.runs(slowly if name == "cycle" else script)
    assert_stopped(run, *through, paid=paid, rule=rule, word=word)


def test_the_budget_alone_stops_it_and_the_session_ends_by_it(net, runaway):
    run = runaway(made(net, {}), budget="$0.35")
    assert_stopped(run, *run.runs(dimes), paid=3, rule="budget", word=None)
    run.session.close()
    assert run.session.report().to_dict()["terminated_by"] == "budget_exhausted"


ACTS = {
    "kill switch": (lambda run: run.session.trip("a person saw it"), {}, "session_tripped", "kill_switch"),
    "kill file": (lambda run: run.stop.touch(), {}, "session_tripped", "kill_switch"),
    "session timeout": (
        lambda run: run.clock.tick(61), {"timeouts": Timeouts(session_s=60)}, "session_timeout", "session_timeout",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTS)
def test_what_its_owner_does_stops_it_at_the_next_call(net, runaway, name):
    acts, guards, rule, word = ACTS[name]
    run = runaway(made(net, guards))
    assert_stopped(run, *run.runs(always_new, acts, at=3), paid=3, rule=rule, word=word)


@pytest.mark.parametrize("tries", [6, pytest.param(MOST_TRIES, marks=pytest.mark.long)])
def test_a_step_that_takes_too_long_stops_it_until_the_model_is_asked(net, runaway, tries):
    run = runaway(made(net, {"timeouts": Timeouts(step_s=60)}))
    run.session.step()
    through, rules = run.runs(always_new, lambda now: now.clock.tick(61), at=3)
    assert_stopped(run, through, rules, paid=3, rule="step_timeout", word=None)
    run.session.step()
    assert len(run.runs(always_new, tries=tries)[0]) == tries


def test_five_failures_in_a_row_stop_it_with_nothing_moved(net, runaway):
    run = runaway(made(net, {"loop": Loop(latch_after=1, calls=1_000, longest_cycle=1)}))
    through, rules = run.runs(lambda number: ("GET", f"/broken/{number}"))
    assert (through, rules) == ([503] * 5, ["session_tripped"] * 5)
    report = run.session.report().to_dict()
    assert (report["terminated_by"], run.moved) == ("loop_detected", [])
    assert (report["spent"], report["held"], len(report["outstanding"])) == ("0.00", "0.05", 5)
    assert "loop_detected" in json.dumps(report)


ONE_MORE = 1 + max(paid for _, _, paid, _, _ in ROWS.values())


@pytest.mark.parametrize("tries", [ONE_MORE, pytest.param(MOST_TRIES, marks=pytest.mark.long)])
def test_without_a_guard_nothing_but_the_script_ends_it(net, runaway, tries):
    """Else the rows above would prove nothing: this is one more than any of them lets pass."""
    run = runaway(made(net, {}))
    through, rules = run.runs(the_same, tries=tries)
    assert (len(through), rules, sum(run.moved)) == (tries, [], tries * CENT)
