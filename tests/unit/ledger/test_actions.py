"""The states of an action that can be undone: each transition that is allowed, and no other."""

import itertools

import pytest

from tests.support.ledger import Books
from x402guard.errors import IllegalTransition
from x402guard.frozen import replace
from x402guard.ledger.actions import (
    ACTIONS,
    OPEN_STATES,
    Action,
    ActionState,
    action_mark,
    actions_mark,
    begin_action,
    below,
    move_action,
    read_action,
)

S = ActionState
WANTED = Action("s/a", "s", "send", "mail:unsend", {"to": "ada"})
FIRST = {
    S.STAGED: [],
    S.BEGUN: [],
    S.DONE: [S.DONE],
    S.COMMITTED: [S.DONE, S.COMMITTED],
    S.UNDONE: [S.UNDONE],
    S.FAILED: [S.FAILED],
}


def begin(books, wanted=WANTED):
    marks = (actions_mark("s"), action_mark(wanted.id))
    return books.change(lambda view: begin_action(view, "s", wanted), nodes=("s",), marks=marks)


def move(books, to, **more):
    return books.change(lambda view: move_action(view, "s/a", to, **more), nodes=("s",), marks=(action_mark("s/a"),))


def in_state(state):
    books = Books()
    begin(books, replace(WANTED, state=S.STAGED if state is S.STAGED else S.BEGUN))
    for step in FIRST[state]:
        move(books, step, result={"id": 7}) if step is S.DONE else move(books, step)
    return books


@pytest.mark.parametrize(("before", "to"), list(itertools.product(S, S)), ids=str)
def test_a_transition_is_in_the_table_or_changes_nothing(before, to):
    books = in_state(before)
    kept, entries = books.store.marks("action", "s/")["s/a"], len(books.store.entries("s"))
    if to in ACTIONS[before]:
        assert move(books, to).state is to
        assert len(books.store.entries("s")) == entries + 1
    elif to is before:
        assert move(books, to) == read_action("s/a", kept)
        assert len(books.store.entries("s")) == entries
    else:
        with pytest.raises(IllegalTransition, match=f"is {before}, so it cannot become {to}"):
            move(books, to)
        assert books.store.marks("action", "s/")["s/a"] == kept
    books.close()


def test_what_is_committed_or_undone_is_over_unless_it_takes_effect_later():
    assert set(S) - OPEN_STATES == {S.COMMITTED, S.UNDONE}
    assert (ACTIONS[S.COMMITTED], ACTIONS[S.UNDONE]) == (frozenset(), {S.FAILED})


def test_the_result_stays_with_the_action_and_says_whether_it_returned():
    books = in_state(S.BEGUN)
    assert not read_action("s/a", books.store.marks("action", "")["s/a"]).returned
    move(books, S.DONE, result=None)
    failed = move(books, S.FAILED, error="OSError")
    assert (failed.result, failed.returned, failed.error) == (None, True, "OSError")
    assert move(books, S.UNDONE).error == ""
    books.close()


def test_the_actions_of_a_session_and_below_are_in_the_order_in_which_they_began():
    books = Books()
    for name in ("s/c", "s/a", "s/b"):
        begin(books, replace(WANTED, id=name, session="s"))
    listed = [read_action(key, row) for key, row in books.store.marks("action", "s/").items()]
    assert [each.id for each in below(listed, "s")] == ["s/c", "s/a", "s/b"]
    assert below(listed, "s/session-1") == []
    children = [replace(each, session="s/session-1") for each in listed]
    assert len(below(children, "s/session-1")) == len(below(children, "s")) == 3
    assert below(children, "s/session-12") == []
    books.close()


def test_the_journal_names_the_function_and_keeps_no_argument():
    books = in_state(S.FAILED)
    text = "".join(entry.data for entry in books.store.entries("s"))
    assert "action_begun" in text
    assert "undo_failed" in text
    assert "ada" not in text
    assert not books.store.audit() if hasattr(books.store, "audit") else True
    books.close()
