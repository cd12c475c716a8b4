"""`python -m tests.soak --seconds 600 --seed 7 --engine anvil`: ends with the sums, and with 1 where they do not hold.

The last line reads

    budget $X, signed $Y, settled on chain $Z, counted $W, overshoot $0.00, holds lost 0, duplicates 0

*budget* is the wallet's limit as its owner has set it last; *signed* the ceilings of every signature that left an agent's signer or came
to a seller; *settled on chain* the Transfer logs out of the wallet; *counted* what the ledger says was spent. *overshoot* is the most, at
any check, by which what could be taken passed what was counted, or what was counted passed a limit, in any budget. *holds lost* are
signatures that stand in no book; *duplicates* purchases that were signed a second time without leave, and payments that were settled
twice. The end is 0 only where these three are zero, counted is settled to the atomic unit for every payment, and nothing broke.
"""

import argparse
import secrets
import signal
import sys

from tests.soak.faults import FAULTS
from tests.soak.run import Soak
from x402guard import ConfigError
from x402guard.testing import find_anvil

_MOST_SHOWN = 20
_GRACE_S = 420
"""How much longer than its agents a run may take, with building, the last start and ending everybody."""


def main() -> int:
    """Read the arguments, run, say what happened; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description="Agents that are killed, and sellers that lie."
    )
    parser.add_argument("--seconds", type=float, default=600, help="how long agents are at work")
    parser.add_argument(
        "--least", type=int, default=0, help="longer (thrice at most) until so many payments are signed"
    )
    parser.add_argument("--seed", type=int, help="of what is random; made up and printed without")
    parser.add_argument("--engine", choices=("eth-tester", "anvil"), help="the chain; anvil where there is one")
    parser.add_argument(
        "--fault", choices=tuple(FAULTS), default="", help="break the agents' guards: the soak has to fail"
    )
    parser.add_argument(
        "--store",
        choices=("sqlite", "postgres"),
        default="sqlite",
        help="postgres crashes, is cut off, and is replaced by its replica",
    )
    given = parser.parse_args()
    soak = Soak(
        seconds=given.seconds,
        seed=secrets.randbelow(10**9) if given.seed is None else given.seed,
        engine=given.engine or _engine_here(),
        least=given.least,
        fault=given.fault,
        store_kind=given.store,
    )
    signal.signal(signal.SIGALRM, _give_up)
    signal.signal(signal.SIGTERM, _give_up)
    signal.alarm(int(soak.seconds) * (3 if soak.least else 1) + _GRACE_S)
    print(f"seed {soak.seed}, {soak.seconds:g} s on {soak.engine}", flush=True)
    books = soak.run()
    failures = soak.failures()
    for line in (*soak.summary(books), *failures[:_MOST_SHOWN]):
        print(line)
    if failures:
        print(
            f"{len(failures)} things should not be; again with: python -m tests.soak --seed {soak.seed} --engine {soak.engine} --store {given.store}"
        )
    print(soak.last_line(books), flush=True)
    return 1 if failures else 0


def _give_up(number: int, _frame: object) -> None:
    """Out of whatever it is in, past everything that has to be ended."""
    raise SystemExit(f"the soak was ended by {signal.Signals(number).name}, and shows nothing")


def _engine_here() -> str:
    try:
        find_anvil()
    except ConfigError:
        return "eth-tester"
    return "anvil"


if __name__ == "__main__":
    sys.exit(main())
