"""One purchase, one payment: whoever finds out that it was taken, and wherever the agent asks again."""

import signal
import subprocess
import sys
import time
from contextlib import suppress
from decimal import Decimal

import httpx
import pytest

from tests.support import processes
from tests.support.faults import FailingFrom
from tests.support.ledger import Clock, weigh_proven
from tests.support.merchant import URL, Shop, b64, make_guard, receipt
from tests.support.refusals import Chunks, events, fetch
from tests.support.signers import SpySigner
from x402guard import PaidNotDelivered, Policy, PolicyDenied, SettlementUncertain, SignerError
from x402guard.flow.drivers import run
from x402guard.flow.surroundings import Surroundings
from x402guard.frozen import replace
from x402guard.kernel.rows import Claim, Delivery
from x402guard.ledger.evidence import weigh_marks
from x402guard.ledger.findings import Settled
from x402guard.ledger.purchases import presentation_of
from x402guard.ledger.view import Scope
from x402guard.stores import open_store
from x402guard.stores.sqlite import SqliteStore
from x402guard.x402.delivery import note_answer_end
from x402guard.x402.settlement import Doubt, note_doubt, write_claim

MODES = pytest.mark.parametrize("mode", ["sync", "async"])


def taken_on_chain(guard, hold):
    """What any reader of the chain writes into the ledger: this payment was taken, in a final block."""
    finding = Settled(hold.payment().amount_atomic, "0x" + "ab" * 32, 0, final=True)
    scope = Scope(nodes=(hold.node_id,), holds=(hold.id,), marks=weigh_marks(hold, finding), durable=True)
    guard.shell.store.transact(scope, lambda view: weigh_proven(view, hold.id, finding))


def lost_and_taken(mode, guard, session):
    """Buy once without an answer, and find on the chain that the payment was taken. Returns the shop and the hold."""
    shop = Shop(paid=httpx.ReadError("the answer was lost"))
    with pytest.raises(SettlementUncertain):
        fetch(mode, session, shop)
    [hold] = guard.shell.store.outstanding()
    taken_on_chain(guard, hold)
    return shop, hold


@MODES
def test_a56_a_payment_found_on_the_chain_before_the_retry_is_presented_again_and_never_signed_anew(mode, ledger):
    with make_guard(ledger) as guard, guard.session("s", budget="$1.00", id="run") as session:
        shop, hold = lost_and_taken(mode, guard, session)
        for _ in range(3):
            with pytest.raises(PaidNotDelivered) as caught:
                fetch(mode, session, shop)
            error = caught.value
            assert (error.hold_id, error.transaction) == (hold.id, "0x" + "ab" * 32)
            assert "pay_again" in error.advice
            assert error.money_may_have_moved
        assert (len(shop.payments), len(shop.nonces)) == (4, 1)
        assert len(events(session, "authorize")) == 1


@MODES
@pytest.mark.parametrize("fails", ["500", "no answer", "no connection"])
def test_a56_a_seller_that_fails_to_a_taken_payment_delivers_to_it_later(mode, fails, ledger):
    fault = {
        "500": lambda *_: httpx.Response(500),
        "no answer": httpx.ReadError("the answer was lost"),
        "no connection": httpx.ConnectError("refused"),
    }[fails]
    with make_guard(ledger) as guard, guard.session("s", budget="$1.00", id="run") as session:
        shop, _ = lost_and_taken(mode, guard, session)
        shop.paid = fault
        for _ in range(2):
            with pytest.raises(PaidNotDelivered):
                fetch(mode, session, shop)
        shop.paid = None
        answer = fetch(mode, session, shop)
        assert (answer.status_code, answer.extensions["x402guard"].represented) == (200, True)
        assert (len(shop.nonces), session.spent) == (1, Decimal("0.01"))


def test_a56_a_signer_that_refuses_a_taken_payment_does_not_end_its_purchase(ledger):
    def refuse(hold):
        if hold.presented == 1:
            raise SignerError("the device is locked")

    with (
        make_guard(ledger, signer=SpySigner(before=refuse)) as guard,
        guard.session("s", budget="$1.00", id="run") as session,
    ):
        shop, _ = lost_and_taken("sync", guard, session)
        with pytest.raises(PaidNotDelivered):
            fetch("sync", session, shop)
        assert len(shop.payments) == 1
        shop.paid = None
        assert fetch("sync", session, shop).extensions["x402guard"].represented
        assert len(shop.nonces) == 1


@MODES
def test_a56_a_seller_with_an_idempotency_key_delivers_to_the_payment_that_is_presented_again(mode, ledger):
    with make_guard(ledger) as guard, guard.session("s", budget="$1.00", id="run") as session:
        shop, hold = lost_and_taken(mode, guard, session)
        shop.paid = lambda _request, _shop: httpx.Response(200, text="the goods")  # and no receipt
        answer = fetch(mode, session, shop)
        assert (answer.text, answer.extensions["x402guard"].represented) == ("the goods", True)
        assert guard.shell.store.hold(hold.id).delivery is Delivery.DONE
        assert len(shop.nonces) == 1
        fetch(mode, session, shop)  # this is the next purchase
        assert len(shop.nonces) == 2


@MODES
def test_a56_a_body_that_the_caller_closes_early_was_handed_over(mode, ledger):
    answer = httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())}, stream=Chunks(b"some", b"more"))
    shop = Shop(paid=lambda *_: answer)
    with make_guard(ledger) as guard, guard.session("s", budget="$1.00", id="run") as session:
        reads_a_part(mode, session, shop)
        [hold_id] = guard.shell.store.unsettled(0)
        assert guard.shell.store.hold(hold_id).delivery is Delivery.DONE


def reads_a_part(mode, session, shop, then=None):
    import anyio

    from tests.support.merchant import async_client, client

    if mode == "sync":
        with client(session, shop) as http, http.stream("GET", URL) as response:
            next(response.iter_raw())
            if then is not None:
                raise then
        return

    async def main():
        async with async_client(session, shop) as http, http.stream("GET", URL) as response:
            async for _ in response.aiter_raw():
                break
            if then is not None:
                raise then

    anyio.run(main)


@pytest.fixture
def killed(ledger):
    """A ledger left behind by a buyer that was killed after its payment had left, with the nonce that left."""
    child = processes.start("tests.support.dying_buyer", ledger, "sent", "kill", module=True, strict=True)
    told, _ = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    [nonce] = told.split()
    return ledger, int(nonce, 16)


@MODES
def test_a57_a_restart_on_another_machine_waits_and_then_presents_the_same_payment(killed, mode, monkeypatch):
    ledger, nonce = killed
    monkeypatch.setattr(Surroundings, "machine", lambda _: "another machine")
    monkeypatch.setattr(SqliteStore, "lives", lambda *_: None)  # its disk has no locks
    clock, shop = Clock(int(time.time() * 1000)), Shop()
    store = open_store(ledger, clock_ms=clock)
    with make_guard(store, budget="$1.00", flight_s=30) as guard, guard.session("run", id="run") as session:
        with pytest.raises(PolicyDenied) as caught:
            fetch(mode, session, shop)
        assert (caught.value.rule, shop.payments) == ("in_flight", [])
        assert 0 < caught.value.retry_after <= 30
        assert caught.value.money_may_have_moved
        clock.tick(caught.value.retry_after + 1)
        assert fetch(mode, session, shop).extensions["x402guard"].represented
        assert shop.nonces == {nonce}
    store.close()


RETRY = """
import sys
from tests.support.merchant import Shop, make_guard
from tests.support.refusals import fetch
shop = Shop()
with make_guard(sys.argv[1], budget="$1.00") as guard, guard.session("run", id="run") as session:
    try:
        fetch("sync", session, shop)
    except Exception as error:
        print(type(error).__name__, error.rule, error.retry_after)
print(sorted(map(hex, shop.nonces)))
"""


def test_a57_a_restart_in_another_pid_namespace_presents_the_same_payment_at_once(killed):
    """As of a container that was killed: the lock that it held for its life is free."""
    ledger, nonce = killed
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", RETRY, ledger]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `unshare` here, which makes a pid namespace")
    if "unshare failed" in done.stderr:
        pytest.skip(f"this user may make no pid namespace: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"['{nonce:#x}']"]


def test_a56_the_end_of_an_earlier_presentation_says_nothing_about_a_later_one(ledger):
    shop = Shop(paid=lambda *_: httpx.Response(500))
    with (
        make_guard(ledger, policy=Policy(breaker=None)) as guard,
        guard.session("s", budget="$1.00", id="run") as session,
    ):
        hold_id = fetch("sync", session, shop).extensions["x402guard"].hold_id
        del shop.paid
        assert fetch("sync", session, shop).extensions["x402guard"].presented == 1  # the goods
        run(note_answer_end(guard.context, (hold_id, 0), "cut"), guard.shell)
        assert guard.shell.store.hold(hold_id).delivery is Delivery.DONE
        run(note_answer_end(guard.context, (hold_id, 1), "cut"), guard.shell)
        assert guard.shell.store.hold(hold_id).delivery is Delivery.LOST


EARLIER_ENDS = {
    "a doubt": lambda guard, hold: note_doubt(guard.context, hold, Doubt("no answer: ReadTimeout")),
    "a late end": lambda guard, hold: note_answer_end(guard.context, presentation_of(hold), "late"),
    "a claim with a failure": lambda guard, hold: write_claim(
        guard.context, hold, Claim(hold.amount, "0x" + "ab" * 32), status=500
    ),
}


@pytest.mark.parametrize("end", EARLIER_ENDS)
def test_a56_an_earlier_call_that_ends_late_leaves_a_presentation_that_is_under_way(ledger, end):
    ids = []

    def ends_while_the_next_is_under_way(_request, _shop):
        [row] = guard.shell.store.outstanding()
        ids.append(row.id)
        assert (row.presented, row.delivery) == (1, Delivery.OPEN)
        run(EARLIER_ENDS[end](guard, replace(row, presented=0)), guard.shell)
        assert guard.shell.store.hold(row.id).delivery is Delivery.OPEN
        return httpx.Response(500)

    shop = Shop(paid=httpx.ReadError("the answer was lost"))
    with (
        make_guard(ledger, policy=Policy(breaker=None)) as guard,
        guard.session("s", budget="$1.00", id="run") as session,
    ):
        with pytest.raises(SettlementUncertain):
            fetch("sync", session, shop)
        shop.paid = ends_while_the_next_is_under_way
        with suppress(PaidNotDelivered):  # after the claim, its own 500 is that
            fetch("sync", session, shop)
        hold = guard.shell.store.hold(ids[0])
        assert (hold.presented, hold.delivery) == (1, Delivery.LOST)


@MODES
def test_a56_an_answer_that_cannot_be_decoded_was_not_handed_over(mode, ledger):
    def garbage(_request, _shop):
        headers = {"PAYMENT-RESPONSE": b64(receipt()), "content-encoding": "gzip"}
        return httpx.Response(200, headers=headers, stream=Chunks(b"this is not gzip"))

    shop = Shop(paid=garbage)
    with make_guard(ledger) as guard, guard.session("s", budget="$1.00", id="run") as session:
        for _ in range(3):
            with pytest.raises(httpx.DecodingError):
                fetch(mode, session, shop)
        assert (len(shop.payments), len(shop.nonces)) == (3, 1)


@MODES
def test_a56_an_error_of_the_caller_in_the_middle_of_a_body_leaves_the_purchase_open(mode, ledger):
    shop = Shop(
        paid=lambda *_: httpx.Response(
            200, headers={"PAYMENT-RESPONSE": b64(receipt())}, stream=Chunks(b"some", b"more")
        )
    )
    with make_guard(ledger) as guard, guard.session("s", budget="$1.00", id="run") as session:
        with pytest.raises(KeyboardInterrupt):
            reads_a_part(mode, session, shop, then=KeyboardInterrupt)
        try:
            raise ValueError("of something else")
        except ValueError:  # an error that is being handled already says nothing about this answer
            reads_a_part(mode, session, shop)
        assert len(shop.nonces) == 1
        [hold_id] = guard.shell.store.unsettled(0)
        assert guard.shell.store.hold(hold_id).delivery is Delivery.DONE


@MODES
@pytest.mark.parametrize(
    ("content", "changes"),
    [
        ({"stream": Chunks(b"all")}, 3),
        ({"stream": Chunks(b"all"), "headers": {"content-length": "3"}}, 2),
        ({"content": b"all"}, 2),
    ],
    ids=["streamed", "short", "in memory"],
)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a56_an_interrupt_while_the_end_of_an_answer_is_written_leaves_the_purchase_open(mode, content, changes, after):
    class Interrupted:
        inline = True

        def __init__(self, store):
            self.store, self.left = store, None

        def __getattr__(self, name):
            return getattr(self.store, name)

        def transact(self, scope, change):
            result = None if self.left == 1 and not after else self.store.transact(scope, change)
            if self.left is not None:
                self.left -= 1
                if self.left == 0:
                    self.left = None
                    raise KeyboardInterrupt
            return result

    def sells(_request, _shop):
        headers = {"PAYMENT-RESPONSE": b64(receipt()), **content.get("headers", {})}
        return httpx.Response(200, **content | {"headers": headers})

    shop = Shop(paid=sells)
    store = Interrupted(open_store("memory://"))
    with make_guard(store) as guard, guard.session("s", budget="$1.00", id="run") as session:
        store.left = changes  # the hold, the claim, the end; of a short answer, both are one
        with pytest.raises(KeyboardInterrupt):
            fetch(mode, session, shop)
        assert fetch(mode, session, shop).extensions["x402guard"].represented
        assert len(shop.nonces) == 1


@MODES
def test_a56_a_doubt_that_could_not_be_written_keeps_the_purchase_open_all_the_same(mode):
    store = FailingFrom(open_store("memory://"))
    shop = Shop(paid=httpx.ReadError("the answer was lost"))
    with make_guard(store) as guard, guard.session("s", budget="$1.00", id="run") as session:
        store.at = store.count + 2  # the hold is written, and nothing after it
        with pytest.raises(SettlementUncertain):
            fetch(mode, session, shop)
        store.at, shop.paid = None, None  # the disk has room again, long before flight_s
        assert fetch(mode, session, shop).extensions["x402guard"].represented
        assert len(shop.nonces) == 1


@MODES
def test_a56_a_body_that_broke_while_the_ledger_could_not_be_written_keeps_the_purchase_open(mode):
    def full():
        store.at = 0  # the disk is full from here on
        return httpx.ReadError("cut")

    shop = Shop(
        paid=lambda *_: httpx.Response(
            200, headers={"PAYMENT-RESPONSE": b64(receipt())}, stream=Chunks(b"some", error=full)
        )
    )
    store = FailingFrom(open_store("memory://"))
    with make_guard(store) as guard, guard.session("s", budget="$1.00", id="run") as session:
        with pytest.raises(httpx.ReadError):
            fetch(mode, session, shop)
        store.at, shop.paid = None, None
        assert fetch(mode, session, shop).extensions["x402guard"].represented
        assert len(shop.nonces) == 1
