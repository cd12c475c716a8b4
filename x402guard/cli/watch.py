"""Defines the command ``watch``: the live view in a terminal."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Annotated, NoReturn

import msgspec
import typer
from msgspec.structs import replace
from rich.console import Console
from rich.live import Live
from rich.text import Text

from x402guard.cli.arguments import AsJson, LedgerUrl, seconds, tell_as_of
from x402guard.errors import LedgerUnavailable
from x402guard.flow.surroundings import ending_signals
from x402guard.guard.owner import Owner
from x402guard.policy.checks import check_choice
from x402guard.views.live import STATES, LiveView, chosen
from x402guard.views.screen import screen
from x402guard.views.words import json_text

_STYLES = {"✕": "red", "■": "red", "?": "yellow", "/": "yellow"}


def watch(
    *,
    find: Annotated[
        str, typer.Option("--find", help="Only sessions whose name, customer or agent has this text.")
    ] = "",
    customer: Annotated[str, typer.Option("--customer", help="Only sessions of this customer.")] = "",
    agent: Annotated[str, typer.Option("--agent", help="Only sessions with this agent.")] = "",
    state: Annotated[str, typer.Option("--state", help="Only sessions that are asks, stopped, open or closed.")] = "",
    every: Annotated[str, typer.Option("--every", help="The pause between two looks.")] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Print one screen, and end.")] = False,
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show what all sessions of a ledger do now: budgets, what is out, what asks for a person. Ends with Ctrl-C.

    Example: x402guard watch --state stopped
    """
    if state:
        check_choice("--state", state, STATES)
    pause_s = seconds("--every", every)
    console = Console()

    def drawn(view: LiveView) -> Text:
        width, height = (console.width, console.height) if console.is_terminal else (80, 40)
        lines = screen(view, width, height, find=find, customer=customer, agent=agent, state=state)
        return _coloured(lines)

    with Owner(ledger, read_only=True) as owner:
        tell_as_of(owner.as_of)
        if as_json:
            view = owner.live(find=find or customer or agent)
            fits = chosen(view.sessions, find=find, customer=customer, agent=agent, state=state)
            asked = bool(find or customer or agent or state)
            shown = replace(view, sessions=tuple(fits)) if asked else view
            typer.echo(json_text(msgspec.to_builtins(shown)))
        elif once or not console.is_terminal:
            typer.echo(drawn(owner.live(find=find or customer or agent)).plain)
        else:
            for number in ending_signals():
                signal.signal(number, _stop)
            _follow(lambda: drawn(owner.live(find=find or customer or agent)), console, pause_s)


def _follow(drawn: Callable[[], Text], console: Console, pause_s: float) -> None:
    """Show the view again and again, in a screen of its own, until Ctrl-C."""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as shown:
            while True:
                try:
                    shown.update(drawn(), refresh=True)
                except LedgerUnavailable as error:
                    shown.update(Text(f"the ledger is unavailable: {error}; the next look tries again"), refresh=True)
                time.sleep(pause_s)
    except KeyboardInterrupt:
        return


def _coloured(lines: list[str]) -> Text:
    text = Text("\n".join(lines), no_wrap=True, overflow="crop")
    for number, line in enumerate(lines):
        sign = line[2:3] if line.startswith("│") else ""
        happened = next((each for each in ("✕", "■") if f" {each} " in line[:16]), sign)
        if style := _STYLES.get(happened):
            start = sum(len(each) + 1 for each in lines[:number])
            text.stylize(style, start + 2, start + len(line) - 1)
    return text


def _stop(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
