"""Defines the command ``watchdog``, which trips runs that are stuck, from another process than theirs."""

from __future__ import annotations

import json
import signal
import time
from typing import Annotated, NoReturn

import typer

from x402guard.cli.arguments import AsJson, LedgerUrl, seconds
from x402guard.errors import LedgerUnavailable
from x402guard.flow.surroundings import ending_signals
from x402guard.guard.owner import Owner
from x402guard.views.words import printable


def watchdog(
    *,
    silence: Annotated[str, typer.Option("--silence", help="Trip a run without an entry for so long.")] = "300s",
    run: Annotated[str | None, typer.Option("--run", help="Trip a run that is open for longer, such as 2h.")] = None,
    states: Annotated[int, typer.Option("--states", help="Trip a run that reports a state so often.")] = 5,
    every: Annotated[str, typer.Option("--every", help="The pause between two looks.")] = "10s",
    once: Annotated[bool, typer.Option("--once", help="Look once, and end: a deadlock needs two looks.")] = False,
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Trip runs that are stuck: stopped, silent, open for too long, or in the same state again and again.

    A call under way and a question to a person are no silence. Ends with Ctrl-C. Example: x402guard watchdog --run 2h
    """
    beat_s = seconds("--every", every)
    for number in ending_signals():
        signal.signal(number, _stop)
    with Owner(ledger) as owner:
        limits = {"silence_s": seconds("--silence", silence), "states": states, "every_s": beat_s}
        watching = owner.watchdog(run_s=None if run is None else seconds("--run", run), **limits)
        try:
            while True:
                try:
                    for node, reason in watching.look():
                        values = {"session": node.id, "name": node.name, "reason": reason}
                        told = f"tripped session {node.name!r} ({node.id}): {reason}"
                        typer.echo(json.dumps(values) if as_json else printable(told))
                except LedgerUnavailable as error:
                    if once:
                        raise
                    typer.echo(printable(f"{error}; the next look tries again"), err=True)
                if once:
                    return
                time.sleep(beat_s)
        except KeyboardInterrupt:
            return
        finally:
            watching.close()


def _stop(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
