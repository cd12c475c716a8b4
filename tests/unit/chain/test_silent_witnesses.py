"""A witness that keeps a payment waiting is left out for a minute, for what it was slow to answer, and for no more."""

from types import SimpleNamespace

import pytest

from tests.support.chain_node import INTENTS, TOKEN, topic
from tests.support.ledger import PAYEE, PAYER
from tests.unit.chain.test_several_nodes import Stated, a_hold_of, reader_of
from x402guard.chain import rpc
from x402guard.chain.logs import CANCELED, TRANSFER, USED
from x402guard.chain.rpc import ChainUnreadable
from x402guard.ledger.evidence import Unreadable, Unused

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
    witness = Slow(clock, question, error=error, takes_s=0.2)
    reader = on_a_dead_fork(witness)
    assert reader.read(a_hold_of(INTENT)) == Unused(AFTER), "the only one that answers is believed"
    witness.questions = ()
    assert isinstance(reader.read(a_hold_of(INTENT)), Unreadable)


def test_a_short_time_limit_counts_as_slow(clock):
    """A limit of less than a second is reached before the second is."""
    witness = Slow(clock, "all", takes_s=0.2)
    client = on_a_dead_fork(witness)._rpcs["eip155:84532"]
    client._timeout_s = 0.2
    for _ in range(3):
        with pytest.raises(ChainUnreadable):
            client.ask_once(1, "eth_chainId", ())
    assert witness.waited == ["eth_chainId"]


def test_a_search_of_the_whole_wallet_keeps_no_search_of_a_payment_from_a_witness(clock):
    """The wallet has so many transfers that the node gives up; those to one payee, or the use of one nonce, are few."""
    witness = Slow(clock)
    client = on_a_dead_fork(witness)._rpcs["eip155:84532"]
    client.ask_once(1, "eth_chainId", ())

    def search(*topics):
        client.ask_once(1, "eth_getLogs", ({"address": TOKEN, "topics": topics, "fromBlock": "0x1", "toBlock": "0x2"},))

    def waits_for(*topics):
        before = len(witness.waited)
        with pytest.raises(ChainUnreadable):
            search(*topics)
        return len(witness.waited) > before

    witness.questions = ("eth_getLogs",)
    assert waits_for(TRANSFER, topic(PAYER))
    assert not waits_for(TRANSFER, topic(PAYER)), "the same is not waited for again"
    assert waits_for(TRANSFER, topic(PAYER), topic(PAYEE))
    assert waits_for([USED, CANCELED], topic(PAYER), f"0x{7:064x}")
    assert not waits_for([USED, CANCELED], topic(PAYER), f"0x{8:064x}"), "another payment is not waited for either"


def test_a_witness_is_never_asked_first(clock):
    away, behind = Slow(clock, "all"), Stated(used=False, time=AFTER - 5_000)
    reader = on_a_dead_fork(away, behind)
    for _ in range(5):
        assert reader.read(a_hold_of(INTENT)) == Unused(AFTER)
    assert (len(away.waited), behind.asked, reader._rpcs["eip155:84532"]._first) == (1, 5, 0)
