"""The owner in Python: everything that the command line shows and does, and nothing of it in an agent's hands."""

import json
import re
import sqlite3
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from tests.support.command_line import typed
from tests.support.ledger import Clock
from tests.support.merchant import KEY, Shop, client, make_guard
from x402guard import ConfigError, Guard, LedgerUnavailable, Owner, Policy, ReportKey, Session, SessionTripped
from x402guard.stores import open_store
from x402guard.stores.read_only import ReadOnlyStore


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'spend.db'}"


@pytest.fixture
def agent(url):
    with make_guard(url, budget="$5.00") as guard, guard.session("research", budget="$1.00", id="run") as session:
        session.charge("serp", "$0.30")
        yield session


def test_the_owner_sees_what_is_there(url, agent):
    with Owner(url) as owner, agent.hold("render", up_to="$0.20"):
        rows = {row.id: row for row in owner.sessions()}
        assert (rows["run"].spent, rows["run"].held, rows["run"].remaining) == (
            Decimal("0.30"), Decimal("0.20"), Decimal("0.50"),
        )  # fmt: skip
        assert rows["wallet"].budget == Decimal("5.00")
        assert rows["run"].to_dict()["spent"] == "0.30"
        [held] = owner.holds()
        assert (held.session, held.amount, held.request, held.in_doubt) == ("run", Decimal("0.20"), "render", False)
        assert owner.report().to_dict()["id"] == owner.report("research").to_dict()["id"] == "run"
        assert owner.report("wallet").to_dict()["id"] == "wallet"
        assert owner.predict("research").sessions <= 1
        assert owner.verify() == []
        assert owner.size()[1] == len(rows) + 1  # and the tokens of the session


def test_the_owner_trips_resets_and_sets_limits(url, agent):
    with Owner(url, by="ada") as owner:
        with agent.hold("render", up_to="$0.20") as job:
            [out] = owner.trip("research", "it talks to strangers")
            assert out.id == job.hold_id
            with pytest.raises(SessionTripped, match="it talks to strangers"):
                agent.charge("serp", "$0.01")
        assert owner.reset("run").state == "open"
        agent.charge("serp", "$0.01")
        change = owner.set_budget("run", "$2.00")
        assert (change.was, change.limit, change.old_to_new()) == (Decimal("1.00"), Decimal("2.00"), "$1.00 → $2.00")
        with pytest.raises(ConfigError, match=r"limit: \$2.00 → \$0.10 stops session run \(research\).* give --yes"):
            owner.set_budget("run", "$0.10")
        assert owner.budget("run").budget == Decimal("2.00")
        assert owner.set_budget("run", "$0.10", stops=True).state == "tripped"
        words = {event["event"]: event.get("by") for event in owner.report("run").to_dict()["events"]}
        assert (words["reset"], words["limit"]) == ("ada", "ada")


def test_the_owner_answers_what_an_agent_asks(url):
    policy = Policy()
    with make_guard(url, policy=policy, approver="queue") as guard, guard.session("s", budget="$1.00") as session:
        answers = []

        def sends():
            try:
                answers.append(session.charge("send_email", "$0.01").state)
            except Exception as error:
                answers.append(type(error).__name__)

        with Owner(url, by="ada") as owner:
            for answer in (owner.allow, owner.deny):
                thread = threading.Thread(target=sends)
                thread.start()
                ends_s = time.monotonic() + 10
                while not owner.approvals() and time.monotonic() < ends_s:
                    time.sleep(0.01)
                [question] = owner.approvals()
                assert (question.what, question.yes) == ("send_email", "0 of 1")
                with pytest.raises(ConfigError, match="no question has the id 'zz'"):
                    owner.allow("zz")
                answer(question.id)
                thread.join(20)
    assert answers == ["captured", "ApprovalDenied"]


def test_the_owner_forgives_and_reconciles(url):
    shop = Shop(paid=TimeoutError("gone"))
    with make_guard(url) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(Exception, match="may be taken"):
            client(session, shop).get("https://shop.example/x")
    with Owner(url) as owner:
        [held] = owner.holds()
        assert owner.forgive(held.id[:12]).delivery == "forgiven"
        with pytest.raises(ConfigError, match=f"'{held.id}' keeps no purchase open"):
            owner.forgive(held.id)
        assert owner.reconcile().asked == 0  # no chain is set
        with pytest.raises(ConfigError, match="a cancellation needs a signature; set X402GUARD_PRIVATE_KEY"):
            owner.cancel(held.id)


def test_a_key_that_the_owner_reads_is_there_for_the_guard(url, agent, monkeypatch):
    """Reading the settings takes the key out of the environment."""
    monkeypatch.setenv("X402GUARD_PRIVATE_KEY", KEY)
    monkeypatch.setenv("X402GUARD_LEDGER", "memory://")
    Owner(url).close()
    with Guard.from_env() as guard:
        assert guard.shell.signer is not None


@pytest.mark.parametrize("name", ["set_budget", "reset", "allow", "deny", "forgive", "verify", "approvals"])
def test_an_agents_guard_can_do_none_of_it(name):
    assert hasattr(Owner, name)
    assert not hasattr(Guard, name)
    assert not hasattr(Session, name)


@pytest.mark.parametrize("given", ["spend.db", "./spend.db", Path("spend.db"), "sqlite:///spend.db", None])
def test_a_ledger_is_named_by_url_or_path(given, url, agent, monkeypatch):
    monkeypatch.setenv("X402GUARD_LEDGER", "spend.db")
    with Owner(given) as owner:
        assert owner.budget("run").spent == Decimal("0.30")


def test_a_ledger_that_is_not_there_is_not_made_by_looking(tmp_path):
    with pytest.raises(
        ConfigError, match=r"no ledger yet at none\.db; `x402guard budget set wallet AMOUNT --new` makes it"
    ):
        Owner("none.db")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_mistyped_is_answered_by_the_one_that_is_meant(url):
    with make_guard(url) as guard:
        for _ in range(3):
            guard.session("research", budget="$1.00").close()
    with Owner(url) as owner:
        for typed, said in (
            ("wlalet", "did you mean 'wallet'?"),
            ("reserch", "did you mean 'research'?"),
            ("q", "latest: research"),
        ):
            with pytest.raises(
                ConfigError, match=re.escape(f"there is no session {typed!r} in this ledger; {said}") + "$"
            ):
                owner.trip(typed)


# -- a ledger that may only be read -----------------------------------------------------------------------------------------


def spends(url):
    with make_guard(url, budget="$5.00") as guard, guard.session("research", budget="$1.00", id="run") as session:
        session.charge("serp", "$0.30")


def test_a_ledger_can_be_looked_at_and_is_not_changed(url, tmp_path):
    spends(url)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with Owner(url, read_only=True) as owner:
        assert owner.budget("run").spent == Decimal("0.30")
        assert owner.report("run").to_dict()["spent"] == "0.30"
        assert owner.verify() == []
        assert (owner.holds(), owner.approvals()) == ([], [])
        for command in (lambda: owner.trip("run"), lambda: owner.set_budget("run", "$9"), lambda: owner.reset("run")):
            with pytest.raises((LedgerUnavailable, ConfigError)):
                command()
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_what_an_agent_writes_is_seen_by_who_only_looks(url):
    spends(url)
    with Owner(url, read_only=True) as owner:
        assert owner.budget("run").spent == Decimal("0.30")
        with make_guard(url, budget="$5.00") as guard, guard.session("research", id="run") as session:
            session.charge("serp", "$0.05")
            assert owner.budget("run").spent == Decimal("0.35")
        assert owner.budget("run").spent == Decimal("0.35")


def test_a_file_that_this_user_may_not_write_is_looked_at(url, agent, monkeypatch):
    monkeypatch.setattr("x402guard.guard.arguments.os.access", lambda path, mode: False)
    with Owner(url) as owner:
        assert owner.budget("run").spent == Decimal("0.30")
        with pytest.raises(LedgerUnavailable, match="is open to be read only"):
            owner.trip("run")


def test_what_is_no_ledger_is_not_read(tmp_path):
    (tmp_path / "notes.db").write_text("notes")
    with pytest.raises(LedgerUnavailable):
        open_store("notes.db", read_only=True)
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(LedgerUnavailable, match="is a database of another program"):
        ReadOnlyStore(tmp_path / "other.db")


# -- finding a session among many ---------------------------------------------------------------------------------------------


@pytest.fixture
def many(url):
    clock = Clock()
    store = open_store(url, clock_ms=clock)
    with make_guard(store) as guard:
        team = guard.budget("team", "$5.00")
        with team.session("court-1", budget="$1.00", id="c1") as session:
            session.child("reader", budget="$0.10").close()
        clock.tick(86_400)
        with team.session("court-2", budget="$1.00", id="c2") as session:
            session.trip("why")
        guard.session("other", budget="$1.00", id="o")
    store.close()
    return clock


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, ["wallet", "team", "court-1", "reader", "court-2", "other"]),
        ({"name": "court-*"}, ["court-1", "court-2"]),
        ({"state": "tripped"}, ["court-2"]),
        ({"state": "closed"}, ["court-1", "reader"]),
        ({"parent": "team"}, ["team", "court-1", "reader", "court-2"]),
        ({"parent": "c1"}, ["court-1", "reader"]),
        ({"limit": 2}, ["court-2", "other"]),
        ({"name": "none"}, []),
    ],
)
def test_sessions_are_found_by_name_state_and_parent(url, many, asked, found):
    with Owner(url) as owner:
        assert [row.name for row in owner.sessions(**asked)] == found


def test_sessions_are_found_by_when_they_were_opened(url, many):
    since = datetime.fromtimestamp(many() / 1000 - 3600, UTC)
    with Owner(url) as owner:
        assert [row.id for row in owner.sessions(since=since)] == ["c2", "o"]


def test_the_command_shows_a_tree(url, many, tmp_path):
    lines = typed("sessions", "--ledger", "spend.db", cwd=tmp_path).stdout.splitlines()
    shown = [(len(line) - len(line.lstrip()), line.split()[1]) for line in lines[1:]]
    assert shown == [(0, "wallet"), (2, "team"), (4, "court-1"), (6, "reader"), (4, "court-2"), (2, "other")]
    closed = typed("sessions", "--state", "closed", "--json", "--ledger", "spend.db", cwd=tmp_path).stdout
    assert [(row["name"], row["parent"]) for row in json.loads(closed)] == [
        ("court-1", "budget:team"),
        ("reader", "c1"),
    ]
    assert "24h" in typed("sessions", "--since", "soon", "--ledger", "spend.db", cwd=tmp_path).stderr
    assert "--state: 'gone' is not one of" in typed("sessions", "--state", "gone", cwd=tmp_path).stderr
    assert (
        typed("sessions", "--since", "2099-01-01", "--ledger", "spend.db", cwd=tmp_path).stdout == "no session fits\n"
    )


@pytest.mark.parametrize("at", [datetime(2026, 11, 26), "2026-11-26", 1_800_000_000, True])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda owner, at: owner.report("run", since=at), "since"),
        (lambda owner, at: owner.report("run", until=at), "until"),
        (lambda owner, at: owner.sessions(since=at), "since"),
        (lambda owner, at: owner.captures("run", until=at), "until"),
    ],
    ids=["report since", "report until", "sessions since", "captures until"],
)
def test_a_time_without_a_zone_is_refused(url, agent, call, name, at):
    """It would be another moment on another machine, and another one than the same text on the command line."""
    with Owner(url) as owner, pytest.raises(ConfigError, match=f"{name}: .* is no time with a time zone"):
        call(owner, at)


def test_a_wallet_without_a_session_says_so(url):
    make_guard(url, budget="$5.00").close()
    done = typed("report", "--ledger", url, cwd=".")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2, "x402guard: session: no session has run in this ledger yet; the wallet itself is: wallet"
    )  # fmt: skip
    assert typed("report", "wallet", "--ledger", url, cwd=".").returncode == 0


@pytest.mark.parametrize("content", [b"budget = $20.00\n", b"\xff\xfe", b"["])
def test_the_doctor_names_a_settings_file_that_cannot_be_read(content, tmp_path):
    (tmp_path / "x402guard.toml").write_bytes(content)
    done = typed("doctor", cwd=tmp_path)
    assert done.returncode == 1
    assert "PROBLEM  settings   x402guard.toml: cannot be read: " in done.stdout.replace(f"{tmp_path}/", "")
    assert done.stderr == ""


def test_a_settings_file_may_name_its_ledger_by_a_path(tmp_path):
    (tmp_path / "x402guard.toml").write_text('ledger = "./spend.db"\n')
    assert typed("policy", "check", "x402guard.toml", cwd=tmp_path).returncode == 0


MISTAKEN = {
    "trip": ("session", lambda owner, _run, what: owner.trip(what)),
    "reset": ("session", lambda owner, _run, what: owner.reset(what)),
    "forgive": ("hold", lambda owner, _run, what: owner.forgive(what)),
    "predict": ("name", lambda owner, _run, what: owner.predict(what)),
    "sessions": ("name", lambda owner, _run, what: owner.sessions(name=what)),
    "verify": ("against", lambda owner, _run, what: owner.verify(what)),
    "verify_counters": ("policy", lambda owner, _run, what: owner.verify_counters(what)),
    "sign": ("report", lambda _owner, _run, what: ReportKey.new().sign(what)),
    "bind": ("bind", lambda _owner, run, what: run.bind(what)),
}


@pytest.mark.parametrize("name", MISTAKEN)
@pytest.mark.parametrize("what", [None, 5, b"run", []], ids=repr)
def test_what_names_nothing_is_a_typed_error_and_changes_nothing(url, agent, name, what):
    """None as well: a variable that was never set would trip or reset the session that ran last."""
    setting, call = MISTAKEN[name]
    with Owner(url) as owner:
        before = owner.size()
        if what is None and name in ("sessions", "verify"):
            call(owner, agent, what)
        else:
            with pytest.raises(ConfigError, match=f"^{setting}: "):
                call(owner, agent, what)
        assert owner.size() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this machine has no /dev/full")
@pytest.mark.parametrize("words", [("sessions",), ("sessions", "--json"), ("report", "wallet"), ("verify",)])
def test_an_output_that_cannot_be_written_is_said_in_two_lines(url, agent, words):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "x402guard", *words, "--ledger", url],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first.startswith("x402guard: the output cannot be written: ")
    assert second.startswith("The command itself may be done")
