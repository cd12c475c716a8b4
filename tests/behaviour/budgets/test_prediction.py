"""What sessions of a name have cost: by rank, from five on, and for people to read alone."""

import json
from decimal import Decimal

import pytest

from tests.support import processes
from tests.support.command_line import typed
from tests.support.merchant import make_guard
from x402guard import BudgetExhausted


def spend(guard, name, *amounts, budget="$1.00"):
    for amount in amounts:
        with guard.session(name, budget=budget) as session:
            session.charge("tool", amount)


@pytest.mark.parametrize(
    ("cents", "p50", "p95"),
    [
        ([1, 2, 3, 4, 5], "0.03", "0.05"),
        ([5, 1, 4, 2, 3, 6], "0.03", "0.06"),
        (list(range(1, 21)), "0.10", "0.19"),
        (list(range(1, 22)), "0.11", "0.20"),
        ([7] * 9, "0.07", "0.07"),
    ],
)
def test_it_is_the_cost_of_one_of_them_by_rank(ledger_url, cents, p50, p95):
    with make_guard(ledger_url) as guard:
        spend(guard, "clerk", *(f"$0.{each:02d}" for each in cents))
        spend(guard, "another", *["$0.90"] * 6)
        with guard.session("clerk", budget="$1.00") as session:
            session.charge("tool", "$0.99")
            found = session.predict()
    assert (found.p50, found.p95, found.sessions) == (Decimal(p50), Decimal(p95), len(cents))
    assert str(found) == f"clerk: p50 ${p50}, p95 ${p95}, of {len(cents)} past sessions"


def test_under_five_there_is_no_data(ledger_url):
    with make_guard(ledger_url) as guard:
        spend(guard, "clerk", "$0.01", "$0.02", "$0.03", "$0.04")
        open_still = guard.session("clerk", budget="$1.00")
        found = guard.session("clerk", budget="$1.00").predict()
        assert (found.p50, found.p95, found.sessions) == (None, None, 4)
        assert "no data" in str(found)
        open_still.close()
        assert guard.session("clerk", budget="$1.00").predict().p50 == Decimal("0.02")


def test_what_children_spent_and_what_is_held_still_counts_in(ledger_url):
    with make_guard(ledger_url) as guard:
        spend(guard, "clerk", *["$0.01"] * 4)
        with guard.session("clerk", budget="$1.00") as session:
            with session.child("scraper", budget="$0.50") as child:
                child.charge("tool", "$0.20")
            job = session.hold("render", up_to="$0.30")
            job.__enter__()  # and its process dies
        found = guard.session("clerk", budget="$1.00").predict()
    assert (found.p50, found.p95) == (Decimal("0.01"), Decimal("0.50"))


def test_it_loosens_nothing(ledger_url):
    with make_guard(ledger_url) as guard:
        spend(guard, "clerk", *["$0.90"] * 5)
        with guard.session("clerk", budget="$0.10") as session:
            assert session.predict().p95 == Decimal("0.90")
            with pytest.raises(BudgetExhausted):
                session.charge("tool", "$0.11")
            assert session.limit == Decimal("0.10")


@pytest.mark.parametrize("sessions", [4, 5])
def test_the_command_says_the_same(tmp_path, sessions):
    url = f"sqlite:///{tmp_path / 'books.db'}"
    with make_guard(url) as guard:
        spend(guard, "clerk", *["$0.01"] * sessions)

    def x402guard(*arguments):
        done = typed(*arguments, "--ledger", url, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    text, values = x402guard("predict", "clerk"), json.loads(x402guard("predict", "clerk", "--json"))
    if sessions == 4:
        assert "no data" in text
        assert values == {"name": "clerk", "sessions": 4, "p50": None, "p95": None}
    else:
        assert text == "clerk: p50 $0.01, p95 $0.01, of 5 past sessions\n"
        assert values == {"name": "clerk", "sessions": 5, "p50": "0.01", "p95": "0.01"}


def test_a_session_that_is_resumed_is_not_of_its_own_past(ledger_url):
    with make_guard(ledger_url) as guard:
        spend(guard, "clerk", *["$0.01"] * 5)
        for _ in range(2):
            with guard.session("clerk", budget="$1.00", id="run") as session:
                session.charge("tool", "$0.20")
        resumed = guard.session("clerk", id="run")
        resumed.close()  # ended, and asked all the same
        assert resumed.predict().sessions == 5


def test_sessions_whose_process_died_are_past_too(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    dies = (
        "import os, sys; from x402guard import Guard; guard = Guard(ledger=sys.argv[1]);"
        "[guard.session('clerk', budget='$9').charge('x', '$5') for _ in range(20)]; os._exit(9)"
    )
    processes.run(dies, url)
    with make_guard(url) as guard:
        assert str(guard.session("clerk", budget="$9").predict()) == "clerk: p50 $5.00, p95 $5.00, of 20 past sessions"
