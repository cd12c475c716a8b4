"""Defines the commands ``sessions``, ``predict`` and ``holds``, which only read the ledger."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from x402guard.cli.arguments import AsJson, LedgerUrl, tell_as_of, typed_time
from x402guard.guard.owner import Owner
from x402guard.guard.owner_rows import BudgetRow
from x402guard.ledger.queries import STANDINGS
from x402guard.policy.checks import check_choice
from x402guard.views.words import json_text, printable

holds = typer.Typer(
    help="List the live holds, cancel one, or forgive a purchase whose answer was lost. Example: x402guard holds",
    invoke_without_command=True,
)

_PIPE_WIDTH: Final = 1000
_HOLD_ID: Final = re.compile(r"[0-9a-f]{64}")
_BRIEF_SESSION: Final = ("id", "name", "kind", "state", "terminated_by", "budget", "per", "spent", "held", "remaining")
_BRIEF_HOLD: Final = ("id", "session", "amount", "payee", "deadline", "in_doubt", "claimed", "request")


def show(rows: list[dict[str, Any]], *, as_json: bool, empty: str, brief: Sequence[str] = ()) -> None:
    """Print rows with the same keys: as JSON with all keys, or as a table with the keys *brief* (empty: all)."""
    if as_json:
        typer.echo(json_text(rows))
        return
    if not rows:
        typer.echo(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = brief or tuple(rows[0])
    for name in names:
        # An id is copied into another command, so it stays in one line.
        whole = max(len(_shown(row[name] or "")) for row in rows) if name == "id" else None
        table.add_column(name, overflow="fold", min_width=whole)
    for row in rows:
        table.add_row(
            *(Text("" if row[name] is None else _shown(row[name])) for name in names)
        )  # plain text, not markup
    # Output to a pipe is not cut or folded.
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def _shown(value: object) -> str:
    text = str(value)
    return f"{text[:16]}…" if _HOLD_ID.fullmatch(text) else text


def sessions(
    *,
    name: Annotated[str | None, typer.Option("--name", help="Only this name, or a pattern such as 'court-*'.")] = None,
    state: Annotated[
        str | None, typer.Option("--state", help="Only those that are open, abandoned, closed or tripped.")
    ] = None,
    parent: Annotated[str | None, typer.Option("--parent", help="Only what is below this budget.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Opened since 2026-11-01, or in the last 24h or 7d.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the last so many.")] = None,
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the sessions and budgets as a tree, with the amounts spent, held and left.

    Example: x402guard sessions --state open --since 24h
    """
    if state is not None:
        check_choice("--state", state, STANDINGS)
    asked = any(each is not None for each in (name, state, parent, since))
    opened_since = None if since is None else typed_time(since)
    with Owner(ledger, read_only=True) as owner:
        tell_as_of(owner.as_of)
        rows = owner.sessions(name=name, state=state, parent=parent, since=opened_since, limit=limit)
    if as_json:
        show([row.to_dict() for row in rows], as_json=True, empty="")
        return
    shown = [{**row.to_dict(), "id": f"{'  ' * depth}{row.id}"} for depth, row in as_tree(rows)]
    show(shown, as_json=False, empty="no session fits" if asked else "no sessions yet", brief=_BRIEF_SESSION)


def as_tree(rows: Sequence[BudgetRow]) -> list[tuple[int, BudgetRow]]:
    """Return rows with their depth, each below its parent. A row whose parent is not among them stands at the top."""
    known = {row.id for row in rows}
    below: dict[str | None, list[BudgetRow]] = {}
    for row in rows:
        below.setdefault(row.parent if row.parent in known else None, []).append(row)
    found: list[tuple[int, BudgetRow]] = []
    waiting = [(0, row) for row in reversed(below.get(None, []))]
    while waiting:
        depth, row = waiting.pop()
        found.append((depth, row))
        waiting += [(depth + 1, each) for each in reversed(below.get(row.id, []))]
    return found


def predict(
    name: Annotated[str, typer.Argument(help="The name of the sessions.")],
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show the cost of past sessions of a name: p50 and p95, or "no data" for fewer than five sessions.

    Example: x402guard predict court-research
    """
    with Owner(ledger, read_only=True) as owner:
        tell_as_of(owner.as_of)
        found = owner.predict(name)
    values = {"name": name, "sessions": found.sessions, "p50": _dollars(found.p50), "p95": _dollars(found.p95)}
    typer.echo(json_text(values) if as_json else printable(str(found)))


def _dollars(amount: Decimal | None) -> str | None:
    return None if amount is None else format(amount, "f")


@holds.callback()
def list_holds(context: typer.Context, ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """List every live hold: the amount that may still be taken, the payee, the deadline, and whether it is in doubt.

    Example: x402guard holds --json
    """
    if context.invoked_subcommand is not None:
        return
    with Owner(ledger, read_only=True) as owner:
        tell_as_of(owner.as_of)
        rows = [row.to_dict() for row in owner.holds()]
    show(rows, as_json=as_json, empty="nothing is held", brief=_BRIEF_HOLD)
