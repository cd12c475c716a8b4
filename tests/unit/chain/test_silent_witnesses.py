"""A witness that keeps a payment waiting is left out for a minute, for what it was slow to answer, and for no more."""

from types import SimpleNamespace

import pytest

from tests.support.chain_node import INTENTS, OTHER, TOKEN, topic
from tests.support.ledger import PAYEE, PAYER
from tests.unit.chain.test_several_nodes import Stated, a_hold_of, reader_of
from x402guard.chain import rpc
from x402guard.chain.logs import CANCELED, TRANSFER, USED
from x402guard.chain.rpc import ChainUnreadable
from x402guard.kernel.typed_data import PERMIT2
from x402guard.ledger.findings import Unreadable, Unused

INTENT = INTENTS["exact permit2"]
AFTER = INTENT.valid_until + 1
RATE_LIMIT = {"error": {"code": 429, "message": "too many requests"}}


@pytest.fixture
def clock(monkeypatch):
    """Return the clock of the library's calls, which only a slow node moves."""
    now = SimpleNamespace(s=1_000.0)
    monkeypatch.setattr(rpc, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


class Slow(Stated):
    """A node that knows that the nonce is used, and lets each of some questions wait until it is given up."""

    def __init__(self, clock, *questions, error=TimeoutError, takes_s=5.0):
        super().__init__(used=True, time=AFTER)
        self.clock, self.questions, self.error, self.takes_s, self.waited = clock, questions, error, takes_s, []

    def make_request(self, method, params):
        named = {method, "state of a block" if _names_block(params) else method}
        if named & {*self.questions} or "all" in self.questions:
            self.clock.s += self.takes_s
            self.waited.append(method)
            if isinstance(self.error, dict):
                return self.error
            raise self.error
        return super().make_request(method, params)


def _names_block(params):
    return bool(params) and isinstance(params[-1], dict) and "blockHash" in params[-1]


def on_a_dead_fork(*witnesses):
    """Return a reader whose first node shows the payment unused after its deadline."""
    return reader_of(Stated(used=False, time=AFTER), *witnesses)


@pytest.mark.parametrize(
    "question",
    [
        "eth_getLogs",
        "eth_getTransactionByHash",
        "eth_getTransactionReceipt",
        "eth_getBlockByNumber",
        "state of a block",
    ],
)
def test_a_witness_that_does_not_answer_one_question_is_asked_the_others_again(clock, question):
    """Else the second payment would be freed."""
    reader = on_a_dead_fork(Slow(clock, question))
    for _ in range(3):
        assert isinstance(reader.read(a_hold_of(INTENT)), Unreadable)


def test_a_dead_witness_is_waited_for_once_by_all_reads(clock):
    dead = Slow(clock, "all")
    reader = on_a_dead_fork(dead)
    for _ in range(4):
        assert reader.read(a_hold_of(INTENT)) == Unused(AFTER)
    assert dead.waited == ["eth_chainId"]
    clock.s += 60
    reader.read(a_hold_of(INTENT))
    assert dead.waited == ["eth_chainId"] * 2, "it is asked again after a minute"


@pytest.mark.parametrize("error", [RATE_LIMIT, OSError("refused")], ids=["rate limit", "refused"])
@pytest.mark.parametrize("question", ["eth_chainId", "eth_call"])
def test_a_witness_that_fails_at_once_is_asked_about_the_next_payment(clock, question, error):
    """One rate-limited answer would else leave it out for a minute, and a payment be freed that it shows used."""
    witness = Slow(clock, question, error=error, takes_s=0.4)
    reader = on_a_dead_fork(witness)
    assert reader.read(a_hold_of(INTENT)) == Unused(AFTER), "the only one that answers is believed"
    witness.questions = ()
    assert isinstance(reader.read(a_hold_of(INTENT)), Unreadable)


def test_a_last_look_that_is_lost_leaves_no_witness_out(clock):
    """It has just said that the nonce is used; only which chain it serves now was not answered."""
    witness = Slow(clock, "eth_chainId")
    witness.questions = ()
    reader, asked = on_a_dead_fork(witness), []

    def second_is_lost(method, params):
        asked.append(method)
        witness.questions = ("eth_chainId",) if asked.count("eth_chainId") == 2 else ()
        return Slow.make_request(witness, method, params)

    witness.make_request = second_is_lost
    assert all(isinstance(reader.read(a_hold_of(INTENT)), Unreadable) for _ in range(4))
    assert witness.waited == ["eth_chainId"]


def test_what_one_thread_waits_for_leaves_no_witness_out_while_another_looks_which_chain_it_serves(clock):
    witness = Slow(clock, "eth_getLogs")
    client = on_a_dead_fork(witness)._rpcs["eip155:84532"]
    client.ask_once(1, "eth_chainId", ())

    def looks(method, params):
        client._right.discard(1)  # as a look of the other thread begins
        return Slow.make_request(witness, method, params)

    witness.make_request = looks
    with pytest.raises(ChainUnreadable):
        client.ask_once(1, "eth_getLogs", (searched(TOKEN, TRANSFER, topic(PAYER)),))
    witness.make_request = lambda method, params: Slow.make_request(witness, method, params)
    assert client.ask_once(1, "eth_call", called(PERMIT2, "latest"))


@pytest.mark.parametrize(
    ("takes_s", "timeout_s", "asked"), [(0.49, 5.0, 3), (0.51, 5.0, 1), (0.2, 0.2, 1), (0.09, 0.2, 3)]
)
def test_slow_is_half_a_second_or_half_of_a_short_time_limit(clock, takes_s, timeout_s, asked):
    witness = Slow(clock, "all", takes_s=takes_s)
    client = on_a_dead_fork(witness)._rpcs["eip155:84532"]
    client._timeout_s = timeout_s
    for _ in range(3):
        with pytest.raises(ChainUnreadable):
            client.ask_once(1, "eth_blockNumber", ())
    assert len(witness.waited) == asked


@pytest.mark.parametrize(
    ("takes_s", "timeout_s", "left_out_s"),
    [(5.0, 5.0, 60.0), (12.0, 5.0, 120.0), (3_600.0, 5.0, 150.0), (30.0, 30.0, 300.0), (180.0, 60.0, 600.0)],
)
def test_what_takes_long_is_asked_again_after_a_minute_or_ten_times_as_long(clock, takes_s, timeout_s, left_out_s):
    """Else three questions that take half a minute each would be waited for by each payment.

    A process that is stopped for an hour has waited no longer than its time limits allow.
    """
    witness = Slow(clock, "all", takes_s=takes_s)
    client = on_a_dead_fork(witness)._rpcs["eip155:84532"]
    client._timeout_s = timeout_s

    def asked_again():
        before = len(witness.waited)
        with pytest.raises(ChainUnreadable):
            client.ask_once(1, "eth_blockNumber", ())
        return len(witness.waited) > before

    assert asked_again()
    clock.s += left_out_s - 0.1
    assert not asked_again()
    clock.s += 0.1
    assert asked_again()


def searched(contract, *topics):
    return {"address": contract, "topics": [*topics], "fromBlock": "0x1", "toBlock": "0x2"}


def called(contract, block):
    return {"to": contract, "data": "0x"}, block


KINDS = {
    "the wallet": ("eth_getLogs", (searched(TOKEN, TRANSFER, topic(PAYER)),)),
    "the wallet, of another token": ("eth_getLogs", (searched(OTHER, TRANSFER, topic(PAYER)),)),
    "a payment by Permit2": ("eth_getLogs", (searched(TOKEN, TRANSFER, topic(PAYER), topic(PAYEE)),)),
    "a payment by EIP-3009": ("eth_getLogs", (searched(TOKEN, [USED, CANCELED], topic(PAYER), f"0x{7:064x}"),)),
    "the state now": ("eth_call", called(TOKEN, "latest")),
    "the state now, of another token": ("eth_call", called(OTHER, "latest")),
    "the state at a final block": ("eth_call", called(TOKEN, {"blockHash": "0x" + "aa" * 32})),
    "old state": ("eth_call", called(TOKEN, "0x7")),
    "which chain": ("eth_chainId", ()),
    "a transaction": ("eth_getTransactionByHash", ("0x" + "11" * 32,)),
    "a receipt": ("eth_getTransactionReceipt", ("0x" + "11" * 32,)),
    "a block": ("eth_getBlockByNumber", ("latest", False)),
}


@pytest.mark.parametrize("slow", KINDS)
def test_a_question_that_is_slow_keeps_no_other_kind_from_a_witness(clock, slow):
    """Old state, or the wallet's many transfers, may take long; whether a nonce is used now decides over money."""
    witness = Slow(clock)
    client = on_a_dead_fork(witness)._rpcs["eip155:84532"]
    client.ask_once(1, "eth_chainId", ())
    witness.questions = ("all",)

    def is_asked(kind):
        before = len(witness.waited)
        with pytest.raises(ChainUnreadable):
            client.ask_once(1, *KINDS[kind])
        return len(witness.waited) > before

    assert is_asked(slow)
    assert not is_asked(slow)
    assert all(is_asked(kind) for kind in KINDS if kind != slow)


@pytest.mark.parametrize("nonce", [7, 8])
def test_a_search_for_another_payment_is_of_the_same_kind(clock, nonce):
    witness = Slow(clock)
    client = on_a_dead_fork(witness)._rpcs["eip155:84532"]
    client.ask_once(1, "eth_chainId", ())
    witness.questions = ("all",)
    for each in (7, nonce):
        with pytest.raises(ChainUnreadable):
            client.ask_once(1, "eth_getLogs", (searched(TOKEN, [USED, CANCELED], topic(PAYER), f"0x{each:064x}"),))
    assert witness.waited == ["eth_getLogs"]


def test_a_witness_is_never_asked_first(clock):
    away, behind = Slow(clock, "all"), Stated(used=False, time=AFTER - 5_000)
    reader = on_a_dead_fork(away, behind)
    for _ in range(5):
        assert reader.read(a_hold_of(INTENT)) == Unused(AFTER)
    assert (len(away.waited), behind.asked, reader._rpcs["eip155:84532"]._first) == (1, 5, 0)
