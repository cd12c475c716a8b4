"""Ledgers that are archived, in a file and in PostgreSQL; and what a process keeps beside its ledger."""

import pytest

from tests.support import postgres
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import TokenBudget
from x402guard.stores.outbox import Outbox


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
def ledger(request, tmp_path):
    return f"sqlite:///{tmp_path / 'spend.db'}" if request.param == "sqlite" else postgres.empty_database()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "old").mkdir()
    return tmp_path / "old"


@pytest.fixture
def spent(ledger):
    """A session with a child and tokens that has ended, one with a payment on the seller's word, one that is open."""
    guard = make_guard(ledger, budget="$5.00")
    with guard.session("research", budget="$1.00", id="run-1", tokens=TokenBudget(5_000)) as session:
        for _ in range(3):
            session.charge("search", "$0.25")
        session.record_usage("openai", "gpt-4o-mini", {"input_tokens": 9, "output_tokens": 9})
        with session.child("reader", budget="$0.10") as child:
            child.charge("read", "$0.02")
    with guard.session("buyer", budget="$1.00", id="run-2") as session, client(session, Shop()) as http:
        http.get(URL)
    with guard.budget("customer-7", "$2.00").session("other", budget="$1.00", id="run-3") as session:
        session.charge("lookup", "$0.50")
        session.trip("enough")
    open_one = guard.session("open", budget="$1.00", id="run-4")
    with open_one as session:
        session.charge("search", "$0.01")
        yield ledger
    guard.close()


@pytest.fixture
def place(tmp_path):
    """The folder of an outbox."""
    return tmp_path / "outbox" / "ledger"


@pytest.fixture
def mine(place):
    made = Outbox()
    made.keep_in(place, synced=False)
    yield made
    made.close()
