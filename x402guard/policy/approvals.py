"""Approvals: which steps need one, what the approver sees, and what counts as a yes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from msgspec.structs import replace

from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Nanos
from x402guard.ledger.authorize import Latch
from x402guard.ledger.view import LedgerView
from x402guard.money import Dollars, format_dollars
from x402guard.policy.checks import check_dollars, check_whole
from x402guard.policy.steps import Step
from x402guard.policy.verdicts import NO_VERDICT, Subject, Verdict

APPROVAL: Final = "approval"
NO_ANSWER: Final = "no approver answered in time"
_LONGEST_S: Final = 7 * 86_400


@dataclass(frozen=True, kw_only=True)
class Approvals:
    """Which amounts need approval, and how long an answer may take.

    Args:
        above: dollars; a step that costs more, or may, needs approval, and so does a payment with which a run has paid
            more to one payee within the window, since the last approval for it. None: no amount needs approval.
        window_s: the window of that sum, in seconds, from its first payment (60 to a week).
        timeout_s: whole seconds after which no answer counts as a no (1 to a week).

    Raises ``ConfigError`` naming the setting.
    """

    above: Dollars | None = None
    window_s: int = 86_400
    timeout_s: int = 300
    more_than: Nanos | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        check_whole("policy.approvals.window_s", self.window_s, 60, _LONGEST_S, what="of seconds ")
        check_whole("policy.approvals.timeout_s", self.timeout_s, 1, _LONGEST_S, what="of seconds ")
        if self.above is not None:
            object.__setattr__(self, "more_than", check_dollars("policy.approvals.above", self.above))


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """The question to an approver: may this be paid, once?

    Attributes:
        id: the same for the same call in the same session, and for no other.
        session: the session's id.
        kind: ``payment``, ``llm`` or ``tool``.
        what: the tool, or ``METHOD host/path``.
        amount: the price or the ceiling, in dollars.
        payee, network: of a payment; else "".
        arguments: of a tool, or None if unknown.
        query, body: of a payment's or an LLM call's request, as text, cut to 1,000 characters.
        spent: what the run has spent so far, in dollars.
        waiting: the other questions that are open in this guard, as ``WHAT for $AMOUNT``.
        rule, reason: why approval is needed.
        approvers: how many different approvers have to say yes.
        timeout_s: seconds after which no answer counts as a no.
    """

    id: str
    session: str
    kind: str
    what: str
    amount: Decimal
    payee: str
    network: str
    arguments: Mapping[str, Any] | None = field(repr=False)
    rule: str
    reason: str
    approvers: int
    timeout_s: int
    query: str = field(default="", repr=False)
    body: str = field(default="", repr=False)
    spent: Decimal = Decimal(0)
    waiting: tuple[str, ...] = ()


MOST_SHOWN: Final = 1_000
"""The most characters of a query or a body that an approver is shown."""


def shown_text(data: bytes | str) -> str:
    """Return a part of a request as text for an approver: cut, with its length if it is longer."""
    text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}… ({len(text):,} characters)"


@dataclass(frozen=True, slots=True)
class Answer:
    """An approver's answer.

    Attributes:
        allowed: yes, by all of *by*.
        by: the names of the approvers; a name that is given twice counts once.
        reason: a note for the ledger.
    """

    allowed: bool
    by: tuple[str, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        given: object = self.by
        if isinstance(given, str):
            object.__setattr__(self, "by", (given,))  # one name, not one per letter

    @classmethod
    def no(cls, reason: str, by: tuple[str, ...] = ()) -> Answer:
        """Return a no."""
        return cls(allowed=False, by=by, reason=reason)


def count_people(names: tuple[str, ...]) -> int:
    """Return how many different people *names* stand for."""
    return len({" ".join(name.split()).casefold() for name in names if isinstance(name, str) and name.strip()})


def request_id(session_id: str, facts: list[Any]) -> str:
    """Return the deduplication key of a question: SHA-256 in hex of the session and all that the answer is about."""
    return hashlib.sha256(json.dumps([session_id, facts], sort_keys=True, default=str).encode()).hexdigest()


def unapproved_mark(run_id: str, payee: str) -> MarkKey:
    """Return the key of the mark with what a run has paid to a payee since the last approval, in nano-dollars."""
    return "unapproved", f"{run_id} {payee}"


def _unapproved(view: LedgerView, approvals: Approvals, run_id: str, payee: str) -> tuple[int, int]:
    """Return what a payee got without an approval in its window (nano-dollars), and when the window began (unix ms)."""
    row = view.mark(unapproved_mark(run_id, payee))
    # A window that has not begun yet was begun before the clock was set back: it counts.
    if row is None or view.clock_ms - int(row.get("since_ms", view.clock_ms)) > approvals.window_s * 1000:
        return 0, view.clock_ms
    return int(row["nanos"]), int(row.get("since_ms", view.clock_ms))


def unapproved_latch(view: LedgerView, approvals: Approvals, run_id: str, payee: str) -> Latch:
    """Return the latch of what a payee got without an approval."""
    _, since_ms = _unapproved(view, approvals, run_id, payee)
    return Latch(unapproved_mark(run_id, payee), since_ms + approvals.window_s * 1000)


def judge_unapproved(
    view: LedgerView, approvals: Approvals, subject: Subject, run_id: str, verdict: Verdict
) -> Verdict:
    """Return the verdict on a payment: as before, or to ask because many small ones went to its payee.

    A threshold for one payment is no limit for a seller that asks for twenty of half its size.
    """
    most = approvals.more_than
    if most is None or verdict.action in ("ask", "deny"):
        return verdict
    paid, _ = _unapproved(view, approvals, run_id, subject.payee)
    total = Nanos(paid + subject.amount)
    if total <= most:
        return verdict
    reason = (
        f"${format_dollars(total)} to {subject.payee} within the window are above policy.approvals.above "
        f"(${format_dollars(most)}): an approver has to allow it"
    )
    return replace(verdict, action="ask", rule=APPROVAL, reason=reason, approvers=1)


def note_unapproved(view: LedgerView, approvals: Approvals, subject: Subject, run_id: str, *, approved: bool) -> None:
    """Add a payment to what its payee got without an approval, or begin again after one."""
    if approvals.more_than is not None:
        paid, since_ms = _unapproved(view, approvals, run_id, subject.payee)
        after = (
            {"nanos": 0, "since_ms": view.clock_ms}
            if approved
            else {"nanos": paid + subject.amount, "since_ms": since_ms}
        )
        view.put_mark(unapproved_mark(run_id, subject.payee), after)


def give_unapproved_back(view: LedgerView, approvals: Approvals, step: Step) -> None:
    """Take a payment that was never sent out of what its payee got."""
    if approvals.more_than is not None:
        paid, since_ms = _unapproved(view, approvals, step.run_id, step.payee)
        after = {"nanos": max(0, paid - step.amount), "since_ms": since_ms}
        view.put_mark(unapproved_mark(step.run_id, step.payee), after)


def judge_sum(approvals: Approvals, subject: Subject) -> Verdict:
    """Return whether a step needs approval because of its amount."""
    if approvals.more_than is None or subject.amount <= approvals.more_than:
        return NO_VERDICT
    reason = (
        f"${format_dollars(subject.amount)} is above policy.approvals.above (${format_dollars(approvals.more_than)}): "
        "an approver has to allow it"
    )
    return Verdict("ask", APPROVAL, reason, 1)
