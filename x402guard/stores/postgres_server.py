"""Speaks with a PostgreSQL server: one connection that is made anew when it has broken, one round trip for each question."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, TypeVar

import psycopg
from msgspec import Struct
from psycopg import errors as refused
from psycopg.abc import Buffer, PQGen
from psycopg.adapt import Loader
from psycopg.pq import TransactionStatus
from typing_extensions import override

from x402guard.errors import LedgerUnavailable, Retry
from x402guard.stores.file_errors import newer, unreleased
from x402guard.stores.postgres_schema import (
    ABOUT,
    ANOTHER_LEDGER,
    MIGRATIONS,
    MOVING,
    ROLLED_BACK,
    SCHEMA,
    TABLES,
    UNRELEASED,
    VERSION,
    functions,
)
from x402guard.stores.rows import UnreadableRecord

R = TypeVar("R")

CONNECT_S: Final = 3
_WAITS_FOR_A_REPLICA: Final = "SyncRepWaitForLSN"  # the function of the server that says so
_SILENT_S: Final = 5.0  # beyond the server's own limit
STATEMENT_MS: Final = 5_000
LOCK_MS: Final = 2_000
OLDEST_SERVER: Final = 15

ISOLATION: Final = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; "
"""Each statement of a write has to see what others have committed while it waited."""


def settings(statement_ms: int = STATEMENT_MS) -> str:
    """Return what every transaction sets for itself: a pooler may drop what was said when the connection was made."""
    return (
        f"SET LOCAL search_path = {SCHEMA}, pg_temp; SET LOCAL statement_timeout = {statement_ms}; "
        f"SET LOCAL lock_timeout = {LOCK_MS}; "
        # A role may hide the warning that a commit is on no replica.
        "SET LOCAL client_min_messages = warning; "
    )


BROKEN: Final = (psycopg.OperationalError, psycopg.InterfaceError)
"""The errors after which the state of a connection, and of what was sent over it, is unknown."""

OUT_OF_TURN: Final = (refused.IdleInTransactionSessionTimeout, refused.LockNotAvailable)

LOST: Final = (psycopg.Error, OSError, OverflowError, UnreadableRecord)
"""The errors that mean that the ledger cannot be read or written."""

_BACK: Final = "Nothing was paid. Bring the ledger's server back, then repeat the call."
_USER: Final = "Nothing was paid. Put the user's password into ~/.pgpass or PGPASSWORD, then repeat the call."
_ROLE: Final = (
    "Nothing was paid. Create the role in the URL with LOGIN (CREATE ROLE agents LOGIN), or allow it in the server's "
    "pg_hba.conf."
)
_UNKEPT: Final[tuple[str, Retry]] = (
    "Nothing was paid. A text or a number in it is none that PostgreSQL can keep.",
    "no",
)
_VERSION: Final = (
    f"Nothing was paid. Update this installation, or remove the schema {SCHEMA} if it is no ledger of yours."
)
_ADVICE: Final[dict[type[Exception], tuple[str, Retry]]] = {
    refused.InvalidPassword: (_USER, "after_change"),
    refused.InvalidAuthorizationSpecification: (_ROLE, "after_change"),
    refused.InvalidCatalogName: ("Nothing was paid. Create the database once, with createdb.", "after_change"),
    refused.ReadOnlySqlTransaction: ("Nothing was paid. Name the primary server in the ledger's URL.", "after_change"),
    refused.LockNotAvailable: (
        "Nothing was paid. Another connection has locked a part of the ledger (see pg_locks): end it, or repeat the call.",
        "later",
    ),
    refused.DiskFull: ("Nothing was paid. The server's disk is full: make room, then repeat the call.", "later"),
    refused.TooManyConnections: ("Nothing was paid. Raise the server's max_connections, or use a pooler.", "later"),
    refused.InsufficientPrivilege: (
        f"Nothing was paid. The database's owner grants this role the schema {SCHEMA}; see the page about a fleet.",
        "after_change",
    ),
    refused.UndefinedFunction: (_VERSION, "after_change"),
    refused.UndefinedTable: (_VERSION, "after_change"),
    refused.UndefinedColumn: (_VERSION, "after_change"),
    refused.InvalidSchemaName: (_VERSION, "after_change"),
}
"""The server's error → the advice, and when to retry."""

_REFUSED: Final[tuple[tuple[str, type[Exception]], ...]] = (
    (r"starting up|shutting down|recovery mode|not (yet|currently) accepting", refused.CannotConnectNow),
    (r"too many|connection slots", refused.TooManyConnections),
    (r"password", refused.InvalidPassword),
    (r"permission denied", refused.InsufficientPrivilege),
    (r"pg_hba\.conf|role ", refused.InvalidAuthorizationSpecification),
    (r"database .*does not exist|no such database", refused.InvalidCatalogName),
)
"""What a refused connection says, the first that fits → the error. The driver does not hand the protocol's code on.

In another language, or in other words, it is an error that ends by itself.
"""


class WholeNumber(Loader):
    """Reads a sum of whole numbers, which PostgreSQL calls numeric."""

    def load(self, data: Buffer) -> int:
        """Return the number."""
        return int(bytes(data))


class _Patient(psycopg.Connection[tuple[Any, ...]]):
    """A connection that waits for an answer until *until_s*, in seconds of ``time.monotonic``.

    The server's own limit does not hold while a commit waits for a replica, nor while the server's process is stopped.
    """

    until_s = float("inf")

    @property
    def is_late(self) -> bool:
        """True if the answer did not come in time, so that what the server is at is unknown."""
        return time.monotonic() > self.until_s

    @override
    def wait(self, gen: PQGen[R], interval: float = 0.1, timeout: float | None = None) -> R:
        return super().wait(gen, interval, min(max(0.0, self.until_s - time.monotonic()), 1e6))


class Server:
    """One connection to the ledger's server; it is made when it is needed, and made anew after it has broken.

    Args:
        url: where the ledger is.
        check: called with this server at each new connection, before any other use.

    Attributes:
        round_trip_s: the shortest time that an answer has taken over this connection, in seconds; at most one.
        connected: how many connections there were.
    """

    def __init__(self, url: str, check: Callable[[Server], None]) -> None:
        self._url, self._check = url, check
        self.round_trip_s, self.connected = 1.0, 0
        self._connection: _Patient | None = None
        self._is_unreplicated = False

    @property
    def is_connected(self) -> bool:
        """True if there is a connection, which may have broken since."""
        return self._connection is not None

    def run(self, sql: str, values: Sequence[Any] = (), *, statement_ms: int = STATEMENT_MS) -> list[tuple[Any, ...]]:
        """Run statements in one transaction and one round trip, and return the rows of the last one.

        ``?`` stands for a value, in all of them together. Raises what psycopg raises.
        """
        return self.say(ISOLATION + settings(statement_ms) + sql, values, statement_ms=statement_ms)

    def say(self, sql: str, values: Sequence[Any] = (), *, statement_ms: int = STATEMENT_MS) -> list[tuple[Any, ...]]:
        """Run statements in one round trip, in the transaction that is open, and return the rows of the last one."""
        if self._connection is None:
            self._connect()
        assert self._connection is not None
        began_s = time.monotonic()
        self._connection.until_s = began_s + statement_ms / 1000 + _SILENT_S
        self._is_unreplicated = False
        try:
            cursor = self._connection.execute(with_places(sql), values)
            while cursor.nextset():
                pass
            self.round_trip_s = min(self.round_trip_s, time.monotonic() - began_s)
            self._refuse_unreplicated()
            return cursor.fetchall() if cursor.description else []
        except BaseException as error:
            if not isinstance(error, psycopg.Error) or self._connection.broken or self._connection.is_late:
                self.close()  # what it is in the middle of is unknown
            raise

    def asked(self, ask: Callable[[], R]) -> R:
        """Return what *ask* does, which changes nothing: once more if the server has been started anew since the last time."""
        was_connected = self.is_connected
        try:
            return ask()
        except BROKEN as error:
            if isinstance(error, OUT_OF_TURN) or self.is_connected or not was_connected:
                raise
            return ask()

    def roll_back(self) -> None:
        """End the transaction that is open, if one is. Takes no round trip if none is."""
        if self._connection is None or self._connection.info.transaction_status is TransactionStatus.IDLE:
            return
        try:
            self._connection.execute("ROLLBACK")
        except BaseException as error:
            self.close()
            if not isinstance(error, psycopg.Error):
                raise

    def _connect(self) -> None:
        self.round_trip_s, self.connected = 1.0, self.connected + 1  # another server may be farther away
        self._connection = _Patient.connect(
            self._url,
            autocommit=True,
            connect_timeout=CONNECT_S,
            application_name="x402guard",
            client_encoding="UTF8",  # whatever the environment or the role says
            tcp_user_timeout=STATEMENT_MS,
            prepare_threshold=None,  # a pooler gives each transaction another connection, which knows no such statement
            cursor_factory=psycopg.ClientCursor,  # several statements in one round trip
        )
        self._connection.adapters.register_loader("numeric", WholeNumber)
        self._connection.add_notice_handler(self._note)
        try:
            self._check(self)
        except BaseException:
            self.close()
            raise

    def _note(self, said: psycopg.errors.Diagnostic) -> None:
        # The commit is made here, and the server warns that its replica may not have it. It is no error of the server's.
        self._is_unreplicated = self._is_unreplicated or said.source_function == _WAITS_FOR_A_REPLICA

    def _refuse_unreplicated(self) -> None:
        if self._is_unreplicated:
            raise psycopg.OperationalError("an administrator has ended the wait for the synchronous replica")

    def close(self) -> None:
        """Close the connection. Idempotent; the next question makes a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class Known:
    """Which ledger is open. Connections refer to this and not to the store, which closes them with itself."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.id: str | None = None

    def check(self, server: Server) -> None:
        """Raise ``LedgerUnavailable`` if a new connection has led to another ledger."""
        if self.id is not None and server.run(f"SELECT id::text FROM {ABOUT}") != [(self.id,)]:
            raise another(self._url)


class ServerClock:
    """The server's clock, as it was last seen, and what has passed here since. A look at it takes no round trip."""

    def __init__(self, server_ms: int, steady_ms: Callable[[], int]) -> None:
        self._steady = steady_ms
        self.see(server_ms)

    def see(self, server_ms: int) -> None:
        """Note the time that an answer carries, in unix milliseconds."""
        self._seen = (server_ms, self._steady())

    @property
    def is_old(self) -> bool:
        """True a minute after the last answer: the server's clock may have been set."""
        return self._steady() - self._seen[1] > 60_000

    def __call__(self) -> int:
        """Return the server's time in unix milliseconds."""
        server_ms, steady_ms = self._seen
        return server_ms + self._steady() - steady_ms


@lru_cache(maxsize=512)
def with_places(sql: str) -> str:
    """Return SQL with the places for values that psycopg knows: ``%s`` for ``?``."""
    return sql.replace("%", "%%").replace("?", "%s")


@contextmanager
def unavailable(what: str, url: str) -> Iterator[None]:
    """Raise ``LedgerUnavailable`` for an error of the server, of the way to it, or of an unreadable row in the block."""
    try:
        yield
    except LOST as error:
        raise as_unavailable(what, url, error) from error


def as_unavailable(what: str, url: str, error: Exception) -> LedgerUnavailable:
    """Return the error to raise for one of ``LOST``. Its text names the URL, which has no password."""
    if isinstance(error, psycopg.Error) and error.sqlstate in _OTHERS:
        return _OTHERS[error.sqlstate](url)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    kind: type[Exception] = type(error)
    if kind is psycopg.OperationalError and "FATAL: " in str(error):
        said = str(error).split("FATAL: ")[-1]
        kind = next((kind for words, kind in _REFUSED if re.search(words, said)), kind)
    advice, retry = _ADVICE.get(
        kind, _UNKEPT if isinstance(error, psycopg.DataError) else (_BACK, LedgerUnavailable.retry)
    )
    if lines[0].startswith("only the owner of the ledger"):
        advice = "Nothing was changed. Run it as the role that made the ledger."
    wrapped = LedgerUnavailable(f"{what} {url}: {lines[0]}", advice=advice, retry=retry)
    wrapped.__cause__ = error
    return wrapped


def another(url: str) -> LedgerUnavailable:
    """Return the error for a server that has another ledger now: it would be a second budget."""
    return LedgerUnavailable(
        f"{url} is another ledger than the one that was opened",
        advice="Nothing was paid. Bring back the database that was here, or end this process and open the other ledger.",
        retry="after_change",
    )


def unsure(url: str) -> LedgerUnavailable:
    """Return the error for a change of which it is unknown whether it was written."""
    return LedgerUnavailable(
        f"cannot write the ledger {url}: the server went away before it answered, and does not come back",
        advice=(
            "Nothing was paid. Whether the change is in the ledger is unknown; what it may hold expires at its deadline. Bring the "
            "server back, then repeat the call."
        ),
    )


def rolled_back(url: str) -> LedgerUnavailable:
    """Return the error for a server without the newest entries of this process, such as a replica that took over."""
    return LedgerUnavailable(
        f"{url} has lost the newest entries of this process: another server has taken over, or a backup was restored. What "
        "was signed may still be taken: end the agents, and follow the page about a fleet, under failover",
        advice="This call has paid nothing. End the agents, and follow the page about a fleet, under failover.",
        retry="after_change",
    )


def too_old(url: str, version: int) -> LedgerUnavailable:
    """Return the error for a ledger of an earlier *version*."""
    return LedgerUnavailable(
        f"{url} has ledger version {version}, and this installation reads version {VERSION}; its owner upgrades it",
        advice="Nothing was paid. The role that made the ledger runs `x402guard ledger upgrade`, once no older installation runs.",
        retry="after_change",
    )


def locked_by_another() -> LedgerUnavailable:
    """Return the error for a ledger a part of which another session of the database has locked for long."""
    return LedgerUnavailable(
        "another session of the database has locked rows of this ledger for ten seconds: an open transaction, or LOCK TABLE",
        advice=_ADVICE[refused.LockNotAvailable][0],
    )


def moving(url: str) -> LedgerUnavailable:
    """Return the error for a database to which a ledger is being moved: until all of it is there, it would be a new budget."""
    return LedgerUnavailable(
        f"a ledger is being moved to {url}",
        advice="Nothing was paid. Wait for `x402guard ledger move` to end; if it was interrupted, repeat it.",
    )


_OTHERS: Final = {ANOTHER_LEDGER: another, ROLLED_BACK: rolled_back, MOVING: moving}


class Found(Struct, frozen=True):
    """What a server says at opening: the ledger's id, its time in unix ms, and whether a failover may lose commits."""

    ledger: str
    now_ms: int
    may_lose_commits: bool


_REPLICAS: Final = """(SELECT count(*) FROM pg_catalog.pg_stat_replication WHERE state IS DISTINCT FROM 'backup')
+ (SELECT count(*) FROM pg_catalog.pg_replication_slots WHERE slot_type = 'physical' AND NOT temporary)"""
"""How many replicas there are: also one that restarts, by its slot; a copy that is being made is none.

A role that may not see what the others of the server do gets a row for each replica, but not its state.
"""


_IS_THERE: Final = f"to_regclass('{ABOUT}') IS NOT NULL, to_regclass('{UNRELEASED}') IS NOT NULL"
"""Whether there is a ledger, and whether there is one of before the first release."""


def is_there(server: Server, url: str) -> bool:
    """Return whether the database has a ledger. Raises ``LedgerUnavailable`` for one of before the first release."""
    [(table, is_unreleased)] = server.run(f"SELECT {_IS_THERE}")
    if is_unreleased and not table:
        raise unreleased(url)
    return bool(table)


_IN_SCHEMA: Final = f"JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = '{SCHEMA}'"
STRANGE: Final = f"""
SELECT 'trigger', c.relname || '.' || t.tgname, t.tgtype || ' ' || p.proname || ' ' || replace(t.tgenabled::text, 'A', 'O')
    FROM pg_catalog.pg_trigger AS t JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid
    JOIN pg_catalog.pg_class AS c ON c.oid = t.tgrelid {_IN_SCHEMA} WHERE NOT t.tgisinternal
UNION ALL SELECT 'rule', c.relname || '.' || r.rulename, '' FROM pg_catalog.pg_rewrite AS r
    JOIN pg_catalog.pg_class AS c ON c.oid = r.ev_class {_IN_SCHEMA}
UNION ALL SELECT 'row security', c.relname::text, '' FROM pg_catalog.pg_class AS c {_IN_SCHEMA} WHERE c.relrowsecurity
UNION ALL SELECT 'function', p.proname::text, md5(p.prosrc) FROM pg_catalog.pg_proc AS p
    JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace AND n.nspname = '{SCHEMA}'
"""
"""All that acts by itself on a ledger's tables, and what it runs: (kind, name, what it is)."""


@lru_cache(maxsize=1)
def _ours(version: int) -> frozenset[tuple[str, str, str]]:
    text, found = "".join((TABLES, *MIGRATIONS, functions(version))), set[tuple[str, str, str]]()
    for name, body in re.findall(r"CREATE FUNCTION x402guard\.(\w+)\(.*?\$\$(.*?)\$\$", text, re.DOTALL):
        found.add(("function", name, hashlib.md5(body.encode(), usedforsecurity=False).hexdigest()))
    for name, when, table, rest, run in re.findall(
        r"CREATE TRIGGER (\w+) ([A-Z ]*?) ON x402guard\.(\w+)(.*?)EXECUTE FUNCTION x402guard\.(\w+)", text, re.DOTALL
    ):
        bits = sum(bit for word, bit in _BITS.items() if word in f"{when} {rest}".split())
        found.add(("trigger", f"{table}.{name}", f"{bits} {run} O"))
    return frozenset(found)


_BITS: Final = {"ROW": 1, "BEFORE": 2, "INSERT": 4, "DELETE": 8, "UPDATE": 16, "TRUNCATE": 32}
"""The bits of ``pg_trigger.tgtype``."""


def strange_parts(found: Iterable[Sequence[str]]) -> list[str]:
    """Return what acts on a ledger's tables beside the schema, or not as it says, of the rows of ``STRANGE``."""
    rows, ours = {(str(kind), str(name), str(what)) for kind, name, what in found}, _ours(VERSION)
    added = [f"it has a {kind} {name!r}, which is not the ledger's" for kind, name, _ in rows - ours]
    gone = [f"its {kind} {name!r} is gone, off, or another one" for kind, name, _ in ours - rows]
    return sorted({*added, *gone})


def prepare(server: Server, url: str, *, read_only: bool, while_moving: bool) -> Found:
    """Bring the schema to this version, once for all processes. Raises ``LedgerUnavailable``, and ``psycopg.Error``."""
    [(number, encoding, replicas, synchronous, has_schema, table, is_unreleased)] = server.run(
        "SELECT current_setting('server_version_num')::integer, current_setting('server_encoding'), "
        f"{_REPLICAS}, current_setting('synchronous_standby_names'), "
        f"to_regnamespace('{SCHEMA}') IS NOT NULL, {_IS_THERE}"
    )
    if number < OLDEST_SERVER * 10_000:
        raise LedgerUnavailable(f"{url} is PostgreSQL {number // 10_000}; it has to be {OLDEST_SERVER} or newer")
    if encoding != "UTF8":
        raise LedgerUnavailable(f"{url} stores text as {encoding}; a ledger's database has to be UTF8")
    if is_unreleased and not table:
        raise unreleased(url)
    if has_schema and not table:
        raise LedgerUnavailable(
            f"{url} has a schema {SCHEMA} that is no ledger; name another database",
            advice="Nothing was paid. Create a database for the ledger, or remove that schema.",
        )
    if not table and read_only:
        raise LedgerUnavailable(f"{url} has no ledger, and it is open to be read only")
    version = server.run(f"SELECT version FROM {ABOUT}")[0][0] if table else 0
    if version > VERSION:
        raise newer(url, "written", version)
    if version < VERSION:
        if table:
            raise too_old(url, version)
        migrate(server)
    [(ledger, now_ms, is_moving)] = server.run(
        f"SELECT id::text, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, is_moving FROM {ABOUT}"
    )
    if is_moving and not while_moving:
        raise moving(url)
    for problem in strange_parts(server.run(STRANGE)):
        raise LedgerUnavailable(
            f"the ledger {url} is inconsistent: {problem}",
            advice="Nothing was paid. `x402guard verify` shows what is wrong; a role that may change the schema has changed it.",
            retry="after_change",
        )
    return Found(ledger, int(now_ms), replicas > 0 and not synchronous)


def migrate(server: Server) -> None:
    """Bring the schema to this version, once for all processes. A process that is stopped in it loses the lock."""
    idle = f"SET LOCAL idle_in_transaction_session_timeout = {STATEMENT_MS}; "
    lock = f"SELECT pg_advisory_xact_lock(hashtextextended('{SCHEMA} migrations', 0))"
    server.say(f"BEGIN; {ISOLATION}{settings()}{idle}{lock}")
    # to_regclass may answer from what the server's process remembers of the time before it waited.
    [(table,)] = server.say(
        f"SELECT count(*) > 0 FROM pg_catalog.pg_tables WHERE schemaname || '.' || tablename = '{ABOUT}'"
    )
    version = server.say(f"SELECT version FROM {ABOUT}")[0][0] if table else 0
    for step in (TABLES, *MIGRATIONS)[version:]:
        server.say(step)
    if version < VERSION:
        server.say(f"UPDATE {ABOUT} SET version = {VERSION}; {functions(VERSION)}")
    server.say("COMMIT")
