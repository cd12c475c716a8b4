"""Ctrl-C out of a loop that is left without its end: the process ends, and the payment is held."""

import signal
import subprocess
import sys
import time

import pytest

from tests.support.merchant import KEY
from tests.support.slow_server import Trickler, once_paid
from x402guard import Owner

PROGRAM = """
import asyncio, sys
import httpx
from x402guard import AsyncGuardedTransport, Guard, LocalSigner, Policy

async def main(url, session):
    print("ready", flush=True)
    await httpx.AsyncClient(transport=AsyncGuardedTransport(session)).get(url)

with Guard(signer=LocalSigner.from_key(sys.argv[3]), ledger=sys.argv[1], unsafe_no_chain=True) as guard:
    with guard.session("s", budget="$1.00") as session:
        asyncio.new_event_loop().run_until_complete(main(sys.argv[2], session))
"""


@pytest.mark.timeout(60)
def test_a_loop_that_ctrl_c_has_left_keeps_no_process(tmp_path):
    """It waited for a thread of the loop, which only the end of the loop ends."""
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with Trickler() as seller:
        seller.answers["/x"] = once_paid(lambda line: line.hang())
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, url, f"{seller.url}/x", KEY],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        until(lambda: any(each.nonce for each in seller.asked))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in said
    with Owner(url) as owner:
        assert {str(row.held) for row in owner.sessions()} == {"0.01"}


def until(true):
    for _ in range(2_000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it has not happened")
