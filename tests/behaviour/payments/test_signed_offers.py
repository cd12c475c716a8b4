"""Terms that the seller's own signed offer contradicts (the extension ``offer-receipt``) are refused; all else is paid."""

import base64
import json
import time
from contextlib import suppress

import pytest

from tests.support.merchant import NETWORK, OTHER_PAYEE, PAYEE, URL, USDC, Shop, accept, client, make_guard, required
from x402guard import PolicyDenied, X402GuardError

SIGNED = {
    "version": 1,
    "resourceUrl": URL,
    "scheme": "exact",
    "network": NETWORK,
    "asset": USDC,
    "payTo": PAYEE,
    "amount": "10000",
}


def jws(payload):
    parts = [
        base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=").decode()
        for each in ({"alg": "EdDSA"}, payload)
    ]
    return {"format": "jws", "signature": ".".join([*parts, "c2ln"])}


def eip712(payload):
    return {"format": "eip712", "payload": payload, "signature": "0x" + "11" * 65, "acceptIndex": 0}


def buys(offers, *accepts):
    info = {"info": {"offers": offers}, "schema": {}}
    shop = Shop(required(*accepts, extensions={"offer-receipt": info}))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        try:
            return client(session, shop).get(URL).status_code
        except PolicyDenied as refused:
            assert (len(shop.payments), session.held) == (0, 0)
            return refused.rule


FORMS = pytest.mark.parametrize("form", [jws, eip712])
CHANGES = {"amount": "1", "payTo": OTHER_PAYEE, "network": "eip155:8453", "asset": "0x" + "1" * 40}


@FORMS
def test_an_offer_that_is_signed_as_it_is_asked_is_paid(form):
    assert buys([form(SIGNED)]) == 200
    assert buys([form({**SIGNED, "amount": 10_000})]) == 200
    assert buys([form({**SIGNED, "amount": "9000"}), form(SIGNED)], accept(), accept(9_000)) == 200


@FORMS
@pytest.mark.parametrize("field", CHANGES)
def test_one_that_is_signed_otherwise_is_refused(form, field):
    assert buys([form({**SIGNED, field: CHANGES[field]})]) == "signed_offer"


@pytest.mark.parametrize(
    "offers",
    [
        [],
        None,
        "x",
        [None],
        [{}],
        [{"signature": "x"}],
        [{"signature": "a.!!!.c"}],
        [{"signature": "a.W10.c"}],
        {"a": 1},
        [eip712("x")],
    ],
    ids=str,
)
def test_what_cannot_be_read_says_nothing(offers):
    assert buys(offers) == 200


def test_very_many_signed_offers_are_read_in_bounded_time():
    began = time.monotonic()
    with suppress(X402GuardError):
        buys([eip712({**SIGNED, "amount": str(n)}) for n in range(140)], *(accept(10_000 + n) for n in range(60)))
    assert time.monotonic() - began < 2
