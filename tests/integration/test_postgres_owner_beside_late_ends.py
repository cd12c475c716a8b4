"""Each owner's command beside ends of answers that wait for the ledger's server: in every order the books are right.

The agent's way to the server breaks; the owner's does not. The product of commands and moments, one session each.
"""

import time
from contextlib import nullcontext
from decimal import Decimal

import pytest

from tests.support.ended_buyer import begin_call
from tests.support.ledger import usd
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import ConfigError, LedgerUnavailable, Owner
from x402guard.flow.capture import Bill, capture_bill
from x402guard.flow.drivers import run
from x402guard.frozen import replace
from x402guard.kernel.rows import Evidence

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.long]

RUN = "id=run"
COMMANDS = {
    "raises the run's limit": lambda owner, hold: owner.set_budget(RUN, "$3.00"),
    "lowers the run's limit": lambda owner, hold: owner.set_budget(RUN, "$0.50"),
    "stops the run by its limit": lambda owner, hold: owner.set_budget(RUN, "$0.05", stops=True),
    "raises the wallet's limit": lambda owner, hold: owner.set_budget("wallet", "$9.00"),
    "lowers the wallet's limit": lambda owner, hold: owner.set_budget("wallet", "$0.50"),
    "trips the run": lambda owner, hold: owner.trip(RUN, "it looks odd"),
    "trips the wallet": lambda owner, hold: owner.trip("wallet", "it looks odd"),
    "trips and resets the run": lambda owner, hold: (owner.trip(RUN, "odd"), owner.reset(RUN)),
    "trips and resets the wallet": lambda owner, hold: (owner.trip("wallet", "odd"), owner.reset("wallet")),
    "forgives the purchase": lambda owner, hold: owner.forgive(hold, unsafe_in_flight=True),
    "reconciles": lambda owner, hold: owner.reconcile(),
    "looks": lambda owner, hold: (owner.verify(), owner.report("wallet").to_text(), owner.live(), owner.heads()),
}
REFUSED_AFTERWARDS = {"lowers the run's limit", "lowers the wallet's limit", "forgives the purchase"}
MOMENTS = ["while they wait", "as the server is back", "after they were written"]


def until(true, what):
    until_s = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until_s, what()
        time.sleep(0.02)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_paid_answer_and_a_bill_above_its_hold_are_written_once(url, way, straight, command, moment):
    shop = Shop()

    def sells(request):
        answer = shop(request)
        if "payment-signature" in request.headers:
            way.go_down()
        return answer

    with (
        make_guard(way.url(url), budget="$5.00") as guard,
        guard.session("s", budget="$2.00", id="run") as session,
        Owner(url) as owner,
    ):
        call = begin_call(guard)  # $0.10
        with client(session, sells) as http:
            answer = http.get(URL)
        hold_id = answer.extensions["x402guard"].hold_id
        bill = Bill(usd("$0.60"), Evidence.PROVIDER_USAGE, {"input_tokens": 9})
        with pytest.raises(LedgerUnavailable):
            run(capture_bill(replace(guard.context, node_id="run"), call, bill), guard.shell)
        before = usd("$0.11")
        assert straight.path("run")[0].held == before
        if moment == "while they wait":
            COMMANDS[command](owner, hold_id)
        way.down = False
        if moment == "as the server is back":
            COMMANDS[command](owner, hold_id)

        def node():
            return straight.path("run")[0]

        until(lambda: (node().captured, node().held) == (usd("$0.61"), 0), node)
        if moment == "after they were written":
            with pytest.raises(ConfigError) if command in REFUSED_AFTERWARDS else nullcontext():
                COMMANDS[command](owner, hold_id)
        assert (answer.status_code, len(shop.nonces)) == (200, 1)
        paid, owed = straight.hold(hold_id), straight.hold("llm")
        assert (paid.captured, owed.captured) == (usd("$0.01"), usd("$0.60"))
        assert paid.delivery == "done" or (command == "forgives the purchase" and paid.delivery == "forgiven")
        assert session.spent == Decimal("0.61")
        assert straight.path("wallet")[0].used - straight.path("wallet")[0].live == usd("$0.61")
        assert owner.verify() == []
        left = session.remaining
        if left >= Decimal("0.01") and node().state == "open" and owner.budget("wallet").state == "open":
            with client(session, shop) as http:
                assert http.get(URL).status_code == 200
            assert len(shop.nonces) == 2
    assert straight.audit() == []
