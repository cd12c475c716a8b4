"""Defines the command ``verify``."""

from __future__ import annotations

import json

import typer

from x402guard.cli.arguments import AsJson, LedgerUrl, working
from x402guard.guard.owner import Owner
from x402guard.views.words import printable


def verify(ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """Verify every entry, balance, hold, limit and trip against the journal. Exit code 1 if they are inconsistent.

    Example: x402guard verify --ledger ./spend.db
    """
    with Owner(ledger, verified=False) as owner:
        with working("reading the journal"):
            problems = owner.verify()
        entries, budgets = owner.size()
    if as_json:
        typer.echo(json.dumps({"entries": entries, "budgets": budgets, "problems": problems}, indent=2))
    else:
        lines = problems or [f"{entries} entries of {budgets} budgets: the ledger is consistent"]
        typer.echo("\n".join(map(printable, lines)))
    raise typer.Exit(1 if problems else 0)
