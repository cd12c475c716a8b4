"""Peers, each in a process of an environment of its own: the official x402 SDK and agentbudget."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from types import TracebackType
from typing import Self

_HERE = Path(__file__).parent
_HOME = _HERE.parent / ".peers"
_PACKAGES = ("x402[evm,httpx]==2.25.0", "agentbudget==0.4.0", "coincurve>=21")


def _python() -> Path:
    python = _HOME / "bin" / "python"
    if not (_HOME / ".ready").exists():
        venv.create(_HOME, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", *_PACKAGES], check=True)  # noqa: S603 - constants
        (_HOME / ".ready").touch()
    return python


class Peer:
    """A peer that times so many of its calls whenever it is asked, between rounds of ours."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own file
            [_python(), _HERE / f"{name}.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def round(self, calls: int) -> list[float]:
        """Return the times of so many calls, in µs."""
        if self._process.stdin is None or self._process.stdout is None:
            raise TypeError("a peer has pipes")
        self._process.stdin.write(f"{calls}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a peer has ended; its error is above")
        return [float(each) for each in line.split()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()
