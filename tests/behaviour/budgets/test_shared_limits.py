"""What one process does to a budget that others share: its settings stop nobody, and a day's overshoot ends with the day."""

import pytest

from tests.support.ledger import Clock
from tests.support.merchant import make_guard
from x402guard import ConfigError, SessionTripped
from x402guard.stores import open_store

DAY_S = 86_400


def test_a_lower_setting_than_what_is_used_stops_no_agent_and_starts_no_guard(ledger_url):
    store = open_store(ledger_url)
    with make_guard(store) as guard, guard.session("a", budget="$20.00") as first:
        first.charge("x", "$18.00")
        for lower in ("$5.00", "$17.999999"):
            with pytest.raises(ConfigError) as refused:
                make_guard(store, budget=lower)
            assert f"budget: {lower} is less than what the wallet has used ($18.00)" in str(refused.value)
            assert f"x402guard budget set wallet {lower[1:]} --yes to stop it" in str(refused.value)
        with guard.session("another", budget="$1.00") as other:
            other.charge("x", "$0.01")
        with make_guard(store, budget="$19.00") as lower, lower.session("third", budget="$5.00") as third:
            assert str(third.remaining) == "0.99", "one that is not below what is used lowers the limit"
        named = guard.budget("customer", "$3.00", per="day", tz="UTC")
        with named.session("s", budget="$3.00") as session:
            session.charge("x", "$0.50")
        with pytest.raises(ConfigError, match=r"limit: \$0.20 is less than what budget 'customer' has used \(\$0.50\)"):
            guard.budget("customer", "$0.20", per="day", tz="UTC")
        with named.session("s", budget="$0.10") as session:
            session.charge("x", "$0.10")
    store.close()


def test_a_budget_by_the_day_that_a_bill_has_carried_over_its_limit_goes_on_the_next_day(ledger_url):
    clock = Clock()
    store = open_store(ledger_url, clock_ms=clock)
    told = []
    with make_guard(store, on_notice=lambda notice: told.append(notice)) as guard:
        budget = guard.budget("customer-7", "$3.00", per="day", tz="UTC")
        with budget.session("a", budget="$3.00") as session:
            session.charge("x", "$2.99")
            session.record_usage("openai", "gpt-4o", {"input_tokens": 16_000})
        assert (str(budget.spent), str(budget.remaining)) == ("3.03", "0.00")
        with budget.session("b", budget="$1.00") as session, pytest.raises(SessionTripped, match="until its day ends"):
            session.charge("x", "$0.01")
        for days in (1, 1, 5):
            clock.tick(days * DAY_S)
            assert str(budget.remaining) == "3.00"
            with budget.session("c", budget="$1.00") as session:
                session.charge("x", "$0.01")
    [tripped] = [each for each in told if each.kind == "tripped" and "customer-7" in each.message]
    assert "nothing more is authorized until its day ends (2027-01-16 00:00 UTC), or until its owner" in tripped.message
    store.close()
