"""What has to be written is written again where the first write was interrupted, and the interruption goes on after it."""

import pytest

from x402guard import LedgerUnavailable
from x402guard.flow.effects import Interrupted, Transact, transact_anyway
from x402guard.ledger.view import Scope

CTRL_C = KeyboardInterrupt()


def interrupted():
    """A flow that writes once, and was interrupted there; return it and what it asks for next."""
    flow = transact_anyway(Scope(), lambda _view: "written")
    first = next(flow)
    return flow, first, flow.throw(Interrupted(CTRL_C))


def test_an_interrupted_write_is_repeated_and_the_interruption_goes_on():
    flow, first, again = interrupted()
    assert isinstance(again, Transact)
    assert (again.scope, again.change) == (first.scope, first.change)
    with pytest.raises(Interrupted) as cut:
        flow.send("written")
    assert cut.value.cause is CTRL_C


def test_where_it_cannot_be_repeated_either_the_interruption_says_so():
    flow, _, _ = interrupted()
    with pytest.raises(Interrupted) as cut:
        flow.throw(LedgerUnavailable("the disk is full"))
    assert "the disk is full" in cut.value.cause.__notes__[-1]


def test_a_write_that_was_not_interrupted_is_done_once():
    flow = transact_anyway(Scope(), lambda _view: "written")
    next(flow)
    with pytest.raises(StopIteration) as done:
        flow.send("written")
    assert done.value.value == "written"
