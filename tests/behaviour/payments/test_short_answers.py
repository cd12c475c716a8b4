"""A short answer is read before it is recorded, in one change: in every order as a body of unknown length is, in two."""

import itertools
import time
import zlib
from decimal import Decimal

import anyio
import httpx
import pytest

from tests.support.faults import Faulty
from tests.support.ledger import Clock
from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, open_terms, receipt, required, upto
from tests.support.refusals import Chunks
from x402guard import LedgerUnavailable, Policy, Rule, Timeouts
from x402guard.flow.drivers import run
from x402guard.frozen import replace
from x402guard.kernel.rows import Claim, Delivery, HoldState
from x402guard.ledger.view import Scope
from x402guard.policy.breakers import Breaker
from x402guard.stores import open_store
from x402guard.x402.flow import SHORT_BYTES
from x402guard.x402.settlement import Doubt, note_doubt, write_claim
from x402guard.x402.wire import stated_length

GOODS = b"the goods"
OTHER = "0x" + "22" * 20

HEADS = {
    "receipt": (200, receipt()),
    "no receipt": (200, None),
    "of another payer": (200, {**receipt(), "payer": OTHER}),
    "a failure": (200, receipt(success=False, transaction="")),
    "a failure with its transaction": (200, receipt(success=False)),
    "redirected": (302, receipt()),
    "a 404": (404, receipt()),
    "a 500": (500, receipt()),
    "a 500 without a receipt": (500, None),
}


class Stop(BaseException):
    """What a caller is interrupted with."""


def broken():
    return httpx.ReadError("the body was cut")


def interrupted():
    return Stop()


ENDS = {
    "whole": {"pieces": (b"the ", b"goods")},
    "empty": {"pieces": ()},
    "broken": {"pieces": (b"the ",), "error": broken},
    "broken at once": {"pieces": (), "error": broken},
    "interrupted": {"pieces": (b"the ",), "error": interrupted},
    "unread": {"pieces": (b"the ", b"goods"), "caller": "closes"},
    "closed early": {"pieces": (b"the ", b"goods"), "caller": "reads a part"},
    "an error of the caller": {"pieces": (b"the ", b"goods"), "caller": "fails"},
    "packed": {"pieces": (zlib.compress(GOODS),), "encoding": "deflate"},
    "not what it says": {"pieces": (b"no gzip",), "encoding": "gzip"},
}

POLICIES = {
    "allow": Policy(breaker=Breaker(failures=3)),
    "refuse": Policy(breaker=Breaker(failures=3), repeat="refuse"),
}


def answer(head, end, length):
    """The answer, and whether its head states its *length*."""
    status, said = HEADS[head]
    headers = {} if said is None else {"PAYMENT-RESPONSE": b64(said)}
    if "encoding" in end:
        headers["content-encoding"] = end["encoding"]
    if status == 302:
        headers["location"] = f"{URL}/elsewhere"
    size = sum(map(len, end["pieces"])) + (7 if "error" in end else 0)
    headers |= {} if length is None else {"content-length": str(size if length == "stated" else length)}
    return httpx.Response(status, headers=headers, stream=Chunks(*end["pieces"], error=end.get("error")))


def buy(mode, session, shop, caller="reads", url=URL):
    """Buy, use the answer as *caller* says, and return what became of it."""
    try:
        if mode == "sync":
            with client(session, shop) as http, http.stream("GET", url) as response:
                if caller == "fails":
                    raise ValueError("of the caller")
                if caller == "reads a part":
                    next(response.iter_raw(), None)
                return (response.status_code, response.read() if caller == "reads" else caller)

        async def main():
            async with async_client(session, shop) as http, http.stream("GET", url) as response:
                if caller == "fails":
                    raise ValueError("of the caller")
                if caller == "reads a part":
                    async for _ in response.aiter_raw():
                        break
                return (response.status_code, await response.aread() if caller == "reads" else caller)

        return anyio.run(main)
    except (Exception, Stop) as error:
        return type(error).__name__, str(error).partition("(hold")[0]


def books(store, session):
    """What a run leaves in the ledger, without ids and times."""
    entries = store.entries("run")
    # An answer of a known length is handed over before its caller drops it, and lost then: the last word counts, in the row.
    kinds = [e.event if e.event != "event" else e.facts()["name"] for e in entries if e.event != "answer"]
    holds = [
        (h.state, h.captured, h.evidence, h.delivery, h.doubt, h.claim, h.presented)
        for h in map(store.hold, dict.fromkeys(entry.hold_id for entry in entries if entry.hold_id))
    ]
    return sorted(kinds), holds, session.spent, session.held


def told(head, end, length, *, mode, policy, terms, fault=None):
    """Buy once with this answer and, if told so, a fault in the ledger; then ask twice more. Returns all that was seen."""
    store = Faulty(open_store("memory://", clock_ms=Clock()))
    shop = Shop(terms=terms, paid=lambda *_: answer(head, end, length))
    seen = []
    with make_guard(store, policy=POLICIES[policy]) as guard, guard.session("s", budget="$1.00", id="run") as session:
        if fault is not None:
            store.fail(fault[0], fault[1](), committed=fault[2])
        seen += [buy(mode, session, shop, end.get("caller", "reads")), books(guard.shell.store, session)]
        store.countdown = None
        shop.paid = None
        for _ in range(2):
            seen += [buy(mode, session, shop), len(shop.payments), len(shop.nonces)]
        seen.append(books(guard.shell.store, session))
        assert not guard.context.in_flight
    return seen


@pytest.mark.one_in(5)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("terms", [required(), required(upto())], ids=["exact", "upto"])
@pytest.mark.parametrize(("head", "end"), [*itertools.product(HEADS, ENDS)])
def test_it_leaves_the_books_that_a_body_of_unknown_length_leaves(mode, policy, terms, head, end):
    case = {"mode": mode, "policy": policy, "terms": terms}
    assert told(head, ENDS[end], "stated", **case) == told(head, ENDS[end], None, **case)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("committed", [False, True], ids=["not written", "written"])
@pytest.mark.parametrize("error", [lambda: LedgerUnavailable("the disk is full"), interrupted], ids=["full", "stopped"])
@pytest.mark.parametrize("at", [2, 3])
@pytest.mark.parametrize(("head", "end"), [*itertools.product(("receipt", "no receipt"), ENDS)])
def test_what_did_not_reach_its_caller_is_never_signed_anew_whatever_the_ledger_does(
    mode, policy, committed, error, at, head, end
):
    seen = told(head, ENDS[end], "stated", mode=mode, policy=policy, terms=required(), fault=(at, error, committed))
    first, _, _, payments, signed = seen[:5]
    had = first in ((200, b""), (200, GOODS)) or ENDS[end].get("caller") in ("closes", "reads a part")
    if not had:
        assert (payments, signed) == (2, 1), seen


LENGTHS = {
    "short": (str(SHORT_BYTES), 2), "of no bytes": ("0", 2), "none": (None, 3), "long": (str(SHORT_BYTES + 1), 3),
    "negative": ("-1", 3), "many digits": ("1" * 5_000, 3), "no number": ("0x10", 3), "signed": ("+5", 3), "grouped": ("5_0", 3), "twice": ("9, 9", 3), "": ("", 3),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("length", LENGTHS)
def test_only_a_short_one_costs_no_change_of_its_own(mode, length):
    stated, changes = LENGTHS[length]

    class Counting(Faulty):
        count = 0

        def transact(self, scope, change):
            self.count += 1
            return super().transact(scope, change)

    store = Counting(open_store("memory://"))
    shop = Shop(paid=lambda *_: answer("receipt", ENDS["whole"], stated))
    with make_guard(store) as guard, guard.session("s", budget="$1.00") as session:
        before = store.count
        assert buy(mode, session, shop) == (200, GOODS)
        assert store.count - before == changes


def at_the_head(session, shop, then):
    """Ask for it, look at its receipt before a byte of its body is read, let *then* happen, and read it."""
    with client(session, shop) as http:
        response = http.send(http.build_request("GET", URL), stream=True)
        before = response.extensions["x402guard"]
        then(before)
        response.read()
        response.close()
    return before, response.extensions["x402guard"]


def test_its_receipt_says_what_was_recorded_with_its_end():
    for head, says in {
        "receipt": ("captured", "claimed", False),
        "no receipt": ("held", None, True),
        "a failure with its transaction": ("held", None, True),
    }.items():
        shop = Shop(paid=lambda *_, head=head: answer(head, ENDS["whole"], "stated"))
        with make_guard() as guard, guard.session("s", budget="$1.00") as session:
            held = []
            receipts = at_the_head(
                session, shop, lambda was, held=held: held.append(guard.shell.store.hold(was.hold_id))
            )
            assert (held[0].state, held[0].delivery) == (says[0], Delivery.DONE)
            found = [(each.state, each.evidence, each.in_doubt, each.delivery) for each in receipts]
            assert found == [(*says, "done"), (*says, "done")]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_that_broke_is_lost_even_if_its_caller_does_not_read_it(mode):
    end = {"pieces": (b"the ",), "error": broken, "caller": "closes"}
    first, _, _, payments, signed = told("receipt", end, "stated", mode=mode, policy="allow", terms=required())[:5]
    assert (first, payments, signed) == ((200, "closes"), 2, 1)


@pytest.mark.parametrize("head", ["a 404", "a 500", "a 500 without a receipt"])
def test_one_that_delivers_nothing_is_recorded_at_once(head):
    shop = Shop(paid=lambda *_: answer(head, ENDS["whole"], "stated"))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:

        def lost(was):
            assert guard.shell.store.hold(was.hold_id).delivery is Delivery.LOST

        at_the_head(session, shop, lost)


def test_one_to_a_payment_that_was_presented_before_is_recorded_at_once():
    shop = Shop(paid=httpx.ReadError("the answer was lost"))
    with make_guard() as guard, guard.session("s", budget="$1.00") as session:
        assert buy("sync", session, shop)[0] == "SettlementUncertain"
        shop.paid = lambda *_: answer("receipt", ENDS["whole"], "stated")

        def captured(was):
            assert was.represented
            assert guard.shell.store.hold(was.hold_id).state is HoldState.CAPTURED

        at_the_head(session, shop, captured)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("length", ["stated", None])
def test_those_that_break_open_the_circuit(mode, length):
    shop = Shop(terms=open_terms, paid=lambda *_: answer("receipt", ENDS["broken"], length))
    with make_guard(policy=POLICIES["allow"]) as guard, guard.session("s", budget="$1.00") as session:
        seen = [buy(mode, session, shop, url=f"{URL}/{number}")[0] for number in range(5)]
        assert seen == ["ReadError", "ReadError", "ReadError", "CircuitOpen", "CircuitOpen"]


def test_two_lengths_are_none_nor_is_that_of_a_packed_body():
    assert stated_length((("Content-Length", "9"),)) == 9
    assert stated_length((("content-length", "9"), ("Content-Length", "9"))) is None
    assert stated_length(()) is None
    assert stated_length((("content-length", "9"), ("transfer-encoding", "chunked"))) is None
    assert stated_length((("content-length", "9"), ("content-encoding", "gzip"))) is None


@pytest.mark.parametrize("end", ["late", "whole", "cut"])
@pytest.mark.parametrize("outcome", [None, Doubt("no receipt")], ids=["a claim", "a doubt"])
def test_one_that_is_recorded_again_because_its_commit_had_no_answer_counts_once(end, outcome):
    shop = Shop(paid=httpx.ReadError("the answer was lost"))
    with make_guard(policy=POLICIES["allow"]) as guard, guard.session("s", budget="$1.00", id="run") as session:
        assert buy("sync", session, shop)[0] == "SettlementUncertain"
        store, context = guard.shell.store, session.context
        [lost] = store.outstanding()
        store.transact(Scope(holds=(lost.id,)), lambda view: view.put_hold(replace(lost, delivery=Delivery.OPEN)))
        seen = []
        for _ in range(2):
            if outcome is None:
                run(write_claim(context, lost, Claim(lost.amount, ""), status=200, end=end), guard.shell)
            else:
                run(note_doubt(context, lost, outcome, sent=False, answered=True, end=end), guard.shell)
            seen.append((store.hold(lost.id), store.marks("breaker", ""), len(store.entries("run"))))
        assert seen[0] == seen[1]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_purchase_begins_before_the_ledger_has_what_was_cut_off(mode):
    store = Faulty(open_store("memory://"))
    shop = Shop(terms=open_terms, paid=lambda *_: answer("receipt", ENDS["whole"], "stated"))
    with make_guard(store) as guard, guard.session("s", budget="$1.00") as session:
        store.fail(3, LedgerUnavailable("the disk is full"))
        assert buy(mode, session, shop, "fails")[0] == "ValueError"
        assert len(guard.context.cut_off) == 1
        store.fail(1, LedgerUnavailable("the disk is full"))
        assert buy(mode, session, shop, url=f"{URL}/other")[0] == "LedgerUnavailable"
        assert len(shop.payments) == 1
        assert buy(mode, session, shop, url=f"{URL}/other") == (200, GOODS)
        assert not guard.context.cut_off
        assert buy(mode, session, shop) == (200, GOODS)
        assert (len(shop.payments), len(shop.nonces)) == (3, 2)


def test_what_is_recorded_before_a_body_is_read():
    """A short answer is read first, but for one that delivers nothing or repeats a payment."""

    class Looking(Chunks):
        def __iter__(self):
            [hold] = [hold for hold in map(store.hold, store.unsettled(0)) if hold is not None]
            seen.append((hold.state, hold.delivery, hold.presented))
            yield from super().__iter__()

    def sells(status):
        headers = {"PAYMENT-RESPONSE": b64(receipt()), "content-length": str(len(GOODS))}
        return lambda *_: httpx.Response(status, headers=headers, stream=Looking(GOODS))

    seen = []
    for status, presented, says in (
        (200, 0, (HoldState.HELD, Delivery.OPEN, 0)),
        (500, 0, (HoldState.CAPTURED, Delivery.LOST, 0)),
        (200, 1, (HoldState.CAPTURED, Delivery.OPEN, 1)),
    ):
        store, shop = open_store("memory://"), Shop(paid=sells(status))
        with make_guard(store) as guard, guard.session("s", budget="$1.00") as session:
            if presented:
                shop.paid = httpx.ReadError("the answer was lost")
                assert buy("sync", session, shop)[0] == "SettlementUncertain"
                shop.paid = sells(status)
            assert buy("sync", session, shop) == (status, GOODS)
            assert seen.pop() == says


class Scopes(Faulty):
    """Keeps the scopes of its changes."""

    def __init__(self, store):
        super().__init__(store)
        self.scopes = []

    def transact(self, scope, change):
        self.scopes.append(scope)
        return super().transact(scope, change)


@pytest.mark.parametrize(("end", "durable"), [("whole", False), ("broken", True)])
def test_one_that_breaks_is_on_disk_before_the_next_call(end, durable):
    store = Scopes(open_store("memory://"))
    shop = Shop(paid=lambda *_: answer("receipt", ENDS[end], "stated"))
    with make_guard(store) as guard, guard.session("s", budget="$1.00") as session:
        before = len(store.scopes)
        buy("sync", session, shop)
        assert [scope.durable for scope in store.scopes[before : before + 2]] == [True, durable]


def test_an_offer_that_is_paid_by_hand_ends_in_one_change():
    store = Scopes(open_store("memory://"))
    with make_guard(store) as guard, guard.session("s", budget="$1.00") as session:
        payment = session.pay(required())
        before = len(store.scopes)
        assert payment.settled(receipt()).delivery == "done"
        assert len(store.scopes) - before == 1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_short_one_that_is_late_says_what_was_paid(mode):
    class Slow(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self):
            yield b"the "
            time.sleep(1.1)
            yield b"goods"

        async def __aiter__(self):
            yield b"the "
            await anyio.sleep(1.1)
            yield b"goods"

    headers = {"PAYMENT-RESPONSE": b64(receipt()), "content-length": "9"}
    shop = Shop(paid=lambda *_: httpx.Response(200, headers=headers, stream=Slow()))
    with make_guard(policy=Policy(timeouts=Timeouts(payment_s=1))) as guard, guard.session("s", budget="$1") as session:
        name, text = buy(mode, session, shop)
        assert name == "CallTimeout"
        assert "$0.01" in text
        assert "was taken" in text


def test_one_that_is_cut_off_while_another_request_for_it_waits_is_presented_to_that_one():
    """The other one has begun before; its approver takes a minute, and meanwhile the ledger cannot be written."""
    store = Faulty(open_store("memory://"))
    shop = Shop(terms=open_terms, paid=lambda *_: answer("receipt", ENDS["whole"], "stated"))
    error, opened, asked = ValueError("of the caller"), [], []

    def person(request):
        asked.append(request)
        if opened:
            store.fail(1, LedgerUnavailable("busy"))
            opened.pop().__exit__(ValueError, error, None)
        return True

    policy = Policy(rules=[Rule(name="ask", action="ask")], breaker=None, loop=None)
    with make_guard(store, policy=policy, approver=person) as guard, guard.session("s", budget="$1.00") as session:
        with client(session, shop) as http:
            stream = http.stream("GET", URL)
            stream.__enter__()
            opened.append(stream)
            assert buy("sync", session, shop) == (200, GOODS)
        assert (len(shop.payments), len(shop.nonces)) == (2, 1)
        assert session.spent == Decimal("0.01")
        assert len(asked) == 2  # once for each
