"""Row 26: an amount is one to 78 plain digits and more than zero; a payee is an address that can be paid."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.merchant import PAYEE, USDC, Shop, accept, make_guard, required, required_v1, unb64, upto
from tests.support.refusals import ZERO, assert_malformed, assert_refused, assert_untouched, fetch, raw_header
from x402guard import Policy, PolicyDenied, ProtocolError, X402GuardError

MARK = "@@@"
AMOUNTS = [
    '"-1"', '"-10000"', '"+10000"', '"1.5"', '"10000.0"', '"1e3"', '"1E3"', '"0x10"', '"1_000"', '"1,000"', '""', '" "',
    '" 10000"', '"10000 "', '"10000\\n"', '"\\t10000"', '"10000\\u0000"', '"NaN"', '"Infinity"', '"-0"', '"０１００"',
    '"１０００"', '"١٠٠"', '"१००"', '"1०"', '"²"', '"10000\\u200b"', '"' + "1" * 79 + '"', '"1' + "0" * 80 + '"', "10_000",
    "10000.0", "1e3", "-1", "0", "NaN", "Infinity", "-Infinity", "null", "true", "[]", '["10000"]', "{}",
    '{"value": "10000"}', "1" * 5000,
]  # fmt: skip
TOO_MUCH_OR_NOTHING = ['"0"', '"000"', '"' + "0" * 78 + '"', f'"{2**256}"', '"' + "9" * 78 + '"']


def _v2(amount, make=accept):
    return raw_header(json.dumps(required(make(amount=MARK))).replace(f'"{MARK}"', amount))


def _v1(amount):
    import httpx

    text = json.dumps(required_v1(accept(amount=MARK, network="base-sepolia"))).replace(f'"{MARK}"', amount)
    return httpx.Response(402, headers={"content-type": "application/json"}, content=text.encode())


@pytest.mark.parametrize("amount", [*AMOUNTS, *TOO_MUCH_OR_NOTHING], ids=lambda text: text[:16])
@pytest.mark.parametrize("made", [_v2, _v1], ids=["v2", "v1"])
def test_a26_malformed_amount_is_refused(guard, made, amount):
    assert_malformed("sync", guard, Shop(terms=lambda _: made(amount)))


@pytest.mark.parametrize("amount", ['"-1"', "10000.0", '"0"', '"１０００"', f'"{2**256}"'])
def test_a26_malformed_amount_is_refused_by_both_transports_and_for_upto(mode, guard, amount):
    error = assert_malformed(mode, guard, Shop(terms=lambda _: _v2(amount, upto)))
    assert "amount" in str(error) or "PAYMENT-REQUIRED" in str(error)


@pytest.mark.long
@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(
    st.text(max_size=90)
    | st.integers()
    | st.floats()
    | st.none()
    | st.booleans()
    | st.from_regex(r"[-+ ]?\d+[ .eE]?\d*")
)
def test_a26_whatever_is_no_plain_number_is_refused(amount):
    plain = isinstance(amount, str) and amount.isascii() and amount.isdigit()
    assume(not (plain and 0 < len(amount) <= 78))
    assume(not (type(amount) is int and amount > 0))  # sellers write a JSON integer as well
    _never_signs(lambda _: _v2(json.dumps(amount)))


@pytest.mark.long
@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(st.from_regex(r"\A[0-9]{1,78}\Z").filter(str.isascii))
def test_a26_whatever_is_a_plain_number_is_signed_as_it_is_or_refused(amount):
    shop = Shop(terms=lambda _: _v2(json.dumps(amount)))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        try:
            fetch("sync", session, shop)
        except (PolicyDenied, ProtocolError):
            assert_untouched(session, shop)
        else:
            assert [int(amount)] == [paid for _, paid, _ in shop.payments]
            assert session.spent * 10**6 == int(amount)


def _never_signs(terms):
    shop = Shop(terms=terms)
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(ProtocolError):
            fetch("sync", session, shop)
        assert_untouched(session, shop)


@pytest.mark.parametrize("amount", [10**15, 10**24, 2**256 - 1])
def test_a26_more_than_the_ledger_holds_is_refused_with_an_empty_policy(mode, amount):
    with make_guard(policy=Policy(per_payment_cap=None)) as guard:
        shop = Shop(terms=required(accept(amount)))
        with guard.session("s", budget="$1.00") as session:
            with pytest.raises(X402GuardError) as caught:
                fetch(mode, session, shop)
            assert caught.value.rule in ("amount_too_large", "budget")
            assert_untouched(session, shop)
            assert session.report().to_text()


@pytest.mark.parametrize("amount", [1_000_001, 10**24])
def test_a26_the_cap_is_named_with_its_value(mode, guard, amount):
    says = ["policy.per_payment_cap", "$1.00"]
    assert_refused(mode, guard, Shop(terms=required(accept(amount))), rule="per_payment_cap", says=says)


PAYEES = {
    "zero": ZERO,
    "the token itself": USDC,
    "the token in small letters": USDC.lower(),
    "one letter's case wrong": PAYEE[:-1] + PAYEE[-1].swapcase(),
    "all cases swapped": "0x" + PAYEE[2:].swapcase(),
    "too short": PAYEE[:-1],
    "too long": PAYEE + "0",
    "no prefix": PAYEE[2:],
    "prefix in capitals": "0X" + PAYEE[2:],
    "a name": "seller.eth",
    "a space": PAYEE + " ",
    "a line break": PAYEE + "\n",
    "full-width digits": "0x" + "２" * 40,
    "a number": 0x209693,
    "nothing": None,
    "a list": [PAYEE],
}


@pytest.mark.parametrize("name", PAYEES)
def test_a26_a_payee_that_cannot_be_paid_is_refused(mode, guard, name):
    offer = accept()
    offer["payTo"] = PAYEES[name]
    assert_malformed(mode, guard, Shop(terms=required(offer)), field="payTo")


@pytest.mark.parametrize("spelling", [PAYEE, PAYEE.lower(), "0x" + PAYEE[2:].upper()])
def test_a26_a_payee_in_one_case_or_in_its_checksum_is_paid(mode, guard, spelling):
    shop = Shop(terms=required(accept(payTo=spelling)))
    with guard.session("s", budget="$1.00") as session:
        fetch(mode, session, shop)
    assert [payee for _, _, payee in shop.payments] == [PAYEE]


@pytest.mark.parametrize("spelling", [USDC.lower(), "0x" + USDC[2:].upper(), USDC.swapcase().replace("X", "x", 1)])
def test_a26_an_asset_of_the_registry_is_paid_in_whatever_case_and_echoed_as_it_came(mode, guard, spelling):
    """The registry says which token it is; payees, which it cannot know, have to have a correct checksum."""
    offer = accept(asset=spelling)
    shop = Shop(terms=required(offer))
    with guard.session("s", budget="$1.00") as session:
        assert fetch(mode, session, shop).status_code == 200
    assert unb64(shop.seen[-1].headers["payment-signature"])["accepted"] == offer


@pytest.mark.parametrize("asset", ["USDC", "0x" + USDC[2:-1], "", None, 7])
def test_a26_an_asset_that_is_no_address_is_refused(mode, guard, asset):
    offer = accept()
    offer["asset"] = asset
    assert_malformed(mode, guard, Shop(terms=required(offer)), field="asset")
