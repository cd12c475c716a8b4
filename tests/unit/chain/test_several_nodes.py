"""Several endpoints of one network: one answers all that belongs together, or the next one does."""

from itertools import permutations
from types import SimpleNamespace

import pytest

from tests.support.chain_node import INTENTS, NOW, OTHER, TOKEN, TX, call_for, log, topic
from tests.support.ledger import PAYEE, PAYER, a_hold
from tests.unit.chain.test_reader_nodes import USED as AUTHORIZATION_USED
from tests.unit.chain.test_reader_nodes import Logs, cancelled, in_block
from x402guard.chain.logs import Block, find_cause
from x402guard.chain.reader import RpcChainReader
from x402guard.chain.rpc import JsonRpc, NodeRefuses
from x402guard.flow.ports import OutgoingTransfer
from x402guard.frozen import replace
from x402guard.kernel.rows import Claim, Nanos
from x402guard.ledger.findings import Cancelled, Settled, Unreadable, Unused, Used


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
        "topics": [AUTHORIZATION_USED, topic(PAYER), f"0x{intent.nonce:064x}"],
        "data": "0x",
        "logIndex": "0x1",
    }
    shown = [in_block(log(100_000), 0x10), in_block(used, 0x10)]
    sent = {"to": OTHER, "input": "0x", "blockNumber": "0x10"}
    right = Provider(Logs(intent, shown, sent=sent, final_time=NOW - 3600 + 2 * 0x20), away)
    behind = Provider(Logs(intent, sent=None, final_time=NOW - 3600 + 2 * BEHIND))
    behind.node.head = BEHIND
    return reader_of(right, behind), right, behind


def reader_of(*providers, now=NOW):
    nodes = [SimpleNamespace(provider=each) for each in providers]
    rpc = JsonRpc("eip155:84532", nodes, pause=lambda _seconds: None)
    return RpcChainReader.over(
        {"eip155:84532": rpc}, {"eip155:84532": "finalized"}, monotonic_s=lambda: 0.0, wall_s=lambda: now
    )


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


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_each_of_three_is_asked_before_it_is_given_up(order):
    _, right, _ = two_nodes()
    poor = [NoLogs(right.node), NoLogs(right.node), right]
    assert [each.amount_atomic for each in compared(reader_of(*(poor[at] for at in order))).outgoing] == [100_000]


@pytest.mark.parametrize("first", [True, False])
def test_a_transfer_that_one_node_hides_is_shown_by_the_other_one(first):
    _, right, behind = two_nodes()
    hides = Provider(Logs(INTENTS["eip3009"], sent=None, final_time=NOW - 3600 + 2 * 0x20))
    for poor in (hides, behind):
        reader = reader_of(*((poor, right) if first else (right, poor)))
        shown = [each.amount_atomic for each in compared(reader).outgoing]
        assert shown == [100_000] or (poor is behind and compared(reader).upto == BEHIND)
    assert compared(reader_of(hides)).outgoing == ()  # alone, it is believed: what-can-still-pass.md


def test_a_node_that_is_far_ahead_moves_no_mark_behind_which_nothing_is_compared():
    _, right, _ = two_nodes()
    ahead = Provider(Logs(INTENTS["eip3009"], sent=None, final_time=NOW))
    ahead.node.head = 300_000
    for nodes in ((ahead, right), (right, ahead)):
        found = compared(reader_of(*nodes))
        assert ([each.amount_atomic for each in found.outgoing], found.upto) == ([100_000], 0x20)
    assert compared(reader_of(ahead)).upto == 300_000  # alone, it is believed
    again = reader_of(right).transfers("eip155:84532", TOKEN, PAYER, after=300_000, since_unix=NOW - 3600)
    assert "300000 blocks are compared, and the last final one is 32" in again.reason


def test_an_endpoint_that_has_stopped_hides_no_theft_that_another_one_shows():
    _, right, _ = two_nodes()
    stopped = Provider(Logs(INTENTS["eip3009"], sent=None, final_time=NOW - 7 * 86_400))
    right.node.head, stopped.node.head = 0x2000, 0x08
    for nodes in ((right, stopped), (right, stopped, stopped)):
        found = compared(reader_of(*nodes))
        assert ([each.amount_atomic for each in found.outgoing], found.upto) == ([100_000], 0x2000)


def test_a_ledger_that_is_younger_than_the_final_block_is_compared():
    """Finality of fifteen minutes, on a network with four blocks a second, and the first comparison of a new ledger."""
    _, right, _ = two_nodes()
    right.node.head = 0x20
    young = reader_of(right).transfers("eip155:84532", TOKEN, PAYER, after=None, since_unix=NOW + 100_000)
    assert not isinstance(young, Unreadable)


def test_an_endpoint_that_is_led_away_leaves_its_place_to_the_other_one():
    """The payments of the network are read on. One that never served this network is a mistake of the owner's."""
    intent = INTENTS["exact permit2"]
    alive = intent.valid_until - 100
    first, other = (Stated(used=False, time=alive) for _ in range(2))
    reader = reader_of(first, other)
    assert reader.read(a_hold_of(intent)) == Unused(alive)
    first.chain, first.time = 8453, intent.valid_until + 10
    for _ in range(3):
        assert reader.read(a_hold_of(intent)) == Unused(alive)
    other.chain = 8453
    other.time = first.time
    assert "serves chain 8453" in reader.read(a_hold_of(intent)).reason
    wrong = reader_of(Stated(used=False, time=alive, chain=8453), Stated(used=False, time=alive))
    assert "serves chain 8453" in wrong.read(a_hold_of(intent)).reason


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
    contradicted = isinstance(found, Unreadable) and found.alone  # a cancellation frees nothing against a settlement
    assert contradicted or found == Settled(100_000, TX, 3, final=False)


class Stated(Provider):
    """A node that states whether a nonce is used, as of a final block; asked for more, it is away."""

    def __init__(self, *, used, time, chain=84532):
        super().__init__(None)
        self.used, self.time, self.chain = used, time, chain

    def make_request(self, method, params):
        if method == "eth_chainId":
            return {"result": hex(self.chain)}
        if method == "eth_call":
            self.asked += 1
            return {"result": f"0x{(2**256 - 1 if self.used else 0):064x}"}
        if method == "eth_getBlockByNumber":
            return {"result": {"hash": "0x" + "aa" * 32, "number": "0x20", "timestamp": hex(self.time)}}
        raise OSError("away")


@pytest.mark.parametrize("kind", ["eip3009", "exact permit2"])
@pytest.mark.parametrize(
    ("other", "frees"),
    [
        (lambda after: Stated(used=True, time=after), False),
        (lambda after: Stated(used=False, time=after), True),
        (lambda after: Stated(used=False, time=after - 500), True),  # it is behind, and says nothing
        (lambda after: Provider(None, range(100)), True),  # it is away
    ],
    ids=["contradicts", "agrees", "is behind", "is away"],
)
def test_a_nonce_that_one_node_calls_unused_frees_nothing_if_another_one_has_seen_it_used(kind, other, frees):
    intent = INTENTS[kind]
    after = intent.valid_until + 1
    found = reader_of(Stated(used=False, time=after), other(after)).read(a_hold_of(intent))
    assert found == Unused(after) if frees else isinstance(found, Unreadable) and found.alone
    alive = reader_of(Stated(used=False, time=after - 100), other(after))
    assert alive.read(a_hold_of(intent)) == Unused(after - 100)  # this one frees nothing, and costs no further question


def test_an_endpoint_that_is_led_to_another_chain_frees_nothing():
    intent = INTENTS["exact permit2"]
    node = Stated(used=True, time=intent.valid_until - 10)
    reader = reader_of(node)
    reader.read(a_hold_of(intent))
    node.used, node.time, node.chain = False, intent.valid_until + 10, 8453  # Permit2 has this address on each chain
    for found in (
        reader.read(a_hold_of(intent)),
        reader.transfers("eip155:84532", TOKEN, PAYER, after=0x20, since_unix=0),
    ):
        assert isinstance(found, Unreadable)
        assert "serves chain 8453" in found.reason


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_cancellation_that_only_one_node_shows_frees_nothing(late, first):
    """The other one shows the nonce used and no reason: the payment may have been taken inside a seller's contract."""
    intent = INTENTS["eip3009"]
    at = {"final_time": intent.valid_until + (1 if late else -100), "sent": None}
    liar, honest = Answering(Logs(intent, [cancelled(intent)], **at)), Answering(Logs(intent, **at))
    found = reader_of(*((liar, honest) if first else (honest, liar))).read(a_hold_of(intent))
    assert isinstance(found, Unreadable) or found == Used(final=True)
    assert reader_of(liar).read(a_hold_of(intent)) == Cancelled(TX, final=True)  # alone, it is believed


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


class Silent(Answering):
    """A node that cannot be reached."""

    def __init__(self):
        super().__init__(Logs(INTENTS["eip3009"]), range(10_000))


class Nonsense(Answering):
    """A node whose blocks have no fields."""

    def make_request(self, method, params):
        return {"result": {}} if method == "eth_getBlockByNumber" else super().make_request(method, params)


def nodes_of_an_ended_payment():
    """Return a node of each kind for a payment that was cancelled, past its deadline."""
    intent = INTENTS["eip3009"]
    late = {"final_time": intent.valid_until + 1, "sent": None}
    return {
        "whole": Answering(Logs(intent, [cancelled(intent)], **late)),
        "gone": Answering(Gone(intent, **late)),
        "silent": Silent(),
        "nonsense": Nonsense(Logs(intent, **late)),
    }


@pytest.mark.parametrize(
    "kinds", [each for count in (1, 2, 3) for each in permutations(("whole", "gone", "silent", "nonsense"), count)]
)
def test_in_whatever_order_the_nodes_are_asked_the_finding_is_the_same(kinds):
    nodes = nodes_of_an_ended_payment()
    reader, hold = reader_of(*(nodes[kind] for kind in kinds)), a_hold_of(INTENTS["eip3009"])
    for _ in range(2):
        found = reader.read(hold)
        if "whole" in kinds:
            assert found == Cancelled(TX, final=True)
        elif set(kinds) == {"gone"}:
            assert found == Used(final=True)
        else:
            assert isinstance(found, Unreadable), "a node that was not reached may know"
            assert found.alone is (set(kinds) != {"silent"}), "another payment may be read at the others"


def test_a_payment_that_one_node_does_not_see_yet_keeps_no_other_from_being_read_while_another_node_is_away():
    intent = INTENTS["eip3009"]
    blind = Answering(Logs(intent, sent=None))
    for nodes in ((blind, Silent()), (Silent(), blind)):
        found = reader_of(*nodes).read(a_hold_of(intent))
        assert isinstance(found, Unreadable)
        assert found.alone


def test_a_node_is_never_its_own_witness_whatever_other_threads_ask():
    intent = INTENTS["exact permit2"]
    after = intent.valid_until + 1
    liar, honest = Stated(used=False, time=after), Stated(used=True, time=after)
    reader = reader_of(liar, honest)
    rpc, asked = reader._rpcs["eip155:84532"], liar.make_request

    def meanwhile(method, params):
        rpc._first = 1  # another thread was answered by the other node
        return asked(method, params)

    liar.make_request = meanwhile
    assert isinstance(reader.read(a_hold_of(intent)), Unreadable)
