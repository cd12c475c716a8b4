"""Defines the commands ``report`` and ``verify-report``."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from x402guard.cli.arguments import AsJson, LedgerUrl, typed_time
from x402guard.cli.keys import report_key
from x402guard.errors import ConfigError
from x402guard.guard import signed_report
from x402guard.guard.owner import Owner
from x402guard.views.export import EVENT_NAME, export


def report(
    session: Annotated[str | None, typer.Argument(help="A session's id or name; default: the last session.")] = None,
    *,
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
    sign: Annotated[
        Path | None, typer.Option(help="Print it as JSON, signed by the key in this file (x402guard keys report FILE).")
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", help="Each captured entry as a line: csv, stripe-meter or orb.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="With --format: captured since 2026-11-01, 24h or 7d.")] = None,
    until: Annotated[str | None, typer.Option(help="With --format: captured before this time.")] = None,
    event_name: Annotated[str, typer.Option(help="The name of the events for a billing system.")] = EVENT_NAME,
) -> None:
    """Print a session's report, or all that was captured as lines for a spreadsheet or a billing system.

    Example: x402guard report wallet --format csv --since 2026-11-01 > november.csv
    """
    if form is not None:
        if as_json or sign is not None:
            raise ConfigError("--format: it writes lines of its own; leave --json and --sign out")
        between = {
            "since": None if since is None else typed_time(since),
            "until": None if until is None else typed_time(until, option="--until"),
        }
        with Owner(ledger, read_only=True) as owner:
            lines = list(export(owner.captures(session, **between), form, event_name))
        sys.stdout.writelines(lines)
        return
    for option, given in (("--since", since), ("--until", until), ("--event-name", event_name != EVENT_NAME)):
        if given:
            raise ConfigError(f"{option}: it goes with --format")
    key = None if sign is None else report_key(sign)
    with Owner(ledger) as owner:
        found = owner.report(session)
    typer.echo(key.sign(found) if key is not None else found.to_json() if as_json else found.to_text())


def verify_report(
    path: Annotated[Path, typer.Argument(help="A signed report; - reads it from a pipe.")],
    key: Annotated[str, typer.Option("--key", help="The public key of who signs: 64 hex digits.")],
    as_json: AsJson = False,
) -> None:
    """Check that a report is signed by a key and unchanged, and print it. It needs no ledger.

    Exit code 2 if it is not. Example: x402guard verify-report signed.json --key 2a87a807…
    """
    signed = signed_report.verify_report(_read(path), key)
    if as_json:
        typer.echo(signed.report.to_json())
        return
    at = datetime.fromtimestamp(signed.signed_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    typer.echo(f"{signed.report.to_text()}\n\nsigned at {at} by {signed.public_key}, and unchanged")


def _read(path: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"signed report: {path} cannot be read: {error.strerror}") from None
