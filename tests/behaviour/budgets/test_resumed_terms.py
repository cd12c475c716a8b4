"""A process that is started again asks for the terms that it asked for before, whatever its owner has changed since."""

from decimal import Decimal

import pytest

from tests.support.merchant import make_guard
from x402guard import BudgetExhausted, ConfigError, Owner


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/l.db"


def job(url, guard=None, **terms):
    with make_guard(url, budget="$50", **(guard or {})) as opened, opened.session("job", id="job", **terms) as session:
        return session.remaining


def test_a_part_of_the_guards_own_budget_is_kept_again(url):
    for _ in range(3):
        assert job(url, {"session_budget": "$5"}, reserve="10%") == Decimal("4.50")


@pytest.mark.parametrize("reserve", ["10%", "$0.50"])
def test_a_budget_that_the_owner_lowers_below_its_reserve_opens_and_pays_nothing(url, reserve):
    assert job(url, budget="$5", reserve=reserve) == Decimal("4.50")
    with Owner(url) as owner:
        owner.set_budget("job", "$0.40", stops=True)
    assert job(url, budget="$5", reserve=reserve) == 0
    with make_guard(url, budget="$50") as guard, guard.session("job", id="job") as session:
        with pytest.raises(BudgetExhausted):
            session.charge("serp", "$0.41")
    with Owner(url) as owner:
        owner.set_budget("job", "$3")
    assert job(url, budget="$5", reserve=reserve) == Decimal("2.50")


def test_a_part_of_a_budget_that_its_code_lowers_is_no_lower_reserve(url):
    assert job(url, budget="$5", reserve="10%") == Decimal("4.50")
    assert job(url, budget="$2", reserve="10%") == Decimal("1.50")
    assert job(url, budget="$2", reserve="50%") == Decimal("1.00")
    with pytest.raises(ConfigError, match="never lowered"):
        job(url, budget="$2", reserve="$0.20")
    with pytest.raises(ConfigError, match="leave nothing"):
        job(url, budget="$0.90", reserve="10%")
    with pytest.raises(ConfigError, match="leave nothing"):
        job(url, reserve="$2")


CHANGES = [("$20", "$10"), ("$3", "$10"), ("$20", "$2"), ("$7", "$6")]


@pytest.mark.parametrize(("first", "second"), CHANGES)
@pytest.mark.parametrize("of", ["session", "wallet", "budget"])
def test_code_that_took_over_the_owners_limit_is_not_locked_out_by_the_next(url, first, second, of):
    def opens(limit):
        with make_guard(url, budget=limit if of == "wallet" else None) as guard:
            if of == "budget":
                return guard.budget("team", limit).remaining
            with guard.session("job", id="job", budget=limit if of == "session" else "$1") as session:
                return session.remaining

    name = {"session": "job", "wallet": "wallet", "budget": "team"}[of]
    opens("$5")
    for limit in (first, second):
        with Owner(url) as owner:
            owner.set_budget(name, limit)
        for asked in ("$5", first, second):
            if int(asked[1:]) >= int(limit[1:]) or asked == "$5":
                opens(asked)
        with Owner(url) as owner:
            assert owner.budget(name).budget == Decimal(limit[1:])


@pytest.mark.parametrize("of", ["session", "budget"])
@pytest.mark.parametrize("deployed", [("$8",), ("$8", "$6"), ("$8", "$6", "$4")])
def test_what_the_owner_raises_stays_also_after_its_code_has_asked_for_less(url, of, deployed):
    """The code asks for $5, the owner says $20, new code asks for less, and the owner raises it again."""

    def opening(limit):
        with make_guard(url) as guard:
            return (guard.budget("c", limit) if of == "budget" else guard.session("c", id="c", budget=limit)).limit

    def owner_says(limit):
        with Owner(url) as owner:
            owner.set_budget("c", limit)

    opening("$5")
    owner_says("$20")
    assert opening("$5") == 20
    for asked in deployed:
        assert opening(asked) == Decimal(asked[1:])
        owner_says("$30")
        assert opening(asked) == opening(asked) == 30


def test_a_limit_that_only_its_code_has_set_is_never_raised(url):
    job(url, budget="$5")
    with pytest.raises(ConfigError, match="never raised"):
        job(url, budget="$6")
    job(url, budget="$4")
    with pytest.raises(ConfigError, match="never raised"):
        job(url, budget="$5")


@pytest.mark.parametrize(
    "tz", ["localtime", "posix/Europe/Berlin", "right/UTC", "posixrules", "europe/berlin", "Factory2"]
)
def test_a_time_zone_that_some_machines_do_not_know_is_an_error(url, tz):
    with make_guard(url, budget="$50") as guard, pytest.raises(ConfigError, match=r"^tz: "):
        guard.budget("team", "$5", per="day", tz=tz)


@pytest.mark.parametrize("tz", ["UTC", "Europe/Berlin", "America/Argentina/Buenos_Aires", "Etc/GMT+3"])
def test_a_time_zone_that_each_machine_knows_is_taken(url, tz):
    with make_guard(url, budget="$50") as guard:
        assert guard.budget("team", "$5", per="day", tz=tz).remaining == 5
