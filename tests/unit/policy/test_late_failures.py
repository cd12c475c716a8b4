"""An answer that was counted as a success, and broke afterwards: what breakers and streaks count then, in each order."""

import pytest

from x402guard import Breaker, Loop
from x402guard.kernel.rows import HoldKind, Nanos
from x402guard.ledger.view import LedgerView
from x402guard.policy.loops import streak_mark
from x402guard.policy.step_guard import StepEnd
from x402guard.policy.steps import Step

PAYS = Step(HoldKind.PAYMENT, "GET shop.example/a", "", "run", Nanos(10), "0xA", priced=True)
GUARDS = {
    "breaker": (Breaker(failures=9), ("breaker", "run payee 0xA")),
    "streak": (Loop(failures=9), streak_mark("run", "0xA")),
}
ORDERS = {
    "failed failed ok:a late:a": 3,
    "failed failed ok:a late:a late:a": 3,  # the answer to its commit was lost, and it is written again
    "failed ok:a late:a failed late:a": 3,
    "failed ok:a late:a ok:b late:a": 0,
    "failed failed ok:a failed late:a": 2,
    "failed failed ok:a failed failed late:a": 3,
    "failed ok:a late:a ok:a late:a": 3,  # the same payment is presented again
    "ok:a late:a": 1,
    "ok:a ok:b late:a late:b": 2,
    "ok:a ok:b late:b late:a late:a": 2,
}


def counted(guard, key, order, row=None):
    """Return how many failures in a row *guard* counts after an *order* of ends."""
    rows = {} if row is None else {key: row}
    for number, word in enumerate(order.split()):
        outcome, _, hold = word.partition(":")
        end = StepEnd(hold or f"h{number}", "ok" if outcome == "ok" else "failed", late=outcome == "late")
        marks = tuple(guard.marks(PAYS, (), ending=True))
        view = LedgerView.of_marks(1_800_000_000_000 + number, {key: rows[key] for key in marks if key in rows})
        guard.ended(view, PAYS, end)
        rows.update(view.change_set(durable=True).marks)
    return rows[key]["failures"] if key in rows else 0


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_late_failure_counts_once(guard, order):
    assert counted(*GUARDS[guard], order) == ORDERS[order]


@pytest.mark.parametrize(
    ("guard", "row"),
    [
        (
            "breaker",
            {
                "failures": 2,
                "before": 0,
                "failed_ms": 1_799_999_999_000,
                "opened_ms": None,
                "trying": None,
                "tried_ms": 0,
            },
        ),
        ("streak", {"failures": 2, "at": 1_799_999_999_000}),
    ],
)
@pytest.mark.parametrize(("order", "failures"), [("failed", 3), ("ok:a late:a late:a", 3), ("ok:a", 0)])
def test_a_row_of_an_earlier_version_counts_on(guard, row, order, failures):
    assert counted(*GUARDS[guard], order, row) == failures
