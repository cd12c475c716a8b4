"""Row 17: the seller of an ``upto`` decides the amount alone, and takes the ceiling every time."""

import pytest

from tests.support.merchant import URL, Shop, b64, client, make_guard, receipt, required, upto
from x402guard import Policy, PolicyDenied


def selling_at(amount):
    import httpx

    def paid(request, shop):
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(amount=str(amount)))}, json={})

    return Shop(terms=required(upto(50_000)), paid=paid)


def buy(http, times):
    for number in range(times):
        http.get(f"{URL}/{number}")


def warnings(session):
    return [event for event in session.report().to_dict()["events"] if event["event"] == "always_at_ceiling"]


def trusting(**policy):
    return make_guard(unsafe_trust_receipts=True, policy=Policy(**policy))


def test_a17_the_ceiling_is_what_is_held_whatever_the_server_takes():
    with make_guard() as guard, guard.session("s", budget="$0.10") as session:
        buy(client(session, selling_at(1)), 1)
        assert str(session.held) == "0.05"


@pytest.mark.parametrize("amount", [50_000, 49_500])
def test_a17_twenty_settlements_at_the_ceiling_are_an_event_and_then_a_refusal(amount):
    with trusting(upto_at_ceiling="refuse") as guard, guard.session("s", budget="$5.00") as session:
        http = client(session, selling_at(amount))
        buy(http, 19)
        assert not warnings(session)
        buy(http, 1)
        assert len(warnings(session)) == 1
        with pytest.raises(PolicyDenied, match=r"upto_at_ceiling.*use is not measured"):
            http.get(f"{URL}/21")
        assert session.held == 0


def test_a17_by_default_it_is_an_event_once():
    with trusting() as guard, guard.session("s", budget="$5.00") as session:
        buy(client(session, selling_at(50_000)), 25)
        assert len(warnings(session)) == 1


def test_a17_a_single_measured_settlement_ends_the_habit():
    with trusting(upto_at_ceiling="refuse") as guard, guard.session("s", budget="$5.00") as session:
        buy(client(session, selling_at(50_000)), 19)
        buy(client(session, selling_at(49_499)), 1)
        buy(client(session, selling_at(50_000)), 15)
        assert not warnings(session)
