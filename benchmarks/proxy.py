"""A free request through the proxy, over connections that are kept alive, beside one that goes straight."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.timing import Figure, interleaved

_ROOT = Path(__file__).parent.parent


def measure() -> Iterator[Figure]:
    """Yield what the proxy adds to a request without a payment."""
    server = [sys.executable, "-m", "benchmarks.server"]
    proxy = [sys.executable, "-m", "x402guard", "proxy", "--budget", "1.00", "--port", "0", "--json"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(server, stdout=subprocess.PIPE, text=True, cwd=_ROOT) as selling,  # noqa: S603 - our own
        subprocess.Popen(proxy, stdout=subprocess.PIPE, text=True, cwd=folder) as between,  # noqa: S603 - our own
    ):
        try:
            url = f"http://127.0.0.1:{int(selling.stdout.readline())}" if selling.stdout else ""
            said = json.loads(between.stdout.readline()) if between.stdout else {}
            yield from _measured(url, said["url"], said["sessions"][0]["token"])
        finally:
            between.terminate()
            selling.terminate()


def _measured(url: str, proxy: str, token: str) -> Iterator[Figure]:
    with httpx.Client() as straight, httpx.Client(headers={"x402guard-session": token}) as through:
        found = interleaved(
            {
                "straight": lambda n: straight.get(f"{url}/free?n={n}"),
                "proxy": lambda n: through.get(f"{proxy}{url}/free?n={n}"),
            }
        )
    added = found["proxy"].median - found["straight"].median
    yield Figure("proxy, pass-through, added", added, "µs", "", f"to {found['straight'].median:.0f}")
