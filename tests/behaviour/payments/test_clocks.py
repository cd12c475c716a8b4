"""A clock that ran ahead."""

import pytest

from tests.support.ledger import START_MS, Clock
from tests.support.merchant import (
    URL,
    Shop,
    client,
    make_guard,
)
from x402guard import (
    PolicyDenied,
)
from x402guard.stores import open_store


def test_a_clock_that_once_ran_ahead_dates_no_signature():
    clock, shop = Clock(START_MS + 10 * 365 * 86_400_000), Shop()
    with make_guard(open_store("memory://", clock_ms=clock)) as guard:
        session = guard.session("s", budget="$1")
        clock.now_ms = START_MS
        with pytest.raises(PolicyDenied, match=r"clock: .* behind the ledger"):
            client(session, shop).get(URL)
        assert shop.payments == []
