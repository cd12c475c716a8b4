"""Who lives is known by a lock that ends with its process, in every container and namespace that shares the folder."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager

import pytest

from tests.support.merchant import make_guard
from x402guard import ConfigError, Owner
from x402guard.http.rehearsal import RehearsedLedger
from x402guard.stores import open_store

_AGENT = """
import sys, time
from x402guard import Guard
guard = Guard(ledger=sys.argv[1], budget="$5.00")
session = guard.session("agent", budget="$1.00", id="agent-1")
session.charge("x", "$0.10")
print("ready", flush=True)
sys.stdin.read()
"""
APART = ["unshare", "--pid", "--fork", "--kill-child", "--uts"]


@contextmanager
def agent(url, *around):
    """A process that has a session open; around it, a namespace of its own."""
    command = [*around, sys.executable, "-c", _AGENT, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            if process.stdout.readline() != b"ready\n":
                told = process.stderr.read().decode()
                if "unshare failed" in told:
                    pytest.skip(f"this user may make no namespace: {told.strip()}")
                raise AssertionError(told)
            yield process
        finally:
            process.kill()


def state(path):
    with Owner(path) as owner:
        return owner.sessions(name="agent")[0].state


def lives_of(path):
    return list(path.parent.glob(f"{path.name}-live-*"))


@pytest.mark.parametrize("around", [(), APART], ids=["beside", "in a container"])
def test_the_end_of_a_process_is_seen_at_once(tmp_path, around):
    if around and shutil.which("unshare") is None:
        pytest.skip("there is no `unshare` here, which makes a namespace")
    path = tmp_path / "spend.db"
    with agent(f"sqlite:///{path}", *around) as process:
        assert (state(path), len(lives_of(path))) == ("open", 1)
        process.send_signal(signal.SIGSTOP)
        assert state(path) == "open", "a stopped process lives"
        process.kill()
        process.wait()
        until = time.monotonic() + 10
        while state(path) == "open" and time.monotonic() < until:
            time.sleep(0.05)  # the namespace's other processes end with it
        assert state(path) == "abandoned"
    with make_guard(f"sqlite:///{path}") as guard, guard.session("agent", id="agent-1") as session:
        session.charge("x", "$0.10")
        assert len(lives_of(path)) == 1, "what the dead process has left is removed"
        assert state(path) == "open"
    assert (state(path), lives_of(path)) == ("closed", [])


def test_a_fork_does_not_hold_its_parents_life(tmp_path):
    path = tmp_path / "spend.db"
    guard = make_guard(f"sqlite:///{path}")
    session = guard.session("agent", budget="$1.00", id="agent-1")
    session.charge("x", "$0.10")
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        guard._life.close()  # as the end of this process would
        until = time.monotonic() + 10
        while guard.shell.store.lives(guard._life_name) and time.monotonic() < until:
            time.sleep(0.01)  # until the child has run what it runs first
        assert guard.shell.store.lives(guard._life_name) is False
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        guard.close()


def test_a_lock_that_was_removed_says_nothing(tmp_path):
    path = tmp_path / "spend.db"
    with agent(f"sqlite:///{path}"):
        for file in lives_of(path):
            file.unlink()
        assert state(path) == "open", "its process is here, and runs"


@pytest.mark.parametrize("name", ["", "../x", "a/b", "0" * 80, "\0", "spend"])
def test_a_word_in_a_row_makes_no_path(tmp_path, name):
    with make_guard(f"sqlite:///{tmp_path / 'spend.db'}") as guard:
        before = sorted(tmp_path.iterdir())
        assert guard.shell.store.lives(name) is None
        assert guard.shell.store.hold_life(name) is None
        assert sorted(tmp_path.iterdir()) == before


def test_a_guard_that_does_not_open_leaves_no_lock(tmp_path):
    path = tmp_path / "spend.db"
    with make_guard(f"sqlite:///{path}", budget="$5.00"):
        with pytest.raises(ConfigError, match="wallet has a limit"):
            make_guard(f"sqlite:///{path}", budget="$6.00")
        assert len(lives_of(path)) == 1
    assert lives_of(path) == []


def test_a_rehearsal_makes_no_lock_and_removes_none(tmp_path):
    """A dry run writes nothing: the free lock is what another container knows the end of the process by."""
    path = tmp_path / "spend.db"
    with agent(f"sqlite:///{path}") as process:
        process.kill()
        process.wait()
    left = lives_of(path)
    assert len(left) == 1
    with closing(open_store(f"sqlite:///{path}", read_only=True)) as store:
        with make_guard(RehearsedLedger(store)):
            assert lives_of(path) == left
        assert lives_of(path) == left
