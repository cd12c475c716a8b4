"""Finding anvil, starting it, and ending it: whatever goes wrong, there is a clear error and no process left."""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from tests.support.engines import SWITCH, needs_anvil
from x402guard import ConfigError
from x402guard.guard.settings import load_settings
from x402guard.testing import AnvilEngine, AnvilError, RpcError, anvil_engine, find_anvil

pytestmark = [pytest.mark.xdist_group("anvil"), pytest.mark.long]

ROOT = Path(__file__).parents[2]


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def soon_gone(pid):
    deadline = time.monotonic() + 10
    while not gone(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def script(tmp_path):
    """Make a program that writes its process's number down, and then does what it is told."""

    def write(body, name="anvil"):
        path = tmp_path / name
        first = f"import os, pathlib, sys, time\npathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        path.write_text(f"#!{sys.executable}\n{first}{body}\n")
        path.chmod(0o755)
        return path

    return write


def pid_in(folder):
    return int((folder / "pid").read_text())


def real_anvil(script):
    return script(f"os.execv({str(needs_anvil())!r}, sys.argv)")


# ---- finding it ----


def installed(folder):
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    path = folder / "node_modules" / "@foundry-rs" / f"anvil-{sys.platform}-{machine}" / "bin" / "anvil"
    path.parent.mkdir(parents=True)
    path.write_text("")
    path.chmod(0o755)
    return path


def test_the_variable_comes_before_the_path_and_the_path_before_npm(script, monkeypatch, tmp_path):
    monkeypatch.delenv("X402GUARD_ANVIL", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(tmp_path)
    for folder in ("tests/anvil", "tests", ""):
        below = installed(tmp_path / folder)
        assert find_anvil() == below
    (tmp_path / "bin").mkdir()
    on_path = script("", "bin/anvil")
    assert find_anvil() == on_path
    named = script("", "another")
    monkeypatch.setenv("X402GUARD_ANVIL", "another")
    assert find_anvil() == named


def test_without_any_it_is_said_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.delenv("X402GUARD_ANVIL", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    installed(tmp_path).chmod(0o644)
    with pytest.raises(ConfigError, match="neither on the PATH nor in node_modules") as missing:
        AnvilEngine()
    assert "npm install @foundry-rs/anvil" in missing.value.advice
    for wrong in (tmp_path, tmp_path / "none"):
        monkeypatch.setenv("X402GUARD_ANVIL", str(wrong))
        with pytest.raises(ConfigError, match=r"X402GUARD_ANVIL: .* is not an executable file"):
            find_anvil()


def test_a_missing_anvil_skips_with_its_reason_and_fails_where_it_is_required(monkeypatch, tmp_path):
    monkeypatch.setenv("X402GUARD_ANVIL", str(tmp_path / "none"))
    monkeypatch.delenv(SWITCH, raising=False)
    outcomes = (pytest.skip.Exception, pytest.fail.Exception)  # a skip that is not caught here would skip this test
    with pytest.raises(outcomes, match=r"is not an executable file\. Install it with") as skipped:
        needs_anvil()
    assert skipped.type is pytest.skip.Exception
    monkeypatch.setenv(SWITCH, "1")
    with pytest.raises(outcomes, match=f"{SWITCH}=1, but X402GUARD_ANVIL: .* Install it with") as failed:
        needs_anvil()
    assert failed.type is pytest.fail.Exception


def test_the_variable_is_nothing_to_a_guard(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("X402GUARD_ANVIL", "/somewhere/anvil")
    assert load_settings().budget is None
    monkeypatch.setenv("X402GUARD_ANVILS", "/somewhere/anvil")
    with pytest.raises(ConfigError, match="X402GUARD_ANVILS: there is no such setting"):
        load_settings()


def test_the_lock_names_every_platform_by_its_hash_and_no_registry():
    lock = json.loads((ROOT / "tests" / "anvil" / "package-lock.json").read_text())
    packages = {name: entry for name, entry in lock["packages"].items() if name}
    assert {name.rpartition("/")[2] for name in packages} == {
        "anvil", "anvil-linux-amd64", "anvil-linux-arm64", "anvil-darwin-amd64", "anvil-darwin-arm64", "anvil-win32-amd64",
    }  # fmt: skip
    for entry in packages.values():
        assert entry["version"] == "1.7.1"
        assert entry["integrity"].startswith("sha512-")
        assert "resolved" not in entry
    assert "anvil@1.7.1" in anvil_engine._INSTALL


# ---- starting it ----


def test_a_program_that_is_none_is_a_clear_error(tmp_path):
    (tmp_path / "text").write_text("not a program")
    for path, why in [("none", "No such file"), ("text", "Permission denied")]:
        with pytest.raises(ConfigError, match=f"{path} cannot be run: {why}"):
            AnvilEngine(binary=tmp_path / path)


def test_a_program_that_ends_at_once_is_quoted_and_sees_no_secret(script, monkeypatch, tmp_path):
    monkeypatch.setenv("X402GUARD_PRIVATE_KEY", "0x" + "5e" * 32)
    monkeypatch.setenv("ANVIL_IP_ADDR", "0.0.0.0")  # noqa: S104 - what it must not listen on
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script("print(sorted(os.environ)); print('in', os.getcwd(), sys.argv); sys.exit(3)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="did not start: it ended with code 3 and this output: ") as wrong:
        AnvilEngine(binary="anvil", chain_id=5)
    said = str(wrong.value)
    assert "'HOME'" in said
    assert "X402GUARD" not in said
    assert "ANVIL_IP_ADDR" not in said
    assert f"in {tmp_path.resolve()}/x402guard-anvil-" in said
    assert "'--host', '127.0.0.1'" in said
    assert sorted(each.name for each in tmp_path.iterdir()) == ["anvil", "pid"]


def test_a_program_reads_nothing_of_what_is_typed(script, tmp_path):
    (tmp_path / "typed").write_text("correct horse battery staple")
    kept = os.dup(0)
    try:
        with (tmp_path / "typed").open() as typed:
            os.dup2(typed.fileno(), 0)
        with pytest.raises(ConfigError, match=r"this output: read \[\]"):
            AnvilEngine(binary=script("print('read', sys.stdin.readlines())"))
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_a_program_that_says_nothing_is_ended(script, monkeypatch, tmp_path):
    monkeypatch.setattr(anvil_engine, "_START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(anvil_engine, "_END_TIMEOUT_S", 0.2)
    path = script("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)")
    with pytest.raises(ConfigError, match=r"did not report its port within 0\.5 s"):
        AnvilEngine(binary=path)
    assert gone(pid_in(tmp_path))


def test_a_program_around_the_program_is_ended_with_it(script, monkeypatch, tmp_path):
    """As npm's own `anvil` is: a script that starts the binary and waits for it."""
    monkeypatch.setattr(anvil_engine, "_END_TIMEOUT_S", 0.5)
    inner = real_anvil(script).rename(tmp_path / "inner")
    outer = tmp_path / "outer"
    outer.write_text(f'#!/bin/sh\ntrap "exit 0" TERM\n{inner} "$@" & wait\n')
    outer.chmod(0o755)
    engine = AnvilEngine(binary=outer)
    assert engine.rpc("eth_blockNumber", []) == "0x0"
    assert not gone(pid_in(tmp_path))
    assert engine.pid != pid_in(tmp_path)
    engine.close()
    assert soon_gone(pid_in(tmp_path))


def test_a_program_that_listens_nowhere_is_an_error_and_ended(script, tmp_path):
    path = script("print('Listening on 127.0.0.1:9', flush=True)\ntime.sleep(60)")
    with pytest.raises(AnvilError, match=r"no answer to anvil_setCode .*: it is still running"):
        AnvilEngine(binary=path)
    assert gone(pid_in(tmp_path))


def test_a_program_that_answers_nonsense_is_an_error_and_ended(script, tmp_path):
    path = script("""
import http.server
class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"soup")
server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
print(f"Listening on 127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()""")
    with pytest.raises(AnvilError, match="answer to anvil_setCode cannot be read"):
        AnvilEngine(binary=path)
    assert gone(pid_in(tmp_path))


def test_one_that_cannot_be_filled_is_ended(script, monkeypatch, tmp_path):
    folders = tmp_path / "folders"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    with pytest.raises(RpcError):
        AnvilEngine(binary=real_anvil(script), balances={"nobody": 1})
    assert gone(pid_in(tmp_path))
    assert list(folders.iterdir()) == []


def test_a_port_can_be_asked_for_and_one_in_use_is_refused(script, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        with pytest.raises(ConfigError, match=r"did not start: it ended with code 1 .*[Aa]ddress already in use"):
            AnvilEngine(binary=real_anvil(script), port=port)
        assert gone(pid_in(tmp_path))
    engine = AnvilEngine(binary=needs_anvil(), port=port)
    call = {"jsonrpc": "2.0", "id": 1, "method": "eth_chainId", "params": []}
    assert httpx.post(f"http://127.0.0.1:{port}", json=call, trust_env=False).json()["result"] == hex(84532)
    engine.close()


@pytest.mark.parametrize("wrong", [{"tick_s": 0}, {"tick_s": -1.0}, {"slots_in_an_epoch": -1}])
def test_a_time_or_an_epoch_that_is_none_is_refused_before_anything_starts(script, tmp_path, wrong):
    with pytest.raises(ValueError, match="tick_s must be above 0"):
        AnvilEngine(binary=script("time.sleep(60)"), **wrong)
    assert not (tmp_path / "pid").exists()


# ---- ending it ----


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(1)", "raise RuntimeError"])
def test_it_ends_with_the_interpreter(end):
    code = f"""
from x402guard.testing import AnvilEngine
engine = AnvilEngine(binary={str(needs_anvil())!r})
print(engine.pid, flush=True)
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert gone(int(done.stdout)), done.stderr


# ---- the command line ----


def x402guard(*arguments, cwd, anvil, **options):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("X402GUARD_")}
    return subprocess.Popen(
        [sys.executable, "-m", "x402guard", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=kept | {"X402GUARD_ANVIL": str(anvil)},
        **options,
    )  # fmt: skip


@pytest.mark.chain
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_testnet_runs_on_anvil_and_takes_it_along(script, tmp_path, number):
    command = x402guard("testnet", "--engine", "anvil", cwd=tmp_path, anvil=real_anvil(script))
    try:
        lines = []
        while not lines or lines[-1] != "}\n":
            lines.append(command.stdout.readline())
            assert lines[-1], command.stderr.read()
        net = json.loads("".join(lines))
        with httpx.Client(base_url=net["rpc"], trust_env=False) as http:

            def ask(method, *params):
                return http.post("/", json={"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).json()[
                    "result"
                ]

            assert ask("web3_clientVersion").startswith("anvil/")
            heights = [int(ask("eth_getBlockByNumber", tag, False)["number"], 16) for tag in ("finalized", "latest")]
        assert heights[0] == 0 < heights[1], "sixty-four blocks have not passed yet"
        assert not gone(pid_in(tmp_path))
    finally:
        command.send_signal(number)
        _, complaints = command.communicate(timeout=20)
    assert (command.returncode, complaints) == (0, "")
    assert gone(pid_in(tmp_path))


@pytest.mark.chain
def test_the_demo_agrees_with_the_chain_on_anvil(tmp_path):
    out, complaints = x402guard("demo", "--engine", "anvil", cwd=tmp_path, anvil=needs_anvil()).communicate(timeout=100)
    assert "Ledger and chain agree to the atomic unit: 912345 units counted." in out, complaints
    assert "refused before signing" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "name", "says"),
    [
        ("testnet", "anvil", "is not an executable file\nInstall it with"),
        ("demo", "ganache", "Invalid value for '--engine'"),
    ],
)
def test_an_engine_that_is_not_there_is_said_in_a_line(tmp_path, command, name, says):
    started = x402guard(command, "--engine", name, cwd=tmp_path, anvil=tmp_path / "none")
    out, complaints = started.communicate(timeout=60)
    assert started.returncode == 2
    assert says in complaints
    assert "Traceback" not in complaints
    assert out == ""
