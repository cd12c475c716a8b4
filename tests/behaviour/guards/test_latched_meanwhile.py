"""A session that is latched while something is under way: what it cost is booked, and nothing more is signed."""

import threading

import httpx
import pytest

from tests.support.merchant import URL, Shop, b64, client, make_guard, open_terms, receipt, required
from x402guard import (
    Policy,
    SessionTripped,
)

SETTLED = {"PAYMENT-RESPONSE": b64(receipt())}


def test_a_session_that_is_latched_while_a_tool_runs_books_what_it_cost(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$0.50") as session:
        with session.hold("render", up_to="$0.10") as job:
            session.trip("why")
            job.capture("$0.04")
        report = session.report().to_dict()
        assert (report["state"], report["spent"], report["held"]) == ("tripped", "0.04", "0.00")


def test_a_session_that_is_latched_while_its_payment_is_out_takes_what_was_bought(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$0.50") as session:

        def trips(request, _shop):
            session.trip("while it is out")
            return httpx.Response(200, headers=SETTLED, json={"path": request.url.path})

        assert client(session, Shop(open_terms, paid=trips)).get(URL).status_code == 200
        report = session.report().to_dict()
        assert (report["state"], report["spent"], report["held"]) == ("tripped", "0.01", "0.00")


def test_a_session_that_is_latched_between_its_402_and_its_payment_signs_nothing(ledger_url):
    with make_guard(ledger_url) as guard, guard.session("s", budget="$0.50") as session:

        def terms(request):
            session.trip("while it was asked")
            return required(url=str(request.url))

        shop = Shop(terms)
        with pytest.raises(SessionTripped):
            client(session, shop).get(URL)
        assert (shop.payments, session.held) == ([], 0)


@pytest.mark.parametrize("by", ["method", "file"])
def test_after_the_latch_nothing_is_signed_whatever_is_under_way(ledger_url, tmp_path, by):
    """Eight threads pay as fast as they can; whatever the merchant has seen was held before the latch, and is listed or ended."""
    stop, shop = tmp_path / "stop", Shop(open_terms)
    paid_some = threading.Event()
    with make_guard(ledger_url, policy=Policy(loop=None, bulkhead=None), kill_file=stop) as guard:
        session = guard.session("s", budget="$5.00")
        latched = []

        def pays(thread):
            http = client(session, shop)
            for number in range(200):
                try:
                    http.get(URL, params={"n": f"{thread}-{number}"})
                except SessionTripped:
                    latched.append(thread)
                    return
                paid_some.set()

        threads = [threading.Thread(target=pays, args=(thread,)) for thread in range(8)]
        for thread in threads:
            thread.start()
        assert paid_some.wait(timeout=30)
        stop.touch() if by == "file" else session.trip("a person saw it")
        for thread in threads:
            thread.join(timeout=60)
        report = session.report().to_dict()
    events = [event["event"] for event in report["events"]]
    assert sorted(latched) == list(range(8))
    assert "authorize" not in events[events.index("trip") :]
    assert events.count("authorize") == len(shop.nonces) == events.count("capture") > 0
    assert (report["held"], report["outstanding"], report["terminated_by"]) == ("0.00", [], "kill_switch")
