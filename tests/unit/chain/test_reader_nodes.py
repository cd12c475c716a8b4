"""What a reading by fresh eyes of chain evidence has found: nodes that disagree, that hide, and that are shown odd transactions."""

import json

import pytest
from eth_hash.auto import keccak

from tests.support.chain_node import INTENTS, NOW, OTHER, TOKEN, TX, Rpc, log, topic
from tests.support.ledger import PAYER, START_MS
from x402guard.chain.logs import outgoing_logs
from x402guard.chain.reader import _read
from x402guard.chain.rpc import ChainUnreadable, JsonRpc, NodeRefuses, PaymentUnreadable
from x402guard.kernel.typed_data import PERMIT2
from x402guard.ledger.findings import Cancelled, Settled, Unused, Used

USED = "0x" + keccak(b"AuthorizationUsed(address,bytes32)").hex()
CANCELED = "0x" + keccak(b"AuthorizationCanceled(address,bytes32)").hex()
INVALIDATED = "0x" + keccak(b"UnorderedNonceInvalidation(address,uint256,uint256)").hex()
DEAD = START_MS // 1000 + 61


class Logs(Rpc):
    """The same node with logs in its blocks; it takes at most `most` blocks a question about `slow`."""

    def __init__(self, intent, logs=(), most=10**9, slow="", **changes):
        super().__init__(intent, **changes)
        self.logs, self.most, self.slow = logs, most, slow

    def call(self, method, *params):
        if method == "eth_getBlockByNumber" and params[0] not in ("latest", "finalized"):
            number = int(params[0], 16)
            return {"hash": f"0x{number:064x}", "number": params[0], "timestamp": hex(NOW - 3600 + 2 * number)}
        if method == "eth_getBlockByNumber":
            return {"hash": "0x" + "11" * 32, "number": hex(self.head), "timestamp": hex(self.final_time)}
        if method == "eth_blockNumber":
            return hex(self.head)
        if method != "eth_getLogs":
            return super().call(method, *params)
        query = params[0]
        first, last = int(query["fromBlock"], 16), int(query["toBlock"], 16)
        if query["address"] == self.slow and last - first >= self.most:
            raise NodeRefuses("more blocks than this node takes")
        here = [each for each in self.logs if each["address"].lower() == query["address"].lower()]
        return [each for each in here if first <= int(each["blockNumber"], 16) <= last and _asked_for(each, query)]

    head = 0x20


def _asked_for(found, query):
    for wanted, topic_ in zip(query["topics"], found["topics"], strict=False):
        if wanted is not None and topic_ not in ([wanted] if isinstance(wanted, str) else wanted):
            return False
    return True


def in_block(entry, number):
    return {**entry, "transactionHash": TX, "blockNumber": hex(number)}


def cancelled(intent):
    entry = {
        "address": TOKEN,
        "topics": [CANCELED, topic(PAYER), f"0x{intent.nonce:064x}"],
        "data": "0x",
        "logIndex": "0x1",
    }
    return in_block(entry, 0x10)


def test_no_cancellation_is_final_while_the_final_block_shows_the_nonce_unused():
    """The logs came from one node and the state from another: nothing of that frees a budget."""
    intent = INTENTS["eip3009"]
    node = Logs(intent, [cancelled(intent)], used_final=False)
    assert _read(node, intent, "") == Cancelled(TX, final=False)


def test_no_settlement_is_final_while_the_final_block_shows_the_nonce_unused():
    intent = INTENTS["upto"]
    found = _read(Rpc(intent, 1, used_final=False), intent, TX)
    assert found == Settled(1, TX, 3, final=False)


class BitOf(Logs):
    """A Permit2 nonce that is unused up to the block before `since`."""

    since = 3000

    def view(self, contract, name, types, values, block):
        before = isinstance(block, str) and block.startswith("0x") and int(block, 16) < self.since
        return 0 if before else super().view(contract, name, types, values, block)


def invalidated(intent, number):
    data = f"0x{intent.nonce >> 8:064x}{1 << (intent.nonce & 255):064x}"
    entry = {"address": PERMIT2, "topics": [INVALIDATED, topic(PAYER)], "data": data, "logIndex": "0x9"}
    return in_block(entry, number)


LIMITS = {
    "over rate limit": (-32016, "over rate limit", False),
    "a code alone": (-32029, "no", False),
    "http's own": (429, "Too Many Requests", False),
    "a day's requests": (-32005, "daily request count exceeded, request rate limited", False),
    "too many logs": (-32005, "query returned more than 10000 results", True),
    "no such block": (-32000, "header not found", True),
    "no history": (4444, "pruned history unavailable", True),
}


@pytest.mark.parametrize("says", LIMITS)
def test_a_node_that_is_asked_too_often_says_nothing_about_the_question(says, monkeypatch):
    code, message, refuses = LIMITS[says]
    answer = {"jsonrpc": "2.0", "id": 1, "error": {"code": code, "message": message}}
    rpc = JsonRpc("eip155:84532", "http://node.example", pause=lambda _seconds: None)
    monkeypatch.setattr(rpc, "_answer", lambda *_: json.dumps(answer).encode())
    rpc._right.add(0)
    with pytest.raises(ChainUnreadable) as caught:
        rpc.call("eth_getLogs", {})
    assert isinstance(caught.value, NodeRefuses) == refuses
    rpc.close()


@pytest.mark.parametrize("most", [10**9, 10])
def test_a_payment_taken_in_the_block_of_its_cancellation_frees_nothing_however_few_blocks_a_node_takes(most):
    """The wallet invalidates the nonce, the seller sees that and is quicker by one transaction, through a contract of its own."""
    intent = INTENTS["exact permit2"]
    taken = in_block(log(100_000), 3000)
    node = BitOf(intent, [taken, invalidated(intent, 3000)], most=most, slow=TOKEN, sent={"to": OTHER, "input": "0x12"})
    node.head = 3100
    if most == 10:  # nobody knows, until nothing more can come
        with pytest.raises(PaymentUnreadable, match="blocks are left"):
            _read(node, intent, "")
        node.final_time = DEAD
    assert _read(node, intent, "") == Used(final=True)


def test_a_transfer_of_nothing_by_a_stranger_hides_no_cancellation():
    """Anybody may move nothing from the wallet to the seller, in that block as well."""
    intent = INTENTS["exact permit2"]
    nothing = in_block(log(0), 3000)
    node = BitOf(intent, [nothing, invalidated(intent, 3000)], sent={"to": OTHER, "input": "0x12"})
    node.head = 3100
    assert _read(node, intent, "") == Cancelled(TX, final=True)


class Recent(BitOf):
    """A node with all logs, and the state of the last blocks alone."""

    def view(self, contract, name, types, values, block):
        if isinstance(block, str) and block.startswith("0x") and int(block, 16) < self.head:
            raise NodeRefuses("missing trie node")
        return super().view(contract, name, types, values, block)


@pytest.mark.parametrize("final_time", [NOW, DEAD], ids=["alive", "dead"])
@pytest.mark.parametrize("kind", ["exact permit2", "upto"])
def test_a_permit_that_its_wallet_gave_up_is_cancelled_on_a_node_without_old_state(kind, final_time):
    intent = INTENTS[kind]
    for logs in ([invalidated(intent, 3000)], [in_block(log(0), 2000), invalidated(intent, 3000)]):
        node = Recent(intent, logs, sent={"to": OTHER, "input": "0x12"}, final_time=final_time)
        node.head = 3100
        assert _read(node, intent, "", NOW - 3600) == Cancelled(TX, final=True)


@pytest.mark.parametrize("kind", ["exact permit2", "upto"])
def test_a_permit_that_may_have_been_taken_before_is_not_cancelled_on_a_node_without_old_state(kind):
    """Permit2 emits the event for a nonce that is used already: a contract has paid its seller, and shows no nonce."""
    intent = INTENTS[kind]
    logs = [in_block(log(100_000), 2000), invalidated(intent, 3000)]
    node = Recent(intent, logs, sent={"to": OTHER, "input": "0x12"})
    node.head = 3100
    with pytest.raises(PaymentUnreadable, match="missing trie node"):
        _read(node, intent, "", NOW - 3600)
    node.final_time = DEAD
    assert _read(node, intent, "", NOW - 3600) == Used(final=True)


@pytest.mark.parametrize("kind", INTENTS)
def test_a_transaction_of_another_age_that_a_seller_names_is_none_of_ours(kind):
    """Receipts from before Byzantium have no status: a seller may name such a transaction for ever."""
    node = Rpc(INTENTS[kind])
    del node.receipt["status"]
    assert _read(node, INTENTS[kind], TX) == Used(final=True)


@pytest.mark.parametrize("kind", INTENTS)
def test_a_transaction_too_large_to_be_read_ends_with_the_deadline(kind):
    """A seller fills its transaction with logs until no reader takes the receipt; for less than a dollar."""

    class Large(Rpc):
        def call(self, method, *params):
            if method == "eth_getTransactionReceipt":
                raise NodeRefuses("an answer of more than 16777216 bytes")
            return super().call(method, *params)

    intent = INTENTS[kind]
    assert _read(Large(intent, final_time=DEAD), intent, TX) == Used(final=True)


def test_a_nonce_state_that_is_no_bool_is_not_unused():
    """EIP-3009's drafts counted to two: unused, used, cancelled."""

    class Counted(Rpc):
        def view(self, *_):
            return 2

    intent = INTENTS["eip3009"]
    assert not isinstance(_read(Counted(intent, final_time=DEAD), intent, ""), Unused)


TWO_READINGS = {
    "twice": b'{"jsonrpc":"2.0","id":1,"result":"0x1","result":"0x2"}',
    "no number": b'{"jsonrpc":"2.0","id":1,"result":NaN}',
    "cut": b'{"jsonrpc":"2.0","id":1,"result":"0x',
    "deep": b'{"jsonrpc":"2.0","id":1,"result":' + b"[" * 1_000 + b"]" * 1_000 + b"}",
    "no text": b'{"jsonrpc":"2.0","id":1,"result":"\xff"}',
    "empty": b"",
}


@pytest.mark.parametrize("answer", TWO_READINGS.values(), ids=TWO_READINGS)
def test_an_answer_with_no_one_reading_is_none(answer):
    rpc = JsonRpc("eip155:84532", "http://node.example", pause=lambda _seconds: None)
    rpc._answer = lambda *_: answer
    rpc._right.add(0)
    with pytest.raises(ChainUnreadable):
        rpc.call("eth_blockNumber")
    rpc.close()


def test_a_nodes_words_hide_its_address():
    """Some nodes repeat the path that they were asked at, which is an access key."""
    key = "k3y" * 12
    url = f"https://node.example/v2/{key}"
    rpc = JsonRpc("eip155:84532", url, pause=lambda seconds: None)
    rpc._answer = lambda *_: (
        b'{"jsonrpc":"2.0","id":1,"error":{"code":-32000,"message":"no project %s"}}' % key.encode()
    )
    with pytest.raises(ChainUnreadable) as caught:
        rpc.call("eth_blockNumber")
    rpc.close()
    assert key not in str(caught.value)


def test_a_network_without_finalized_blocks_is_told_what_to_set():
    class Young(Rpc):
        def call(self, method, *params):
            return None if params[:1] == ("finalized",) else super().call(method, *params)

    with pytest.raises(ChainUnreadable, match="finality"):
        _read(Young(INTENTS["eip3009"]), INTENTS["eip3009"], TX)


@pytest.mark.parametrize("method", ["eth_getLogs", "eth_getTransactionReceipt"])
def test_a_node_out_of_reach_for_a_moment_takes_no_ceiling_for_good(method):
    """After the deadline nobody asks again about what a final block has shown: a broken line must not be the last word."""

    class Broken(Rpc):
        def call(self, called, *params):
            if called == method:
                raise ChainUnreadable("ReadTimeout")
            return super().call(called, *params)

    intent = INTENTS["upto"]
    named = TX if method == "eth_getTransactionReceipt" else ""
    with pytest.raises(ChainUnreadable):
        _read(Broken(intent, 1, final_time=DEAD), intent, named)


def test_what_a_node_refuses_to_show_of_one_payment_says_nothing_of_the_network():
    class Pruned(Rpc):
        def call(self, method, *params):
            if method == "eth_getLogs":
                raise NodeRefuses("history is pruned")
            return super().call(method, *params)

    with pytest.raises(PaymentUnreadable, match="pruned"):
        _read(Pruned(INTENTS["upto"]), INTENTS["upto"], "")


NO_LISTS = [None, "", "0x", {}, {"result": []}, True, 0]


@pytest.mark.parametrize("answer", NO_LISTS, ids=str)
def test_logs_that_are_no_list_do_not_mean_that_there_are_none(answer):
    """The comparison of a wallet's Transfers would go on behind a block that was never read, and tell no theft in it."""

    class Nonsense(Rpc):
        def call(self, method, *params):
            return answer if method == "eth_getLogs" else super().call(method, *params)

    node = Nonsense(INTENTS["upto"])
    with pytest.raises(TypeError):
        list(outgoing_logs(node, TOKEN, PAYER, 0, 0x10))
    with pytest.raises(PaymentUnreadable, match="is invalid: TypeError"):
        _read(node, INTENTS["upto"], "")


@pytest.mark.parametrize("answer", NO_LISTS, ids=str)
def test_a_receipt_whose_logs_are_no_list_settles_nothing(answer):
    node = Logs(INTENTS["upto"])
    node.receipt = {**node.receipt, "logs": answer}
    with pytest.raises(PaymentUnreadable, match="is invalid: TypeError"):
        _read(node, INTENTS["upto"], TX)


def test_an_event_is_proven_by_a_transfer_of_its_own_transaction():
    """The seller takes two payments of one price in one block: each proves itself."""
    intent = INTENTS["eip3009"]
    used = {"address": TOKEN, "topics": [USED, topic(PAYER), f"0x{intent.nonce:064x}"], "data": "0x", "logIndex": "0x4"}
    other = {**in_block(log(100_000, index=5), 0x10), "transactionHash": "0x" + "cd" * 32}
    node = Logs(intent, [in_block(used, 0x10), other, in_block(log(100_000, index=6), 0x10)])
    assert _read(node, intent, "") == Settled(100_000, TX, 6, final=True)
