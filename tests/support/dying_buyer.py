"""A process that buys one thing and dies on the way.

Arguments: ledger URL, the stage at which it dies, how it dies (``kill`` or ``exit``). It prints the nonce that the merchant
received, or ``end`` where it lived on.
"""

import os
import signal
import sys

import httpx

from tests.support.merchant import URL, Shop, make_guard
from tests.support.signers import SpySigner
from x402guard import GuardedTransport


class Fatal(httpx.BaseTransport):
    """Carries requests to the shop; dies before a paid one leaves, or once its answer is here."""

    def __init__(self, shop, die, stage) -> None:
        self.inner, self.die, self.stage = httpx.MockTransport(shop), die, stage

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        paid = "payment-signature" in request.headers
        if paid and self.stage == "signed":
            self.die()
        response = self.inner.handle_request(request)
        if paid and self.stage == "answered":
            self.die()
        return response


def main(ledger: str, stage: str, how: str) -> None:
    def die(*_) -> None:
        sys.stdout.flush()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(9)

    def settled(_, shop) -> httpx.Response:
        print(f"{shop.payments[-1][0]:064x}", flush=True)
        if stage == "sent":
            die()
        return httpx.Response(200)

    signer = SpySigner(before=die if stage == "authorized" else None)
    with (
        make_guard(ledger, signer=signer, budget="$1.00") as guard,
        guard.session("run", budget="$0.05", id="run") as run,
    ):
        with httpx.Client(transport=GuardedTransport(run, Fatal(Shop(paid=settled), die, stage))) as http:
            http.get(URL)
            if stage == "booked":
                die()
    print("end", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
