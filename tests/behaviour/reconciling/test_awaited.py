"""A look at the chain that is awaited does what the one that blocks does, and lets the event loop go on meanwhile."""

import threading
from decimal import Decimal

import anyio
import httpx
import pytest

from tests.support.awaited import call, each_way
from tests.support.chain import MockChain
from tests.support.ledger import Clock
from tests.support.merchant import NETWORK, URL, Shop, client, make_guard
from x402guard import LedgerUnavailable, SettlementUncertain
from x402guard.ledger.findings import Unreadable, Unused
from x402guard.stores import open_store

CENT = Decimal("0.01")
OWNERS = pytest.mark.parametrize("of", ["session", "guard"])


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(clock):
    return open_store("memory://", clock_ms=clock)


def lost(session, number):
    """A payment whose answer was lost, so that its money is held."""
    with pytest.raises(SettlementUncertain):
        client(session, Shop(paid=httpx.ReadError("gone"))).get(f"{URL}/{number}")


@each_way
def test_a_session_asks_about_its_own_payments_and_a_guard_about_all(way, store, clock):
    chain = MockChain(lambda _: Unused(clock() // 1000))
    with make_guard(store, chains=chain) as guard:
        session, other = guard.session("a", budget="$1"), guard.session("b", budget="$1")
        with session.child("inner", budget="$0.50") as inner:
            lost(inner, 1)
        lost(session, 2)
        lost(other, 3)
        clock.tick(61)  # nobody can take them any more
        found = call(way, session, "reconcile")
        assert (found.asked, found.expired, found.freed, found.still_open) == (2, 2, 20_000_000, 0)
        assert (session.held, other.held) == (0, CENT)
        found = call(way, guard, "reconcile")
        assert (found.asked, found.expired, found.freed) == (1, 1, 10_000_000)
        assert (session.held, other.held) == (0, 0)
        assert not found.is_alarming


@each_way
@OWNERS
def test_a_chain_that_cannot_be_read_is_named(way, of, store):
    with make_guard(store, chains=MockChain(Unreadable("down"))) as guard, guard.session("s", budget="$1") as session:
        lost(session, 1)
        found = call(way, {"session": session, "guard": guard}[of], "reconcile")
        assert "down" in found.unreadable[NETWORK]
        assert (found.still_open, session.held) == (1, CENT)


@each_way
@OWNERS
def test_a_ledger_that_is_away_raises(way, of, store, monkeypatch):
    def away(*_, **__):
        raise LedgerUnavailable("the disk is full")

    with make_guard(store, chains=MockChain()) as guard, guard.session("s", budget="$1") as session:
        lost(session, 1)
        with monkeypatch.context() as broken:
            broken.setattr(type(store), "transact", away)
            broken.setattr(type(store), "outstanding", away)
            with pytest.raises(LedgerUnavailable, match="the disk is full"):
                call(way, {"session": session, "guard": guard}[of], "reconcile")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@OWNERS
def test_the_event_loop_goes_on_while_the_chain_is_asked(backend, of, store, clock):
    begun, may_end = threading.Event(), threading.Event()

    def slow(_):
        begun.set()
        assert may_end.wait(20)
        return Unused(clock() // 1000)

    async def main(guard, session):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon({"session": session, "guard": guard}[of].areconcile)
            with anyio.fail_after(20):
                while not begun.is_set():
                    await anyio.sleep(0.01)
            may_end.set()  # by the loop that awaits it

    with make_guard(store, chains=MockChain(slow)) as guard, guard.session("s", budget="$1") as session:
        lost(session, 1)
        clock.tick(61)
        anyio.run(main, guard, session, backend=backend)
        assert session.held == 0
