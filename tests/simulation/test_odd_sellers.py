"""Honest sellers with odd manners, in whole runs beside hostile ones: every invariant holds at every step."""

import pytest

from x402guard.flow.effects import Reply
from x402guard.frozen import replace
from x402guard.policy import Policy
from x402guard.policy import Seller as Said
from x402guard.testing.simulator import Answer, Seller, simulate
from x402guard.testing.simulator.draws import Draws
from x402guard.testing.simulator.hostile import HostileSeller


class OddSeller(Seller):
    """Takes what it asked for, once, and delivers for each payment in the end; but by the way it is odd."""

    def offer(self, visit, asset):
        draws, terms = visit.draws, visit.terms(asset, self.payee)
        price = "maxAmountRequired" if visit.want.scheme == "v1" else "amount"
        if draws.chance(0.3):
            terms["payTo"] = f"0x{draws.bits(160) | 1:040x}"  # a fresh address for each sale
        if draws.chance(0.3):
            terms[price] = str(int(terms[price]) + draws.pick((-37, 37, 74)))  # a price by an exchange rate
        if draws.chance(0.2):
            terms["maxTimeoutSeconds"] = str(terms["maxTimeoutSeconds"])
        beside = draws.pick(([], [None], [{"scheme": "exact", "price": "$0.01"}], [{**terms, price: "0.01"}], ["card"]))
        offers = [*beside, terms] if draws.chance(0.5) else [terms, *beside]
        return visit.demand(
            *offers,
            error=draws.pick((None, {"code": 7}, ["pay"], "\x00 \U0001f600")),
            extensions=draws.pick(({}, None, [])),
        )

    def sell(self, visit):
        draws, payment = visit.draws, visit.signed
        transaction = visit.settle()
        yield draws.pick((0, 1, 5))
        if not visit.calm and visit.taken is None and draws.chance(0.4):
            return draws.pick((Answer(Reply(202, ())), visit.demand(status=402), visit.lose()))
        for _ in range(60):
            if visit.taken is not None:
                break
            yield 2
        upto = payment.intent.scheme == "upto"
        answer = visit.deliver(
            transaction, {"amount": draws.pick((str, int))(visit.taken)} if upto and visit.taken else None
        )
        (name, value), *_ = answer.reply.headers
        twice = ((name, value), (name.lower(), value)) if draws.chance(0.3) else ((name, value),)
        status = 303 if draws.chance(0.2) and not visit.calm else 200
        location = (("location", "/result"),) if status == 303 else ()
        return replace(answer, reply=Reply(status, (*twice, *location)))


def sellers():
    return [OddSeller(), HostileSeller(Draws(7), offers=100, redirects=True), OddSeller()]


ANY = Policy(
    per_payment_cap=None,
    networks=None,
    loop=None,
    breaker=None,
    sellers={"*.example": Said(payees="any", facilitators="any", versions={1, 2}, daily="$0.50")},
)


@pytest.mark.parametrize("policy", [None, ANY], ids=["drawn", "sellers"])
def test_runs_with_odd_sellers_hold_every_invariant(policy):
    result = simulate(range(6), sellers=sellers, policy=policy, length=120)
    assert [str(each) for each in result.violations] == []
    assert result.counts.payments > 20


@pytest.mark.long
@pytest.mark.parametrize("policy", [None, ANY], ids=["drawn", "sellers"])
def test_many_runs_with_odd_sellers_hold_every_invariant(policy):
    result = simulate(range(100, 160), sellers=sellers, policy=policy)
    assert [str(each) for each in result.violations] == []
    assert result.counts.payments > 1_000
