"""When a person is asked, what they are shown, and what counts as a yes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from x402guard.errors import ConfigError
from x402guard.money import Dollars, Nanos, dollars_to_nanos, format_dollars
from x402guard.policy.verdicts import NO_VERDICT, Subject, Verdict

APPROVAL: Final = "approval"
NEEDS_REVIEW: Final = "needs_review"
_LONGEST_S: Final = 7 * 86_400


@dataclass(frozen=True, kw_only=True)
class Approvals:
    """When a person is asked, and for how long.

    Args:
        above: dollars; whatever costs more, or may, is asked about. None asks for no sum.
        timeout_s: whole seconds after which silence is a no (1 to a week).

    Raises ``ConfigError`` naming the setting.
    """

    above: Dollars | None = None
    timeout_s: int = 300
    more_than: Nanos | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if type(self.timeout_s) is not int or not 1 <= self.timeout_s <= _LONGEST_S:
            raise ConfigError(
                f"policy.approvals.timeout_s: {self.timeout_s!r} is not a whole number of seconds from 1 to {_LONGEST_S}"
            )
        if self.above is not None:
            try:
                nanos = dollars_to_nanos(self.above, field="policy.approvals.above")
            except (TypeError, ValueError) as error:
                raise ConfigError(str(error)) from error
            object.__setattr__(self, "more_than", nanos)


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """What a person is asked: may this be paid, once?

    Attributes:
        id: the same for the same call in the same session, and for no other.
        session: the session's id.
        kind: ``payment``, ``llm`` or ``tool``.
        what: the tool, or ``METHOD host/path``.
        amount: dollars that it costs, or costs at most.
        payee, network: of a payment; else "".
        arguments: of a tool, where they were told.
        rule, reason: why it is asked.
        approvers: how many different people have to say yes.
        timeout_s: seconds after which silence is a no.
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


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said.

    Attributes:
        allowed: yes, by all of *by*.
        by: who said it; of people who said it twice, once.
        reason: a word for the books.
    """

    allowed: bool
    by: tuple[str, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        given: object = self.by
        if isinstance(given, str):
            object.__setattr__(self, "by", (given,))  # one person, and not one for each letter

    @classmethod
    def no(cls, reason: str, by: tuple[str, ...] = ()) -> Answer:
        """Return a no."""
        return cls(allowed=False, by=by, reason=reason)


def count_people(names: tuple[str, ...]) -> int:
    """Return how many different people *names* are."""
    return len({" ".join(name.split()).casefold() for name in names if isinstance(name, str) and name.strip()})


def request_id(session_id: str, facts: list[Any]) -> str:
    """Return what makes two questions the same: the session, and everything that the answer is about. SHA-256 in hex."""
    return hashlib.sha256(json.dumps([session_id, facts], sort_keys=True, default=str).encode()).hexdigest()


def judge_sum(approvals: Approvals, subject: Subject) -> Verdict:
    """Return whether a step costs more than may be paid unasked."""
    if approvals.more_than is None or subject.amount <= approvals.more_than:
        return NO_VERDICT
    reason = (
        f"${format_dollars(subject.amount)} is above policy.approvals.above (${format_dollars(approvals.more_than)}): "
        "a person has to allow it"
    )
    return Verdict("ask", APPROVAL, reason, 1)
