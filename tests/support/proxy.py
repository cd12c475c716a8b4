"""``x402guard proxy`` as a process of its own, and what speaks to it: curl, Go, and Node with the vendor's own client."""

import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support import processes
from tests.support.slow_server import Trickler
from x402guard import Owner

KEY = "0x" + "11" * 32
PATIENCE_S = 100
"""Beside other work everything takes longer: this only ends a test that hangs, before pytest does."""
JAVASCRIPT = Path(__file__).parents[1] / "javascript"
REQUIRED = bool(os.environ.get("REQUIRE_NODE"))
WHY = "no Node.js, or no packages for it: install Node.js 20 and npm, and run `make test`"
needs_node = pytest.mark.skipif(
    (shutil.which("node") is None or not (JAVASCRIPT / "node_modules/openai").exists()) and not REQUIRED, reason=WHY
)

GO = Path(__file__).parents[1] / "go"
needs_go = pytest.mark.skipif(
    shutil.which("go") is None and not os.environ.get("REQUIRE_GO"), reason="no Go: install Debian's golang-go"
)


class Proxied:
    """A proxy that runs, its address and its tokens by the names of their sessions."""

    def __init__(self, folder, *options, **environment):
        environment.setdefault("X402GUARD_POLICY__HOSTS", json.dumps(["127.0.0.1", "localhost", "[::1]"]))
        environment = {name: value for name, value in environment.items() if value}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("X402GUARD_")}
        self.process = processes.start(
            "x402guard", "proxy", "--port", "0", "--json", *options, module=True, cwd=folder, env=kept | environment
        )
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        said = json.loads(line)
        self.url = said["url"]
        self.tokens = {row["name"]: row["token"] for row in said["sessions"]}
        self.token = next(iter(self.tokens.values()))
        self.printed, self._interrupted = "", False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        assert self.process.returncode in (0, -signal.SIGINT)

    def interrupt(self):
        """Begin its end as Ctrl-C does, once: a second Ctrl-C may meet it anywhere on its way out."""
        if not self._interrupted:
            self._interrupted = True
            self.process.send_signal(signal.SIGINT)

    def close(self):
        """End it as Ctrl-C does; ``printed`` is what it has said since."""
        self.interrupt()
        self.printed = "".join(self.process.communicate(timeout=PATIENCE_S))
        assert "Traceback" not in self.printed, self.printed

    @property
    def header(self):
        return {"X402guard-Session": self.token}


@pytest.fixture
def shop():
    with Trickler() as shop:
        yield shop


@pytest.fixture
def proxied(tmp_path):
    """A proxy whose callers may spend ten cents."""
    with Proxied(tmp_path, "--budget", "0.10", X402GUARD_PRIVATE_KEY=KEY) as proxy:
        yield proxy


def asked(proxy, url, *, method="GET", headers=None, **more):
    """What the proxy answers to a request for a URL, with its token."""
    return httpx.request(
        method, proxy.url + url, headers={**proxy.header, **(headers or {})}, timeout=PATIENCE_S, **more
    )


def connected(proxy):
    """A connection to the proxy, for what no client sends."""
    url = httpx.URL(proxy.url)
    return socket.create_connection((url.host, url.port), timeout=20)


def books(folder):
    """The dollars captured and held of each session, by its name."""
    with Owner(folder / "x402guard.db", read_only=True) as owner:
        return {row.name: (str(row.spent), str(row.held)) for row in owner.sessions() if row.name != "wallet"}


def curl(*arguments):
    """Run curl, and return the status and the body of its answer, and its headers by their lower names."""
    done = subprocess.run(
        ["curl", "-sS", "-D", "-", "--max-time", "60", *arguments], capture_output=True, check=True, timeout=90
    )
    head, _, body = done.stdout.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return (
        int(first.split()[1]),
        body,
        {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)},
    )


def node(script, *arguments, told="", **environment):
    """Run a script of ``tests/javascript`` that is *told* something, and return the values that it prints as lines of JSON."""
    done = subprocess.run(
        ["node", str(JAVASCRIPT / script), *arguments], input=told,
        capture_output=True, text=True, check=False, timeout=90, env={"PATH": os.environ["PATH"], **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def go(program, folder, *arguments):
    """Run a program of ``tests/go``, built in *folder*, and return the values that it prints as lines of JSON."""
    done = subprocess.run(
        ["go", "run", str(GO / program), *arguments],
        capture_output=True, text=True, check=False, timeout=110,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "GO111MODULE": "off", "CGO_ENABLED": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
