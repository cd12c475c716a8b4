"""Many processes and threads on one wallet in PostgreSQL: payments with and without idle budget, beside pgbench.

Without idle budget each payment changes the wallet's row: once with commits that the threads of a process share, and once
in a transaction of its own that locks the row, as a ledger without either would.

pgbench shows what the server alone can do: once with the statements that a payment sends, as they were recorded from one,
and once with the bare rows, in two transactions without any of our functions.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg

from benchmarks.timing import Figure
from tests.support import postgres
from tests.support.ledger import Books, usd
from x402guard.kernel.rows import Evidence
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.events import Capture
from x402guard.ledger.transitions import apply
from x402guard.stores import group_commit
from x402guard.stores.postgres_rows import LoadedRows
from x402guard.stores.postgres_server import Server

_SECONDS = 6.0
_SESSIONS = 1_000
_BUSY = 4  # sessions of a client that pay while it is measured
_CLIENTS = ((1, 1), (8, 1), (8, 4), (32, 1))  # processes, and threads of each
_COMMITS = {"": {}, ", 2 ms a commit": {"commit_delay": "2000", "commit_siblings": "0"}}
_IDLE, _LINE, _LOCKED = "idle budget", "one line", "one line, a payment at a time"

# What a payment writes: three budgets' worth of journal, a hold that is written and changed, the session's row twice.
_BARE = """
\\set n random(1, 1000)
\\set h random(1, 2000000000)
BEGIN;
SELECT * FROM leaf WHERE id = :n;
UPDATE leaf SET held = held + 1, head = md5(:h::text), version = version + 1 WHERE id = :n;
INSERT INTO hold VALUES (:h, :n, repeat('x', 900), 'held', 1) ON CONFLICT DO NOTHING;
INSERT INTO entry SELECT :n, :h, repeat('x', 420);
COMMIT;
BEGIN;
SET LOCAL synchronous_commit = off;
SELECT * FROM leaf WHERE id = :n;
UPDATE leaf SET held = held - 1, head = md5(:h::text), version = version + 1 WHERE id = :n;
UPDATE hold SET state = 'captured', version = version + 1 WHERE id = :h;
INSERT INTO entry SELECT :n, :h, repeat('x', 420);
COMMIT;
"""
_TABLES = """
CREATE TABLE leaf (id int PRIMARY KEY, held bigint, head text, version bigint, rest text) WITH (fillfactor = 70);
CREATE TABLE hold (id bigint PRIMARY KEY, node int, rest text, state text, version bigint) WITH (fillfactor = 80);
CREATE INDEX ON hold (node) WHERE state = 'held';
CREATE TABLE entry (node int, seq bigint, rest text);
CREATE INDEX ON entry (node, seq);
INSERT INTO leaf SELECT n, 0, '', 1, repeat('x', 300) FROM generate_series(1, 1000) AS n;
"""


def measure() -> Iterator[Figure]:
    """Yield how many payments a second go through. A payment is a hold that is on disk, and its capture."""
    if postgres.programs() is None:
        sys.exit("PostgreSQL is not installed")
    for name, settings in _COMMITS.items():
        for processes, threads in _CLIENTS:
            clients = processes * threads
            with _server(settings) as folder:
                bare = _pgbench(folder, clients, _BARE, tables=_TABLES)
            with _server(settings) as folder:
                same, first = _recorded(postgres.url(folder, "postgres"), clients)
                floor = _pgbench(folder, clients, same, **first)
            rates = {}
            for kind in (_LOCKED, _LINE, _IDLE):
                with _server(settings) as folder:
                    rates[kind] = _payments(postgres.url(folder, "postgres"), kind, processes, threads)
            where = f"{clients} clients in {processes} processes{name}"
            yield Figure(f"pgbench of the bare rows, {where}", bare, "/s")
            yield Figure(f"pgbench of the same statements, {where}", floor, "/s")
            beside = f"{rates[_IDLE] / floor:.2f} of pgbench with the same statements, {rates[_IDLE] / bare:.2f} of the bare rows"
            yield Figure(f"payments, {where}", rates[_IDLE], "/s", "≥ 0.5 of pgbench", beside)
            yield Figure(
                f"each payment changes the wallet's row, with commits that are shared, {where}", rates[_LINE], "/s"
            )
            yield Figure(
                f"each payment changes the wallet's row, in a transaction of its own, {where}", rates[_LOCKED], "/s"
            )
            yield Figure(f"idle budget ÷ shared commits, {where}", rates[_IDLE] / rates[_LINE], "×")
            yield Figure(
                f"idle budget ÷ a transaction each, {where}", rates[_IDLE] / rates[_LOCKED], "×", "≥ 3 at 32, 2 ms"
            )


@contextlib.contextmanager
def _server(settings: dict[str, str]) -> Iterator[Path]:
    with postgres.a_folder() as folder:
        postgres.make_cluster(folder)
        postgres.start(folder, fsync="on", full_page_writes="on", **settings)
        try:
            with patch.dict(os.environ, XDG_STATE_HOME=str(folder / "state")):
                yield folder
        finally:
            postgres.stop(folder, "immediate")


def _pgbench(folder: Path, clients: int, script: str, *, tables: str = "", **first: int) -> float:
    """Return how often a second that many clients run a script; *first* are the first values of its variables."""
    if tables:
        with psycopg.connect(postgres.url(folder, "postgres"), autocommit=True) as connection:
            connection.execute(tables)
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script)
        file.flush()
        command = [
            str((postgres.programs() or Path()) / "pgbench"), "-h", str(folder), "-U", "owner", "-n", "-c", str(clients),
            "-M", "simple", "-j", "2", "-T", str(int(_SECONDS)), "-f", file.name,
            *(part for name, value in first.items() for part in ("-D", f"{name}={value}")), "postgres",
        ]  # fmt: skip
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - our own
    [line] = [line for line in said.splitlines() if line.startswith("tps")]
    return float(line.split()[2])


def _recorded(url: str, clients: int) -> tuple[str, dict[str, int]]:
    """Return the statements of one payment as a script of pgbench, each client of which pays in a session of its own.

    Every session has made the same payments before, so all begin with the same versions, which are returned as well.
    """
    books, said = Books(url, wallet="$1000000.00", session=None), list[tuple[str, Sequence[Any]]]()
    for session in (*(f"s{client}" for client in range(clients)), "recorded"):
        books.open(session, "$1000.00")
        for number in range(2):
            _pay_once(books, session, f"{session}-{number}")
    say = Server.say

    def noted(server: Server, sql: str, values: Sequence[Any] = (), **named: Any) -> list[tuple[Any, ...]]:
        said.append((sql, values))
        return say(server, sql, values, **named)

    with patch.object(Server, "say", noted):
        _pay_once(books, "recorded", "recorded-2")
    books.close()
    written = [json.loads(values[-1]) for sql, values in said if "write_" in sql]
    [node], [entry] = written[0]["read"]["nodes"], written[0]["entries"]  # a payment that draws from no other budget
    script = ["\\set w :v + 1", "\\set r :q + 1"]
    script += [_as_script(sql, values, later="write_" in sql and not values[1]) for sql, values in said]
    script += ["\\set v :v + 2", "\\set q :q + 2"]
    return "\n".join(script), {"v": node["version"], "q": entry["seq"]}


def _as_script(sql: str, values: Sequence[Any], *, later: bool) -> str:
    """Return one question to the server as a line of pgbench: its ids, versions and numbers are those of each client."""
    *others, text = values
    asked = json.loads(text)
    if "entries" in asked:
        for row in asked["read"]["nodes"]:
            row["version"] = "{v}"
        for entry in asked["entries"]:
            entry["seq"] = "{q}"
    known = asked.pop("last", None)  # it is the same for all, and is there
    text = json.dumps(asked).replace('"recorded"', '"s{c}"').replace('"recorded-2"', '"s{c}-{r}"')
    if known is not None:
        text = f'{text[:-1]}, "last": {json.dumps(known)}}}'
    places = {"{v}": ":w" if later else ":v", "{q}": ":r" if later else ":q"}
    for place, name in places.items():
        text = text.replace(f'"{place}"', f" {name} ")
    text = text.replace("{c}", ":client_id").replace("{r}", ":r").replace("'", "''")
    line = sql.rstrip("; ").replace("; ", "\\; ")
    for value in (*others, text):
        line = line.replace("?", f"'{value}'", 1)
    return f"{line};"


def _pay_once(books: Books, session: str, hold_id: str) -> None:
    assert not isinstance(books.hold(hold_id, "$0.01", session), Refusal)
    capture = partial(apply, hold_id=hold_id, event=Capture(usd("$0.01"), Evidence.CLAIMED))
    books.change(capture, holds=(hold_id,), durable=False)


def _payments(url: str, kind: str, processes: int, threads: int) -> float:
    books = Books(url, wallet="$1000000.00", session=None)
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "benchmarks.fleet", url, kind, str(threads), str(_SESSIONS // processes)]
    running = [
        subprocess.Popen(  # noqa: S603 - our own
            [*command, str(which)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
        )
        for which in range(processes)
    ]
    for each in running:
        assert each.stdout is not None
        each.stdout.readline()
    made = sum(int(each.communicate("go\n")[0].split()[0]) for each in _begun(running))
    assert books.node("wallet").captured == 0
    assert books.node("wallet").used == made * usd("$0.01")
    books.close()
    return made / _SECONDS


def _begun(running: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    for each in running:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    return running


def _pays(url: str, kind: str, threads: int, sessions: int, which: str) -> None:
    """Pay from the word on, each thread in its share of the sessions; print how many payments were made."""
    if kind != _IDLE:
        LoadedRows.find_busy = None  # type: ignore[assignment,method-assign]
    if kind == _LOCKED:
        group_commit.MOST_TOGETHER = 1  # type: ignore[misc]
    books = Books(url, session=None)
    for number in range(sessions):
        books.open(f"{which}-{number}", "$1000.00")
    print("ready", flush=True)
    sys.stdin.readline()
    until, made = time.perf_counter() + _SECONDS, [0] * threads

    def pay(thread: int) -> None:
        number = 0
        while time.perf_counter() < until:
            session = f"{which}-{(number % _BUSY) * threads + thread}"
            _pay_once(books, session, f"{session}-{thread}-{number}")
            number += 1
            made[thread] = number

    running = [threading.Thread(target=pay, args=(thread,)) for thread in range(threads)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    print(sum(made), flush=True)


if __name__ == "__main__":
    _pays(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
