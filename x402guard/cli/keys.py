"""Defines the commands ``keys new | import | address | report``. No key and no password is an argument."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from x402guard.cli.arguments import AsJson, say, working
from x402guard.errors import ConfigError
from x402guard.guard.settings import KEYSTORE_PASSWORD, PRIVATE_KEY, REPORT_KEY_PASSWORD, load_settings
from x402guard.guard.signed_report import ReportKey
from x402guard.x402.keys import keystore_address, make_keystore, parse_key
from x402guard.x402.signer import address_in, refuse_key

keys = typer.Typer(no_args_is_help=True, help="Make a keystore, put a key into one, and show whose key it is.")

Keystore = Annotated[Path, typer.Argument(help="The keystore file, such as wallet.json.")]


@keys.command("new")
def new(path: Keystore, as_json: AsJson = False) -> None:
    """Make a new key, and write it to a keystore that only you can read.

    The password is asked for, or read from X402GUARD_KEYSTORE_PASSWORD. Example: x402guard keys new wallet.json
    """
    _check_new(path)
    _write_keystore(path, _keystore(), as_json=as_json)


@keys.command("import")
def import_(path: Keystore, as_json: AsJson = False) -> None:
    """Put a key that you have into a keystore. The key is asked for, or read from a pipe.

    Example: x402guard keys import wallet.json
    """
    _check_new(path)
    at_terminal = sys.stdin.isatty()
    given = typer.prompt("private key", hide_input=True, err=True) if at_terminal else sys.stdin.readline(10_000)
    wrong = parse_key(given)
    if isinstance(wrong, str):
        del given
        raise ConfigError(f"private key: {wrong}")
    _write_keystore(path, _keystore(given), as_json=as_json)


@keys.command("address")
def address(
    path: Annotated[Path | None, typer.Argument(help="A keystore file; default: the key that is set.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the address of a keystore, or of the key in the settings. It needs no password.

    Example: x402guard keys address wallet.json
    """
    payer = load_settings().payer() if path is None else address_in(path)
    if payer is None:
        raise ConfigError(f"keys: no key is set; name a keystore file, or set X402GUARD_KEYSTORE or {PRIVATE_KEY}")
    say(payer, {"address": payer}, as_json=as_json)
    if path is not None and not as_json:
        typer.echo("The file says so; it is checked against the key when the keystore is opened.", err=True)


@keys.command("report")
def report(
    path: Annotated[Path, typer.Argument(help="The file for the key, such as report-key.json.")],
    as_json: AsJson = False,
) -> None:
    """Make a key that signs reports, and print the public key that others check them with. It is no key of a wallet.

    The password is asked for, or read from X402GUARD_REPORT_KEY_PASSWORD. Example: x402guard keys report report-key.json
    """
    _check_new(path, "report key")
    key = ReportKey.new()
    _write(path, key.to_json(_new_password(REPORT_KEY_PASSWORD, "report key")))
    text = f"{key.public} is the public key of {path}; x402guard report --sign {path} signs with it"
    say(text, {"public_key": key.public, "file": str(path)}, as_json=as_json)


def report_key(path: Path) -> ReportKey:
    """Return the key in a file that ``keys report`` has written; its password is asked for. Raises ``ConfigError``."""
    try:
        path.open("rb").close()  # before the password is asked for
    except OSError as error:
        raise ConfigError(f"report key: {path} cannot be read: {error.strerror}") from None
    password = os.environ.pop(REPORT_KEY_PASSWORD, "")
    if not password and sys.stdin.isatty():
        password = typer.prompt("password", hide_input=True, err=True)
    if not password:
        raise ConfigError(f"report key: it has a password; run this at a terminal, or set {REPORT_KEY_PASSWORD}")
    return ReportKey.from_file(path, password=password)


def _check_new(path: Path, what: str = "keystore") -> None:
    refuse_key(path.name)
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{what}: {path} already exists, and a key is never overwritten; name another file")
    if not path.parent.is_dir():
        raise ConfigError(f"{what}: there is no folder {path.parent}")


def _new_password(variable: str = KEYSTORE_PASSWORD, what: str = "keystore") -> str:
    """Return the password for a new key. Raises ``ConfigError`` for an empty one."""
    password = os.environ.pop(variable, "")
    if not password and sys.stdin.isatty():
        password = typer.prompt("password", hide_input=True, confirmation_prompt=True, err=True)
    if not password:
        raise ConfigError(f"{what}: it needs a password; run this at a terminal, or set {variable}")
    return password


def _keystore(given: object = None) -> str:
    password = _new_password()
    try:
        with working("making the password slow to guess"):
            return make_keystore(password, given)
    except ValueError as error:
        wrong = str(error)
    del given, password
    raise ConfigError(f"keystore: {wrong}")


def _write_keystore(path: Path, text: str, *, as_json: bool) -> None:
    _write(path, text)
    address = keystore_address(text)
    told = f"{address} is in {path}; set X402GUARD_KEYSTORE={path} and {KEYSTORE_PASSWORD}"
    say(told, {"address": address, "file": str(path)}, as_json=as_json)


def _write(path: Path, text: str) -> None:
    """Write a key that only its owner can read. It is complete, or it is not there."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)  # unlike a rename, it overwrites nothing
    except OSError as error:
        raise ConfigError(f"keystore: {path} cannot be written: {error}") from None
    finally:
        draft.unlink(missing_ok=True)
