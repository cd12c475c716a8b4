"""A host that looks like another one that was paid before."""

from decimal import Decimal

import pytest

from tests.support.merchant import Shop, make_guard
from tests.support.refusals import fetch
from x402guard import Policy, PolicyDenied

MODES = pytest.mark.parametrize("mode", ["sync", "async"])
PAID = "weather-report.example"
ALIKE = [
    "weather-rep0rt.example",
    "weatherreport.example",
    "weather_report.example",
    "WEATHER-REP0RT.example:8443",
]


@MODES
@pytest.mark.parametrize("host", ALIKE)
def test_a45_a_host_that_looks_like_a_paid_one_is_refused(mode, host, ledger):
    shop = Shop()
    with make_guard(ledger) as guard, guard.session("s", budget="$1.00") as session:
        fetch(mode, session, shop, url=f"https://{PAID}/a")
    with make_guard(ledger) as guard, guard.session("another", budget="$1.00") as session:
        with pytest.raises(PolicyDenied, match=rf"looks like {PAID}.*policy\.hosts") as caught:
            fetch(mode, session, shop, url=f"https://{host}/a")
        assert (caught.value.rule, len(shop.payments), session.held) == ("look_alike_host", 1, 0)
        fetch(mode, session, shop, url=f"https://{PAID}:8443/a")  # another port of the same host
    policy = Policy(hosts={host.lower(), PAID})
    with make_guard(ledger, policy=policy) as guard, guard.session("listed", budget="$1.00") as session:
        fetch(mode, session, shop, url=f"https://{host}/a")
        assert session.spent == Decimal("0.01")


@pytest.mark.parametrize(
    ("one", "two"),
    [("rnail.example", "mail.example"), ("vvorld.example", "world.example"), ("pay1.example", "payl.example")],
)
def test_a45_letters_that_look_like_two(one, two, ledger):
    shop = Shop()
    with make_guard(ledger) as guard, guard.session("s", budget="$1.00") as session:
        fetch("sync", session, shop, url=f"https://{one}/a")
        with pytest.raises(PolicyDenied, match="looks like"):
            fetch("sync", session, shop, url=f"https://{two}/a")


@pytest.mark.parametrize(
    ("one", "two", "paid"),
    [
        ("eu-1.shop.example", "eu1.shop.example", True),
        ("api-1.shop.co.uk", "api1.shop.co.uk", True),
        ("sh0p.co.uk", "shop.co.uk", False),
        ("api.sh0p.co.uk", "api.shop.co.uk", False),
    ],
)
def test_a45_hosts_of_one_domain_are_siblings(one, two, paid, ledger):
    shop = Shop()
    with make_guard(ledger) as guard, guard.session("s", budget="$1.00") as session:
        fetch("sync", session, shop, url=f"https://{one}/a")
        if paid:
            assert fetch("sync", session, shop, url=f"https://{two}/a").status_code == 200
        else:
            with pytest.raises(PolicyDenied, match="looks like"):
                fetch("sync", session, shop, url=f"https://{two}/a")


def test_a45_hosts_that_differ_are_paid(ledger):
    shop = Shop()
    hosts = ["api2.example", "api3.example", "a.example", "b.example", "127.0.0.1", "127.0.0.10", "[::1]"]
    with make_guard(ledger, policy=Policy(velocity=None)) as guard, guard.session("s", budget="$1.00") as session:
        for host in hosts:
            assert fetch("sync", session, shop, url=f"https://{host}/a").status_code == 200


@MODES
def test_a45_letters_of_other_alphabets_need_the_owners_list(mode):
    shop, host = Shop(), "xn--curts-e2b.example"  # с, o and u in Cyrillic
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(PolicyDenied, match=r"letters that can look like others; list it in policy\.hosts"):
            fetch(mode, session, shop, url=f"https://{host}/a")
        assert shop.payments == []
    with make_guard(policy=Policy(hosts={host})) as guard, guard.session("s", budget="$1.00") as session:
        assert fetch(mode, session, shop, url=f"https://{host}/a").status_code == 200
