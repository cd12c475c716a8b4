"""Ended sessions move to files; the ledger keeps their sums and hashes, and adds up with the files and without them."""

import json
import os
import sqlite3
import time
from contextlib import closing, suppress
from contextvars import copy_context
from decimal import Decimal
from itertools import permutations
from pathlib import Path

import psycopg
import pytest

from tests.support import postgres
from tests.support.archives import LATER, archive, only, run
from tests.support.command_line import typed
from tests.support.ledger import Books, an_id
from tests.support.merchant import make_guard
from x402guard import LedgerUnavailable, SessionTripped
from x402guard.cli import ledger as commands
from x402guard.frozen import replace
from x402guard.guard.owner import Owner
from x402guard.guard.signed_report import Anchor
from x402guard.kernel.proofs import PayAgain
from x402guard.kernel.rows import Delivery, Evidence, HoldKind, Nanos
from x402guard.ledger.events import Capture
from x402guard.ledger.purchases import close_purchase, hand_over, lose
from x402guard.ledger.sessions import Closing, close_node
from x402guard.stores import archiving, open_store

pytestmark = pytest.mark.xdist_group("postgres")


def seen(ledger):
    with Owner(ledger) as owner:
        reports = {id_: owner.report(f"id={id_}").to_dict() for id_ in ("run-1", "run-2", "run-3", "run-4")}
        return (
            reports | {"wallet": owner.report("wallet").to_dict()},
            owner.size(),
            owner.heads(),
            owner.captures("wallet"),
        )


def test_what_has_ended_moves_and_everything_reads_as_before(spent, folder):
    before = seen(spent)
    moved = archive(spent, folder)
    assert (moved.sessions, moved.holds) == (3, 6), moved  # run-1, its child, run-3
    assert [Path(file).parent for file in moved.files] == [folder]
    left = {row[0] for row in run(spent, "SELECT DISTINCT node_id FROM entries")}
    assert not any(node_id.startswith(("run-1", "run-3")) for node_id in left), left
    assert {"wallet", "run-2", "run-4"} <= left
    after = seen(spent)
    for name, told in after[0].items():
        told["duration_s"] = before[0][name]["duration_s"]
        told["view"] = {**told["view"], "now_ms": before[0][name]["view"]["now_ms"]}
        assert [key for key, value in told["view"].items() if value != before[0][name]["view"][key]] == []
        assert told == before[0][name]
    assert after[1:] == before[1:]
    with Owner(spent) as owner:
        assert owner.verify() == owner.verify(archives=False) == []
        assert owner.predict("research").sessions == 1
    assert archive(spent, folder).sessions == 0
    assert len(list(folder.iterdir())) == 1


def test_an_archived_session_goes_on_and_is_archived_again(spent, folder):
    archive(spent, folder)
    with make_guard(spent) as guard, guard.session("research", budget="$1.00", id="run-1") as session:
        assert session.spent > Decimal("0.77")
        session.charge("search", "$0.10")
        assert session.report().to_dict()["tools"]["calls"] == 5
    with Owner(spent) as owner:
        assert owner.verify() == owner.verify(archives=False) == []
    again = archive(spent, folder)
    assert (again.sessions, again.holds) == (2, 1)
    with Owner(spent) as owner:
        assert owner.verify() == owner.verify(archives=False) == []
        assert owner.report("id=run-1").to_dict()["tools"]["calls"] == 5


def test_a_session_stays_while_anything_of_it_can_change(ledger, folder, tmp_path):
    books = Books(ledger, wallet="$5.00")

    def end(node):
        books.change(lambda view: close_node(view, node, Closing(f"opener-of-{node}")), nodes=(node,))

    for node in ("proven", "claimed", "tool"):
        books.open(node, "$1.00")
    for node in ("s", "proven", "claimed"):
        books.hold(f"of-{node}", "$0.10", node, chain_evidence=True)
    books.hold("of-tool", "$0.10", "tool", kind=HoldKind.TOOL)
    books.step("of-proven", Capture(Nanos(100_000_000), Evidence.CHAIN, proof="eip155:84532/x/0"))
    books.change(lambda view: hand_over(view, (an_id("of-proven"), 0)), holds=("of-proven",))
    books.step("of-claimed", Capture(Nanos(100_000_000), Evidence.CLAIMED))
    for node in ("proven", "claimed", "s"):
        end(node)
    with closing(books.store):
        moved = archiving.archive(books.store, LATER, folder, gone=())
        assert (moved.sessions, moved.holds) == (1, 1)
        assert books.stored("of-proven") is None
        assert books.stored("of-claimed") is not None
        books.step("of-tool", Capture(Nanos(100_000_000), Evidence.ASSUMED))
        assert not archiving.archive(books.store, LATER, folder, gone=()).sessions  # it is open
        assert not archiving.archive(books.store, books.clock.now_ms, folder, gone=("",)).sessions
        assert archiving.archive(books.store, LATER, folder, gone=("",)).sessions == 1
        assert books.store.audit() == []


def test_a_process_whose_newest_entries_were_archived_goes_on(ledger, folder):
    books = Books(ledger, wallet="$5.00", session=None)
    with closing(books.store):
        books.open("mine", "$1.00")
        books.hold("h", "$0.10", "mine", kind=HoldKind.TOOL)
        books.step("h", Capture(Nanos(100_000_000), Evidence.ASSUMED))
        other = Books(ledger, session=None)
        with closing(other.store):
            other.change(lambda view: close_node(view, "mine", Closing("opener-of-mine")), nodes=("mine",))
            assert archiving.archive(other.store, LATER, folder, gone=()).sessions == 1
        books.open("next", "$1.00")
        assert books.store.audit() == []


def test_an_ended_process_whose_newest_entries_were_archived_has_lost_nothing(ledger, folder):
    books = Books(ledger, wallet="$5.00", session=None)
    other = Books(ledger, session=None)
    books.open("mine", "$1.00")
    books.close()
    other.change(lambda view: close_node(view, "mine", Closing("opener-of-mine")), nodes=("mine",))
    assert archiving.archive(other.store, LATER, folder, gone=()).sessions == 1
    other.close()
    following = Books(ledger, session=None)
    assert following.node("wallet").state == "open"
    following.close()


@pytest.mark.long
def test_a_ledger_with_archives_moves_to_postgres(tmp_path, folder):
    old, new = f"sqlite:///{tmp_path / 'spend.db'}", postgres.empty_database()
    with make_guard(old, budget="$5.00") as guard, guard.session("research", budget="$1.00", id="run-1") as session:
        session.charge("search", "$0.25")
    assert archive(old, folder).sessions == 1
    done = typed("ledger", "move", new, "--ledger", old, cwd=tmp_path)
    assert done.returncode == 0, done
    with Owner(new) as owner:
        assert owner.verify() == owner.verify(archives=False) == []
        assert owner.report("id=run-1").to_dict()["tools"]["calls"] == 1


def test_an_unsound_journal_is_not_archived(ledger, folder):
    with make_guard(ledger) as guard, guard.session("research", budget="$1.00", id="run-1") as session:
        session.charge("search", "$0.25")
    if ledger.startswith("postgres"):
        off, on = (f"ALTER TABLE entries {verb} TRIGGER entries_are_never_changed" for verb in ("DISABLE", "ENABLE"))
    else:
        off = "DROP TRIGGER entries_are_never_changed"
        [(on,)] = run(ledger, "SELECT sql FROM sqlite_master WHERE name = 'entries_are_never_changed'")
    run(ledger, off)
    run(ledger, "UPDATE entries SET at_ms = at_ms + 1 WHERE node_id = 'run-1'")
    run(ledger, on)
    with closing(open_store(ledger, verified=False)) as store:
        with pytest.raises(LedgerUnavailable, match="inconsistent, so nothing is archived: budget 'run-1': entry"):
            archiving.archive(store, LATER, folder, gone=())
    assert run(ledger, "SELECT count(*) FROM archived") == [(0,)]


def test_rows_of_processes_that_ended_long_ago_go_as_well(ledger, folder):
    gone = make_guard(ledger)
    never_closed = gone.session("s", budget="$1.00", id="kept")
    copy_context().run(never_closed.__enter__)
    gone.close()
    for _ in range(2):
        make_guard(ledger).close()
    time.sleep(0.01)
    with make_guard(ledger) as living, closing(open_store(ledger)) as store:
        before = store.marks("instance", "")
        assert len(before) == 4
        archive(ledger, folder, before_ms=min(row["since_ms"] for row in before.values()))
        assert store.marks("instance", "") == before
        archive(ledger, folder, before_ms=before[living.instance]["since_ms"])
        assert set(store.marks("instance", "")) == {living.instance, gone.instance}


def test_what_changes_while_the_file_is_written_stays(spent, folder, monkeypatch):
    wrote = archiving.write_archive

    def meanwhile(path, journals):
        size = wrote(path, journals)
        with make_guard(spent) as guard, guard.session("research", budget="$1.00", id="run-1") as session:
            session.charge("search", "$0.01")
        return size

    monkeypatch.setattr(archiving, "write_archive", meanwhile)
    assert archive(spent, folder).sessions == 1  # run-3
    assert {row[0] for row in run(spent, "SELECT node_id FROM archived")} == {"run-3", "run-3/tokens"}
    with Owner(spent) as owner:
        assert owner.verify() == []


def pays(ledger, _folder):
    with suppress(SessionTripped), make_guard(ledger) as guard:
        with guard.session("research", budget="$1.00", id="run-1") as session:
            session.charge("search", "$0.01")


def by_owner(act):
    def acts(ledger, _folder):
        with Owner(ledger) as owner:
            act(owner)

    return acts


ACTORS = {
    "a payment": pays,
    "a trip": by_owner(lambda owner: owner.trip("id=run-1")),
    "a reset": by_owner(lambda owner: owner.reset("id=run-3")),
    "a limit": by_owner(lambda owner: owner.set_budget("id=run-3", "$2.00")),
    "another archive": archive,
}


@pytest.mark.parametrize("order", list(permutations(ACTORS, 2)), ids=" and ".join)
def test_in_any_order_of_actors_while_the_file_is_written_the_ledger_adds_up(spent, folder, monkeypatch, order):
    wrote, left = archiving.write_archive, [ACTORS[name] for name in order]

    def meanwhile(path, journals):
        size = wrote(path, journals)
        while left:
            left.pop(0)(spent, folder)
        return size

    with Owner(spent) as owner:
        before = Decimal(owner.report("wallet").to_dict()["spent_total"])
    monkeypatch.setattr(archiving, "write_archive", meanwhile)
    archive(spent, folder)
    assert left == []
    archive(spent, folder)
    with Owner(spent) as owner:
        assert owner.verify() == owner.verify(archives=False) == []
        paid = Decimal("0.01") if "a payment" in order and order != ("a trip", "a payment") else 0
        assert Decimal(owner.report("wallet").to_dict()["spent_total"]) == before + paid
    named = {row[0] for row in run(spent, "SELECT DISTINCT file FROM archived")}
    assert named == {str(path) for path in folder.iterdir()}


def test_interrupted_before_the_ledger_was_written_nothing_is_lost(spent, folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(archiving, "_remove", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            archive(spent, folder)
    assert run(spent, "SELECT count(*) FROM archived") == [(0,)]
    with Owner(spent) as owner:
        assert owner.verify() == []
    assert archive(spent, folder).sessions == 3


def test_the_journal_gives_up_no_entry_that_is_in_no_file(spent, folder):
    with pytest.raises((sqlite3.Error, psycopg.Error), match="append-only"):
        run(spent, "DELETE FROM entries WHERE node_id = 'run-1'")
    archive(spent, folder)
    with pytest.raises((sqlite3.Error, psycopg.Error), match="append-only"):
        run(spent, "DELETE FROM entries WHERE node_id = 'run-4'")


def test_files_are_read_in_the_order_in_which_they_were_written(ledger, folder):
    """A session that goes on is in two files, and the second one begins with another session."""
    for names in (("daily",), ("another", "daily"), ("b", "a", "daily")):
        with make_guard(ledger, budget="$5.00") as guard:
            for name in names:
                with guard.session(name, budget="$1.00", id=name) as session:
                    session.charge("search", "$0.01")
        archive(ledger, folder)
    with Owner(ledger) as owner:
        assert owner.verify() == owner.verify(archives=False) == []
        assert owner.report("id=daily").to_dict()["tools"]["calls"] == 3


def test_a_purchase_that_may_be_asked_for_again_stays(ledger, folder):
    books = Books(ledger, wallet="$5.00", session=None)
    with closing(books.store):
        for node in ("done", "lost", "unshown", "young"):
            books.open(node, "$1.00")
            books.hold(node, "$0.10", node, chain_evidence=True, purchase_key=f"key of {node}")
            proof = None if node == "unshown" else f"eip155:84532/{node}/0"
            books.step(node, Capture(Nanos(100_000_000), Evidence.CHAIN, proof=proof))
            delivery = Delivery.LOST if node == "lost" else Delivery.DONE
            flying_ms = LATER if node == "young" else books.clock.now_ms
            books.change(
                lambda view, node=node, delivery=delivery, flying_ms=flying_ms: view.put_hold(
                    replace(view.known_hold(node), delivery=delivery, flying_since_ms=flying_ms)
                ),
                holds=(node,),
            )
            books.change(lambda view, node=node: close_node(view, node, Closing(f"opener-of-{node}")), nodes=(node,))
        moved = archiving.archive(books.store, LATER, folder, gone=())
        assert (moved.sessions, books.stored("done")) == (1, None)
        books.change(lambda view: close_purchase(view, "lost", PayAgain()), holds=("lost",))
        assert archiving.archive(books.store, LATER, folder, gone=()).sessions == 1
        assert {hold for hold in ("lost", "unshown", "young") if books.stored(hold)} == {"unshown", "young"}


def test_an_answer_that_is_lost_while_the_file_is_written_keeps_its_session(ledger, folder, monkeypatch):
    """It writes no entry."""
    books = Books(ledger, wallet="$5.00", session=None)
    books.open("s", "$1.00")
    books.hold("h", "$0.10", "s", chain_evidence=True, purchase_key="key")
    books.step("h", Capture(Nanos(100_000_000), Evidence.CHAIN, proof="eip155:84532/x/0"))
    books.change(lambda view: hand_over(view, (an_id("h"), 0)), holds=("h",))
    books.change(lambda view: close_node(view, "s", Closing("opener-of-s")), nodes=("s",))
    wrote = archiving.write_archive

    def meanwhile(path, journals):
        size = wrote(path, journals)
        books.change(lambda view: lose(view, (an_id("h"), 0)), holds=("h",))
        return size

    monkeypatch.setattr(archiving, "write_archive", meanwhile)
    with closing(books.store):
        assert archiving.archive(books.store, LATER, folder, gone=()).sessions == 0
        assert books.stored("h") is not None
    assert list(folder.iterdir()) == []


def test_two_archives_at_once_move_each_session_once(spent, folder, monkeypatch):
    wrote, inner = archiving.write_archive, []

    def meanwhile(path, journals):
        size = wrote(path, journals)
        if not inner:
            inner.append(True)
            inner.append(archive(spent, folder))
        return size

    monkeypatch.setattr(archiving, "write_archive", meanwhile)
    assert archive(spent, folder).sessions == 0
    assert inner[1].sessions == 3
    assert len(list(folder.iterdir())) == 1
    with Owner(spent) as owner:
        assert owner.verify() == []


def anchored(owner):
    return Anchor(owner.heads(), "", 0, "")


def test_an_anchor_from_before_still_holds(spent, folder):
    with Owner(spent) as owner:
        before = anchored(owner)
    with make_guard(spent) as guard, guard.session("research", budget="$1.00", id="run-1") as session:
        session.charge("search", "$0.01")
    archive(spent, folder)
    with Owner(spent) as owner:
        assert owner.verify(before) == owner.verify(before, archives=False) == []
        forged = [replace(h, hash="ab" * 32) if h.node_id == "run-1" else h for h in before.heads]
        [problem] = owner.verify(Anchor(tuple(forged), "", 0, ""))
        assert "run-1: entry" in problem
        only(folder).unlink()
        assert owner.verify(before, archives=False) == []


def test_the_command_tells_which_files_the_ledger_does_not_name(spent, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "_LEAST_AGE_S", -3_600)
    monkeypatch.setattr(commands, "DEFAULT_MEMORY_S", -10_000_000)
    (folder / "x402guard-20260101T000000-1.jsonl.gz").write_bytes(b"")
    done = typed("ledger", "archive", "--before", "0m", "--to", "old", "--ledger", spent, cwd=tmp_path)
    assert (done.returncode, "this ledger does not name: " in done.stdout) == (0, True), done
    assert done.stdout.count("x402guard-20260101T000000-1.jsonl.gz") == 1
    assert "x402guard-2026" in done.stdout


def test_a_folder_whose_name_is_no_text_is_refused_before_anything_is_written(spent, tmp_path):
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/\xff"))
    odd.mkdir()
    with pytest.raises(LedgerUnavailable, match="has a name that no ledger can keep"):
        archive(spent, odd)
    assert list(odd.iterdir()) == []


def test_a_long_ledger_goes_into_several_files(ledger, folder, monkeypatch):
    monkeypatch.setattr(archiving, "_NODES_A_FILE", 4)
    monkeypatch.setattr(archiving, "_IDS_AT_ONCE", 2)
    monkeypatch.setattr(archiving, "_ENTRIES_A_FILE", 1_000_000)
    with make_guard(ledger, budget="$5.00") as guard:
        for number in range(10):
            with guard.session("many", budget="$1.00", id=f"many-{number}") as session:
                for _ in range(3):
                    session.charge("search", "$0.01")
    moved = archive(ledger, folder)
    assert (moved.sessions, moved.holds, len(moved.files)) == (10, 30, 5)  # each has a budget of tokens beside it
    with Owner(ledger) as owner:
        assert owner.verify() == []
        assert owner.report("wallet").to_dict()["spent_total"] == "0.30"


def test_as_a_command(spent, folder, tmp_path, monkeypatch):
    def say(*arguments):
        return typed("ledger", "archive", *arguments, "--ledger", spent, cwd=tmp_path)

    monkeypatch.setattr(commands, "_LEAST_AGE_S", -3_600)
    monkeypatch.setattr(commands, "DEFAULT_MEMORY_S", -10_000_000)
    time.sleep(0.002)
    done = say("--before", "0m", "--to", "old")
    assert (done.returncode, "3 sessions with" in done.stdout) == (0, True), done
    done = say("--before", "0m", "--to", "old", "--json")
    assert json.loads(done.stdout) == {"sessions": 0, "entries": 0, "holds": 0, "bytes": 0, "files": [], "unnamed": []}
    assert "no session that ended before" in say("--before", "0m").stdout
    only(folder).unlink()
    done = typed("verify", "--ledger", spent, cwd=tmp_path)
    assert (done.returncode, "it is missing" in done.stdout) == (1, True), done
    assert typed("verify", "--without-archives", "--ledger", spent, cwd=tmp_path).returncode == 0


MISTAKES = {
    "too young": (("--before", "1d"), "is less than 2 days ago"),
    "no time": (("--before", "soon"), "--before: 'soon' is no time"),
    "no folder": (("--before", "90d", "--to", "nowhere"), "--to: nowhere is no folder"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_moves_nothing(spent, tmp_path, mistake):
    arguments, said = MISTAKES[mistake]
    done = typed("ledger", "archive", *arguments, "--ledger", spent, cwd=tmp_path)
    assert (done.returncode, said in " ".join(done.stderr.split())) == (2, True), done
    assert run(spent, "SELECT count(*) FROM archived") == [(0,)]


def test_a_folder_that_cannot_be_written_is_named(spent, folder):
    folder.rmdir()
    with pytest.raises(LedgerUnavailable, match=f"cannot write into the folder {folder}"):
        archive(spent, folder)
    assert run(spent, "SELECT count(*) FROM archived") == [(0,)]
