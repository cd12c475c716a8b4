"""Assembles the command line from one module per group of commands. Commands that show data take ``--json``."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final, cast

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
from x402guard.cli.arguments import without_keys
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
app.add_typer(init.config, name="config")
app.command("demo")(demo.demo)
app.command("testnet")(testnet.testnet)
app.command("sessions")(sessions.sessions)
app.command("report")(report.report)
app.command("verify-report")(report.verify_report)
app.add_typer(sessions.holds, name="holds")
app.command("reconcile")(reconcile.reconcile)
app.command("acknowledge")(reconcile.acknowledge)
app.command("predict")(sessions.predict)
app.command("pay")(pay.pay)
app.command("trip")(owner.trip)
app.command("reset")(owner.reset)
app.add_typer(owner.budget, name="budget")
app.add_typer(approvals.approvals, name="approvals")
app.command("latches")(owner.latches)
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


_MISTAKE: Final[type[Exception]] = cast("type[Exception]", typer.BadParameter.__mro__[2])
"""The base of all mistakes in arguments, which typer does not export: its place has changed between its versions."""

_OUTPUT: Final = frozenset({errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EDQUOT, errno.EFBIG})

_KEY: Final = re.compile(r"(0x)?[0-9a-fA-F]{32,}")


def _in_two_lines(mistake: Any) -> str:
    """Return a mistake in the arguments and where to look, or the help of a command that was called without any."""
    context = getattr(mistake, "ctx", None)
    if type(mistake).__name__ == "NoArgsIsHelpError" and context is not None:
        return f"{context.get_help()}\n"
    wrong = " ".join(mistake.format_message().removesuffix(".").split())
    path = "x402guard" if context is None else context.command_path
    # A key that is given by mistake is not shown once more.
    return f"x402guard: {printable(_KEY.sub('[hidden]', wrong))}\nNothing was done. See: {path} --help\n"


def _mend_streams() -> None:
    """Put the null device in place of a stream that is closed, and a question mark of what the output cannot encode."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main() -> None:
    """Run the command line. A mistake prints what is wrong and what to do on stderr, with exit code 2."""
    _mend_streams()
    try:
        code = app(prog_name="x402guard", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except _MISTAKE as error:
        sys.stderr.write(_in_two_lines(error))
        sys.exit(2)
    except typer.Abort:
        sys.stderr.write("Aborted.\n")
        sys.exit(1)
    except ImportError as error:
        if "x402guard[testnet]" not in str(error):
            raise
        sys.stderr.write(f"x402guard: {error}\n")
        sys.exit(2)
    except X402GuardError as error:
        sys.stderr.write(f"x402guard: {printable(without_keys(str(error)))}\n{without_keys(error.advice)}\n")
        sys.exit(2)
    except OSError as error:
        if error.filename is not None:
            said = without_keys(f"{error.filename}: {error.strerror}")
            sys.stderr.write(
                f"x402guard: {printable(said)}\nLook at this file, and at what the command has done, before you repeat it.\n"
            )
            sys.exit(2)
        if error.errno not in _OUTPUT:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left is written once more as the process ends
        if error.errno != errno.EPIPE:  # who reads it has seen enough
            sys.stderr.write(
                f"x402guard: the output cannot be written: {error.strerror}\nThe command itself may be done: look before you repeat it.\n"
            )
        sys.exit(1)
