"""What is signed is presented: an answer is lost, and the seller asks for something else by then."""

import base64
import json

import httpx
import pytest

from tests.support.ledger import Clock
from tests.support.merchant import (
    OTHER_PAYEE,
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
from x402guard import PaymentRefused, Policy, ProtocolError, SettlementUncertain
from x402guard.stores import open_store


def _keeps_its_quotes(lost=1):
    """A seller whose first *lost* paid answers are lost, and that takes an old quote."""

    def paid(request, shop):
        if len(shop.payments) <= lost:
            raise httpx.ReadError("lost")
        return httpx.Response(200, text="goods", headers={"PAYMENT-RESPONSE": b64(receipt())})

    return Shop(paid=paid)


def _lost_and_then(session, shop, fresh, url=URL):
    """Lose the answer to a payment; then the seller has *fresh* terms."""
    with pytest.raises(SettlementUncertain):
        client(session, shop).get(url)
    shop.terms = fresh


NEXT = {
    "the same": required(),
    "a price that is higher by 37 units": required(accept(10_037)),
    "a lower price": required(accept(9_000)),
    "a price above what one payment may be": required(accept(900_000)),
    "another payee": required(accept(payTo=OTHER_PAYEE)),
    "another scheme": required(upto(10_000)),
    "version 1": required_v1(),
    "a network that is not known": required(accept(network="eip155:999999")),
    "an asset that is not known": required(accept(asset=OTHER_PAYEE)),
    "the offer behind another one": required(accept(12_000, payTo=OTHER_PAYEE), accept()),
}
POLICY = Policy(breaker=None, per_payment_cap="$0.50")


@pytest.mark.parametrize("fresh", NEXT.values(), ids=NEXT)
def test_the_payment_that_is_out_goes_out_again_whatever_the_next_402_says(fresh):
    shop = _keeps_its_quotes()
    with make_guard(policy=POLICY) as guard, guard.session("s", budget="$1.00") as session:
        _lost_and_then(session, shop, fresh)
        response = client(session, shop).get(URL)
        assert (response.status_code, response.extensions["x402guard"].represented) == (200, True)
        assert (session.held, float(session.spent)) == (0, 0.01)
    assert (len(shop.payments), len(set(shop.payments))) == (2, 1)


@pytest.mark.parametrize("fresh", [NEXT["a lower price"], NEXT["a price above what one payment may be"]])
def test_a_seller_that_takes_no_old_quote_is_shown_the_same_payment_each_time(fresh):
    shop = _keeps_its_quotes(lost=10)
    with make_guard(policy=POLICY) as guard, guard.session("s", budget="$1.00") as session:
        _lost_and_then(session, shop, fresh)
        shop.paid = lambda *_: offer_response(fresh)
        for _ in range(3):
            assert client(session, shop).get(URL).status_code == 402
        assert float(session.held) == 0.01
    assert (len(shop.payments), len(set(shop.payments))) == (4, 1)


@pytest.mark.parametrize("fresh", [NEXT["a lower price"], NEXT["a price above what one payment may be"]])
def test_a_tripped_session_presents_nothing(fresh):
    shop = _keeps_its_quotes()
    with make_guard(policy=POLICY) as guard, guard.session("s", budget="$1.00") as session:
        _lost_and_then(session, shop, fresh)
        session.trip("enough")
        with pytest.raises(PaymentRefused):
            client(session, shop).get(URL)
    assert len(shop.payments) == 1


@pytest.mark.parametrize("fresh", [NEXT["a lower price"], NEXT["a price above what one payment may be"]])
def test_a_payment_that_is_valid_for_less_than_ten_seconds_is_not_presented(fresh):
    clock, shop = Clock(), _keeps_its_quotes()
    store = open_store("memory://", clock_ms=clock)
    with make_guard(store, policy=POLICY) as guard, guard.session("s", budget="$1.00") as session:
        _lost_and_then(session, shop, fresh)
        clock.tick(51)
        with pytest.raises(SettlementUncertain, match="cannot be presented again"):
            client(session, shop).get(URL)
        assert float(session.held) == 0.01
    assert len(shop.payments) == 1


def test_what_the_policy_refuses_is_refused_where_nothing_is_out():
    shop = _keeps_its_quotes()
    with make_guard(policy=POLICY) as guard, guard.session("s", budget="$1.00") as session:
        _lost_and_then(session, shop, NEXT["a price above what one payment may be"])
        with pytest.raises(PaymentRefused, match="cap"):
            client(session, shop).get(f"{URL}?other")
        with pytest.raises(PaymentRefused, match="cap"):
            client(session, shop).get(URL, extensions={"pay_again": True})
    assert len(shop.payments) == 1


class _Breaks(httpx.SyncByteStream):
    def __iter__(self):
        yield b"half"
        raise httpx.ReadError("gone")


@pytest.mark.parametrize("budget", ["$1.00", "$0.45"], ids=["refused by the rules", "refused by the budget"])
def test_a_second_payment_that_is_refused_leaves_the_first_one_to_be_presented(budget):
    """It was taken, and its body broke. Asking to pay again has paid nothing, so what was paid is still owed."""
    broken = httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())}, stream=_Breaks())
    shop = Shop(paid=lambda *_: broken)
    price = 900_000 if budget == "$1.00" else 490_000
    with make_guard(policy=POLICY) as guard, guard.session("s", budget=budget) as session:
        with pytest.raises(httpx.ReadError):
            client(session, shop).get(URL)
        shop.terms, shop.paid = required(accept(price)), None
        with pytest.raises(PaymentRefused):
            client(session, shop).get(URL, extensions={"pay_again": True})
        assert client(session, shop).get(URL).extensions["x402guard"].represented
        assert float(session.spent) == 0.01
    assert len(set(shop.payments)) == 1


def _form(boundary, file=b"picture"):
    line = b"--" + boundary
    part = b'Content-Disposition: form-data; name="file"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    return line + b"\r\n" + part + file + b"\r\n" + line + b"--\r\n"


def _post(session, shop, boundary, content):
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary.decode()}"}
    return client(session, shop).post(URL, content=content, headers=headers)


@pytest.mark.parametrize("size", [7, 300_000])
def test_a_form_with_another_boundary_is_the_same_purchase(size):
    shop = _keeps_its_quotes()
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(SettlementUncertain):
            _post(session, shop, b"one", _form(b"one", b"x" * size))
        assert _post(session, shop, b"twotwo", _form(b"twotwo", b"x" * size)).text == "goods"
    assert (len(shop.payments), len(set(shop.payments))) == (2, 1)


@pytest.mark.parametrize(
    "other",
    [
        _form(b"two", b"another picture"),
        _form(b"two", b"picture\r\n--two\r\n"),
        _form(b"two", b"picture\r\n--"),
        _form(b"two")[:-4],
        b"--" + b"x" * 200 + b"\r\n",
        b"--",
        b"----",
    ],
    ids=["other content", "a part more", "a line like a boundary", "no end", "too long", "no boundary", "an empty one"],
)
def test_a_form_of_other_parts_is_another_purchase(other):
    shop = _keeps_its_quotes()
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(SettlementUncertain):
            _post(session, shop, b"one", _form(b"one"))
        assert _post(session, shop, b"two", other).text == "goods"
    assert len(set(shop.payments)) == 2


CONDITIONS = {
    "a binding": {"mppx": {"route_binding": "required"}},
    "in its information": {"other": {"info": {"required": True}}},
    "beside what is known": {"bazaar": {"info": {}}, "mppx": {"route_binding": "required"}},
}
HARMLESS = {
    "the identifier, which is sent": {"payment-identifier": {"info": {"required": True}}},
    "a schema with required members": {"other": {"schema": {"required": ["city"]}}},
    "an extension that is offered": {"mppx": {"route_binding": "optional"}},
    "a list": ["mppx", "required"],
    "texts and numbers": {"a": "required", "b": 1, "c": None, "d": {"info": "required?"}},
}


@pytest.mark.parametrize("extensions", CONDITIONS.values(), ids=CONDITIONS)
def test_a_required_extension_is_refused_before_anything_is_held(extensions):
    shop = Shop(terms=required(extensions=extensions))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        for _ in range(3):
            with pytest.raises(PaymentRefused) as caught:
                client(session, shop).get(URL)
            assert caught.value.rule == "required_extension"
        assert (session.held, session.spent) == (0, 0)
    assert shop.payments == []


@pytest.mark.parametrize("extensions", HARMLESS.values(), ids=HARMLESS)
def test_an_extension_that_requires_nothing_is_paid(extensions):
    shop = Shop(terms=required(extensions=extensions))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        assert client(session, shop).get(URL).status_code == 200


def _payment_in(shop):
    header = next(each.headers["payment-signature"] for each in shop.seen if "payment-signature" in each.headers)
    return len(header), json.loads(base64.b64decode(header))


LARGE = {"schema": {"properties": {f"field {i}": {"description": "x" * 400} for i in range(100)}}}
IDENTIFIER = {"info": {"required": False}}


def test_a_payment_for_a_large_offer_is_no_larger_than_servers_read():
    terms = required(extensions={"bazaar": LARGE, "payment-identifier": IDENTIFIER})
    shop = Shop(terms=terms)
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        assert client(session, shop).get(URL).status_code == 200
    size, sent = _payment_in(shop)
    assert size < 8_000
    assert (sent["accepted"], sent["resource"]) == (terms["accepts"][0], terms["resource"])
    assert list(sent["extensions"]) == ["payment-identifier"]


def test_a_large_description_is_left_out_and_an_ordinary_offer_is_echoed_whole():
    large, small = required(), required(extensions={"bazaar": {"info": {"a": "é" * 1_000}}})
    large["resource"]["description"] = "é" * 10_000
    for terms, echoed in ((large, {"x402Version", "payload", "accepted"}), (small, {*small, "payload", "accepted"})):
        shop = Shop(terms=terms)
        with make_guard() as guard, guard.session("s", budget="$1.00") as session:
            assert client(session, shop).get(URL).status_code == 200
        size, sent = _payment_in(shop)
        assert size < 8_000
        assert set(sent) == echoed - {"accepts", "error"}
    assert sent["extensions"] == small["extensions"]


def test_terms_that_no_payment_can_echo_are_refused_and_the_ones_beside_them_are_paid():
    fat = accept(9_000, extra={"name": "USDC", "version": "2", "note": "x" * 6_000})
    shop = Shop(terms=required(fat, accept()))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        assert client(session, shop).get(URL).status_code == 200
        assert float(session.spent) == 0.01
        shop.terms = required(fat)
        with pytest.raises(ProtocolError, match="no server reads"):
            client(session, shop).get(f"{URL}?other")
        assert session.held == 0
