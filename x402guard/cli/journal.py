"""Defines the commands ``journal``: what ``reversible`` functions have done in a session, and its undoing after a crash."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from x402guard.cli.arguments import AsJson, LedgerUrl, confirmed, tell_as_of
from x402guard.cli.sessions import show
from x402guard.errors import ConfigError
from x402guard.guard.owner import Owner
from x402guard.ledger.actions import OPEN_STATES
from x402guard.views.words import printable

journal = typer.Typer(help="What a session has done that can be undone. After a crash, undo it.", no_args_is_help=True)

SessionName = Annotated[str, typer.Argument(help="The session's id, or its name if only one has it.")]

_BRIEF = ("number", "state", "function", "at", "error")


@journal.command("show")
def show_actions(session: SessionName, ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """List the actions of a session and below: staged, begun, done, committed, undone or failed.

    Example: x402guard journal show run-42
    """
    with Owner(ledger, read_only=True) as owner:
        tell_as_of(owner.as_of)
        rows = [row.to_dict() for row in owner.actions(session)]
    show(rows, as_json=as_json, empty="no action that can be undone", brief=_BRIEF)


@journal.command("rollback")
def roll_back(
    session: SessionName,
    modules: Annotated[
        list[str] | None, typer.Argument(help="The modules whose functions have done it, as Python imports them.")
    ] = None,
    *,
    folder: Annotated[Path | None, typer.Option("--from", help="The folder of these modules.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before the undo functions are called.")] = False,
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Undo what a session has done and not committed, the last action first. Exit code 1 unless all of it is undone.

    Only functions that a module named here registers by @reversible are called; nothing that the ledger names is imported.
    Shows each with its arguments and asks. A run that is started again meanwhile makes final what it reaches first; that is
    shown as committed.

    Example: x402guard journal rollback run-42 agent.mail --from ./agent
    """
    _import(folder, modules or [])
    with Owner(ledger) as owner:
        waiting = [row for row in owner.actions(session) if row.state in OPEN_STATES]
        if waiting and not yes:
            for row in reversed(waiting):
                arguments = json.dumps(dict(row.arguments), ensure_ascii=False)
                typer.echo(printable(f"{row.number} {row.function}: {row.undo} with {arguments:.500}"), err=True)
            asked = f"undo these {len(waiting)} actions of {session}"
            confirmed(f"{asked}?", f"rollback: {asked}; --yes does it without a question")
        rows = [row.to_dict() for row in owner.roll_back(session)]
    show(rows, as_json=as_json, empty="nothing to undo", brief=_BRIEF)
    if any(row["state"] != "undone" for row in rows):
        raise typer.Exit(1)


def _import(folder: Path | None, modules: list[str]) -> None:
    """Import the modules that the owner names. Raises ``ConfigError``."""
    if folder is not None:
        if not folder.is_dir():
            raise ConfigError(f"--from: {folder} is no folder")
        sys.path.insert(0, str(folder.resolve()))
    for module in modules:
        try:
            import_module(module)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the owner's own code may raise anything
            raise ConfigError(f"{module}: it cannot be imported ({type(error).__name__}: {str(error)[:200]})") from None
