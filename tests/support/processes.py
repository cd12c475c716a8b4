"""Scripts of this package, started as processes of their own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start(script, *args) -> subprocess.Popen:
    """Start a script of this package as a process of its own."""
    module = f"tests.support.{script}"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", module, *map(str, args)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
