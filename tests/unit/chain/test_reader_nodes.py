"""What a reading by fresh eyes of chain evidence has found: nodes that disagree, that hide, and that are shown odd transactions."""

import json
from types import SimpleNamespace

import pytest
from eth_hash.auto import keccak

from tests.support.chain_node import INTENTS, NOW, OTHER, TOKEN, TX, Rpc, call_for, log, topic
from tests.support.ledger import PAYEE, PAYER, START_MS, a_hold
from x402guard.chain.logs import Block, find_cause, outgoing_logs
from x402guard.chain.reader import RpcChainReader, _read
from x402guard.chain.rpc import ChainUnreadable, JsonRpc, NodeRefuses, PaymentUnreadable
from x402guard.flow.ports import OutgoingTransfer
from x402guard.frozen import replace
from x402guard.ledger.evidence import Cancelled, Settled, Unreadable, Unused, Used
from x402guard.ledger.model import Claim
from x402guard.money import Nanos
from x402guard.x402.schemes.scheme import PERMIT2

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
    with pytest.raises(TypeError):
        _read(node, INTENTS["upto"], "")


@pytest.mark.parametrize("answer", NO_LISTS, ids=str)
def test_a_receipt_whose_logs_are_no_list_settles_nothing(answer):
    node = Logs(INTENTS["upto"])
    node.receipt = {**node.receipt, "logs": answer}
    with pytest.raises(TypeError):
        _read(node, INTENTS["upto"], TX)


def test_an_event_is_proven_by_a_transfer_of_its_own_transaction():
    """The seller takes two payments of one price in one block: each proves itself."""
    intent = INTENTS["eip3009"]
    used = {"address": TOKEN, "topics": [USED, topic(PAYER), f"0x{intent.nonce:064x}"], "data": "0x", "logIndex": "0x4"}
    other = {**in_block(log(100_000, index=5), 0x10), "transactionHash": "0x" + "cd" * 32}
    node = Logs(intent, [in_block(used, 0x10), other, in_block(log(100_000, index=6), 0x10)])
    assert _read(node, intent, "") == Settled(100_000, TX, 6, final=True)


class Provider:
    """A ``web3`` provider over a node of the tests, away for the calls *away*."""

    def __init__(self, node, away=()):
        self.node, self.away, self.asked = node, away, 0

    def make_request(self, method, params):
        if method == "eth_chainId":
            return {"result": hex(84532)}
        self.asked += 1
        if self.asked - 1 in self.away:
            raise OSError("away")
        return {"result": self.node.call(method, *params)}


BEHIND = 0x08


def two_nodes(*away):
    """Return a reader over a complete node, which is away for some of its calls, and one that is behind."""
    intent = INTENTS["eip3009"]
    used = {
        "address": TOKEN,
        "topics": [USED, topic(PAYER), f"0x{intent.nonce:064x}"],
        "data": "0x",
        "logIndex": "0x1",
    }
    shown = [in_block(log(100_000), 0x10), in_block(used, 0x10)]
    sent = {"to": OTHER, "input": "0x", "blockNumber": "0x10"}
    right = Provider(Logs(intent, shown, sent=sent, final_time=NOW - 3600 + 2 * 0x20), away)
    behind = Provider(Logs(intent, sent=None, final_time=NOW - 3600 + 2 * BEHIND))
    behind.node.head = BEHIND
    return reader_of(right, behind), right, behind


def reader_of(*providers):
    nodes = [SimpleNamespace(provider=each) for each in providers]
    rpc = JsonRpc("eip155:84532", nodes, pause=lambda _seconds: None)
    return RpcChainReader.over({"eip155:84532": rpc}, {"eip155:84532": "finalized"}, monotonic_s=lambda: 0.0)


def compared(reader):
    return reader.transfers("eip155:84532", TOKEN, PAYER, after=None, since_unix=NOW - 3600)


TRANSFERRED = OutgoingTransfer(TX, 3, PAYEE, 100_000, 0x10)
NODE_CALLS = 8


@pytest.mark.parametrize("ends", range(1, NODE_CALLS + 1))
@pytest.mark.parametrize("begins", range(NODE_CALLS))
def test_a_comparison_of_the_wallet_is_answered_by_one_node(begins, ends):
    """One that is away in the middle hands over to one that is behind: that one answers it all, up to its own block."""
    reader, right, _ = two_nodes(*range(begins, begins + ends))
    found = compared(reader)
    amounts = [each.amount_atomic for each in found.outgoing]
    assert amounts in ([], [100_000])
    assert found.upto == (0x20 if amounts else BEHIND), "blocks that no node has shown are passed over"
    assert bool(amounts) or right.asked > begins


@pytest.mark.parametrize("ends", [1, 2, 9])
@pytest.mark.parametrize("begins", [0, 1, 2])
def test_the_nonce_behind_a_transfer_is_read_from_one_node(begins, ends):
    reader, _, _ = two_nodes(*range(begins, begins + ends))
    found = reader.nonce_behind("eip155:84532", TOKEN, PAYER, TRANSFERRED)
    assert found == 7 or isinstance(found, Unreadable), "no log of another node says that no nonce is behind it"
    assert (found == 7) is (begins == 2 or ends == 1)


class NoLogs(Provider):
    """A public node that answers all but one question."""

    def __init__(self, node, refused="eth_getLogs"):
        super().__init__(node)
        self.refused = refused

    def make_request(self, method, params):
        if method == self.refused:
            return {"error": {"code": -32601, "message": "not available"}}
        return super().make_request(method, params)


@pytest.mark.parametrize("refused", ["eth_getLogs", "eth_getBlockByNumber"])
@pytest.mark.parametrize("first", [True, False])
def test_a_node_that_answers_not_all_of_it_leaves_it_to_the_other_one(refused, first):
    """In a process that has asked nothing before, as a command in a cron job: it asks the first endpoint first."""
    _, right, _ = two_nodes()
    poor = NoLogs(right.node, refused)
    reader = reader_of(*((poor, right) if first else (right, poor)))
    for _ in range(2):
        assert [each.amount_atomic for each in compared(reader).outgoing] == [100_000]
        assert reader.nonce_behind("eip155:84532", TOKEN, PAYER, TRANSFERRED) == 7


class Limited(Provider):
    """A node that refuses each n-th question, because it has been asked too often."""

    def __init__(self, node, every):
        super().__init__(node)
        self.every = every

    def make_request(self, method, params):
        answer = super().make_request(method, params)
        limited = method != "eth_chainId" and self.asked % self.every == 0
        return {"error": {"code": -32016, "message": "over rate limit"}} if limited else answer


@pytest.mark.parametrize("every", range(2, 12))
def test_two_nodes_with_limits_are_both_of_use(every):
    """Each call is repeated once after a pause, so a limit that gives way delays a read and does not end it."""
    _, right, _ = two_nodes()
    reader = reader_of(Limited(right.node, every), Limited(right.node, every + 1))
    for _ in range(6):
        assert [each.amount_atomic for each in compared(reader).outgoing] == [100_000]
        assert reader.nonce_behind("eip155:84532", TOKEN, PAYER, TRANSFERRED) == 7


def test_the_head_is_no_block_before_the_final_one():
    """Another node may have named the final block: a payment between them is searched all the same."""
    intent = INTENTS["upto"]
    node = Logs(intent, [in_block(log(100_000), 0x1E)])
    node.head, final = 0x18, Block("0x" + "11" * 32, 0x20, NOW)
    assert find_cause(node, intent, NOW - 3600 + 2 * 0x10, final) == Settled(100_000, TX, 3, final=True)


class Headless(Logs):
    """A node that does not show the newest blocks yet, although it names the last one."""

    def call(self, method, *params):
        hidden = method == "eth_getBlockByNumber" and params[0].startswith("0x") and int(params[0], 16) > self.head - 4
        return None if hidden else super().call(method, *params)


def test_a_block_that_is_not_shown_ends_no_search():
    intent = INTENTS["upto"]
    late = NOW - 3600 + 2 * 0x20
    intent = replace(intent, valid_until=late - 1)
    to, data = call_for(intent, 100_000)
    sent = {"to": to, "input": "0x" + data.hex()}
    node = Headless(intent, [in_block(log(100_000), 0x12)], sent=sent, final_time=late)
    assert find_cause(node, intent, NOW - 3600 + 2 * 0x10, Block("0x" + "11" * 32, 0x20, late)) == Settled(
        100_000, TX, 3, final=True
    )


class Fork(Logs):
    """A node on a fork on which the payment was settled, and whose final block is before that."""

    def call(self, method, *params):
        if method == "eth_getBlockByNumber" and params[0] == "finalized":
            params = (hex(BEHIND),)
        return super().call(method, *params)


class Gone(Logs):
    """A node that keeps no logs."""

    def call(self, method, *params):
        if method == "eth_getLogs":
            raise NodeRefuses("pruned history unavailable")
        return super().call(method, *params)


class Answering(Provider):
    """Calls by JSON-RPC what the node of a test answers by methods of its own."""

    def make_request(self, method, params):
        try:
            if method == "eth_call":
                used = self.node.used_head if params[1] == "latest" else self.node.used_final
                self.asked += 1
                if self.asked - 1 in self.away:
                    raise OSError("away")
                return {"result": f"0x{int(used):064x}"}
            return super().make_request(method, params)
        except NodeRefuses as error:
            return {"error": {"code": 4444, "message": str(error)}}


def a_hold_of(intent):
    hold = a_hold(f"{intent.nonce:064x}", intent=intent, claim=Claim(Nanos(1), TX))
    return replace(hold, created_ms=(NOW - 3600) * 1000)


@pytest.mark.parametrize("ends", range(1, NODE_CALLS + 1))
@pytest.mark.parametrize("begins", range(NODE_CALLS))
def test_what_one_node_shows_is_not_final_by_the_block_of_another_one(begins, ends):
    """The first shows that the payment was cancelled; the second, on a fork, that it was settled."""
    intent = INTENTS["eip3009"]
    right = Answering(Logs(intent, [cancelled(intent)], sent=None), range(begins, begins + ends))
    fork = Answering(Fork(intent, used_final=False))
    found = reader_of(right, fork).read(a_hold_of(intent))
    assert found in {Cancelled(TX, final=True), Settled(100_000, TX, 3, final=False)}


@pytest.mark.parametrize("first", [True, False])
def test_of_two_nodes_one_that_keeps_no_logs_takes_no_ceiling(first):
    intent = INTENTS["eip3009"]
    late = {"final_time": intent.valid_until + 1, "sent": None}
    gone, whole = Answering(Gone(intent, **late)), Answering(Logs(intent, [cancelled(intent)], **late))
    reader = reader_of(*((gone, whole) if first else (whole, gone)))
    assert reader.read(a_hold_of(intent)) == Cancelled(TX, final=True)
    assert reader_of(gone).read(a_hold_of(intent)) == Used(final=True)
    away = Answering(whole.node, range(100))
    assert isinstance(reader_of(gone, away).read(a_hold_of(intent)), Unreadable), "the other one may know"
