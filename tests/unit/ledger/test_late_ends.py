"""The end of an answer, as data, changes its hold as the change does that its process could not write."""

from contextlib import suppress
from itertools import product

import pytest

from tests.support.ledger import Books, a_hold, a_transfer, an_id, usd
from tests.support.merchant import make_guard
from x402guard import Policy
from x402guard.flow.capture import Bill, capture_bill
from x402guard.frozen import replace
from x402guard.kernel.proofs import PayAgain
from x402guard.kernel.rows import WALLET, Claim, Delivery, Evidence, HoldKind, HoldState, Nanos, NodeState
from x402guard.ledger.authorize import authorize
from x402guard.ledger.events import Capture, Expire, Lapse
from x402guard.ledger.lost import LateEnd, to_enter, write_end
from x402guard.ledger.purchases import close_purchase, lose, presentation_of, take_over
from x402guard.x402.delivery import note_answer_end
from x402guard.x402.settlement import Doubt, note_doubt, write_claim


def a_context(repeat="allow", **changes):
    with make_guard("memory://", policy=Policy(repeat=repeat)) as guard:
        return replace(guard.context, node_id="s", **changes)


def the_same(hold, before, **opened):
    """Two ledgers with one hold, to which *before* has happened."""
    made = Books(wallet="$5.00"), Books(wallet="$5.00")
    for books in made:
        books.open_kernel(**opened)
        books.change(lambda view: begun(view, replace(hold, presented=0)), nodes=("s",), holds=(hold.id,))
        if hold.presented:
            books.change(lambda view: view.put_hold(hold), holds=(hold.id,))
        if before is not None:
            books.clock.tick(2_000)
            if callable(before):
                books.change(before, holds=(hold.id,))
            else:
                books.step(hold.id, before)
    return made


def begun(view, hold):
    return authorize(view, hold, {"kind": str(hold.kind)})


def compare(hold, before, flow, *, noted=False, **opened):
    """Run the change of a flow in one ledger, and its end as data in another: the hold and what it counts are the same.

    *noted*: marks say as well that the answer was handed over, so the purchase stays open.
    """
    (done, late), effect = the_same(hold, before, **opened), next(flow)
    done.store.transact(effect.scope, effect.change)
    for books in (late, late, done):  # again, as after a process that has ended between the commit and its note
        books.store.transact(*write_end(effect.late))
    one, other = done.store.hold(hold.id), late.store.hold(hold.id)
    if noted:
        assert other.delivery is not Delivery.DONE
        other = replace(other, delivery=one.delivery)
    assert other == one
    assert (late.balances(), late.balances(WALLET)) == (done.balances(), done.balances(WALLET))
    assert late.node().state == done.node().state
    return one


BILLS = {
    "less": Bill(usd("$0.04"), Evidence.PROVIDER_USAGE, {"input_tokens": 40}),
    "nothing": Bill(Nanos(0), Evidence.ESTIMATE),
    "all": Bill(usd("$0.10"), Evidence.ASSUMED, note="no usage was stated"),
    "more": Bill(usd("$0.90"), Evidence.PROVIDER_USAGE, {"input_tokens": 900, "output_tokens": 10**30}),
    "latched": Bill(usd("$0.05"), Evidence.ESTIMATE, note="more than the model can take", latches=True),
    "over": Bill(usd("$1.20"), Evidence.PROVIDER_USAGE, {"input_tokens": 1_200}),
}
STATES = {
    "held": None,
    "lapsed": Lapse(),
    "assumed": Capture(usd("$0.10"), Evidence.ASSUMED),
    "captured": Capture(usd("$0.03"), Evidence.PROVIDER_USAGE),
}


@pytest.mark.parametrize(("bill", "state"), list(product(BILLS, STATES)))
def test_a_bill(bill, state):
    hold = a_hold("call", kind=HoldKind.LLM)
    after = compare(hold, STATES[state], capture_bill(a_context(), hold, BILLS[bill], ()))
    more = max(hold.amount, BILLS[bill].amount)
    owed = {"held": BILLS[bill].amount, "lapsed": more, "assumed": more, "captured": usd("$0.03")}[state]
    assert (after.state, after.captured) == (HoldState.CAPTURED, owed)


def test_a_bill_past_a_limit_trips():
    books, hold = Books(wallet="$5.00"), a_hold("call", kind=HoldKind.LLM)
    books.change(lambda view: begun(view, hold), nodes=("s",), holds=("call",))
    end = LateEnd("call", capture=Capture(usd("$1.20"), Evidence.PROVIDER_USAGE))
    books.store.transact(*write_end(end))
    assert (books.node().state, books.node().terminated_by) == (NodeState.TRIPPED, "overshoot")


SCHEMES = ("exact", "upto")
ENDS = (None, "whole", "late", "cut")
DECIDED = {
    "held": None,
    "on chain": Capture(usd("$0.10"), Evidence.CHAIN, proof=a_transfer()),
    "expired": Expire(1_900_000_000),
    "presented again": lambda view: take_over(view, view.known_hold("paid"), instance="another"),
    "lost": lambda view: lose(view, presentation_of(view.known_hold("paid"))),
    "forgiven": lambda view: close_purchase(view, "paid", PayAgain()),
}
CLAIMS = {"all": Claim(usd("$0.10"), "0x01"), "half": Claim(usd("$0.05"), ""), "absurd": Claim(usd("$0.10"), "x" * 200)}


def a_payment(scheme, presented):
    return a_hold("paid", scheme=scheme, chain_evidence=True, presented=presented, delivery=Delivery.OPEN)


def decided(state, scheme):
    """What has happened to the payment: of an ``upto``, a final block may have taken less."""
    event = DECIDED[state]
    less = state == "on chain" and scheme == "upto"
    return replace(event, amount=usd("$0.05")) if less else event


@pytest.mark.one_in(5)
@pytest.mark.parametrize("repeat", ["allow", "refuse"])
@pytest.mark.parametrize(("state", "presented"), list(product(DECIDED, (0, 1))))
@pytest.mark.parametrize(("scheme", "claim", "status", "end"), list(product(SCHEMES, CLAIMS, (200, 402, 500), ENDS)))
def test_a_claim(scheme, claim, status, end, state, presented, repeat):
    if scheme == "exact" and claim == "half":
        return  # an exact claim is the signed amount
    hold = a_payment(scheme, presented)
    noted = end == "whole" and status == 200 and (repeat == "refuse" or presented > 0)
    flow = write_claim(a_context(repeat), hold, CLAIMS[claim], status=status, end=end)
    after = compare(hold, decided(state, scheme), flow, noted=noted)
    if state in ("held", "on chain", "expired"):
        lost = status >= 400 or end in ("late", "cut")
        assert after.delivery == (Delivery.LOST if lost else Delivery.OPEN if end is None else Delivery.DONE)
    else:
        assert after.delivery == {"presented again": "open"}.get(state, state)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("repeat", ["allow", "refuse"])
@pytest.mark.parametrize("transaction", ["", "0x01"])
@pytest.mark.parametrize(("scheme", "end", "state", "presented"), list(product(SCHEMES, ENDS, DECIDED, (0, 1))))
def test_a_doubt(scheme, end, state, presented, transaction, repeat):
    hold = a_payment(scheme, presented)
    doubt = Doubt("status 200, settlement failed", transaction, "words of the seller")
    noted = end == "whole" and (repeat == "refuse" or presented > 0)
    flow = note_doubt(a_context(repeat), hold, doubt, sent=False, answered=True, end=end)
    compare(hold, decided(state, scheme), flow, noted=noted)


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize(("scheme", "state", "presented"), list(product(SCHEMES, DECIDED, (0, 1))))
def test_a_doubt_without_an_answer(scheme, state, presented, sent):
    """The next process takes the answer for lost, whatever a claim says that waits before it."""
    hold = a_payment(scheme, presented)
    compare(hold, decided(state, scheme), note_doubt(a_context(), hold, Doubt("cancelled"), sent=sent))


def test_a_claim_that_is_believed_and_one_of_an_ended_presentation():
    trusting = {"unsafe_trust_receipts": True}
    context, hold = a_context(**trusting), replace(a_payment("upto", 0), chain_evidence=False)
    after = compare(hold, None, write_claim(context, hold, CLAIMS["half"], status=200, end="whole"), **trusting)
    assert (after.state, after.captured) == (HoldState.CAPTURED, usd("$0.05"))
    again = replace(a_payment("exact", 1), delivery=Delivery.OPEN)
    books = the_same(again, None)[0]
    end = LateEnd(an_id("paid"), presented=0, delivery=Delivery.DONE)
    books.store.transact(*write_end(end))
    assert books.stored("paid").delivery is Delivery.OPEN


def test_a_hold_that_is_in_no_ledger_is_left_out():
    books, end = Books(), LateEnd("never", doubt="no answer came", delivery=Delivery.LOST)
    assert books.store.transact(*write_end(end)) is False
    assert books.store.hold("never") is None


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    ("wallet", "state"), [("$5.00", NodeState.OPEN), ("$0.05", NodeState.TRIPPED), (None, NodeState.OPEN)]
)
def test_a_bill_whose_session_was_archived_meanwhile_counts_in_the_wallet(wallet, state, times, tmp_path):
    books, end = (
        Books(f"sqlite:///{tmp_path}/l.db", wallet=wallet),
        LateEnd("never", capture=Capture(usd("$0.10"), Evidence.PROVIDER_USAGE)),
    )
    for _ in range(times):
        assert books.store.transact(*write_end(end)) is True
    after = next(node for node in books.store.nodes() if node.id == WALLET)
    assert (after.counted, after.state) == (usd("$0.10"), state)
    assert books.store.audit() == []
    books.store.close()


WRITES = {
    "a claim": lambda context, hold: write_claim(context, hold, CLAIMS["all"], status=200, end="whole"),
    "a doubt": lambda context, hold: note_doubt(context, hold, Doubt("no"), answered=True, end="whole"),
    "an end": lambda context, hold: note_answer_end(context, presentation_of(hold), "whole"),
}


@pytest.mark.parametrize("repeat", ["allow", "refuse"])
@pytest.mark.parametrize("cut", ["never", "known", "written"])
@pytest.mark.parametrize(("what", "presented"), list(product(WRITES, (0, 1))))
def test_an_end_that_is_written_after_its_answer_was_cut_off_hands_nothing_over(what, presented, cut, repeat):
    """The write takes longer than two seconds, so the answer goes on; its caller is cancelled before it has the body."""
    hold, context = a_payment("exact", presented), a_context(repeat)
    books = the_same(hold, None)[0]
    flow, answer = WRITES[what](context, hold), None
    if cut == "known":
        context.cut_off.add(presentation_of(hold))
    elif cut == "written":  # by a later purchase of this process
        books.change(lambda view: lose(view, presentation_of(hold)), holds=("paid",))
    with suppress(StopIteration):
        while True:
            effect = flow.send(answer)
            answer = books.store.transact(effect.scope, effect.change)
    assert books.stored("paid").delivery is (Delivery.DONE if cut == "never" else Delivery.LOST)
    bought = books.store.marks("bought", "").values()
    assert bool(bought) is (repeat == "refuse" and cut == "never")


def test_what_was_lost_is_at_no_time_handed_over_by_who_enters_it():
    """Between the two ends of one answer, another machine may ask for the same purchase."""
    hold, claim = a_payment("exact", 0), CLAIMS["all"]
    done = LateEnd(an_id("paid"), claim=claim, believe=True, delivery=Delivery.DONE)
    lost, other = LateEnd(an_id("paid"), delivery=Delivery.LOST), LateEnd("other", delivery=Delivery.DONE)
    earlier = LateEnd(an_id("paid"), presented=1, delivery=Delivery.DONE)
    books, seen = the_same(hold, None)[0], []
    for end in to_enter([done, earlier, other, lost]):
        books.store.transact(*write_end(end))
        seen.append(books.stored("paid").delivery)
    assert seen == ["open", "open", "open", "lost"]
    assert books.stored("paid").state is HoldState.CAPTURED
    assert to_enter([done, earlier, other]) == [done, earlier, other]


def test_that_an_answer_was_cut_off_survives_a_power_cut():
    """Its end as handed over may be on the disk already: without the loss, the same request is signed anew."""
    hold, context = a_payment("exact", 0), a_context()
    for end in ("cut", "late"):
        flow, answer = note_answer_end(context, presentation_of(hold), end), None
        books, scopes = the_same(hold, None)[0], []
        with suppress(StopIteration):
            while True:
                effect = flow.send(answer)
                scopes.append(effect.scope)
                answer = books.store.transact(effect.scope, effect.change)
        assert scopes[-1].durable
        assert books.stored("paid").delivery is Delivery.LOST
