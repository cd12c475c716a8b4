"""Who a seller is: a host. What its owner says of it, and what each other one may do."""

import itertools

import httpx
import pytest

from tests.support.merchant import (
    OTHER_PAYEE,
    PAYEE,
    URL,
    Shop,
    accept,
    b64,
    client,
    make_guard,
    offer_response,
    receipt,
    required,
    required_v1,
    upto,
)
from tests.support.words import WORDS
from x402guard import ConfigError, Owner, PaymentRefused, Policy, PolicyDenied, Seller, Velocity, VelocityExceeded
from x402guard.guard.settings import load_settings

HOST = "api.stripe.example"
PLACE = f"https://{HOST}/v1/sale"
ANY = Seller(payees="any", daily="$5.00")


POLICIES = {"default": Policy, "careful": Policy.careful}


class Rotating(Shop):
    """A seller that names a fresh address in each 402, and takes a payment to any of them."""

    def __init__(self, url=PLACE, amount=10_000, **more):
        fresh = itertools.count(1)
        super().__init__(lambda _request: required(accept(amount, payTo=f"0x{next(fresh):040x}"), url=url), **more)


def buys(session, shop, urls):
    """How many of the requests are bought, and the rule that refused the first other one."""
    bought = 0
    with client(session, shop) as http:
        for url in urls:
            try:
                http.get(url)
            except PaymentRefused as refused:
                return bought, refused.rule
            bought += 1
    return bought, ""


def sales(count, place=PLACE):
    """Requests for different goods: what differs in a number alone is a loop for ``Policy.careful``."""
    return [f"{place}/{WORDS[number % 16]}{'' if number < 16 else number}" for number in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seller_with_a_fresh_address_for_each_sale_is_paid_where_its_owner_says_so(ledger_url, policy):
    allowed = POLICIES[policy](sellers={HOST: ANY})
    with make_guard(ledger_url, policy=allowed) as guard, guard.session("s", budget="$5.00") as session:
        assert buys(session, Rotating(), sales(15)) == (15, "")
    expected = {"default": (5, "new_payees_per_day"), "careful": (1, "payee_change")}[policy]
    with make_guard(policy=POLICIES[policy]()) as guard, guard.session("s", budget="$5.00") as session:
        assert buys(session, Rotating(), sales(15)) == expected


def test_its_dollars_are_bounded_over_all_runs_and_come_back_after_a_day(ledger_url):
    policy = Policy(sellers={"*.stripe.example": Seller(payees="any", daily="$0.05")})
    with make_guard(ledger_url, policy=policy) as guard:
        with guard.session("one", budget="$5.00") as session:
            assert buys(session, Rotating(), sales(4)) == (4, "")
        with guard.session("two", budget="$5.00") as session:
            assert buys(session, Rotating(), sales(4)) == (1, "seller_daily")
            with pytest.raises(
                VelocityExceeded, match=r"\$0.05 of \$0.05 were held or spent at \*.stripe.example"
            ) as found:
                client(session, Rotating()).get(PLACE)
            assert 82_000 < found.value.retry_after <= 90_000
            assert found.value.available == 0
            assert buys(session, Shop(), [URL]) == (1, "")  # another seller


def test_an_address_that_such_a_seller_has_named_is_known_to_no_other_one():
    policy = Policy(sellers={HOST: ANY}, velocity=Velocity(new_payees_per_day=1))
    with make_guard(policy=policy) as guard, guard.session("s", budget="$5.00") as session:
        assert buys(session, Shop(required(accept(payTo=OTHER_PAYEE), url=PLACE)), [PLACE]) == (1, "")
        assert buys(session, Shop(), [URL]) == (1, "")  # the one new seller of the day
        elsewhere = "https://other.example/x"
        assert (
            buys(session, Shop(required(accept(payTo=OTHER_PAYEE), url=elsewhere)), [elsewhere])[1]
            == "new_payees_per_day"
        )


def test_an_offer_that_only_names_the_host_is_that_of_any_other_seller():
    """A tool's answer can name any resource: what the owner has said holds for who was asked."""
    policy = Policy(sellers={HOST: Seller(payees="any", daily="$0.03")}, velocity=Velocity(new_payees_per_day=10))
    with make_guard(policy=policy) as guard, guard.session("s", budget="$5.00") as session:
        for number in range(5):
            session.pay(required(accept(payTo=f"0x{number + 1:040x}"), url=f"{PLACE}/{number}"))
        with pytest.raises(VelocityExceeded, match="new_payees_per_day"):
            session.pay(required(accept(payTo="0x" + "9" * 40), url=f"{PLACE}/9"))
        assert buys(session, Rotating(), [PLACE]) == (1, "")  # and its dollars are not those of that host


def test_a_place_that_a_caller_names_is_that_of_any_other_seller():
    """What the owner says of a host holds for requests that go to it, and no request of ours does here."""
    policy = Policy(sellers={HOST: Seller(payees="any", daily="$0.03")}, velocity=Velocity(new_payees_per_day=10))
    with make_guard(policy=policy) as guard, guard.session("s", budget="$5.00") as session:
        for number in range(5):
            session.pay(required(accept(payTo=f"0x{number + 1:040x}")), place=f"{PLACE}/{number}")
        with pytest.raises(VelocityExceeded, match="new_payees_per_day"):
            session.pay(required(accept(payTo="0x" + "9" * 40)), place=f"{PLACE}/9")
    policy = Policy(sellers={HOST: Seller(payees="any", daily="$0.03")}, payee_change="refuse")
    with make_guard(policy=policy) as guard, guard.session("s", budget="$5.00") as session:
        session.pay(required(), place=PLACE)
        with pytest.raises(PolicyDenied, match="payee_change"):
            session.pay(required(accept(payTo=OTHER_PAYEE)), place=PLACE, pay_again=True)


def test_the_word_for_a_payment_without_a_request_is_no_method():
    shop = Rotating()
    with make_guard() as guard, guard.session("s", budget="$5.00") as session, client(session, shop) as http:
        with pytest.raises(PolicyDenied, match="PAY is no method of HTTP") as caught:
            http.request("PAY", PLACE)
        assert caught.value.rule == "method"
        assert shop.seen == []
        assert session.held + session.spent == 0


def test_a_redirect_to_a_fresh_path_is_no_way_around_what_a_route_has_used():
    """The seller names the place; the caller has asked for the first one."""
    fresh = itertools.count()

    def turns(request):
        return required_v1(url=str(request.url)) if "moved" in request.url.path else required(url=str(request.url))

    def shop(request):
        if request.url.path == "/v1/sale" and sold.payments:
            return httpx.Response(307, headers={"location": f"/moved/{'abcdefgh'[next(fresh)]}"})
        return sold(request)

    sold = Shop(turns)
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        with client(session, shop, follow_redirects=True) as http:
            assert http.get(PLACE).status_code == 200
            with pytest.raises(PolicyDenied, match="version_downgrade"):
                http.get(PLACE)
        assert len(sold.payments) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_a_marketplace_of_twelve_routes_with_a_payee_each(policy):
    def shop():
        return Shop(lambda r: required(accept(payTo=f"0x{WORDS.index(r.url.path[1:]) + 1:040x}"), url=str(r.url)))

    urls = sales(12, "https://market.example")
    sellers = {"market.example": Seller(payees="any", daily="$2.00")}
    with make_guard(policy=POLICIES[policy](sellers=sellers)) as guard, guard.session("s", budget="$5.00") as session:
        assert buys(session, shop(), urls) == (12, "")
    with make_guard(policy=Policy()) as guard, guard.session("s", budget="$5.00") as session:
        assert buys(session, shop(), urls) == (5, "new_payees_per_day")


def test_a_host_that_has_kept_one_payee_keeps_it_and_one_that_has_not_does_not(tmp_path):
    url = f"sqlite:///{tmp_path / 'books.db'}"
    policy = Policy(payee_change="refuse")
    with make_guard(policy=policy) as guard, guard.session("s", budget="$5.00") as session:
        assert buys(session, Rotating(), sales(3)) == (1, "payee_change")
    many = iter([PAYEE, OTHER_PAYEE, "0x" + "3" * 40, "0x" + "4" * 40])
    shop = Shop(lambda r: required(accept(payTo=next(many)), url=str(r.url)))
    with make_guard(url, policy=Policy()) as guard, guard.session("s", budget="$1.00") as session:
        assert buys(session, shop, sales(2)) == (2, "")
    with make_guard(url, policy=policy) as guard, guard.session("t", budget="$1.00") as session:
        assert buys(session, shop, sales(2)) == (2, "")


def pool(count, url=PLACE):
    at = itertools.count()
    return Shop(
        lambda _r: required(upto(facilitator=f"0x{0x1000 + next(at) % count:040x}"), url=url),
        paid=lambda _r, _s: _delivered("0"),
    )


def _delivered(amount):
    return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(amount=amount))}, json={})


def test_a_pool_of_twenty_facilitators_is_one_seller():
    policy = Policy(sellers={HOST: Seller(facilitators="any")})
    with make_guard(policy=policy, unsafe_trust_receipts=True) as guard, guard.session("s", budget="$5.00") as session:
        assert buys(session, pool(20), sales(40)) == (40, "")
    with make_guard(unsafe_trust_receipts=True) as guard, guard.session("s", budget="$5.00") as session:
        assert buys(session, pool(20), sales(40)) == (3, "facilitators")


def test_two_versions_on_one_origin_each_on_its_route():
    def both(request):
        url = str(request.url)
        return required(url=url) if request.url.path == "/a" else required_v1(url=url)

    urls = ["https://shop.example/a", "https://shop.example/b"] * 2
    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        assert buys(session, Shop(both), urls) == (4, "")


def test_a_route_that_has_used_v2_keeps_to_it_unless_its_owner_says_otherwise():
    def one():
        turns = iter([required(url=PLACE), required_v1(url=PLACE)] * 3)
        return Shop(lambda _r: next(turns))

    with make_guard() as guard, guard.session("s", budget="$5.00") as session:
        assert buys(session, one(), [PLACE] * 6) == (1, "version_downgrade")
    policy = Policy(sellers={HOST: Seller(versions={1, 2})})
    with make_guard(policy=policy) as guard, guard.session("s", budget="$5.00") as session:
        assert buys(session, one(), [PLACE] * 6) == (6, "")


def test_a_lifted_latch_of_a_version_is_listed_and_cleared(tmp_path):
    url = f"sqlite:///{tmp_path / 'books.db'}"
    turns = iter([required(url=PLACE), required_v1(url=PLACE), required_v1(url=PLACE)])
    shop = Shop(lambda _r: offer_response(next(turns)))
    with make_guard(url) as guard, guard.session("s", budget="$5.00") as session:
        assert buys(session, shop, [PLACE] * 2) == (1, "version_downgrade")
        with Owner(url) as owner:
            [latch] = owner.latches()
            owner.clear_latch(latch.id)
        assert buys(session, shop, [PLACE]) == (1, "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"payees": "any"}, 'policy.sellers.payees: "any" needs daily'),
        ({"payees": "all", "daily": "$1.00"}, "policy.sellers.payees: 'all' is not one of 'any'"),
        ({"facilitators": ["0x1"]}, r"policy.sellers.facilitators: \['0x1'\] is not one of 'any'"),
        ({"versions": {3}}, r"policy.sellers.versions: \{3\} is not both versions; write \[1, 2\]"),
        ({"versions": []}, "policy.sellers.versions"),
        ({"versions": 2}, "policy.sellers.versions: 2 is not both"),
        ({"versions": [1]}, "policy.sellers.versions"),
        ({"versions": "12"}, "policy.sellers.versions"),
        ({"versions": [{}, 1]}, "policy.sellers.versions"),
        ({"daily": 5.0}, r'policy.sellers.daily: .*"\$5.00"'),
        ({"daily": "0"}, "policy.sellers.daily: zero pays nothing"),
        ({"daily": "-1"}, "policy.sellers.daily"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_seller_is_named(arguments, says):
    with pytest.raises(ConfigError, match=says):
        Seller(**arguments)


@pytest.mark.parametrize(
    ("sellers", "says"),
    [
        (
            {"https://a.example/x": ANY},
            "policy.sellers: .* is a URL or a path; write the host alone, such as 'a.example'",
        ),
        ({"a.example": "any"}, "policy.sellers: .* is no mapping of hosts to Seller"),
        ([ANY], "policy.sellers: .* is no mapping"),
        ({"a.example": ANY, "A.example": ANY}, "policy.sellers: a host is there twice"),
        ({"*": ANY}, r"policy.sellers: '\*' is not a host"),
    ],
    ids=str,
)
def test_what_is_wrong_with_the_sellers_is_named(sellers, says):
    with pytest.raises(ConfigError, match=says):
        Policy(sellers=sellers)


def test_a_payee_that_is_listed_is_never_new_and_no_change(ledger_url):
    listed = {f"0x{number + 1:040x}" for number in range(12)}
    shop = Shop(lambda r: required(accept(payTo=f"0x{WORDS.index(r.url.path[1:]) + 1:040x}"), url=str(r.url)))
    for policy in (Policy(payees=listed), Policy.careful(payees=listed)):
        with make_guard(policy=policy) as guard, guard.session("s", budget="$5.00") as session:
            assert buys(session, shop, sales(12, "https://market.example")) == (12, "")


def test_an_error_in_the_settings_file_names_the_host(tmp_path):
    file = tmp_path / "x402guard.toml"
    for line, says in (
        ('payees = "any"', 'policy.sellers."api.stripe.example".payees: "any" needs daily'),
        ("versions = [1]", 'policy.sellers."api.stripe.example".versions: [1] is not both versions; write [1, 2]'),
        ('daily = "0"', 'policy.sellers."api.stripe.example".daily: zero pays nothing'),
    ):
        file.write_text(f'[policy.sellers."api.stripe.example"]\n{line}\n')
        with pytest.raises(ConfigError) as found:
            load_settings(file).guard_arguments()
        assert says in str(found.value)
