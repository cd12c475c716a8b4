"""A command at a terminal of its own, where answers are typed."""

import contextlib
import os
import pty
import subprocess
import sys
import threading

# A password is read from the terminal that controls a process, whatever its stdin is.
_RUN = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from x402guard.cli import main
sys.argv[0] = "x402guard"
main()
"""


def at_terminal(answers, *words, cwd=None):
    """Run a command; type each answer after the colon that asks for it. Returns all that is shown."""
    ours, its = pty.openpty()
    with os.fdopen(ours, "rb+", buffering=0) as screen:
        command = [sys.executable, "-c", _RUN, *map(str, words)]
        with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, cwd=cwd, start_new_session=True) as started:
            os.close(its)
            late = threading.Timer(40, started.kill)
            late.start()
            shown, left = b"", list(answers)
            with contextlib.suppress(OSError):  # Linux ends a terminal that no process has open with an error
                while piece := screen.read(4096):
                    shown += piece
                    if left and shown.endswith(b": "):
                        screen.write(left.pop(0).encode() + b"\n")
            started.wait(40)
            late.cancel()
    return shown.decode()
