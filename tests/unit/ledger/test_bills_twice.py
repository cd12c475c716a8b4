"""The end of an LLM call whose commit was lost on its way back is written again: it counts once, in dollars and tokens."""

from itertools import product

import pytest

from tests.support.ledger import Clock, a_hold, usd
from tests.support.merchant import make_guard
from x402guard.flow.capture import Bill, capture_bill
from x402guard.frozen import replace
from x402guard.kernel.rows import Evidence, HoldKind, HoldState
from x402guard.ledger.authorize import authorize
from x402guard.ledger.events import Lapse
from x402guard.ledger.token_budget import Reservation, call_tokens, reserve_tokens
from x402guard.ledger.transitions import apply
from x402guard.ledger.view import Scope
from x402guard.stores.memory import MemoryStore

BILLS = {
    "less": Bill(usd("$0.04"), Evidence.PROVIDER_USAGE, {"input_tokens": 40}),
    "more": Bill(usd("$0.30"), Evidence.PROVIDER_USAGE, {"input_tokens": 900, "output_tokens": 700}),
    "unstated": Bill(usd("$0.10"), Evidence.ASSUMED),
}
CALLS = ("held", "lapsed")
RESERVATIONS = (None, "held", "lapsed")


def begin_call(session, clock, hold, call, reservation):
    """Return the scope of a call that was authorized, with its reservation of 100 tokens, after their deadlines or before."""
    tokens, reserved = session.context.tokens, call_tokens(hold.id)

    def begin(view):
        authorize(view, hold, {"kind": "llm"})
        if reservation is not None:
            reserve_tokens(view, tokens.node_id, Reservation(reserved, 100, session.context.instance, llm=True))

    def lapse(view):
        if call == "lapsed":
            apply(view, hold.id, Lapse())
        if reservation == "lapsed":
            apply(view, reserved, Lapse())

    scope = Scope(nodes=(session.id, tokens.node_id), holds=(hold.id, reserved), durable=True)
    session.shell.store.transact(scope, begin)
    clock.tick(1_000)
    session.shell.store.transact(scope, lapse)
    return scope


@pytest.mark.parametrize(("bill", "call", "reservation"), list(product(BILLS, CALLS, RESERVATIONS)))
def test_it_counts_once(bill, call, reservation):
    clock = Clock()
    with (
        make_guard(MemoryStore(clock_ms=clock)) as guard,
        guard.session("s", budget="$5.00", tokens=100_000) as session,
    ):
        hold = replace(a_hold("call", kind=HoldKind.LLM), node_id=session.id)
        scope = begin_call(session, clock, hold, call, reservation)
        store = session.shell.store

        def counted():
            nodes = [replace(node, seq=0, head="") for node in store.nodes() if node.id in scope.nodes]
            return nodes, store.hold("call"), store.hold(call_tokens("call"))

        seen = []
        for _ in range(3):
            effect = next(capture_bill(session.context, hold, BILLS[bill], (), most_tokens=100))
            store.transact(effect.scope, effect.change)
            seen.append(counted())
        assert seen[0] == seen[1] == seen[2]
        stated = {"less": 40, "more": 1_600, "unstated": 100}[bill]
        [used] = [node.captured for node in seen[0][0] if node.id == session.context.tokens.node_id]
        assert used == max(stated, 100 if reservation == "lapsed" else 0)
        owed = BILLS[bill].amount if call == "held" else max(usd("$0.10"), BILLS[bill].amount)
        assert (seen[0][1].state, seen[0][1].captured) == (HoldState.CAPTURED, owed)
