"""What is looked at often, in every store: what has not ended, the newest, those of a name, and how many there are."""

import pytest

from tests.support.ledger import Books
from x402guard.kernel.rows import HoldKind, NodeKind
from x402guard.ledger.sessions import Closing, close_node


@pytest.fixture
def books(make_books) -> Books:
    """A customer with 30 sessions that have ended and one that has not, and the session s with a child that is open."""
    books = make_books(session="$1.00")
    books.open("acme", "$9.00", kind=NodeKind.BUDGET)
    for number in range(30):
        books.open(f"r{number}", "$0.10", parent="acme" if number % 2 else "wallet")
        end(books, f"r{number}")
    books.open("open", "$0.10", parent="acme")
    books.open("s/child", "$0.10", parent="s")
    return books


def end(books, node):
    books.change(lambda view: close_node(view, node, Closing(f"opener-of-{node}")), nodes=(node,))


def ids(nodes):
    return [node.id for node in nodes]


def test_what_has_not_ended_with_the_newest_and_all_above_them(books):
    assert ids(books.store.current(0)) == ["wallet", "s", "acme", "open", "s/child"]
    assert ids(books.store.current(4)) == ["wallet", "s", "acme", "r28", "r29", "open", "s/child"]
    end(books, "s")  # its child is still open
    assert ids(books.store.current(0)) == ["wallet", "s", "acme", "open", "s/child"]
    end(books, "s/child")
    assert ids(books.store.current(0)) == ["wallet", "acme", "open"]


def test_the_newest_in_parts(books):
    everything = ids(books.store.nodes())
    assert ids(books.store.newest(5)) == everything[-5:]
    assert ids(books.store.newest(5, 5)) == everything[-10:-5]
    assert ids(books.store.newest(100, 30)) == everything[:-30]
    assert ids(books.store.newest(5, 1_000)) == []


def test_those_of_a_name_or_an_id(books):
    assert ids(books.store.named("r7", 5)) == ["r7"]
    assert ids(books.store.named("acme", 5)) == ["acme"]
    assert ids(books.store.named("never", 5)) == []
    assert ids(books.store.named("r_", 5)) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("R2", ["r2", *(f"r{n}" for n in range(20, 30))]),
        ("s/ch", ["s/child"]),
        ("ACME", ["acme", *(f"r{n}" for n in range(1, 30, 2)), "open"]),
        ("%", []),
        ("_", []),
        ("!", []),
        ("wallet", ["wallet"]),
    ],
)
def test_those_that_have_a_text_in_their_name_their_id_or_their_parents_name(books, text, found):
    above = [each for each in ("wallet", "s", "acme") if found]
    assert {*ids(books.store.fitting(text, 100))} - {*above} == {*found} - {*above}


def test_only_the_last_of_them(books):
    assert [each for each in ids(books.store.fitting("r", 3)) if each[1:].isdigit()] == ["r27", "r28", "r29"]


def test_how_many_sessions_there_have_been_and_how_many_holds_are_live(books):
    assert books.store.tally() == (32, 0)
    books.hold("h", "$0.01", "s")
    books.hold("t", "$0.01", "s", kind=HoldKind.TOOL)
    books.open("late", "$0.10")
    books.open("late/child", "$0.01", parent="late")
    assert books.store.tally() == (33, 2)
    end(books, "late")
    assert books.store.tally() == (33, 2)
