"""A price that was quoted, and a rule about payees, hold for the payment of another client, too."""

import pytest

from tests.attacks.test_a36_a38_foreign_payments import CARRIED, HOST, PAYEE, send, takes_anything
from tests.support.merchant import make_guard
from x402guard import PaymentRefused, Policy, PolicyDenied, Rule


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


@pytest.mark.parametrize("by", ["request", "session"])
def test_a36_a_quote_holds_in_shadow_mode_as_for_the_guards_own_payments(by):
    seen, asked = [], dict(CARRIED["X-PAYMENT"])
    with make_guard(policy=Policy(foreign_payments="book"), mode="shadow") as guard:
        with guard.session("s", budget="$1.00") as session:
            if by == "request":
                asked["extensions"] = {"max_price": "$0.20"}
            else:
                session.expect(f"GET {HOST}/*", "$0.20")
            with pytest.raises(PaymentRefused) as caught:
                send("sync", session, takes_anything(seen), **asked)
            assert (caught.value.rule, seen, session.spent) == ("price_above_quote", [], 0)


@pytest.mark.parametrize("carried", ["X-PAYMENT", "payment-signature, permit2"])
@pytest.mark.parametrize("action", ["deny", "ask"])
def test_a36_a_rule_about_payees_holds_for_a_payment_that_does_not_say_whom_it_pays(carried, action):
    seen, policy = [], Policy(foreign_payments="book", rules=[Rule(name="no", action=action, payees=[PAYEE])])
    with make_guard(policy=policy) as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(PolicyDenied) as caught:
            send("sync", session, takes_anything(seen), **CARRIED[carried])
        assert (caught.value.rule, seen, session.spent) == ("no", [], 0)
