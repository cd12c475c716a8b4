"""More signed than the wallet has: many payments against one balance, and sellers that settle late."""

from decimal import Decimal

import httpx
import pytest

from tests.support.chain import MockChain
from tests.support.merchant import OTHER_PAYEE, URL, Shop, accept, make_guard, permit2, required, upto
from tests.support.refusals import fetch
from x402guard import Policy, PolicyDenied
from x402guard.flow.ports import Funds

MODES = pytest.mark.parametrize("mode", ["sync", "async"])
DOLLAR = 1_000_000


class Poor(MockChain):
    """A chain on which the wallet has so many units, and Permit2 may move so many."""

    balance, allowance = DOLLAR, 10 * DOLLAR

    def funds(self, network, token, owner):
        return Funds(self.balance, self.allowance)


def late(*_):
    """The seller keeps the payment and answers with an error: it may be taken until its deadline."""
    return httpx.Response(500)


def guarded(ledger, chain, **policy):
    return make_guard(
        ledger, chains=chain, background_checks=False, policy=Policy(breaker=None, loop=None, velocity=None, **policy)
    )


@MODES
@pytest.mark.parametrize(
    "offer", [accept(100_000), permit2(100_000), upto(100_000)], ids=["eip3009", "permit2", "upto"]
)
def test_a55_payments_that_are_out_fit_into_the_balance_together(mode, offer, ledger_url):
    shop = Shop(required(offer), paid=late)
    with guarded(ledger_url, Poor()) as guard, guard.session("s", budget="$50.00") as session:
        for number in range(10):
            fetch(mode, session, shop, url=f"{URL}/{number}")
        with pytest.raises(
            PolicyDenied, match=r"can pay \$1\.00 of USDC .* and payments of \$1\.00 are out already"
        ) as caught:
            fetch(mode, session, shop, url=f"{URL}/10")
        assert (caught.value.rule, caught.value.retry_after) == ("balance", 30)
        assert (caught.value.requested, caught.value.available) == (Decimal("0.10"), 0)
        assert (len(shop.payments), session.held) == (10, Decimal("1.00"))
        with guard.session("another", budget="$5.00") as other, pytest.raises(PolicyDenied, match="are out already"):
            fetch(mode, other, shop, url=f"{URL}/11")  # one wallet, whatever the session


def test_a55_what_was_taken_is_out_no_more(ledger_url):
    shop = Shop(required(accept(600_000)))
    with guarded(ledger_url, Poor()) as guard, guard.session("s", budget="$50.00") as session:
        for number in range(3):  # captured at once: the chain's balance shows it, here it does not
            fetch("sync", session, shop, url=f"{URL}/{number}")
        assert session.spent == Decimal("1.80")


def test_a55_a_cheaper_offer_still_passes_and_the_allowance_counts_for_permit2(ledger_url):
    chain = Poor()
    chain.allowance = 150_000
    dear, cheap = permit2(100_000, payTo=OTHER_PAYEE), accept(900_000)
    with guarded(ledger_url, chain) as guard, guard.session("s", budget="$50.00") as session:
        fetch("sync", session, Shop(required(dear), paid=late), url=f"{URL}/1")
        shop = Shop(required(dear, cheap))
        fetch("sync", session, shop, url=f"{URL}/2")  # the allowance is used up, the balance is not
        assert [amount for _, amount, _ in shop.payments] == [900_000]


def test_a55_without_a_chain_nothing_is_known_of_the_balance(ledger_url):
    shop = Shop(required(accept(900_000)), paid=late)
    with make_guard(ledger_url, policy=Policy(breaker=None)) as guard, guard.session("s", budget="$50.00") as session:
        for number in range(3):
            fetch("sync", session, shop, url=f"{URL}/{number}")
        assert session.held == Decimal("2.70")
