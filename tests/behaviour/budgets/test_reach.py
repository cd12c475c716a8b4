"""Sessions, children and scopes that may pay fewer hosts and payees, and use fewer tools, than the policy allows."""

from decimal import Decimal

import httpx
import pytest

from tests.support.merchant import OTHER_PAYEE, PAYEE, Shop, accept, make_guard, required
from tests.support.refusals import fetch
from x402guard import ConfigError, Policy, PolicyDenied

CENT = Decimal("0.01")
MODES = pytest.mark.parametrize("mode", ["sync", "async"])
COURTS, PIXEL = "https://courts.example/a", "https://pixel.example/p"


def denied(rule):
    return pytest.raises(PolicyDenied, match=f"^{rule}: .* this session's {rule}=")


@MODES
def test_a_session_pays_its_hosts_alone(mode):
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1.00", hosts={"courts.example"}) as session:
        assert fetch(mode, session, shop, url=COURTS).status_code == 200
        with denied("hosts"):
            fetch(mode, session, shop, url=PIXEL)
        assert (len(shop.payments), session.spent, session.held) == (1, CENT, 0)
        free = httpx.Response(200)
        assert fetch(mode, session, lambda _r: free, url=PIXEL).status_code == 200 if mode == "sync" else True


@MODES
def test_a_session_pays_its_payees_alone(mode):
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1.00", payees=[PAYEE.lower()]) as session:
        assert fetch(mode, session, shop, url=COURTS).status_code == 200
        with denied("payees"):
            fetch(mode, session, Shop(required(accept(payTo=OTHER_PAYEE))), url=f"{COURTS}/2")
        two = Shop(required(accept(amount=9_000, payTo=OTHER_PAYEE), accept()))
        fetch(mode, session, two, url=f"{COURTS}/3")  # of two offers, the one that may be paid
        assert [payee for _, _, payee in two.payments] == [PAYEE]


@MODES
def test_what_is_inside_can_only_narrow_further(mode):
    shop = Shop()
    with make_guard(policy=Policy(hosts={"*.example"})) as guard:
        with guard.session("s", budget="$1.00", hosts={"courts.example", "pixel.example"}) as session:
            child = session.child("c", budget="$0.50", hosts={"pixel.example", "third.example"})
            with child:
                assert fetch(mode, child, shop, url=PIXEL).status_code == 200
                for url in (COURTS, "https://third.example/a"):
                    with denied("hosts"):
                        fetch(mode, child, shop, url=url)
                with child.scope("$0.10", hosts={"courts.example"}) as scope:
                    for url in (COURTS, PIXEL):
                        with denied("hosts"):
                            fetch(mode, scope, shop, url=url)
            assert fetch(mode, session, shop, url=COURTS).status_code == 200
        with guard.budget("customer", "$1.00").session("b", budget="$1.00", hosts=["courts.example"]) as session:
            with denied("hosts"):
                fetch(mode, session, shop, url=PIXEL)


def test_tools_are_named_or_matched():
    with make_guard() as guard, guard.session("s", budget="$1.00", tools={"search_*", "serp"}) as session:
        session.charge("serp", "$0.01")
        session.charge("search_web", "$0.01")
        for use in (
            lambda: session.charge("wipe", "$0.01"),
            lambda: session.hold("wipe", up_to="$0.01").__enter__(),
            lambda: session.tool(cost="$0.01")(wipe)(),
            lambda: session.child("c", budget="$0.10").charge("wipe", "$0.01"),
        ):
            with denied("tools"):
                use()
        with session.scope("$0.10", tools=["serp"]) as scope:
            scope.charge("serp", "$0.01")
            with denied("tools"):
                scope.charge("search_web", "$0.01")
        assert session.spent == 3 * CENT


def wipe():
    raise AssertionError("it ran")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"hosts": {"other.example"}}, "hosts: 'other.example' is not in policy.hosts; a session can only narrow"),
        ({"payees": {OTHER_PAYEE}}, f"payees: '{OTHER_PAYEE}' is not in policy.payees; a session can only narrow"),
        ({"hosts": set()}, "hosts: an empty list would allow nothing"),
        ({"hosts": "courts.example"}, "hosts: write a set or list"),
        ({"hosts": {"https://courts.example/a"}}, "hosts: .* is a URL or a path"),
        ({"payees": {"0x12"}}, "payees: '0x12' is not an address"),
        ({"tools": {""}}, "tools: '' is not the name of a tool"),
        ({"tools": {"GET courts.example/*"}}, "tools: .* is not the name of a tool"),
        ({"tools": {7}}, "tools: 7 is not the name of a tool"),
    ],
)
def test_a_wrong_narrowing_is_named(given, says):
    policy = Policy(hosts={"courts.example", "*.courts.example"}, payees={PAYEE})
    with make_guard(policy=policy) as guard:
        with pytest.raises(ConfigError, match=says):
            guard.session("s", budget="$1.00", **given)
        session = guard.session("s", budget="$1.00", hosts={"deep.courts.example"})
        with pytest.raises(ConfigError, match=says):
            session.child("c", budget="$0.10", **given)
        with pytest.raises(ConfigError, match=says), session.scope("$0.10", **given):
            pass


@MODES
@pytest.mark.parametrize(
    "location", ["https://evil.example/pay?x=1", "//evil.example/pay?x=1", "https://u:p@evil.example./p%61y?y=2"]
)
def test_a_redirect_that_is_followed_by_hand_is_one(mode, location):
    def moves(_request):
        return httpx.Response(302, headers={"location": location})

    async def moves_async(_request):
        return moves(_request)

    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        fetch(mode, session, moves if mode == "sync" else moves_async, url=COURTS)
        by_hand = "https://evil.example/pay?x=1&again=1"
        with pytest.raises(PolicyDenied, match="redirect"):
            fetch(mode, session, shop, url=f"{by_hand}#part")
        assert shop.payments == []
        assert fetch(mode, session, shop, url="https://evil.example/other").status_code == 200
    with (
        make_guard(policy=Policy(unsafe_pay_after_redirect=True)) as guard,
        guard.session("s", budget="$1.00") as session,
    ):
        fetch(mode, session, moves if mode == "sync" else moves_async, url=COURTS)
        assert fetch(mode, session, shop, url=by_hand).status_code == 200


def test_a_redirect_binds_its_own_run_alone_and_no_upgrade_to_https():
    shop = Shop()
    with make_guard() as guard:
        with guard.session("led astray", budget="$1.00") as session:
            to = "https://honest.example/report"
            fetch("sync", session, lambda _r: httpx.Response(302, headers={"location": to}), url=COURTS)
            with pytest.raises(PolicyDenied, match="redirect"):
                fetch("sync", session, shop, url=to)
        with guard.session("another", budget="$1.00") as session:
            assert fetch("sync", session, shop, url=to).status_code == 200
            secure = lambda _r: httpx.Response(301, headers={"location": COURTS})
            fetch("sync", session, secure, url=COURTS.replace("https", "http"))
            assert fetch("sync", session, shop, url=COURTS).status_code == 200


def test_a_redirect_within_an_origin_names_nothing_and_an_odd_location_harms_nothing():
    shop = Shop()
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        for location in ("/b", "https://courts.example/b", "https://[", "https://courts.example:99999/b"):
            fetch("sync", session, lambda _r, to=location: httpx.Response(302, headers={"location": to}), url=COURTS)
        assert fetch("sync", session, shop, url="https://courts.example/b").status_code == 200
