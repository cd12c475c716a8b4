"""Row 81: a program that can write the ledger says that answers were handed over, and lost purchases are paid anew."""

import sqlite3
from contextlib import closing

import httpx
import pytest

from tests.support.merchant import URL, Shop, make_guard
from tests.support.refusals import fetch
from x402guard import LedgerUnavailable, Owner, SettlementUncertain
from x402guard.x402.purchase import _facts

LOST = {"paid": httpx.ReadError("lost")}


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'spend.db'}"


def answers(owner):
    return [entry.facts()["is"] for entry in owner._store.entries("run") if entry.event == "answer"]


def buys(ledger, shop, **more):
    with make_guard(ledger) as guard, guard.session("s", budget="$1.00", id="run") as session:
        return fetch("sync", session, shop, **more)


def test_a81_what_became_of_an_answer_stands_in_the_journal(url):
    """Lost, presented again and handed over; another one lost, and forgiven by its owner."""
    with pytest.raises(SettlementUncertain):
        buys(url, Shop(**LOST))
    assert buys(url, Shop()).status_code == 200
    with pytest.raises(SettlementUncertain):
        buys(url, Shop(**LOST), url=f"{URL}/2")
    with Owner(url) as owner:
        [open_one] = [row.id for row in owner.holds() if row.in_doubt]
        owner.forgive(open_one)
    assert buys(url, Shop(), url=f"{URL}/2").status_code == 200
    with Owner(url) as owner:
        assert answers(owner) == ["lost", "done", "lost", "forgiven", "done"]
        assert owner.verify() == []


@pytest.mark.parametrize("said", ["done", "forgiven", "lost", "open"])
@pytest.mark.parametrize("was", ["done", "lost", "open"])
def test_a81_a_row_that_says_otherwise_is_a_finding_and_refuses_the_next_opening(url, tmp_path, was, said):
    if was == "done":
        buys(url, Shop())
    elif was == "lost":
        with pytest.raises(SettlementUncertain):
            buys(url, Shop(**LOST))
    else:
        guard = make_guard(url)
        session = guard.session("s", budget="$1.00", id="run")
        payment = session.pay({"x402Version": 2, **Shop().terms}, place=URL)
        del payment
        guard.close()
    with closing(sqlite3.connect(tmp_path / "spend.db")) as database:
        [(before,)] = database.execute("SELECT delivery FROM holds").fetchall()
        database.execute("UPDATE holds SET delivery = ?", (said,))
        database.commit()
    if said == before:
        with Owner(url) as owner:
            assert owner.verify() == []
        return
    with Owner(url, verified=False) as owner:
        [fault] = owner.verify()
    assert fault.endswith(f"its row says that its answer is {said}, but its journal says {before}")
    with pytest.raises(LedgerUnavailable, match="says that its answer is"):
        buys(url, Shop())


def test_a81_a_payment_of_an_earlier_version_has_no_such_entry(url, tmp_path, monkeypatch):
    def earlier(case, hold):
        return {name: value for name, value in _facts(case, hold).items() if name != "answer"}

    monkeypatch.setattr("x402guard.x402.purchase._facts", earlier)
    buys(url, Shop())
    with closing(sqlite3.connect(tmp_path / "spend.db")) as database:
        database.execute("UPDATE holds SET delivery = 'lost'")
        database.commit()
    with Owner(url) as owner:
        assert owner.verify() == []
