"""Row 27: two readers of one answer must not read two things, and no answer may cost much to refuse."""

import json
import time
import tracemalloc

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.broken_offers import CORPUS, GOOD, V1, V2, bomb, headers
from tests.support.examples import examples
from tests.support.merchant import NETWORK, OTHER_PAYEE, PAYEE, Shop, accept, b64, make_guard, required, required_v1
from tests.support.refusals import Chunks, assert_refused, assert_untouched, fetch, raw_header
from x402guard import PaymentRefused, ProtocolError

MOST_S = 1.0
MOST_BYTES = 16_000_000


@pytest.fixture(scope="module", autouse=True)
def _built():
    """The bombs are built once, outside what is measured."""
    for layers in (1, 2, 3):
        bomb(layers)


def _survive(mode, guard, shop):
    """Refused with a typed error, or handed over as it came; nothing signed, nothing held."""
    with guard.session("attacked", budget="$1.00") as session:
        try:
            response = fetch(mode, session, shop)
        except (ProtocolError, PaymentRefused) as error:
            assert not error.money_may_have_moved
            assert len(str(error)) < 1_000
        except httpx.DecodingError:
            pass  # handed over, and httpx could not read it either
        else:
            assert response.status_code == 402
            assert "x402guard" not in response.extensions
        assert_untouched(session, shop)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", CORPUS)
def test_a27_confusion_is_refused_or_handed_over_in_bounded_time(mode, guard, name):
    shop = Shop(terms=lambda _: CORPUS[name]())
    before = time.process_time()
    _survive(mode, guard, shop)
    assert time.process_time() - before < MOST_S


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [name for name in CORPUS if "single bytes" not in name])
def test_a27_confusion_takes_bounded_memory(guard, name):
    answer = CORPUS[name]()
    shop = Shop(terms=lambda _: answer)
    tracemalloc.start()
    try:
        _survive("sync", guard, shop)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES


ARBITRUM = "0x75faf114eafb1BDbe2F0316DF893fd58CE46AA4d"
CHEAP = accept(100)
CHEAPER = {
    "alone": CHEAP,
    "in a list of a list": [[CHEAP]],
    "its network in capitals": [{**CHEAP, "network": "Base-Sepolia"}],
    "its network with a space": [{**CHEAP, "network": " eip155:84532"}],
    "its network by a number": [{**CHEAP, "network": "84532"}],
    "a network that is not known": [{**CHEAP, "network": "bsc"}],
    "no asset": [{name: value for name, value in CHEAP.items() if name != "asset"}],
    "another payee and a price in dollars": [{**accept(payTo=OTHER_PAYEE), "amount": None, "price": "$0.01"}],
    "nothing beside it": [CHEAP, {}],
    "its token alone": [{"asset": CHEAP["asset"], "amount": "100"}],
    "its token on a network that is not known": [{"network": "bsc", "asset": CHEAP["asset"], "amount": "100"}],
    "another network in capitals": [{**accept(), "network": "Base"}],
    "the token in another case": [{**CHEAP, "asset": CHEAP["asset"].upper()}],
}
"""A body that asks for less than the header, or for another, however it is written."""


@pytest.mark.parametrize(
    "terms",
    [
        required(accept(20_000)),
        required(accept(payTo=OTHER_PAYEE)),
        required(accept(asset=OTHER_PAYEE)),
        required(accept(network="eip155:8453")),
        required({**accept(), "maxAmountRequired": "20000"}),
        required(accept(payTo=OTHER_PAYEE), error={"code": "payment_required"}, resource="https://courts.example"),
        required_v1(accept(20_000, network="base-sepolia")),
        *({"x402Version": 2, "accepts": accepts} for accepts in CHEAPER.values()),
    ],
    ids=["amount", "payee", "asset", "network", "two amounts", "odd fields", "version 1", *CHEAPER],
)
def test_a27_header_and_body_that_disagree_are_refused(mode, guard, terms):
    shop = Shop(terms=lambda _: headers(("PAYMENT-REQUIRED", GOOD), body=json.dumps(terms).encode())())
    assert_refused(mode, guard, shop, rule="header_body_conflict", says=["header and body"])


@pytest.mark.parametrize("body", [V1, V2, b"{}", b"", b"<html>", b'{"error": "x402Version"}'])
def test_a27_header_and_body_that_agree_are_paid(mode, guard, body):
    shop = Shop(terms=lambda _: headers(("PAYMENT-REQUIRED", GOOD), body=body)())
    with guard.session("s", budget="$1.00") as session:
        assert fetch(mode, session, shop).status_code == 200
    assert len(shop.payments) == 1


SOLANA = {"network": "solana:5eykt4UsFv8P8NJdTREpY1vzqKqZKvdp", "asset": "EPjFWdd5AufqSSqeM2qN1xzybapC8G4wEGGkZwyTDt1v"}
OF_THE_SERVER = {
    "the price under the name of version 1": required(
        {**{name: value for name, value in accept().items() if name != "amount"}, "maxAmountRequired": "10000"}
    ),
    "both names": required({**accept(), "maxAmountRequired": "10000"}),
    "a number": required({**accept(), "amount": 10_000}),
    "offers of another kind of chain alone": required(accept(**SOLANA)),
    "a price in dollars": required({"scheme": "exact", "network": NETWORK, "price": "$0.01", "payTo": PAYEE}),
    "a resource that is text": required(resource="https://courts.example/1"),
    "an error that is an object": required(error={"code": "payment_required"}),
    "one offer for a list": {"x402Version": 2, "accepts": accept()},
    "the version as text": {**required(), "x402Version": "2"},
    "texts for offers": {"x402Version": 2, "accepts": ["exact", 1, None]},
    "nothing in its offers": {"x402Version": 2, "accepts": [{"amount": None, "asset": [], "network": {}, "payTo": 7}]},
}


@pytest.mark.parametrize("body", OF_THE_SERVER.values(), ids=OF_THE_SERVER)
def test_a27_a_body_that_states_no_terms_does_not_speak_against_the_header(mode, guard, body):
    """HTTP transport v2, "Response Body": what stands there is the server's own."""
    shop = Shop(terms=lambda _: headers(("PAYMENT-REQUIRED", GOOD), body=json.dumps(body).encode())())
    with guard.session("s", budget="$1.00") as session:
        assert fetch(mode, session, shop).status_code == 200
    assert len(shop.payments) == 1


def test_a27_a_body_may_have_all_offers_of_its_header_and_more(mode, guard):
    two = [accept(10_000), accept(20_000, payTo=OTHER_PAYEE)]
    body = required(*two, accept(network="eip155:8453"))
    answer = headers(("PAYMENT-REQUIRED", b64(required(*two))), body=json.dumps(body).encode())
    with guard.session("s", budget="$1.00") as session:
        assert fetch(mode, session, shop := Shop(terms=lambda _: answer())).status_code == 200
    assert [amount for _, amount, _ in shop.payments] == [10_000]


SHORT = {
    "no token": lambda entry: {name: value for name, value in entry.items() if name != "asset"},
    "scheme and network": lambda entry: {"scheme": entry["scheme"], "network": entry["network"]},
    "dollars": lambda entry: {"network": entry["network"], "amount": "0.01", "currency": "USD"},
    "an empty amount": lambda entry: {"payTo": entry["payTo"], "amount": ""},
}


@pytest.mark.parametrize("short", SHORT.values(), ids=SHORT)
def test_a27_a_body_may_say_less_of_each_offer_of_its_header(mode, guard, short):
    two = [accept(10_000), accept(20_000, payTo=OTHER_PAYEE, network="eip155:421614", asset=ARBITRUM, extra={})]
    body = required(*map(short, two))
    answer = headers(("PAYMENT-REQUIRED", b64(required(*two))), body=json.dumps(body).encode())
    with guard.session("s", budget="$1.00") as session:
        assert fetch(mode, session, shop := Shop(terms=lambda _: answer())).status_code == 200
    assert [amount for _, amount, _ in shop.payments] == [10_000]


def test_a27_one_price_of_two_for_the_same_payment_is_not_the_other(mode, guard):
    two = [accept(20_000), accept(10_000, extra={"name": "USDC", "version": "2", "note": "for members"})]
    answer = headers(("PAYMENT-REQUIRED", b64(required(*two))), body=json.dumps(required(two[1])).encode())
    with guard.session("s", budget="$1.00") as session:
        assert fetch(mode, session, shop := Shop(terms=lambda _: answer())).status_code == 200
    assert [amount for _, amount, _ in shop.payments] == [10_000]


@pytest.mark.parametrize("version", ["2", 2.5, None, 3])
def test_a27_a_body_without_a_header_has_to_be_readable(mode, guard, version):
    body = json.dumps({**required_v1(), "x402Version": version}).encode()
    _survive(mode, guard, Shop(terms=lambda _: headers(body=body)()))


def test_a27_a_402_of_something_else_is_handed_over_as_it_came(mode, guard):
    raw = b'{"error": "insufficient credits", "accepts": [1]}'
    for kind in ("application/json", "text/html", "application/problem+json"):
        answer = httpx.Response(402, headers={"content-type": kind, "x-own": "1"}, stream=Chunks(raw[:7], raw[7:]))
        shop = Shop(terms=lambda _: answer)
        with guard.session("s", budget="$1.00") as session:
            response = fetch(mode, session, shop)
            assert (response.status_code, response.content, response.headers["x-own"]) == (402, raw, "1")
            assert_untouched(session, shop)


def test_a27_keys_in_two_spellings_pay_whom_the_protocol_names(mode, guard):
    shop = Shop(terms=required({**accept(), "pay_to": OTHER_PAYEE, "max_timeout_s": 1, "PayTo": OTHER_PAYEE}))
    with guard.session("s", budget="$1.00") as session:
        fetch(mode, session, shop)
    assert [payee for _, _, payee in shop.payments] == [PAYEE]


@pytest.mark.parametrize("cheap", ["1", "9999", "20000"])
def test_a27_two_amounts_in_a_v1_offer_are_refused_or_the_v1_name_counts(mode, guard, cheap):
    two = b'"amount": "' + cheap.encode() + b'", "maxAmountRequired"'
    shop = Shop(terms=lambda _: headers(body=V1.replace(b'"maxAmountRequired"', two))())
    with guard.session("s", budget="$1.00") as session:
        try:
            fetch(mode, session, shop)
        except (ProtocolError, PaymentRefused):
            assert_untouched(session, shop)
        else:
            assert [amount for _, amount, _ in shop.payments] == [10_000]


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
def test_a27_any_bytes_in_the_header_are_refused_or_handed_over(raw):
    with make_guard() as guard:
        _survive("sync", guard, Shop(terms=lambda _: raw_header(raw)))


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=200))
def test_a27_any_text_in_the_header_is_refused_or_handed_over(text):
    with make_guard() as guard:
        _survive("sync", guard, Shop(terms=lambda _: headers(("PAYMENT-REQUIRED", text))()))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = ["scheme", "network", "asset", "amount", "payTo", "maxTimeoutSeconds", "extra"]


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(st.sampled_from(FIELDS), JSON_VALUES)
def test_a27_any_value_in_any_field_is_refused_or_signed_as_what_was_offered(name, value):
    shop = Shop(terms=lambda _: raw_header(json.dumps(required({**accept(), name: value}))))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        try:
            fetch("sync", session, shop)
        except (ProtocolError, PaymentRefused):
            assert_untouched(session, shop)
        else:
            assert [(amount, payee) for _, amount, payee in shop.payments] == [(int(_amount(name, value)), PAYEE)]


def _amount(name, value):
    return value if name == "amount" else 10_000
