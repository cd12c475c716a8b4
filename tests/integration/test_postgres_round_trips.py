"""Counts what one decision asks of the server: two round trips, one that reads and one that writes and commits."""

import anyio
import httpx
import pytest

from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, open_terms, receipt
from tests.support.refusals import Chunks
from x402guard import Policy
from x402guard.stores.postgres_server import Server

pytestmark = pytest.mark.xdist_group("postgres")


def streamed(_request, _shop):
    return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())}, stream=Chunks(b"the ", b"goods"))


def fetch_sync(session, shop, number):
    with client(session, shop) as http:
        return http.get(f"{URL}/{number}")


def fetch_async(session, shop, number):
    async def main():
        async with async_client(session, shop) as http:
            return await http.get(f"{URL}/{number}")

    return anyio.run(main)


PATHS = {
    # two to hold, one by the signer, two when the answer has ended
    "a paid request": (5, None, {}),
    "a paid request of a policy that asks about repeats": (5, None, {"policy": Policy(repeat="refuse")}),
    # two more, because the claim is recorded before the body is read
    "a paid stream": (7, streamed, {}),
}


@pytest.mark.parametrize("fetch", [fetch_sync, fetch_async])
@pytest.mark.parametrize("path", PATHS)
def test_a_paid_request_takes_five(url, monkeypatch, fetch, path):
    most, sells, more = PATHS[path]
    asked, say = [], Server.say
    with make_guard(url, budget="$5.00", **more) as guard, guard.session("s", budget="$5.00") as session:
        shop = Shop(terms=open_terms, paid=sells)
        for number in range(3):
            fetch(session, shop, number)
        monkeypatch.setattr(Server, "say", lambda *given, **named: asked.append(given[1]) or say(*given, **named))
        assert fetch(session, shop, "counted").status_code == 200
        monkeypatch.undo()
    assert len(asked) == most, asked


@pytest.mark.parametrize("path", ["charge", "hold"])
def test_a_decision_takes_two(url, monkeypatch, path):
    asked, say = [], Server.say
    with make_guard(url, budget="$5.00") as guard, guard.session("s", budget="$5.00") as session:

        def decide():
            if path == "charge":
                session.charge("search", "$0.01")
                return 2
            with session.hold("search", up_to="$0.01") as held:
                held.capture("$0.01")
            return 4

        decide()
        monkeypatch.setattr(Server, "say", lambda *given, **named: asked.append(given[1]) or say(*given, **named))
        most = decide()
        monkeypatch.undo()
    assert len(asked) == most, asked
