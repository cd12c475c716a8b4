"""Receipts of delivered sales, as sellers write them: a claim where they claim, never a proof."""

import json
from decimal import Decimal

import httpx
import pytest

from tests.support.merchant import PAYER, URL, Shop, b64, client, make_guard, receipt, required, upto

CENT = Decimal("0.01")
GOOD = receipt()
TOLD = {
    "the same header twice": [("PAYMENT-RESPONSE", b64(GOOD)), ("PAYMENT-RESPONSE", b64(GOOD))],
    "of both versions, with another name of the network": [
        ("PAYMENT-RESPONSE", b64(GOOD)), ("X-PAYMENT-RESPONSE", b64(GOOD | {"network": "base-sepolia"})),
    ],
    "of both versions, another spelling of the hash": [
        ("PAYMENT-RESPONSE", b64(GOOD)),
        ("X-PAYMENT-RESPONSE", b64(GOOD | {"transaction": GOOD["transaction"].upper().replace("0X", "0x")})),
    ],
    "an amount in dollars": [("PAYMENT-RESPONSE", b64(GOOD | {"amount": "0.01"}))],
    "an amount as a number": [("PAYMENT-RESPONSE", b64(GOOD | {"amount": 10_000}))],
    "an amount as an object": [("PAYMENT-RESPONSE", b64(GOOD | {"amount": {"value": "10000", "decimals": 6}}))],
    "a payer as CAIP-10": [("PAYMENT-RESPONSE", b64(GOOD | {"payer": f"eip155:84532:{PAYER}"}))],
    "the network by its number": [("PAYMENT-RESPONSE", b64(GOOD | {"network": 84532}))],
    "the network by its number as text": [("PAYMENT-RESPONSE", b64(GOOD | {"network": "84532"}))],
    "a reason beside success": [("PAYMENT-RESPONSE", b64(GOOD | {"errorReason": {"code": 0}}))],
    "raw JSON": [("PAYMENT-RESPONSE", json.dumps(GOOD))],
    "wrapped": [("PAYMENT-RESPONSE", f" {b64(GOOD)} ")],
}  # fmt: skip
DOUBTED = {
    "two transactions": [
        ("PAYMENT-RESPONSE", b64(GOOD)), ("X-PAYMENT-RESPONSE", b64(GOOD | {"transaction": "0x" + "cd" * 32})),
    ],
    "two values of one header": [
        ("PAYMENT-RESPONSE", b64(GOOD)), ("PAYMENT-RESPONSE", b64(GOOD | {"transaction": "0x" + "cd" * 32})),
    ],
    "another network": [("PAYMENT-RESPONSE", b64(GOOD | {"network": "base"}))],
    "another network by its number": [("PAYMENT-RESPONSE", b64(GOOD | {"network": 8453}))],
    "another payer as CAIP-10": [("PAYMENT-RESPONSE", b64(GOOD | {"payer": "eip155:84532:0x" + "99" * 20}))],
    "raw JSON that is none": [("PAYMENT-RESPONSE", '{"success": true')],
    "success as text": [("PAYMENT-RESPONSE", b64(GOOD | {"success": "true"}))],
}  # fmt: skip


def sold(headers, *, terms=None):
    shop = Shop(terms or required(), paid=lambda *_: httpx.Response(200, headers=headers, json={}))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        assert client(session, shop).get(URL).status_code == 200
        return session.spent, session.held


@pytest.mark.parametrize("name", TOLD)
def test_it_is_a_claim(name):
    assert sold(TOLD[name]) == (CENT, 0)


@pytest.mark.parametrize("name", DOUBTED)
def test_what_contradicts_itself_or_the_payment_is_a_doubt(name):
    assert sold(DOUBTED[name]) == (0, CENT)


@pytest.mark.parametrize("amount", ["0.01", {"value": "1"}, "1e3", -1, True, "12,345"])
def test_an_amount_of_upto_that_cannot_be_read_claims_the_ceiling(amount):
    """It gives nothing back: only a chain does."""
    spent, held = sold([("PAYMENT-RESPONSE", b64(GOOD | {"amount": amount}))], terms=required(upto(50_000)))
    assert spent + held == Decimal("0.05")
