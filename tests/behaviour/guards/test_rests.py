"""A circuit that is open, and a payment that is signed already: a rest loses nothing that is paid for."""

import itertools
from contextlib import closing
from decimal import Decimal

import httpx
import pytest

from tests.support.ledger import Clock
from tests.support.merchant import URL, Shop, accept, client, make_guard, required
from x402guard import CircuitOpen, Policy, SettlementUncertain
from x402guard.policy import Breaker
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


@pytest.mark.parametrize("rest_s", [30, 600])
@pytest.mark.parametrize("life_s", [60, 300])
def test_who_asks_without_a_pause_does_not_hammer_a_seller_that_fails(rest_s, life_s):
    clock, shop = Clock(), Shop(required(accept(maxTimeoutSeconds=life_s)), paid=httpx.ReadError("gone"))
    sent_at = []
    with (
        closing(open_store("memory://", clock_ms=clock, steady_ms=clock)) as store,
        make_guard(store, policy=Policy(breaker=Breaker(rest_s=rest_s))) as guard,
        guard.session("s", budget="$1.00") as session,
        client(session, shop) as http,
    ):
        for second in range(life_s):
            clock.tick(1)
            before = len(shop.payments)
            with pytest.raises((SettlementUncertain, CircuitOpen)) as refused:
                http.get(URL)
            sent_at += [second] if len(shop.payments) > before else []
            if isinstance(refused.value, CircuitOpen):
                assert refused.value.retry_after >= 1
    assert len(shop.nonces) == 1
    late = [at for at in sent_at[3:] if at > 0]
    assert all(after - at >= 5 for at, after in itertools.pairwise(late))
    assert len(sent_at) <= 3 + life_s // 5
