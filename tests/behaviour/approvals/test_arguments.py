"""What a person is shown of a tool's arguments is what the tool runs with."""

import asyncio
from decimal import Decimal
from pathlib import Path

import pytest

from tests.support.merchant import make_guard
from x402guard import ApprovalDenied


@pytest.fixture
def opened(ledger_url):
    """Opens a session whose approver is a function; what it was shown stands in the list."""
    guards = []

    def open_(approver):
        guard = make_guard(ledger_url, approver=approver)
        guards.append(guard)
        return guard.session("s", budget="$1.00")

    yield open_
    for guard in guards:
        guard.close()


@pytest.mark.parametrize("awaits", [False, True])
def test_a_tool_whose_arguments_change_while_a_person_thinks_does_not_run(opened, awaits):
    ids, ran = [1], []

    def approve(_request):
        ids.extend(range(1_000))
        return True

    session = opened(approve)

    @session.tool(cost="$0.01")
    def delete_users(ids):
        ran.append(list(ids))

    @session.tool(cost="$0.01", name="delete_users")
    async def awaited(ids):
        ran.append(list(ids))

    with pytest.raises(ApprovalDenied, match="its arguments were changed while an approver was asked"):
        if awaits:
            asyncio.run(awaited(ids))
        else:
            delete_users(ids)
    assert (ran, session.spent, session.held) == ([], Decimal(0), Decimal(0))


def test_dates_amounts_and_paths_are_shown_as_what_they_say(opened):
    shown = []
    session = opened(lambda request: shown.append(request.arguments) or True)

    @session.tool(cost="$0.01")
    def delete_file(path, amount, how):
        return path

    delete_file(Path("/prod"), Decimal("0.50"), object())
    [arguments] = shown
    assert (arguments["path"], arguments["amount"], arguments["how"]) == ("/prod", "0.50", "<object>")


def test_arguments_that_nobody_can_tell_apart_are_asked_about_each_time(opened):
    asked, ran = [], []
    session = opened(lambda request: asked.append(request.id) or len(asked) == 1)

    @session.tool(cost="$0.01")
    def delete_user(connection, number):
        ran.append(number)

    delete_user(object(), 1)
    with pytest.raises(ApprovalDenied):
        delete_user(object(), 2)
    assert (ran, len(set(asked))) == ([1], 2)
