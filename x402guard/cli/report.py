"""Defines the commands ``report`` and ``verify-report``."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Final, TypedDict

import typer

from x402guard.cli.arguments import AsJson, LedgerUrl, document, tell_as_of, typed_time
from x402guard.cli.keys import report_key
from x402guard.errors import ConfigError
from x402guard.guard import signed_report
from x402guard.guard.owner import Owner
from x402guard.views.export import EVENT_NAME, HEADER, export
from x402guard.views.model import MOST_CALLS
from x402guard.views.page import MARK
from x402guard.views.report import Report


def report(
    session: Annotated[str | None, typer.Argument(help="A session's id or name; default: the last session.")] = None,
    *,
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write it as a page to this file, without network; with many calls, a CSV beside it."
        ),
    ] = None,
    sign: Annotated[
        Path | None, typer.Option(help="Print it as JSON, signed by the key in this file (x402guard keys report FILE).")
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", help="Each captured entry as a line: csv, stripe-meter or orb.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Only what was captured since 2026-11-01, 24h or 7d.")] = None,
    until: Annotated[str | None, typer.Option(help="Only what was captured before this time.")] = None,
    event_name: Annotated[str, typer.Option(help="The name of the events for a billing system.")] = EVENT_NAME,
) -> None:
    """Print a session's report, or write it as a page, or as lines for a spreadsheet or a billing system.

    Example: x402guard report wallet --since 2026-11-01 --html november.html
    """
    forms = {"--json": as_json, "--html": html is not None, "--sign": sign is not None, "--format": form is not None}
    chosen = [option for option, given in forms.items() if given]
    if len(chosen) > 1:
        raise ConfigError(f"{chosen[1]}: it does not go with {chosen[0]}; leave one of them out")
    if event_name != EVENT_NAME and form is None:
        raise ConfigError("--event-name: it goes with --format")
    between: _Between = {
        "since": None if since is None else typed_time(since),
        "until": None if until is None else typed_time(until, option="--until"),
    }
    if sign is not None and (since or until):
        raise ConfigError("--sign: only the report of all time is signed; leave --since and --until out")
    key = None if sign is None else report_key(sign)
    with Owner(ledger, read_only=True) as owner:
        tell_as_of(owner.as_of)
        if form is not None:
            sys.stdout.writelines(list(export(owner.captures(session, **between), form, event_name)))
            return
        if html is not None and session is None and _is_session(owner, str(html)):
            raise ConfigError(
                f"--html: it takes a file, and {html} is a session; write report {html} --html report.html"
            )
        found = owner.report(session, **between)
        if html is not None:
            typer.echo(_write_page(found, html))
            return
        typer.echo(key.sign(found) if key is not None else found.to_json() if as_json else found.to_text())


def _is_session(owner: Owner, word: str) -> bool:
    try:
        return bool(owner.budget(word))
    except ConfigError:
        return False


class _Between(TypedDict):
    """A period as ``Owner`` takes it."""

    since: datetime | None
    until: datetime | None


_PAGE: Final = MARK.encode()
_TABLE: Final = HEADER.encode()


def _write_page(found: Report, path: Path) -> str:
    """Write a report as a page, with a CSV beside it if the page does not list every call. Return what was written."""
    if path.name in ("", "-", ".."):
        raise ConfigError(f"--html: {str(path)!r} is no file; write a name such as report.html")
    view = found.view
    lists_all = view is None or view.calls_count <= MOST_CALLS
    beside = path.with_suffix(".csv")
    if beside == path:
        raise ConfigError(f"--html: {path} is the name of the CSV beside the page; write a name such as report.html")
    _refuse_another_file(path, _PAGE)
    if lists_all:
        return _write(path, found.to_html())
    _refuse_another_file(beside, _TABLE)
    table = _write(beside, "".join(export(found.captures(), "csv")))
    return f"{_write(path, found.to_html(csv=beside.name))}\n{table}"


def _refuse_another_file(path: Path, begins: bytes) -> None:
    """Raise ``ConfigError`` if what is there is not a file of ours, which may be replaced."""
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ConfigError(f"--html: {path} is there and is no plain file; name another file")
        if path.exists():
            with path.open("rb") as known:
                if known.read(len(begins)) not in (begins, b""):
                    raise ConfigError(f"--html: {path} is there and is no report; name another file")
    except OSError as error:
        raise ConfigError(f"--html: {path} cannot be read: {error.strerror}") from None


def _write(path: Path, text: str) -> str:
    """Write a file as a whole, for this user alone: it names customers, sellers and what was bought."""
    body = text.encode("utf-8", "replace")
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as made:
            try:
                made.write(body)
                made.close()
                Path(made.name).replace(path)
            except BaseException:
                Path(made.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(f"--html: {path} cannot be written: {error.strerror}") from None
    return f"written: {path} ({len(body) / 1000:,.0f} kB)"


def verify_report(
    path: Annotated[Path, typer.Argument(help="A signed report; - reads it from a pipe.")],
    key: Annotated[str, typer.Option("--key", help="The public key of who signs: 64 hex digits.")],
    as_json: AsJson = False,
) -> None:
    """Check that a report is signed by a key and unchanged, and print it. It needs no ledger.

    Exit code 2 if it is not. Example: x402guard verify-report signed.json --key 2a87a807…
    """
    signed = signed_report.verify_report(document(path, what="signed report"), key)
    if as_json:
        typer.echo(signed.report.to_json())
        return
    at = datetime.fromtimestamp(signed.signed_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    typer.echo(f"{signed.report.to_text()}\n\nsigned at {at} by {signed.public_key}, and unchanged")
