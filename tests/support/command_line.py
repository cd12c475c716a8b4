"""``x402guard`` as it is typed: in this process, which is all of it but for the process, in a fork, or as a shell starts it."""

import io
import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from tests.support import processes
from tests.support.processes import Done
from x402guard.cli import main
from x402guard.guard.settings_file import CONFIG_FILE, read_settings_file, trust


def typed(*arguments, cwd, answer="", trusts=True, **environment) -> Done:
    """Run a command in *cwd*, with no setting of ours but those given; *answer* is typed into it.

    A settings file there is *trusted* first, as its owner would have done.
    """
    _trust(cwd, trusts=trusts)
    argv, out, err = ["x402guard", *map(str, arguments)], io.StringIO(), io.StringIO()
    with (
        chdir(cwd),
        mock.patch.dict(os.environ, _kept() | environment, clear=True),
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(sys, "stdin", io.StringIO(answer)),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
            code = 0
        except SystemExit as stopped:
            code = stopped.code or 0
    return Done(code, out.getvalue(), err.getvalue())


def forked(*arguments, cwd, answer="", trusts=True, **environment) -> Done:
    """The same in a process of its own."""
    _trust(cwd, trusts=trusts)
    env = _kept() | environment
    return processes.run("x402guard", *arguments, module=True, cwd=cwd, answer=answer, env=env, timeout=100)


def as_process(*arguments, cwd, answer="", trusts=True, **environment) -> Done:
    """The same as a shell starts it, with an interpreter of its own."""
    _trust(cwd, trusts=trusts)
    done = subprocess.run(
        [sys.executable, "-m", "x402guard", *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=100, cwd=cwd, input=answer, env=_kept() | environment,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


def _trust(cwd, *, trusts):
    file = Path(cwd) / CONFIG_FILE
    if trusts and file.is_file():
        trust(read_settings_file(file))


def _kept():
    return {name: value for name, value in os.environ.items() if not name.startswith("X402GUARD_")}
