"""What a session has done and not committed is undone when it ends abnormally, the last action first."""

import threading
import time
from decimal import Decimal

import anyio
import pytest

from tests.support import reversibles
from tests.support.merchant import URL, Shop, client, make_guard
from tests.support.reversibles import DONE, HOME
from x402guard import (
    BudgetExhausted,
    ConfigError,
    Owner,
    SessionClosed,
    SessionTripped,
    current_session,
    reversible,
)
from x402guard.ledger.actions import action_mark, claim_undo
from x402guard.ledger.view import Scope
from x402guard.tools.undo import actions_of

pytestmark = pytest.mark.usefixtures("_nothing_done")


BOTH = pytest.mark.parametrize("library", ["asyncio", "trio"])


def states(session):
    return [str(each.state) for each in actions_of(session.shell.store, session.id)]


def test_a_normal_end_makes_it_final(guard):
    with guard.session("s", budget="$1.00") as session:
        assert reversibles.put("a") == {"id": "a"}
        assert states(session) == ["done"]
    assert states(session) == ["committed"]
    assert DONE == [("put", "a")]


UNDONE = [("unput", "b", {"id": "b"}, True), ("unput", "a", {"id": "a"}, True)]


def test_an_error_undoes_the_last_first(guard):
    with pytest.raises(KeyError), guard.session("s", budget="$1.00") as session:
        reversibles.put("a")
        reversibles.put("b")
        raise KeyError
    assert DONE[2:] == UNDONE
    assert states(session) == ["undone", "undone"]


def _trip(session):
    session.trip("enough")


def _exhaust(session):
    with pytest.raises(BudgetExhausted):
        session.charge("much", "$2.00")
        client(session, Shop()).get(URL)


@pytest.mark.parametrize("stop", [_trip, _exhaust], ids=["trip", "budget"])
def test_a_stop_that_the_agent_has_caught_undoes_it_too(guard, stop):
    with guard.session("s", budget="$1.00") as session:
        reversibles.put("a")
        reversibles.put("b")
        if stop is _exhaust:
            with pytest.raises(BudgetExhausted):
                client(session, Shop()).get(URL) if session.charge("all", "$1.00") else None
        else:
            stop(session)
    assert DONE[2:] == UNDONE


def test_commit_makes_what_was_done_so_far_final(guard):
    with pytest.raises(KeyError), guard.session("s", budget="$1.00") as session:
        reversibles.put("a")
        session.commit()
        reversibles.put("b")
        raise KeyError
    assert states(session) == ["committed", "undone"]
    assert DONE[2:] == UNDONE[:1]


def test_a_call_that_raises_is_undone_at_once_because_a_part_may_be_done(guard):
    with guard.session("s", budget="$1.00") as session:
        with pytest.raises(OSError, match="the line broke"):
            reversibles.half("a")
        assert DONE == [("half", "a"), ("unput", "a", None, False)]
        assert states(session) == ["undone"]


def test_an_undo_that_fails_is_recorded_and_told_and_stops_no_other(guard):
    with pytest.raises(KeyError), guard.session("s", budget="$1.00") as session:
        reversibles.put("a")
        reversibles.sticky("x")
        reversibles.put("b")
        raise KeyError
    assert states(session) == ["undone", "failed", "undone"]
    assert [what[0] for what in DONE] == ["put", "sticky", "put", "unput", "stuck", "unput"]
    report = session.report().to_dict()
    assert [event["error"] for event in report["events"] if event["event"] == "undo_failed"] == ["SystemExit"]


def test_a_childs_success_is_final_with_its_run_and_its_failure_is_undone_alone(guard):
    with pytest.raises(KeyError), guard.session("s", budget="$1.00") as session:
        reversibles.put("a")
        with pytest.raises(ValueError, match="child"), session.child("c", budget="$0.10"):
            reversibles.put("c")
            raise ValueError("child")
        assert DONE[2:] == [("unput", "c", {"id": "c"}, True)]
        with session.child("d", budget="$0.10"):
            reversibles.put("d")
        assert states(session) == ["done", "undone", "done"]
        raise KeyError
    assert [what[1] for what in DONE[4:]] == ["d", "a"]


def test_only_the_last_opening_of_a_session_winds_it_up(guard):
    first = guard.session("s", budget="$1.00", id="run-1")
    with pytest.raises(KeyError), first:
        with guard.session("s", id="run-1") as second:
            reversibles.put("a")
        assert states(second) == ["done"]
        raise KeyError
    assert states(second) == ["undone"]


@BOTH
def test_async_functions_and_undos(guard, library):
    async def main():
        async with guard.session("s", budget="$1.00"):
            with pytest.raises(OSError, match="z"):
                await reversibles.ahalf("z")
        assert DONE == [("aunput", "z", None)]
        with pytest.raises(KeyError):
            async with guard.session("t", budget="$1.00") as session:
                assert await reversibles.aput("a") == "a"
                reversibles.put("b")
                raise KeyError
        assert DONE[3:] == [UNDONE[0], ("aunput", "a", "a")]
        assert states(session) == ["undone", "undone"]

    anyio.run(main, backend=library)


@BOTH
def test_a_cancelled_task_undoes_what_it_has_done(guard, library):
    async def main():
        with anyio.move_on_after(0.05):
            async with guard.session("s", budget="$1.00") as session:
                await reversibles.aput("a")
                await anyio.sleep(30)
        assert states(session) == ["undone"]

    anyio.run(main, backend=library)


def test_a_staged_action_runs_at_its_time(guard):
    with guard.session("s", budget="$1.00") as session:
        assert reversibles.soon("a") is None
        assert states(session) == ["staged"]
        give_up = time.monotonic() + 10
        while states(session) != ["done"]:
            assert time.monotonic() < give_up
            time.sleep(0.01)
    assert DONE == [("soon", "a")]


@BOTH
def test_a_staged_action_runs_at_commit_and_at_the_normal_end(guard, library):
    async def main():
        async with guard.session("s", budget="$1.00") as session:
            reversibles.later("a")
            await reversibles.alater("b")
            await session.acommit()
            assert DONE == [("later", "a"), ("alater", "b")]
            assert states(session) == ["committed", "committed"]
            reversibles.later("c")
        assert DONE[2:] == [("later", "c")]
        assert states(session) == ["committed"] * 3

    anyio.run(main, backend=library)


@BOTH
def test_a_staged_action_runs_with_its_arguments_as_they_were_when_it_was_called(guard, library):
    mine, his = ["ada"], {"to": ["ada"]}

    async def main():
        async with guard.session("s", budget="$1.00") as session:
            reversibles.later(mine)
            await reversibles.alater(key=his)
            mine[0], his["to"][0] = "mallory", "mallory"
            await session.acommit()
            assert [each.arguments for each in actions_of(session.shell.store, session.id)] == [
                {"key": ["ada"]},
                {"key": {"to": ["ada"]}},
            ]

    anyio.run(main, backend=library)
    assert DONE == [("later", ["ada"]), ("alater", {"to": ["ada"]})]


def test_one_that_a_killed_rollback_has_begun_to_undo_is_not_final_and_told(guard, caplog):
    with guard.session("s", budget="$1.00") as session:
        reversibles.put("a")
        [action] = actions_of(session.shell.store, session.id)
        scope = Scope(nodes=(session.id,), marks=(action_mark(action.id),), durable=True)
        session.shell.store.transact(scope, lambda view: claim_undo(view, action.id))
        session.commit()
    assert states(session) == ["done"]
    assert f"journal rollback {session.id}" in caplog.text


def test_a_staged_call_copies_its_defaults_too(guard):
    ran, cc = [], ["ada"]

    @reversible(undo=f"{HOME}:unput", delay_s=60)
    def send(key, tags=(), /, cc=cc):
        ran.append((key, tags, cc))

    with guard.session("s", budget="$1.00"):
        send("a")
        cc[0] = "mallory"
    assert ran == [("a", (), ["ada"])]


def test_a_staged_method_keeps_its_object(guard):
    class Mailer:
        lock = threading.Lock()

        @reversible(undo=f"{HOME}:unput", delay_s=60)
        def send(self, key):
            DONE.append((self, key))

    mailer = Mailer()
    with guard.session("s", budget="$1.00"):
        mailer.send("a")
    assert DONE[0] == (mailer, "a")


@pytest.mark.parametrize("value", [threading.Lock(), object()], ids=["uncopied", "copied"])
def test_a_staged_call_whose_arguments_are_no_json_is_not_written(guard, value):
    with guard.session("s", budget="$1.00") as session, pytest.raises(ConfigError, match=r"arguments: .*use text, num"):
        reversibles.later(value)
    assert DONE == []
    assert states(session) == []


def test_a_stop_cancels_what_is_staged_and_calls_no_undo(guard):
    with guard.session("s", budget="$1.00") as session:
        reversibles.later("a")
        session.trip("stop")
    assert DONE == []
    assert states(session) == ["undone"]


def test_a_staged_action_does_not_begin_in_a_session_that_was_tripped_from_outside(guard):
    session = guard.session("s", budget="$1.00")
    with session:
        reversibles.soon("a")
        session.trip("from outside")
        give_up = time.monotonic() + 10
        while states(session) != ["undone"]:
            assert time.monotonic() < give_up
            time.sleep(0.01)
    assert DONE == []


def test_an_undo_may_spend_from_the_reserve_and_is_held_like_anything_else(guard):
    with pytest.raises(KeyError), guard.session("s", budget="$1.00", reserve="$0.10") as session:
        reversibles.order("a")
        reversibles.sell("b")
        session.charge("all", "$0.90")
        raise KeyError
    assert DONE[2:] == [("pay_back", 200, True), ("refund", "a")]
    assert session.spent == Decimal("0.95")
    assert states(session) == ["undone", "undone"]


def test_without_room_for_its_undo_it_is_failed_and_nothing_is_spent(guard):
    with pytest.raises(KeyError), guard.session("s", budget="$1.00") as session:
        reversibles.order("a")
        session.charge("all", "$1.00")
        raise KeyError
    assert states(session) == ["failed"]
    assert session.spent == 1


def test_a_stopped_session_begins_nothing(guard):
    session = guard.session("s", budget="$1.00")
    with session:
        session.trip("stop")
        with pytest.raises(SessionTripped):
            reversibles.put("a")
        with pytest.raises(SessionTripped):
            reversibles.later("a")
    bound = session.bind(reversibles.put)
    with pytest.raises((SessionClosed, SessionTripped, ConfigError)):
        bound("a")
    assert DONE == []
    assert states(session) == []


def test_threads_that_are_bound_act_in_the_session(guard):
    with pytest.raises(KeyError), guard.session("s", budget="$1.00") as session:
        threads = [threading.Thread(target=session.bind(reversibles.put), args=(str(n),)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raise KeyError
    assert states(session) == ["undone"] * 8
    assert sorted(what[1] for what in DONE[8:]) == [str(n) for n in range(8)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"undo": "unput"}, r"undo: 'unput' is not 'module:function'"),
        ({"undo": 5}, r"undo: 5 is not 'module:function'"),
        ({"undo": "a:b", "delay_s": 0}, "delay_s: 0 is not a number of seconds"),
        ({"undo": "a:b", "delay_s": True}, "delay_s: True is not"),
        ({"undo": "a:b", "delay_s": float("nan")}, "delay_s: nan is not"),
        ({"undo": "a:b", "delay_s": 10**9}, "delay_s: 1000000000 is not"),
    ],
)
def test_a_wrong_declaration_is_told_at_once(options, says):
    with pytest.raises(ConfigError, match=says):
        reversible(**options)


@pytest.mark.parametrize(
    "thing", [5, int, (n for n in ()), lambda: (yield)], ids=["number", "class", "generator", "generator function"]
)
def test_what_is_no_function_with_a_result_is_not_decorated(thing):
    with pytest.raises(ConfigError, match="reversible: "):
        reversible(undo="a:b")(thing)


@pytest.mark.parametrize(
    ("undo", "says"),
    [
        ("no_such_module:f", "ModuleNotFoundError"),
        (f"{HOME}:nothing", "AttributeError"),
        (f"{HOME}:DONE", "is a list, not a function"),
    ],
)
def test_an_undo_that_cannot_be_imported_lets_nothing_begin(guard, undo, says):
    ran = []
    act = reversible(undo=undo)(lambda: ran.append(1))
    with guard.session("s", budget="$1.00") as session, pytest.raises(ConfigError, match=says):
        act()
    assert ran == []
    assert states(session) == []


CIRCLE = []
CIRCLE.append(CIRCLE)
NO_JSON = [object(), float("inf"), b"x", {1, 2}, "\ud800", Decimal(1), CIRCLE, "x" * 70_000]


@pytest.mark.parametrize("value", NO_JSON, ids=lambda value: type(value).__name__)
def test_arguments_that_json_cannot_hold_let_nothing_begin(guard, value):
    with guard.session("s", budget="$1.00") as session, pytest.raises(ConfigError, match="arguments: key: "):
        reversibles.put(value)
    assert DONE == []
    assert states(session) == []


def test_a_result_that_json_cannot_hold_is_undone_at_once(guard):
    with (
        guard.session("s", budget="$1.00") as session,
        pytest.raises(ConfigError, match="result: a object is not JSON"),
    ):
        reversibles.opaque("a")
    assert DONE == [("opaque", "a"), ("unput", "a", None, False)]
    assert states(session) == ["undone"]


def test_wrong_arguments_are_a_type_error_and_outside_a_session_nothing_runs(guard):
    with guard.session("s", budget="$1.00"), pytest.raises(TypeError):
        reversibles.put()
    assert current_session() is None
    with pytest.raises(ConfigError, match="session: none is in context"):
        reversibles.put("a")
    assert DONE == []


def test_the_owner_sees_the_actions_and_undoes_nothing_of_a_living_process(tmp_path):
    url = f"sqlite:///{tmp_path / 'spend.db'}"
    with make_guard(url) as guard, guard.session("s", budget="$1.00", id="run-1"):
        reversibles.put("a", value=[1, {"b": None}])
        with Owner(url) as owner:
            [row] = owner.actions("run-1")
            assert (row.state, row.function, row.arguments) == ("done", "put", {"key": "a", "value": [1, {"b": None}]})
            with pytest.raises(ConfigError, match="is open in process"):
                owner.roll_back("run-1")
            with pytest.raises(ConfigError, match="is no session"):
                owner.actions("wallet")
    with Owner(url) as owner:
        assert owner.roll_back("run-1") == []
    assert DONE == [("put", "a")]
