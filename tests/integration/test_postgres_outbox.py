"""A server loses commits, and the process that wrote them has ended: the next one on its machine enters them again."""

import gc
from contextlib import suppress
from decimal import Decimal
from pathlib import Path

import psycopg
import pytest

from tests.support import postgres
from tests.support.ended_buyer import FOLLOWS, STAGES, begun, books_of, ended, files, opens_a_guard, opens_as_owner
from tests.support.ledger import Books, usd
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import BudgetExhausted, LedgerUnavailable, Owner, SessionTripped
from x402guard.kernel.rows import HoldKind
from x402guard.ledger.lost import count_again
from x402guard.stores import outbox, outbox_file

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.timeout(120)]


def ends_and_is_lost(url, stage, how="kill"):
    """A process books $0.05, then $0.30 and at most $0.01 more, and ends; the server loses what came second. What it said."""
    process = begun(url, stage, how)
    postgres.keep_copy(url)
    said = ended(process)
    postgres.lose_since(url)
    return said


def resets(url):
    with Owner(url) as owner:
        owner.reset("wallet", unsafe_early=True)


TRIPPED, OPEN = ("tripped", "rolled_back"), ("open", None)
# Each stage with each way to end; each of them with each that follows.
CASES = [
    pytest.param(how, stage, FOLLOWS[(number + row) % len(FOLLOWS)], id=f"{how}-{stage}")
    for row, how in enumerate(("kill", "exit"))
    for number, stage in enumerate(STAGES)
]


@pytest.mark.parametrize(("how", "stage", "follows"), CASES)
def test_what_an_ended_process_had_signed_counts_again(url, stage, how, follows):
    """$1.00, of which $0.31 are lost: who comes next would have spent them a second time."""
    said = ends_and_is_lost(url, stage, how)
    assert (len(said) > 0) is (stage != "authorized"), said
    follows(url)
    assert books_of(url) == (TRIPPED, (Decimal("0.35"), Decimal("0.01")))
    with make_guard(url) as guard, guard.session("o", budget="$1.00") as other, pytest.raises(SessionTripped):
        other.charge("search", "$0.01")
    resets(url)
    with make_guard(url) as guard, guard.session("n", budget="$1.00") as session:
        with pytest.raises(BudgetExhausted):
            session.charge("search", "$0.65")
        session.charge("search", "$0.64")
    assert len(files()) == 1


@pytest.mark.parametrize("stage", STAGES)
def test_where_nothing_is_lost_nothing_is_tripped_and_one_file_stays(url, stage):
    ended(begun(url, stage))
    [left] = files()
    before = books_of(url)
    for _ in range(2):
        opens_a_guard(url)
        assert books_of(url) == before
    [kept] = files()
    assert kept != left
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_another_machine_has_no_such_file_and_a_living_process_keeps_its_own(url, tmp_path):
    """Its own file is locked; it finds out itself, and so does the next process on the machine of the ended one."""
    ended(begun(url, "answered", XDG_STATE_HOME=str(tmp_path)))
    living = begun(url, "answered")
    postgres.keep_copy(url)
    ended(other := begun(url, "closed", XDG_STATE_HOME=str(tmp_path)))
    assert other.returncode == 0
    opens_a_guard(url)
    assert books_of(url)[0] == OPEN
    postgres.lose_since(url)
    opens_a_guard(url)
    assert books_of(url)[0] == OPEN, "nothing that was lost was written on this machine"
    living.kill()
    living.communicate()


def test_two_ended_processes_are_entered_each_and_the_wallet_is_tripped_once(url):
    first, second = begun(url, "sent"), begun(url, "answered")
    postgres.keep_copy(url)
    ended(first)
    ended(second)
    postgres.lose_since(url)
    opens_a_guard(url)
    state, (spent, held) = books_of(url)
    assert (state, spent, held) == (TRIPPED, Decimal("0.70"), Decimal("0.01")), "one purchase, presented again"
    resets(url)
    opens_a_guard(url)
    assert books_of(url)[0] == OPEN


@pytest.mark.parametrize("writes", [False, True], ids=["idle", "has written"])
@pytest.mark.parametrize("lost", [0, 1])
def test_who_has_taken_two_files_over_finds_out_what_is_lost_of_each(url, lost, writes):
    """All of them were there as it opened. The server that takes over then has those of one process alone."""
    ends = [begun(url, "closed"), begun(url, "answered")][:: 1 if lost else -1]
    ended(ends[0])
    postgres.keep_copy(url)
    ended(ends[1])
    said = []
    with suppress(LedgerUnavailable), make_guard(url) as guard:  # which closes a session that is lost
        if writes:
            with guard.session("before", budget="$0.01", id="before") as session:
                session.charge("search", "$0.01")
        postgres.lose_since(url)
        try:
            with guard.session("n", budget="$1.00") as session:
                session.charge("search", "$0.05")
        except LedgerUnavailable as error:
            said.append(str(error))
    assert len(said) == 1, "it is refused"
    assert books_of(url)[0] == TRIPPED


@pytest.mark.parametrize("files_left", [1, 2])
def test_a_connection_that_was_cut_is_no_error_of_the_next_change(url, files_left):
    for process in [begun(url, "answered") for _ in range(files_left)]:
        ended(process)
    with make_guard(url) as guard:
        postgres.cut(url)
        with guard.session("n", budget="$0.10") as session:
            postgres.cut(url)
            session.charge("search", "$0.01")


def test_a_moment_on_a_server_that_is_behind_is_no_end_of_looking(url):
    """A standby cannot be written; back on the primary, the next loss has to be found out as before."""
    database = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
    with suppress(LedgerUnavailable), make_guard(url, budget="$1.00", unsafe_async_failover=True) as guard:
        session = guard.session("s", budget="$1.00", id="s")
        postgres.keep_copy(url, "behind")
        session.charge("search", "$0.01")
        postgres.keep_copy(url)
        postgres.lose_since(url, "behind")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
        postgres.cut(url)
        with pytest.raises(LedgerUnavailable):
            session.charge("search", "$0.02")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute(f"ALTER DATABASE {database} RESET default_transaction_read_only")
        postgres.lose_since(url)
        postgres.cut(url)
        session.charge("search", "$0.30")
        postgres.lose_since(url)
        with pytest.raises(LedgerUnavailable):
            session.charge("search", "$0.40")
    with Owner(url, read_only=True) as owner:
        wallet = next(row for row in owner.sessions() if row.name == "wallet")
        assert (wallet.state, wallet.terminated_by) == TRIPPED


@pytest.mark.parametrize("hours", [7, -7])
@pytest.mark.parametrize("loses", ["what came after", "all of it"])
def test_a_clock_that_is_set_right_after_a_process_began_makes_nothing_old(url, hours, loses):
    if loses == "all of it":
        opens_a_guard(url)
        postgres.keep_copy(url)
    process = begun(url, "answered", clock_behind_h=hours)
    if loses == "what came after":
        postgres.keep_copy(url)
    ended(process)
    postgres.lose_since(url)
    opens_a_guard(url)
    with Owner(url, read_only=True) as owner:
        wallet = next(row for row in owner.sessions() if row.name == "wallet")
        assert owner.verify() == []
    assert (wallet.state, wallet.terminated_by, wallet.spent, wallet.held) == (
        *TRIPPED,
        Decimal("0.35"),
        Decimal("0.01"),
    )


def test_a_retry_presents_the_lost_payment_again(url):
    """The second process asks for the same thing; its payment is the one that was signed before."""
    [nonce] = ends_and_is_lost(url, "sent")
    opens_a_guard(url)
    resets(url)
    shop = Shop()
    with make_guard(url) as guard, guard.session("run", budget="$1.00", id="run") as session:
        with client(session, shop) as http:
            assert http.get(URL).status_code == 200
    assert [f"{each:064x}" for each in shop.nonces] == [nonce]


def test_a_second_loss_is_found_out_as_the_first_one(url):
    """The wrong backup was brought back, then another one; or a second server is gone."""
    process = begun(url, "answered")
    postgres.keep_copy(url)
    ended(process)
    for _ in range(3):
        postgres.lose_since(url)
        opens_a_guard(url)
        assert books_of(url) == (TRIPPED, (Decimal("0.35"), Decimal("0.01")))
        resets(url)
        opens_a_guard(url)
        assert books_of(url)[0] == OPEN
    assert len(files()) == 1


def test_a_second_loss_is_found_out_by_a_living_process_that_has_entered_the_first_one(url):
    books = Books(url, wallet="$1.00")
    postgres.keep_copy(url)
    books.hold("h1", "$0.10", kind=HoldKind.TOOL)
    other = Books(url, session=None)
    for _ in range(3):
        postgres.lose_since(url)
        for _ in range(2):
            with pytest.raises(LedgerUnavailable, match="has lost the newest entries"):
                books.hold("h2", "$0.10", kind=HoldKind.TOOL)
            assert (other.node("wallet").terminated_by, other.balances("s")[1]) == ("rolled_back", usd("$0.10"))
    books.close()
    other.close()


def test_a_full_disk_ends_no_process_and_lets_a_loss_be_entered_once(url, monkeypatch):
    ends_and_is_lost(url, "answered")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("x402guard.stores.outbox_file.tempfile.mkstemp", full)
    opens_a_guard(url)
    assert books_of(url) == (TRIPPED, (Decimal("0.35"), Decimal("0.01")))
    resets(url)
    opens_a_guard(url)
    assert books_of(url)[0] == OPEN


@pytest.mark.parametrize("step", range(1, 12))
def test_ctrl_c_while_files_are_taken_over_leaves_all_that_they_say(url, monkeypatch, step):
    """Two processes have ended, nothing is lost yet; the next one that opens is interrupted at each call; then it is lost."""
    first = Books(url, wallet="$1.00")
    postgres.keep_copy(url)
    second = Books(url, session=None)
    first.hold("h1", "$0.10", kind=HoldKind.TOOL)
    second.hold("h2", "$0.20", kind=HoldKind.TOOL)
    first.close()
    second.close()
    calls = []

    def may_break(call):
        def called(*given, **more):
            calls.append(call)
            if len(calls) == step:
                raise KeyboardInterrupt
            return call(*given, **more)

        return called

    with monkeypatch.context() as patch:
        for module, name in (
            (outbox_file.os, "write"),
            (outbox_file.os, "fsync"),
            (outbox_file.fcntl, "flock"),
            (Path, "unlink"),
        ):
            patch.setattr(module, name, may_break(getattr(module, name)))
        with suppress(KeyboardInterrupt):
            opens_as_owner(url)
    gc.collect()
    postgres.lose_since(url)
    following = Books(url, session=None)
    assert following.node("wallet").terminated_by == "rolled_back"
    assert following.balances("s")[1] == usd("$0.30")
    following.close()


def test_who_may_not_change_the_ledger_takes_nothing_over(url):
    """A role that only looks, and a replica: what they open, they open as before."""
    ended(begun(url, "answered"))
    before = files()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP OWNED BY looks; DROP ROLE looks" if _has_role(connection) else "SELECT 1")
        connection.execute("CREATE ROLE looks LOGIN; GRANT USAGE ON SCHEMA x402guard TO looks")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA x402guard TO looks")
    with Owner(url.replace("owner@", "looks@")) as owner:
        assert len(owner.sessions()) == 2
    assert files() == before


def _has_role(connection):
    return connection.execute("SELECT FROM pg_roles WHERE rolname = 'looks'").fetchone() is not None


@pytest.mark.parametrize("done", [0, 1, 2])
def test_what_cannot_be_entered_now_stays_and_the_ledger_is_not_opened(url, monkeypatch, done):
    """It fails at each part; the next process goes on, and no file is left beside the one of the ended process."""
    ends_and_is_lost(url, "answered")
    parts = []

    def fails(*given, **more):
        parts.append(more)
        return 1 / 0 if len(parts) > done else count_again(*given, **more)

    monkeypatch.setattr(outbox, "_AT_ONCE", 1)
    with monkeypatch.context() as patch:
        patch.setattr("x402guard.stores.postgres.count_again", fails)
        for _ in range(2):
            parts.clear()
            with pytest.raises(ZeroDivisionError):
                opens_a_guard(url)
            assert len(files()) == 1
    opens_a_guard(url)
    assert books_of(url) == (TRIPPED, (Decimal("0.35"), Decimal("0.01")))


def test_a_ledger_without_a_wallet_is_not_opened_while_a_process_knows_better(url):
    """An emptied ledger would be a new budget."""
    ended(begun(url, "answered"))
    postgres.empty_database()
    for follows in (opens_a_guard, opens_as_owner):
        with pytest.raises(LedgerUnavailable, match="has lost the newest entries"):
            follows(url)
    assert len(files()) == 1


def test_who_ends_while_it_enters_its_own_holds_leaves_the_rest_to_the_next(url, monkeypatch):
    """It has tripped the wallet already, which is an entry that is there."""
    books = Books(url, wallet="$1.00", session=None)
    postgres.keep_copy(url)
    books.open("run", "$1.00")
    for number in range(3):
        books.hold(f"h{number}", "$0.10", node="run", kind=HoldKind.TOOL)
    postgres.lose_since(url)

    def fails(*_, **__):
        raise LedgerUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr("x402guard.stores.postgres.count_again", fails)
        with pytest.raises(LedgerUnavailable, match="has lost the newest entries"):
            books.hold("h4", "$0.10", node="run", kind=HoldKind.TOOL)
    books.close()
    following = Books(url, session=None)
    assert (following.node("wallet").terminated_by, following.balances("wallet")[1]) == ("rolled_back", usd("$0.30"))
    following.close()


def test_what_is_not_durable_may_be_gone_after_a_crash_of_the_server(url):
    books = Books(url, wallet="$1.00")
    books.hold("h1", "$0.10", kind=HoldKind.TOOL)
    postgres.keep_copy(url)
    books.change(lambda view: view.record("s", "event", facts={"name": "seen"}), nodes=("s",), durable=False)
    books.close()
    postgres.lose_since(url)
    opens_as_owner(url)
    following = Books(url, session=None)
    assert following.node("wallet").state == "open"
    following.close()


def test_who_ends_while_it_takes_over_leaves_it_to_the_next(url):
    """The file is copied before it is removed, and what stands in both is entered once."""
    process = begun(url, "answered")
    postgres.keep_copy(url)
    ended(process)
    [left] = files()
    copy = left.read_bytes()
    postgres.lose_since(url)
    opens_a_guard(url)
    left.write_bytes(copy)
    opens_a_guard(url)
    assert books_of(url) == (TRIPPED, (Decimal("0.35"), Decimal("0.01")))
    assert len(files()) == 1


def test_a_user_without_a_home_folder_is_told_that_there_is_no_file(url, monkeypatch, caplog):
    monkeypatch.setattr("x402guard.stores.postgres.outbox_folder", lambda _ledger: None)
    ended(begun(url, "closed"))
    before = files()
    opens_a_guard(url)
    assert "no home folder" in caplog.text
    assert files() == before


def test_a_process_that_is_read_only_takes_nothing_over(url):
    ended(begun(url, "answered"))
    before = files()
    with Owner(url, read_only=True) as owner:
        owner.sessions()
    assert files() == before


def test_a_server_that_cannot_lose_commits_is_not_waited_for_by_the_disk(url, monkeypatch):
    """Each durable write is synced only where a replica may take over without it."""
    synced = []
    monkeypatch.setattr("x402guard.stores.outbox_file.os.fsync", synced.append)
    books = Books(url, wallet="$5.00")
    del synced[:]
    books.hold("h1", "$0.01", kind=HoldKind.TOOL)
    assert synced == []
    books.store.outbox._is_synced = True
    books.hold("h2", "$0.01", kind=HoldKind.TOOL)
    assert len(synced) == 1
    books.close()
