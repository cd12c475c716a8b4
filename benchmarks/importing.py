"""How long an import takes, in processes of their own: CPU seconds, the least of several."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.timing import Figure

_SHOWN = "import time; began = time.process_time(); {}; print(time.process_time() - began)"
_COUNT = "from x402guard.vendors.tiktoken_counter import TiktokenCounter; began = time.process_time(); TiktokenCounter().count('a')"
_CHAIN = "import x402guard; began = time.process_time(); import eth_abi.abi, eth_hash.auto; eth_hash.auto.keccak(b'')"


def measure() -> Iterator[Figure]:
    """Yield the import of the library beside that of httpx, and what loads on first use."""
    taken: dict[str, list[float]] = {}
    for _ in range(9):
        for name, code in (
            ("httpx", "import httpx"),
            ("ours", "import x402guard"),
            ("count", _COUNT),
            ("chain", _CHAIN),
        ):
            taken.setdefault(name, []).append(_seconds(code))
    least = {name: min(found) * 1000 for name, found in taken.items()}
    peer = f"{least['ours']:.0f} ÷ {least['httpx']:.0f} ms"
    yield Figure("import x402guard ÷ import httpx", least["ours"] / least["httpx"], "×", "≤ 1.6", peer)
    yield Figure("first count of tokens", least["count"], "ms", "≤ 250")
    yield Figure("first read of a chain", least["chain"], "ms", "≤ 250")


def _seconds(code: str) -> float:
    command = [sys.executable, "-c", _SHOWN.format(code)]
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=usual)  # noqa: S603 - constants
    return float(done.stdout)
