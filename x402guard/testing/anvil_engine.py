"""Runs a chain on Foundry's anvil in a separate process, with a mempool, finality and reorganizations like a real node.

Anvil's answers are passed on unchanged. It differs from the in-process engine as real nodes do: a transaction is
accepted before it is mined, so a client has to wait for its receipt, and the latest block is not final yet.
"""

import atexit
import itertools
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx

from x402guard.errors import ConfigError
from x402guard.testing.contracts import CHAIN_ID, genesis_contracts
from x402guard.testing.engine import JSON, RpcError

BINARY_VARIABLE: Final = "X402GUARD_ANVIL"
"""The environment variable that may contain the path of an anvil binary."""

_INSTALL: Final = (
    "Install it with `npm install @foundry-rs/anvil@1.7.1 --ignore-scripts`, or with Foundry; or set "
    f"{BINARY_VARIABLE} to the path of its binary."
)
_ARCHITECTURES: Final = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
_START_TIMEOUT_S: Final = 20.0
_CALL_TIMEOUT_S: Final = 30.0
_END_TIMEOUT_S: Final = 5.0
_DYING_S: Final = 1.0
_LAST_LINES: Final = 20
_LISTENING: Final = re.compile(r"Listening on 127\.0\.0\.1:(\d+)")


class AnvilError(RuntimeError):
    """A started anvil has ended, was closed, or gives no readable answer."""


def find_anvil() -> Path:
    """Return the anvil binary to use, as an absolute path.

    It is the binary that `X402GUARD_ANVIL` names; else the first on the PATH; else the one that npm has installed below
    the current directory (`node_modules`), its folder `tests`, or `tests/anvil`. Raises ConfigError, whose advice says
    how to install it, if there is none or if the variable does not name an executable file.
    """
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        if not _runnable(Path(named)):
            raise ConfigError(f"{BINARY_VARIABLE}: {named} is not an executable file", advice=_INSTALL)
        return Path(named).absolute()
    on_path = shutil.which("anvil")
    if on_path:
        return Path(on_path).absolute()
    machine = _ARCHITECTURES.get(platform.machine().lower(), platform.machine())
    inside = Path("node_modules", "@foundry-rs", f"anvil-{sys.platform}-{machine}", "bin", "anvil")
    for folder in (Path(), Path("tests"), Path("tests", "anvil")):
        if _runnable(folder / inside):
            return (folder / inside).absolute()
    raise ConfigError("anvil is neither on the PATH nor in node_modules", advice=_INSTALL)


def _runnable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


class _Anvil:
    """The child process: started without a shell, read so that its pipe never fills, and ended by its process id."""

    def __init__(self, command: list[str], folder: str) -> None:
        # A minimal environment and another directory: no key of the parent and no .env file reaches the child. Its home
        # is the folder, because it moves old states to disk there. In its own session it does not get the terminal's
        # Ctrl-C, so the parent can end everything in order.
        environment = {"HOME": folder, "PATH": os.environ.get("PATH", os.defpath)}
        try:
            self._child = subprocess.Popen(  # noqa: S603 - the path is the caller's own choice
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"{command[0]} cannot be run: {error.strerror}", advice=_INSTALL) from error
        self.pid = self._child.pid
        self._name = command[0]
        self._said: deque[str] = deque(maxlen=_LAST_LINES)
        self._port: int | None = None
        self._decided = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"x402guard-anvil {self.pid}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.strip():
                self._said.append(line.rstrip())
            found = _LISTENING.search(line) if self._port is None else None
            if found:
                self._port = int(found[1])
                self._decided.set()
        self._decided.set()

    def port(self) -> int:
        """Wait until it listens; return its port. Raises ConfigError if it ends first or reports no port in time."""
        if not self._decided.wait(_START_TIMEOUT_S):
            raise ConfigError(f"{self._name} did not report its port within {_START_TIMEOUT_S:g} s", advice=_INSTALL)
        if self._port is None:
            raise ConfigError(f"{self._name} did not start: {self.state()}", advice=_INSTALL)
        return self._port

    def ended(self, within_s: float) -> bool:
        """Whether the process has ended, or ends within `within_s` seconds."""
        try:
            self._child.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def state(self) -> str:
        """How it ended and its last output, as text."""
        if not self.ended(_DYING_S):
            return "it is still running"
        self._reader.join(_END_TIMEOUT_S)
        said = f" and this output: {' | '.join(self._said)}" if self._said else ""
        return f"it ended with code {self._child.returncode}{said}"

    def close(self) -> None:
        """Terminate the process, kill it if it does not end, and wait until it has ended."""
        if self._child.poll() is None:
            self._signal(signal.SIGTERM)
        ended = self.ended(_END_TIMEOUT_S)
        self._reader.join(_END_TIMEOUT_S if ended else 0)
        # A process that still holds the pipe is a child of it: npm's `anvil` is a script that starts the binary.
        if not ended or self._reader.is_alive():
            self._signal(signal.SIGKILL)
            self._child.wait()
            self._reader.join()
        assert self._child.stdout is not None
        self._child.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            # The whole group has ended since; for such a group macOS raises PermissionError.
            return


class AnvilEngine:
    """An Engine on an anvil process, with contracts at fixed addresses from its first block on.

    `balances` gives accounts native coin (in wei); `contracts` is runtime code by address (default: the test
    network's). Every transaction is mined at once, and an empty block every `tick_s` seconds; block times are real time
    plus what `advance` added. The block `2 * slots_in_an_epoch` before the latest is final (default: 64); with 0 the
    latest is final, as on the in-process engine. By default `find_anvil` finds `binary`, and the system chooses `port`.
    Anvil has no accounts with known keys.

    Raises ConfigError if anvil cannot be found or does not start, and ValueError for an invalid `tick_s` or
    `slots_in_an_epoch`. The process ends with `close` and with the interpreter, unless a signal kills the interpreter
    outright.
    """

    def __init__(
        self,
        *,
        chain_id: int = CHAIN_ID,
        balances: Mapping[str, int] | None = None,
        contracts: Mapping[str, bytes] | None = None,
        binary: str | Path | None = None,
        tick_s: float = 2.0,
        slots_in_an_epoch: int = 32,
        port: int = 0,
    ) -> None:
        if tick_s <= 0 or slots_in_an_epoch < 0:
            raise ValueError("tick_s must be above 0, and slots_in_an_epoch must not be negative")
        self._chain_id = chain_id
        self._ids = itertools.count(1)
        options = {
            "--host": "127.0.0.1",
            "--port": str(port),
            "--chain-id": str(chain_id),
            "--accounts": "0",
            "--block-time": f"{tick_s:f}",
            "--slots-in-an-epoch": str(slots_in_an_epoch),
            "--color": "never",
        }
        command = [
            str(Path(binary or find_anvil()).absolute()),
            "--mixed-mining",
            *itertools.chain.from_iterable(options.items()),
        ]
        with ExitStack() as opened:
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="x402guard-anvil-"))
            self._anvil = _Anvil(command, folder)
            opened.callback(self._anvil.close)
            url = f"http://127.0.0.1:{self._anvil.port()}"
            self._http = opened.enter_context(httpx.Client(base_url=url, timeout=_CALL_TIMEOUT_S, trust_env=False))
            for address, wei in (balances or {}).items():
                self.rpc("anvil_setBalance", [address, hex(wei)])
            for address, code in (genesis_contracts() if contracts is None else contracts).items():
                self.rpc("anvil_setCode", [address, "0x" + code.hex()])
            self._opened = opened.pop_all()
        atexit.register(self.close)

    @property
    def chain_id(self) -> int:
        """The chain's EIP-155 id, as contracts and JSON-RPC clients see it."""
        return self._chain_id

    @property
    def pid(self) -> int:
        """The id of anvil's process, which this engine ends."""
        return self._anvil.pid

    def rpc(self, method: str, params: list[JSON]) -> JSON:
        """Pass one JSON-RPC call on to anvil; raise RpcError for an error answer, AnvilError for no readable one."""
        message = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params}
        if self._http.is_closed:
            raise AnvilError("this anvil was closed")
        try:
            reply = self._http.post("/", json=message).raise_for_status().json()
        except (httpx.HTTPStatusError, ValueError) as error:
            raise AnvilError(f"anvil's answer to {method} cannot be read: {error}") from error
        except httpx.TransportError as error:
            raise AnvilError(f"anvil gave no answer to {method} ({error}): {self._anvil.state()}") from error
        if "error" in reply:
            told = reply["error"]
            raise RpcError(told["code"], told["message"], told.get("data"))
        return reply["result"]

    def advance(self, seconds: int) -> None:
        """Move the chain's clock forward by whole `seconds` and mine a block; raise ValueError if that is negative."""
        if seconds < 0:
            raise ValueError("a chain's clock cannot go back")
        self.rpc("evm_increaseTime", [seconds])
        self.rpc("evm_mine", [])

    def reorg(self, depth: int) -> None:
        """Replace the last `depth` blocks by as many empty ones, which undoes everything in them.

        Their transactions are removed, also from the mempool. The clock keeps its time. Raises ValueError for a depth
        below 1, and RpcError for one past the first block.
        """
        if depth < 1:
            raise ValueError("a reorganization replaces at least one block")
        # By default the clock would go back to the last common block and lose the time that was added since.
        now = self.rpc("eth_getBlockByNumber", ["pending", False])["timestamp"]
        self.rpc("anvil_reorg", [depth, []])
        self.rpc("evm_setTime", [int(now, 16)])

    def close(self) -> None:
        """End the process and wait until it has ended. Idempotent."""
        atexit.unregister(self.close)
        self._opened.close()
