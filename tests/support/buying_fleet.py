"""One process of a fleet: opens the ledger, says ``ready``, waits for a line, and buys with all its threads at once.

Arguments: ledger URL, a number of its own, how many threads.
"""

import json
import sys
import threading

from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import BudgetExhausted


def main(ledger: str, own: str, threads: str) -> None:
    shop, refused, failed = Shop(), [], []
    barrier = threading.Barrier(int(threads) + 1)
    with make_guard(ledger) as guard, guard.session("fleet", id="fleet") as session:

        def buy(number: int) -> None:
            barrier.wait(60)
            try:
                with client(session, shop) as http:
                    http.get(f"{URL}/{own}/{number}")
            except BudgetExhausted:
                refused.append(number)
            except Exception as error:
                failed.append(repr(error))

        started = [threading.Thread(target=buy, args=(n,), daemon=True) for n in range(int(threads))]
        for thread in started:
            thread.start()
        print("ready", flush=True)
        sys.stdin.readline()
        barrier.wait(60)
        for thread in started:
            thread.join(60)
        print(json.dumps({"nonces": [str(n) for n, _, _ in shop.payments], "refused": len(refused), "failed": failed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
