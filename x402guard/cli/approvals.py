"""Defines the commands ``approvals``, which answer the questions of guards with ``approver="queue"``."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import typer

from x402guard.cli.sessions import AsJson, LedgerUrl, opened, show
from x402guard.errors import ConfigError
from x402guard.guard.approvers import operating_user
from x402guard.ledger.questions import answer_of, approval_mark, give_answer, take_answer
from x402guard.ledger.report_text import printable
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.view import Scope

approvals = typer.Typer(
    help="Answer what agents ask before they pay. Without an answer in time, the call is denied.", no_args_is_help=True
)

QuestionId = Annotated[str, typer.Argument(help="The question's id, or the beginning of it if that is unique.")]
Person = Annotated[str | None, typer.Option("--as", help="The approver's name; default: the operating system's user.")]


@approvals.command("list")
def list_questions(ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """List the questions that wait for an answer."""
    with opened(ledger) as store:
        rows = [_row(question, row, store.now_ms()) for question, row in _waiting(store).items()]
    brief = ("id", "ends", "yes", "words")
    show(rows, as_json=as_json, empty="no question waits for an answer", brief=brief)


@approvals.command("allow")
def allow(question: QuestionId, by: Person = None, ledger: LedgerUrl = None) -> None:
    """Allow one call, once."""
    _answer(question, by, ledger, yes=True)


@approvals.command("deny")
def deny(question: QuestionId, by: Person = None, ledger: LedgerUrl = None) -> None:
    """Deny one call."""
    _answer(question, by, ledger, yes=False)


def _waiting(store: LedgerStore) -> dict[str, Any]:
    """Return the questions that wait. Clears timed-out questions whose process ended before it took the answer."""
    rows = store.marks("approval", "")
    for key, row in rows.items():
        if row["words"] and store.now_ms() >= row["until_ms"]:
            store.transact(Scope(marks=(approval_mark(key),)), partial(take_answer, question_id=key))
    return {key: row for key, row in rows.items() if answer_of(row, store.now_ms()) is None}


def _shown_id(question: str, row: dict[str, Any]) -> str:
    """Return a question's id with its number, so that a repeated answer cannot count for the next question."""
    return f"{question[:16]}.{row['number']}"


def _is_meant(question: str, key: str, row: dict[str, Any]) -> bool:
    return _shown_id(key, row) == question if "." in question else key.startswith(question)


def _row(question: str, row: dict[str, Any], now_ms: int) -> dict[str, Any]:
    return {
        "id": _shown_id(question, row),
        "session": row["session"],
        "what": row["what"],
        "ends": f"in {max(0, row['until_ms'] - now_ms) // 1000} s",
        "until": datetime.fromtimestamp(row["until_ms"] / 1000, UTC).isoformat(),
        "yes": f"{len(row['said'])} of {row['approvers']}",
        "words": printable(row["words"]),
    }


def _answer(question: str, by: str | None, ledger: str | None, *, yes: bool) -> None:
    person = by if by is not None else operating_user()
    with opened(ledger) as store:
        waiting = _waiting(store)
        found = [key for key, row in waiting.items() if question and _is_meant(question, key, row)]
        if len(found) != 1:
            what = "no question waits" if not found else f"{len(found)} questions begin"
            raise ConfigError(f"approval: {what} with the id {question!r}; see x402guard approvals list")
        scope = Scope(marks=(approval_mark(found[0]),), durable=True)
        row = store.transact(scope, lambda view: give_answer(view, found[0], person, allow=yes))
    said = "allowed" if yes else "denied"
    missing = row["approvers"] - len(row["said"]) if yes else 0
    more = f"; more approvers needed: {missing}" if missing else ""
    typer.echo(printable(f"{said} by {person}: {row['what']}{more}"))
