"""Sellers and rules of a user's own: what breaks the protocol is named, and what was found is found again with them."""

import logging
import subprocess
import sys

import pytest

from tests.simulation.test_simulator import ROOT, Stealing
from x402guard import ConfigError, Policy
from x402guard.testing.simulator import BrokenActor, Seller, as_test, minimise, play, simulate

BOTH = {"eip155:84532", "eip155:8453"}


class Raises(Seller):
    def sell(self, visit):
        yield self.cache  # there is none


class OffersBadly(Seller):
    def offer(self, visit, asset):
        return {}["price"]


class IsAwaited(Seller):
    async def sell(self, visit):
        return visit.deliver(visit.settle())


class Settles(Seller):
    amount = 1

    def sell(self, visit):
        visit.settle(self.amount)
        yield 1
        return visit.deliver()


class SettlesBelowNothing(Settles):
    amount = -5


class SettlesHalves(Settles):
    amount = 0.5


class HasNoPayee(Seller):
    def __init__(self):
        self.seen = {}


class HasABadPayee(Seller):
    def __init__(self):
        super().__init__("0xnotanaddress")


class NoSeller:
    payee = ""


@pytest.mark.parametrize(
    ("seller", "said"),
    [
        (Raises, "Raises.sell: it raises AttributeError: 'Raises' object has no attribute 'cache'"),
        (OffersBadly, "OffersBadly.offer: it raises KeyError: 'price'"),
        (IsAwaited, "IsAwaited.sell: it returns <coroutine"),
        (Settles, r"Settles: settle\(1\): an exact payment is taken whole \([0-9]+\)"),
        (SettlesBelowNothing, r"SettlesBelowNothing: settle\(-5\): it is not a whole number of atomic units"),
        (SettlesHalves, r"SettlesHalves: settle\(0.5\): it is not a whole number"),
        (HasNoPayee, r"HasNoPayee.payee: .*; its __init__ calls super\(\).__init__"),
        (HasABadPayee, "HasABadPayee.payee: "),
        (NoSeller, r"NoSeller: it is no Seller; write class NoSeller\(Seller\)"),
    ],
)
def test_a_seller_is_named_for_what_it_does_wrong(seller, said):
    with pytest.raises(BrokenActor, match=said):
        simulate(range(30), sellers=lambda: [seller()], length=100)
    assert not logging.getLogger("x402guard").disabled


def test_a_function_that_makes_no_seller_plays_no_others():
    def none():
        return []

    with pytest.raises(ConfigError, match="sellers: the function returns no seller"):
        simulate([1], sellers=none)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy.careful(),
        Policy.careful(networks=BOTH),
        Policy(networks=BOTH, hosts={"seller.example"}),
        Policy(networks=BOTH, per_payment_cap="$0.001"),
    ],
    ids=["default", "careful", "careful on both", "hosts", "cap"],
)
def test_what_an_owners_rules_refuse_is_no_fault(policy):
    assert simulate(range(8), sellers=lambda: [Seller()], policy=policy, length=80).violations == []


def test_a_policy_that_allows_no_network_of_a_run_is_named():
    with pytest.raises(ConfigError, match=r"policy\.networks: a run is played on one of eip155:84532, eip155:8453"):
        simulate([1], policy=Policy(networks={"eip155:137"}, payees=None))


def test_a_default_policy_buys_on_the_test_network_in_every_run():
    for seed in range(8):
        assert simulate([seed], sellers=lambda: [Seller()], policy=Policy(), length=80).counts.payments > 0


class TakesMore(Stealing):
    """Stands for a fault of the library: the chain shows another amount than the payment's."""

    def sell(self, visit):
        visit.settle()
        raise_it = visit.draws.chance(0.5)
        yield 1
        if raise_it:
            visit._chain.taken = lambda _nonce: 1
        return visit.deliver(status=500, receipt=False)


def test_what_own_actors_have_found_is_found_again_with_them(tmp_path):
    sellers = lambda: [TakesMore()]
    policy = Policy(networks=None, per_payment_cap=None)
    result = simulate(range(40), sellers=sellers, policy=policy, length=60, stop_at=1)
    found = result.violations[0]
    assert f"repeat it with: play({found.case!r}, sellers=…, policy=…)" in str(found)
    assert play(found.case, sellers=sellers, policy=policy).violations[0].kind == found.kind
    with pytest.raises(ConfigError, match=r"sellers: the run had its own; write minimise\(found, sellers=…\)"):
        minimise(found, policy=policy)
    least = minimise(found, sellers=sellers, policy=policy, tries=60)
    assert (least.kind, least.own) == (found.kind, ("sellers", "policy"))
    assert least.case.kept is not None
    path = tmp_path / "test_kept.py"
    path.write_text(
        "import pytest\nfrom tests.simulation.test_own_actors import TakesMore\nfrom x402guard import Policy\n"
        "@pytest.fixture\ndef sellers():\n    return lambda: [TakesMore()]\n"
        "@pytest.fixture\ndef policy():\n    return Policy(networks=None, per_payment_cap=None)\n" + as_test(least)
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(path)]
    ran = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert (ran.returncode, "1 failed" in ran.stdout) == (1, True), ran.stdout
