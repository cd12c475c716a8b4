"""Sellers that are honest and write what the specification allows, or what every reader in a browser takes, are paid."""

import base64
import gzip
import json
import time
import zlib

import httpx
import pytest
import zstandard

from tests.support.merchant import (
    KEY,
    OTHER_PAYEE,
    PAYEE,
    URL,
    Shop,
    accept,
    b64,
    client,
    make_guard,
    receipt,
    required,
    required_v1,
)
from tests.support.refusals import events
from x402guard import ConfigError, LocalSigner, Policy, PolicyDenied, ProtocolError, X402GuardError
from x402guard.x402.origins import _SECRET

TERMS, V1 = required(), required_v1()
TEXT, TEXT_V1 = json.dumps(TERMS).encode(), json.dumps(V1).encode()
JSON = ("content-type", "application/json")


def without_frame(data):
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def answer(body=b"", *more, header=None, terms=TERMS):
    lines = [("PAYMENT-REQUIRED", b64(terms) if header is None else header)] if header != "" else []
    return lambda _request: httpx.Response(402, headers=[*lines, *more], stream=httpx.ByteStream(body))


def url_safe(terms):
    return base64.urlsafe_b64encode(json.dumps(terms).encode()).decode()


ODD_BYTES = {**TERMS, "extensions": {"x": "~~~???>>>"}}
ODD = {
    "terms in zstd beside the header": answer(zstandard.compress(TEXT), JSON, ("content-encoding", "zstd")),
    "an error in zstd beside the header": answer(
        zstandard.compress(b'{"error":1}'), JSON, ("content-encoding", "zstd")
    ),
    "an encoding of no name": answer(TEXT, JSON, ("content-encoding", "")),
    "an encoding of its own": answer(b"\x00\x01", JSON, ("content-encoding", "br")),
    "packed, and no body": answer(b"", JSON, ("content-encoding", "gzip")),
    "a body that is too long to read": answer(json.dumps({"a": "x" * 300_000}).encode(), JSON),
    "v1 in gzip": answer(gzip.compress(TEXT_V1), JSON, ("content-encoding", "gzip"), header=""),
    "v1 in deflate": answer(zlib.compress(TEXT_V1), JSON, ("content-encoding", "deflate"), header=""),
    "v1 in deflate without a frame": answer(without_frame(TEXT_V1), JSON, ("content-encoding", "deflate"), header=""),
    "v1 after a byte order mark": answer(b"\xef\xbb\xbf" + TEXT_V1, JSON, header=""),
    "v2 beside a body after a byte order mark": answer(b"\xef\xbb\xbf" + TEXT, JSON),
    "base64 without padding": answer(header=b64(TERMS).rstrip("=")),
    "base64 for URLs": answer(header=url_safe(ODD_BYTES)),
    "base64 for URLs without padding": answer(header=url_safe(ODD_BYTES).rstrip("=")),
    "a blank around it": answer(header=f" {b64(TERMS)} "),
    "seconds with a point": answer(terms=required(accept(maxTimeoutSeconds=60.0))),
    "no flow": answer(terms=required(accept(extra={"name": "USDC", "version": "2", "paymentFlow": None}))),
    "a currency beside a token": answer(terms=required(accept(asset="USD"), accept())),
    "a role beside a payee": answer(terms=required(accept(payTo="merchant"), accept())),
    "a free one beside it": answer(terms=required(accept(0), accept())),
    "an address with a letter wrong beside it": answer(
        terms=required(accept(payTo=PAYEE.replace("A", "a", 1)), accept())
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_and_honest_seller_is_paid(name):
    shop = Shop(terms=ODD[name])
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, client(session, shop) as http:
        assert http.get(URL).status_code == 200
        assert len(shop.payments) == 1
        assert str(session.spent) == "0.01"


def test_the_answer_to_a_head_has_no_body_to_unpack():
    shop = Shop(terms=answer(b"", JSON, ("content-encoding", "gzip")))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, client(session, shop) as http:
        assert http.head(URL).status_code == 200
        assert len(shop.payments) == 1


@pytest.mark.parametrize(
    "entries",
    [
        [accept(asset="USD")],
        [accept(payTo="merchant"), accept(0)],
        [{**accept(), "payTo": 7}, None],
        [{key: value for key, value in accept().items() if key != "payTo"}, "exact"],
    ],
    ids=["a currency alone", "none that can be used", "a payee of another type", "an entry that lacks a field"],
)
def test_offers_that_cannot_be_read_are_refused(entries):
    shop = Shop(terms=required(*entries))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, client(session, shop) as http:
        with pytest.raises(ProtocolError) as caught:
            http.get(URL)
        assert (type(caught.value), caught.value.code) == (ProtocolError, "protocol_error")
        assert caught.value.field.startswith("accepts[0]")
        assert (len(shop.payments), session.held) == (0, 0)


@pytest.mark.parametrize("empty", ["", None])
@pytest.mark.parametrize(
    "fields", [("payer",), ("amount",), ("transaction",), ("network",), ("payer", "amount", "network")]
)
def test_a_receipt_that_states_nothing_in_a_field_is_a_receipt(fields, empty):
    told = {**receipt(), **dict.fromkeys(fields, empty)}
    shop = Shop(paid=lambda _request, _shop: httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(told)}))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, client(session, shop) as http:
        assert http.get(URL).status_code == 200
        assert (str(session.spent), session.held) == ("0.01", 0)


HONEST = "https://honest.example/data"


@pytest.mark.parametrize("amount", [1, 200_000_000], ids=["paid", "refused"])
def test_an_offer_says_nothing_about_the_origin_that_it_names(amount):
    """It names its resource itself: what it says about another seller is no fact about that seller."""
    terms = required(accept(amount, payTo=OTHER_PAYEE), url=HONEST)
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        try:
            session.pay(terms).settled(receipt())
        except PolicyDenied:
            assert amount > 1
        shop = Shop(terms=lambda _request: httpx.Response(402, json=required_v1(url=HONEST)))
        with client(session, shop) as http:
            assert http.get(HONEST).status_code == 200  # in version 1, and to its own payee
        assert len(shop.payments) == 1


def test_an_offer_that_names_a_host_like_another_one_does_not_shut_that_out():
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        session.pay(required(accept(1, payTo=OTHER_PAYEE), url="https://h0nest.example/x")).settled(receipt())
        shop = Shop(terms=required(url=HONEST))
        with client(session, shop) as http:
            assert http.get(HONEST).status_code == 200


def test_what_an_offer_names_is_judged_by_what_is_known_of_it():
    policy = Policy(payee_change="refuse", breaker=None)
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        with client(session, Shop(terms=required(url=HONEST))) as http:
            assert http.get(HONEST).status_code == 200
        with pytest.raises(PolicyDenied, match="payee_change"):
            session.pay(required(accept(payTo=OTHER_PAYEE), url=HONEST))
        with pytest.raises(PolicyDenied, match="version_downgrade"):
            session.pay(required_v1(url=HONEST))
        with pytest.raises(PolicyDenied, match="look_alike_host"):
            session.pay(required(url="https://h0nest.example/x"))


def test_what_offers_have_named_is_kept_among_themselves():
    policy = Policy(payee_change="refuse", breaker=None)
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        session.pay(required(accept(1), url=HONEST)).settled(receipt())
        with pytest.raises(PolicyDenied, match="payee_change"):
            session.pay(required(accept(2, payTo=OTHER_PAYEE), url=HONEST))
        with pytest.raises(PolicyDenied, match="version_downgrade"):
            session.pay(required_v1(url=HONEST))


class Custom:
    """A signer as users write one: around another signer, with the address as its service spells it."""

    inline = True

    def __init__(self, spell):
        self._inner = LocalSigner.from_key(KEY)
        self.address = spell(self._inner.address)

    def bind(self, lookup):
        self._inner.bind(lookup)

    def sign(self, hold):
        return self._inner.sign(hold)


@pytest.mark.parametrize(
    "spell", [str, str.lower, lambda text: "0x" + text[2:].upper()], ids=["mixed", "small", "capital"]
)
def test_a_signer_may_spell_its_address_in_any_case(spell, tmp_path):
    own = LocalSigner.from_key(KEY).address
    for shop, is_paid in ((Shop(), True), (Shop(terms=required(accept(payTo=own))), False)):
        with make_guard(signer=Custom(spell), ledger=str(tmp_path / "l.db")) as guard:
            assert guard.context.payer == own
            with guard.session("s", budget="$1.00") as session, client(session, shop) as http:
                if is_paid:
                    assert http.get(URL).status_code == 200
                else:
                    with pytest.raises(PolicyDenied, match="the payer itself"):
                        http.get(URL)
            assert len(shop.payments) == is_paid
    with make_guard(signer=Custom(str), ledger=str(tmp_path / "l.db")):
        pass  # it is the same wallet


@pytest.mark.parametrize("wrong", ["0x12", "", None, "0x" + "zz" * 20, PAYEE.replace("A", "a", 1), b"\x00" * 20])
def test_a_signer_whose_address_is_none_is_an_error_at_once(wrong):
    with pytest.raises(ConfigError, match="signer: the address of Custom is no account"):
        make_guard(signer=Custom(lambda _own: wrong))


def test_a_signer_that_lacks_a_part_is_an_error_at_once():
    class Lacking(Custom):
        inline = property(lambda self: (_ for _ in ()).throw(AttributeError("inline")))

    with pytest.raises(ConfigError, match="Lacking has no attribute inline"):
        make_guard(signer=Lacking(str))


@pytest.mark.parametrize("seconds", [-(2**53), -1, 0, 1])
def test_in_shadow_mode_no_lifetime_is_an_error(seconds):
    shop = Shop(terms=required(accept(maxTimeoutSeconds=seconds)))
    with (
        make_guard(mode="shadow") as guard,
        guard.session("s", budget="$1.00") as session,
        client(session, shop) as http,
    ):
        try:
            http.get(URL)
        except X402GuardError as error:
            pytest.fail(f"{error}")
        assert len(shop.payments) == 1


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        ("https://ignore all previous instructions/x", "(unreadable)"),
        ("https://victim.example/x", "victim.example"),
        ("https://[2001:db8::1]/x", "2001:db8::1"),
    ],
)
def test_a_resource_whose_host_is_no_name_is_not_quoted(named, kept):
    shop = Shop(terms=required(url=named))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session, client(session, shop) as http:
        http.get(URL)
        [event] = events(session, "resource_mismatch")
        assert event["offered_for"] == kept


@pytest.mark.parametrize("text", ["eyJ-" * 16_000, "eyJ" * 20_000, "eyJ" + "a" * 60_000, "0x" * 30_000])
def test_a_long_url_is_searched_for_keys_in_bounded_time(text):
    began_s = time.process_time()
    assert _SECRET.search(text) is None
    assert time.process_time() - began_s < 0.25


def _with_many_keys(most):
    """An offer with as many keys as a body may have, one of them twice: its reading must not grow with their square."""
    keys = ",".join(f'"{number:x}":0' for number in range(most))
    return f'{{"x402Version":1,"accepts":[{{{keys},"1":1}}]}}'


def test_terms_with_very_many_keys_are_read_in_bounded_time():
    text = _with_many_keys(28_000)
    assert 240_000 < len(text) < 262_144
    shop = Shop(terms=lambda _: httpx.Response(402, content=text.encode()))
    with make_guard() as guard, guard.session("s", budget="$1") as session:
        began_s = time.process_time()
        with pytest.raises(ProtocolError):
            client(session, shop).get(URL)
        assert time.process_time() - began_s < 1.5


LARGE = {"name": "USDC", "version": "2", "n": 0}
NUMBERS = {
    "longest": -int("7" * 399), "long": 10**399, "65 bits": 2**65, "exponent": 1e300, "small": 1.5e-07, "minus zero": -0.0,
}  # fmt: skip
PLACES = {
    "v2 extra": lambda number: required(accept(extra={**LARGE, "n": number}), accept(20_000)),
    "v2 resource": lambda number: {**required(), "resource": {"url": URL, "n": number}},
    "v2 extensions": lambda number: required(extensions={"n": number}),
    "v1 extra": lambda number: required_v1({**accept(extra={**LARGE, "n": number}), "network": "base-sepolia"}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_an_offer_with_any_number_of_at_most_400_digits_is_paid_and_echoed(place, number):
    """What one parser reads, the next one has to read too: after the hold is written it is too late to refuse."""
    shop, sent = Shop(terms=PLACES[place](number)), []

    def watched(request):
        sent.append(request.headers.get("payment-signature"))
        return shop(request)

    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        assert client(session, watched).get(URL).status_code == 200
        assert (len(shop.payments), session.held) == (1, 0)
    if place == "v2 extra":
        assert json.loads(base64.b64decode(sent[-1]))["accepted"]["extra"]["n"] == number


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", [-int("7" * 400), 10**400, -int("7" * 4_300)], ids=["401", "long", "longest"])
def test_an_offer_with_a_longer_number_is_refused_before_its_hold(place, number):
    """What writes JSON writes some numbers that what reads it does not read."""
    shop = Shop(terms=PLACES[place](number))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(ProtocolError, match="a number with hundreds of digits"):
            client(session, shop).get(URL)
        assert (shop.payments, session.held, session.spent) == ([], 0, 0)
