"""The wallet's own limit by day, week or month: from code, a settings file, the environment and the command line."""

import json
from decimal import Decimal

import pytest

from tests.support.command_line import typed
from tests.support.ledger import Clock
from tests.support.merchant import make_guard
from x402guard import BudgetExhausted, ConfigError, Guard, Owner, SessionTripped
from x402guard.guard.settings import load_settings
from x402guard.stores import open_store

DAY_S = 86_400
DAILY = {"amount": "1.00", "per": "day", "tz": "UTC"}


def test_a_wallet_by_the_day_begins_anew_each_day_and_a_restart_renews_nothing(ledger_url):
    clock = Clock()
    store = open_store(ledger_url, clock_ms=clock)
    for day in range(3):
        for _ in range(2):  # two starts of the program a day
            with make_guard(store, budget=DAILY) as guard, guard.session("agent", budget="$5.00") as session:
                for _ in range(6):
                    try:
                        session.charge("x", "$0.10", arguments={"day": day, "at": clock.now_ms})
                    except BudgetExhausted:
                        break
                    clock.tick(1)
        [wallet] = [node for node in store.nodes() if node.id == "wallet"]
        assert wallet.used == (day + 1) * 10**9
        clock.tick(DAY_S)
    store.close()


def test_an_overshoot_of_the_wallet_ends_with_its_day(ledger_url):
    clock = Clock()
    store = open_store(ledger_url, clock_ms=clock)
    with make_guard(store, budget=DAILY) as guard:
        with guard.session("a", budget="$5.00") as session:
            session.record_usage("openai", "gpt-4o", {"input_tokens": 600_000})
        with guard.session("b", budget="$1.00") as session, pytest.raises(SessionTripped, match="until its day ends"):
            session.charge("x", "$0.01")
        clock.tick(DAY_S)
        with guard.session("c", budget="$1.00") as session:
            session.charge("x", "$0.01")
    store.close()


def test_another_window_in_one_process_changes_nothing_and_names_the_command(ledger_url):
    store = open_store(ledger_url)
    make_guard(store, budget=DAILY).close()
    for other in ("$1.00", DAILY | {"per": "month"}, DAILY | {"tz": "Europe/Berlin"}):
        with pytest.raises(ConfigError, match="but this ledger's wallet has day in UTC"):
            make_guard(store, budget=other)
    with pytest.raises(ConfigError, match=r"x402guard budget set wallet 1\.00 --per month --tz UTC"):
        make_guard(store, budget=DAILY | {"per": "month"})
    make_guard(store, budget=DAILY).close()
    make_guard(store).close()
    store.close()


def test_a_wallet_without_a_limit_gets_the_first_one_with_its_window(ledger_url):
    store = open_store(ledger_url)
    with make_guard(store) as guard, guard.session("s", budget="$1.00") as session:
        session.charge("x", "$0.30")
        with make_guard(store, budget=DAILY) as limited, limited.session("t", budget="$5.00") as other:
            with pytest.raises(BudgetExhausted):
                other.charge("x", "$1.01")
    store.close()


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        ({}, "budget: {} is no budget; write"),
        ({"amount": "1", "par": "day"}, "is no budget; write"),
        ({"per": "day"}, "is no budget; write"),
        ({"amount": "1", "tz": "UTC"}, "is no budget; write"),
        ({"amount": "lots", "per": "day"}, "budget.amount: 'lots' is not a dollar amount"),
        ({"amount": "1", "per": "hour"}, "budget.per: 'hour' is not one of 'day', 'week' and 'month'"),
        ({"amount": "1", "per": "day", "tz": "Mars"}, "budget.tz: 'Mars' is not a time zone"),
    ],
)
def test_a_budget_that_is_none_is_a_typed_error(budget, says):
    with pytest.raises((ConfigError, ValueError)) as refused:
        Guard(ledger="memory://", budget=budget)
    assert says in str(refused.value)


def test_the_settings_have_it_as_a_table_and_the_environment_as_json(tmp_path, monkeypatch):
    file = tmp_path / "x402guard.toml"
    file.write_text('budget = {amount = "20.00", per = "month", tz = "Europe/Berlin"}\nledger = "memory://"\n')
    for _ in range(2):
        with Guard(**load_settings(file).guard_arguments(pays=False)) as guard:
            [wallet] = guard.shell.store.path("wallet")
            assert (wallet.limit, wallet.window.per, wallet.window.tz) == (20 * 10**9, "month", "Europe/Berlin")
        file.write_text('ledger = "memory://"\n')
        monkeypatch.setenv("X402GUARD_BUDGET", json.dumps({"amount": "20.00", "per": "month", "tz": "Europe/Berlin"}))
    monkeypatch.setenv("X402GUARD_BUDGET", "20.00")
    with Guard(**load_settings(file).guard_arguments(pays=False)) as guard:
        [wallet] = guard.shell.store.path("wallet")
        assert (wallet.limit, wallet.window) == (20 * 10**9, None)


def test_an_owner_gives_the_wallet_and_a_customer_a_window_and_takes_it_away(tmp_path):
    url = f"sqlite:///{tmp_path / 'x402guard.db'}"
    with make_guard(url, budget="$2.00") as guard:
        with guard.budget("customer", "$1.00", per="day", tz="UTC").session("s", budget="$1.00", id="s") as session:
            session.charge("x", "$0.30")
        done = typed("budget", "set", "wallet", "3.00", "--per", "month", "--tz", "Europe/Berlin", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert typed("budget", "set", "customer", "5.00", "--per", "week", cwd=tmp_path).returncode == 0
        for session, per, says in (
            ("s", "day", "has a budget for good"),
            ("wallet", "hour", "per: 'hour' is not one of"),
        ):
            refused = typed("budget", "set", session, "3.00", "--per", per, cwd=tmp_path)
            assert (refused.returncode, says in refused.stderr) == (2, True)
        with guard.session("t", budget="$9.00") as session:
            session.charge("x", "$2.00")
    make_guard(url, budget="$2.00").close()  # the settings of before: what its owner has set counts
    with Owner(url) as owner:
        assert [(row.id, row.per) for row in owner.sessions() if row.per] == [
            ("wallet", "month Europe/Berlin"),
            ("budget:customer", "week UTC"),
        ]
        assert owner.verify() == []
        assert owner.budget("wallet").remaining == Decimal("1.00"), "what was captured before counts in no window"


def test_a_used_wallet_gets_a_window_in_which_nothing_was_spent_yet(tmp_path):
    url = f"sqlite:///{tmp_path / 'x402guard.db'}"
    with make_guard(url) as guard, guard.session("s", budget="$50.00") as session:
        session.charge("x", "$30.00")
        done = typed("budget", "set", "wallet", "20.00", "--per", "day", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, "the wallet: no limit → $20.00, $20.00 left, open\n"), done.stderr
        session.charge("x", "$5.00", arguments={"n": 2})
        refused = typed("budget", "set", "wallet", "1.00", cwd=tmp_path)
        assert (refused.returncode, "stops the wallet: $5.00 is used" in refused.stderr) == (2, True)
    with Owner(url) as owner:
        assert (owner.budget("wallet").remaining, owner.verify()) == (Decimal(15), [])
        assert [each.kind for each in owner.report("wallet").view.marks if each.kind == "trip"] == []


def test_a_setting_gives_a_used_wallet_its_first_limit_with_a_window(ledger_url):
    store = open_store(ledger_url)
    with make_guard(store) as guard, guard.session("s", budget="$50.00") as session:
        session.charge("x", "$30.00")
        with make_guard(store, budget=DAILY) as limited, limited.session("t", budget="$5.00") as other:
            other.charge("x", "$1.00")
            with pytest.raises(BudgetExhausted):
                other.charge("x", "$0.01", arguments={"n": 2})
    store.close()
