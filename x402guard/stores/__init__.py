"""Stores the ledger in memory, in an SQLite file or in PostgreSQL. One conformance suite runs on all stores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ELOOP
from pathlib import Path
from typing import Final

from x402guard.errors import ConfigError, LedgerUnavailable
from x402guard.ledger.store import LedgerStore
from x402guard.stores.memory import MOST_ENDED, MemoryStore

__all__ = ["DEFAULT_LEDGER", "MemoryStore", "check_ledger_url", "ledger_exists", "ledger_path", "open_store"]

DEFAULT_LEDGER: Final = "sqlite:///x402guard.db"
"""In the working directory, so that a restarted agent finds its ledger."""


def open_store(
    url: str,
    *,
    clock_ms: Callable[[], int] | None = None,
    steady_ms: Callable[[], int] | None = None,
    must_exist: bool = False,
    verified: bool = True,
    read_only: bool = False,
    memory_sessions: int = MOST_ENDED,
) -> LedgerStore:
    """Return the store at a ledger URL.

    Args:
        url: ``memory://`` keeps the ledger in this process and loses it with the process; ``sqlite:///spend.db`` is a
            file relative to the working directory, ``sqlite:////var/lib/spend.db`` an absolute path. So are the paths
            ``./spend.db`` and ``/var/lib/spend.db``. ``postgresql://user@host/database`` is a database that several
            machines share; its password stands in ``~/.pgpass`` or ``PGPASSWORD``, never in the URL.
        clock_ms: returns unix milliseconds.
        steady_ms: returns milliseconds of a clock that cannot be set.
        must_exist: do not create a missing file; raise ``LedgerUnavailable`` instead.
        verified: refuse an inconsistent ledger.
        read_only: open a file to be read; nothing can be changed then.
        memory_sessions: how many sessions that have ended ``memory://`` keeps.

    Raises ``ConfigError`` for any other URL, ``LedgerUnavailable`` if the ledger cannot be opened.
    """
    url = as_ledger_url(url)
    check_ledger_url(url)
    if must_exist and not ledger_exists(url):
        raise LedgerUnavailable(
            f"ledger: {url} does not exist, and ledger_must_exist forbids creating it",
            advice="Nothing was paid. The owner creates it once: x402guard budget set wallet AMOUNT --new",
        )
    if is_postgres(url):
        with _needs_psycopg():
            from x402guard.stores.postgres import PostgresStore
        return PostgresStore(url, clock_ms=clock_ms, steady_ms=steady_ms, read_only=read_only)
    if url == "memory://":
        return MemoryStore(clock_ms=clock_ms, steady_ms=steady_ms, most_ended=memory_sessions)
    if read_only:
        from x402guard.stores.read_only import ReadOnlyStore

        return ReadOnlyStore(ledger_path(url), verified=verified)
    from x402guard.stores.sqlite import SqliteStore

    return SqliteStore(ledger_path(url), clock_ms=clock_ms, steady_ms=steady_ms, verified=verified)


def ledger_exists(url: str) -> bool:
    """Return whether there is a ledger at a valid URL.

    Raises ``LedgerUnavailable`` if its server or its folder cannot be asked, and for a file that was deleted.
    """
    if is_postgres(url):
        _check_postgres(url)
        with _needs_psycopg():
            from x402guard.stores.postgres_reads import has_ledger
        return has_ledger(url)
    if url == "memory://":
        return False
    from x402guard.stores.file_errors import refuse_unless_kept

    path = ledger_path(url)
    with _looking_at(path):
        refuse_unless_kept(path)
        return path.exists()


@contextmanager
def _looking_at(path: Path) -> Iterator[None]:
    """Raise ``LedgerUnavailable`` for a place that this user may not look at."""
    try:
        yield
    except OSError as error:
        fix = "Name another ledger."
        if isinstance(error, FileNotFoundError):  # only of the working directory: a missing file raises nothing
            fix = "The working directory is gone: change to another one, or name another ledger."
        elif isinstance(error, PermissionError):
            fix = "Let this user enter its folder, or name another ledger."
        raise LedgerUnavailable(
            f"the ledger {path} cannot be looked at: {error.strerror}",
            advice=f"Nothing was paid. {fix}",
            retry="after_change",
        ) from error


@contextmanager
def _needs_psycopg() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError("ledger: PostgreSQL needs the package psycopg: pip install 'x402guard[postgres]'") from error


def is_postgres(url: str) -> bool:
    """True for the URL of a ledger in PostgreSQL."""
    return url.startswith(("postgresql://", "postgres://"))


def as_ledger_url(given: str | Path) -> str:
    """Return the URL of a ledger that may be written as a path: ``./spend.db`` is ``sqlite:///./spend.db``."""
    text = str(given)
    is_url = _SCHEME.match(text) is not None
    is_path = isinstance(given, Path) or (not is_url and ("/" in text or text.endswith(".db") or text in (".", "..")))
    return f"sqlite:///{text}" if is_path else text


_SCHEME: Final = re.compile("[A-Za-z][A-Za-z0-9+.-]*:")
LEFT_IN_A_PATH: Final = re.compile(
    r"""^[\s"']|[\s"';]$|[\x00-\x1f\x7f\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064\ufeff]|\s\#|\$[{(]|(?:^|[/._-])\$[A-Za-z_]"""
)
"""What a shell, a Makefile, an env-file or a file with CRLF leaves in a path: it would be another file."""


def check_ledger_url(url: str) -> None:
    """Raise ``ConfigError`` for an invalid ledger URL, or one whose file cannot exist. Opens nothing."""
    if is_postgres(url):
        _check_postgres(url)
    elif url != "memory://":
        if LEFT_IN_A_PATH.search(url.removeprefix("sqlite:///")):
            raise ConfigError(
                f"ledger: {_shown(url)} has a blank, a quote or ; at an end, a character that is not shown, a comment, or a "
                "$NAME that no shell has replaced; write it without: it would be another ledger"
            )
        if not url.startswith("sqlite:///") or len(url) == len("sqlite:///"):
            raise ConfigError(
                f"ledger: {_shown(url)} is not a ledger; write memory://, sqlite:///spend.db, sqlite:////absolute/path.db, a path such as ./spend.db, or postgresql://user@host/database"
            )
        _usable(ledger_path(url))


def _shown(url: str) -> str:
    """Return what is no ledger, as an error may show it: it may hold a password."""
    scheme = _SCHEME.match(url)
    if url.startswith("sqlite:") or not any(sign in url.lower() for sign in ("://", "@", "password")):
        return f"{url!r:.200}"
    return "a text that may hold a password" if scheme is None else f"a URL of {scheme[0][:-1]!r:.40}"


def ledger_path(url: str) -> Path:
    """Return the file that a ``sqlite:///…`` URL names; ``~`` is the home folder."""
    path = Path(url.removeprefix("sqlite:///"))
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigError(f"ledger: {path.parts[0]!r:.60} is no user's home folder; write the whole path") from None


def _check_postgres(url: str) -> None:
    # What is refused is not shown: it may be a password.
    fix = "write postgresql://user@host/database, and put a password into ~/.pgpass or PGPASSWORD"
    with _needs_psycopg():
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict
    try:
        parts = conninfo_to_dict(url)
    except ProgrammingError:
        raise ConfigError(f"ledger: PostgreSQL's own library cannot read this URL; {fix}") from None
    if (
        parts.get("password")
        or parts.get("sslpassword")
        or any("@" in str(parts[name]) for name in parts if name != "user")
    ):
        raise ConfigError(
            f"ledger: the URL holds a password, which every list of processes and settings would show; {fix}"
        )
    if not parts.get("dbname"):
        raise ConfigError(f"ledger: the URL names no database; {fix}")


def _usable(path: Path) -> None:
    if path.name == ":memory:":
        raise ConfigError("ledger: write memory:// for a ledger in memory, not sqlite:///:memory:")
    for char in "?#%":
        if char in str(path):
            raise ConfigError(
                f"ledger: {str(path)!r} contains {char!r}, which a URL reads as a query or an escape; choose a folder and a "
                "name without it"
            )
    with _looking_at(path):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            pass  # it can be made, or its folder is named below
        except OSError as error:
            if error.errno == ELOOP:
                raise ConfigError(f"ledger: {path} is a link that leads back to itself; name a file") from None
            raise
        has_folder, is_folder = path.absolute().parent.is_dir(), path.is_dir()
    if not has_folder:
        raise ConfigError(f"ledger: folder {path.absolute().parent} does not exist; create it first, or choose another")
    if is_folder:
        raise ConfigError(f"ledger: {path} is a folder; name a file in it, such as {path / 'spend.db'}")
