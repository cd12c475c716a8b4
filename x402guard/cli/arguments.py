"""The options that commands share, and what an owner types: amounts, and yes or no."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from rich.console import Console

from x402guard.errors import ConfigError
from x402guard.guard.settings_file import find_settings
from x402guard.kernel.rows import Nanos
from x402guard.money import dollars_to_nanos
from x402guard.policy.checks import WITHOUT_SIGN
from x402guard.views.words import json_text, printable

LedgerUrl = Annotated[
    str | None,
    typer.Option(
        "--ledger", help="Ledger URL or path, such as ./spend.db; default: X402GUARD_LEDGER or x402guard.toml."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

Method = Annotated[str, typer.Option("--method", "-X", help="The method of the request.")]
Header = Annotated[list[str] | None, typer.Option("--header", "-H", help="A header, 'Name: value'. May be repeated.")]
Data = Annotated[
    str | None, typer.Option("--data", "-d", help="The body; @FILE reads a file. With it, POST is the default.")
]

_AGO: Final = re.compile(r"([0-9]{1,5})([mhd])", re.ASCII)
_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}
_PAUSE: Final = re.compile(r"([0-9]{1,6})(s|m|h)?", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_DAY_S: Final = 86_400


def seconds(option: str, typed: str) -> int:
    """Return a time that was typed, such as ``30s``, ``5m`` or ``1h``, in seconds. Raises ``ConfigError``."""
    match = _PAUSE.fullmatch(typed.strip())
    found = 0 if match is None else int(match[1]) * _SECONDS[match[2] or "s"]
    if not 0 < found <= _DAY_S:
        raise ConfigError(f"{option}: {typed!r} is not a time; write 30s, 5m or 1h, at most one day")
    return found


_DIGITS: Final = re.compile(r"[0-9a-fA-F]{20,}")
_KEY_DIGITS: Final = 64


def without_keys(text: str) -> str:
    """Return a text without what was typed, or stands in a setting, and may be a private key in the wrong place."""
    settings = [value for name, value in os.environ.items() if name.startswith("X402GUARD")]
    with suppress(ConfigError):
        file = find_settings()
        settings.append("" if file is None else file.content.decode(errors="replace"))
    given = [digits for typed in (*sys.argv[1:], *settings) for digits in _DIGITS.findall(typed)]
    keys = [digits for digits in given if len(digits) == _KEY_DIGITS]

    def shown(found: re.Match[str]) -> str:
        return f"{found[0][:6]}…[hidden]" if any(key.startswith(found[0]) for key in keys) else found[0]

    return _DIGITS.sub(shown, text) if keys else text


_SHELLS: Final = re.compile(r".*\$.*|[^0-9.]*\.[0-9]+|\s*")
"""What a shell leaves of ``$0.50`` (``bash.50``) or ``$2`` (nothing)."""


def typed_amount(text: str, *, field: str = "amount") -> Nanos:
    """Return an amount of dollars that was typed, in nano-dollars: ``20.00`` or ``$20.00``. Raises ``ConfigError``."""
    try:
        return dollars_to_nanos(text, field=field)
    except (TypeError, ValueError):
        advice = f"; {WITHOUT_SIGN}" if _SHELLS.fullmatch(text) else ""
        raise ConfigError(
            f"{field}: {text[:40]!r} is not a dollar amount; write it as 20.00: not negative, without a sign or letters, at most "
            f"nine decimals and a billion dollars{advice}"
        ) from None


def typed_budget(text: str, *, field: str) -> Nanos:
    """Return a budget that was typed, in nano-dollars. Raises ``ConfigError`` for one of nothing: a shell reads ``$2``."""
    found = typed_amount(text, field=field)
    if not found:
        raise ConfigError(f"{field}: {text[:40]!r} is a budget of nothing; {WITHOUT_SIGN}")
    return found


def typed_request(url: str, method: str, headers: list[str] | None, data: str | None) -> httpx.Request:
    """Return the request that was typed. Raises ``ConfigError`` naming the option."""
    given: list[tuple[str, str]] = []
    for header in headers or ():
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"--header: {header[:60]!r} is no header; write 'Name: value'")
        given.append((name.strip(), value.strip()))
    body = None if data is None else data.encode()
    if data is not None and data.startswith("@"):
        try:
            body = Path(data[1:]).read_bytes()
        except OSError as error:
            raise ConfigError(f"--data: {data[1:]!r} cannot be read: {error.strerror}") from None
    if body is not None and not any(name.lower() == "content-type" for name, _ in given):
        given.append(("content-type", "application/json"))
    try:
        request = httpx.Request(
            "POST" if body is not None and method == "GET" else method, url, headers=given, content=body
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"url: {url[:200]!r} is no URL: {error}") from None
    if request.url.scheme not in ("http", "https") or not request.url.host:
        raise ConfigError(f"url: {url[:200]!r} is no URL; write https://seller.example/path")
    return request


def typed_time(text: str, *, option: str = "--since") -> datetime:
    """Return a time that was typed: ``2026-11-01``, ``2026-11-01T12:00`` (UTC), ``24h`` or ``7d`` ago."""
    ago = _AGO.fullmatch(text.strip())
    if ago is not None:
        return max(datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: int(ago[1])}), datetime(1971, 1, 1, tzinfo=UTC))
    try:
        given = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(f"{option}: {text[:40]!r} is no time; write 2026-11-01, 24h or 7d") from None
    if not 1970 < given.year < 9000:
        raise ConfigError(f"{option}: {text[:40]!r} is no time of a ledger; write 2026-11-01, 24h or 7d")
    return given if given.tzinfo is not None else given.replace(tzinfo=UTC)


def document(path: Path, *, what: str) -> bytes:
    """Return the content of a file; ``-`` is a pipe. Raises ``ConfigError`` that names *what* it is."""
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what}: {path} cannot be read: {error.strerror}") from None


def say(text: str, values: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what was done: as a sentence, or its *values* as JSON."""
    typer.echo(json_text(values) if as_json else printable(text))


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal's stderr that something is under way, for what can take longer than a second."""
    with Console(stderr=True).status(f"{what} …"):
        yield


def tell_as_of(as_of: float | None) -> None:
    """Say on stderr as of when a ledger is shown, in unix seconds, if it is a replica."""
    if as_of is not None:
        told = datetime.fromtimestamp(as_of, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        typer.echo(f"read from a replica, as of {told}", err=True)


def confirmed(question: str, otherwise: str) -> None:
    """Ask the owner at the terminal. Raises ``ConfigError``, with the text *otherwise*, if there is none.

    Raises ``typer.Exit`` with code 1 for any answer but yes; then nothing is changed.
    """
    if not sys.stdin.isatty():
        raise ConfigError(otherwise)
    if not typer.confirm(printable(question), err=True):
        typer.echo("nothing is changed", err=True)
        raise typer.Exit(1)
