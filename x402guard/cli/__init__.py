"""Assembles the command line from one module per group of commands. Commands that show data take ``--json``."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer

from x402guard.cli import (
    allowance,
    approvals,
    delegations,
    demo,
    doctor,
    init,
    journal,
    keys,
    ledger,
    mcp,
    owner,
    pay,
    policy,
    prices,
    proxy,
    reconcile,
    report,
    serve,
    sessions,
    testnet,
    watch,
    watchdog,
)
from x402guard.errors import X402GuardError
from x402guard.views.words import printable

__all__ = ["app", "main"]

app = typer.Typer(
    name="x402guard",
    help="Budgets that hold: one ledger between an AI agent and its wallet.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,  # a traceback with local variables leaks secrets
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"x402guard {metadata.version('x402guard')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Budgets that hold: one ledger between an AI agent and its wallet."""


app.command("init")(init.init)
app.command("demo")(demo.demo)
app.command("testnet")(testnet.testnet)
app.command("sessions")(sessions.sessions)
app.command("report")(report.report)
app.command("verify-report")(report.verify_report)
app.add_typer(sessions.holds, name="holds")
app.command("reconcile")(reconcile.reconcile)
app.command("predict")(sessions.predict)
app.command("pay")(pay.pay)
app.command("trip")(owner.trip)
app.command("reset")(owner.reset)
app.add_typer(owner.budget, name="budget")
app.add_typer(approvals.approvals, name="approvals")
app.add_typer(allowance.allowance, name="allowance")
app.add_typer(delegations.delegations, name="delegations")
app.add_typer(journal.journal, name="journal")
app.add_typer(policy.policy, name="policy")
app.add_typer(prices.prices, name="prices")
app.add_typer(keys.keys, name="keys")
app.add_typer(ledger.ledger, name="ledger")
app.command("proxy")(proxy.proxy)
app.command("mcp")(mcp.mcp)
app.command("serve")(serve.serve)
app.command("watch")(watch.watch)
app.command("watchdog")(watchdog.watchdog)
app.command("verify")(ledger.verify)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Run the command line. An ``X402GuardError`` prints its message and its advice on stderr, with exit code 2."""
    try:
        app()
    except ImportError as error:
        if "x402guard[testnet]" not in str(error):
            raise
        sys.stderr.write(f"x402guard: {error}\n")
        sys.exit(2)
    except X402GuardError as error:
        sys.stderr.write(f"x402guard: {printable(str(error))}\n{error.advice}\n")
        sys.exit(2)
