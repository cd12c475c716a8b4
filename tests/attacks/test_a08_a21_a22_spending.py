"""Rows 8, 21, 22: a price that creeps, an agent that is talked into paying strangers, and one that repeats itself for ever."""

import pytest

from tests.support.ledger import Clock
from tests.support.merchant import URL, Shop, accept, client, make_guard, required
from x402guard import ConfigError, LoopDetected, PaymentRefused, SessionTripped, VelocityExceeded
from x402guard.stores import open_store


def buy(session, number, *, amount=10_000, payee=None, host="courts.example"):
    url = f"https://{host}/opinion/{number}"
    terms = accept(amount=amount) if payee is None else accept(amount=amount, payTo=payee)
    shop = Shop(required(terms, url=url))
    return client(session, shop).get(url)


def test_a08_a_price_that_creeps_under_the_cap_is_stopped_at_twice_what_was_usual():
    with make_guard() as guard, guard.session("s", budget="$50.00") as session:
        price, paid = 100_000.0, []
        with pytest.raises(PaymentRefused) as refused:
            for number in range(100):
                buy(session, number, amount=int(price))
                paid.append(price)
                price *= 1.05
    assert refused.value.rule == "price_ratio"
    assert len(paid) == 18
    assert max(paid) < 2.5 * min(paid)


def test_a21_thirty_new_payees_in_a_minute_end_at_the_tenth_of_one_run_and_one_that_is_known_goes_on():
    paid = []
    with make_guard() as guard, guard.session("s", budget="$50.00") as session:
        for number in range(1, 31):
            try:
                buy(session, number, payee=f"0x{number:040x}", host=f"shop-{number}.example")
                paid.append(number)
            except VelocityExceeded:
                continue
        buy(session, 99, payee=f"0x{1:040x}", host="shop-1.example")
    assert paid == list(range(1, 11))


def test_a21_nothing_that_an_agent_holds_raises_a_limit():
    with make_guard() as guard, guard.session("s", budget="$1.00", id="run", tokens=1_000) as session:
        for attempt in (
            lambda: guard.session("s", id="run", budget="$2.00"),
            lambda: guard.session("s", id="run", tokens=2_000),
            lambda: session.child("c", budget="$0.10", tokens=2_000),
        ):
            with pytest.raises(ConfigError, match=r"raised|more than"):
                attempt()
        with session.child("rich", budget="$100.00") as child:
            assert child.remaining == session.remaining
        for name in ("limit", "spent", "held", "remaining", "tokens", "id"):
            with pytest.raises(AttributeError):
                setattr(session, name, 10**9)


def test_a22_a_runaway_agent_stops_at_the_eleventh_call_however_it_is_nested():
    clock = Clock()
    with make_guard(open_store("memory://", clock_ms=clock)) as guard, guard.session("s", budget="$50.00") as session:
        made, refused = 0, []
        for number in range(100):
            clock.tick(2)
            try:
                with session.child(f"sub-task-{number}", budget="$1.00") as child:
                    client(child, Shop()).get(URL)
                    made += 1
            except (LoopDetected, SessionTripped) as error:
                refused.append(error.rule)
        assert refused == ["loop_detected"] * 3 + ["session_tripped"] * 87
        with pytest.raises(SessionTripped):
            buy(session, 1)
    assert made == 10


def test_a22_two_steps_in_turn_stop_too():
    with make_guard() as guard, guard.session("s", budget="$50.00") as session:
        made = 0
        with pytest.raises(LoopDetected):
            for number in range(100):
                session.charge("serp" if number % 2 else "read", "$0.01", arguments={"q": "Roe"})
                made += 1
    assert made == 20
