"""Any bytes as a header, body or receipt are parsed, or are a ProtocolError; never anything else, and never slowly."""

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.merchant import accept, b64, required, upto
from x402guard import ProtocolError
from x402guard.assets import AssetRegistry
from x402guard.flow.effects import PeekBody, Reply
from x402guard.ledger.authorize import Refusal
from x402guard.strict_json import NotReadable, check_depth
from x402guard.x402.challenge import read_challenge
from x402guard.x402.offer import Offer, normalise
from x402guard.x402.wire import decode_json, decode_payment_required, decode_receipt

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


def parse(text):
    """What a 402 with this header becomes, all the way to offers."""
    try:
        return normalise(decode_payment_required(text), AssetRegistry())
    except ProtocolError as error:
        assert error.field
        assert error.money_may_have_moved is False
        return None


@settings(max_examples=examples(400), deadline=None)
@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda raw: base64.b64encode(raw).decode()))
def test_any_text_as_payment_required(text):
    parse(text)


@settings(max_examples=examples(400), deadline=None)
@given(json_values)
def test_any_json_as_payment_required(value):
    parse(b64(value))


@st.composite
def mutated_terms(draw):
    """Terms that are nearly right: one field of an offer, or of the whole, is anything."""
    terms = required(draw(st.sampled_from([accept(), upto()])))
    entry = terms["accepts"][0]
    target = draw(st.sampled_from([terms, entry, entry["extra"]]))
    target[draw(st.sampled_from([*target, "new"]))] = draw(json_values)
    return terms


@settings(max_examples=examples(600), deadline=None)
@given(mutated_terms())
def test_nearly_right_terms(terms):
    found = parse(b64(terms))
    for offer in found or ():
        assert isinstance(offer, (Offer, Refusal))
        if isinstance(offer, Offer):
            assert 0 < offer.amount_atomic < 2**256
            assert json.loads(offer.accepted_json) in terms["accepts"]


@settings(max_examples=examples(300), deadline=None)
@given(st.text(max_size=200) | json_values.map(b64))
def test_any_text_as_a_receipt(text):
    try:
        decode_receipt([("payment-response", text)])
    except ProtocolError as error:
        assert error.field


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=400) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_as_a_v1_body(raw):
    flow = read_challenge(Reply(402, (("content-type", "application/json"),)))
    try:
        assert isinstance(next(flow), PeekBody)
        flow.send(raw)
    except StopIteration as done:
        assert done.value is None or done.value.required.version == 1
    except ProtocolError as error:
        assert error.field


@settings(max_examples=examples(200), deadline=None)
@given(json_values)
def test_json_comes_back_as_it_was(value):
    """But a NUL, which PostgreSQL does not keep; the text of its escape is none."""
    raw = json.dumps(value).encode()
    if "\0" in "".join(texts_in(value)):
        with pytest.raises(ProtocolError, match="a NUL in a text"):
            decode_json(raw, field="x")
    else:
        assert decode_json(raw, field="x") == value


def texts_in(value):
    """Every text in a JSON value, the keys as well."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [text for each in value for text in texts_in(each)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize(
    ("text", "refused"),
    [("\0", True), ("a\0", True), ("\\\0", True), ("\\u0000", False), ("\\\\u0000", False), ("\\\\\0", True)],
)
def test_a_nul_is_told_from_the_text_of_its_escape(text, refused):
    raw = json.dumps({"é": [text]}).encode()
    if refused:
        with pytest.raises(ProtocolError, match="a NUL in a text"):
            decode_json(raw, field="x")
    else:
        assert decode_json(raw, field="x") == {"é": [text]}


@pytest.mark.parametrize(
    "raw", [b'{"a":1,"a":1}', b"NaN", b"[Infinity]", b"[" * 140 + b"]" * 140, b'"\\ud800"', b"\xff", b"", b"1" * 5000]
)
def test_json_that_two_readers_could_understand_differently_is_refused(raw):
    with pytest.raises(ProtocolError):
        decode_json(raw, field="x")


def slow_depth(value):
    if isinstance(value, dict):
        return 1 + max(map(slow_depth, value.values()), default=0)
    return 1 + max(map(slow_depth, value), default=0) if isinstance(value, list) else 0


tricky = st.text(alphabet='"\\\\[]{},:a', max_size=20)


@settings(max_examples=examples(300), deadline=None)
@given(
    st.recursive(
        tricky, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(tricky, inner, max_size=3), max_leaves=20
    )
)
def test_brackets_in_strings_do_not_count_as_depth(value):
    raw, depth = json.dumps(value).encode(), slow_depth(value)
    check_depth(raw, depth)
    if depth:
        with pytest.raises(NotReadable, match="nested"):
            check_depth(raw, depth - 1)
