"""An answer to a payment that has less than what was asked for is no delivery: the next request presents the payment again."""

import httpx
import pytest

from tests.support.merchant import Shop, b64, make_guard, receipt
from tests.support.refusals import fetch

PAID = {"PAYMENT-RESPONSE": b64(receipt())}
MANY = {"content-type": "multipart/byteranges; boundary=x"}
PART = {"content-range": "bytes 0-3/400"}
WHOLE = {"content-range": "bytes 0-3/4"}


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("claims", [True, False])
@pytest.mark.parametrize(
    ("status", "given", "asks", "payments"),
    [
        (304, {}, {}, 1), (304, {}, {"if-none-match": '"x"'}, 3), (304, {}, {"if-modified-since": "Sat"}, 3),
        (206, PART, {}, 1), (206, {}, {}, 3), (206, MANY, {}, 1), (206, WHOLE, {}, 3), (206, PART, {"range": "bytes=0-3"}, 3),
        (200, {}, {}, 3),
    ],
)  # fmt: skip
def test_what_was_not_asked_for_is_presented_again(mode, claims, status, given, asks, payments):
    headers = {**given, **(PAID if claims else {})}
    shop = Shop(paid=lambda *_: httpx.Response(status, headers=headers, content=b"" if status == 304 else b"part"))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        for _ in range(3):
            assert fetch(mode, session, shop, headers=asks).status_code == status
    assert len(shop.nonces) == payments
    assert len(shop.payments) == 3
