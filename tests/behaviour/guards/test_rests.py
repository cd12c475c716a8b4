"""A circuit that is open, and a payment that is signed already: a rest loses nothing that is paid for."""

from contextlib import closing
from decimal import Decimal

import httpx

from tests.support.ledger import Clock
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import CircuitOpen, Policy, SettlementUncertain
from x402guard.stores import open_store


def test_a_rest_that_ends_after_the_last_chance_of_a_payment_does_not_lose_what_is_paid_for(ledger_url):
    """A seller that is too busy for its first four answers; its offer is good for a minute."""
    clock, shop, refused = Clock(), Shop(paid=httpx.ReadError("gone")), []
    with (
        closing(open_store(ledger_url, clock_ms=clock, steady_ms=clock)) as store,
        make_guard(store, policy=Policy()) as guard,
        guard.session("s", budget="$1.00") as session,
        client(session, shop) as http,
    ):
        for pause_s in (0, 5, 5, 5, 25, 5):
            clock.tick(pause_s)
            shop.paid = None if len(shop.payments) == 4 else shop.paid
            try:
                last = http.get(URL)
            except (SettlementUncertain, CircuitOpen) as error:
                refused.append(type(error))
        assert refused == [SettlementUncertain] * 3 + [CircuitOpen, SettlementUncertain]
        assert (last.status_code, len(shop.nonces), session.spent) == (200, 1, Decimal("0.01"))
