"""The orders of those who act while a caller carries a payment, as a product: by hand, by the SDK, over A2A.

One purchase is presented, and then others act. A payment is signed anew only once the one before is closed, the books
agree with the chain, and a caller waits only while a payment is under way elsewhere: no longer than an answer takes.
"""

from contextlib import suppress
from itertools import accumulate, product

import pytest

from tests.support.carried import CENT, FLIGHT_S, KINDS, LIMIT, Scene
from x402guard import X402GuardError

ACTORS = {
    "it is told to have failed": lambda scene: scene.end_of(scene.first, "fail"),
    "it is dropped": lambda scene: scene.drops(scene.first),
    "its answer comes": lambda scene: scene.answers(scene.first),
    "the last answer comes": lambda scene: scene.answers(scene.last),
    "its answer comes without a receipt": lambda scene: scene.answers_without_receipt(scene.first),
    "it is redirected": lambda scene: scene.redirects(scene.first),
    "the same task asks": lambda scene: scene.ask("caller"),
    "another task asks": lambda scene: scene.ask("another"),
    "a third task asks": lambda scene: scene.ask("third"),
    "another process asks": lambda scene: scene.ask("elsewhere", 1),
    "a task pays again": lambda scene: scene.ask("who pays again", pays_again=True),
    "the task ends": lambda scene: scene.ends_task(),
    "the seller takes it": lambda scene: scene.takes_all(),
    "a sweep": lambda scene: scene.guards[0][0].sweep(),
    "reconcile": lambda scene: scene.guards[1][0].reconcile(),
    "the deadline passes": lambda scene: scene.clock.passes(62),
    "the flight passes": lambda scene: scene.clock.passes(FLIGHT_S + 1),
    "a restart": lambda scene: scene.restarts(),
    "a crash": lambda scene: scene.crashes(),
    "the owner forgives": lambda scene: scene.forgives(),
    "the owner forgives it under way": lambda scene: scene.forgives(unsafe=True),
}


def actors_of(kind):
    without = {"it is redirected": kind.can_redirect, "a task pays again": kind.can_pay_again}
    return [name for name in ACTORS if without.get(name, True)]


def played(folder, kind, named, order):
    """Play an order of actors; return what is wrong, and what each request got."""
    folder.mkdir()
    scene = Scene(folder, kind, named=named)
    try:
        scene.ask()
        for name in order:
            ACTORS[name](scene)
            scene.clock.passes(1.1)
            check_limit(scene)
        check_waits(scene)
        check_books(scene)
        for at in (0, 1):
            check_another(scene, at)
        return scene.faults, scene.log
    finally:
        scene.close()


def check_limit(scene):
    for at, (_, session, _) in enumerate(scene.guards):
        if session.spent + session.held > LIMIT:
            scene.faults.append(f"over the limit in {at}: {session.spent} + {session.held}")
    if any(scene.hold(nonce) is None for nonce in scene.signed):
        scene.faults.append("one is signed that is not in the ledger")


def check_waits(scene):
    """Who waits, waits for a payment that is under way, and until it is in doubt at most."""
    scene.clock.passes(FLIGHT_S + 10)
    for each in scene.asks:
        if not each.done.done():
            scene.faults.append(f"one still waits after {FLIGHT_S + 10} s")
        elif each.ended_ms is not None and each.waited_s > (FLIGHT_S + 2 if each.may_wait else scene.kind.asks_again_s):
            scene.faults.append(f"one waits for {each.waited_s:.0f} s, {each.may_wait=}")


def check_books(scene):
    """Once the chain can tell of each payment, the books say what it says."""
    scene.clock.passes(200)
    guard, session, store = scene.guards[1]
    with suppress(X402GuardError):
        guard.reconcile()
    if (session.spent, session.held) != (len(scene.taken) * CENT, 0):
        scene.faults.append(f"the books: {session.spent} and {session.held} held; {len(scene.taken)} taken")
    scene.faults.extend(store.audit())
    check_limit(scene)


def check_another(scene, at):
    """One more request gets what the state of the purchase says, at once."""
    is_open = any(map(scene.is_open, scene.signed))
    fits = scene.guards[1][1].spent + CENT <= LIMIT
    said = scene.ask("a last one", at)
    told = said.told
    if said.ended_ms is None or said.waited_s > 1:
        scene.faults.append("the last one waits")
        scene.clock.passes(FLIGHT_S + 10)
    elif scene.named:
        if told is not None and not scene.taken:
            scene.faults.append(f"the last one of its name gets {told}, though none was taken")
    elif is_open and told != "PaidNotDelivered":
        scene.faults.append(f"the last one gets {told}, while a purchase is open")
    elif not is_open and fits and told is not None:
        scene.faults.append(f"the last one gets {told}")
    scene.answers(said if said.payment is not None else None)


WAYS = [(kind, named) for kind in KINDS for named in ((False, True) if kind.has_names else (False,))]
APART = range(1, len(ACTORS) - 1)
"""How far apart two actors of an order can stand in the list of a kind: each kind lacks one of the actors."""


def check(folder, first_way, *steps):
    """Play the orders of actors that stand *steps* apart in their list, the ways to carry a payment in turn.

    Each actor comes once at each place. Over all first ways and steps, each order is played once in each way.
    """
    offsets = list(accumulate(steps, initial=0))
    for start in range(len(ACTORS) - 1):
        kind, named = WAYS[(first_way + start) % len(WAYS)]
        actors = actors_of(kind)
        order = [actors[(start + offset) % len(actors)] for offset in offsets]
        faults, log = played(folder / str(start), kind, named, order)
        assert not faults, (kind.__name__, named, order, faults, log)


def test_each_kind_lacks_one_actor():
    assert {len(actors_of(kind)) for kind in KINDS} == {len(ACTORS) - 1}


IN_MAKE_TEST = (1, 8)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("first_way", range(len(WAYS)))
@pytest.mark.parametrize("step", IN_MAKE_TEST)
def test_orders_of_two(tmp_path, step, first_way):
    check(tmp_path, first_way, step)


@pytest.mark.long
@pytest.mark.one_in(21)
@pytest.mark.parametrize("first_way", range(len(WAYS)))
@pytest.mark.parametrize("step", [step for step in APART if step not in IN_MAKE_TEST])
def test_the_other_orders_of_two(tmp_path, step, first_way):
    check(tmp_path, first_way, step)


@pytest.mark.long
@pytest.mark.one_in(31)
@pytest.mark.parametrize("steps", [each for each in product(APART, repeat=2) if sum(each) != len(ACTORS) - 1])
def test_orders_of_three(tmp_path, steps):
    """In one way each: the whole product takes an hour."""
    check(tmp_path, steps[0] * len(ACTORS) + steps[1], *steps)
