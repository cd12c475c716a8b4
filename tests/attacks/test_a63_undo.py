"""A63: only functions that ``reversible`` has named in the process are called to undo; no text of a ledger is imported."""

import json
import sqlite3
import sys
from contextlib import closing
from contextvars import copy_context

import pytest

from tests.support import reversibles
from tests.support.command_line import as_process, forked
from tests.support.merchant import make_guard
from tests.support.processes import run
from x402guard import ConfigError, Owner
from x402guard.ledger.actions import Action, ActionState, action_mark, actions_mark, begin_action
from x402guard.ledger.view import Scope

EVIL = "open({!r}, 'w').write('ran')\ndef go(action): pass\n"


@pytest.fixture
def world(tmp_path):
    """A ledger with an action whose undo a hostile process has named, and a folder with a module of that name."""
    ledger, folder = f"sqlite:///{tmp_path / 'spend.db'}", tmp_path / "cloned"
    folder.mkdir()
    (folder / "evilmod.py").write_text(EVIL.format(str(tmp_path / "ran")))
    with make_guard(ledger) as guard:
        with guard.session("run", budget="$1.00", id="run-1"):
            write(guard, "run-1")
    return ledger, folder, tmp_path / "ran"


def write(guard, run_id, undo="evilmod:go"):
    action = Action(f"{run_id}/x1", run_id, "harmless", undo, {"cmd": "touch"}, state=ActionState.DONE, returned=True)
    scope = Scope(nodes=(run_id,), marks=(actions_mark(run_id), action_mark(action.id)), durable=True)
    guard.shell.store.transact(scope, lambda view: begin_action(view, run_id, action))


def states(ledger, run_id="run-1"):
    with Owner(ledger) as owner:
        return [row.state for row in owner.actions(run_id)]


@pytest.mark.parametrize("way", [forked, as_process])
def test_a63_a_rollback_imports_nothing_that_a_row_names(world, way):
    ledger, folder, ran = world
    with make_guard(ledger) as guard:  # the normal end above made it final: another one
        session = guard.session("other", budget="$1.00", id="run-2")
        copy_context().run(session.__enter__)  # it stays open, and is in no other test's context
        write(guard, "run-2")
    for more in ((), ("--from", folder)):
        done = way("journal", "rollback", "run-2", "--yes", *more, "--ledger", ledger, cwd=folder)
        assert done.returncode == 2
        assert "evilmod:go: no function that is imported here is decorated with it" in done.stderr
    assert not ran.exists()
    assert states(ledger, "run-2") == ["done"]


def test_a63_it_shows_what_it_would_call_and_asks(world):
    ledger, folder, _ = world
    (folder / "mine.py").write_text(
        "import x402guard\n@x402guard.reversible(undo='mine:unput')\ndef put(key): return key\n"
        "def unput(action): print('undoes', action.arguments['key'])\n"
    )
    agent = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\nimport mine, x402guard\n"
        "guard = x402guard.Guard(ledger=sys.argv[1])\nguard.session('r', budget='1.00', id='run-3').__enter__()\n"
        "mine.put('a')\nos._exit(9)\n"
    )
    assert run(agent, ledger, str(folder)).returncode == 9
    words = ("journal", "rollback", "run-3", "mine", "--from", folder, "--ledger", ledger)
    asked = forked(*words, cwd=folder)
    assert 'put: mine:unput with {"key": "a"}' in asked.stderr
    assert asked.returncode
    assert states(ledger, "run-3") == ["done"]
    for wrong, says in (
        (("nothere", "--from", folder), "nothere: it cannot be imported"),
        (("mine", "--from", "/nowhere"), "is no folder"),
    ):
        told = forked("journal", "rollback", "run-3", *wrong, "--yes", "--ledger", ledger, cwd=folder)
        assert (told.returncode, says in told.stderr) == (2, True)
    done = forked(*words, "--yes", cwd=folder)
    assert (done.returncode, "undoes a" in done.stdout) == (0, True)
    assert states(ledger, "run-3") == ["undone"]


def test_a63_a_process_undoes_at_its_end_only_what_it_began(world, monkeypatch):
    """Another process writes an action under its run, whose undo the victim can import."""
    ledger, folder, ran = world
    monkeypatch.syspath_prepend(str(folder))
    with make_guard(ledger) as guard, pytest.raises(KeyError):
        with guard.session("victim", budget="$1.00", id="victim"):
            with make_guard(ledger) as other:
                write(other, "victim")
            raise KeyError
    assert not ran.exists()
    assert "evilmod" not in sys.modules
    assert states(ledger, "victim") == ["done"]
    with Owner(ledger) as owner, pytest.raises(ConfigError, match="evilmod:go: no function that is imported here"):
        owner.roll_back("victim")


def test_a63_a_row_of_its_own_that_was_changed_is_not_undone(tmp_path):
    """The arguments and the undo are those that the process has written, not what its row says now."""
    ledger, done = f"sqlite:///{tmp_path / 'spend.db'}", reversibles.DONE
    done.clear()
    with make_guard(ledger) as guard, pytest.raises(KeyError):
        with guard.session("s", budget="$1.00", id="s"):
            reversibles.put("a")
            with closing(sqlite3.connect(tmp_path / "spend.db")) as file, file:
                [(key, value)] = file.execute("SELECT key, value FROM marks WHERE kind = 'action'").fetchall()
                row = {**json.loads(value), "arguments": {"key": "mallory", "value": 1}}
                file.execute("UPDATE marks SET value = ? WHERE kind = 'action' AND key = ?", (json.dumps(row), key))
            raise KeyError
    assert done == [("put", "a")]
    with Owner(ledger) as owner:
        assert [(row.state, row.error) for row in owner.actions("s")] == [
            ("failed", "its row is not what this process has written")
        ]
