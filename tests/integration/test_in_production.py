"""The page about production: its commands, in their order, its unit, and what it says of containers."""

import os
import re
import shutil
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

from tests.support.merchant import make_guard
from x402guard import Owner

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "in-production.md"
_PASSWORD = "of the test only"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def in_bash(block, folder):
    names = ("PATH", "HOME", "TMPDIR", "LANG")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
        "X402GUARD_KEYSTORE_PASSWORD": _PASSWORD,
        "PYTHONWARNINGS": "ignore",
    }
    command = ["bash", "-euc", block]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_its_commands_run_in_their_order_and_lose_nothing(tmp_path):
    fund, container, backup, drill, upgrade, rotate = blocks("sh")
    path = tmp_path / "x402guard.db"
    # ``doctor`` has warnings on a machine without chains; what it checks is in a test of its own.
    assert in_bash(fund.replace("x402guard doctor", "x402guard doctor || true"), tmp_path).returncode == 0
    with make_guard(f"sqlite:///{path}", signer=None) as guard, guard.session("a", budget="$5.00", id="a") as session:
        session.charge("x", "$1.00")
        for block in (container, backup):
            done = in_bash(block, tmp_path)
            assert done.returncode == 0, done.stderr
        session.charge("x", "$0.50", arguments={"n": 2})
    done = in_bash(drill, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "$0.50 are captured in the wallet" in done.stdout
    done = in_bash(upgrade, tmp_path)
    assert (done.returncode, "already" in done.stdout) == (0, True), done.stderr
    done = in_bash(rotate, tmp_path)
    assert (done.returncode, "no key was ever used with it" in done.stderr) == (2, True), "this agent never pays"
    with Owner(path) as owner:
        wallet = owner.budget("wallet")
        assert (wallet.spent, wallet.per, owner.verify()) == (Decimal("1.5"), "month Europe/Berlin", [])
        assert [row.state for row in owner.sessions(name="a")] == ["tripped"]


def test_its_drill_accepts_a_copy_since_which_nothing_was_used(tmp_path):
    fund, _, backup, drill, *_ = blocks("sh")
    path = tmp_path / "x402guard.db"
    in_bash(fund, tmp_path)
    with make_guard(f"sqlite:///{path}", signer=None) as guard, guard.session("a", budget="$5.00", id="a") as session:
        session.charge("x", "$1.00")
    for block in (backup, drill):
        done = in_bash(block, tmp_path)
        assert done.returncode == 0, done.stderr
    with make_guard(f"sqlite:///{path}", signer=None) as guard, guard.session("a", id="a") as session:
        session.charge("x", "$1.00", arguments={"n": 2})


def test_its_unit_is_one(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here, which reads a unit")
    [unit] = blocks("ini")
    # The program, its user and its password are the reader's.
    unit = re.sub(r"ExecStart=.*", "ExecStart=/bin/true", unit)
    unit = re.sub(r"(?m)^(User|EnvironmentFile)=.*\n", "", unit)
    file = tmp_path / "agent.service"
    file.write_text(unit)
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60, check=False)
    mine = [line for line in done.stderr.splitlines() if "agent.service" in line]
    assert mine == []


_CONTAINER = """
set -e
mount -t tmpfs none /tmp
mount --bind {folder} {folder}
mount -o remount,bind,ro / 2>/dev/null || true
exec {python} -c '
import sys, os
from x402guard import Guard
with Guard(ledger=sys.argv[1]) as guard, guard.session("agent", id="agent-1", budget="$1.00") as session:
    session.charge("x", "$0.10", arguments={{"pid": os.getpid()}})
    print(session.spent, flush=True)
    if sys.argv[2] == "stays":
        sys.stdin.read()
' {url} {how}
"""


def test_a_container_with_a_root_that_is_only_read_and_a_volume_goes_on_after_a_kill(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("there is no `unshare` here, which makes a container's namespaces")
    folder = tmp_path / "volume"
    folder.mkdir()
    url = f"sqlite:///{folder / 'spend.db'}"

    def container(how):
        script = _CONTAINER.format(folder=folder, python=sys.executable, url=url, how=how)
        around = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--uts", "sh", "-c", script]
        return subprocess.Popen(around, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    with container("stays") as first:
        said = first.stdout.readline()
        if b"unshare failed" in (told := b"" if said else first.stderr.read()):
            pytest.skip(f"this user may make no namespace: {told.decode().strip()}")
        assert said == b"0.10\n", told
        first.send_signal(signal.SIGKILL)
        first.wait()
    with container("ends") as second:
        told, errors = second.communicate(timeout=60)
        assert told == b"0.20\n", errors
    with Owner(folder / "spend.db") as owner:
        assert [(row.state, row.spent) for row in owner.sessions(name="agent")] == [("closed", Decimal("0.2"))]
        assert owner.verify() == []
