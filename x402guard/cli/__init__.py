"""Assembles the command line from one module per group of commands. Commands that show data take ``--json``."""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
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


_BEGIN: Final = "Begin"
_DAILY: Final = "Every day"
_OWNERS: Final = "The owner's"
_RUNS: Final = "Processes"
_REPAIR: Final = "Check and repair"

app.command("init", rich_help_panel=_BEGIN)(init.init)
app.add_typer(init.config, name="config", rich_help_panel=_BEGIN)
app.command("demo", rich_help_panel=_BEGIN)(demo.demo)
app.command("testnet", rich_help_panel=_BEGIN)(testnet.testnet)
app.command("doctor", rich_help_panel=_BEGIN)(doctor.doctor)
app.add_typer(keys.keys, name="keys", rich_help_panel=_BEGIN)
app.command("sessions", rich_help_panel=_DAILY)(sessions.sessions)
app.command("report", rich_help_panel=_DAILY)(report.report)
app.command("watch", rich_help_panel=_DAILY)(watch.watch)
app.command("serve", rich_help_panel=_DAILY)(serve.serve)
app.add_typer(sessions.holds, name="holds", rich_help_panel=_DAILY)
app.command("predict", rich_help_panel=_DAILY)(sessions.predict)
app.command("pay", rich_help_panel=_DAILY)(pay.pay)
app.command("trip", rich_help_panel=_OWNERS)(owner.trip)
app.command("reset", rich_help_panel=_OWNERS)(owner.reset)
app.add_typer(owner.budget, name="budget", rich_help_panel=_OWNERS)
app.add_typer(approvals.approvals, name="approvals", rich_help_panel=_OWNERS)
app.command("latches", rich_help_panel=_OWNERS)(owner.latches)
app.add_typer(prices.prices, name="prices", rich_help_panel=_OWNERS)
app.add_typer(policy.policy, name="policy", rich_help_panel=_OWNERS)
app.add_typer(delegations.delegations, name="delegations", rich_help_panel=_OWNERS)
app.add_typer(allowance.allowance, name="allowance", rich_help_panel=_OWNERS)
app.command("proxy", rich_help_panel=_RUNS)(proxy.proxy)
app.command("mcp", rich_help_panel=_RUNS)(mcp.mcp)
app.command("watchdog", rich_help_panel=_RUNS)(watchdog.watchdog)
app.command("reconcile", rich_help_panel=_REPAIR)(reconcile.reconcile)
app.command("acknowledge", rich_help_panel=_REPAIR)(reconcile.acknowledge)
app.command("verify", rich_help_panel=_REPAIR)(ledger.verify)
app.command("verify-report", rich_help_panel=_REPAIR)(report.verify_report)
app.add_typer(ledger.ledger, name="ledger", rich_help_panel=_REPAIR)
app.add_typer(journal.journal, name="journal", rich_help_panel=_REPAIR)


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
    path = _typed_path() if context is None else context.command_path
    meant = _meant(path, sys.argv[1:])
    if meant:
        wrong = f"{wrong.partition('. Did you mean')[0]}; {meant}"
    # A key that is given by mistake is not shown once more.
    return f"x402guard: {printable(_KEY.sub('[hidden]', wrong))}\nNothing was done. See: {path} --help\n"


_MEANT: Final[Mapping[str, str]] = {
    "backup": "write x402guard ledger copy FILE",
    "budget list": "write x402guard sessions",
    "budget show": "write x402guard sessions, or x402guard report wallet",
    "doctor --fix": "doctor changes nothing: each line says what to do",
    "help": "write x402guard --help, or x402guard COMMAND --help",
    "holds list": "write x402guard holds",
    "keys export": "a keystore is the key, encrypted: copy the file",
    "keys show": "write x402guard keys address FILE",
    "ledger backup": "write x402guard ledger copy FILE",
    "pause": "write x402guard trip SESSION",
    "report --csv": "write --format csv",
    "report --pdf": "write --html FILE, and print that page",
    "resume": "write x402guard reset SESSION",
    "session": "write x402guard sessions",
    "stop": "write x402guard trip SESSION, or x402guard trip wallet for all of them",
    "unlock": "write x402guard reset SESSION",
    "version": "write x402guard --version",
    "-v": "write x402guard --version",
}
"""What was typed → what was meant."""

_AFTER: Final = ("--ledger", "--json", "--config")
"""Options of commands, which people write before the command."""


def _typed_path() -> str:
    """Return the command that was typed, as far as there is one."""
    group: Any = typer.main.get_command(app)
    found = ["x402guard"]
    for word in sys.argv[1:]:
        group = getattr(group, "commands", {}).get(word)
        if group is None:
            break
        found.append(word)
    return " ".join(found)


def _meant(path: str, words: Sequence[str]) -> str:
    """Return what typed *words* were meant as, of which the command *path* takes the first ones; "" if that is not known."""
    typed = path.split()[1:]
    rest = list(words[len(typed) :])
    if not typed and rest and rest[0].partition("=")[0] in _AFTER:
        option = rest[0].partition("=")[0]
        return f"it stands after the command: x402guard COMMAND {option} …"
    meant = next((_MEANT[key] for word in rest if (key := " ".join((*typed, word))) in _MEANT), "")
    if not meant and typed == ["budget"] and len(rest) == 2:
        return f"write x402guard budget set {shlex.join(rest)}"
    return meant


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
