"""A stream that is closed, or that cannot encode what a command says, ends no command in a traceback."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.merchant import make_guard

REPOSITORY = Path(__file__).parents[2]
MODULE = f"{shlex.quote(sys.executable)} -m x402guard"


@pytest.fixture
def run(tmp_path):
    with make_guard(f"sqlite:///{tmp_path / 'spend.db'}") as guard, guard.session("müde", budget="$1.00") as session:
        session.charge("search", "$0.01")

    def runs(command, **environment):
        script = f"{MODULE} {command}"
        env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path), **environment}
        done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=env, capture_output=True, check=False, timeout=60)
        assert b"Traceback" not in done.stderr, done.stderr
        return done

    return runs


@pytest.mark.parametrize("command", ["sessions", "prices list", "report --format csv", "report --json"])
def test_an_output_that_is_closed(run, command):
    ledger = "" if "prices" in command else " --ledger spend.db"
    assert run(f"{command}{ledger} >&-").returncode == 0


@pytest.mark.parametrize("command", ["keys new w.json", "budget set wallet 0 --ledger spend.db"])
def test_an_input_that_is_closed(run, command):
    done = run(f"{command} <&-")
    assert done.returncode in (1, 2)
    assert done.stderr


@pytest.mark.parametrize("command", ["sessions", "report", "watch --once", "report --format csv", "report --json"])
@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_an_output_that_cannot_encode_it(run, command, encoding):
    done = run(f"{command} --ledger spend.db", PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    if "--json" in command:
        json.loads(done.stdout.decode("utf-8" if encoding == "ascii" else encoding))  # typer writes UTF-8 there


def test_a_key_in_place_of_a_new_file_is_shown_nowhere(run, tmp_path):
    key = "0x" + "a7" * 32
    for command in (f"keys new {key}", f"keys import {key}"):
        done = run(command, X402GUARD_KEYSTORE_PASSWORD="x", X402GUARD_PRIVATE_KEY="0x" + "11" * 32)
        assert done.returncode == 2
        assert key.encode() not in done.stdout + done.stderr
    assert not [each for each in tmp_path.iterdir() if "a7a7" in each.name]
