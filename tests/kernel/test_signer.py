"""The kernel's signer over rows by hand: what it signs, and everything that it does not."""

import json

import coincurve
import pytest
from eth_account import Account
from eth_account.typed_transactions import TypedTransaction
from hexbytes import HexBytes
from msgspec.structs import replace

from tests.kernel.rows import ONE, TOOL, captured, ended
from tests.support.ledger import PAYEE
from tests.support.merchant import KEY
from x402guard.errors import ConfigError, LedgerUnavailable, SignerError
from x402guard.kernel.evm import ORDER, Address
from x402guard.kernel.rows import Delivery, HoldState, Purpose
from x402guard.kernel.signer import AllowanceTerms, KeySigner, rlp
from x402guard.kernel.typed_data import PERMIT2, cancellation_digest, digest

SECRET = bytes.fromhex(KEY.removeprefix("0x"))
ADDRESS = Account.from_key(KEY).address
OFFER = {"scheme": "exact", "payTo": PAYEE, "asset": ONE.intent.token, "amount": "100000", "network": "eip155:84532"}


def agreed(offer=OFFER, **fields):
    """A payment whose digest is the one of its own fields."""
    intent = replace(ONE.intent, **{"payer": ADDRESS, "accepted_json": json.dumps(offer), **fields})
    return replace(ONE, intent=replace(intent, digest=digest(intent).hex()))


class Table:
    """Committed rows, and which of them the signer was given."""

    def __init__(self, *rows):
        self.rows, self.given = {row.id: row for row in rows}, []

    def __call__(self, hold_id):
        return self.rows.get(hold_id)

    def give(self, row):
        self.given.append(row.id)
        return True


def a_signer(*rows):
    signer = KeySigner(SECRET)
    table = Table(*rows)
    signer.bind(table)
    return signer, table


def signed_by(signature, digest):
    compact = signature[:64] + bytes([signature[64] - 27])
    key = coincurve.PublicKey.from_signature_and_message(compact, digest, hasher=None)
    return key == coincurve.PrivateKey(SECRET).public_key


def refusal(signer, hold, act="sign"):
    with pytest.raises(SignerError) as caught:
        getattr(signer, act)(hold)
    return str(caught.value)


GOOD = agreed()


def test_it_signs_a_committed_payment_and_gives_it_out():
    signer, table = a_signer(GOOD)
    assert signer.address == ADDRESS
    assert signed_by(signer.sign(GOOD), digest(GOOD.intent))
    assert table.given == [GOOD.id]


OF_VERSION_1 = {
    "scheme": "exact",
    "payTo": PAYEE,
    "asset": ONE.intent.token,
    "maxAmountRequired": "100000",
    "network": "base",
}


@pytest.mark.parametrize(
    "hold",
    [
        agreed({**OFFER, "amount": 100_000}),
        agreed({**OFFER, "amount": "0100000"}),
        agreed({**OFFER, "payTo": PAYEE.lower(), "asset": ONE.intent.token.upper()}),
        agreed({**OF_VERSION_1, "amount": "5"}, version=1, network_as_offered="base"),
        agreed({**OFFER, "maxAmountRequired": "5"}),
        agreed({**OFFER, "extra": {"assetTransferMethod": "eip3009"}}),
        agreed({**OFFER, "extra": {"name": "USDC"}}),
        agreed({**OFFER, "extra": None}),
    ],
)
def test_it_reads_an_offer_as_it_was_written(hold):
    signer, _ = a_signer(hold)
    assert signed_by(signer.sign(hold), digest(hold.intent))


WRONG = {
    "payer": agreed(payer=Address("0x" + "11" * 20)),
    "terms (payee)": agreed({**OFFER, "payTo": "0x" + "22" * 20}),
    "terms (token)": agreed({**OFFER, "asset": "0x" + "22" * 20}),
    "terms (amount)": agreed({**OFFER, "amount": "100001"}),
    "terms (amount of version 1)": agreed({**OFFER, "maxAmountRequired": "5"}, version=1),
    "terms (scheme)": agreed({**OFFER, "scheme": "upto"}),
    "terms (method)": agreed({**OFFER, "extra": {"assetTransferMethod": "permit2"}}),
    "deadline": replace(GOOD, deadline_unix=GOOD.deadline_unix + 1),
    "nonce": agreed(nonce=7),
}


@pytest.mark.parametrize("act", ["sign", "sign_cancellation"])
@pytest.mark.parametrize("name", WRONG)
def test_every_term_is_the_offers_and_the_holds(name, act):
    signer, table = a_signer(WRONG[name])
    assert f": {name.partition(' ')[0]} is" in refusal(signer, WRONG[name], act)
    assert table.given == []


UNREADABLE = {
    "another network": json.dumps({**OFFER, "network": "eip155:1"}),
    "a network that is no text": json.dumps({**OFFER, "network": ["eip155:84532"]}),
    "no amount of its version": json.dumps(OF_VERSION_1),
    "no whole number": json.dumps({**OFFER, "amount": 1.5}),
    "no address": json.dumps({**OFFER, "payTo": "merchant"}),
    "a number for an address": json.dumps({**OFFER, "asset": 5}),
    "no scheme": json.dumps({name: value for name, value in OFFER.items() if name != "scheme"}),
    "no object": "[]",
    "no object within": json.dumps({**OFFER, "extra": ["permit2"]}),
    "no json": "{",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_offer_without_terms_is_not_signed(name):
    hold = replace(GOOD, intent=replace(GOOD.intent, accepted_json=UNREADABLE[name]))
    signer, table = a_signer(hold)
    assert "its offer has another network, or no terms" in refusal(signer, hold)
    assert table.given == []


@pytest.mark.parametrize("act", ["sign", "sign_cancellation"])
def test_the_digest_is_the_one_that_was_authorized(act):
    hold = replace(GOOD, intent=replace(GOOD.intent, digest="00" * 32))
    signer, _ = a_signer(hold)
    assert ": digest is 00" in refusal(signer, hold, act)


def test_without_a_ledger_or_a_row_it_signs_nothing():
    assert "is not bound to a ledger" in refusal(KeySigner(SECRET), GOOD)
    nowhere = "the payment is not in the ledger"
    assert nowhere in refusal(a_signer()[0], GOOD)
    assert nowhere in refusal(a_signer(TOOL)[0], TOOL)
    assert nowhere in refusal(a_signer(GOOD)[0], GOOD.intent)
    signer, table = a_signer(GOOD)
    assert nowhere in refusal(signer, type("Like", (), {"id": GOOD.id})())
    table.__class__.__call__, kept = (
        lambda self, hold_id: (_ for _ in ()).throw(LedgerUnavailable("gone")),
        Table.__call__,
    )
    try:
        assert "the ledger cannot be read, and only payments in it are signed: gone" in refusal(signer, GOOD)
    finally:
        Table.__call__ = kept


STATES = [
    (GOOD, True),
    (ended(GOOD, HoldState.VOIDED), False),
    (ended(GOOD, HoldState.EXPIRED, presented=1, delivery=Delivery.OPEN), False),
    (captured(GOOD, 1), False),
    (captured(GOOD, 1, presented=1), False),
    (captured(GOOD, 1, presented=0, delivery=Delivery.OPEN), False),
    (captured(GOOD, 1, presented=1, delivery=Delivery.OPEN), True),
    (captured(GOOD, 1, presented=2, delivery=Delivery.LOST), True),
    (captured(GOOD, 1, presented=1, delivery=Delivery.FORGIVEN), False),
]


@pytest.mark.parametrize(("row", "is_signed"), STATES)
def test_it_signs_what_is_live_or_presented_again(row, is_signed):
    signer, table = a_signer(row)
    if is_signed:
        assert len(signer.sign(row)) == 65
    else:
        assert f"is {row.state} in the ledger, or differs" in refusal(signer, row)
    assert bool(table.given) == is_signed


DIFFERENT = {
    "node_id": "x", "kind": "tool", "amount": 1, "created_ms": 1, "purpose": Purpose("GET"), "purchase_key": "k",
    "flying_since_ms": 1, "instance": "x", "presented": 1, "deadline_unix": 1, "intent": agreed(payee=PAYEE.lower()).intent,
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_hold_is_the_row(name):
    signer, _ = a_signer(GOOD)
    assert "or differs from the hold given" in refusal(signer, replace(GOOD, **{name: DIFFERENT[name]}))


def test_a_row_of_another_id_is_none():
    signer, table = a_signer(GOOD)
    table.rows["other"] = GOOD
    assert "or differs" in refusal(signer, replace(GOOD, id="other"))


def test_it_is_bound_once():
    signer, table = a_signer()
    signer.bind(table)
    with pytest.raises(SignerError, match="this signer is bound to another ledger"):
        signer.bind(Table())


@pytest.mark.parametrize(
    "secret", [b"", SECRET[:-1], SECRET + b"\0", bytearray(SECRET), SECRET.hex(), bytes(32), ORDER.to_bytes(32, "big")]
)
def test_what_is_no_key(secret):
    with pytest.raises(ConfigError, match=r"use LocalSigner\.from_key"):
        KeySigner(secret)


@pytest.mark.parametrize("number", [1, ORDER - 1, 2**248])
def test_what_is_a_key(number):
    assert KeySigner(number.to_bytes(32, "big")).address == Account.from_key(number.to_bytes(32, "big")).address


def test_a_cancellation_is_of_a_live_payment_that_a_signature_can_cancel():
    signer, table = a_signer(GOOD)
    assert signed_by(signer.sign_cancellation(GOOD), cancellation_digest(GOOD.intent))
    assert table.given == []
    assert "or differs" in refusal(a_signer(ended(GOOD, HoldState.VOIDED))[0], GOOD, "sign_cancellation")
    permit = agreed(method="permit2")
    assert "is paid by permit2, which a signature cannot cancel" in refusal(
        a_signer(permit)[0], permit, "sign_cancellation"
    )


TERMS = [
    AllowanceTerms(84532, ONE.intent.token, 100_000, 7, 60_000, 10**9, 10**6),
    AllowanceTerms(1, ONE.intent.token, 2**256 - 1, 0, 0, 0, 0),
    AllowanceTerms(8453, ONE.intent.token, 0, 127, 128, 255, 256),
]


@pytest.mark.parametrize("terms", TERMS)
def test_an_allowance_is_one_transaction_and_no_other(terms):
    signer = KeySigner(SECRET)
    raw = signer.sign_allowance(terms)
    assert Account.recover_transaction(raw) == ADDRESS
    said = TypedTransaction.from_bytes(HexBytes(raw)).as_dict()
    data = bytes.fromhex("095ea7b3") + bytes(12) + bytes.fromhex(PERMIT2[2:]) + terms.amount_atomic.to_bytes(32, "big")
    assert bytes(said["data"]) == data
    names = {
        "type": 2, "chainId": terms.chain_id, "nonce": terms.account_nonce, "maxPriorityFeePerGas": terms.tip_wei,
        "maxFeePerGas": terms.max_fee_wei, "gas": terms.gas, "value": 0, "accessList": (),
    }  # fmt: skip
    assert {name: said[name] for name in names} == names
    assert bytes(said["to"]) == bytes.fromhex(terms.token[2:])


RLP = {
    "80": 0, "01": 1, "0f": 15, "7f": 127, "8180": 128, "81ff": 255, "820100": 256, "820400": 1024, "83646f67": b"dog", "00": b"\0",
    "c0": (), "c88363617483646f67": (b"cat", b"dog"), "c7c0c1c0c3c0c1c0": ((), ((),), ((), ((),))),
}  # fmt: skip


@pytest.mark.parametrize("wanted", RLP)
def test_rlp(wanted):
    assert rlp(RLP[wanted]).hex() == wanted


@pytest.mark.parametrize(
    ("length", "head"), [(2, "82"), (55, "b7"), (56, "b838"), (255, "b8ff"), (256, "b90100"), (65_536, "ba010000")]
)
def test_rlp_of_long_bytes(length, head):
    raw = b"x" * length
    assert rlp(raw) == bytes.fromhex(head) + raw
    if length > 55:
        assert rlp((b"y",) * length) == bytes([int(head[:2], 16) + 0x40]) + bytes.fromhex(head[2:]) + b"y" * length


def test_a_signer_is_not_pickled():
    with pytest.raises(TypeError, match="it holds a key"):
        KeySigner(SECRET).__reduce__()
