"""One suite for every store: what it must do, and what it must never do."""

import threading

import pytest

from tests.support.ledger import a_hold, a_transfer, an_id, an_intent, sealed, usd
from x402guard.errors import IllegalTransition
from x402guard.frozen import replace
from x402guard.kernel.rows import Claim, Delivery, Entry, Evidence, HoldKind, HoldState
from x402guard.ledger.authorize import Refusal, authorize, lapse_due
from x402guard.ledger.events import Capture, Note, Void
from x402guard.ledger.purchases import hand_over
from x402guard.ledger.transitions import apply


def test_a_hold_comes_back_as_it_was_written(make_books):
    books = make_books(session="$2000000.00")
    hold_id = f"{2**255 + 7:064x}"
    intent = an_intent(amount=2**40, scheme="upto", method="permit2")
    hold = a_hold(hold_id, "$1099511.627776", intent=intent, purchase_key="key", claim=Claim(usd("$0.05"), "0x1"))
    written = books.change(lambda view: authorize(view, hold, {}), nodes=("s",), holds=(hold_id,), purchase="key")
    assert books.store.hold(hold_id) == written == hold
    assert list(books.store.outstanding()) == [hold]
    assert books.store.hold("another") is None


def test_an_exception_in_a_change_writes_nothing(make_books):
    books = make_books()
    before = (books.balances(), list(books.store.entries("wallet")))

    def change(view):
        authorize(view, a_hold("h"), {})
        view.put_mark(("origin", "x"), {"v2": True})
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        books.change(change, nodes=("s",), holds=("h",))
    assert (books.balances(), list(books.store.entries("wallet"))) == before
    assert books.stored("h") is None
    assert books.store.marks("origin", "") == {}


def test_a_change_sees_its_scope_and_nothing_else(make_books):
    books = make_books()
    books.open("t", "$1.00")
    with pytest.raises(IllegalTransition, match="not in the scope"):
        books.change(lambda view: view.node("t"), nodes=("s",))
    books.hold("h", "$0.10", "t")
    assert books.change(lambda view: view.hold("h"), nodes=("s",)) is None
    assert books.change(lambda view: [n.id for n in view.path("t")], holds=("h",)) == ["t", "wallet"]


def test_every_entry_hashes_the_one_before_it_and_the_sums_are_the_balances(make_books):
    books = make_books(wallet="$5.00")
    books.open("s/c", "$0.50", parent="s")
    for number in range(6):
        books.hold(f"h{number}", "$0.05", "s/c" if number % 2 else "s", scheme="upto")
    books.step("h0", Capture(usd("$0.02"), Evidence.CHAIN, a_transfer()))
    books.step("h1", Void("not signed"))
    books.step("h2", Note(doubt="no answer"))
    journals: dict[str, list[Entry]] = {}
    for entry in books.store.entries("wallet"):
        journals.setdefault(entry.node_id, []).append(entry)
    assert set(journals) == {"wallet", "s", "s/c"}
    for node_id, journal in journals.items():
        previous = ""
        for number, entry in enumerate(journal, 1):
            assert (entry.seq, entry.previous) == (number, previous)
            assert sealed(entry) == entry
            previous = entry.hash
        node = books.row(node_id)
        assert (node.seq, node.head) == (len(journal), previous)
        for name in ("captured", "held", "granted_in", "granted_out"):
            assert sum(getattr(entry, name) for entry in journal) == getattr(node, name)


def test_a_changed_entry_no_longer_fits_its_hash(make_books):
    books = make_books()
    books.hold("h", "$0.10")
    entry = books.store.entries("s")[-1]
    forged = replace(entry, held=entry.held - 1)
    assert sealed(forged).hash != entry.hash


def test_entries_are_those_of_a_node_and_all_below_it(make_books):
    books = make_books()
    books.open("s/c", "$0.50", parent="s")
    books.open("t", "$0.50")
    assert {e.node_id for e in books.store.entries("s")} == {"s", "s/c"}
    assert {n.id for n in books.store.nodes("s/c")} == {"wallet", "s", "s/c"}
    assert {n.id for n in books.store.nodes("s")} == {"wallet", "s", "s/c"}
    assert books.store.nodes("nobody") == []


def test_whatever_decides_ends_what_is_past_its_deadline_in_any_budget(make_books):
    books = make_books(wallet="$5.00")
    books.open("s/c", "$0.50", parent="s")
    books.hold("on-s", "$0.10", "s")
    books.hold("on-child", "$0.10", "s/c")
    books.hold("on-chain", "$0.10", "s", chain_evidence=True)
    books.hold("tool", "$0.10", "s", kind=HoldKind.TOOL)
    books.clock.tick(61)
    books.change(lapse_due, nodes=("s",))
    states = {name: books.stored(name).state for name in ("on-s", "on-child", "on-chain", "tool")}
    assert states == {
        "on-s": HoldState.CAPTURED,
        "tool": HoldState.CAPTURED,
        "on-child": HoldState.CAPTURED,  # also what no later call of the same session will touch
        "on-chain": HoldState.HELD,
    }
    assert books.stored("on-child").evidence is Evidence.ASSUMED
    assert books.node("s").captured + books.node("s/c").captured == usd("$0.30")


def test_a_sweep_sees_what_a_chain_can_settle_longest_unchecked_first(make_books):
    books = make_books()
    books.hold("blind", "$0.01")
    for name in ("a", "b", "c"):
        books.hold(name, "$0.01", chain_evidence=True)
        books.clock.tick(1)

    def check(view):
        view.put_hold(replace(view.hold("a"), checked_ms=view.now_ms))

    books.change(check, holds=("a",))
    assert books.change(lambda view: view.sweep, sweep=10) == tuple(map(an_id, "bca"))
    assert books.change(lambda view: view.sweep, sweep=2) == tuple(map(an_id, "bc"))


def test_no_number_of_live_holds_keeps_a_claim_from_a_sweep(make_books):
    books = make_books()
    for number in range(20):
        books.hold(f"live{number}", "$0.01", chain_evidence=True)
        books.clock.tick(1)
    books.hold("claimed", "$0.01", chain_evidence=True)
    books.step("claimed", Capture(usd("$0.01"), Evidence.CLAIMED))
    asked = set()

    def look(view):
        for hold_id in view.sweep:
            asked.add(hold_id)
            view.put_hold(replace(view.hold(hold_id), checked_ms=view.now_ms))
        return view.sweep

    assert an_id("claimed") not in books.change(look, sweep=16, live_first=True)
    books.clock.tick(10)
    assert an_id("claimed") in books.change(look, sweep=16)
    assert len(asked) == 21


def test_a_purchase_finds_its_holds_without_a_delivery_oldest_first(make_books):
    books = make_books()
    for name in ("first", "second", "voided", "taken", "delivered"):
        now_ms = books.clock.now_ms
        hold = replace(a_hold(name, "$0.01", now_ms=now_ms), purchase_key="k", delivery=Delivery.OPEN)
        books.change(lambda view, h=hold: authorize(view, h, {}), nodes=("s",), holds=(name,), purchase="k")
        books.clock.tick(1)
    books.step("voided", Void("not signed"))
    for name in ("taken", "delivered"):
        books.step(name, Capture(usd("$0.01"), Evidence.CHAIN_HEAD))
    books.change(lambda view: hand_over(view, (an_id("delivered"), 0)), holds=("delivered",))
    assert books.change(lambda view: view.purchase, purchase="k") == tuple(map(an_id, ("first", "second", "taken")))
    assert [books.stored(name).delivery for name in ("taken", "delivered")] == [Delivery.OPEN, Delivery.DONE]
    assert books.change(lambda view: view.purchase, purchase="other") == ()


def test_time_never_goes_back_for_a_node(make_books):
    books = make_books()
    books.clock.tick(100)
    books.hold("h1", "$0.01")
    stamp = books.node().last_ms
    books.clock.tick(-3600)
    books.hold("h2", "$0.01")
    assert books.node().last_ms == stamp
    assert books.store.entries("s")[-1].at_ms == stamp


def test_threads_behind_a_barrier_never_oversell(make_books):
    books = make_books(session="$0.10")
    threads, barrier, allowed = 16, threading.Barrier(16), []

    def buy(thread):
        barrier.wait()
        for number in range(4):
            if not isinstance(books.hold(f"{thread}-{number}", "$0.01"), Refusal):
                allowed.append((thread, number))

    workers = [threading.Thread(target=buy, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(allowed) == 10
    assert books.balances() == (0, usd("$0.10"), usd("$0.10"), 0)


def test_a_path_is_a_budget_and_all_above_it_as_they_stand_among_all(make_books):
    books = make_books(wallet="$9.00")
    for node, parent in (("b", "wallet"), ("t", "b"), ("t/u", "t"), ("other", "b")):
        books.open(node, "$2.00", parent)
        books.hold(f"of-{node}", "$0.10", node, scheme="upto")
    books.step("of-t/u", Capture(usd("$0.04"), Evidence.CHAIN, a_transfer()))
    among_all = {node.id: node for node in books.store.nodes()}
    assert books.store.path("t/u") == [among_all[each] for each in ("t/u", "t", "b", "wallet")]
    assert (among_all["b"].live, among_all["wallet"].live) == (usd("$0.30"), usd("$0.30"))
    assert books.store.path("wallet") == [among_all["wallet"]]
    assert list(books.store.path("never")) == []


def test_marks_are_found_by_prefix_and_taken_literally(make_books):
    books = make_books()
    keys = ["a/%", "a/x", "b/x", "a_x"]

    def write(view):
        for key in keys:
            view.put_mark(("kind", key), {"key": key})

    books.change(write)
    assert sorted(books.store.marks("kind", "a/")) == ["a/%", "a/x"]
    assert sorted(books.store.marks("kind", "a/%")) == ["a/%"]
    assert books.change(lambda view: view.mark(("kind", "b/x")), marks=(("kind", "b/x"),)) == {"key": "b/x"}


def test_closing_twice_is_fine(make_books):
    books = make_books()
    books.close()
    books.close()


def test_a_step_on_a_hold_outside_the_scope_is_illegal(make_books):
    books = make_books()
    books.hold("h", "$0.01")
    with pytest.raises(IllegalTransition, match="not in the scope"):
        books.change(lambda view: apply(view, "h", Void("no")), nodes=("s",))
