"""Nodes as hosted endpoints have them: pruned, without EIP-1898, without final blocks or logs, with odd receipts."""

import pytest

from tests.support.chain_node import INTENTS, NOW, TX, Rpc, in_a_block, log
from tests.unit.chain.test_several_nodes import a_hold_of
from x402guard.chain.capabilities import FINAL_BLOCK, LOGS, OLD_STATE, STATE_BY_HASH, missing
from x402guard.chain.reader import RpcChainReader, _read
from x402guard.chain.rpc import NodeRefuses, PaymentUnreadable
from x402guard.ledger.findings import Settled, Unused, Used

DEAD = INTENTS["upto"].valid_until + 1


def hash_of(number):
    return f"0x{number:064x}"


class Chain(Rpc):
    """A chain of 4,096 blocks, two seconds each, of which the last but 64 is final.

    ``keeps`` is for how many blocks the node has state, ``by_hash`` whether it knows EIP-1898; ``used_from`` is the block
    that has used the nonce.
    """

    head, behind, keeps, by_hash, has_final, has_logs, used_from = 4_096, 64, 128, True, True, True, None
    undone = fork = False
    newest = head
    """The block that the node takes for its newest one when it is asked for state: an older one where replicas differ."""

    def __init__(self, intent, amount=None, **changes):
        receipt, self.ended = changes.pop("receipt", {}), changes.pop("ended", NOW)
        super().__init__(intent, amount, **changes)
        block = {"blockNumber": hex(self.used_from or 1), "blockHash": hash_of(self.used_from or 1)}
        self.receipt = {**self.receipt, **block, "transactionHash": TX, **receipt}

    def block(self, number):
        return {"hash": hash_of(number), "number": hex(number), "timestamp": hex(self.ended - 2 * (self.head - number))}

    def view(self, contract, name, types, values, block):
        if isinstance(block, dict):
            if not self.by_hash:
                raise NodeRefuses("invalid argument 1: hex string expected")
            block = block["blockHash"]
        number = self.newest if block == "latest" else int(block, 16)
        if block != "latest" and number <= self.head - self.keeps:
            raise NodeRefuses("missing trie node")
        used = self.used_from is not None and number >= self.used_from
        return int(used) if name == "authorizationState" else int(used) << 7

    def call(self, method, *params):
        if method == "eth_getBlockByNumber":
            if params[0] == "finalized" and not self.has_final:
                raise NodeRefuses("finalized block not found")
            tags = {"latest": self.head, "finalized": self.head - self.behind}
            number = tags.get(params[0]) or int(params[0], 16)
            found = self.block(number)
            if self.fork and params[0] == hex(self.head - self.behind):
                return {**found, "hash": "0x" + "ee" * 32}
            if self.undone and params[0] == hex(self.head):
                return {**found, "hash": "0x" + "ee" * 32}
            return found
        if method == "eth_call":
            return "0x" if self.view("", "authorizationState", [], [], params[1]) in (0, 1) else ""
        if method == "eth_getLogs":
            if not self.has_logs:
                raise NodeRefuses("the method eth_getLogs does not exist")
            first, last = int(params[0]["fromBlock"], 16), int(params[0]["toBlock"], 16)
            return [each for each in self.logs if first <= int(each["blockNumber"], 16) <= last]
        return super().call(method, *params)

    logs = ()


PRUNED = {"keeps": 32}
NODES = {"pruned": PRUNED, "no EIP-1898": {"by_hash": False}, "both": {"keeps": 32, "by_hash": False}}


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("kind", INTENTS)
def test_an_unused_nonce_is_freed_after_its_deadline(node, kind):
    found = _read(Chain(INTENTS[kind], ended=DEAD + 200, **NODES[node]), INTENTS[kind], "")
    assert isinstance(found, Unused)
    assert found.block_time >= DEAD


@pytest.mark.parametrize("node", NODES)
def test_before_its_deadline_it_is_not(node):
    found = _read(Chain(INTENTS["upto"], ended=DEAD, **NODES[node]), INTENTS["upto"], "")
    assert isinstance(found, Unused)
    assert found.block_time < INTENTS["upto"].valid_until


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("odd", [{"fork": True}, {"undone": True}], ids=str)
def test_a_newest_block_that_does_not_follow_the_final_one_frees_nothing(node, odd):
    if "undone" in odd and node == "pruned":
        odd = {**odd, "by_hash": False}
    with pytest.raises(PaymentUnreadable, match="newest block"):
        _read(Chain(INTENTS["upto"], ended=DEAD + 200, **NODES[node], **odd), INTENTS["upto"], "")


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("kind", INTENTS)
def test_a_payment_is_proven_by_its_receipt_and_its_block(node, kind):
    intent = INTENTS[kind]
    found = _read(Chain(intent, used_from=4_000, **NODES[node]), intent, TX)
    assert found == Settled(intent.amount_atomic, TX, 3, final=True)


@pytest.mark.parametrize(
    ("changes", "final"),
    [({"used_from": 4_090}, False), ({"used_from": 4_000, "receipt": {"blockHash": "0x" + "ee" * 32}}, False)],
    ids=["after the final block", "of another block of that number"],
)
def test_one_that_is_not_in_the_nodes_own_final_blocks_is_not_final(changes, final):
    found = _read(Chain(INTENTS["upto"], 1, **PRUNED, **changes), INTENTS["upto"], TX)
    assert found == Settled(1, TX, 3, final=final)


def test_a_nonce_that_is_used_by_something_unknown_counts_and_is_never_final_there():
    found = _read(Chain(INTENTS["upto"], used_from=4_000, ended=DEAD + 200, **PRUNED, sent=None), INTENTS["upto"], "")
    assert found == Used(final=False)


@pytest.mark.parametrize("kind", INTENTS)
def test_a_node_that_lags_behind_its_own_final_block_frees_nothing(kind):
    """The state of its final block is pruned, and another replica answers: what is not known is not unused."""
    lagging = Chain(INTENTS[kind], used_from=4_050, keeps=20, behind=30, newest=4_040, ended=DEAD + 200)
    assert _read(lagging, INTENTS[kind], "") == Used(final=False)


def test_a_node_without_logs_takes_a_payment_whose_transaction_is_named():
    intent = INTENTS["upto"]
    assert _read(Chain(intent, 5, used_from=4_000, has_logs=False), intent, TX) == Settled(5, TX, 3, final=True)


@pytest.mark.parametrize("status", [True, 1, "0x1"])
def test_a_status_is_read_however_it_is_written(status):
    found = _read(Chain(INTENTS["upto"], 5, used_from=4_000, receipt={"status": status}), INTENTS["upto"], TX)
    assert found == Settled(5, TX, 3, final=True)


@pytest.mark.parametrize("status", [False, 0, "0x0"])
def test_a_transaction_that_failed_settles_nothing(status):
    found = _read(Chain(INTENTS["upto"], 5, used_from=4_000, receipt={"status": status}), INTENTS["upto"], TX)
    assert isinstance(found, Used)


def test_a_log_is_named_by_its_number_in_the_block_where_a_receipt_counts_from_zero():
    """So the Transfer that `reconcile` finds in the logs is the one that is proven."""
    intent = INTENTS["exact permit2"]
    mine = log(intent.amount_atomic, index=0)
    in_logs = in_a_block(log(intent.amount_atomic, index=57), 4_000)
    receipt = {"logs": [mine], "transactionIndex": "0x9"}
    found = _read(Chain(intent, used_from=4_000, receipt=receipt, logs=[in_logs]), intent, TX)
    assert found == Settled(intent.amount_atomic, TX, 57, final=True)
    found = _read(Chain(intent, used_from=4_000, receipt=receipt, has_logs=False), intent, TX)
    assert found == Settled(intent.amount_atomic, TX, 0, final=True)
    first = {**receipt, "transactionIndex": "0x0"}  # the first transaction of its block
    assert _read(Chain(intent, used_from=4_000, receipt=first), intent, TX).log_index == 0


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"keeps": 5_000}, []),
        ({"keeps": 32}, [OLD_STATE]),
        ({"by_hash": False}, [STATE_BY_HASH]),
        ({"keeps": 5_000, "has_final": False}, [FINAL_BLOCK]),
        ({"keeps": 5_000, "has_logs": False}, [LOGS]),
        ({"keeps": 32, "has_final": False, "has_logs": False}, [FINAL_BLOCK, LOGS]),
    ],
    ids=str,
)
def test_what_a_node_lacks_is_named(changes, lacks):
    assert list(missing(Chain(INTENTS["upto"], **changes), "finalized")) == lacks


def test_a_number_of_blocks_stands_for_final_ones():
    assert list(missing(Chain(INTENTS["upto"], has_final=False), 10)) == []


def test_the_first_look_at_a_payment_logs_what_its_node_lacks_once(caplog):
    class Reader(RpcChainReader):
        def rpc_of(self, node):
            self._rpcs[INTENTS["upto"].network], self._finality[INTENTS["upto"].network] = node, "finalized"
            return self

    for keeps in (5_000, 32):
        caplog.clear()
        reader = Reader({}).rpc_of(Chain(INTENTS["upto"], keeps=keeps, has_logs=keeps > 32))
        for _ in range(3):
            assert isinstance(reader.read(a_hold_of(INTENTS["upto"])), Unused)
        said = [record.getMessage() for record in caplog.records]
        assert [lack for lack in (OLD_STATE, LOGS) if any(lack in each for each in said)] == (
            [] if keeps > 32 else [OLD_STATE, LOGS]
        )
        assert len(said) == (0 if keeps > 32 else 2)
