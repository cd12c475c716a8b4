"""Defines ``verify``, and the owner's commands on a ledger: ``ledger move``, ``archive``, ``restore`` and ``clock``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from x402guard.cli.arguments import AsJson, LedgerUrl, document, say, tell_as_of, typed_time, working
from x402guard.cli.keys import report_key
from x402guard.errors import ConfigError, InconsistentLedger
from x402guard.flow.surroundings import here
from x402guard.guard import signed_report
from x402guard.guard.approvers import operating_user
from x402guard.guard.arguments import Lives, existing_ledger, gone_here, gone_instances
from x402guard.guard.clock import accept_clock, refuse_strange_clock
from x402guard.guard.owner import Owner
from x402guard.guard.settings import load_settings
from x402guard.kernel.rows import WALLET, Nanos
from x402guard.ledger.lost import count_lost
from x402guard.ledger.owner import owner_mark
from x402guard.ledger.purchases import DEFAULT_MEMORY_S
from x402guard.ledger.sessions import ensure_wallet
from x402guard.ledger.view import LedgerView, Scope
from x402guard.money import format_dollars
from x402guard.stores import as_ledger_url, check_ledger_url, is_postgres, ledger_path, open_store
from x402guard.stores.archiving import Archivable, unnamed_files
from x402guard.stores.archiving import archive as move_to_files
from x402guard.stores.file_lock import FILE_MARK, place_of
from x402guard.stores.read_only import ReadOnlyStore
from x402guard.stores.sqlite import SqliteStore
from x402guard.views.words import printable

_LEAST_AGE_S = 2 * DEFAULT_MEMORY_S
"""Seconds. What an agent has bought is remembered by its hold, by default for half of that (``purchase_memory_s``)."""

ledger = typer.Typer(no_args_is_help=True, help="Move, archive or repair the ledger. Only the owner should be able to.")


@ledger.callback()
def _group() -> None:
    """Move, archive or repair the ledger. Only the owner should be able to."""


@ledger.command("clock")
def clock(
    accept: Annotated[bool, typer.Option("--accept", help="Take this clock as right.")] = False,
    ledger_url: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Compare the clock of the ledger with its last entry, and take it as right: this machine's, or its server's.

    That lets a guard open whose clock is a day ahead, and mends a ledger that a wrong clock has led ahead of the time.
    Example: x402guard ledger clock --accept
    """
    url = existing_ledger(ledger_url)
    whose = "the ledger's server" if is_postgres(url) else "this machine"
    with closing(open_store(url)) as store:
        nodes = tuple(node.id for node in store.nodes())
        now_ms, last_ms = store.now_ms(), max((node.last_ms for node in store.nodes()), default=0)
        lines = [f"{whose}: {_shown(now_ms)}; the ledger's last entry: {_shown(last_ms)}"]
        if is_postgres(url):
            lines.append(f"this machine: {_shown(time.time_ns() // 1_000_000)}")
        if accept and WALLET not in nodes:
            raise ConfigError("ledger: no guard has used this ledger yet; there is no time to accept")
        if accept:
            by = operating_user()
            accept_clock(store, by)
            lines.append(f"the clock of {whose} is accepted")
        elif last_ms > now_ms:
            lines.append("the ledger is ahead of this clock; if this clock is right, repeat it with --accept")
    values = {"now": now_ms / 1000, "last_entry": last_ms / 1000, "accepted": accept}
    if as_json:
        typer.echo(json.dumps(values, indent=2))
    else:
        typer.echo("\n".join(lines))


def _shown(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@ledger.command("file")
def file(
    accept: Annotated[bool, typer.Option("--accept", help="Take this file as the ledger.")] = False,
    ledger_url: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Compare the ledger's file with the one that the ledger notes, and take it as right. A copy can only be looked at.

    Where it was moved to another disk or machine, accept it once nothing uses the first file any more: a copy that goes on
    is a second budget.
    Example: x402guard ledger file --accept
    """
    url = existing_ledger(ledger_url)
    if not url.startswith("sqlite:///"):
        raise ConfigError(f"ledger file: {url} is no ledger in a file")
    path = ledger_path(url).resolve()
    with closing(ReadOnlyStore(path, verified=False)) as store:
        noted = store.marks(*FILE_MARK).get(FILE_MARK[1])
    is_noted = noted is None or noted == place_of(path)
    if accept and not is_noted:
        SqliteStore(path, accept_file=True).close()
    told = (
        f"{path} is the file that the ledger notes"
        if is_noted
        else f"{path} is a copy of the file that the ledger notes"
    )
    if not is_noted:
        told += ", and is the ledger from now on" if accept else "; if it is the ledger now, repeat it with --accept"
    say(told, {"file": str(path), "noted": is_noted, "accepted": accept and not is_noted}, as_json=as_json)


@ledger.command("move")
def move(
    to: Annotated[str, typer.Argument(help="postgresql://user@host/database, a database without a ledger.")],
    ledger_url: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Move the ledger in a file to PostgreSQL. The file is closed for good, so that there is never a second budget.

    Agents that have it open are refused at their next change. Repeat the command if it was interrupted.
    Example: x402guard ledger move postgresql:///spend
    """
    url, to = existing_ledger(ledger_url), as_ledger_url(to)
    check_ledger_url(to)
    if not url.startswith("sqlite:///"):
        raise ConfigError(f"ledger move: it moves a ledger in a file, and {url} is none; name the file with --ledger")
    if not is_postgres(to):
        raise ConfigError("ledger move: it moves a ledger to PostgreSQL; write postgresql://user@host/database")
    from x402guard.stores.moving import move_to_postgres

    with working("copying the ledger"):
        entries, budgets = move_to_postgres(ledger_path(url), to)
    text = f"{entries} entries of {budgets} budgets are in {to} now; set X402GUARD_LEDGER to it"
    say(text, {"entries": entries, "budgets": budgets, "ledger": to}, as_json=as_json)


@ledger.command("copy")
def copy(
    file: Annotated[Path, typer.Argument(help="The new file, such as /backup/spend-2026-11-30.db.")],
    ledger_url: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Copy the ledger in a file, whole and verified, while agents use it. `cp` leaves out what is in its -wal file.

    To be put back with `x402guard ledger restore`; agents that open the copy itself are refused.
    Example: x402guard ledger copy /backup/spend-2026-11-30.db
    """
    url = existing_ledger(ledger_url)
    if not url.startswith("sqlite:///"):
        raise ConfigError(f"ledger copy: it copies a ledger in a file; {url} is copied by pg_dump")
    with closing(ReadOnlyStore(ledger_path(url), verified=False)) as store, working("copying the ledger"):
        store.copy_to(file)
    with closing(ReadOnlyStore(file, verified=False)) as made:
        entries, budgets = made.size()
    text = f"{file}: {entries} entries of {budgets} budgets, verified"
    say(text, {"file": str(file.resolve()), "entries": entries, "budgets": budgets}, as_json=as_json)


@ledger.command("upgrade")
def upgrade(
    force: Annotated[
        bool, typer.Option("--force", help="Upgrade although an older installation runs: it is refused from then on.")
    ] = False,
    ledger_url: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Take the ledger to this installation's version, which older installations do not read. A copy of a file is kept.

    Until then this installation reads and writes it as the older ones do, so processes are updated one by one.
    Example: x402guard ledger upgrade
    """
    url = existing_ledger(ledger_url)
    version, newest, rows, now_ms, lives = _versions(url)
    if version >= newest:
        say(f"{url} has ledger version {version} already", {"version": version, "copy": None}, as_json=as_json)
        return
    gone = gone_instances(rows, now_ms, lives)
    alive = {key: row for key, row in rows.items() if key not in gone}
    lines = [
        f"{key}: x402guard {row.get('package', 'of before')}, reads ledger version {row.get('schema', 'unknown')}"
        for key, row in sorted(alive.items())
    ]
    older = [key for key, row in alive.items() if int(row.get("schema", 0)) < newest]
    if older and not force:
        shown = "".join(f"\n  {printable(line)}" for line in lines)
        raise ConfigError(
            f"ledger upgrade: {len(older)} of the processes that use it do not read version {newest}; update and start them "
            f"again first. --force upgrades all the same: each of them is refused at its next change, and pays nothing.{shown}"
        )
    kept = _upgraded(url, version)
    back = (
        f"the copy of before is {kept}. To go back: end every process, put it back in place of the ledger, and run x402guard "
        "ledger restore --accept-older with the older installation"
        if kept
        else "to go back, end every process and restore the pg_dump that you made before, with the older installation"
    )
    text = f"{url} has ledger version {newest} now (before: {version}); {back}"
    say(text, {"version": newest, "copy": None if kept is None else str(kept)}, as_json=as_json)


def _versions(url: str) -> tuple[int, int, Mapping[str, Mapping[str, Any]], int, Lives]:
    """Return a ledger's version, the newest one, its processes by name, and its clock in unix milliseconds."""
    if is_postgres(url):
        from x402guard.stores.moving import instances_of
        from x402guard.stores.postgres_schema import VERSION

        version, rows, now_ms = instances_of(url)
        return version, VERSION, rows, now_ms, lambda _: None
    if not url.startswith("sqlite:///"):
        raise ConfigError(f"ledger upgrade: {url} is no ledger that lasts")
    with closing(ReadOnlyStore(ledger_path(url), verified=False)) as store:
        return store.version, store.schema, store.marks("instance", ""), store.now_ms(), store.lives


def _upgraded(url: str, version: int) -> Path | None:
    """Upgrade a ledger, and return the copy of its file of before."""
    if is_postgres(url):
        from x402guard.stores.moving import upgrade_postgres

        upgrade_postgres(url)
        return None
    path = ledger_path(url)
    kept = path.with_name(f"{path.name}.version-{version}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    with closing(SqliteStore(path)) as store:
        with closing(ReadOnlyStore(path)) as reading, working("copying the ledger"):
            reading.copy_to(kept)
        store.upgrade()
    return kept


@ledger.command("archive")
def archive(
    before: Annotated[str, typer.Option(help="Sessions with nothing newer: 2026-11-01, 90d.")],
    to: Annotated[Path, typer.Option(help="The folder for the files.")] = Path(),
    ledger_url: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Move ended sessions to compressed files. Their sums and the hashes of their journals stay in the ledger.

    A session moves with all below it, if nothing of it can change any more: run `x402guard reconcile` before, because a
    payment that no chain has proven keeps its session. Reports and `verify` read the files where they are.
    Example: x402guard ledger archive --before 90d --to /var/lib/x402guard/archive
    """
    url, until = existing_ledger(ledger_url), typed_time(before, option="--before")
    least_s = max(_LEAST_AGE_S, load_settings().purchase_memory_s + DEFAULT_MEMORY_S)
    if until > datetime.now(UTC) - timedelta(seconds=least_s):
        days = -(-least_s // 86_400)
        raise ConfigError(
            f"--before: {before!r} is less than {days} days ago, and agents may still ask for what they bought then "
            f"(purchase_memory_s); write {days}d or an earlier time"
        )
    if not to.is_dir():
        raise ConfigError(f"--to: {to} is no folder; create it first, where it is backed up")
    with closing(open_store(url)) as store:
        refuse_strange_clock(store, None, here().boot_id())  # one that is ahead would move what is still asked for
        if not isinstance(store, Archivable):
            raise ConfigError(f"ledger archive: {url} is no ledger that lasts")
        gone = gone_here(store)
        with working("writing the files"):
            moved = move_to_files(store, round(until.timestamp() * 1000), to.resolve(), gone=gone)
        unnamed = unnamed_files(store, to.resolve())
    text = (
        f"{moved.sessions} sessions with {moved.entries} entries are in {to} now (files: {len(moved.files)}, {moved.size:,} bytes); "
        "keep them as long as the ledger"
        if moved.sessions
        else f"no session that ended before {_shown(round(until.timestamp() * 1000))} can be archived"
    )
    if unnamed:
        text += f"; this ledger does not name: {', '.join(unnamed)}"
    values = {"sessions": moved.sessions, "entries": moved.entries, "holds": moved.holds, "bytes": moved.size}
    say(text, {**values, "files": list(moved.files), "unnamed": unnamed}, as_json=as_json)


@ledger.command("restore")
def restore(
    accept_older: Annotated[
        bool, typer.Option("--accept-older", help="Take this older ledger as the one that counts.")
    ] = False,
    ledger_url: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Take a ledger into use that is older than the one that was here, such as a backup.

    What the lost ledger had used, as far as the lock file knows, is captured in the wallet. Every session and named
    budget is tripped until it is reset, because what it has spent since is unknown.
    Example: x402guard ledger restore --accept-older
    """
    if not accept_older:
        raise ConfigError("ledger restore: this cannot be undone; repeat it with --accept-older")
    url = existing_ledger(ledger_url)
    if not url.startswith("sqlite:///"):
        raise ConfigError("ledger: only a ledger in a file can be restored, such as sqlite:///x402guard.db")
    store = SqliteStore(ledger_path(url), accept_older=True)
    try:
        commits, lost = store.behind()
        if not commits:
            raise ConfigError(f"ledger: {url} is not older than the one that was here; there is nothing to restore")
        nodes = tuple(node.id for node in store.nodes())
        is_empty = not nodes
        hold_id = f"restored:{commits}:{store.now_ms()}"
        scope = Scope(nodes=(WALLET, *nodes), holds=(hold_id,), marks=(owner_mark(WALLET),), durable=True)
        by = operating_user()

        def count(view: LedgerView) -> None:
            if not view.has_node(WALLET):  # an empty copy: no room is known but what is counted
                ensure_wallet(view, Nanos(lost))
            count_lost(view, hold_id, Nanos(lost), by, nodes)

        store.transact(scope, count)
        store.restored()
        store.note_file()
        tripped = sum(node.id != WALLET and node.state == "tripped" for node in store.nodes())
    finally:
        store.close()
    text = (
        f"{commits} durable commits are lost; ${format_dollars(Nanos(lost))} are captured in the wallet, and {tripped} sessions and "
        "budgets are tripped until you reset them"
    )
    if is_empty:
        text += "; nothing else is left of it, and the wallet has no room until you set its limit: x402guard budget set wallet AMOUNT"
    say(text, {"lost_commits": commits, "captured": format_dollars(Nanos(lost)), "tripped": tripped}, as_json=as_json)


def verify(
    *,
    ledger: LedgerUrl = None,
    anchor: Annotated[
        Path | None,
        typer.Option(
            help="Print an anchor of the ledger, signed by the key in this file (x402guard keys report FILE)."
        ),
    ] = None,
    against: Annotated[Path | None, typer.Option(help="Compare with an earlier anchor.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="The public key of who signed it: 64 hex digits.")] = None,
    without_archives: Annotated[
        bool, typer.Option("--without-archives", help="Do not read the files of archived sessions.")
    ] = False,
    counters: Annotated[
        Path | None,
        typer.Option(help="Count the steps of the guards again, under the policy of this settings file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify every entry, balance, hold, limit and trip against the journal. Exit code 1 if they are inconsistent.

    An anchor binds all journals as they are now. Compared with it, a later ledger has lost nothing, or is told of.
    The counters of the guards are no part of a journal: --counters tells which of them say less than the journals.

    Example: x402guard verify --ledger ./spend.db
    """
    if (against is None) != (key is None):
        raise ConfigError(
            "--against: give an anchor and the public key of who signed it: --against FILE --key 2a87a807…"
        )
    if anchor is not None and as_json:
        raise ConfigError("--anchor: an anchor is JSON; leave --json out")
    earlier = (
        None
        if against is None or key is None
        else signed_report.verify_anchor(document(against, what="signed anchor"), key)
    )
    signs = None if anchor is None else report_key(anchor)
    policy = None if counters is None else load_settings(counters).policy.build()
    hint: list[str] = []
    with _looked_at(ledger, as_json=as_json) as owner:
        tell_as_of(owner.as_of)
        heads = () if signs is None else owner.heads()  # before the audit, which then covers them
        with working("reading the journal"):
            problems = owner.verify(earlier, archives=not without_archives)
            if policy is not None and not problems:  # what is counted again is what the journals say
                problems = owner.verify_counters(policy, archives=not without_archives)
                hint = [f"The policy is that of {counters}; an agent with another policy counts otherwise."]
        entries, budgets = owner.size()
    problems = problems if budgets else [NO_WALLET]
    if as_json:
        typer.echo(json.dumps({"entries": entries, "budgets": budgets, "problems": problems}, indent=2))
    elif signs is not None and not problems:
        typer.echo(signs.sign_anchor(heads))
    else:
        consistent = f"{entries} entries of {budgets} budgets: the ledger is consistent"
        lines = [*problems, *hint] if problems else [consistent, *_compared(earlier, counters)]
        typer.echo("\n".join(map(printable, lines)), err=signs is not None)
    raise typer.Exit(1 if problems else 0)


NO_WALLET: Final = "it has no wallet: nothing was ever counted in it, or it is a copy without its -wal file"


@contextmanager
def _looked_at(ledger_url: str | None, *, as_json: bool) -> Iterator[Owner]:
    """Give the ledger, in which nothing changes. A file with nothing in it is a finding."""
    try:
        owner = Owner(ledger_url, verified=False, read_only=True)
    except InconsistentLedger as error:
        if as_json:
            typer.echo(json.dumps({"entries": 0, "budgets": 0, "problems": [str(error)]}, indent=2))
        else:
            typer.echo(f"{printable(str(error))}\n{printable(error.advice)}")
        raise typer.Exit(1) from error
    with owner:
        yield owner


def _compared(earlier: signed_report.Anchor | None, counters: Path | None) -> Iterator[str]:
    """Yield what else was compared, and is well."""
    if counters is not None:
        yield f"the counters of the guards say no less than the journals, under {counters}"
    if earlier is not None:
        anchored_at = _shown(earlier.signed_at * 1000)
        yield f"it has all of the {len(earlier.heads)} journals that were anchored at {anchored_at}"
