"""Where the books are kept: in memory, or in an SQLite file. One conformance suite runs on both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from x402guard.errors import ConfigError, LedgerUnavailable
from x402guard.ledger.store import LedgerStore
from x402guard.stores.memory import MemoryStore

__all__ = ["DEFAULT_LEDGER", "MemoryStore", "check_ledger_url", "ledger_path", "open_store"]

DEFAULT_LEDGER: Final = "sqlite:///x402guard.db"
"""In the working directory, so that an agent that is started again finds its books."""


def open_store(
    url: str,
    *,
    clock_ms: Callable[[], int] | None = None,
    steady_ms: Callable[[], int] | None = None,
    must_exist: bool = False,
    verified: bool = True,
) -> LedgerStore:
    """Return the store at a ledger URL.

    ``memory://`` keeps the books in this process and promises nothing past it; ``sqlite:///spend.db`` is a file relative to
    the working directory, ``sqlite:////var/lib/spend.db`` an absolute one. ``clock_ms`` gives unix milliseconds,
    ``steady_ms`` milliseconds that nobody sets. With ``must_exist`` a file that is not there is not made; not ``verified``, books that do not add up are opened all the same. Raises ``ConfigError`` for any other URL, ``LedgerUnavailable`` where the file cannot be opened.
    """
    check_ledger_url(url)
    if must_exist and (url == "memory://" or not ledger_path(url).exists()):
        raise LedgerUnavailable(
            f"ledger: {url} does not exist, and ledger_must_exist does not let it be made",
            advice="Nothing was paid. Its owner makes it once: x402guard budget set wallet AMOUNT --new",
        )
    if url == "memory://":
        return MemoryStore(clock_ms=clock_ms, steady_ms=steady_ms)
    from x402guard.stores.sqlite import SqliteStore

    return SqliteStore(ledger_path(url), clock_ms=clock_ms, steady_ms=steady_ms, verified=verified)


def check_ledger_url(url: str) -> None:
    """Raise ``ConfigError`` for what is no ledger's URL, or could be no file of one; nothing is opened."""
    if url != "memory://":
        if not url.startswith("sqlite:///") or len(url) == len("sqlite:///") or "\0" in url:
            raise ConfigError(
                f"ledger: {url!r} is not a ledger; write memory://, sqlite:///spend.db or sqlite:////absolute/path.db"
            )
        _usable(ledger_path(url), url)


def ledger_path(url: str) -> Path:
    """Return the file that a ``sqlite:///…`` URL names; ``~`` is the home folder."""
    return Path(url.removeprefix("sqlite:///")).expanduser()


def _usable(path: Path, url: str) -> None:
    if path.name == ":memory:":
        raise ConfigError("ledger: books in memory are memory://, not sqlite:///:memory:")
    if any(char in str(path) for char in "?#%"):
        raise ConfigError(f"ledger: {url!r} has a query or an escape; after sqlite:/// comes a plain path")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"ledger: folder {path.absolute().parent} does not exist; make it first, or choose another")
    if path.is_dir():
        raise ConfigError(f"ledger: {path} is a folder; name a file in it, such as {path / 'spend.db'}")
