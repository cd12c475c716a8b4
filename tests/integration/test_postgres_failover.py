"""A second server takes over. What the first one had not sent it is gone, so real money asks for a synchronous one."""

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import httpx
import psycopg
import pytest

from tests.support import postgres
from tests.support.ended_buyer import begun, ended
from tests.support.ledger import Books
from tests.support.merchant import accept, client, make_guard, offer_response, required
from x402guard import (
    BudgetExhausted,
    ConfigError,
    Guard,
    LedgerUnavailable,
    Owner,
    PaymentRefused,
    Policy,
    SessionTripped,
)
from x402guard.kernel.rows import HoldKind
from x402guard.ledger.events import Void
from x402guard.ledger.owner import reset_node
from x402guard.stores import outbox, postgres_server

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.timeout(120)]

URL = "https://courts.example/opinion/42"
REAL = "eip155:8453"
OFFER = accept(
    network=REAL, asset="0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913", extra={"name": "USD Coin", "version": "2"}
)


def sells_for_test_money(request):
    paid = "payment-signature" in request.headers
    return httpx.Response(200, text="sold") if paid else offer_response(required(accept()))


def sells(request):
    paid = "payment-signature" in request.headers
    return httpx.Response(200, text="sold") if paid else offer_response(required(OFFER))


@pytest.fixture
def two_servers():
    """(the folder of a primary server, that of its streaming replica)."""
    if postgres.programs() is None:
        postgres.server()
    with postgres.a_folder() as first, postgres.a_folder() as second:
        postgres.make_cluster(first)
        postgres.start(first)
        try:
            postgres.copy(first, second)
            postgres.start(second)
            yield first, second
        finally:
            for folder in (second, first):
                if (folder / "data/postmaster.pid").exists():
                    postgres.stop(folder, "immediate")


@pytest.fixture
def one_server():
    """The folder of a server of this test alone."""
    if postgres.programs() is None:
        postgres.server()
    with postgres.a_folder() as folder:
        postgres.make_cluster(folder)
        postgres.start(folder)
        try:
            yield folder
        finally:
            postgres.stop(folder, "immediate")


def asked(url, **more):
    """What a guard says to an offer of real money."""
    policy = Policy(networks={REAL}, breaker=None)
    with make_guard(url, policy=policy, unsafe_no_chain=True, **more) as guard:
        with guard.session("s", budget="$1.00") as session, client(session, sells) as http:
            try:
                return http.get(URL).status_code
            except PaymentRefused as refused:
                return refused.rule


def with_rights(folder, role):
    """The URL of a ledger that the superuser has made, for a *role*: ``agents`` gets the rights of the page about a fleet."""
    url = postgres.url(folder, "postgres")
    Guard(ledger=url).close()
    if role == "owner":
        return url
    page = (Path(__file__).parents[2] / "docs/how-to/a-fleet.md").read_text()
    [rights] = [block for block in re.findall(r"```sql\n(.*?)```", page, re.DOTALL) if "GRANT" in block]
    postgres.say(folder, rights)
    return url.replace("owner@", f"{role}@")


@pytest.mark.parametrize("role", ["owner", "agents"])
def test_real_money_asks_for_a_synchronous_replica_and_a_lone_server_has_nothing_to_lose(two_servers, role):
    """PostgreSQL shows a role without more rights that there is a replica, and not how it is."""
    first, second = two_servers
    url = with_rights(first, role)
    postgres.say(first, "SELECT count(*) FROM pg_stat_replication", until=(1,))
    assert asked(url) == "async_failover"
    assert asked(url, unsafe_async_failover=True) == 200
    postgres.say(first, "ALTER SYSTEM SET synchronous_standby_names = '*'")
    postgres.say(first, "SELECT pg_reload_conf()")
    postgres.say(first, "SELECT current_setting('synchronous_standby_names')", until=("*",))
    assert asked(url) == 200
    postgres.say(first, "ALTER SYSTEM RESET synchronous_standby_names")
    postgres.say(first, "SELECT pg_reload_conf()")
    postgres.stop(second)
    postgres.say(first, "SELECT count(*) FROM pg_stat_replication", until=(0,))
    assert asked(url) == 200


@pytest.mark.parametrize(
    "role_says", ["", "ALTER ROLE owner SET client_min_messages = error"], ids=["as usual", "silent"]
)
def test_a_commit_that_no_replica_has_is_none_whatever_the_role_wants_to_hear(one_server, role_says):
    """The server says by a warning alone that a commit whose wait was cancelled is on no replica."""
    if role_says:
        postgres.say(one_server, role_says)
    url = postgres.url(one_server, "postgres")
    with make_guard(url) as guard, guard.session("s", budget="$1.00") as session, ThreadPoolExecutor(1) as pool:
        postgres.say(one_server, "ALTER SYSTEM SET synchronous_standby_names = 'another'")
        postgres.say(one_server, "SELECT pg_reload_conf()")
        says = "SELECT current_setting('synchronous_standby_names')"
        while session.shell.store._writer.run(says) != [
            ("another",)
        ]:  # each backend reads its settings when it comes to it
            time.sleep(0.02)
        charged = pool.submit(session.charge, "search", "$0.10")
        while not charged.done():
            postgres.say(one_server, "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
            time.sleep(0.05)
        with pytest.raises(LedgerUnavailable):
            charged.result()
        postgres.say(one_server, "ALTER SYSTEM RESET synchronous_standby_names")
        postgres.say(one_server, "SELECT pg_reload_conf()")
        postgres.say(one_server, "SELECT current_setting('synchronous_standby_names')", until=("",))


def test_a_replica_serves_reports_and_takes_no_payment(two_servers):
    first, second = two_servers
    with make_guard(postgres.url(first, "postgres")) as guard, guard.session("s", budget="$1.00") as session:
        session.charge("search", "$0.10")
    theirs = postgres.url(second, "postgres")
    postgres.catch_up(second, first)
    done = subprocess.run(
        [sys.executable, "-m", "x402guard", "report", "s", "--ledger", theirs],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, "0.10" in done.stdout) == (0, True), done.stderr
    assert re.fullmatch(r"read from a replica, as of 2\d{3}-\d\d-\d\d \d\d:\d\d:\d\d UTC\n", done.stderr)
    with Owner(theirs, read_only=True) as owner, Owner(postgres.url(first, "postgres")) as there:
        assert abs(owner.as_of - time.time()) < 60
        assert there.as_of is None
        assert owner.verify() == []
    for command in ("verify", "sessions"):  # the guard has left a file on this machine, for who may write
        done = subprocess.run(
            [sys.executable, "-m", "x402guard", command, "--ledger", theirs],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
    with pytest.raises(Exception, match="read-only transaction") as caught:
        make_guard(theirs)
    assert "primary server" in caught.value.advice


def test_a_replica_that_takes_over_without_the_newest_payments_is_found_out_before_the_next_one(two_servers):
    """$1.00 less than all: without that, the lost payments could be paid a second time within the limit."""
    first, second = two_servers
    url = f"postgresql://owner@/postgres?host={first},{second}&target_session_attrs=read-write"
    with (
        pytest.raises(LedgerUnavailable, match="has lost the newest entries"),  # nor can the end be written
        make_guard(url, unsafe_async_failover=True) as guard,
        guard.session("s", budget="$1.00") as session,
    ):
        session.charge("search", "$0.10")
        postgres.catch_up(second, first)
        postgres.stop(second)
        session.charge("search", "$0.60")
        postgres.stop(first, "immediate")
        postgres.start(second)
        postgres.say(second, "SELECT pg_promote()")
        with pytest.raises(LedgerUnavailable, match="has lost the newest entries") as caught:
            session.charge("search", "$0.60")
        assert "end the agents" in str(caught.value)
        with pytest.raises(LedgerUnavailable, match="has lost the newest entries"):
            session.charge("search", "$0.10")


@pytest.fixture
def failover(two_servers):
    """(URL, a function after which the second server has taken over, without what came after it was told to stop)."""
    first, second = two_servers

    def stop():
        postgres.catch_up(second, first)
        postgres.stop(second)

    def take_over():
        postgres.stop(first, "immediate")
        postgres.start(second)
        postgres.say(second, "SELECT pg_promote()")

    return f"postgresql://owner@/postgres?host={first},{second}&target_session_attrs=read-write", stop, take_over


def test_what_a_process_remembers_for_a_failover_is_bounded(monkeypatch, url):
    monkeypatch.setattr(outbox, "_MOST_KEPT", 3)
    books = Books(url, wallet="$5.00")
    recent = books.store.outbox

    def known():
        return [written.hold.id for part in recent.parts(books.clock.now_ms) for written in part]

    for number in range(5):
        books.hold(f"h{number}", "$0.01", kind=HoldKind.TOOL)
    assert known() == ["h2", "h3", "h4"]
    books.step("h2", Void("not used"))
    assert known() == ["h3", "h4"]
    books.clock.tick(21_599)
    books.hold("h5", "$0.01", kind=HoldKind.TOOL, deadline_s=50_000)
    assert known() == ["h3", "h4", "h5"]
    books.clock.tick(2)
    assert known() == ["h5"]
    books.hold("h6", "$0.01", kind=HoldKind.TOOL)
    assert known() == ["h5", "h6"]
    monkeypatch.setattr(outbox, "_AT_ONCE", 1)
    assert [len(part) for part in recent.parts(books.clock.now_ms)] == [1, 1]
    books.close()


@pytest.mark.parametrize("hours", [-7, 7])
def test_a_server_whose_clock_is_hours_off_makes_nothing_old(url, hours):
    books = Books(url, wallet="$5.00")
    books.hold("h1", "$0.01", kind=HoldKind.TOOL)
    books.store._server_clock.see(books.clock.now_ms + hours * 3_600_000)
    [[kept]] = books.store.outbox.parts(books.store._oldest_ms())
    assert kept.hold.id == "h1"
    books.close()


def test_a_commit_whose_replica_an_administrator_has_not_waited_for_is_no_answer(url, monkeypatch):
    monkeypatch.setattr(postgres_server, "_WAITS_FOR_A_REPLICA", "exec_stmt_raise")
    books = Books(url)
    writer = books.store._writer
    with pytest.raises(psycopg.OperationalError, match="has ended the wait"):
        writer.run("DO $$ BEGIN RAISE WARNING 'the commit is made here alone'; END $$")
    assert writer.run("SELECT 1") == [(1,)]
    books.close()


def test_who_has_written_no_hold_trips_the_wallet_as_well_and_once(url):
    books, other = Books(url, wallet="$5.00"), Books(url, session=None)
    books.store.outbox.lasts = ({"node_id": "s", "seq": 99, "hash": "ab" * 32},)
    for _ in range(2):
        with pytest.raises(LedgerUnavailable, match="has lost the newest entries"):
            books.hold("h", "$0.01")
        assert (other.node("wallet").state, other.node("wallet").terminated_by) == ("tripped", "rolled_back")
        assert [entry.event for entry in other.store.tail("wallet", 0)].count("trip") == 1
    other.change(lambda view: reset_node(view, "wallet", "me"), nodes=("wallet",))
    with pytest.raises(LedgerUnavailable, match="has lost the newest entries"):
        books.hold("h", "$0.01")
    assert other.node("wallet").state == "open"
    books.close()
    other.close()


def test_what_was_lost_counts_again_and_the_wallet_is_tripped_for_all(failover):
    """$1.00, of which $0.60 and two payments are lost: another process would have spent them a second time."""
    url, stop, take_over = failover
    guard = make_guard(url, budget="$1.00", unsafe_async_failover=True)
    other = make_guard(url, budget="$1.00", unsafe_async_failover=True)
    with guard.session("s", budget="$1.00", id="s") as session:
        session.charge("search", "$0.10")
    stop()
    with guard.session("s", budget="$1.00", id="s") as session, client(session, sells_for_test_money) as http:
        session.charge("search", "$0.20")
        assert http.get(URL).status_code == 200
    late = guard.session("late", budget="$1.00", id="late")
    with pytest.raises(LedgerUnavailable, match="has lost the newest entries"), late:
        late.charge("search", "$0.30")
        take_over()
        with pytest.raises(LedgerUnavailable, match="has lost the newest entries"):
            late.charge("search", "$0.01")
    with Owner(url) as owner:
        rows = {row.name: row for row in owner.sessions()}
        assert (rows["wallet"].state, rows["wallet"].terminated_by) == ("tripped", "rolled_back")
        counted = {name: (row.spent, row.held) for name, row in rows.items()}
        assert counted == {"wallet": (Decimal("0.60"), Decimal("0.01")), "s": (Decimal("0.30"), Decimal("0.01"))}
        [hold] = owner.holds()
        assert hold.doubt == "the ledger's server has lost it"
        assert owner.verify() == []
    with other.session("o", budget="$1.00") as mine, pytest.raises(SessionTripped, match="rolled_back"):
        mine.charge("search", "$0.60")
    with Owner(url) as owner:
        with pytest.raises(ConfigError, match="can be taken until"):
            owner.reset("wallet")
        owner.reset("wallet", unsafe_early=True)
    with (
        make_guard(url, budget="$1.00", unsafe_async_failover=True) as again,
        again.session("n", budget="$1") as session,
    ):
        with pytest.raises(BudgetExhausted):
            session.charge("search", "$0.60")
        session.charge("search", "$0.30")
    for each in (guard, other):
        with suppress(LedgerUnavailable):
            each.close()


@pytest.mark.parametrize("stage", ["sent", "closed"])
def test_what_a_killed_process_had_signed_counts_after_another_server_has_taken_over(failover, stage):
    url, stop, take_over = failover
    with begun(url, stage) as process:
        stop()
        ended(process)
    take_over()
    make_guard(url, budget="$1.00", unsafe_async_failover=True).close()
    with Owner(url) as owner:
        rows = {row.name: row for row in owner.sessions()}
        assert (rows["wallet"].state, rows["wallet"].terminated_by) == ("tripped", "rolled_back")
        assert (rows["run"].spent, rows["run"].held) == (Decimal("0.35"), Decimal("0.01"))
        assert owner.verify() == []
