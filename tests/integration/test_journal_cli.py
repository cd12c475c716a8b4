"""kill -9 in the midst of actions that can be undone, and ``x402guard journal rollback`` in a new process."""

import asyncio
import json
import signal
import sqlite3
import threading
from contextlib import closing

import pytest
from aiosmtpd.smtp import SMTP

from tests.support import processes
from tests.support.command_line import forked, typed
from tests.support.merchant import make_guard
from tests.support.undoing_agent import HOME, MOMENTS, STEPS
from x402guard.tools import undo

pytestmark = pytest.mark.xdist_group("journal")
MAIL_STEPS = (3, 5)


class Mailbox:
    def __init__(self):
        self.subjects = []

    async def handle_DATA(self, _server, _session, envelope):
        [subject] = [line for line in envelope.content.decode().splitlines() if line.startswith("Subject: ")]
        self.subjects.append(subject.removeprefix("Subject: "))
        return "250 OK"


@pytest.fixture(scope="module")
def mail_server():
    box, loop = Mailbox(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    listening = loop.create_server(lambda: SMTP(box, loop=loop, hostname="mail.example"), "127.0.0.1", 0)
    server = asyncio.run_coroutine_threadsafe(listening, loop).result(20)
    yield box, server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


@pytest.fixture
def world(mail_server, tmp_path, monkeypatch):
    box, port = mail_server
    box.subjects.clear()
    monkeypatch.setenv("APP_DB", str(tmp_path / "app.db"))
    monkeypatch.setenv("MAIL_PORT", str(port))
    with closing(sqlite3.connect(tmp_path / "app.db")) as file, file:
        file.execute("CREATE TABLE rows (name TEXT, deleted INTEGER)")
        file.execute("INSERT INTO rows VALUES ('old', 0)")
    return tmp_path, box


def rows(folder):
    with closing(sqlite3.connect(folder / "app.db")) as file:
        return sorted(file.execute("SELECT * FROM rows").fetchall())


def agent(folder, number, moment):
    return processes.run("tests.support.undoing_agent", f"sqlite:///{folder / 'spend.db'}", number, moment, module=True)


def journal(folder, *arguments):
    return forked("journal", *arguments, "--ledger", f"sqlite:///{folder / 'spend.db'}", cwd=processes.ROOT)


KILLS = [(n, at) for n in range(1, STEPS + 1) for at in MOMENTS if n != MAIL_STEPS[0] or at in ("before", "after")]


@pytest.mark.parametrize(("number", "moment"), KILLS)
def test_after_kill_9_a_new_process_undoes_what_was_done_or_says_what_is_not(world, number, moment):
    folder, box = world
    died = agent(folder, number, moment)
    assert died.returncode == -signal.SIGKILL, died.stderr
    done = journal(folder, "rollback", "run-1", HOME, "--yes", "--json")
    assert rows(folder) == [("old", 0)], done.stderr
    failed = [row["function"] for row in json.loads(done.stdout) if row["state"] == "failed"]
    begun = number == MAIL_STEPS[1] and moment != "before"
    # Of a message that may have been sent the list says so; one that was only staged is never sent.
    assert failed == (["send"] if begun else [])
    assert done.returncode == (1 if begun else 0)
    assert box.subjects == (["sent"] if begun and moment != "begun" else [])
    shown = [row["state"] for row in json.loads(journal(folder, "show", "run-1", "--json").stdout)]
    assert set(shown) <= {"undone", "failed"}
    again = journal(folder, "rollback", "run-1", HOME, "--yes")
    assert (again.returncode, "nothing to undo" in again.stdout) == ((1, False) if begun else (0, True))


def test_an_agent_that_is_not_killed_commits_all_of_it(world):
    folder, box = world
    ended = agent(folder, 0, "")
    assert ended.returncode == 0, ended.stderr
    assert rows(folder) == [("new", 0), ("newer", 0), ("old", 1)]
    assert box.subjects == ["sent", "staged"]
    shown = json.loads(journal(folder, "show", "run-1", "--json").stdout)
    assert [(row["number"], row["state"]) for row in shown] == [(n, "committed") for n in range(1, STEPS + 1)]
    assert "nothing to undo" in journal(folder, "rollback", "run-1", HOME, "--yes").stdout


def test_what_a_run_that_is_started_again_has_made_final_is_not_told_as_undone(world, monkeypatch):
    folder, _ = world
    agent(folder, 2, "acted")
    actual, begun = undo._try, []

    def goes_on_meanwhile(action):
        if not begun:
            begun.append(action)
            with make_guard(f"sqlite:///{folder / 'spend.db'}") as guard, guard.session("agent", id="run-1"):
                pass  # its end makes final what is not being undone
        return actual(action)

    monkeypatch.setattr(undo, "_try", goes_on_meanwhile)
    ledger = f"sqlite:///{folder / 'spend.db'}"
    done = typed("journal", "rollback", "run-1", HOME, "--yes", "--json", "--ledger", ledger, cwd=processes.ROOT)
    assert [row["state"] for row in json.loads(done.stdout)] == ["undone", "committed"], done
    assert done.returncode == 1


def test_the_end_of_a_run_that_goes_on_after_a_crash_leaves_what_another_process_did_to_its_owner(world):
    folder, _ = world
    agent(folder, 4, "acted")
    before = rows(folder)
    with pytest.raises(KeyError), make_guard(f"sqlite:///{folder / 'spend.db'}") as guard:
        with guard.session("agent", id="run-1"):
            raise KeyError
    assert rows(folder) == before
    assert journal(folder, "rollback", "run-1", HOME, "--yes").returncode == 0
    assert rows(folder) == [("old", 0)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("rollback", "nothing"), "nothing"),
        (("show", "wallet"), "is no session"),
        (("rollback",), "Missing argument"),
    ],
)
def test_mistakes_are_told_in_a_line(world, arguments, says):
    folder, _ = world
    agent(folder, 1, "after")
    done = journal(folder, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_an_undo_that_cannot_be_imported_here_is_told_and_can_be_tried_again(world, tmp_path_factory):
    folder, _ = world
    agent(folder, 1, "after")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    away = processes.run(
        "import sys; sys.modules['tests.support.undoing_agent'] = None\n"
        "from x402guard.cli import main; sys.exit(main())",
        "journal", "rollback", "run-1", HOME, "--yes", "--ledger", f"sqlite:///{folder / 'spend.db'}", cwd=elsewhere,
    )  # fmt: skip
    assert away.returncode == 2
    assert f"{HOME}: it cannot be imported" in away.stderr
    unnamed = journal(folder, "rollback", "run-1", "--yes")
    assert unnamed.returncode == 2
    assert f"{HOME}:remove: no function that is imported here is decorated with it" in unnamed.stderr
    shown = json.loads(journal(folder, "show", "run-1", "--json").stdout)
    assert [row["state"] for row in shown] == ["done"], "nothing was tried"
    assert journal(folder, "rollback", "run-1", HOME, "--yes").returncode == 0
    assert rows(folder) == [("old", 0)]
