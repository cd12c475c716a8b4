"""A process on one machine of a fleet that books, and ends at a stage of a payment.

Arguments: ledger URL, the stage at which it ends, how it ends (``kill``, ``exit`` or ``close``), by how many hours its
clock is behind at first. Before the first payment
it prints ``ready`` and waits for a line. It prints the nonce that the seller received. At the stage ``unwritten`` it waits
for another line before the seller answers, and then has a bill of $0.60 for a call that held $0.10.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx

from tests.support.ledger import a_hold, usd
from tests.support.merchant import URL, Shop, b64, client, make_guard, receipt
from tests.support.signers import SpySigner
from x402guard import LedgerUnavailable, Owner
from x402guard.flow.capture import Bill, capture_bill
from x402guard.flow.drivers import run, transact_now
from x402guard.kernel.rows import Evidence, HoldKind
from x402guard.ledger.authorize import authorize
from x402guard.ledger.view import Scope
from x402guard.stores import transacts

STAGES = ("authorized", "sent", "answered", "closed")
REPOSITORY = Path(__file__).parents[2]


def begun(url, stage, how="kill", clock_behind_h=0, **environment):
    """A process that has booked $0.05, and waits. Its machine's clock is set right after that."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ended_buyer", url, stage, how, f"{clock_behind_h}"],
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


def files():
    """What lies in the outbox of this machine."""
    state = Path(os.environ["XDG_STATE_HOME"])
    return sorted(each for each in state.glob("x402guard/outbox/*/*.jsonl"))


def books_of(url):
    """(the wallet's state and its reason), (what the run has spent, what it holds); the ledger is consistent."""
    with Owner(url, read_only=True) as owner:
        wallet, run = (next(row for row in owner.sessions() if row.name == name) for name in ("wallet", "run"))
        assert owner.verify() == []
        return (wallet.state, wallet.terminated_by), (run.spent, run.held)


def opens_a_guard(url):
    make_guard(url, budget="$1.00").close()


def runs_a_command(url):
    command = [sys.executable, "-m", "x402guard", "budget", "set", "wallet", "1.00", "--ledger", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=os.environ)
    assert done.returncode == 0, done.stderr


def opens_as_owner(url):
    Owner(url).close()


FOLLOWS = [opens_a_guard, runs_a_command, opens_as_owner]
"""Who comes next on the machine of a process that has ended."""


def main(ledger: str, stage: str, how: str, clock_behind_h: str) -> None:
    behind_ms, clock_ms = [int(clock_behind_h) * 3_600_000], transacts._system_clock_ms
    transacts._system_clock_ms = lambda: clock_ms() - behind_ms[0]

    def end(*_) -> None:
        sys.stdout.flush()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(9)

    def paid(request, shop):
        print(f"{shop.payments[-1][0]:064x}", flush=True)
        if stage == "sent":
            end()
        if stage == "unwritten":
            sys.stdin.readline()
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())}, text="sold")

    signer = SpySigner(before=end if stage == "authorized" else None)
    with (
        make_guard(ledger, signer=signer, budget="$1.00", unsafe_async_failover=True) as guard,
        guard.session("run", budget="$1.00", id="run") as session,
    ):
        session.charge("early", "$0.05")
        call = begin_call(guard) if stage == "unwritten" else None
        behind_ms[0] = 0
        print("ready", flush=True)
        sys.stdin.readline()
        session.charge("late", "$0.30")
        with client(session, Shop(paid=paid)) as http:
            http.get(URL)
        if call is not None:
            with suppress(LedgerUnavailable):
                run(
                    capture_bill(guard.context, call, Bill(usd("$0.60"), Evidence.PROVIDER_USAGE, {"input_tokens": 9})),
                    guard.shell,
                )
        if stage == "answered" or (stage == "unwritten" and how != "close"):
            end()
    print("end", flush=True)


def begin_call(guard, node="run"):
    """Hold $0.10 for an LLM call."""
    call = a_hold("llm", "$0.10", node, kind=HoldKind.LLM, now_ms=guard.shell.store.now_ms(), deadline_s=900)
    facts = {"kind": "llm", "model": "m", "host": "h"}
    scope = Scope(nodes=(node,), holds=("llm",), durable=True)
    transact_now(guard.shell, scope, lambda view: authorize(view, call, facts))
    return call


if __name__ == "__main__":
    main(*sys.argv[1:])
