"""Every guard alone, over the wire, on an LLM call and on a tool; and each of these after a restart."""

import httpx
import pytest

from tests.support.agent import Agent, owner_resets
from tests.support.guard_rows import CASES, Opened, alone, pays_per
from tests.support.ledger import Clock
from tests.support.merchant import URL, Shop, b64, client, make_guard, receipt, required, upto
from x402guard import Loop, SessionTripped
from x402guard.stores import open_store

every_case = pytest.mark.parametrize(("row", "kind"), CASES, ids=lambda part: str(part))


@pytest.fixture
def opens(tmp_path):
    opened = []

    def at(row, url, now_ms=None):
        opened.append(Opened(row, url, tmp_path, now_ms))
        return opened[-1]

    yield at
    for one in opened:
        one.close()


def assert_refused(row, kind, opened):
    """The next step is refused by the row's rule and reaches nobody; the run is latched, or it is not."""
    before = opened.agent.reached
    number, cents = row.refuses
    assert opened.agent.take(kind, number, cents) == row.rule
    assert opened.agent.reached == before
    assert opened.stands == ("tripped" if row.word else "open", row.word)
    assert row.rule in [refusal["rule"] for refusal in opened.session.report().to_dict()["refusals"]]


@pytest.mark.one_in(5)
@every_case
def test_it_refuses_at_the_expected_step(ledger_url, opens, row, kind):
    opened = opens(row, ledger_url)
    assert opened.takes(kind, row.passes) == [None] * len(row.passes)
    opened.acts()
    assert_refused(row, kind, opened)
    if row.word is not None:
        assert {opened.agent.take(other, 77) for other in Agent.KINDS} == {"session_tripped"}
        opened.stop.unlink(missing_ok=True)
        owner_resets(opened.store, "run")
        assert opened.agent.take(kind, 78) is None
    elif row.frees_s is not None:
        opened.clock.tick(row.frees_s)
        assert opened.agent.take(kind, *row.refuses) is None


@pytest.mark.one_in(5)
@every_case
@pytest.mark.parametrize("at", ["half", "end"])
def test_it_survives_a_restart(tmp_path, opens, row, kind, at):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    first = opens(row, url)
    some = len(row.passes) // 2 if at == "half" else len(row.passes)
    assert first.takes(kind, row.passes[:some]) == [None] * some
    if at == "end":
        first.acts()
    now_ms = first.clock.now_ms
    first.close()
    second = opens(row, url, now_ms)
    assert second.takes(kind, row.passes[some:]) == [None] * (len(row.passes) - some)
    if at == "half":
        second.acts()
    assert_refused(row, kind, second)
    now_ms = second.clock.now_ms
    second.close()
    assert opens(row, url, now_ms).stands == ("tripped" if row.word else "open", row.word)


@pytest.mark.one_in(5)
@every_case
def test_a_child_has_no_counters_of_its_own(ledger_url, opens, row, kind):
    opened = opens(row, ledger_url)
    opened.takes(kind, row.passes)
    opened.acts()
    room = "$0.02" if row.name == "budget" else "$2.00"
    child = Agent(opened.session.child("fresh", budget=room))
    assert child.take(kind, *row.refuses) == row.rule
    assert child.reached == (0, 0, 0)
    assert opened.stands == ("tripped" if row.word else "open", row.word)


# -- what is over the wire alone: a payee that delivers nothing, is new, takes too much, asks more -------------------------------


class Buyer:
    """Pays one shop whose terms are made anew for each payment; returns the rule that refused one, or None."""

    def __init__(self, url, policy, clock, budget="$1.00", **more):
        self.store = open_store(url, clock_ms=clock)
        self.guard = make_guard(self.store, policy=policy, **more)
        known = any(node.id == "run" for node in self.store.nodes())
        self.session = self.guard.session("s", budget=None if known else budget, id="run")
        self.agent = Agent(self.session)

    def pays(self, number, cents=1, payee=None):
        if payee is not None:
            self.agent.payee = payee
        return self.agent.take("pay", number, cents)

    def close(self):
        self.guard.close()
        self.store.close()


PAYEES = [f"0x{number:040x}" for number in range(1, 9)]
WIRE = {
    "new sellers": ("new_payees_per_day", {"new_payees_per_day": 3}, [(n, 1, PAYEES[n]) for n in range(3)], (9, 1, PAYEES[5])),
    "new payees of a host": (
        "new_payees_per_day", {"new_payees_per_day": 10}, [(n, 1, PAYEES[n]) for n in range(5)], (9, 1, PAYEES[5]),
    ),
    "share of a payee": ("percent_per_payee", {"percent_per_payee": 10}, [(n, 5, PAYEES[0]) for n in range(2)], (9, 1, PAYEES[0])),
    "price": ("price_ratio", {"price_ratio": 2}, [(n, 2, PAYEES[0]) for n in range(5)], (9, 5, PAYEES[0])),
}  # fmt: skip


@pytest.mark.parametrize("name", WIRE)
@pytest.mark.parametrize("restarts", [False, True], ids=["at once", "after a restart"])
def test_velocity_over_payees_and_prices(tmp_path, name, restarts):
    rule, limits, passes, refuses = WIRE[name]
    clock, url = Clock(), f"sqlite:///{tmp_path / 'l.db'}"
    buyer = Buyer(url, pays_per(**limits), clock)
    buyer.agent.is_apart = name == "new sellers"
    for number, cents, payee in passes:
        assert buyer.pays(number, cents, payee) is None
    if restarts:
        buyer.close()
        buyer = Buyer(url, pays_per(**limits), clock)
        buyer.agent.is_apart = name == "new sellers"
    before = len(buyer.agent.shop.payments)
    assert buyer.pays(*refuses) == rule
    assert len(buyer.agent.shop.payments) == before
    assert buyer.session.report().to_dict()["state"] == "open"
    other = (20, 1, PAYEES[1]) if name == "share of a payee" else (20, 2, PAYEES[0])
    assert buyer.pays(*other) is None  # nothing is latched: another passes
    buyer.close()


@pytest.mark.parametrize("restarts", [False, True], ids=["at once", "after a restart"])
def test_five_failures_in_a_row_latch_and_a_delivery_between_them_forgets(tmp_path, restarts):
    clock, url = Clock(), f"sqlite:///{tmp_path / 'l.db'}"
    policy = alone(loop=Loop(latch_after=1, calls=1_000, longest_cycle=1))
    well = lambda _request, _shop: httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())})
    ill = lambda _request, _shop: httpx.Response(503)
    numbers = iter(range(100))
    buyer = Buyer(url, policy, clock)

    def buys(answers):
        for answer in answers:
            shop = Shop(lambda request: required(url=str(request.url)), paid=answer)
            client(buyer.session, shop).get(URL, params={"n": next(numbers)})

    buys([ill, ill, ill, ill, well, ill, ill])
    if restarts:
        buyer.close()
        buyer = Buyer(url, policy, clock)
    buys([ill, ill])
    assert buyer.session.report().to_dict()["state"] == "open"
    buys([ill])
    assert buyer.session.report().to_dict()["terminated_by"] == "loop_detected"
    with pytest.raises(SessionTripped):
        buys([well])
    buyer.close()


@pytest.mark.parametrize("restarts", [False, True], ids=["at once", "after a restart"])
@pytest.mark.parametrize("setting", ["warn", "refuse"])
def test_a_payee_whose_last_twenty_took_the_ceiling(tmp_path, setting, restarts):
    clock, url = Clock(), f"sqlite:///{tmp_path / 'l.db'}"
    policy = alone(upto_at_ceiling=setting)
    full = {"PAYMENT-RESPONSE": b64(receipt(amount="10000"))}
    shop = Shop(
        lambda request: required(upto(10_000), url=str(request.url)),
        paid=lambda _request, _shop: httpx.Response(200, headers=full),
    )
    buyer = Buyer(url, policy, clock, unsafe_trust_receipts=True)
    for number in range(20):
        assert client(buyer.session, shop).get(URL, params={"n": number}).status_code == 200
    if restarts:
        buyer.close()
        buyer = Buyer(url, policy, clock, unsafe_trust_receipts=True)
    buyer.agent.shop = shop
    assert buyer.pays(99) == ("upto_at_ceiling" if setting == "refuse" else None)
    report = buyer.session.report().to_dict()
    assert (len(shop.payments), report["state"]) == (20 + (setting == "warn"), "open")
    buyer.close()
