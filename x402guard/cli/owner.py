"""Defines the owner's commands ``trip``, ``reset`` and ``budget set``. An agent with a session can only trip it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated

import typer

from x402guard.cli.sessions import LedgerUrl, find_budget, opened
from x402guard.errors import ConfigError
from x402guard.flow.surroundings import here
from x402guard.guard.approvers import operating_user
from x402guard.guard.clock import refuse_strange_clock
from x402guard.guard.guard import Guard
from x402guard.guard.settings import load_settings
from x402guard.ledger.model import WALLET, Node
from x402guard.ledger.owner import owner_mark, reset_node, set_limit, trip_node
from x402guard.ledger.queries import outstanding_of
from x402guard.ledger.report_text import printable
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.view import LedgerView, Scope
from x402guard.money import Nanos, dollars_to_nanos, format_dollars
from x402guard.policy.loops import forget_before
from x402guard.policy.steps import reset_mark, run_of
from x402guard.stores import ledger_path

budget = typer.Typer(no_args_is_help=True, help="Set the limits of budgets. Only the owner can raise one.")

SessionName = Annotated[str, typer.Argument(help="The id or name of a session or of a named budget, or 'wallet'.")]


def trip(
    session: SessionName,
    reason: Annotated[
        str, typer.Option("--reason", help="The reason, for the owner who resets it later.")
    ] = "by its owner",
    ledger: LedgerUrl = None,
) -> None:
    """Stop a session, or with 'wallet' all sessions: nothing is signed or sent until it is reset.

    Lists the live holds: what is already signed or sent can still be taken.
    """
    with opened(ledger) as store:
        node = _change(store, session, lambda view, node_id: trip_node(view, node_id, reason[:300]))
        typer.echo(printable(f"{node.kind} {node.id} ({node.name}) is tripped"))
        for line in _outstanding(store, node.id):
            typer.echo(printable(line))


def reset(session: SessionName, ledger: LedgerUrl = None) -> None:
    """Reset a tripped session. Its loop counters start at zero; the amounts it has spent stay counted."""

    def change(view: LedgerView, node_id: str) -> Node:
        node = reset_node(view, node_id, operating_user())
        forget_before(view, run_of(node_id))
        return node

    with opened(ledger) as store:
        node = _change(store, session, change)
    typer.echo(printable(f"{node.kind} {node.id} ({node.name}) is {node.state}"))


@budget.command("set")
def set_budget(
    session: SessionName,
    amount: Annotated[
        str, typer.Argument(help="The new limit in dollars, such as '$20.00'; a shell reads $2 without the quotes.")
    ],
    ledger: LedgerUrl = None,
    new: Annotated[bool, typer.Option("--new", help="Create the ledger, which must not exist yet.")] = False,
) -> None:
    """Set the limit of a session or of the wallet, also upwards. A limit below the used amount trips it."""
    try:
        limit = dollars_to_nanos(amount, field="amount")
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if new:
        _make(session, limit, ledger)
    with opened(ledger) as store:
        node = _change(store, session, lambda view, node_id: set_limit(view, node_id, limit, operating_user()))
    left = format_dollars(max(0, node.room or 0))
    typer.echo(printable(f"{node.kind} {node.id} ({node.name}): ${format_dollars(limit)}, ${left} left, {node.state}"))


def _make(session: str, limit: Nanos, ledger: str | None) -> None:
    """Create a ledger whose wallet has a limit. Raises ``ConfigError`` if the ledger exists."""
    url = ledger or load_settings().ledger
    if session != WALLET or url == "memory://":
        raise ConfigError(
            "--new creates a ledger in a file, with its wallet; write: x402guard budget set wallet AMOUNT --new"
        )
    if ledger_path(url).exists():
        raise ConfigError(f"ledger: {url} already exists; leave out --new")
    Guard(ledger=url, budget=f"${format_dollars(limit)}").close()


def _change(store: LedgerStore, session: str, change: Callable[[LedgerView, str], Node]) -> Node:
    node_id = find_budget(store, session)
    refuse_strange_clock(store, None, here().boot_id())  # a wrong time in the ledger would pass for a right one later
    scope = Scope(nodes=(node_id,), marks=(reset_mark(run_of(node_id)), owner_mark(node_id)), durable=True)
    return store.transact(scope, lambda view: change(view, node_id))


def _outstanding(store: LedgerStore, node_id: str) -> list[str]:
    """Return one line per live hold: it is signed or sent and may be taken until its deadline, even after a trip."""
    lines = []
    for hold in outstanding_of(store, node_id):
        until = datetime.fromtimestamp(hold.deadline_unix, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        whom = hold.payment().payee if hold.intent is not None else hold.purpose.tool or "a call"
        lines.append(f"  out until {until}: ${format_dollars(hold.amount)} to {whom} ({hold.id[:16]}…)")
    return lines
