"""Defines the commands ``delegations``: the tasks that agents have given to each other, and the revoking of one."""

from __future__ import annotations

from typing import Annotated

import typer

from x402guard.cli.arguments import AsJson, LedgerUrl, say, tell_as_of
from x402guard.cli.sessions import show
from x402guard.guard.owner import Owner

delegations = typer.Typer(help="The tasks that agents have given to each other.", no_args_is_help=True)

RequestId = Annotated[str, typer.Argument(help="The request's id, a unique beginning of it, or the session's id.")]
OfSession = Annotated[str | None, typer.Option("--session", help="Only those of this session and below.")]
Reason = Annotated[str, typer.Option("--reason", help="Why, for the journal and for who has delegated.")]

_BRIEF = ("request_id", "task_type", "state", "spent", "budget", "session")


@delegations.command("list")
def list_delegations(session: OfSession = None, ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """List the tasks: offered, working, answered, taken, denied, revoked, expired, tripped, abandoned or asking.

    Example: x402guard delegations list
    """
    with Owner(ledger, read_only=True) as owner:
        tell_as_of(owner.as_of)
        rows = [row.to_dict() for row in owner.delegations(session)]
    show(rows, as_json=as_json, empty="no agent has delegated a task", brief=_BRIEF)


@delegations.command("revoke")
def revoke(
    request: RequestId, reason: Reason = "by its owner", ledger: LedgerUrl = None, as_json: AsJson = False
) -> None:
    """End a task that is not answered: its token is worth nothing, and its session is tripped.

    Example: x402guard delegations revoke t_3f2a
    """
    with Owner(ledger) as owner:
        row = owner.revoke(request, reason)
        say(f"revoked by {owner.by}: {row.task_type} ({row.request_id})", row.to_dict(), as_json=as_json)
