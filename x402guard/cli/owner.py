"""Defines the owner's commands ``trip``, ``reset``, ``latches`` and ``budget set``. An agent with a session can only trip it."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Final

import typer

from x402guard.cli.arguments import AsJson, LedgerUrl, confirmed, say, tell_as_of, typed_amount
from x402guard.cli.sessions import show
from x402guard.errors import ConfigError
from x402guard.guard.guard import Guard
from x402guard.guard.owner import Owner
from x402guard.guard.owner_rows import BudgetRow, LimitChange, amount_text
from x402guard.guard.settings import load_settings
from x402guard.kernel.rows import WALLET
from x402guard.money import nanos_to_decimal
from x402guard.policy.checks import WITHOUT_SIGN
from x402guard.stores import as_ledger_url, ledger_exists, open_store
from x402guard.views.words import printable

budget = typer.Typer(no_args_is_help=True, help="Set the limits of budgets. Only the owner can raise one.")

ToClear = Annotated[str | None, typer.Option("--clear", help="Clear the latch with this id, or a beginning of it.")]
SessionName = Annotated[str, typer.Argument(help="The id or name of a session or of a named budget, or 'wallet'.")]


def trip(
    session: SessionName,
    reason: Annotated[
        str, typer.Option("--reason", help="The reason, for the owner who resets it later.")
    ] = "by its owner",
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Stop a session, or with 'wallet' all sessions: nothing new is held, signed or sent until it is reset.

    Lists the live holds, which count: what was held before may be signed and sent, and can still be taken. Example: x402guard trip court-research
    """
    with Owner(ledger) as owner:
        out = owner.trip(session, reason)
        row, ids = owner.budget(session), {hold.id for hold in out}
        holds = [hold.to_dict() for hold in owner.holds() if hold.id in ids]
    say(f"{_title(row)} is tripped", {**row.to_dict(), "outstanding": holds}, as_json=as_json)
    for hold in () if as_json else out:
        typer.echo(printable(f"  {amount_text(hold)}"))


def reset(
    session: SessionName,
    *,
    unsafe_early: Annotated[
        bool,
        typer.Option(
            "--unsafe-early",
            help="Reset the wallet although what its server has lost may still be taken.",
        ),
    ] = False,
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Reset a tripped session. Its loop counters start at zero; the amounts it has spent stay counted.

    Example: x402guard reset court-research
    """
    with Owner(ledger) as owner:
        row = owner.reset(session, unsafe_early=unsafe_early)
    say(f"{_title(row)} is {row.state}", row.to_dict(), as_json=as_json)


def latches(clear: ToClear = None, ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """List what has refused a call because of something seen before, and refuses the next one; or clear one.

    Example: x402guard latches --clear 3f2a
    """
    if clear is not None:
        with Owner(ledger) as owner:
            row = owner.clear_latch(clear)
            say(f"cleared by {owner.by}: {row.rule}: {row.reason}", row.to_dict(), as_json=as_json)
        return
    with Owner(ledger, read_only=True) as owner:
        tell_as_of(owner.as_of)
        rows = [row.to_dict() for row in owner.latches()]
    show(rows, as_json=as_json, empty="no latch holds", brief=("id", "reason", "since", "ends"))


@budget.command("set")
def set_budget(
    session: SessionName,
    amount: Annotated[
        str, typer.Argument(help="The new limit in dollars, such as 20.00, without a $; none for a wallet without.")
    ],
    *,
    per: Annotated[str | None, typer.Option("--per", help="When its spending restarts: day, week or month.")] = None,
    tz: Annotated[str, typer.Option("--tz", help="By whose calendar, such as Europe/Berlin.")] = "UTC",
    ledger: LedgerUrl = None,
    new: Annotated[bool, typer.Option("--new", help="Create the ledger, which must not exist yet.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before a limit that stops the budget.")] = False,
    as_json: AsJson = False,
) -> None:
    """Set the limit of a session or of the wallet, also upwards. A limit below the used amount trips it.

    Prints the old limit and the new one. Asks first if the new one is zero or below the used amount.
    Example: x402guard budget set wallet 20.00 --per month --tz Europe/Berlin
    """
    limit = None if amount in _NO_LIMIT else nanos_to_decimal(typed_amount(amount))
    if new and limit is None:
        raise ConfigError("amount: a new ledger gets a limit; write one, such as 20.00")
    if new and limit == 0 and not yes:
        asked = "a limit of $0.00 lets nothing be spent"
        confirmed(f"{asked}. Set it?", f"amount: {asked}; {WITHOUT_SIGN}; --yes sets it all the same")
    if new:
        _make(session, f"${limit}", ledger)
    with Owner(ledger) as owner:
        row = owner.budget(session)
        begins = per is not None and row.per != f"{per} {tz}"  # what was captured before a new window counts in none
        used = row.held if begins else row.spent + row.held
        before = LimitChange(row.id, row.name, row.kind, row.budget, limit, used, limit, row.state, row.reserve)
        if before.stops and not yes:
            asked = before.question()
            confirmed(f"{asked}. Set it?", f"amount: {asked}; {WITHOUT_SIGN}; --yes sets it all the same")
        done = owner.set_budget(session, limit, per=per, tz=tz, stops=yes or before.stops)
    left = "" if done.left is None else f", ${done.left} left"
    change = f"a new ledger, with a limit of ${done.limit}" if new else f"{done.old_to_new()}{left}"
    text = f"{_title(done)}: {change}, {done.state}"
    say(text, done.to_dict(), as_json=as_json)


_NO_LIMIT: Final = frozenset({"none", "unlimited", "no-limit"})


def _title(row: BudgetRow | LimitChange) -> str:
    return "the wallet" if row.id == WALLET else f"{row.kind} {row.id} ({row.name})"


def _make(session: str, limit: str, ledger: str | None) -> None:
    """Create a ledger whose wallet has a limit, or end what was killed meanwhile. Raises ``ConfigError`` if it has a wallet."""
    url = as_ledger_url(ledger or load_settings().ledger)
    if session != WALLET or url == "memory://":
        raise ConfigError(
            "--new creates a ledger that outlives this command, with its wallet; write: x402guard budget set wallet AMOUNT --new"
        )
    if ledger_exists(url):
        with closing(open_store(url, must_exist=True)) as store:
            if store.path(WALLET):
                raise ConfigError(f"ledger: {url} already exists; leave out --new")
    Guard(ledger=url, budget=limit).close()
