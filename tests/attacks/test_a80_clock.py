"""Row 80: the clock of this machine is days ahead, and the first signature of a new ledger is good for days."""

from dataclasses import dataclass

import httpx
import pytest

from tests.support.chain import MockChain
from tests.support.ledger import Clock
from tests.support.merchant import URL, accept, b64, client, make_guard, offer_response, receipt, required
from x402guard import Policy, PolicyDenied
from x402guard.stores import open_store

BASE, USDC_BASE = "eip155:8453", "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"
SEPOLIA = "eip155:84532"


@dataclass
class Timed(MockChain):
    """A chain whose newest block was made at *head*, in unix seconds; None: it says nothing."""

    networks: frozenset = frozenset({BASE, SEPOLIA})
    head: int | None = None
    heads: int = 0

    def head_unix(self, network):
        self.heads += 1
        return self.head


def buys(chain, *, network=BASE, times=1):
    """Pay by a new ledger; return what its seller got, and the error."""
    clock = Clock()
    chain.head = None if chain.head is None else int(clock() // 1000) + chain.head
    sold = (
        accept(network=network, asset=USDC_BASE, extra={"name": "USD Coin", "version": "2"})
        if network == BASE
        else accept()
    )
    terms, sent, error = required(sold), [], None

    def shop(request):
        if "payment-signature" not in request.headers:
            return offer_response(terms)
        sent.append(request)
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(network=network))})

    store = open_store("memory://", clock_ms=clock, steady_ms=clock)
    with make_guard(store, chains=chain, policy=Policy(networks=None)) as guard:
        for run in range(times):
            with guard.session(f"s{run}", budget="$1.00") as session:
                try:
                    client(session, shop).get(f"{URL}/{run}")
                except PolicyDenied as refused:
                    error = refused
    store.close()
    return len(sent), error


@pytest.mark.parametrize("ahead_s", [3_700, 86_400, 30 * 86_400])
def test_a80_nothing_is_signed_by_a_clock_that_is_ahead_of_the_chain(ahead_s):
    paid, error = buys(Timed(head=-ahead_s))
    assert (paid, error.rule) == (0, "clock")
    assert f"{ahead_s / 3600:.1f} hours ahead of the newest block of {BASE}" in str(error)
    assert "Set this machine's clock" in error.advice


@pytest.mark.parametrize("head", [0, -600, 30, 86_400])
def test_a80_a_clock_that_agrees_or_is_behind_pays_and_is_asked_about_once(head):
    chain = Timed(head=head)
    assert buys(chain, times=3) == (3, None)
    assert chain.heads == 1


def test_a80_where_no_head_is_read_or_the_owner_moves_it_nothing_is_compared():
    assert buys(Timed(head=None)) == (1, None)
    chain = Timed(head=-86_400)
    assert buys(chain, network=SEPOLIA) == (1, None)
    assert chain.heads == 0
