"""What a guard learns from its machine besides the time: names, process ids, random bytes.

Code that needs one of these asks ``here()``. A simulation sets its own, so that one process can be many machines.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from x402guard.flow.detached import in_event_loop, of_asyncio

if TYPE_CHECKING:
    import asyncio

VERSION: Final = "0.1.0"
"""The version of this library."""


class Surroundings:
    """This machine, and this process on it."""

    def hostname(self) -> str:
        """Return the name of this machine."""
        return socket.gethostname()

    def pid(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def boot_id(self) -> str:
        """Return what names this boot of the machine, on which its steady clock counts; "" if the system does not say."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return ""  # not Linux

    def machine(self) -> str:
        """Return a name that no other machine or container (with its own process ids) with the same ledger file has."""
        try:
            return f"{socket.gethostname()}/{self.boot_id()}/{Path('/proc/self/ns/pid').readlink()}"
        except OSError:
            return socket.gethostname()  # not Linux: only the host name is known

    def is_running(self, pid: int) -> bool:
        """Return whether a process of this machine runs; True if that cannot be told."""
        try:
            os.kill(pid, 0)  # signal 0 sends nothing and checks that the process exists
        except ProcessLookupError:
            return False
        except (PermissionError, OverflowError):
            return True
        return True

    def is_stopped(self, pid: int) -> bool:
        """Return whether a process of this machine exists and is stopped, as by SIGSTOP; False if that cannot be told."""
        try:
            return (
                Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
                in "Tt"
            )
        except (OSError, IndexError):
            if Path("/proc").is_dir():
                return False
        import subprocess  # not needed on Linux

        asked = ("ps", "-o", "state=", "-p", str(pid))
        try:
            said = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=False).stdout  # noqa: S603 - constants
        except (OSError, subprocess.SubprocessError):
            return False
        return said.strip()[:1] == "T"

    def collect_dropped(self) -> None:
        """Let the answers of this process end that nothing refers to any more, but each other.

        An answer that was read for long is among the oldest objects. To look through these takes half a second in a large
        program, so it is done for a twentieth of the time at most.
        """
        began_s = time.monotonic()
        if began_s < _AGAIN_S[0]:
            gc.collect(1)
            return
        gc.collect()
        ended_s = time.monotonic()
        _AGAIN_S[0] = ended_s + _OLD_PAUSES * (ended_s - began_s)

    def follow_task(self) -> Callable[[], bool]:
        """Return what says later, in any task, whether this one has ended or is the one that asks.

        Outside an event loop, a thread takes the place of the task. A loop that runs in it later runs on its behalf.
        """
        kept, is_alone = weakref.ref(current_task()), not in_event_loop()  # a callback of a loop has no task

        def is_over() -> bool:
            task = kept()
            if task is None or task is current_task() or (is_alone and task is threading.current_thread()):
                return True
            return _has_ended(task)

        return is_over

    def random_bytes(self, count: int) -> bytes:
        """Return *count* bytes that no other party can predict."""
        return secrets.token_bytes(count)


def follow_job(pause_s: float) -> Callable[[], bool]:
    """Return what says later whether the task or thread that runs has ended, or asks again, as ``follow_task`` does.

    A thread may be one of a pool, and do another job then, while what this job has begun is under way elsewhere. So the
    thread asks again in the same context only *pause_s* seconds later (a pool may run all its jobs in one), and in another
    one ``_NEXT_JOB_S`` seconds later (a framework may run each call in one of its own).
    """
    is_over, thread = here().follow_task(), threading.current_thread()
    if in_event_loop() or thread is threading.main_thread():
        return is_over
    job, begun_s = _JOB.get(None) or object(), time.monotonic()
    _JOB.set(job)

    def is_lost() -> bool:
        if threading.current_thread() is not thread:
            return is_over()
        return time.monotonic() - begun_s >= (pause_s if _JOB.get(None) is job else _NEXT_JOB_S)

    return is_lost


_NEXT_JOB_S: Final = 20.0
"""Few answers to a payment take so long, and most offers still stand."""


def current_task() -> object:
    """Return the current task, or the thread if no event loop runs in it."""
    of_loop = of_asyncio("current_task")
    if of_loop is not None:
        with suppress(RuntimeError):
            if (task := of_loop()) is not None:
                return cast("object", task)
    trio = sys.modules.get("trio")
    if trio is not None:
        with suppress(RuntimeError):
            return trio.lowlevel.current_task()
    return threading.current_thread()


def _has_ended(task: object) -> bool:
    """Return whether a thread or a task of asyncio has ended; of trio's, nothing says it."""
    if isinstance(task, threading.Thread):
        return not task.is_alive()
    kind = of_asyncio("Task")
    return isinstance(kind, type) and isinstance(task, kind) and cast("asyncio.Task[object]", task).done()


_OLD_PAUSES: Final = 20
_AGAIN_S: Final = [0.0]
"""When the oldest objects are looked through again, on the monotonic clock."""

_THIS_MACHINE: Final = Surroundings()
_HERE: Final[ContextVar[Surroundings]] = ContextVar("x402guard_surroundings")
_JOB: Final[ContextVar[object]] = ContextVar("x402guard_job")


def here() -> Surroundings:
    """Return the surroundings of the code that runs."""
    return _HERE.get(_THIS_MACHINE)


def use_surroundings(surroundings: Surroundings) -> None:
    """Use these surroundings in this context from now on; for simulations."""
    _HERE.set(surroundings)


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a program in order, beside Ctrl-C: SIGTERM, and SIGHUP unless it is ignored (nohup)."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGHUP) if hangs_up else (signal.SIGTERM,)
