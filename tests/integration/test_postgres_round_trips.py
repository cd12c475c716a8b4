"""Counts what one decision asks of the server: one round trip on rows that are known, two on others, by indexes alone."""

from functools import partial

import anyio
import httpx
import psycopg
import pytest

from benchmarks import scenes
from tests.support.ledger import Books, usd
from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, open_terms, receipt
from tests.support.refusals import Chunks
from x402guard import Policy
from x402guard.kernel.rows import Evidence
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.events import Capture
from x402guard.ledger.transitions import apply
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
    # two to hold, one by the signer, one when the answer has ended
    "a paid request": (4, None, {}),
    "a paid request of a policy that asks about repeats": (4, None, {"policy": Policy(repeat="refuse")}),
    # one more, because the claim is recorded before the body is read
    "a paid stream": (5, streamed, {}),
}


@pytest.mark.parametrize("fetch", [fetch_sync, fetch_async])
@pytest.mark.parametrize("path", PATHS)
def test_a_paid_request_takes_four(url, monkeypatch, fetch, path):
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


@pytest.mark.parametrize("path", ["charge", "hold", "LLM call", "record_usage"])
def test_a_decision_takes_one(url, monkeypatch, path):
    asked, say = [], Server.say
    with make_guard(url, budget="$5.00") as guard, guard.session("s", budget="$5.00") as session:

        def decide():
            if path == "LLM call":
                with scenes.client(session, scenes.provider) as http:
                    assert http.post(scenes.MODEL, json=scenes.prompt(1, 100)).status_code == 200
                return 2
            if path == "record_usage":
                session.record_usage("openai", "gpt-4o-mini", {"input_tokens": 200, "output_tokens": 100})
                return 1
            if path == "charge":
                session.charge("search", "$0.01")
                return 1
            with session.hold("search", up_to="$0.01") as held:
                held.capture("$0.01")
            return 2

        decide()
        monkeypatch.setattr(Server, "say", lambda *given, **named: asked.append(given[1]) or say(*given, **named))
        most = decide()
        monkeypatch.undo()
    assert len(asked) == most, asked


def test_no_decision_reads_a_table_as_a_whole(url):
    """What a payment costs does not grow with the sessions of the ledger, whatever the server knows of its tables."""
    books = Books(url, wallet="$300.00", session=None)
    for number in range(300):
        books.open(f"s-{number}", "$200.00")
    before = whole_reads(books, url)
    for number in range(8):
        hold_id, session = f"h-{number}", f"s-{number % 4}"
        assert not isinstance(books.hold(hold_id, "$0.01", session), Refusal)
        books.change(partial(apply, hold_id=hold_id, event=Capture(usd("$0.01"), Evidence.CLAIMED)), holds=(hold_id,))
    assert not isinstance(books.hold("first", "$180.00", "s-0"), Refusal)
    assert isinstance(books.hold("second", "$150.00", "s-1"), Refusal)  # after what is idle elsewhere was looked for
    assert whole_reads(books, url) == before
    books.close()


def whole_reads(books, url):
    """Return how often each table of the ledger was read without an index, by its own count."""
    books.store._writer.say("SELECT pg_stat_force_next_flush()")
    with psycopg.connect(url, autocommit=True) as server:
        tables = "relname IN ('nodes', 'holds', 'entries', 'marks', 'archived')"
        return dict(server.execute(f"SELECT relname, seq_scan FROM pg_stat_user_tables WHERE {tables}").fetchall())
