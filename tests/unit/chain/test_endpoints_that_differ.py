"""Two endpoints of one network, of which one lies, has stopped or hides: each pair of what they show, in both orders."""

from itertools import permutations, product

import pytest

from tests.support.chain_node import INTENTS, NOW, OTHER, TOKEN, log
from tests.support.ledger import PAYER
from tests.unit.chain.test_reader_nodes import Logs, cancelled, in_block
from tests.unit.chain.test_several_nodes import Answering, Provider, Stated, a_hold_of, reader_of
from x402guard.ledger.findings import Cancelled, Settled, Unreadable, Unused, Used

CEILING = 100_000
ALIVE = NOW - 1_000
HOUR = 3_600


class Bits(Answering):
    """Permit2 keeps a word of bits; all of them are set here."""

    def __init__(self, node, kind):
        super().__init__(node)
        self.head_time = None
        self.all_set = "0x" + "f" * 64 if kind == "upto" else f"0x{1:064x}"

    def make_request(self, method, params):
        answer = super().make_request(method, params)
        if self.head_time is not None and (method, params[:1]) == ("eth_getBlockByNumber", ["latest"]):
            return {"result": {**answer["result"], "timestamp": hex(self.head_time)}}
        return {"result": self.all_set} if method == "eth_call" and int(answer["result"], 16) else answer


def shows(what, kind, time=ALIVE):
    """Return an endpoint that shows a payment unused, dead, taken up to an amount, cancelled, or used by nothing."""
    intent = INTENTS[kind]
    node = {
        "unused": lambda: Logs(intent, sent=None, used_final=False, used_head=False),
        "dead": lambda: Logs(intent, sent=None, used_final=False, used_head=False),
        "cancelled": lambda: Logs(intent, [cancelled(intent)], sent=None),
        "no logs": lambda: Logs(intent, sent=None, receipt=None),
    }.get(what, lambda: Logs(intent, [in_block(log(int(what)), 0x18)], amount=int(what)))()
    node.final_time = intent.valid_until + 10 if what in ("dead", "no logs") else time
    return Bits(node, kind)


def takes(what):
    """Return what a payment may take, if what an endpoint shows is true."""
    return {"unused": CEILING, "dead": 0, "cancelled": 0}.get(what) if not what.isdigit() else int(what)


def counts(found, intent):
    """Return what a live hold counts after a finding."""
    match found:
        case Settled(amount, final=True):
            return amount
        case Cancelled(final=True):
            return 0
        case Unused(time) if intent.dead_at(time):
            return 0
        case _:
            return CEILING


VIEWS = {"upto": ("unused", "dead", "1", "50000", "100000"), "eip3009": ("unused", "dead", "cancelled", "100000")}
# A signature that an endpoint calls dead is dead once the ledger's own clock says so as well: tests/unit/ledger.
PAIRS = [(kind, *pair) for kind, views in VIEWS.items() for pair in product(views, views) if pair != ("unused", "dead")]


@pytest.mark.parametrize("order", [1, -1], ids=["truth first", "lie first"])
@pytest.mark.parametrize(("kind", "truth", "lie"), PAIRS)
def test_one_that_lies_frees_nothing_that_another_one_shows_may_be_taken(kind, truth, lie, order):
    intent = INTENTS[kind]
    nodes = (shows(truth, kind), shows(lie, kind))[::order]
    found = reader_of(*nodes).read(a_hold_of(intent))
    assert counts(found, intent) >= takes(truth), found


@pytest.mark.parametrize("kind", VIEWS)
def test_time_that_an_endpoint_invents_calls_no_other_one_behind(kind):
    """It shows a cancellation, or a small amount, in a final block of tomorrow."""
    intent = INTENTS[kind]
    lie = shows("1" if kind == "upto" else "cancelled", kind, NOW + 24 * HOUR)
    lie.node.head = 10**6
    found = reader_of(lie, shows("unused", kind)).read(a_hold_of(intent))
    assert isinstance(found, Unreadable)
    assert found.alone


@pytest.mark.parametrize(("kind", "what"), [(kind, what) for kind, views in VIEWS.items() for what in views])
def test_one_that_has_stopped_or_is_away_or_hides_changes_nothing_in_either_order(kind, what):
    intent = INTENTS[kind]
    alone = reader_of(shows(what, kind)).read(a_hold_of(intent))
    stopped, away = shows("unused", kind, ALIVE - 3 * HOUR), Provider(None, range(100))
    poor = (stopped, away) if what in ("dead", "cancelled", "unused") else (stopped, away, shows("no logs", kind))
    for each in poor:
        for nodes in permutations((shows(what, kind), each)):
            assert reader_of(*nodes).read(a_hold_of(intent)) == alone


def test_what_an_endpoint_without_logs_shows_is_the_ceiling_where_no_other_one_knows_better():
    intent = INTENTS["upto"]
    two = (shows("no logs", "upto"), shows("no logs", "upto"))
    assert reader_of(*two).read(a_hold_of(intent)) == Used(final=True)


def test_more_that_another_endpoint_shows_taken_counts_although_the_first_shows_less():
    intent = INTENTS["upto"]
    for nodes in permutations((shows("1", "upto"), shows("50000", "upto"), shows("100000", "upto"))):
        assert reader_of(*nodes).read(a_hold_of(intent)).amount_atomic == CEILING


def compared(*nodes):
    return reader_of(*nodes, now=NOW + 48 * HOUR).transfers(
        "eip155:84532", TOKEN, PAYER, after=None, since_unix=NOW - HOUR
    )


def test_a_transfer_that_one_hides_in_a_transaction_that_it_shows_is_seen():
    intent = INTENTS["eip3009"]
    paid, stolen = in_block(log(CEILING, index=3), 0x10), in_block(log(5_000_000, payee=OTHER, index=4), 0x10)
    hides, whole = (Provider(Logs(intent, logs, sent=None, final_time=NOW)) for logs in ([paid], [paid, stolen]))
    for nodes in permutations((hides, whole)):
        assert [each.amount_atomic for each in compared(*nodes).outgoing] == [CEILING, 5_000_000]


@pytest.mark.parametrize("others", [1, 2])
def test_one_that_has_stopped_hides_no_theft_wherever_it_stands(others):
    intent = INTENTS["eip3009"]
    theft = in_block(log(5_000_000, payee=OTHER), 0x1800)
    whole = [Provider(Logs(intent, [theft], sent=None, final_time=NOW + 24 * HOUR)) for _ in range(others)]
    for each in whole:
        each.node.head = 0x2000
    stopped = Provider(Logs(intent, sent=None, final_time=NOW - HOUR + 64))
    for nodes in permutations((stopped, *whole)):
        found = compared(*nodes)
        assert ([each.amount_atomic for each in found.outgoing], found.upto) == ([5_000_000], 0x2000)


@pytest.mark.parametrize(
    ("behind_s", "ahead_s"), [(1_200, 0), (3 * HOUR, 0), (1_200, 3_000)], ids=["20 min", "3 h", "clock"]
)
@pytest.mark.parametrize("kind", VIEWS)
def test_one_whose_final_block_is_hours_behind_its_latest_one_is_not_behind(kind, behind_s, ahead_s):
    """Some networks take hours to make a block final, and a machine's clock may be ahead."""
    intent = INTENTS[kind]
    for order in (1, -1):
        honest = shows("unused", kind, NOW - behind_s)
        lie = shows("1" if kind == "upto" else "cancelled", kind, NOW + ahead_s)
        honest.head_time, lie.head_time = NOW, NOW + ahead_s
        found = reader_of(*(honest, lie)[::order], now=NOW + ahead_s).read(a_hold_of(intent))
        assert counts(found, intent) == CEILING
        assert order == 1 or isinstance(found, Unreadable)


@pytest.mark.parametrize("kind", VIEWS)
def test_one_that_is_led_to_another_chain_is_no_witness_either(kind):
    intent = INTENTS[kind]
    stopped, led = Stated(used=False, time=ALIVE), Stated(used=False, time=ALIVE)
    reader = reader_of(stopped, led, now=NOW + 3 * HOUR)
    assert reader.read(a_hold_of(intent)) == Unused(ALIVE)  # both have been right
    led.chain, led.time = 8453, NOW + 3 * HOUR
    assert reader.read(a_hold_of(intent)) == Unused(ALIVE), (
        "and not unused for good, as on a chain where nothing was paid"
    )


def test_one_that_has_stopped_leaves_it_to_one_that_keeps_no_logs():
    """Nothing but the use of the nonce can be known any more; the deadline has passed."""
    intent = INTENTS["upto"]
    stopped = shows("unused", "upto", ALIVE - 3 * HOUR)
    refusing = Refusing(shows("no logs", "upto").node, "upto")
    for nodes in permutations((stopped, refusing)):
        assert reader_of(*nodes).read(a_hold_of(intent)) == Used(final=True)


class Refusing(Bits):
    def make_request(self, method, params):
        if method == "eth_getLogs":
            return {"error": {"code": 4444, "message": "pruned history unavailable"}}
        return super().make_request(method, params)


class Limited(Bits):
    """It shows the payment, and answers one question no more: which chain it serves, or its latest block."""

    def __init__(self, node, kind, limited):
        super().__init__(node, kind)
        self.limited, self.known = limited, False

    def make_request(self, method, params):
        first, self.known = not self.known, True
        if (self.limited == method and not first) or [self.limited] == params[:1]:
            raise OSError("over rate limit")
        return super().make_request(method, params)


@pytest.mark.parametrize("limited", ["eth_chainId", "latest"])
@pytest.mark.parametrize("kind", VIEWS)
def test_a_witness_that_is_limited_after_it_has_shown_more_is_no_leave_to_free(kind, limited):
    intent = INTENTS[kind]
    witness = Limited(shows(str(CEILING), kind).node, kind, limited)
    found = reader_of(shows("dead", kind), witness).read(a_hold_of(intent))
    assert counts(found, intent) == CEILING
