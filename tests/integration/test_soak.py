"""The soak in short: it holds for the guard as it is, fails for one that is broken on purpose, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import pytest

from tests.support import postgres

ROOT = Path(__file__).parents[2]
LAST_LINE = re.compile(
    r"budget \$(?P<budget>[\d.]+), signed \$(?P<signed>[\d.]+), settled on chain \$(?P<settled>[\d.]+), counted \$(?P<counted>[\d.]+), "
    r"overshoot \$(?P<overshoot>[\d.]+), holds lost (?P<lost>\d+), duplicates (?P<duplicates>\d+)"
)

pytestmark = [
    pytest.mark.chain,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.xdist_group("soak"),
]


SEEDS = (7, 8, 9)


@pytest.fixture
def folder(tmp_path_factory):
    """With a short name: a socket in it may have a path of 100 letters at most."""
    return tmp_path_factory.mktemp("s")


def start(folder, *arguments, seconds, seed=7) -> subprocess.Popen:
    """A soak in a session of its own, so that whoever it leaves behind can be found."""
    command = [sys.executable, "-m", "tests.soak", "--seconds", str(seconds), "--seed", str(seed)]
    return subprocess.Popen(
        [*command, "--engine", "eth-tester", *arguments],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def soak(folder, *arguments, seconds, seed=7):
    """Run one; return its exit code, what it printed, and the numbers of its last line."""
    running = start(folder, *arguments, seconds=seconds, seed=seed)
    printed, _ = running.communicate(timeout=230)
    assert_nobody_is_left(running.pid)
    sums = LAST_LINE.fullmatch(printed.splitlines()[-1])
    assert sums, printed
    return running.returncode, printed, {name: Decimal(value) for name, value in sums.groupdict().items()}


def assert_nobody_is_left(session, within_s=20.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    left = subprocess.run(["ps", "-o", "pid,args", "-g", str(session)], capture_output=True, text=True, check=False)
    os.killpg(session, signal.SIGKILL)
    pytest.fail(f"somebody is left of session {session}:\n{left.stdout}")


def number(printed, what) -> int:
    found = re.search(rf"\b{what} (\d+)", printed)
    assert found, f"{what} is not said:\n{printed}"
    return int(found[1])


def assert_counted(code, printed, sums):
    assert code == 0, printed
    assert (sums["overshoot"], sums["lost"], sums["duplicates"]) == (0, 0, 0)
    assert 0 < sums["settled"] == sums["counted"] <= sums["budget"]


def test_what_leaves_the_wallet_is_what_was_counted(folder):
    code, printed, sums = soak(folder, "--least", "20", seconds=8)
    assert_counted(code, printed, sums)
    assert number(printed, "kills") >= 1


@pytest.mark.long
def test_what_leaves_the_wallet_is_what_was_counted_while_everything_goes_wrong(folder):
    code, printed, sums = soak(folder, "--least", "60", seconds=22)
    assert_counted(code, printed, sums)
    assert sums["settled"] < sums["signed"]  # what was never taken is not counted in the end
    for what, least in {
        "kills": 5, "checks": 10, "chain in trouble": 1, "clock moved on": 1, "signatures": 40, "refusals": 5, "budget": 1,
        "captured": 10, "expired": 1,
    }.items():  # fmt: skip
        assert number(printed, what) >= least, printed


@pytest.mark.long
def test_the_same_while_the_server_of_the_ledger_crashes():
    postgres.server()  # skips where there is none
    with postgres.a_folder() as folder:
        code, printed, sums = soak(folder, "--store", "postgres", "--least", "40", seconds=20)
    assert_counted(code, printed, sums)
    assert number(printed, "server crashed") >= 1
    assert number(printed, "was cut off") >= 5
    assert number(printed, "was replaced") == 1
    assert number(printed, "kills") >= 5


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        ("forget", "overshoot"),  # a start gives back what the dead one held
        ("overdraw", "overshoot"),  # no budget is ever short
        ("twice", "duplicates"),  # a retry signs anew
        ("aside", "lost"),  # the key is used past the guard
    ],
)
def test_a_guard_that_is_broken_does_not_pass(folder, fault, shown):
    for seed in SEEDS:  # the dice decide what happens; on a machine with other work, little may
        (folder / str(seed)).mkdir()
        code, printed, sums = soak(folder / str(seed), "--fault", fault, seconds=60, seed=seed)
        if sums[shown] > 0:
            break
    assert code == 1, printed
    assert sums[shown] > 0, printed
    assert f"again with: python -m tests.soak --seed {seed} --engine eth-tester" in printed


def test_a_soak_that_is_killed_takes_its_agents_along(folder):
    running = start(folder, seconds=60)
    try:
        assert running.stdout.readline().startswith("seed 7, 60 s on eth-tester")
        deadline = time.monotonic() + 30
        while not (signed := list(folder.glob("*/signed.jsonl"))) or not signed[0].stat().st_size:
            assert time.monotonic() < deadline, "nobody has signed anything"
            time.sleep(0.05)
    finally:
        running.kill()
        running.communicate(timeout=20)
    assert_nobody_is_left(running.pid)
