"""What counts as proof that a payment was settled, and for how much: every lie a transaction can tell."""

import pytest
from eth_abi.abi import encode
from eth_hash.auto import keccak

from tests.support.chain_node import INTENTS, OTHER, TOKEN, TRANSFER, TX, Rpc, call_for, log, topic
from tests.support.ledger import PAYEE, PAYER
from x402guard.chain.calldata import nonce_settled
from x402guard.chain.reader import _read
from x402guard.chain.rpc import ChainUnreadable, selector
from x402guard.frozen import replace
from x402guard.kernel.typed_data import PERMIT2
from x402guard.ledger.findings import Cancelled, Settled, Unused, Used


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
    with pytest.raises(ChainUnreadable, match="not visible yet"):
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


# ---- the logs, where no transaction speaks for itself ----

USED, CANCELED, INVALIDATED = (
    "0x" + keccak(event).hex()
    for event in (
        b"AuthorizationUsed(address,bytes32)",
        b"AuthorizationCanceled(address,bytes32)",
        b"UnorderedNonceInvalidation(address,uint256,uint256)",
    )
)


def event(name, *topics, data="0x", index=0, block=0x10, address=TOKEN, transaction=TX):
    return {
        "address": address, "topics": [name, *topics], "data": data, "logIndex": hex(index), "blockNumber": hex(block),
        "transactionHash": transaction,
    }  # fmt: skip


class LogsRpc(Rpc):
    """The same node, with logs to look through; a settlement in a call that nobody can decode."""

    def __init__(self, intent, logs, *, used_before=False, **changes):
        super().__init__(intent, **changes)
        self.logs, self.used_before = logs, used_before
        self.sent = {"to": OTHER, "input": "0xdeadbeef"}
        self.receipt = {
            **self.receipt,
            "transactionHash": TX,
            "logs": [log for log in logs if log["transactionHash"] == TX],
        }

    def view(self, contract, name, types, values, block):
        before = isinstance(block, str) and block.startswith("0x")
        return super().view(contract, name, types, values, block) if not before else int(self.used_before) << 7

    def call(self, method, *params):
        if method != "eth_getLogs":
            return super().call(method, *params)
        asked = params[0]
        wanted = [[t] if isinstance(t, str) else t for t in asked["topics"]]
        return [
            log for log in self.logs
            if log["address"].lower() == asked["address"].lower()
            and all(t in w for t, w in zip(log["topics"], wanted, strict=False))
        ]  # fmt: skip


def used(intent, index, nonce=None):
    return event(USED, topic(PAYER), f"0x{intent.nonce if nonce is None else nonce:064x}", index=index)


def moved(amount, index, **more):
    return event(TRANSFER, topic(PAYER), topic(PAYEE), data=f"0x{amount:064x}", index=index, **more)


def test_of_two_authorizations_in_one_call_each_is_proven_by_the_transfer_behind_its_event():
    one = INTENTS["eip3009"]
    two = replace(one, nonce=8)
    rpc = LogsRpc(one, [used(one, 0), moved(100_000, 1), used(two, 2), moved(100_000, 3)])
    assert _read(rpc, one, "") == Settled(100_000, TX, 1, final=True)
    assert _read(rpc, two, TX) == Settled(100_000, TX, 3, final=True)


@pytest.mark.parametrize("logs", [[], [moved(99_999, 1)], [moved(100_000, 1, address=OTHER)]])
def test_an_event_without_its_transfer_counts_in_full(logs):
    intent = INTENTS["eip3009"]
    assert _read(LogsRpc(intent, [used(intent, 0), *logs]), intent, "") == Used(final=True)


def test_a_transfer_before_the_event_is_another_payments():
    intent = INTENTS["eip3009"]
    assert _read(LogsRpc(intent, [moved(100_000, 0), used(intent, 1)]), intent, "") == Used(final=True)


def test_a_cancellation_is_the_tokens_event_of_this_payer_and_nonce():
    intent = INTENTS["eip3009"]
    cancelled = event(CANCELED, topic(PAYER), f"0x{intent.nonce:064x}")
    assert _read(LogsRpc(intent, [cancelled]), intent, "") == Cancelled(TX, final=True)
    for other in (event(CANCELED, topic(OTHER), cancelled["topics"][2]), event(CANCELED, topic(PAYER), f"0x{8:064x}")):
        assert _read(LogsRpc(intent, [other]), intent, "") == Used(final=True)
    assert _read(LogsRpc(intent, [{**cancelled, "address": OTHER}]), intent, "") == Used(final=True)


def given_up(nonce=7, block=0x10, mask=None, payer=PAYER):
    data = f"0x{nonce >> 8:064x}{1 << (nonce & 255) if mask is None else mask:064x}"
    return event(INVALIDATED, topic(payer), data=data, address=PERMIT2, block=block, transaction="0x" + "ef" * 32)


PERMITS = ["exact permit2", "upto"]


@pytest.mark.parametrize("kind", PERMITS)
def test_a_permit_is_cancelled_by_the_event_of_a_nonce_that_was_unused(kind):
    intent = INTENTS[kind]
    found = _read(LogsRpc(intent, [given_up()]), intent, "")
    assert found == Cancelled("0x" + "ef" * 32, final=True)
    assert _read(LogsRpc(intent, [given_up(block=0x21)], used_final=False), intent, "").final is False


@pytest.mark.parametrize("kind", PERMITS)
@pytest.mark.parametrize(
    "logs",
    [[given_up(8)], [given_up(7 + 256)], [given_up(mask=0)], [given_up(payer=OTHER)]],
    ids=["bit", "word", "none", "payer"],
)
def test_the_event_of_another_nonce_cancels_nothing(kind, logs):
    assert _read(LogsRpc(INTENTS[kind], logs), INTENTS[kind], "") == Used(final=True)


@pytest.mark.parametrize("kind", PERMITS)
def test_a_nonce_that_was_used_before_its_event_was_taken(kind):
    assert _read(LogsRpc(INTENTS[kind], [given_up()], used_before=True), INTENTS[kind], "") == Used(final=True)


@pytest.mark.parametrize("kind", PERMITS)
def test_a_payment_to_the_seller_in_the_block_of_the_event_may_have_taken_it(kind):
    assert _read(LogsRpc(INTENTS[kind], [moved(5, 1), given_up()]), INTENTS[kind], "") == Used(final=True)
    assert _read(LogsRpc(INTENTS[kind], [moved(5, 1, block=0xF), given_up()]), INTENTS[kind], "").final


@pytest.mark.parametrize("kind", PERMITS)
def test_another_payment_to_the_seller_in_the_block_of_the_event_has_not_taken_it(kind):
    node = LogsRpc(INTENTS[kind], [moved(100_000, 1), given_up()])
    node.sent = _sent(INTENTS[kind], nonce=8)
    assert _read(node, INTENTS[kind], "") == Cancelled("0x" + "ef" * 32, final=True)
    node.sent = None  # it is in the logs, but the node does not show it
    assert _read(node, INTENTS[kind], "") == Used(final=True)


@pytest.mark.parametrize("kind", INTENTS)
@pytest.mark.parametrize("with_permit", [False, True])
def test_the_nonce_behind_a_settling_call_is_read_from_it(kind, with_permit):
    intent = INTENTS[kind]
    to, data = call_for(intent, 100_000, with_permit=with_permit and kind != "eip3009", nonce=2**255 + 9)
    assert nonce_settled(TOKEN, to, data + b"behind") == 2**255 + 9
    assert nonce_settled(TOKEN, OTHER, data) is None
    assert nonce_settled(TOKEN, to, data[:100]) is None
    assert nonce_settled(TOKEN, to, b"\0\0\0\0" + data[4:]) is None
