"""Asking the chain about one payment costs the same however much else went to its payee."""

import httpx
import pytest

from tests.support.merchant import make_guard
from x402guard import GuardedTransport, LocalSigner, SettlementUncertain
from x402guard.testing import HostileChain, Offer, Route, Testnet

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("reconcile_cost")]

ROUTE = Route(
    name="permit",
    path="/permit/{n}",
    answer=lambda request: {"n": request.path_params["n"]},
    offers=(Offer(price=100, transfer_method="permit2"),),
)


class LosesAnswers(httpx.HTTPTransport):
    """Delivers everything, and loses the answer to what was paid for a path that ends so."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if "payment-signature" in request.headers and request.url.path.endswith("lost"):
            response.close()
            raise httpx.ReadError("lost")
        return response


def test_a_lost_permit2_answer_is_looked_for_in_as_many_calls_after_forty_sales_as_after_four():
    with Testnet(routes=[ROUTE]) as net, HostileChain(net.engine) as chain:
        signer = LocalSigner.from_key(net.payer_key)
        with make_guard(signer=signer, chains={net.network: chain.url}) as guard:
            with guard.session("agent", budget="$1.00") as session:
                transport = GuardedTransport(session, LosesAnswers())
                with httpx.Client(transport=transport, base_url=net.merchant.url, trust_env=False) as http:
                    few = calls_to_find_a_lost_one(guard, chain, http, after=range(4))
                    many = calls_to_find_a_lost_one(guard, chain, http, after=range(4, 40))
    assert many <= 2 * few, f"{few} calls after 4 sales, {many} after 40: at a busy payee, reconcile never ends"


def calls_to_find_a_lost_one(guard, chain, http, *, after) -> int:
    for number in after:
        assert http.get(f"/permit/{number}").status_code == 200
    with pytest.raises(SettlementUncertain) as caught:
        http.get(f"/permit/{len(after)}-lost")
    hold = guard.shell.store.hold(caught.value.hold_id)
    before = len(chain.asked)
    found = guard.shell.chain.read(hold)
    assert found.amount_atomic == 100
    return len(chain.asked) - before
