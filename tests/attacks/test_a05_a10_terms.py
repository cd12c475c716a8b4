"""Rows 5, 7, 9 and 10: how long, how much, of what and under which name is our decision, made once, on what is signed."""

import time
from decimal import Decimal

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.merchant import (
    NETWORK,
    OTHER_PAYEE,
    PAYEE,
    URL,
    USDC,
    Shop,
    accept,
    make_guard,
    offer_response,
    permit2,
    required,
    required_v1,
    upto,
)
from tests.support.refusals import (
    BASE_USDC,
    assert_malformed,
    assert_refused,
    authorization_of,
    events,
    fetch,
    fresh_address,
)
from x402guard import Asset, NoAcceptableOffer, Policy

TEN_YEARS = 10 * 365 * 86_400
MAKERS = {
    "v2 eip3009": lambda s: required(accept(maxTimeoutSeconds=s)),
    "v2 permit2": lambda s: required(permit2(maxTimeoutSeconds=s)),
    "v2 upto": lambda s: required(upto(maxTimeoutSeconds=s)),
    "v1": lambda s: required_v1(accept(network="base-sepolia", maxTimeoutSeconds=s)),
}


@pytest.mark.parametrize("made", MAKERS)
@pytest.mark.parametrize(
    ("asked", "given_s"), [(10, 10), (60, 60), (300, 300), (86_400, 300), (TEN_YEARS, 300), (10**30, 300)]
)
def test_a05_endless_validity_is_cut_to_our_own_maximum(guard, made, asked, given_s):
    shop = Shop(terms=MAKERS[made](asked))
    before = int(time.time())
    with guard.session("s", budget="$1.00") as session:
        fetch("sync", session, shop)
    after = int(time.time())
    signed = authorization_of(shop.seen[-1])
    until = int(signed.get("validBefore") or signed["deadline"])
    assert before + given_s <= until <= after + given_s
    assert until <= after + 300


@pytest.mark.parametrize("made", MAKERS)
@pytest.mark.parametrize("asked", [0, -1, -(2**53), 9])
def test_a05_no_validity_is_refused(guard, made, asked):
    error = assert_refused("sync", guard, Shop(terms=MAKERS[made](asked)), rule="lifetime", says=["maxTimeoutSeconds"])
    assert str(asked) in str(error)


@pytest.mark.parametrize("asked", ["60 ", "6e1", "0x3c", 60.5, 1e300, True, None, [60], {"s": 60}, -(10**20)])
def test_a05_a_validity_that_is_no_whole_number_is_refused(mode, guard, asked):
    shop = Shop(terms=required({**accept(), "maxTimeoutSeconds": asked}))
    assert_malformed(mode, guard, shop, field="maxTimeoutSeconds")


def test_a05_the_owner_can_set_a_shorter_one(mode):
    with make_guard(policy=Policy(max_lifetime_s=20)) as guard, guard.session("s", budget="$1.00") as session:
        shop = Shop(terms=MAKERS["v2 eip3009"](86_400))
        fetch(mode, session, shop)
        assert int(authorization_of(shop.seen[-1])["validBefore"]) <= time.time() + 20


def test_a07_quote_and_signature_gap_a_cheap_head_buys_nothing_dear(mode):
    shop = Shop(terms=lambda request: required(accept(1 if request.method == "HEAD" else 900_000)))
    policy = Policy(per_payment_cap="$0.50")
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        fetch(mode, session, shop, method="HEAD")
        assert [amount for _, amount, _ in shop.payments] == [1]
        shop.payments.clear()
    with make_guard(policy=policy) as guard:
        assert_refused(mode, guard, shop, rule="per_payment_cap", says=["$0.90", "policy.per_payment_cap", "$0.50"])


def test_a07_every_answer_of_a_server_that_changes_its_mind_is_judged_anew(mode, guard):
    quotes = iter([accept(10_000), accept(11_000, payTo=OTHER_PAYEE), permit2(12_000), upto(13_000)])
    shop = Shop(terms=lambda _: required(next(quotes)))
    with guard.session("s", budget="$1.00") as session:
        for number in range(4):
            fetch(mode, session, shop, url=f"{URL}?{number}")
        approved = [(e["atomic"], e["payee"]) for e in events(session, "authorize")]
    assert approved == [(str(amount), payee) for _, amount, payee in shop.payments]
    assert [amount for amount, _ in approved] == ["10000", "11000", "12000", "13000"]


def test_a07_a_rule_passed_by_one_offer_does_not_carry_another(mode):
    """The cap is met by an offer that other rules refuse; the payable one is above it."""
    with make_guard(policy=Policy(per_payment_cap="$0.50", schemes={"exact"})) as guard:
        shop = Shop(terms=required(upto(1), accept(900_000)))
        says = ["policy.schemes", "$0.90", "policy.per_payment_cap"]
        assert_refused(mode, guard, shop, rule="no_acceptable_offer", says=says, kind=NoAcceptableOffer)


MAKER = st.sampled_from([accept, permit2, upto])
OFFERS = st.lists(
    st.tuples(MAKER, st.integers(1, 1_000_000), st.sampled_from([PAYEE, OTHER_PAYEE]), st.integers(10, 10_000)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(OFFERS)
def test_a07_signed_fields_are_the_approved_fields(drawn):
    offers = [make(amount, payTo=payee, maxTimeoutSeconds=s) for make, amount, payee, s in drawn]
    shop = Shop(terms=required(*offers))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        fetch("sync", session, shop)
        [approved] = events(session, "authorize")
        counted = session.held + session.spent
    [(nonce, amount, payee)] = shop.payments
    signed = authorization_of(shop.seen[-1])
    assert amount == min(one for _, one, _, _ in drawn)
    assert (approved["atomic"], approved["payee"], approved["token"]) == (str(amount), payee, USDC)
    assert approved["deadline"] == int(signed.get("validBefore") or signed["deadline"])
    assert approved["hold_id"] == f"{nonce:064x}"
    assert counted * 10**6 == amount


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"asset": fresh_address()}, "is not in the asset registry"),
        ({"asset": BASE_USDC}, f"token {BASE_USDC} on {NETWORK} is not in the asset registry"),
        ({"asset": USDC, "network": "eip155:11155111"}, f"token {USDC} on eip155:11155111"),
        (
            {"asset": fresh_address(), "extra": {"name": "USDC", "version": "2", "symbol": "USDC", "decimals": 6}},
            "Asset(",
        ),
        ({"asset": fresh_address(), "extra": {"name": "Evil", "version": "2", "decimals": 18}}, "Guard(assets="),
        ({"asset": fresh_address(), "extra": {"name": "Evil", "version": "2", "decimals": 8}}, "Guard(assets="),
    ],
    ids=["unknown", "usdc of another chain", "known token, other chain", "symbol USDC", "18 decimals", "8 decimals"],
)
def test_a09_asset_spoof_is_refused(mode, guard, change, says):
    assert_refused(mode, guard, Shop(terms=required(accept(**change))), rule="assets", says=[says])


@pytest.mark.parametrize("decimals", [8, 18, 0, "8", " 6", 7.5, [6]])
def test_a09_decimals_are_never_the_servers_word(mode, guard, decimals):
    extra = {"name": "USDC", "version": "2", "decimals": decimals}
    shop = Shop(terms=required(accept(extra=extra)))
    assert_refused(mode, guard, shop, rule="asset_domain", says=["decimals", "registry has 6"])


@pytest.mark.parametrize(("decimals", "atomic"), [(8, 1_000_000), (18, 10_000_000_000_000_000)])
def test_a09_a_token_counts_by_the_registrys_decimals(decimals, atomic):
    asset = Asset(NETWORK, fresh_address(), "DAI", decimals, "Dai", "1")
    offer = accept(atomic, asset=asset.address, extra={"name": "Dai", "version": "1"})
    paid = []

    def shop(request):
        if "payment-signature" not in request.headers:
            return offer_response(required(offer))
        paid.append(authorization_of(request)["value"])
        return httpx.Response(500)

    with make_guard(assets=[asset], unsafe_no_chain=True) as guard, guard.session("s", budget="$1.00") as session:
        fetch("sync", session, shop)
        assert session.held == Decimal("0.01")
    assert paid == [str(atomic)]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"name": "Evil", "version": "9"}, ["'Evil'", "name", "'USDC'"]),
        ({"name": "Evil", "version": "2"}, ["'Evil'", "name", "'USDC'"]),
        ({"name": "USDC", "version": "9"}, ["'9'", "version", "'2'"]),
        ({"name": "usdc", "version": "2"}, ["'usdc'"]),
        ({"name": "USDC ", "version": "2"}, ["'USDC '"]),
        ({"name": "ＵＳＤＣ", "version": "2"}, ["'USDC'"]),
        ({"name": "USDC", "version": 3}, ["version", "has '2'"]),
        ({"name": "USDC", "version": 2.5}, ["version", "has '2'"]),
        ({"name": ["USDC"], "version": "2"}, ["name"]),
        ({"name": "", "version": ""}, ["name"]),
    ],
)
@pytest.mark.parametrize("scheme", ["eip3009", "permit2"])
def test_a10_domain_poisoning_is_refused(mode, guard, extra, says, scheme):
    shop = Shop(terms=required(accept(extra={**extra, "assetTransferMethod": scheme})))
    assert_refused(mode, guard, shop, rule="asset_domain", says=[*says, "Guard(assets=[Asset(…)])"])


@pytest.mark.parametrize("extra", [None, {}, {"name": None}, {"name": "USDC"}])
def test_a10_an_offer_without_a_domain_is_signed_under_the_registrys(mode, guard, extra):
    shop = Shop(terms=required(accept(extra=extra)))
    with guard.session("s", budget="$1.00") as session:
        assert fetch(mode, session, shop).status_code == 200
    assert len(shop.payments) == 1  # the shop recovers the payer under USDC's true domain
