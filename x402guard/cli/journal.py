"""Defines the commands ``journal``: what ``reversible`` functions have done in a session, and its undoing after a crash."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from x402guard.cli.arguments import AsJson, LedgerUrl, tell_as_of
from x402guard.cli.sessions import show
from x402guard.guard.owner import Owner

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
def roll_back(session: SessionName, ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """Undo what a session has done and not committed, the last action first. Exit code 1 unless all of it is undone.

    A run that is started again meanwhile makes final what it reaches first; that is shown as committed. The undo
    functions are imported from the folder in which this runs, or as installed.

    Example: x402guard journal rollback run-42
    """
    sys.path.insert(0, "")
    with Owner(ledger) as owner:
        rows = [row.to_dict() for row in owner.roll_back(session)]
    show(rows, as_json=as_json, empty="nothing to undo", brief=_BRIEF)
    if any(row["state"] != "undone" for row in rows):
        raise typer.Exit(1)
