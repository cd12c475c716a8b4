"""Keeps approval questions in the ledger: the waiting process writes one, another process answers it, for one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from x402guard.errors import ConfigError
from x402guard.kernel.change_set import MarkKey
from x402guard.ledger.view import LedgerView


class Question(Struct, frozen=True):
    """A question to the approvers.

    Attributes:
        id: the same for the same call in the same session, different for any other call.
        session: the session's id.
        what: the tool, or the route ``METHOD host/path``.
        words: the full question, as the approvers read it.
        approvers: how many different approvers have to allow it.
        timeout_s: seconds after which a missing answer counts as a denial.
    """

    id: str
    session: str
    what: str
    words: str
    approvers: int
    timeout_s: int


def approval_mark(question_id: str) -> MarkKey:
    """Return the key of a question's mark."""
    return "approval", question_id


def put_question(view: LedgerView, question: Question) -> None:
    """Write a question. If the same question is already waiting (its process may have ended), it keeps its answers."""
    key = approval_mark(question.id)
    row = view.mark(key)
    until_ms = view.now_ms + question.timeout_s * 1000
    kept = row is not None and not row["taken"] and view.now_ms < row["until_ms"]
    said = row["said"] if row is not None and kept else {}
    view.put_mark(
        key,
        {
            "session": question.session,
            "what": question.what,
            "words": question.words,
            "approvers": question.approvers,
            "asked_ms": view.now_ms,
            "until_ms": until_ms,
            "said": said,
            "taken": False,
            "number": int(row["number"]) + (0 if kept else 1) if row is not None else 1,
        },
    )


def answer_of(row: Mapping[str, Any], now_ms: int) -> bool | None:
    """Return True once enough approvers allow a question, False once it is denied or timed out, None while it waits."""
    said: Mapping[str, bool] = row.get("said", {})
    if not row or row["taken"] or False in said.values():
        return False
    if now_ms >= row["until_ms"]:
        return False
    return True if len(said) >= row["approvers"] else None


def waiting(rows: Mapping[str, Mapping[str, Any]], now_ms: int) -> dict[str, Mapping[str, Any]]:
    """Return the questions that wait for an answer, out of their marks by key."""
    return {key: row for key, row in rows.items() if answer_of(row, now_ms) is None}


def question_id(key: str, row: Mapping[str, Any]) -> str:
    """Return a question's id for a person. It has the question's number, so that an answer cannot count for the next one."""
    return f"{key[:16]}.{row.get('number', 1)}"


def take_answer(view: LedgerView, question_id: str) -> tuple[bool, tuple[str, ...], str]:
    """Use up the answer and return (allowed, the approvers who decided, the reason). Removes the question's text.

    The reason is "" if the question is allowed.
    """
    key = approval_mark(question_id)
    row = view.mark(key) or {}
    allowed = answer_of(row, view.now_ms) is True
    people = tuple(name for name, yes in row.get("said", {}).items() if yes is allowed)
    reason = "" if allowed else "it was denied" if people else "no approver answered in time"
    view.put_mark(key, {**row, "words": "", "taken": True})
    return allowed, people, reason


def close_unanswered(view: LedgerView, key: str, shown: str) -> None:
    """Close a question whose process ended before it took the answer; *shown* is its id. The next one stays open."""
    row = view.mark(approval_mark(key))
    if row is not None and question_id(key, row) == shown:
        take_answer(view, key)


def give_answer(view: LedgerView, key: str, by: str, *, allow: bool, shown: str) -> Mapping[str, Any]:
    """Record one approver's answer, and return the row. The same approver counts once; one denial denies the question.

    *shown* is the id of the question that the approver has read (see ``question_id``). Raises ``ConfigError`` if that
    question does not wait for an answer, or if *by* is empty.
    """
    mark = approval_mark(key)
    row = view.mark(mark)
    if row is None or question_id(key, row) != shown or answer_of(row, view.now_ms) is not None:
        raise ConfigError(f"approval: the question {shown!r} does not exist or is already closed")
    person = " ".join(by.split()).casefold()
    if not person:
        raise ConfigError("approval: give the name of the approver: --as NAME")
    said = {**row["said"], person: allow}
    after = {**row, "said": said}
    view.put_mark(mark, after)
    return after
