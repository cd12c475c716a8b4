"""Sessions that are written later, beside the same ones written at once: each answer and all books are the same.

The steps come in any order: uses, reads, the look once a second, ends, the owner's stops and lower limits, a dropped session.
"""

import gc
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.merchant import make_guard
from x402guard import X402GuardError
from x402guard.kernel.rows import WALLET
from x402guard.ledger.owner import reset_node, trip_node
from x402guard.ledger.view import Scope
from x402guard.stores import open_store

which = st.integers(0, 3)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.sampled_from(["$0.05", "$0.30", "$2.00"])),
        st.tuples(st.just("charge"), which, st.sampled_from(["$0.01", "$0.04", "$0.25"])),
        st.tuples(st.just("child"), which, st.sampled_from(["$0.02", "$0.10"])),
        st.tuples(st.sampled_from(["spent", "remaining", "close", "drop", "trip", "id"]), which),
        st.tuples(st.sampled_from(["look", "read all", "stop", "go on", "budget"])),
    ),
    max_size=14,
)


class Played:
    """One ledger with its guard, and what each step has answered."""

    def __init__(self, *, at_once):
        self.store = open_store("memory://", memory_sessions=1_000)
        if at_once:
            self.store.open_later = lambda node_id, scope, change, decide: self.store.transact(scope, decide)
        self.guard = make_guard(self.store, budget="$1.00")
        self.sessions, self.said = [], []

    def play(self, name, *more):
        try:
            answer = getattr(self, f"on_{name.replace(' ', '_')}")(*more)
        except X402GuardError as error:
            answer = f"{type(error).__name__}: {error}"
        self.said.append(re.sub(r"s_[0-9a-f]{16}", "ID", str(answer)))

    def session(self, number):
        return self.sessions[number] if number < len(self.sessions) else None

    def on_open(self, budget):
        self.sessions.append(None)
        self.sessions[-1] = self.guard.session(f"s{len(self.sessions)}", budget=budget)

    def on_charge(self, number, cost):
        return (session := self.session(number)) and session.charge("serp", cost).amount

    def on_child(self, number, budget):
        if (session := self.session(number)) is not None:
            with session.child("part", budget=budget) as part:
                part.charge("serp", "$0.01")

    def on_spent(self, number):
        return (session := self.session(number)) and session.spent

    def on_remaining(self, number):
        return (session := self.session(number)) and session.remaining

    def on_close(self, number):
        return (session := self.session(number)) and session.close()

    def on_trip(self, number):
        return (session := self.session(number)) and session.trip("enough")

    def on_id(self, number):
        return (session := self.session(number)) and session.id

    def on_drop(self, number):
        if number < len(self.sessions):
            self.sessions[number] = None
            gc.collect()

    def on_look(self):
        self.store.write_openings(older_s=0.0)

    def on_read_all(self):
        self.store.nodes()

    def on_stop(self):
        self.store.transact(
            Scope(nodes=(WALLET,), durable=True), lambda view: trip_node(view, WALLET, "enough", by="me")
        )

    def on_go_on(self):
        self.store.transact(Scope(nodes=(WALLET,), durable=True), lambda view: reset_node(view, WALLET, by="me"))

    def on_budget(self):
        return self.guard.budget("customer", "$0.50").spent

    def books(self):
        """All budgets by name, without sessions that were never used: those that were dropped are not written."""
        nodes = [node for node in self.store.nodes() if node.kind in ("wallet", "budget", "session", "scope")]
        used = [node for node in nodes if node.kind != "session" or node.granted_in or node.state != "open"]
        return sorted(
            (node.name, node.state, node.captured, node.held, node.granted_out, node.limit or 0) for node in used
        )


@settings(max_examples=300)
@given(steps)
def test_later_and_at_once_are_the_same(played):
    later, at_once = Played(at_once=False), Played(at_once=True)
    for step in played:
        later.play(*step)
        at_once.play(*step)
    assert later.said == at_once.said
    kept = [session for session in (*later.sessions, *at_once.sessions) if session is not None]
    assert later.books() == at_once.books(), kept
    later.guard.close()
    at_once.guard.close()


def test_the_two_ways_are_two():
    later, at_once = Played(at_once=False), Played(at_once=True)
    for each in (later, at_once):
        each.play("open", "$0.05")
    assert (len(later.store._openings), len(at_once.store._openings)) == (1, 0)
