"""Defines the commands ``approvals``, which answer the questions of guards with ``approver="queue"``."""

from __future__ import annotations

from typing import Annotated

import typer

from x402guard.cli.arguments import AsJson, LedgerUrl, say
from x402guard.cli.sessions import show
from x402guard.guard.owner import Owner

approvals = typer.Typer(
    help="Answer what agents ask before they pay. Without an answer in time, the call is denied.", no_args_is_help=True
)

QuestionId = Annotated[str, typer.Argument(help="The question's id, or the beginning of it if that is unique.")]
Person = Annotated[str | None, typer.Option("--as", help="The approver's name; default: the operating system's user.")]


@approvals.command("list")
def list_questions(ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """List the questions that wait for an answer.

    Example: x402guard approvals list
    """
    with Owner(ledger) as owner:
        rows = [row.to_dict() for row in owner.approvals()]
    brief = ("id", "ends", "yes", "words")
    show(rows, as_json=as_json, empty="no question waits for an answer", brief=brief)


@approvals.command("allow")
def allow(question: QuestionId, by: Person = None, ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """Allow one call, once.

    Example: x402guard approvals allow 3f2a
    """
    _answer(question, by, ledger, yes=True, as_json=as_json)


@approvals.command("deny")
def deny(question: QuestionId, by: Person = None, ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """Deny one call.

    Example: x402guard approvals deny 3f2a
    """
    _answer(question, by, ledger, yes=False, as_json=as_json)


def _answer(question: str, by: str | None, ledger: str | None, *, yes: bool, as_json: bool) -> None:
    with Owner(ledger, by=by) as owner:
        row = (owner.allow if yes else owner.deny)(question)
        said = "allowed" if yes else "denied"
        more = f"; more approvers needed: {row.missing}" if yes and row.missing else ""
        values = {**row.to_dict(), "said": said, "by": owner.by, "missing": row.missing if yes else 0}
        say(f"{said} by {owner.by}: {row.what}{more}", values, as_json=as_json)
