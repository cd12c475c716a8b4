"""What a store tells its outbox."""

from tests.support.ledger import START_MS, a_hold, usd
from x402guard.kernel.rows import WALLET, Claim, Evidence, HoldState, Nanos, Node, NodeKind

LAST = {"node_id": "s", "seq": 3, "hash": "ab" * 32}
WHOLE = a_hold(
    "whole",
    state=HoldState.CAPTURED,
    captured=usd("$0.07"),
    evidence=Evidence.CLAIMED,
    closed_ms=START_MS,
    claim=Claim(Nanos(70_000_000), "0xab"),
    doubt=None,
)


class Rows:
    """What a transaction has written, as a store tells it."""

    def __init__(self, *holds, now_ms=START_MS, facts=None):
        self.now_ms, self._holds = now_ms, holds
        self.nodes = {
            WALLET: Node(WALLET, None, NodeKind.WALLET, WALLET, None, 1, 1),
            "s": Node("s", WALLET, NodeKind.SESSION, "s", None, 1, 1),
        }
        self.entries = [] if facts is None else [FirstEntry(hold.id, facts) for hold in holds]

    def written_holds(self):
        return self._holds


class FirstEntry:
    event = "authorize"

    def __init__(self, hold_id, facts):
        self.hold_id, self._facts = hold_id, facts

    def facts(self):
        return self._facts
