"""A bug of one line in a room is refused by the kernel, by name, and signs nothing past the budget."""

import pytest

from tests.kernel import mutants_of_rooms, mutants_together
from tests.kernel.mutants import MUTANTS
from tests.kernel.world import World, lost_upto
from tests.support.merchant import open_terms
from x402guard.kernel import commit
from x402guard.kernel import ledger as kernel_ledger

assert {mutants_of_rooms.mutant, mutants_together.mutant}, "they add themselves to MUTANTS"

RULES = {
    "books": "books",
    "lifecycle": "lifecycle",
    "worth": "worth",
    "giving back": "giving_back",
    "room": "room",
    "once": "once",
    "durable": "durable",
}


@pytest.fixture(params=MUTANTS, ids=lambda each: each.name)
def mutant(request):
    return request.param


def test_it_is_stopped_by_its_rule(mutant, monkeypatch, ledger_url):
    world = World(monkeypatch, ledger_url, **mutant.world)
    mutant.act(world)
    world.close()
    assert mutant.rule in world.rules
    assert world.shop.signed <= world.may_sign


@pytest.mark.parametrize("terms", [open_terms, lost_upto])
def test_without_a_mutant_the_budget_is_used_up_and_nothing_is_refused(monkeypatch, ledger_url, terms):
    world = World(monkeypatch, ledger_url, terms=terms)
    world.buy()
    world.close()
    assert (world.rules, world.shop.signed) == ([], 50_000)


@pytest.mark.parametrize("rule", RULES)
def test_with_a_rule_taken_out_a_mutant_of_it_is_committed(rule, monkeypatch):
    """No rule stands beside another one for nothing."""
    monkeypatch.setattr(commit, RULES[rule], lambda changes: None)
    if rule == "worth":  # the signer's own look, the second one of the pair
        monkeypatch.setattr(kernel_ledger, "check_worth", lambda opened, hold: None)
    stopped = []
    for mutant in (each for each in MUTANTS if each.rule == rule):
        with monkeypatch.context() as patched:
            world = World(patched, "memory://", **mutant.world)
            mutant.act(world)
            world.close()
            assert rule not in world.rules, mutant.name
            stopped.append(bool(world.rules))
    assert not all(stopped)
