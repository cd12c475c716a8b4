"""A look that the books were too busy for is not the last."""

import threading

from x402guard import LedgerUnavailable
from x402guard.chain.rechecker import Rechecker
from x402guard.x402.settlement import Swept


def test_a_look_that_the_books_were_too_busy_for_is_not_the_last():
    """Another process writes for thirty seconds once; the claims are open all the same."""
    looks, again = [], threading.Event()

    def look(_since_ms):
        looks.append(1)
        if len(looks) == 1:
            raise LedgerUnavailable("another process has been writing the ledger for 30 s")
        again.set()
        return Swept(0, more=False)

    rechecker = Rechecker(look)
    rechecker.nudge()
    try:
        assert again.wait(5), "the thread has ended, and claims are open"
    finally:
        rechecker.close()


def test_the_sweeps_of_one_check_ask_about_no_payment_twice():
    looks = []

    def look(since_ms):
        looks.append(since_ms)
        return Swept(0, more=len(looks) < 3, began_ms=10 * len(looks))

    Rechecker(look)._looked()
    assert looks == [None, 10, 10]
