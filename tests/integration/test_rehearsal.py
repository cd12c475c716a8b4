"""A payment is rehearsed on a ledger of each kind: all is asked that paying asks, and no row changes."""

from contextlib import closing

import httpx
import pytest

from tests.support.merchant import PAYER, Shop, client, make_guard
from x402guard import BudgetExhausted
from x402guard.http.explain import MOST_BYTES
from x402guard.http.rehearsal import NoKey, RehearsedLedger, rehearse
from x402guard.kernel.rows import Hold
from x402guard.stores import open_store

URL = "https://seller.example/item"


def rows_of(store):
    kinds = ("instance", "named", "refusals", "refusal", "wallet", "payee", "purchase")
    marks = {kind: dict(store.marks(kind, "")) for kind in kinds}
    return list(store.nodes()), list(store.outstanding()), list(store.entries("wallet")), marks


def rehearsed(store, budget):
    """What paying would come to in a new session of a budget."""
    request = httpx.Request("GET", URL)
    answer = Shop()(request)
    with make_guard(RehearsedLedger(store), signer=NoKey(PAYER)) as guard:
        session = guard.session("pay", budget=budget)
        return rehearse(request, answer, answer.content, most=MOST_BYTES, payer=(session.context, session.shell))


def test_a_rehearsal_decides_as_paying_does_and_writes_nothing(ledger_url):
    shop = Shop()
    with closing(open_store(ledger_url)) as store:
        with (
            make_guard(store, budget="$1.00") as guard,
            guard.session("s", budget="$1.00") as session,
            client(session, shop) as http,
        ):
            paid = http.get(URL).extensions["x402guard"]
        before = rows_of(store)
        hold = rehearsed(store, "$0.50")
        assert isinstance(hold, Hold)
        assert (hold.amount, hold.payment().payee) == (paid.amount * 10**9, paid.payee)
        for _ in range(2):
            with pytest.raises(BudgetExhausted):
                rehearsed(store, "$0.000001")
        assert rows_of(store) == before
        assert store.hold(hold.id) is None
