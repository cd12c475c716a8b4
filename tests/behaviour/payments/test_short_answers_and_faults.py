"""Two things go wrong at once around a short answer: what did not reach its caller is presented again, and not signed anew."""

import anyio
import httpx
import pytest

from tests.support.faults import Faulty
from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, receipt
from tests.support.refusals import Chunks
from x402guard import GuardedTransport, LedgerUnavailable
from x402guard.flow.drivers import run
from x402guard.kernel.rows import Claim, Delivery, HoldState
from x402guard.stores import open_store
from x402guard.x402.settlement import Doubt, note_doubt, write_claim

HEAD = {"PAYMENT-RESPONSE": b64(receipt()), "content-length": "9"}
MODES = pytest.mark.parametrize("mode", ["sync", "async"])


class Stop(BaseException):
    """What a caller is interrupted with."""


def short(*pieces, error=None):
    return lambda *_: httpx.Response(200, headers=HEAD, stream=Chunks(*pieces, error=error))


def get(mode, session, shop, use=None):
    """Get it as a stream, and let *use* read it within the block; return the body."""
    if mode == "sync":
        with client(session, shop) as http, http.stream("GET", URL) as response:
            return response.read() if use is None else use(response)

    async def main():
        async with async_client(session, shop) as http, http.stream("GET", URL) as response:
            return await response.aread() if use is None else use(response)

    return anyio.run(main)


@MODES
def test_a_caller_that_is_stopped_after_the_change_and_a_ledger_that_is_busy_then(mode):
    store, shop = Faulty(open_store("memory://")), Shop(paid=short(b"the ", b"goods"))
    failing = []

    def transact(scope, change):
        if failing:
            raise failing.pop()
        result = Faulty.transact(store, scope, change)
        if store.left is not None:
            store.left -= 1
            if store.left == 0:
                failing.append(LedgerUnavailable("busy"))
                raise Stop
        return result

    store.left, store.transact = None, transact
    with make_guard(store) as guard, guard.session("s", budget="$1.00") as session:
        store.left = 2  # the hold, and the claim with the end
        with pytest.raises(Stop):
            get(mode, session, shop)
        store.left = None
        assert guard.context.cut_off
        assert get(mode, session, shop) == b"the goods"
        assert (len(shop.payments), len(shop.nonces), guard.context.cut_off) == (2, 1, set())


@MODES
def test_one_that_broke_while_the_ledger_was_away_is_lost_although_its_caller_goes_on(mode):
    def caught(response):
        with pytest.raises(httpx.ReadError):
            list(response.iter_raw()) if mode == "sync" else response.stream.__aiter__().__anext__().send(None)

    store = Faulty(open_store("memory://"))
    shop = Shop(paid=short(error=lambda: httpx.ReadError("cut")))
    with make_guard(store) as guard, guard.session("s", budget="$1.00") as session:
        store.fail(2, LedgerUnavailable("the disk is full"))
        get(mode, session, shop, caught)
        [hold] = store.outstanding()
        assert hold.delivery is Delivery.LOST
        shop.paid = short(b"the ", b"goods")
        assert get(mode, session, shop) == b"the goods"
        assert (len(shop.payments), len(shop.nonces)) == (2, 1)


def test_a_claim_that_comes_after_what_has_cut_it_off_is_recorded_and_hands_nothing_over():
    shop = Shop(paid=httpx.ReadError("the answer was lost"))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with pytest.raises(Exception, match="no answer"):
            get("sync", session, shop)
        store = guard.shell.store
        [hold] = store.outstanding()
        claim = Claim(hold.amount, "0x" + "ab" * 32)
        run(write_claim(session.context, hold, claim, status=200, end="whole"), guard.shell)
        run(note_doubt(session.context, hold, Doubt("late"), answered=True, end="whole"), guard.shell)
        after = store.hold(hold.id)
        assert (after.state, after.claim, after.delivery) == (HoldState.CAPTURED, claim, Delivery.LOST)


class Reading(httpx.HTTPTransport):
    """A transport that reads what it answers with, as those do that log or cache."""

    def __init__(self, shop):
        super().__init__()
        self.shop = shop

    def handle_request(self, request):
        response = self.shop(request)
        response.read()
        response.stream = Chunks(error=lambda: AssertionError("it is read a second time"))
        return response


@pytest.mark.parametrize("length", [{"content-length": "9"}, {}], ids=["stated", "not stated"])
def test_an_answer_that_the_inner_transport_has_read_is_not_read_again(length):
    headers = {"PAYMENT-RESPONSE": b64(receipt())} | length
    shop = Shop(paid=lambda *_: httpx.Response(200, headers=headers, stream=Chunks(b"the ", b"goods")))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        with httpx.Client(transport=GuardedTransport(session, Reading(shop))) as http:
            answer = http.get(URL)
        assert answer.content == b"the goods"
        assert guard.shell.store.hold(answer.extensions["x402guard"].hold_id).delivery is Delivery.DONE
