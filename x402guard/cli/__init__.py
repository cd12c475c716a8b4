"""The command line: one file a group of commands. Every command takes ``--json`` where it shows something."""

from __future__ import annotations

import sys

import typer

from x402guard.cli import books, demo, doctor, testnet
from x402guard.errors import X402GuardError
from x402guard.ledger.report_text import printable

__all__ = ["app", "main"]

app = typer.Typer(
    name="x402guard",
    help="Budgets that hold: one ledger between an AI agent and its wallet.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback with local variables is where secrets leak
)
app.command("demo")(demo.demo)
app.command("testnet")(testnet.testnet)
app.command("sessions")(books.sessions)
app.command("report")(books.report)
app.command("holds")(books.holds)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Run the command line. An error of ours is one line and its advice on stderr, and exit code 2."""
    try:
        app()
    except X402GuardError as error:
        sys.stderr.write(f"x402guard: {printable(str(error))}\n{error.advice}\n")
        sys.exit(2)
