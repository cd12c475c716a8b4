"""A process on one machine of a fleet that books, and ends at a stage of a payment.

Arguments: ledger URL, the stage at which it ends, how it ends (``kill`` or ``exit``). Before the first payment it prints
``ready`` and waits for a line. It prints the nonce that the seller received.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.support.merchant import URL, Shop, b64, client, make_guard, receipt
from tests.support.signers import SpySigner

STAGES = ("authorized", "sent", "answered", "closed")
REPOSITORY = Path(__file__).parents[2]


def begun(url, stage, how="kill", **environment):
    """A process that has booked $0.05, and waits."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ended_buyer", url, stage, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
    )
    assert process.stdout.readline() == "ready\n"
    return process


def ended(process):
    """Let it go on to its end: it books $0.30 and signs at most $0.01."""
    said, _ = process.communicate("\n", timeout=60)
    return said.split()


def main(ledger: str, stage: str, how: str) -> None:
    def end(*_) -> None:
        sys.stdout.flush()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(9)

    def paid(request, shop):
        print(f"{shop.payments[-1][0]:064x}", flush=True)
        if stage == "sent":
            end()
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())}, text="sold")

    signer = SpySigner(before=end if stage == "authorized" else None)
    with (
        make_guard(ledger, signer=signer, budget="$1.00", unsafe_async_failover=True) as guard,
        guard.session("run", budget="$1.00", id="run") as run,
    ):
        run.charge("early", "$0.05")
        print("ready", flush=True)
        sys.stdin.readline()
        run.charge("late", "$0.30")
        with client(run, Shop(paid=paid)) as http:
            http.get(URL)
        if stage == "answered":
            end()
    print("end", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
