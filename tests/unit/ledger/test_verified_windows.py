"""An honest ledger is never told that its windows count too little: clocks that are set back, and corrections in any order."""

import datetime as dt
import itertools

import pytest

from tests.support.ledger import Books, Clock, a_transfer, usd, weigh_proven
from x402guard.frozen import replace
from x402guard.kernel.rows import WALLET, Evidence, HoldKind, NodeKind, Window
from x402guard.ledger.events import Capture, Correct, Lapse, Note
from x402guard.ledger.evidence import weigh_marks
from x402guard.ledger.findings import Settled, Used
from x402guard.ledger.sessions import NodeRequest, open_node
from x402guard.ledger.verify import verify_windows

TRANSACTION = "0x" + "ab" * 32


def at(text):
    return int(dt.datetime.fromisoformat(f"2027-01-{text}+00:00").timestamp() * 1000)


def books_of(per, when):
    """Books with a session in a budget that begins again."""
    books = Books(session=None, clock=Clock(at(when)))
    request = NodeRequest("b", WALLET, NodeKind.BUDGET, "b", usd("$5.00"), "op", window=Window(per, "UTC"))
    books.change(lambda view: open_node(view, request), nodes=("b", WALLET))
    books.open("s", "$1.00", parent="b")
    return books


def test_a_clock_that_was_minutes_ahead_over_midnight():
    books = books_of("day", "20T23:50:00")
    for hold_id in ("h1", "h2"):
        books.hold(hold_id, "$0.10", kind=HoldKind.TOOL)
    books.clock.now_ms = at("21T00:00:30")
    books.step("h2", Note(doubt="no answer came"))  # in the session alone
    books.clock.now_ms = at("20T23:58:40")
    books.step("h1", Capture(usd("$0.10"), Evidence.CLAIMED))
    for when in ("20T23:58:40", "21T00:00:10", "21T09:00:00"):
        books.clock.now_ms = at(when)
        assert verify_windows(books.store) == []


@pytest.mark.parametrize("per", ["day", "month"])
def test_a_payment_that_was_raised_and_lowered_in_the_window_after_its_own(per):
    books = books_of(per, "31T23:59:00")
    books.open_kernel(most_exposed=usd("$1.00"))
    books.hold("h1", "$0.10", scheme="upto", deadline_s=600, chain_evidence=True)
    few = Settled(10_000, TRANSACTION, 3, final=False)
    for wait_s, found in ((20, few), (90, Used(final=True)), (60, replace(few, final=True))):
        books.clock.tick(wait_s)
        marks = weigh_marks(books.stored("h1"), found)
        books.change(
            lambda view, found=found: weigh_proven(view, "h1", found, most_exposed=usd("$1.00")),
            nodes=("s",), holds=("h1",), marks=marks,
        )  # fmt: skip
        assert verify_windows(books.store) == []


AMOUNTS = ("$0", "$0.05", "$0.10", "$0.30")


@pytest.mark.parametrize("closes_s", [100, 90_000], ids=["in its own window", "after it"])
@pytest.mark.parametrize("waits", [(90_000, 60, 60), (60, 90_000, 60), (60, 60, 90_000)], ids=["1", "2", "3"])
def test_corrections_in_any_order_before_and_after_midnight(closes_s, waits):
    for amounts in itertools.product(AMOUNTS, repeat=3):
        books = books_of("day", "20T12:00:00")
        books.hold("h1", "$0.10", scheme="upto")
        books.clock.tick(closes_s)
        books.step("h1", Lapse())
        for log, (wait_s, amount) in enumerate(zip(waits, amounts, strict=True)):
            books.clock.tick(wait_s)
            books.step("h1", Correct(usd(amount), Evidence.CHAIN, a_transfer(log=log)))
            assert verify_windows(books.store) == [], (amounts, amount)
