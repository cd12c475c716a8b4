"""A chain that hangs, dies or is another one: no paid answer waits for it, and nothing is concluded from silence."""

import threading
import time

import pytest

from tests.support.market import AMOUNTS, DIME, TAKEN, market
from x402guard import Chain, ConfigError, PolicyDenied
from x402guard.testing import Server, rpc_app

pytestmark = [pytest.mark.chain, pytest.mark.xdist_group("reconcile")]


class Gate:
    """An engine whose answers wait behind a gate; how many do is counted."""

    def __init__(self, engine):
        self.engine, self.open, self.waiting, self.dead = engine, threading.Event(), 0, False
        self.open.set()

    def rpc(self, method, params):
        if self.dead:
            raise ConnectionError("dead")
        if not self.open.is_set():
            self.waiting += 1
            assert self.open.wait(30), "nobody opened the gate"
        return self.engine.rpc(method, params)


@pytest.fixture
def shop(make_engine, tmp_path):
    with market(make_engine, f"sqlite:///{tmp_path / 'spend.db'}") as opened:
        yield opened


@pytest.fixture
def gate(shop):
    made = Gate(shop.net.engine)
    with Server(rpc_app(made)) as server:
        made.url = server.url
        yield made
        made.open.set()


def until(true):
    give_up = time.monotonic() + 20
    while not true():
        assert time.monotonic() < give_up, "it did not come to it in twenty seconds"
        time.sleep(0.01)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", AMOUNTS)
def test_a_paid_answer_waits_for_no_chain(shop, gate, kind, mode):
    guard = shop.guard(chains={shop.net.network: Chain(gate.url, timeout_s=60)}, background_checks=True)
    session = guard.session("s", budget="$1.00")
    shop.seller.says = gate.open.clear  # returns None: settle, and from now on the chain hangs
    answer = shop.ask(session, kind, mode)
    assert answer.status_code == 200
    assert not gate.open.is_set()
    assert session.spent + session.held == AMOUNTS[kind]
    until(lambda: gate.waiting)
    assert str(guard.shell.store.hold(answer.extensions["x402guard"].hold_id).evidence) != "chain"
    gate.open.set()
    until(lambda: session.report().to_dict()["settlement"]["proven"] != "0.00")
    assert (session.spent, session.held) == (TAKEN if kind == "upto" else DIME, 0)


def test_a_dead_endpoint_is_passed_over_in_turn(shop, gate):
    gate.dead = True
    chains = {shop.net.network: [gate.url, shop.net.rpc]}
    guard = shop.guard(chains=chains)
    session = guard.session("s", budget="$1.00")
    assert shop.ask(session, "upto").status_code == 200
    assert session.reconcile().captured == 1
    assert session.spent == TAKEN


def test_where_no_endpoint_answers_nothing_is_signed_and_nothing_concluded(shop, gate):
    guard = shop.guard(chains={shop.net.network: gate.url})
    session = guard.session("s", budget="$1.00")
    shop.ask(session, "upto")
    gate.dead = True
    found = session.reconcile()
    assert (found.still_open, list(found.unreadable)) == (1, [shop.net.network])
    assert session.held == AMOUNTS["upto"]
    guard.close()
    again = shop.guard(chains={shop.net.network: gate.url})
    with pytest.raises(PolicyDenied, match="chain_unreadable"):
        shop.ask(again.session("t", budget="$1.00"), "eip3009")
    assert len(shop.seller.kept) == 1


def test_an_endpoint_of_another_chain_is_a_wrong_setting_before_anything_is_signed(shop, make_engine):
    from x402guard.testing import Testnet

    with Testnet(routes=(), make_engine=make_engine, chain_id=421614) as other:
        guard = shop.guard(chains={shop.net.network: other.rpc})
        session = guard.session("s", budget="$1.00")
        with pytest.raises(ConfigError, match="serves chain 421614"):
            shop.ask(session, "eip3009")
        assert (shop.seller.kept, session.held) == ([], 0)
