"""Defines the command ``verify``."""

from __future__ import annotations

import json

import typer

from x402guard.cli.sessions import AsJson, LedgerUrl, opened
from x402guard.errors import ConfigError
from x402guard.ledger.report_text import printable
from x402guard.stores.sqlite import SqliteStore


def verify(ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """Verify every entry, balance, hold, limit and trip against the journal. Exit code 1 if they are inconsistent."""
    with opened(ledger, verified=False) as store:
        if not isinstance(store, SqliteStore):
            raise ConfigError("ledger: only a ledger in a file can be verified, such as sqlite:///x402guard.db")
        problems = list(store.audit(most=None))
        entries, budgets = store.size()
    if as_json:
        typer.echo(json.dumps({"entries": entries, "budgets": budgets, "problems": problems}, indent=2))
    else:
        lines = problems or [f"{entries} entries of {budgets} budgets: the ledger is consistent"]
        typer.echo("\n".join(map(printable, lines)))
    raise typer.Exit(1 if problems else 0)
