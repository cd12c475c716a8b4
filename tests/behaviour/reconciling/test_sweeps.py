"""When the chain is asked: before a refusal, once, and not about what is still under way."""

from decimal import Decimal

import httpx
import pytest

from tests.support.chain import MockChain
from tests.support.ledger import Clock
from tests.support.llm_provider import CHAT, ask, completion
from tests.support.merchant import (
    URL,
    Shop,
    b64,
    client,
    make_guard,
    receipt,
    required,
    upto,
)
from x402guard import (
    Policy,
    SettlementUncertain,
)
from x402guard.ledger.findings import Settled, Unused, Used
from x402guard.stores import open_store

CENT = Decimal("0.01")


def test_a_sweep_leaves_alone_what_is_still_under_way():
    chain = MockChain(lambda hold: Settled(12_345, "0x" + "ab" * 32, 0, final=True) if hold.claim else Used(final=True))
    shop = Shop(required(upto()))

    def paid(request, shop):
        guard.sweep()  # somebody else's refusal, while this answer is on its way
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt(amount="12345"))})

    shop.paid = paid
    with make_guard(chains=chain) as guard:
        session = guard.session("s", budget="$1")
        receipt_ = client(session, shop).get(URL).extensions["x402guard"]
        assert (receipt_.amount, receipt_.state) == (Decimal("0.05"), "held")
        guard.sweep()
        assert (session.spent, session.held) == (Decimal("0.012345"), 0)


def test_a_chain_out_of_reach_is_asked_once_a_sweep_and_not_by_every_refusal():
    from x402guard.ledger.findings import Unreadable

    chain = MockChain(Unreadable("down"))
    shop = Shop(paid=httpx.ReadError("gone"))
    with make_guard(chains=chain, policy=Policy(loop=None, breaker=None)) as guard:
        session = guard.session("s", budget="$0.05")
        for number in range(5):
            with pytest.raises(SettlementUncertain):
                client(session, shop).get(f"{URL}/{number}")
        from x402guard import BudgetExhausted

        for number in range(10):
            with pytest.raises(BudgetExhausted):
                client(session, shop).get(f"{URL}/more/{number}")
        assert chain.reads == 1


@pytest.mark.parametrize("kind", ["tool", "call"])
def test_before_a_tool_or_a_call_is_refused_the_chain_is_asked_what_it_can_free(kind):
    clock = Clock()
    chain = MockChain(lambda hold: Unused(clock() // 1000))
    with make_guard(open_store("memory://", clock_ms=clock), chains=chain) as guard:
        session = guard.session("s", budget="$0.01")
        with pytest.raises(SettlementUncertain):
            client(session, Shop(paid=httpx.ReadError("gone"))).get(URL)
        clock.tick(61)  # nobody can take it any more, and nobody has asked
        assert session.remaining == 0
        if kind == "tool":
            session.charge("serp", "$0.01")
            assert (session.spent, session.held) == (CENT, 0)
        else:
            http = client(session, lambda _request: httpx.Response(200, json=completion()))
            assert http.post(CHAT, json=ask()).status_code == 200
