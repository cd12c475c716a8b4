"""The end of a session with actions that can be undone, against other actors: threads, timers, cancellations, trips above it."""

import asyncio
import json
import threading

import anyio
import pytest

from tests.behaviour.tools.test_reversible import BOTH, states
from tests.support import reversibles
from tests.support.merchant import make_guard
from tests.support.reversibles import DONE
from x402guard import Owner, SessionClosed, SessionTripped
from x402guard.ledger.view import Scope

pytestmark = pytest.mark.usefixtures("_nothing_done")


@pytest.mark.parametrize("nest", ["child", "scope"])
def test_what_a_child_or_a_scope_has_staged_runs_with_its_run(guard, nest):
    with guard.session("s", budget="$1.00") as session:
        around = session.child("c", budget="$0.10") if nest == "child" else session.scope("$0.10")
        with around:
            reversibles.later("a")
        reversibles.put("b")
    assert DONE == [("put", "b"), ("later", "a")]
    assert states(session) == ["committed", "committed"]


def test_a_trip_above_the_session_undoes_it_and_lets_nothing_be_committed(tmp_path):
    url = f"sqlite:///{tmp_path / 'spend.db'}"
    with make_guard(url) as guard, Owner(url) as owner:
        budget = guard.budget("customer", "$2.00")
        for above in ("wallet", "customer"):
            with budget.session("s", budget="$1.00") as session:
                reversibles.put("a")
                owner.trip(above)
                with pytest.raises(SessionTripped):
                    session.commit()
            assert states(session) == ["undone"]
            owner.reset(above)


@pytest.mark.parametrize("committed", [False, True], ids=["open", "committed"])
@pytest.mark.parametrize("resets", [False, True], ids=["tripped", "reset"])
def test_a_run_that_the_watchdog_has_tripped_is_undone_at_its_end_unless_it_was_reset(tmp_path, committed, resets):
    url = f"sqlite:///{tmp_path / 'spend.db'}"
    with make_guard(url) as guard, Owner(url) as owner:
        dog = owner.watchdog(states=2)
        with guard.session("s", budget="$1.00") as session:
            reversibles.put("a")
            if committed:
                session.commit()
            for _ in range(2):
                session.step(state={"plan": "ask again"})
            [(run, _)] = dog.look()
            if resets:
                owner.reset(run.id)
        dog.close()
        assert states(session) == ["committed" if committed or resets else "undone"]
        assert owner.roll_back(session.id) == []


def test_a_kill_file_undoes_it(tmp_path):
    stop = tmp_path / "stop"
    with make_guard(kill_file=stop) as guard, guard.session("s", budget="$1.00") as session:
        reversibles.put("a")
        stop.touch()
    assert states(session) == ["undone"]


def test_one_opening_that_fails_undoes_all_whichever_ends_last(guard):
    with guard.session("s", budget="$1.00", id="run-1") as first:
        with pytest.raises(KeyError), guard.session("s", id="run-1"):
            reversibles.put("a")
            raise KeyError
        assert states(first) == ["done"]
    assert states(first) == ["undone"]
    session = guard.session("t", budget="$1.00")
    with session:
        with pytest.raises(KeyError), session:
            reversibles.put("b")
            raise KeyError
    assert states(session) == ["undone"]


@pytest.mark.parametrize("stuck", [False, True], ids=["undone", "failed"])
def test_what_is_under_way_at_the_end_is_undone_at_its_own_end(guard, stuck):
    inside, go_on, raised = threading.Event(), threading.Event(), []
    waits = reversibles.waits_stuck if stuck else reversibles.waits

    def work():
        try:
            waits("a")
        except SessionClosed as error:
            raised.append(str(error))

    with pytest.raises(KeyError), guard.session("s", budget="$1.00") as session:
        thread = threading.Thread(target=session.bind(work))
        reversibles.WAITING.append((inside, go_on))
        thread.start()
        assert inside.wait(10)
        raise KeyError
    go_on.set()
    thread.join(10)
    assert states(session) == ["failed" if stuck else "undone"]
    assert raised == [f"the session ended while {waits.__name__} ran, so it {'cannot be' if stuck else 'was'} undone"]
    assert stuck or DONE[-1] == ("unput", "a", None, True)


def test_nothing_begins_while_a_session_is_wound_up(guard):
    with pytest.raises(KeyError), guard.session("s", budget="$1.00") as session:
        reversibles.begins("a")
        raise KeyError
    assert DONE == [("begins", "a"), ("SessionClosed",)]
    assert states(session) == ["undone"]


def test_a_timer_that_has_begun_at_the_normal_end_is_waited_for(guard):
    inside, go_on = threading.Event(), threading.Event()
    reversibles.WAITING.append((inside, go_on))
    with guard.session("s", budget="$1.00") as session:
        reversibles.soon_waits("a")
        assert inside.wait(10)
        threading.Timer(0.1, go_on.set).start()
    assert states(session) == ["committed"]
    assert DONE == [("soon_waits", "a")]


def test_a_staged_action_that_raises_keeps_no_other_from_its_end(guard):
    with pytest.raises(OSError, match="full"), guard.session("s", budget="$1.00") as session:
        reversibles.put("a")
        reversibles.later_fails("b")
        reversibles.later("c")
    assert states(session) == ["committed", "undone", "committed"]
    assert session.has_ended
    [node] = [node for node in guard.shell.store.nodes(session.id) if node.id == session.id]
    assert (node.state, node.openers) == ("closed", ())


@pytest.mark.parametrize("wrong", [SystemExit, KeyboardInterrupt])
def test_a_call_that_is_stopped_is_undone_at_once_too(guard, wrong):
    with guard.session("s", budget="$1.00") as session:
        with pytest.raises(wrong):
            reversibles.stops(wrong.__name__)
        assert states(session) == ["undone"]


@BOTH
def test_a_call_that_is_cancelled_is_undone_at_once(guard, library):
    async def main():
        async with guard.session("s", budget="$1.00") as session:
            with anyio.move_on_after(0.05):
                await reversibles.asleep("a")
            assert states(session) == ["undone"]

    anyio.run(main, backend=library)


def test_a_call_that_is_cancelled_while_its_end_is_written_is_undone(guard):
    async def main():
        async with guard.session("s", budget="$1.00") as session:
            with pytest.raises(asyncio.CancelledError):
                await reversibles.acancelled("a")
            asyncio.current_task().uncancel()
            assert states(session) == ["undone"]
            await reversibles.aput("b")
        return states(session)

    assert asyncio.run(main()) == ["undone", "committed"]
    assert DONE == [("acancelled", "a"), ("aunput", "a", "a"), ("aput", "b")]


def test_a_commit_that_is_cancelled_is_over_before_the_task_goes_on(guard):
    async def main():
        async with guard.session("s", budget="$1.00") as session:
            for number in range(20):
                reversibles.put(str(number))
            reversibles.waiting("a")
            task = asyncio.create_task(session.acommit())
            await asyncio.to_thread(reversibles.WAITS.acquire, timeout=10)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=0.05)
            assert not done
            reversibles.GO_ON.release()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert states(session) == ["committed"] * 21

    asyncio.run(main())


def test_two_cancellations_do_not_abandon_the_undoing(guard):
    async def main():
        opened = []

        async def work():
            async with guard.session("s", budget="$1.00") as session:
                opened.append(session)
                for number in range(3):
                    reversibles.slow(str(number))
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await asyncio.sleep(0.1)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.05)
        with pytest.raises(asyncio.CancelledError):
            await task
        return states(opened[0])

    assert asyncio.run(main()) == ["undone"] * 3


def test_a_blocking_commit_in_an_event_loop_runs_async_staged_ones_too(guard):
    async def main():
        with guard.session("s", budget="$1.00") as session:
            await reversibles.alater("a")
        assert states(session) == ["committed"]
        async with guard.session("t", budget="$1.00") as session:
            await reversibles.alater("b")
            assert await session.afinish("done")
        assert states(session) == ["committed"]

    asyncio.run(main())


def test_an_undo_that_is_an_action_itself_writes_none_and_commits_none(guard):
    with pytest.raises(KeyError), guard.session("s", budget="$1.00") as session:
        reversibles.put("a")
        reversibles.move("inbox", "trash")
        reversibles.commits("b")
        raise KeyError
    assert DONE[1:4] == [("move", "inbox", "trash"), ("commits", "b"), ("move", "trash", "inbox")]
    assert states(session) == ["undone", "undone", "failed"]


def test_the_words_of_an_undos_error_reach_no_log_report_or_notice(guard, caplog):
    with pytest.raises(KeyError), guard.session("s", budget="$1.00") as session:
        reversibles.tells("a")
        raise KeyError
    assert states(session) == ["failed"]
    shown = caplog.text + json.dumps(session.report().to_dict())
    assert "OSError" in shown
    assert "SECRET" not in shown


def test_a_row_that_cannot_be_read_is_failed_and_the_others_are_undone(guard):
    with pytest.raises(KeyError), guard.session("s", budget="$1.00", id="run-1") as session:
        reversibles.put("a")
        mark = ("action", "run-1/bad")
        guard.shell.store.transact(Scope(marks=(mark,)), lambda view: view.put_mark(mark, {"id": 5}))
        raise KeyError
    assert states(session) == ["failed", "undone"]


def test_an_end_with_nothing_to_undo_leaves_the_reserve(guard):
    with pytest.raises(KeyError), guard.session("s", budget="$1.00", reserve="$0.10", id="run-1") as session:
        reversibles.put("a")
        session.commit()
        raise KeyError
    with guard.session("s", id="run-1") as session, session.finalizing():
        pass
