"""What counts as proof that a payment was settled, and for how much: every lie a transaction can tell."""

import dataclasses

import pytest
from eth_abi.abi import encode

from tests.books import PAYEE, PAYER, START_MS, an_intent
from x402guard.chain import _read
from x402guard.evm import keccak
from x402guard.ledger.evidence import Settled, Unused, Used
from x402guard.rpc import ChainUnreadable, selector
from x402guard.schemes.exact import EXACT_PROXY
from x402guard.schemes.upto import UPTO_PROXY

TX = "0x" + "ab" * 32
OTHER = "0x857b06519E91e3A54538791bDbb0E22373e36b66"
FACILITATOR = "0x6C6D4539DE4FC56445d4Eff7Da256B40D6014233"
TOKEN = an_intent().token
NOW = START_MS // 1000
PERMIT, PERMIT_2612 = "((address,uint256),uint256,uint256)", "(uint256,uint256,bytes32,bytes32,uint8)"
TRANSFER = "0x" + keccak(b"Transfer(address,address,uint256)").hex()

INTENTS = {
    "eip3009": an_intent(7, 100_000),
    "exact permit2": dataclasses.replace(an_intent(7, 100_000, method="permit2"), spender=EXACT_PROXY),
    "upto": dataclasses.replace(
        an_intent(7, 100_000, scheme="upto", method="permit2"), spender=UPTO_PROXY, facilitator=FACILITATOR
    ),
}


def topic(address):
    return "0x" + address[2:].lower().rjust(64, "0")


def log(amount, payer=PAYER, payee=PAYEE, token=TOKEN, index=3):
    return {
        "address": token,
        "topics": [TRANSFER, topic(payer), topic(payee)],
        "data": f"0x{amount:064x}",
        "logIndex": hex(index),
    }


def call_for(intent, amount, *, with_permit=False, **changes):
    """(to, calldata) of the transaction that settles *intent*, with any term changed."""
    terms = {
        "payer": intent.payer,
        "payee": intent.payee,
        "nonce": intent.nonce,
        "ceiling": intent.amount_atomic,
        **changes,
    }
    if intent.method == "eip3009":
        types = ["address", "address", "uint256", "uint256", "uint256", "bytes32", "bytes"]
        values = [
            terms["payer"],
            terms["payee"],
            terms["ceiling"],
            0,
            intent.valid_until,
            terms["nonce"].to_bytes(32, "big"),
            b"s",
        ]
        return intent.token, selector("transferWithAuthorization", types) + encode(types, values)
    permit = ((terms.get("token", intent.token), terms["ceiling"]), terms["nonce"], intent.valid_until)
    if intent.scheme == "exact":
        to, types = EXACT_PROXY, [PERMIT, "address", "(address,uint256)", "bytes"]
        values = [permit, terms["payer"], (terms["payee"], 0), b"s"]
    else:
        to, types = UPTO_PROXY, [PERMIT, "uint256", "address", "(address,address,uint256)", "bytes"]
        values = [permit, amount, terms["payer"], (terms["payee"], FACILITATOR, 0), b"s"]
    name = "settle"
    if with_permit:
        name, types, values = "settleWithPermit", [PERMIT_2612, *types], [(1, 2, b"r" * 32, b"s" * 32, 27), *values]
    return to, selector(name, types) + encode(types, values)


class Rpc:
    """A node that answers what it is told to, in JSON-RPC's own forms."""

    def __init__(self, intent, amount=None, **changes):
        self.amount = intent.amount_atomic if amount is None else amount
        to, data = call_for(intent, self.amount)
        self.used_final = self.used_head = True
        self.final_time = NOW
        self.sent = {"to": to, "input": "0x" + data.hex()}
        self.receipt = {"status": "0x1", "blockNumber": "0x10", "logs": [log(self.amount)]}
        self.__dict__.update(changes)

    def view(self, contract, name, types, values, block):
        used = self.used_head if block == "latest" else self.used_final
        return int(used) if name == "authorizationState" else int(used) << ((values[1] and 0) or 7)

    def call(self, method, *params):
        if method == "eth_getBlockByNumber":
            return {"hash": "0x" + "11" * 32, "number": "0x20", "timestamp": hex(self.final_time)}
        if method == "eth_getLogs":
            return []
        return {
            "eth_blockNumber": "0x20",
            "eth_getTransactionByHash": self.sent,
            "eth_getTransactionReceipt": self.receipt,
        }[method]


@pytest.mark.parametrize("kind", INTENTS)
def test_its_own_transaction_proves_a_payment(kind):
    rpc = Rpc(INTENTS[kind])
    assert _read(rpc, INTENTS[kind], TX) == Settled(100_000, TX, 3, final=True)


def test_an_upto_is_proven_for_what_was_taken():
    rpc = Rpc(INTENTS["upto"], 12_345)
    assert _read(rpc, INTENTS["upto"], TX) == Settled(12_345, TX, 3, final=True)


@pytest.mark.parametrize("kind", ["exact permit2", "upto"])
def test_a_permit_for_the_allowance_may_come_first(kind):
    to, data = call_for(INTENTS[kind], 100_000, with_permit=True)
    rpc = Rpc(INTENTS[kind], sent={"to": to, "input": "0x" + data.hex()})
    assert _read(rpc, INTENTS[kind], TX) == Settled(100_000, TX, 3, final=True)


@pytest.mark.parametrize("kind", INTENTS)
def test_a_facilitator_may_append_to_its_calldata(kind):
    rpc = Rpc(INTENTS[kind])
    rpc.sent["input"] += "c0ffee" * 11
    assert isinstance(_read(rpc, INTENTS[kind], TX), Settled)


@pytest.mark.parametrize("kind", INTENTS)
def test_an_eip3009_signature_may_be_split(kind):
    intent = INTENTS["eip3009"]
    types = ["address", "address", "uint256", "uint256", "uint256", "bytes32", "uint8", "bytes32", "bytes32"]
    values = [PAYER, PAYEE, 100_000, 0, intent.valid_until, intent.nonce.to_bytes(32, "big"), 27, b"r" * 32, b"s" * 32]
    data = selector("transferWithAuthorization", types) + encode(types, values)
    rpc = Rpc(intent, sent={"to": intent.token, "input": "0x" + data.hex()})
    assert isinstance(_read(rpc, intent, TX), Settled)


LIES = {
    "another nonce": lambda i: {"sent": _sent(i, nonce=8)},
    "another payer": lambda i: {"sent": _sent(i, payer=OTHER)},
    "another payee": lambda i: {"sent": _sent(i, payee=OTHER)},
    "another ceiling": lambda i: {"sent": _sent(i, ceiling=50_000)},
    "another contract": lambda i: {"sent": {**_sent(i), "to": OTHER}},
    "no contract": lambda i: {"sent": {**_sent(i), "to": None}},
    "another function": lambda i: {"sent": {**_sent(i), "input": "0xdeadbeef" + _sent(i)["input"][10:]}},
    "calldata cut short": lambda i: {"sent": {**_sent(i), "input": _sent(i)["input"][:200]}},
    "reverted": lambda i: {"receipt": _receipt(status="0x0")},
    "no log": lambda i: {"receipt": _receipt(logs=[])},
    "two logs": lambda i: {"receipt": _receipt(logs=[log(100_000), log(100_000, index=4)])},
    "a log of another amount": lambda i: {"receipt": _receipt(logs=[log(1)])},
    "a log of another payee": lambda i: {"receipt": _receipt(logs=[log(100_000, payee=OTHER)])},
    "a log of another payer": lambda i: {"receipt": _receipt(logs=[log(100_000, payer=OTHER)])},
    "a log of another token": lambda i: {"receipt": _receipt(logs=[log(100_000, token=OTHER)])},
}


def _sent(intent, **changes):
    to, data = call_for(intent, 100_000, **changes)
    return {"to": to, "input": "0x" + data.hex()}


def _receipt(**changes):
    return {"status": "0x1", "blockNumber": "0x10", "logs": [log(100_000)], **changes}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("kind", INTENTS)
def test_any_other_transaction_proves_nothing_and_a_used_nonce_counts_in_full(kind, lie):
    intent = INTENTS[kind]
    assert _read(Rpc(intent, **LIES[lie](intent)), intent, TX) == Used(final=True)


def test_a_settlement_above_the_ceiling_proves_nothing():
    rpc = Rpc(INTENTS["upto"], 100_001)
    assert _read(rpc, INTENTS["upto"], TX) == Used(final=True)


def test_another_token_in_the_permit_proves_nothing():
    intent = INTENTS["upto"]
    assert _read(Rpc(intent, sent=_sent(intent, token=OTHER)), intent, TX) == Used(final=True)


@pytest.mark.parametrize("claimed", ["", "0x", "0x12", "ab" * 33, "0x" + "zz" * 32, TX + "00"])
def test_a_claim_without_a_transaction_hash_leaves_the_nonce_to_speak(claimed):
    assert _read(Rpc(INTENTS["upto"]), INTENTS["upto"], claimed) == Used(final=True)


def test_a_transaction_that_nobody_sees_yet_says_nothing_until_it_is_too_late_to_show_it():
    intent = INTENTS["upto"]
    with pytest.raises(ChainUnreadable, match="not to be seen yet"):
        _read(Rpc(intent, sent=None), intent, TX)
    late = intent.valid_until + 1
    assert _read(Rpc(intent, sent=None, final_time=late), intent, TX) == Used(final=True)


def test_what_is_not_final_says_so():
    intent = INTENTS["upto"]
    rpc = Rpc(intent, 12_345, used_final=False)
    rpc.receipt["blockNumber"] = "0x21"
    assert _read(rpc, intent, TX) == Settled(12_345, TX, 3, final=False)
    assert _read(Rpc(intent, used_final=False), intent, "") == Used(final=False)


def test_an_unused_nonce_is_unused_as_of_the_final_block():
    intent = INTENTS["eip3009"]
    assert _read(Rpc(intent, used_final=False, used_head=False, final_time=1234), intent, TX) == Unused(1234)
