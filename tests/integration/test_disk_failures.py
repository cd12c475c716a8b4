"""Disks, files, other processes and nodes in trouble: a typed error that says what to do, nothing signed, nothing lost."""

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

import pytest
from eth_account import Account

from tests.support import processes
from tests.support.diskless_buyer import NOBODY, told
from tests.support.merchant import KEY, NETWORK, URL, Shop, client, make_guard
from tests.support.signers import SpySigner
from x402guard import ConfigError, LedgerUnavailable, LocalSigner, Policy, PolicyDenied, X402GuardError
from x402guard.chain.reader import Chain, RpcChainReader

CENT = Decimal("0.01")
UNAVAILABLE = {
    "kind": "LedgerUnavailable",
    "code": "ledger_unavailable",
    "phase": "ledger",
    "money_may_have_moved": False,
    "retry": "later",
}


def in_a_process(way, path) -> list:
    done = processes.run("tests.support.diskless_buyer", way, f"sqlite:///{path}", module=True, strict=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_refused(outcome, *, says) -> None:
    """Typed, with nothing signed and nothing sent; *says* are words of message or advice."""
    assert outcome.items() >= {**UNAVAILABLE, "signed": 0, "payments": 0}.items(), outcome
    assert "Nothing was paid." in outcome["advice"]
    for words in says:
        assert words in outcome["message"] + " " + outcome["advice"]


@pytest.fixture
def shelf():
    """A folder that nobody may use, with a ledger in it in which one payment was made; outside pytest's, which is closed."""
    folder = Path(tempfile.mkdtemp(prefix="x402guard-shelf-"))
    folder.chmod(0o755)
    if os.getuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def _everything(path) -> list:
    """All rows of the books, but for what says when an instance ran."""
    raw = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        tables = ("nodes", "holds", "entries")
        return [row for table in tables for row in raw.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()]
    finally:
        raw.close()


def test_a_folder_that_cannot_be_written_is_no_place_for_a_new_ledger(shelf):
    shelf.chmod(0o555)
    [outcome] = in_a_process("as_nobody", shelf / "spend.db")
    assert_refused(outcome, says=["cannot open the ledger", str(shelf / "spend.db"), "Make the ledger writable"])
    assert list(shelf.iterdir()) == []
    shelf.chmod(0o755)
    [outcome] = in_a_process("as_nobody", shelf / "spend.db")
    assert outcome == {"spent": 1, "held": 0, "signed": 1}


LOCKED_UP = {"folder": (0o555, 0o644), "file": (0o755, 0o444), "both": (0o555, 0o444), "unreadable": (0o755, 0o000)}


@pytest.mark.parametrize("what", LOCKED_UP)
def test_a_ledger_that_cannot_be_written_is_refused_and_whole_afterwards(shelf, what):
    path = shelf / "spend.db"
    assert in_a_process("as_nobody", path)[0]["spent"] == 1
    before = _everything(path)
    for beside in shelf.glob("spend.db-*"):
        beside.unlink()  # as after a move to another machine
    folder_mode, file_mode = LOCKED_UP[what]
    path.chmod(file_mode)
    shelf.chmod(folder_mode)
    [outcome] = in_a_process("as_nobody", path)
    assert_refused(outcome, says=["the ledger", "Make the ledger writable"])
    shelf.chmod(0o755)
    for file in shelf.iterdir():
        file.chmod(0o600)
    assert _everything(path) == before
    [outcome] = in_a_process("as_nobody", path)
    assert outcome == {"spent": 2, "held": 0, "signed": 1}


def test_making_the_ledgers_file_writable_again_is_enough(shelf):
    """SQLite gives the files beside it the mode of the ledger, and they outlive the refusal."""
    path = shelf / "spend.db"
    assert in_a_process("as_nobody", path)[0]["spent"] == 1
    path.chmod(0o444)
    assert_refused(in_a_process("as_nobody", path)[0], says=["read", "only"])
    path.chmod(0o600)
    [outcome] = in_a_process("as_nobody", path)
    assert outcome == {"spent": 2, "held": 0, "signed": 1}


def test_a_full_disk_refuses_before_the_signature_and_pays_again_with_room(tmp_path):
    first, refused, after, again = in_a_process("full", tmp_path / "spend.db")
    assert refused.items() >= UNAVAILABLE.items(), refused
    assert "cannot write the ledger" in refused["message"]
    assert "Make the ledger writable again" in refused["advice"]
    one = {"spent": 1, "held": 0, "signed": 1, "payments": 1}
    assert first == after == one
    assert refused.items() >= one.items()
    assert again == {"spent": 2, "held": 0, "signed": 2, "payments": 2}


def test_a_crowd_on_a_full_disk_signs_nothing_and_pays_once_each_with_room(tmp_path):
    refused, paid = in_a_process("full_crowd", tmp_path / "spend.db")
    assert refused == {"outcomes": ["LedgerUnavailable"], "signed": 1, "spent": 1, "held": 0}
    assert paid == {"outcomes": ["200"], "signed": 25, "spent": 25, "held": 0}


def test_a_disk_that_fills_up_while_a_payment_is_out_takes_neither_answer_nor_money_away(tmp_path):
    during, after = in_a_process("full_after", tmp_path / "spend.db")
    assert during == {"status": 200, "in_doubt": True, "signed": 1}
    assert after["spent"] + after["held"] == 1
    assert after["nonces"] == 1


@pytest.fixture
def ledger(tmp_path):
    return tmp_path / "spend.db"


@contextmanager
def spending(ledger, **more):
    """(session, client, shop, signer) on a ledger file."""
    signer, shop = more.pop("signer", None) or SpySigner(), Shop()
    policy = Policy(breaker=None, loop=None)
    with make_guard(f"sqlite:///{ledger}", signer=signer, policy=policy, **more) as guard:
        with guard.session("s", budget="$5.00") as session, client(session, shop) as http:
            yield session, http, shop, signer


def refused(call, kind=X402GuardError) -> dict:
    with pytest.raises(kind) as caught:
        call()
    return told(caught.value)


def test_a_database_without_room_for_a_page_refuses_and_goes_on_when_it_has(ledger):
    with spending(ledger) as (session, http, shop, signer):
        writer = session.shell.store._writer
        [pages] = writer.execute("PRAGMA page_count").fetchone()
        writer.execute(f"PRAGMA max_page_count = {pages}")
        paid = 0
        for paid in range(200):
            before = (session.spent, session.held, len(signer.signed), len(shop.payments))
            try:
                http.get(f"{URL}/{paid}")
            except LedgerUnavailable as error:
                outcome = told(error)
                break
        assert outcome.items() >= UNAVAILABLE.items()
        assert "full" in outcome["message"]
        assert (session.spent, session.held, len(signer.signed), len(shop.payments)) == before
        assert session.spent + session.held == paid * CENT
        writer.execute("PRAGMA max_page_count = 1000000")
        assert http.get(f"{URL}/{paid}").status_code == 200
        assert session.spent + session.held == (paid + 1) * CENT


HOLDERS = {
    "transaction": "import sqlite3; c = sqlite3.connect(sys.argv[1]); c.execute('BEGIN EXCLUSIVE')",
    "turn": "import fcntl; f = open(sys.argv[1] + '-lock'); fcntl.flock(f, fcntl.LOCK_EX)",
}


@contextmanager
def held_by_another(ledger, how):
    script = f"import sys; {HOLDERS[how]}; print('held', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(ledger)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "held\n"
        yield
    finally:
        other.communicate()


@pytest.mark.parametrize("how", HOLDERS)
def test_a_ledger_that_another_process_holds_refuses_in_time_and_pays_afterwards(ledger, how, monkeypatch):
    monkeypatch.setattr("x402guard.stores.group_commit.GroupCommit._busy_s", 0.2)
    with spending(ledger) as (session, http, shop, signer):
        http.get(URL)
        with held_by_another(ledger, how):
            outcome = refused(lambda: http.get(f"{URL}/2"))
            assert outcome.items() >= UNAVAILABLE.items()
            assert "locked" in outcome["message"] or "another process" in outcome["message"]
            assert (len(signer.signed), len(shop.payments)) == (1, 1)
            opened = refused(lambda: make_guard(f"sqlite:///{ledger}"))
            assert opened.items() >= UNAVAILABLE.items()
        assert (session.spent, session.held) == (CENT, 0)
        http.get(f"{URL}/2")
        assert session.spent == 2 * CENT


def _foreign_table(path):
    raw = sqlite3.connect(path)
    raw.execute("CREATE TABLE photos (name TEXT)")
    raw.commit()
    raw.close()


FOREIGN = {
    "another database": (_foreign_table, "another program"),
    "text": (lambda path: path.write_text("dear diary, " * 1000), "not a database"),
    "a damaged ledger": (
        lambda path: path.write_bytes(b"SQLite format 3\0" + b"\xff" * 8000),
        "not a database",
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_file_is_refused_by_name_and_left_as_it_was(ledger, what):
    write, says = FOREIGN[what]
    write(ledger)
    before, signer = ledger.read_bytes(), SpySigner()
    outcome = refused(lambda: make_guard(f"sqlite:///{ledger}", signer=signer))
    assert outcome.items() >= {name: value for name, value in UNAVAILABLE.items() if name != "retry"}.items()
    assert says in outcome["message"]
    assert ledger.read_bytes()[100:] == before[100:]
    assert signer.signed == []


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_file_is_no_ledger_later_either(ledger, what):
    """Waiting changes nothing, and making it writable is the wrong advice for somebody else's file, which has a name."""
    FOREIGN[what][0](ledger)
    outcome = refused(lambda: make_guard(f"sqlite:///{ledger}"))
    assert outcome["retry"] == "after_change"
    assert "writable" not in outcome["advice"]
    assert str(ledger) in outcome["message"]


def test_a_ledger_of_another_wallet_is_refused_and_stays_its_owners(ledger):
    with spending(ledger) as (_, http, _, _):
        http.get(URL)
    before = _everything(ledger)
    other = LocalSigner.from_key("0x" + "22" * 32)
    outcome = refused(lambda: make_guard(f"sqlite:///{ledger}", signer=other), ConfigError)
    facts = ("config_error", "configuration", False, "after_change")
    assert tuple(outcome[name] for name in ("code", "phase", "money_may_have_moved", "retry")) == facts
    for words in (other.address, Account.from_key(KEY).address, "use a separate ledger for each wallet"):
        assert words in outcome["message"]
    assert _everything(ledger) == before
    with spending(ledger) as (_, http, _, _):
        assert http.get(f"{URL}/2").status_code == 200


def test_a_ledger_that_is_moved_away_while_open_is_refused_until_it_is_back(ledger):
    with spending(ledger) as (session, http, shop, signer):
        http.get(URL)
        ledger.rename(ledger.with_suffix(".away"))
        outcome = refused(lambda: http.get(f"{URL}/2"))
        assert outcome.items() >= {**UNAVAILABLE, "retry": "after_change"}.items()
        assert "restore it" in outcome["message"]
        assert (len(signer.signed), len(shop.payments)) == (1, 1)
        ledger.with_suffix(".away").rename(ledger)
        http.get(f"{URL}/2")
        assert session.spent == 2 * CENT


@contextmanager
def node(answer):
    """A JSON-RPC endpoint on loopback that says *answer* to everything: None hangs, and ``b""`` hangs up."""
    server = socket.create_server(("127.0.0.1", 0))
    open_, ending = [], threading.Event()

    def serve():
        while not ending.is_set():
            try:
                peer, _ = server.accept()
            except OSError:
                return
            open_.append(peer)
            if answer is not None:
                peer.recv(65_536)
                peer.sendall(answer)
                peer.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/v3/0123456789abcdef"
    finally:
        ending.set()
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()
        for peer in open_:
            peer.close()


def _http(body, status=200) -> bytes:
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status, len(body), body)


NODES = {
    "hangs": None,
    "hangs up": b"",
    "no HTTP": b"220 smtp.example ESMTP\r\n",
    "an error page": _http(b"<html>bad gateway</html>", 502),
    "no JSON": _http(b"<html>welcome</html>"),
    "JSON of another kind": _http(b"[1, 2, 3]"),
    "an RPC error": _http(b'{"jsonrpc": "2.0", "id": 0, "error": {"code": -32000, "message": "rate limit"}}'),
    "no number": _http(b'{"jsonrpc": "2.0", "id": 0, "result": "many"}'),
}


def assert_unreadable(ledger, url) -> None:
    """Refused before the signature, naming neither path nor key of the URL; a guard that needs no chain pays afterwards."""
    chain = RpcChainReader({NETWORK: Chain((url,), timeout_s=0.3)}, pause=lambda _seconds: None)
    with spending(ledger, chains=chain) as (session, http, shop, signer):
        with pytest.raises(PolicyDenied) as caught:
            http.get(URL)
        assert caught.value.rule == "chain_unreadable"
        outcome = told(caught.value)
        assert (outcome["code"], outcome["phase"], outcome["money_may_have_moved"]) == (
            "policy_denied",
            "policy",
            False,
        )
        assert outcome["retry"] in ("later", "after_change")
        assert NETWORK in outcome["message"]
        assert "Nothing was paid" in outcome["advice"]
        assert "0123456789abcdef" not in outcome["message"] + outcome["advice"]
        assert (signer.signed, shop.payments, session.held, session.spent) == ([], [], 0, 0)
    chain.close()
    with spending(ledger) as (session, http, _, _):
        assert http.get(URL).status_code == 200
        assert session.spent == CENT


@pytest.mark.parametrize("what", NODES)
def test_a_chain_that_cannot_be_read_refuses_before_the_signature(ledger, what):
    with node(NODES[what]) as url:
        assert_unreadable(ledger, url)


def test_a_dead_node_refuses_before_the_signature(ledger):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert_unreadable(ledger, f"http://127.0.0.1:{port}/v3/0123456789abcdef")


def test_a_node_of_another_chain_is_a_wrong_setting_and_nothing_is_signed(ledger):
    with node(_http(b'{"jsonrpc": "2.0", "id": 0, "result": "0x1"}')) as url:
        chain = RpcChainReader({NETWORK: Chain((url,), timeout_s=0.3)}, pause=lambda _seconds: None)
        with spending(ledger, chains=chain) as (session, http, shop, signer):
            outcome = refused(lambda: http.get(URL), ConfigError)
            facts = ("config_error", "configuration", False, "after_change")
            assert tuple(outcome[name] for name in ("code", "phase", "money_may_have_moved", "retry")) == facts
            assert "serves chain 1" in outcome["message"]
            assert "0123456789abcdef" not in outcome["message"] + outcome["advice"]
            assert (signer.signed, shop.payments, session.held, session.spent) == ([], [], 0, 0)
        chain.close()
