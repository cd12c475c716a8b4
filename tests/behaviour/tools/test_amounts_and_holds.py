"""Amounts that are none, and a hold that two threads enter."""

import threading
import time
from decimal import Decimal

import pytest

from tests.support.merchant import make_guard
from x402guard import ConfigError


@pytest.fixture
def session(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$1.00") as session:
        yield session


def test_one_hold_is_entered_by_one_thread(session):
    entered = []
    for _ in range(50):
        hold, gate = session.hold("x", up_to="$0.001"), threading.Barrier(4)

        def enter(hold=hold, gate=gate):
            gate.wait()
            try:
                with hold:
                    entered.append(1)
            except ConfigError:
                return

        threads = [threading.Thread(target=enter) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert len(entered) == 50


@pytest.mark.parametrize(
    "amount", [Decimal("1E-400000000"), Decimal("1E+400000000"), 10**6_000, Decimal("0E-4000000")], ids=range(4)
)
def test_an_amount_of_endless_digits_is_refused_at_once(session, amount):
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"^cost: .* is not a dollar amount"):
        session.charge("serp", amount)
    assert time.monotonic() - begun < 2
