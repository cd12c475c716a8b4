"""Spikes and velocity over payments, LLM calls and tools, after a restart and in two processes; what latches and what passes again."""

import httpx
import pytest

from tests.support import processes
from tests.support.ledger import Clock
from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import PAYEE, URL, Shop, accept, client, make_guard, required
from x402guard import (
    NoAcceptableOffer,
    PaymentRefused,
    Policy,
    SessionTripped,
    SpendSpike,
    Spike,
    Velocity,
    VelocityExceeded,
)
from x402guard.stores import open_store


def pay(session, number, cents=1):
    shop = Shop(required(accept(amount=cents * 10_000), url=f"{URL}/{number}"))
    return client(session, shop).get(f"{URL}/{number}")


def think(session, number, cents=1):
    # gpt-4o writes a token for $0.00001: what is held grows with the limit.
    body = ask(max_completion_tokens=1_000 * cents, messages=[{"role": "user", "content": str(number)}])
    return client(session, lambda _request: httpx.Response(200, json=completion())).post(CHAT, json=body)


def search(session, number, cents=1):
    return session.charge("serp", f"$0.{cents:02d}", arguments={"n": number})


STEPS = pytest.mark.parametrize("step", [pay, think, search])


@STEPS
def test_a_spike_trips_every_kind_of_step_and_latches(ledger_url, step):
    with make_guard(ledger_url, policy=Policy(spike=Spike(action="trip"))) as guard:
        with guard.session("s", budget="$5.00") as session:
            for number in range(4):
                step(session, number, 2)
            with pytest.raises(SpendSpike, match="over 3 times the"):
                step(session, 5, 9)
            with pytest.raises(SessionTripped, match="spend_spike"):
                step(session, 6, 1)
            assert session.report().to_dict()["terminated_by"] == "spend_spike"


@STEPS
def test_by_default_a_spike_is_an_event_and_the_step_is_taken(ledger_url, step):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$5.00") as session:
        for number in range(4):
            step(session, number, 2)
        step(session, 5, 9)
        events = [event for event in session.report().to_dict()["events"] if event["event"] == "spend_spike"]
        assert len(events) == 1
        assert f"spike {events[0]['reason']}" in " ".join(session.report().to_text().split())
        assert session.report().to_dict()["state"] == "open"


@STEPS
def test_velocity_refuses_one_too_many_and_frees_with_its_window(tmp_path, step):
    clock = Clock()
    for opened in range(2):  # and it survives a restart
        store = open_store(f"sqlite:///{tmp_path / 'l.db'}", clock_ms=clock)
        with make_guard(store, policy=Policy(velocity=Velocity(calls_per_minute=3))) as guard:
            with guard.session("s", budget="$5.00", id="run") as session:
                if not opened:
                    for number in range(3):
                        step(session, number)
                else:
                    with pytest.raises(VelocityExceeded, match=r"3 calls were made within a minute") as refused:
                        step(session, 4)
                    assert (refused.value.rule, refused.value.retry) == ("calls_per_minute", "later")
                    clock.tick(66)
                    step(session, 5)
                    assert session.report().to_dict()["state"] == "open"
        store.close()


@STEPS
def test_dollars_by_the_hour_are_counted_as_they_are_held(ledger_url, step):
    with make_guard(ledger_url, policy=Policy(velocity=Velocity(dollars_per_hour="$0.10"))) as guard:
        with guard.session("s", budget="$5.00") as session:
            step(session, 1, 4)
            step(session, 2, 4)
            with pytest.raises(VelocityExceeded, match=r"of \$0.10 were held or spent within an hour"):
                step(session, 3, 4)
            step(session, 4, 1)


def test_children_share_the_velocity_of_their_run(ledger_url):
    with make_guard(ledger_url, policy=Policy(velocity=Velocity(calls_per_day=2))) as guard:
        with guard.session("s", budget="$5.00") as session:
            for number in range(2):
                search(session.child(f"c{number}", budget="$0.10"), number)
            with pytest.raises(VelocityExceeded):
                search(session.child("fresh", budget="$0.10"), 3)


def test_new_payees_are_counted_over_a_run_and_a_refusal_names_the_rule(ledger_url):
    payees = [f"0x{n:040x}" for n in range(1, 13)]
    with (
        make_guard(ledger_url, policy=Policy(velocity=Velocity(new_payees_per_day=3))) as guard,
        guard.session("s", budget="$5.00") as run,
    ):
        for number, payee in enumerate(payees[:4]):
            with run.child(f"s{number}", budget="$1.00") as session:
                url = f"https://seller-{number}.example/a"
                http = client(session, Shop(required(accept(payTo=payee), url=url)))
                if number < 3:
                    http.get(url)
                else:
                    with pytest.raises(VelocityExceeded, match="this run has paid 3 new sellers within a day"):
                        http.get(url)
                    assert [row["rule"] for row in session.report().to_dict()["refusals"]] == ["new_payees_per_day"]


def test_runs_that_were_led_astray_leave_new_payees_to_the_others(ledger_url):
    """Two runs whose agents were led astray pay ten new sellers each; the next run still finds its own."""
    fresh = (f"0x{n:040x}" for n in range(1, 100))

    def pays(session, most):
        """The new payees that a session pays until it is refused, at most *most*."""
        for count, payee in enumerate(fresh):
            if count == most:
                return count, ""
            url = f"https://seller-{payee[-2:]}.example/a"
            try:
                client(session, Shop(required(accept(payTo=payee), url=url))).get(url)
            except VelocityExceeded as error:
                return count, error.rule
        return None

    with make_guard(ledger_url) as guard:
        astray = [pays(guard.session(name, budget="$5.00"), 30) for name in ("astray", "as well")]
        honest = pays(guard.session("honest", budget="$5.00"), 3)
    assert (astray, honest) == ([(10, "new_payees_per_day")] * 2, (3, ""))


def test_of_two_offers_the_one_whose_payee_may_be_paid_is_taken(ledger_url):
    with make_guard(ledger_url, policy=Policy(velocity=Velocity(new_payees_per_day=1))) as guard:
        with guard.session("s", budget="$5.00") as session:
            client(session, Shop()).get(URL)
            other = "https://other.example/opinion"
            cheap, known = accept(amount=5_000, payTo="0x" + "7" * 40), accept(amount=9_000)
            shop = Shop(required(cheap, known, url=other))
            client(session, shop).get(other)
            assert [payee for _, _, payee in shop.payments] == [PAYEE]
            with pytest.raises((VelocityExceeded, NoAcceptableOffer)):
                client(session, Shop(required(cheap, url=other))).get(other)


def test_a_ramp_of_five_percent_over_the_wire_stops_at_the_nineteenth_call(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$5.00") as session:
        price, paid = 10_000.0, 0
        while paid < 40:
            shop = Shop(required(accept(amount=int(price)), url=f"{URL}/{paid}"))
            try:
                client(session, shop).get(f"{URL}/{paid}")
            except PaymentRefused as refused:
                assert refused.rule == "price_ratio"
                break
            paid, price = paid + 1, price * 1.05
        assert paid == 18
        assert session.report().to_dict()["state"] == "open"


SPENDER = """
import sys
from x402guard import Guard, Policy, Velocity, VelocityExceeded
made = 0
with Guard(ledger=sys.argv[1], policy=Policy(velocity=Velocity(calls_per_hour=10))) as guard:
    with guard.session("s", id="run") as session:
        for _ in range(10):
            try:
                session.charge("serp", "$0.01")
                made += 1
            except VelocityExceeded:
                pass
print(made)
"""


def test_two_processes_share_one_window(tmp_path):
    url = f"sqlite:///{tmp_path / 'books.db'}"
    with make_guard(url) as guard, guard.session("s", budget="$5.00", id="run"):
        spenders = [processes.start(SPENDER, url) for _ in range(2)]
        assert sum(int(spender.communicate(timeout=60)[0]) for spender in spenders) == 10
