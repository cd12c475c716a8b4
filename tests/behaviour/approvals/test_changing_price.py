"""A call whose price changes each time that people have allowed it is not asked about for ever."""

import itertools

import pytest

from tests.support.merchant import make_guard
from x402guard import ApprovalDenied
from x402guard.flow.admission import hold_or_refuse
from x402guard.flow.drivers import run
from x402guard.kernel.rows import HoldKind, Nanos
from x402guard.ledger.view import Scope
from x402guard.policy.judge import Unasked
from x402guard.policy.verdicts import Subject, Verdict


def test_what_changes_for_ever_is_asked_about_eight_times():
    asked, numbers = [], itertools.count(1)

    def change(_view, _consented):
        subject = Subject(HoldKind.TOOL, ("film",), Nanos(next(numbers)))
        return Unasked(subject, Verdict("ask", "rule", "why", 1), ())

    with make_guard(approver=lambda request: asked.append(request) or True) as guard:
        with guard.session("s", budget="$1.00") as session:
            terms = session.innermost().context
            with pytest.raises(ApprovalDenied, match="has changed 8 times while approvers were asked"):
                run(hold_or_refuse(terms, Scope(nodes=(session.id,)), change, lambda _error: iter(())), session.shell)
            assert session.held == 0
    assert [request.amount for request in asked] == sorted({request.amount for request in asked})
    assert len(asked) == 8
