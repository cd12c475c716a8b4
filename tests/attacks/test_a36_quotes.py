"""A price that was quoted holds for the payment of another client, too."""

import pytest

from tests.attacks.test_a36_a38_foreign_payments import CARRIED, HOST, send, takes_anything
from tests.support.merchant import make_guard
from x402guard import PaymentRefused, Policy


@pytest.mark.parametrize(("quoted", "passes"), [("$0.25", True), ("$0.20", False)])
@pytest.mark.parametrize("by", ["request", "session"])
def test_a36_a_quote_holds_for_what_is_booked(quoted, passes, by):
    seen, asked = [], dict(CARRIED["X-PAYMENT"])
    with make_guard(policy=Policy(foreign_payments="book")) as guard, guard.session("s", budget="$1.00") as session:
        if by == "request":
            asked["extensions"] = {"max_price": quoted}
        else:
            session.expect(f"GET {HOST}/*", quoted)
        if passes:
            send("sync", session, takes_anything(seen), **asked)
        else:
            with pytest.raises(PaymentRefused) as caught:
                send("sync", session, takes_anything(seen), **asked)
            assert caught.value.rule == "price_above_quote"
        assert (len(seen), str(session.spent)) == ((1, "0.25") if passes else (0, "0.00"))
