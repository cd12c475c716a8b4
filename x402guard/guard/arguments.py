"""Checks the arguments of a ``Guard`` before anything is opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from x402guard.assets import TEST_NETWORKS, Asset
from x402guard.errors import ConfigError, LedgerUnavailable
from x402guard.flow.context import Mode
from x402guard.flow.detached import refuse_late_patch
from x402guard.flow.ports import ChainReader, Signer
from x402guard.flow.shell import LOG
from x402guard.flow.surroundings import here
from x402guard.guard.approvers import as_approver
from x402guard.kernel.rows import WALLET
from x402guard.ledger.purchases import silent_instances
from x402guard.ledger.queries import Gone
from x402guard.ledger.store import LedgerStore
from x402guard.llm import Metering
from x402guard.llm.meter import Meter
from x402guard.policy import Policy
from x402guard.policy.checks import check_flags, check_kind, check_name
from x402guard.stores import (
    DEFAULT_LEDGER,
    LEFT_IN_A_PATH,
    as_ledger_url,
    check_ledger_url,
    is_postgres,
    ledger_exists,
    ledger_path,
    open_store,
)
from x402guard.vendors.price_file import open_book
from x402guard.vendors.prices import RegisteredBook
from x402guard.vendors.tiktoken_counter import TiktokenCounter
from x402guard.x402.signer import signer_of

if TYPE_CHECKING:
    from x402guard.telemetry.otel import Telemetry


def meter_of(metering: Metering | None) -> Meter:
    """Return the meter of LLM calls. Raises ``ConfigError`` for anything but a ``Metering``."""
    if metering is not None and not isinstance(metering, Metering):
        raise ConfigError(
            f"metering: a {type(metering).__name__} is not a Metering; write Metering(unbounded_output=…)"
        )
    settings = metering or Metering()
    given = settings.prices
    book = (
        open_book(None if given is None else str(given)) if given is None or isinstance(given, (str, Path)) else given
    )
    return Meter(settings, RegisteredBook(book, owner_prices=settings.models), settings.counter or TiktokenCounter())


def check_kinds(signer: object, ledger: object, policy: object, chains: object, approver: object) -> Signer | None:
    """Return the signer (see ``signer_of``). Raises ``ConfigError`` for an argument of the wrong type."""
    if not isinstance(ledger, str) and not hasattr(ledger, "transact"):
        raise ConfigError(f"ledger: {ledger!r} is neither a ledger URL (sqlite:///spend.db) nor a store")
    if policy is not None:
        check_kind("policy", policy, Policy, "write Policy(per_payment_cap=…)")
    if chains is not None and not isinstance(chains, Mapping) and not hasattr(chains, "networks"):
        raise ConfigError(
            f"chains: a {type(chains).__name__} is no mapping from network to URL; write chains={{'base': 'https://…'}}"
        )
    as_approver(approver)
    return signer_of(signer)


def open_ledger(url: str | LedgerStore, *, must_exist: bool, memory_sessions: int) -> LedgerStore:
    """Return the store at a ledger URL. Says in the log where the ledger is, if it is made here without being named."""
    check_flags(ledger_must_exist=must_exist)
    kept = positive("memory_sessions", memory_sessions)
    if not isinstance(url, str):
        return url
    refuse_late_patch()
    made = url == DEFAULT_LEDGER and not ledger_path(url).exists()
    store = open_store(url, must_exist=must_exist, memory_sessions=kept)
    if must_exist and not store.path(WALLET):  # what makes a ledger was killed before its wallet had a limit
        store.close()
        raise LedgerUnavailable(
            f"ledger: {url} has no wallet, and ledger_must_exist forbids creating it",
            advice="Nothing was paid. The owner creates it once: x402guard budget set wallet AMOUNT --new",
        )
    if made:
        LOG.warning(
            "a new ledger is made at %s; Guard(ledger=…), X402GUARD_LEDGER or x402guard.toml names another place",
            ledger_path(url).resolve(),
        )
    return store


def observed(telemetry: object) -> Telemetry | None:
    """Return what sends traces and metrics, or None. Raises ``ConfigError`` without OpenTelemetry."""
    check_flags(telemetry=telemetry)
    if not telemetry:
        return None
    try:
        from x402guard.telemetry.otel import telemetry as made

        return made()
    except ImportError:
        raise ConfigError("telemetry: it needs OpenTelemetry: pip install 'x402guard[telemetry]'") from None


def check_mode(mode: object) -> bool:
    """Return whether a guard is in shadow mode, and say so in the log. Raises ``ConfigError``."""
    if mode not in get_args(Mode):
        raise ConfigError(f"mode: {mode!r:.60} is neither 'enforce' nor 'shadow'")
    if mode == "shadow":
        LOG.warning(
            "mode is 'shadow': the rules refuse nothing that the budget allows; session.report() says what they would"
        )
    return mode == "shadow"


def each_asset(assets: Iterable[Asset]) -> tuple[Asset, ...]:
    """Return tokens as a tuple. Raises ``ConfigError`` for anything but a list of ``Asset``."""
    if not isinstance(assets, Iterable):
        raise ConfigError(f"assets: {assets!r} is not a list of Asset")
    listed = tuple(assets)
    for asset in listed:
        if not isinstance(asset, Asset):
            raise ConfigError(f"assets: {asset!r} is not an Asset; write Asset(network=…, address=…, …)")
    return listed


Lives = Callable[[str], bool | None]
"""Says whether the process that holds a life of that name lives (``LedgerStore.lives``)."""


def is_gone(row: Mapping[str, Any], lives: Lives) -> bool:
    """Return whether an instance is known to have ended.

    Its row says so, the lock that it held for its life is free, or its process of this machine is gone.
    """
    if row["ended"]:
        return True
    if (name := row.get("life")) is not None and (alive := lives(name)) is not None:
        return not alive
    pid = row.get("pid")
    return (
        row.get("host") == here().machine()
        and isinstance(pid, int)
        and pid != here().pid()
        and not here().is_running(pid)
    )


def gone_instances(rows: Mapping[str, Mapping[str, Any]], now_ms: int, lives: Lives) -> frozenset[str]:
    """Return the instances whose sessions count as ended: they are gone, or on another machine and silent."""
    silent, mine = silent_instances(rows, now_ms), here().machine()
    return frozenset(
        key for key, row in rows.items() if is_gone(row, lives) or (key in silent and row.get("host") != mine)
    )


def gone_here(store: LedgerStore) -> frozenset[str]:
    """Return the instances of a ledger whose sessions count as ended, seen from this machine."""
    return gone_instances(store.marks("instance", ""), store.now_ms(), store.lives)


def gone_in(store: LedgerStore) -> Gone:
    """Return what looks for them at one moment of that ledger."""
    return lambda ledger: gone_instances(ledger.marks("instance", ""), ledger.now_ms(), store.lives)


def positive(name: str, value: int) -> int:
    """Return a positive whole number. Raises ``ConfigError`` naming it."""
    if type(value) is not int or value <= 0:
        raise ConfigError(f"{name}: {value!r} is not a positive whole number")
    return value


def read_networks(chain: ChainReader | None, policy: Policy, *, unsafe_no_chain: bool) -> frozenset[str]:
    """Return the networks whose chain can be read.

    Raises ``ConfigError`` if a real network has no chain to check claims against, unless *unsafe_no_chain* allows it.
    """
    readable: frozenset[str] = frozenset() if chain is None else chain.networks
    if policy.networks is None or unsafe_no_chain:
        return readable
    blind = sorted(set(policy.networks) - TEST_NETWORKS - readable)
    if blind:
        raise ConfigError(
            f"chains: policy.networks allows {', '.join(blind[:3])}, where real money moves, and no RPC is configured; "
            f'add chains={{"{blind[0]}": "https://…"}}, or set unsafe_no_chain=True'
        )
    return readable


def kill_path(kill_file: Path | str | None) -> Path | None:
    """Return the absolute path of a kill file, since a process may change its directory. Raises ``ConfigError``."""
    if kill_file is None:
        return None
    if not isinstance(kill_file, (str, Path)) or not str(kill_file).strip() or str(kill_file) == ".":
        raise ConfigError(f"kill_file: {kill_file!r} is not a path; write '/run/x402guard.stop'")
    if LEFT_IN_A_PATH.search(str(kill_file)) or "://" in str(kill_file):
        raise ConfigError(
            f"kill_file: {str(kill_file)!r:.200} is no path that its owner can mean: it has a blank, a quote or ; at an end, "
            "a character that is not shown, a comment, a $NAME or a scheme; write '/run/x402guard.stop'"
        )
    try:
        found = Path(kill_file).expanduser().absolute()
        is_there = found.parent.is_dir()
        found.exists()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"kill_file: {str(kill_file)!r:.200} cannot be looked at: {error}") from None
    if not is_there:
        raise ConfigError(
            f"kill_file: there is no folder {found.parent}, so nothing could stop this guard; make it first"
        )
    return found


def whole_id(hold: str, known: Iterable[str]) -> str:
    """Return the whole id of a hold that is written with a unique beginning of it. Raises ``ConfigError``."""
    given = check_name("hold", hold).rstrip("…").lower().removeprefix("0x")
    if not given.isascii():
        raise ConfigError(f"hold: {hold!r:.60} is no id of a hold; a report shows them")
    found = [hold_id for hold_id in known if given and hold_id.startswith(given)]
    if len(found) > 1:
        raise ConfigError(f"hold: {len(found)} ids begin with {hold!r}; write more of the id")
    return found[0] if found else hold


def as_ms(name: str, at: datetime | None) -> int | None:
    """Return a time as unix milliseconds. Raises ``ConfigError`` for one without a time zone."""
    if at is None:
        return None
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise ConfigError(f"{name}: {at!r:.60} is no time with a time zone; write datetime(2026, 11, 26, tzinfo=UTC)")
    return round(at.timestamp() * 1000)


def existing_ledger(ledger: str | Path | None) -> str:
    """Return the URL of a ledger; None is that of the settings. Raises ``ConfigError`` for a missing file."""
    from x402guard.guard.settings import load_settings

    url = as_ledger_url(load_settings().ledger if ledger is None else ledger)
    if (is_postgres(url) or url.startswith("sqlite:///")) and not ledger_exists(url):
        check_ledger_url(url)
        where = url if is_postgres(url) else ledger_path(url)
        raise ConfigError(
            f"ledger: no ledger yet at {where}; `x402guard budget set wallet AMOUNT --new` makes it, or the first run of "
            "an agent. Name another one with --ledger or X402GUARD_LEDGER"
        )
    return url


def may_write(url: str) -> bool:
    """True if this user may write a ledger; a server says so itself."""
    return not url.startswith("sqlite:///") or all(
        os.access(p, os.W_OK) for p in (ledger_path(url), ledger_path(url).resolve().parent)
    )
