"""The ordinary steps of a hold are written in one go: row for row and entry for entry what the general way writes."""

from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ledger import STATED, Books, a_hold, usd
from x402guard.errors import ConfigError, IllegalTransition
from x402guard.kernel.rows import Evidence, HoldKind, NodeKind, Window
from x402guard.ledger import authorize as holds
from x402guard.ledger import transitions
from x402guard.ledger.authorize import authorize
from x402guard.ledger.events import Capture, Void
from x402guard.ledger.owner import reset_node, trip_node
from x402guard.ledger.sessions import NodeRequest, open_node
from x402guard.ledger.transitions import apply
from x402guard.ledger.view import Scope

NODES = ("s", "s/child", "budget:day", "t")
AMOUNTS = ("$0.000001", "$0.01", "$0.10", "$0.30", "$0.58", "$0.90", "$2.00")
STEP = st.one_of(
    st.tuples(
        st.just("hold"), st.sampled_from(NODES), st.sampled_from(AMOUNTS), st.sampled_from(("tool", "llm", "payment"))
    ),
    st.tuples(st.just("capture"), st.integers(0, 8), st.sampled_from(("all", "half", "twice")), st.just("")),
    st.tuples(st.just("void"), st.integers(0, 8), st.just(""), st.just("")),
    st.tuples(st.just("charge"), st.sampled_from(NODES), st.sampled_from(AMOUNTS), st.just("tool")),
    st.tuples(st.just("trip"), st.sampled_from(("s", "wallet")), st.just(""), st.just("")),
    st.tuples(st.just("reset"), st.sampled_from(("s", "wallet")), st.just(""), st.just("")),
    st.tuples(st.just("wait"), st.sampled_from((1, 61, 86_400)), st.just(""), st.just("")),
)


class Played:
    """A ledger in memory, and what each step has come to."""

    def __init__(self, wallet):
        self.books = Books(wallet=wallet, session="$1.00", soft=(500_000, 900_000))
        self._open("s/child", "s", "$0.40", NodeKind.SESSION)
        self._open("budget:day", "wallet", "$0.80", NodeKind.BUDGET, window=Window("day", "UTC"))
        self._open("t", "budget:day", "$0.60", NodeKind.SESSION, reserve=usd("$0.05"))
        self.ids, self.said = [], []

    def _open(self, node, parent, budget, kind, **more):
        opener = "" if kind is NodeKind.BUDGET else f"opener-of-{node}"
        request = NodeRequest(node, parent, kind, node, usd(budget), opener, **more)
        self.books.change(lambda view: open_node(view, request), nodes=(node, parent))

    def play(self, steps):
        for number, step in enumerate(steps):
            try:
                self.said.append(repr(getattr(self, f"_{step[0]}")(number, *step[1:])))
            except (IllegalTransition, ConfigError) as error:
                self.said.append(str(error))
        rows = self.books.store._rows
        return rows.nodes, rows.holds, rows.marks, rows.journal, self.said

    def _change(self, node, hold_id, change):
        told = []

        def seen(view):
            result = change(view)
            told[:] = [view.notices, view.steps, view.recheck]
            return result

        return self.books.store.transact(Scope(nodes=(node,), holds=(hold_id,), durable=True), seen), told

    def _made(self, number, node, amount, kind):
        hold = a_hold(f"h{number}", amount, node, HoldKind(kind), now_ms=self.books.clock.now_ms)
        self.ids.append((hold.id, node, hold.amount))
        return hold

    def _hold(self, number, node, amount, kind):
        hold = self._made(number, node, amount, kind)
        return self._change(node, hold.id, lambda view: authorize(view, hold, {"kind": kind, "amount": hold.amount}))

    def _charge(self, number, node, amount, kind):
        hold = self._made(number, node, amount, kind)

        def change(view):
            found = authorize(view, hold, {"kind": kind, "amount": hold.amount})
            return apply(view, hold.id, Capture(hold.amount, Evidence.ESTIMATE)) if view.hold(hold.id) else found

        return self._change(node, hold.id, change)

    def _capture(self, _number, which, how, _):
        if not self.ids:
            return None
        hold_id, node, amount = self.ids[which % len(self.ids)]
        taken = {"all": amount, "half": amount // 2, "twice": 2 * amount}[how]
        event = Capture(taken, Evidence.PROVIDER_USAGE if how == "half" else Evidence.ESTIMATE)
        proof = STATED if how == "half" else None
        return self._change(node, hold_id, lambda view: apply(view, hold_id, event, proof))

    def _void(self, _number, which, *_):
        if not self.ids:
            return None
        hold_id, node, _ = self.ids[which % len(self.ids)]
        return self._change(node, hold_id, lambda view: apply(view, hold_id, Void("not sent"), view.unsigned(hold_id)))

    def _trip(self, _number, node, *_):
        return self.books.change(lambda view: trip_node(view, node, "enough", by="me"), nodes=(node,))

    def _reset(self, _number, node, *_):
        return self.books.change(lambda view: reset_node(view, node, "me"), nodes=(node,))

    def _wait(self, _number, seconds, *_):
        self.books.clock.now_ms += seconds * 1000


@contextmanager
def general():
    """The general way alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holds, "is_plain", lambda *_, **_more: False)
        patch.setattr(transitions, "_is_plain_end", lambda *_: False)
        yield


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(STEP, min_size=1, max_size=14), wallet=st.sampled_from((None, "$0.50", "$9.00")))
def test_the_ordinary_way_writes_what_the_general_way_writes(steps, wallet):
    mine = Played(wallet).play(steps)
    with general():
        theirs = Played(wallet).play(steps)
    for ours, others in zip(mine, theirs, strict=True):
        assert ours == others


def test_ordinary_steps_are_taken_the_ordinary_way(monkeypatch):
    """Else the comparison above compares nothing."""
    plain, whole = [], []
    usual, also = holds.is_plain, transitions._is_plain_end
    monkeypatch.setattr(holds, "is_plain", lambda *a: plain.append(usual(*a)) or plain[-1])
    monkeypatch.setattr(transitions, "_is_plain_end", lambda *a: whole.append(also(*a)) or whole[-1])
    Played("$9.00").play([("charge", node, "$0.01", "tool") for node in NODES])
    assert plain == [True] * 4
    assert whole == [True, True, False, False]  # a window moves what is past
