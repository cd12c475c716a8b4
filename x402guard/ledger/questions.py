"""Questions to people, in the ledger: written by the process that waits, answered by another. One answer is good for one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from x402guard.errors import ConfigError
from x402guard.ledger.view import LedgerView, MarkKey


@dataclass(frozen=True, slots=True)
class Question:
    """What a person is asked.

    Attributes:
        id: the same for the same call in the same session, and for no other.
        session: the session's id.
        what: the tool, or ``METHOD host/path``.
        words: the whole of it, for people.
        approvers: how many different people have to say yes.
        timeout_s: seconds after which silence is a no.
    """

    id: str
    session: str
    what: str
    words: str
    approvers: int
    timeout_s: int


def approval_mark(question_id: str) -> MarkKey:
    """Return the key of a question's small row."""
    return "approval", question_id


def put_question(view: LedgerView, question: Question) -> None:
    """Write a question down. One that waits already, asked by a process that is gone perhaps, keeps its answers."""
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
    """Return what has been said to a question: True once enough people allow it, False for a no or silence, None while it waits."""
    said: Mapping[str, bool] = row.get("said", {})
    if not row or row["taken"] or False in said.values():
        return False
    if now_ms >= row["until_ms"]:
        return False
    return True if len(said) >= row["approvers"] else None


def take_answer(view: LedgerView, question_id: str) -> tuple[bool, tuple[str, ...], str]:
    """Return (allowed, who said so, why), once: the answer is used up, and what was asked in words is taken out of the books."""
    key = approval_mark(question_id)
    row = view.mark(key) or {}
    allowed = answer_of(row, view.now_ms) is True
    people = tuple(name for name, yes in row.get("said", {}).items() if yes is allowed)
    reason = "" if allowed else "it was denied" if people else "nobody answered in time"
    view.put_mark(key, {**row, "words": "", "taken": True})
    return allowed, people, reason


def give_answer(view: LedgerView, question_id: str, by: str, *, allow: bool) -> Mapping[str, Any]:
    """Write down what somebody says, and return the row. The same person counts once; a no is the end of it.

    Raises ``ConfigError`` where nobody waits for an answer any more.
    """
    key = approval_mark(question_id)
    row = view.mark(key)
    if row is None or answer_of(row, view.now_ms) is not None:
        raise ConfigError(f"approval: nobody waits for an answer to {question_id[:16]!r}")
    person = " ".join(by.split()).casefold()
    if not person:
        raise ConfigError("approval: say who answers: --as NAME")
    said = {**row["said"], person: allow}
    after = {**row, "said": said}
    view.put_mark(key, after)
    return after
