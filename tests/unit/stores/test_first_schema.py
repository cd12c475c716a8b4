"""A ledger that was written by the first version of the schema is taken over with what is held in it, at every level."""

import json
import sqlite3
from decimal import Decimal

import pytest

from tests.support.ledger import START_MS, Clock, an_intent, usd
from tests.support.merchant import PAYER, make_guard
from x402guard import BudgetExhausted, LedgerUnavailable, Policy
from x402guard.kernel.rows import WALLET, Evidence
from x402guard.ledger.events import Capture, Correct, Void
from x402guard.ledger.transitions import apply
from x402guard.ledger.view import Scope
from x402guard.stores import open_store
from x402guard.stores.migrations import APPLICATION_ID, MIGRATIONS

NODES = {  # id: parent, kind, limit, captured, held, granted out, granted in
    WALLET: (None, "wallet", None, "0", "0", "1.70", "0"),
    "run": (WALLET, "session", "2.00", "0.30", "0.10", "0.80", "1.20"),
    "run/a": ("run", "session", "1.00", "0.20", "0", "0.45", "0.65"),
    "run/a/x": ("run/a", "scope", "0.50", "0.05", "0.40", "0", "0.45"),
    "run/b": ("run", "session", "1.00", "0.10", "0.05", "0", "0.15"),
    "other": (WALLET, "session", "1.00", "0", "0.50", "0", "0.50"),
    "idle": (WALLET, "session", "1.00", "0", "0", "0", "0"),
    "run/tokens": (None, "tokens", "0.000001", "0.0000001", "0.0000002", "0", "0"),
}
HOLDS = {  # id: node, amount, state, captured
    "h-run": ("run", "0.10", "held", "0"),
    "h-x1": ("run/a/x", "0.15", "held", "0"),
    "h-x2": ("run/a/x", "0.25", "held", "0"),
    "h-b": ("run/b", "0.05", "held", "0"),
    "h-other": ("other", "0.50", "held", "0"),
    "done": ("run/b", "0.10", "captured", "0.10"),
}
LIVE = {
    WALLET: "1.05",
    "run": "0.55",
    "run/a": "0.40",
    "run/a/x": "0.40",
    "run/b": "0.05",
    "other": "0.50",
    "idle": "0",
}
OPENERS = json.dumps(["gone:1:ab#cd"])


def insert(db, table, **row):
    db.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values()))


@pytest.fixture
def url(tmp_path):
    """A ledger as the first schema has it: written by SQL alone."""
    path = tmp_path / "first.db"
    db = sqlite3.connect(path)
    db.executescript(MIGRATIONS[0])
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute("PRAGMA user_version = 1")
    for node, (parent, kind, limit, captured, held, out, into) in NODES.items():
        insert(
            db, "nodes", id=node, parent_id=parent, kind=kind, name=node, max_nanos=limit and usd(limit),
            created_ms=START_MS, last_ms=START_MS, captured=usd(captured), held=usd(held), granted_out=usd(out),
            granted_in=usd(into), state="open", terminated_by=None, starved=0, openers=OPENERS, closed_ms=None, seq=0, head="",
        )  # fmt: skip
    for number, (hold, (node, amount, state, captured)) in enumerate(HOLDS.items()):
        nanos = usd(amount)
        insert(
            db, "holds", id=hold, node_id=node, kind="payment", amount=nanos, created_ms=START_MS,
            deadline_unix=START_MS // 1000 + 60, flying_since_ms=START_MS, owner="gone", purpose="{}", chain_evidence=1,
            purchase_key=None, intent=an_intent(number + 1, nanos // 1000).to_json(), state=state, captured=usd(captured),
            evidence="claimed" if state == "captured" else None, doubt=None, claim=None, proof=None,
            ended_by='{"event": "capture"}' if state == "captured" else None, checked_ms=0, presented=1,
        )  # fmt: skip
    insert(db, "marks", kind="wallet", key="payer", value=json.dumps({"address": PAYER}))
    db.commit()
    db.close()
    return f"sqlite:///{path}"


@pytest.fixture
def store(url):
    opened = open_store(url, clock_ms=Clock(START_MS + 1_000), verified=False)  # its rows stand in no journal
    yield opened
    opened.close()


def live(store):
    return {node.id: node.live for node in store.nodes()}


def test_every_level_knows_what_is_live_in_it_and_below(store):
    assert {node: store_live for node, store_live in live(store).items() if node in LIVE} == {
        node: usd(amount) for node, amount in LIVE.items()
    }
    assert live(store)["run/tokens"] == usd("0.0000002")


def test_nothing_else_changed(store):
    for node in store.nodes():
        parent, kind, limit, *amounts = NODES[node.id]
        assert (node.parent_id, node.kind, node.limit) == (parent, kind, limit and usd(limit))
        assert [node.captured, node.held, node.granted_out, node.granted_in] == [usd(amount) for amount in amounts]
        assert (node.window, node.since_ms, node.past, node.reserve, node.finalized, node.soft, node.warned) == (
            None, 0, 0, 0, False, (), 0,
        )  # fmt: skip
    assert {hold.id for hold in store.outstanding()} == {hold for hold, row in HOLDS.items() if row[2] == "held"}


def test_sessions_say_what_they_hold_and_go_on(store):
    with make_guard(store, policy=Policy(wait_for_budget_s=0)) as guard, guard.session("run", id="run") as session:
        assert (session.spent, session.held, session.remaining) == (Decimal("0.65"), Decimal("0.55"), Decimal("0.80"))
        with pytest.raises(BudgetExhausted):
            session.charge("serp", "$0.81")
        session.charge("serp", "$0.80")
        assert session.held == Decimal("0.55")


def test_what_was_held_then_ends_now_at_every_level(store):
    def step(hold, event):
        store.transact(Scope(holds=(hold,), durable=True), lambda view: apply(view, hold, event))

    step("h-x1", Capture(usd("0.15"), Evidence.CHAIN))
    step("h-x2", Void("not sent"))
    step("h-b", Capture(usd("0.01"), Evidence.CHAIN))
    step("done", Correct(usd("0.02"), Evidence.CHAIN))
    after = {**LIVE, WALLET: "0.60", "run": "0.10", "run/a": "0", "run/a/x": "0", "run/b": "0"}
    assert {node: amount for node, amount in live(store).items() if node in after} == {
        node: usd(amount) for node, amount in after.items()
    }
    with make_guard(store) as guard, guard.session("run", id="run") as session:
        assert (session.spent, session.held) == (Decimal("0.73"), Decimal("0.10"))


def test_it_is_migrated_once_and_by_several_at_once(url):
    stores = [open_store(url, verified=False) for _ in range(3)]
    assert all(live(store) == live(stores[0]) for store in stores)
    for store in stores:
        store.close()
    db = sqlite3.connect(url.removeprefix("sqlite:///"))
    assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(LedgerUnavailable, match="newer x402guard"):
        open_store(url)
