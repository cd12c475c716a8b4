"""A path that servers read in several ways is judged in each of them: by rules, risk levels, quotes and counts."""

import pytest

from tests.support.merchant import Shop, make_guard
from tests.support.refusals import fetch
from x402guard import PaymentRefused, Policy, PolicyDenied, Risk, Rule
from x402guard.policy.patterns import readings
from x402guard.policy.steps import whole_routes

HOST = "bank.example"
ODD = {
    "dots that are not resolved": "/transfer/%2e%2e%2fx",
    "dots as written": "/transfer/%2E%2E/x",
    "a slash that is escaped": "/x%2f..%2ftransfer%2fx",
    "escaped twice": "/%2574ransfer/x",
    "escaped three times": "/%252574ransfer/x",
    "a parameter": "/transfer;x=1/x",
    "a parameter that is escaped": "/transfer%3bx=1/x",
    "a parameter with a slash": "/transfer;x=%2f../x",
    "backslashes": "/transfer%5cx",
    "an empty segment": "//transfer//x",
    "dots behind a parameter": "/y/..;/transfer/x",
    "a long path": "/transfer/" + "a" * 400,
}
JUDGED = {
    "a rule": Policy(breaker=None, rules=(Rule(name="no", action="deny", match=f"* {HOST}/transfer/*"),)),
    "a risk level": Policy(breaker=None, risk=Risk(levels={f"* {HOST}/transfer/*": "CRITICAL"})),
    "a count": Policy(breaker=None, max_calls={f"GET {HOST}/transfer/*": 1}),
}


def test_each_of_them_is_read_as_the_plain_one_by_some_server():
    for path in ODD.values():
        assert any(read.startswith("/transfer/") for read in readings(path)), path


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("judged", JUDGED)
@pytest.mark.parametrize("odd", ODD)
def test_a58_an_odd_path_is_judged_as_every_server_may_read_it(odd, judged, mode):
    shop = Shop()
    with make_guard(policy=JUDGED[judged]) as guard, guard.session("s", budget="$1") as session:
        used = int(judged == "a count")
        for number in range(used):
            fetch(mode, session, shop, url=f"https://{HOST}/transfer/{number}")
        with pytest.raises(PaymentRefused) as caught:
            fetch(mode, session, shop, url=f"https://{HOST}{ODD[odd]}")
        assert caught.value.rule in ("no", "risk", "max_calls")
        assert (len(shop.nonces), session.held == 0) == (used, True)
        assert fetch(mode, session, shop, url=f"https://{HOST}/balance").status_code == 200


@pytest.mark.parametrize("odd", ODD)
def test_a58_a_quote_holds_for_an_odd_path(odd):
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        session.expect(f"GET {HOST}/transfer/*", "$0.001")
        with pytest.raises(PolicyDenied) as caught:
            fetch("sync", session, shop, url=f"https://{HOST}{ODD[odd]}")
        assert (caught.value.rule, shop.nonces) == ("price_above_quote", set())


def test_a58_uses_of_all_spellings_are_counted_together():
    shop = Shop()
    with make_guard(policy=Policy(breaker=None, max_calls={f"GET {HOST}/transfer": 2})) as guard:
        with guard.session("s", budget="$1") as session:
            fetch("sync", session, shop, url=f"https://{HOST}/transfer")
            fetch("sync", session, shop, url=f"https://{HOST}/transfer;a=1")
            with pytest.raises(PaymentRefused) as caught:
                fetch("sync", session, shop, url=f"https://{HOST}/transfer/%2e%2e%2ftransfer")
            assert (caught.value.rule, len(shop.nonces)) == ("max_calls", 2)
            fetch("sync", session, shop, url=f"https://{HOST}/transfers")


@pytest.mark.parametrize(
    "path", ["/", "", "/a/b", "/a.b/c", "/a/b/", "/caf%C3%A9", "/a%20b", "/a:b@c", "/.well-known/x", "/~a/-/_"]
)
def test_a_plain_path_has_one_reading(path):
    assert len({read for read in readings(path) if "%" not in read}) == 1


def test_a_hostile_path_is_read_in_bounded_time():
    for path in ("/%25" * 20_000, "/;%3b" * 20_000, "/%252e%252e" * 10_000, "\\%5c/.." * 20_000):
        assert 1 <= len(readings(path)) <= 64


def test_what_is_shown_is_the_plain_reading():
    assert whole_routes("get", "Bank.Example.", "/a/%2e%2e/transfer;x=1")[0] == "GET bank.example/transfer;x=1"


def test_a_tool_that_is_named_as_a_route_counts_as_one():
    with make_guard(policy=Policy(breaker=None, loop=None, max_calls={"GET api.example/*": 2})) as guard:
        with guard.session("s", budget="$1") as session:
            for _ in range(2):
                session.charge("GET api.example/search", "$0.01")
            with pytest.raises(PaymentRefused) as caught:
                session.charge("GET api.example/search", "$0.01")
            assert caught.value.rule == "max_calls"
            session.charge("serp", "$0.01")
