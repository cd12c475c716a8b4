"""Defines the commands ``sessions``, ``report``, ``predict`` and ``holds``, which only read the ledger."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from x402guard.errors import ConfigError
from x402guard.guard.settings import load_settings
from x402guard.ledger.in_doubt import DEFAULT_FLIGHT_S, in_doubt, instance_mark
from x402guard.ledger.model import WALLET, Hold, HoldKind, Node, NodeKind
from x402guard.ledger.queries import nodes_of, prediction_of, report_of
from x402guard.ledger.report import remaining
from x402guard.ledger.report_text import printable
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.view import LedgerView
from x402guard.money import format_dollars
from x402guard.stores import ledger_path, open_store

holds = typer.Typer(
    help="List the live holds, cancel one, or forgive a purchase whose answer was lost.", invoke_without_command=True
)

LedgerUrl = Annotated[
    str | None, typer.Option("--ledger", help="Ledger URL; default: X402GUARD_LEDGER or x402guard.toml.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

_LISTED: Final = (NodeKind.WALLET, NodeKind.BUDGET, NodeKind.SESSION)
_FLIGHT_MS: Final = DEFAULT_FLIGHT_S * 1000
_PIPE_WIDTH: Final = 1000
_BY_ID: Final = "id="
_HOLD_ID: Final = re.compile(r"[0-9a-f]{64}")
_BRIEF_HOLD: Final = ("id", "session", "amount", "payee", "deadline", "in_doubt", "claimed", "request")


def ledger_in_use(ledger: str | None) -> str:
    """Return the URL of the ledger that a command means. Raises ``ConfigError`` for a missing file."""
    url = ledger or load_settings().ledger
    if url.startswith("sqlite:///") and not ledger_path(url).exists():
        raise ConfigError(f"ledger: {url} does not exist; set another one with --ledger or X402GUARD_LEDGER")
    return url


@contextmanager
def opened(ledger: str | None, *, verified: bool = True) -> Iterator[LedgerStore]:
    """Open the ledger. Raises ``ConfigError`` for a missing file instead of creating it.

    Raises ``LedgerUnavailable`` if the ledger is inconsistent, unless *verified* is False.
    """
    store = open_store(ledger_in_use(ledger), verified=verified)
    try:
        yield store
    finally:
        store.close()


def show(rows: list[dict[str, Any]], *, as_json: bool, empty: str, brief: Sequence[str] = ()) -> None:
    """Print rows with the same keys: as JSON with all keys, or as a table with the keys *brief* (empty: all)."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    if not rows:
        typer.echo(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    names = brief or tuple(rows[0])
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(
            *(Text("" if row[name] is None else _shown(row[name])) for name in names)
        )  # plain text, not markup
    # Output to a pipe is not cut or folded.
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def _shown(value: object) -> str:
    text = str(value)
    return f"{text[:16]}…" if _HOLD_ID.fullmatch(text) else text


def sessions(ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """List every session of the ledger with its budget and the amounts spent, held and left."""
    with opened(ledger) as store:
        nodes = nodes_of(store)
        rows = [_session_row(node, nodes) for node in nodes.values() if node.kind in _LISTED]
    show(rows, as_json=as_json, empty="no sessions yet")


def _session_row(node: Node, nodes: dict[str, Node]) -> dict[str, Any]:
    left = remaining(nodes, node.id)
    return {
        "id": node.id,
        "name": node.name,
        "kind": str(node.kind),
        "state": str(node.state),
        "terminated_by": node.terminated_by,
        "budget": None if node.limit is None else format_dollars(node.limit),
        "per": None if node.window is None else f"{node.window.per} {node.window.tz}",
        "spent": format_dollars(node.spent),
        "held": format_dollars(node.live),
        "remaining": None if left is None else format_dollars(left),
    }


def report(
    session: Annotated[str | None, typer.Argument(help="A session's id or name; default: the last session.")] = None,
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Print a session's report."""
    with opened(ledger) as store:
        found = report_of(store, _find(store, session))
    typer.echo(found.to_json() if as_json else found.to_text())


def find_budget(store: LedgerStore, session: str) -> str:
    """Return the id of a session, a named budget or the wallet. *session* is an id, the name of one run, or ``id=ID``.

    Children do not count if a run has the name, because an agent names them. Raises ``ConfigError`` if there is no such
    session, and if several have the word as their name or their id.
    """
    if session == WALLET:
        return session
    nodes = [node for node in store.nodes() if node.kind in _LISTED and node.id != WALLET]
    exact = session.removeprefix(_BY_ID) if session.startswith(_BY_ID) else None
    meant = [node for node in nodes if (node.id == exact if exact is not None else session in (node.id, node.name))]
    runs = [node for node in meant if "/" not in node.id] or meant
    if len(runs) > 1:
        listed = "; ".join(f"{node.kind} {node.name!r} by {shlex.quote(_BY_ID + node.id)}" for node in runs[-5:])
        raise ConfigError(f"session: {session!r} may mean {len(runs)} of them; name one: {listed}")
    return runs[0].id if runs else _find(store, session)


def _find(store: LedgerStore, session: str | None) -> str:
    nodes = [node for node in store.nodes() if node.kind in _LISTED and node.id != WALLET]
    sessions = [node for node in nodes if node.kind is NodeKind.SESSION]
    chosen = sessions if session is None else [node for node in nodes if session in (node.id, node.name)]
    if not chosen:
        known = ", ".join(node.name for node in nodes[-5:]) or "none"
        raise ConfigError(f"session: there is no session {session!r} in this ledger (latest: {known})")
    return chosen[-1].id


def predict(
    name: Annotated[str, typer.Argument(help="The name of the sessions.")],
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show the cost of past sessions of a name: p50 and p95, or "no data" for fewer than five sessions."""
    with opened(ledger) as store:
        found = prediction_of(store, name)
    values = {"name": name, "sessions": found.sessions, "p50": _dollars(found.p50), "p95": _dollars(found.p95)}
    typer.echo(json.dumps(values, indent=2, ensure_ascii=False) if as_json else printable(str(found)))


def _dollars(amount: Decimal | None) -> str | None:
    return None if amount is None else format(amount, "f")


@holds.callback()
def list_holds(context: typer.Context, ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """List every live hold: the amount that may still be taken, the payee, the deadline, and whether it is in doubt."""
    if context.invoked_subcommand is not None:
        return
    with opened(ledger) as store:
        marks = {instance_mark(key): row for key, row in store.marks("instance", "").items()}
        view = LedgerView(now_ms=store.now_ms(), marks=marks)
        rows = [_hold_row(view, hold) for hold in store.outstanding() if hold.kind is not HoldKind.TOKENS]
    show(rows, as_json=as_json, empty="nothing is held", brief=_BRIEF_HOLD)


def _hold_row(view: LedgerView, hold: Hold) -> dict[str, Any]:
    intent = hold.intent
    return {
        "id": hold.id,
        "session": hold.node_id,
        "kind": str(hold.kind),
        "amount": format_dollars(hold.amount),
        "payee": None if intent is None else intent.payee,
        "scheme": None if intent is None else f"{intent.scheme}/{intent.method}",
        "network": None if intent is None else intent.network,
        "deadline": datetime.fromtimestamp(hold.deadline_unix, UTC).isoformat(),
        "in_doubt": in_doubt(view, hold, flight_ms=_FLIGHT_MS),
        "doubt": hold.doubt,
        "claimed": None if hold.claim is None else format_dollars(hold.claim.amount),
        "request": f"{hold.purpose.method} {hold.purpose.url}".strip() or hold.purpose.tool,
    }
