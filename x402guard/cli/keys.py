"""Defines the commands ``keys new | import | address | rotate | report``. No key and no password is an argument."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

from x402guard.chain.reader import RpcChainReader
from x402guard.cli.arguments import AsJson, LedgerUrl, say, working
from x402guard.errors import ConfigError
from x402guard.guard.owner import Owner
from x402guard.guard.settings import KEYSTORE_PASSWORD, PRIVATE_KEY, REPORT_KEY_PASSWORD, load_settings
from x402guard.guard.signed_report import ReportKey
from x402guard.kernel.evm import Address
from x402guard.money import format_dollars
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


@keys.command("rotate")
def rotate(
    path: Annotated[Path, typer.Argument(help="The keystore of the new key, such as new-wallet.json.")],
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Let the ledger belong to another key: its budgets, history and purchases go on.

    From then on the key of before signs nothing, in any process. What it has signed stays and counts until it is dead;
    reconcile reads both accounts. Example: x402guard keys rotate new-wallet.json
    """
    new = address_in(path)
    with Owner(ledger) as owner:
        was = owner.change_key(new)
        left = [hold for hold in owner.holds() if hold.payee is not None]
    held = sum((hold.amount for hold in left), Decimal(0))
    text = f"the ledger belongs to {new} now, no more to {was}; set X402GUARD_KEYSTORE to {path} and start your agents again"
    if left:
        text += f". Payments of ${held} that the key of before has signed are out, and count until they are dead: x402guard holds"
    say(text, {"address": new, "before": was, "out": str(held)}, as_json=as_json)
    if not as_json:
        typer.echo(_of_before(was), err=True)


def _of_before(was: str) -> str:
    """Return what the account of before still has, as far as a chain can be asked."""
    settings = load_settings()
    said = []
    with closing(RpcChainReader(settings.read_chains())) as chain:
        for asset in settings.registry().all():
            if asset.network in chain.networks:
                funds = chain.funds(asset.network, asset.contract, Address(was))
                if funds is None or funds.balance:
                    amount = "unknown" if funds is None else f"${format_dollars(asset.value_nanos(funds.balance))}"
                    said.append(f"{amount} of {asset.symbol} on {asset.network}")
    return f"{was} still has: {', '.join(said) or 'nothing that could be seen'}. Move it to the new address; reconcile tells of that transfer until it is acknowledged"


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
