"""Processes that need not start: one has loaded the package, and forks for each script that is to run in a process of its own.

A fork has all that a script looks at: no guard and no open ledger, arguments, an environment, a folder, its own stdin, stdout and
stderr, a process id, an exit code. It takes 20 ms where a new interpreter takes 600 to 1,500 to load the same.
"""

import atexit
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
FORK = b"fork"
LOADED = (
    "x402guard.cli",
    "x402guard.stores.sqlite",
    "x402guard.testing.eth_tester_engine",
    "x402guard.testing.testnet",
    "tests.support.llm_provider",
    "tests.support.signers",
    "eth_account",
)


@dataclass
class Done:
    """How it ended."""

    returncode: int
    stdout: str
    stderr: str


class Forked:
    """A fork that runs, with what is used here of ``subprocess.Popen``."""

    def __init__(self, stdin, stdout, stderr, ended):
        self.stdin, self.stdout, self._stderr, self._ended = stdin, stdout, stderr, ended
        self.pid, self.returncode = int(ended.readline()), None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()
        self.communicate()

    def poll(self):
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.returncode = int(self._ended.readline())
            self._ended.close()
        return self.returncode

    def wait(self, timeout=60):
        if self.returncode is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a fork", timeout)
        return self.poll()

    def send_signal(self, number):
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and its end is not written yet
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, text="", timeout=60):
        """Type the text, and read until it ends: what it printed since, on stdout and on stderr."""
        if self.stdout.closed:
            return "", ""
        late = threading.Timer(timeout, self.kill)
        late.start()
        with suppress(BrokenPipeError), self.stdin:
            self.stdin.write(text)
        with self.stdout, self._stderr:
            printed = self.stdout.read()
            self.wait()
            late.cancel()
            late.join()
            self._stderr.seek(0)
            return printed, self._stderr.read()


class Zygote:
    """What forks. One serves all tests of a worker."""

    def __init__(self):
        self._socket, theirs = socket.socketpair()
        self._lock = threading.Lock()
        with theirs:
            command = [sys.executable, "-m", "tests.support.processes", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        atexit.register(self.close)

    def start(self, order) -> Forked:
        inputs, outputs, ends = os.pipe(), os.pipe(), os.pipe()
        stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read and closed by ``communicate``
        with tempfile.TemporaryFile("w+") as file:  # an environment may be longer than a pipe
            json.dump(order, file)
            file.flush()
            with self._lock:
                given = [file.fileno(), inputs[0], outputs[1], stderr.fileno(), ends[1]]
                socket.send_fds(self._socket, [FORK], given)
        for each in (inputs[0], outputs[1], ends[1]):
            os.close(each)
        return Forked(os.fdopen(inputs[1], "w"), os.fdopen(outputs[0]), stderr, os.fdopen(ends[0]))

    def close(self):
        self._socket.close()
        self._process.wait(20)


_ONE = []


def start(script, *arguments, module=False, strict=False, cwd=ROOT, env=None) -> Forked:
    """Run a script, or a module by its name, in a fork; *strict* makes warnings errors."""
    if not _ONE:
        _ONE.append(Zygote())
    order = {"module" if module else "script": script, "argv": [str(each) for each in arguments], "strict": strict}
    return _ONE[0].start(order | {"cwd": str(cwd), "env": dict(os.environ if env is None else env)})


def run(script, *arguments, answer="", timeout=60, **more) -> Done:
    """The same, to its end."""
    process = start(script, *arguments, **more)
    printed = process.communicate(answer, timeout)
    return Done(process.returncode, *printed)


# -- in the process that forks -------------------------------------------------------------------------------------------------


def serve(number):
    """Fork for each order; what forks waits for the fork, so that this one never does."""
    orders = socket.socket(fileno=number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watching = 0
    while True:
        message, given, _, _ = socket.recv_fds(orders, len(FORK), 5)
        if message and os.fork() == 0:
            orders.close()
            _watch(*given)
        watching += bool(message)
        for each in given:
            os.close(each)
        while watching and os.waitpid(-1, os.WNOHANG if message else 0) != (0, 0):
            watching -= 1
        if not message:
            return


def _watch(order, *pipes):
    *standard, ended = pipes
    child = os.fork()
    if child == 0:
        for to, each in enumerate(standard):
            os.dup2(each, to)
        for each in (*standard, ended):
            os.close(each)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.lseek(order, 0, os.SEEK_SET)
        with os.fdopen(order) as file:
            _run(json.load(file))
    for each in (order, *standard):
        os.close(each)
    os.write(ended, f"{child}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(ended, f"{code}\n".encode())
    os._exit(0)


def _run(order):
    code = 1
    try:
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"])
        random.seed()
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115 - to the end
        sys.path.insert(0, order["cwd"])
        warnings.resetwarnings()
        warnings.simplefilter("error" if order["strict"] else "default")
        sys.argv = ["-c", *order["argv"]]
        if "module" in order:
            runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = ModuleType("__main__")
            exec(order["script"], vars(sys.modules["__main__"]))  # noqa: S102 - a test's own
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    for name in LOADED:
        __import__(name)
    serve(int(sys.argv[1]))
