"""Where a search of the chain begins and ends: the block of a time, and the blocks that may take a payment."""

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.chain_node import INTENTS, NOW, TOKEN, call_for, log
from tests.unit.chain.test_reader_nodes import Logs, in_block
from x402guard.chain.logs import CLOCKS_APART_S, block_at, head_of
from x402guard.chain.reader import _read
from x402guard.ledger.findings import Settled, Used


class Times:
    """A node that knows nothing but the times of its blocks."""

    def __init__(self, times):
        self.times, self.asked = times, 0

    def call(self, method, *params):
        assert method == "eth_getBlockByNumber"
        self.asked += 1
        number = len(self.times) - 1 if params[0] == "latest" else int(params[0], 16)
        return {"hash": f"0x{number:064x}", "number": hex(number), "timestamp": hex(self.times[number])}


def found(node, time_unix, low=0):
    return block_at(node, time_unix, head_of(node), low)


@given(
    gaps=st.lists(st.sampled_from([0, 1, 2, 2, 2, 12, 600, 86_400]), min_size=1, max_size=60),
    time_unix=st.integers(0, 200_000),
    low=st.integers(0, 59),
)
def test_it_is_the_last_block_that_is_not_later(gaps, time_unix, low):
    times = [sum(gaps[: at + 1]) for at in range(len(gaps))]
    low = min(low, len(times) - 1)
    node = Times(times)
    assert found(node, time_unix, low) == max(low, bisect.bisect_right(times, time_unix) - 1)


@pytest.mark.parametrize("spacing", [1, 2, 12, 13])
@pytest.mark.parametrize("ago_s", [0, 1, 59, 600, 86_399, 15_000_000])
def test_evenly_spaced_blocks_take_few_looks(spacing, ago_s):
    times = range(1_000_000, 1_000_000 + spacing * 20_000_000, spacing)
    node = Times(times)
    assert found(node, times[-1] - ago_s) == len(times) - 1 - -(-ago_s // spacing)
    assert node.asked <= 5


def test_the_looks_are_few_where_a_chain_stood_still_for_a_year():
    times = [*range(0, 2_000_000, 2), *range(33_000_000, 35_000_000, 2)]
    for time_unix in range(0, 35_000_000, 123_457):
        node = Times(times)
        assert found(node, time_unix) == bisect.bisect_right(times, time_unix) - 1
        assert node.asked <= 3 * 21 + 1


class Searched(Logs):
    """A node of blocks two seconds apart, the hold's at number 5,000, that remembers what was searched."""

    head = 9_000

    def __init__(self, intent, logs):
        super().__init__(intent, logs)
        self.sent_by = {}
        self.searched, self.shown, self.looked = [], [], []

    def call(self, method, *params):
        if method == "eth_getBlockByNumber":
            number = self.head if params[0] in ("latest", "finalized") else int(params[0], 16)
            self.looked.append(number)
            return {"hash": f"0x{number:064x}", "number": hex(number), "timestamp": hex(NOW + 2 * (number - 5_000))}
        if method == "eth_getLogs" and params[0]["address"] == TOKEN:
            self.searched.append((int(params[0]["fromBlock"], 16), int(params[0]["toBlock"], 16)))
        if method == "eth_getTransactionByHash":
            self.shown.append(params[0])
            return self.sent_by[params[0]]
        if method == "eth_getTransactionReceipt":
            number, intent = int(params[0], 16), self.intent
            return {"status": "0x1", "blockNumber": hex(number), "logs": [log(intent.amount_atomic)]}
        return super().call(method, *params)


def paid_at(intent, blocks, ours):
    """Return a node on which a payment for the same amount stands in each of the blocks, ours in one of them."""
    entries = [{**in_block(log(intent.amount_atomic), each), "transactionHash": f"0x{each:064x}"} for each in blocks]
    node = Searched(intent, entries)
    node.intent = intent
    for each in blocks:
        to, data = call_for(intent, intent.amount_atomic, **({} if each == ours else {"nonce": 8}))
        node.sent_by[f"0x{each:064x}"] = {"to": to, "input": "0x" + data.hex(), "blockNumber": hex(each)}
    return node


LIFETIME = (INTENTS["upto"].valid_until - NOW) // 2
BEFORE = CLOCKS_APART_S // 2


@pytest.mark.parametrize("kind", ["exact permit2", "upto"])
@pytest.mark.parametrize("at", [5_000 - BEFORE, 4_990, 5_000, 5_001, 5_000 + LIFETIME])
def test_a_permit_is_found_where_it_may_have_been_taken(kind, at):
    intent = INTENTS[kind]
    others = [4_600, 4_995, 5_002, 5_000 + LIFETIME + 1, 6_000]
    node = paid_at(intent, sorted({*others, at}), at)
    held_ms = NOW * 1000
    assert _read(node, intent, "", held_ms // 1000, "finalized") == Settled(
        intent.amount_atomic, f"0x{at:064x}", 3, final=True
    )
    first, last = 5_000 - BEFORE, 5_000 + LIFETIME
    assert node.searched == [(5_000, last), (first, 4_999)][: 1 if at >= 5_000 else 2]
    assert node.shown[0] == f"0x{min(each for each in {*others, at} if each >= 5_000):064x}", "the nearest first"
    assert (first in node.looked) is (at < 5_000), "the first block is looked for where it is needed"


@pytest.mark.parametrize("kind", ["exact permit2", "upto"])
@pytest.mark.parametrize("at", [4_999 - BEFORE, 5_001 + LIFETIME])
def test_no_block_outside_its_time_is_searched_for_a_permit(kind, at):
    intent = INTENTS[kind]
    node = paid_at(intent, [at], at)
    assert _read(node, intent, "", NOW, "finalized") == Used(final=True)
    assert node.shown == []


def test_a_payee_that_was_paid_a_thousand_times_is_not_read_whole():
    intent = INTENTS["upto"]
    node = paid_at(intent, [5_001] * 1_000, 0)
    assert _read(node, intent, "", NOW, "finalized") == Used(final=True)
    assert len(node.shown) == 100
