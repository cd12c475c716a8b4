"""What has changed by the time of an answer: another offer is another question, and a kill file stops all."""

import pytest

from tests.support.merchant import OTHER_PAYEE, PAYEE, URL, Shop, accept, client, make_guard, required
from x402guard import PaymentRefused, Policy, Rule, SessionTripped, Velocity


def test_a_yes_to_one_offer_is_none_to_the_next_of_the_same_402(ledger_url):
    """The first does not pass any more once it is allowed, so the dearer one would be bought in its place."""
    rule = Rule(name="ask", action="ask", match="GET courts.example/opinion/42")
    policy = Policy(rules=[rule], velocity=Velocity(percent_per_payee=2), breaker=None)
    shop, asked = Shop(terms=required(accept(10_000), accept(20_000, payTo=OTHER_PAYEE))), []

    def person(request):
        asked.append(request.payee.lower())
        if len(asked) == 1:
            for number in (1, 2):
                client(session, Shop()).get(f"{URL}/{number}")
        return True

    with make_guard(ledger_url, policy=policy, approver=person) as guard, guard.session("s", budget="$1") as session:
        client(session, shop).get(URL)
        assert asked == [PAYEE.lower(), OTHER_PAYEE.lower()]
        assert [amount for _, amount, _ in shop.payments] == [20_000]


def test_a_kill_file_that_appears_while_a_person_thinks_stops_what_they_allow(ledger_url, tmp_path):
    stop, shop = tmp_path / "stop", Shop()
    policy = Policy(rules=[Rule(name="ask", action="ask")], breaker=None)
    approver = lambda _: stop.touch() is None
    with make_guard(ledger_url, policy=policy, approver=approver, kill_file=stop) as guard:
        with guard.session("s", budget="$1") as session:
            with pytest.raises(SessionTripped):
                client(session, shop).get(URL)
            assert (shop.payments, session.held, session.spent) == ([], 0, 0)


def test_a_yes_to_one_payee_is_none_to_another_at_the_same_price(ledger_url):
    rule = Rule(name="ask", action="ask", match="GET courts.example/opinion/42")
    policy = Policy(rules=[rule], velocity=Velocity(percent_per_payee=2), breaker=None)
    shop, asked = Shop(terms=required(accept(10_000), accept(10_000, payTo=OTHER_PAYEE))), []

    def person(request):
        asked.append(request.payee.lower())
        if len(asked) == 1:
            for number in (1, 2):
                client(session, Shop()).get(f"{URL}/{number}")
        return len(asked) == 1

    with make_guard(ledger_url, policy=policy, approver=person) as guard, guard.session("s", budget="$1") as session:
        with pytest.raises(PaymentRefused) as caught:
            client(session, shop).get(URL)
        assert caught.value.rule == "approval"
        assert asked == [PAYEE.lower(), OTHER_PAYEE.lower()]
        assert shop.payments == []
