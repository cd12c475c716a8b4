"""What is corrected later counts where the ledger counts it: in windows, in periods that were asked for, in the CSV."""

import datetime as dt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ledger import Books, Clock, a_hold, usd
from x402guard.errors import IllegalTransition
from x402guard.kernel.rows import Evidence, HoldKind, NodeKind, Window
from x402guard.ledger.authorize import authorize
from x402guard.ledger.events import Capture, Correct, Lapse, Reopen, Void
from x402guard.ledger.sessions import NodeRequest, open_node
from x402guard.views.books import books_of
from x402guard.views.report import Report

DAY_S = 86_400
NIGHT_MS = int(dt.datetime(2026, 11, 20, 23, 59, tzinfo=dt.UTC).timestamp() * 1000)


class World:
    """A customer with a budget a day, one session of it, and holds whose steps a test takes one by one."""

    def __init__(self):
        self.books = Books(session=None, clock=Clock(NIGHT_MS))
        self.books.open_kernel(most_exposed=usd("$50"))
        request = NodeRequest("c", "wallet", NodeKind.BUDGET, "cust", usd("$50"), "op", window=Window("day", "UTC"))
        self.books.change(lambda view: open_node(view, request), nodes=("c", "wallet"))
        self.books.open("s", "$20", parent="c")
        self.count = 0

    def hold(self, amount="$0.10", deadline_s=3 * DAY_S, **more):
        self.count += 1
        hold_id = f"h{self.count}"
        payment = {"scheme": "upto"} if more.get("kind", HoldKind.PAYMENT) is HoldKind.PAYMENT else {}
        more = {"chain_evidence": True, **payment, **more}
        hold = a_hold(hold_id, amount, "s", now_ms=self.books.clock.now_ms, deadline_s=deadline_s, **more)
        facts = {"kind": str(hold.kind), "deadline": hold.deadline_unix, "amount": int(hold.amount)}
        self.books.change(lambda view: authorize(view, hold, facts), nodes=("s",), holds=(hold_id,))
        return hold_id

    def step(self, hold_id, event):
        self.books.step(hold_id, event)

    def tick(self, seconds):
        self.books.clock.tick(seconds)

    def report(self, node="c", **between):
        return Report.of(books_of(self.books.store, node), **between)

    def agrees(self):
        """What the view's evidence adds up to is what the ledger has spent in the present window."""
        view = self.report().view
        assert (view.sums.spent, view.sums.out) == (view.spent, self.books.node("c").live)
        for sums in (
            [row.sums for row in view.kinds],
            [row.sums for row in view.agents],
            [row.sums for row in view.tools],
        ):
            assert not sums or sum(each.spent for each in sums) in (view.spent, 0)
        assert sum(day.sums.spent for day in view.days) == view.spent
        return view


def proof(letter, log=0):
    return f"eip155:84532/0x{letter * 64}/{log}"


def test_a_proof_counts_in_every_period_of_its_call_and_a_later_amount_does_not():
    world = World()
    hold, other = world.hold(), world.hold()
    for each in (hold, other):
        world.step(each, Capture(usd("$0.10"), Evidence.CLAIMED))
    world.tick(5)
    night = world.books.clock.now_ms
    world.step(hold, Correct(usd("$0.10"), Evidence.CHAIN, proof("a")))
    world.tick(DAY_S)
    world.step(other, Correct(usd("$0.08"), Evidence.CHAIN, proof("b")))
    for since in (None, night - 60_000):
        sums = world.report(since_ms=since, until_ms=night + 60_000).view.sums
        assert (sums.proven, sums.claimed) == (usd("$0.10"), usd("$0.10")), "ten cents of the second were no proof"
    sums = world.report(since_ms=night - 60_000).view.sums
    assert (sums.proven, sums.claimed) == (usd("$0.18"), 0)


def test_a_block_that_is_undone_after_midnight_counts_on_the_day_of_the_new_one():
    world = World()
    hold = world.hold()
    world.step(hold, Capture(usd("$0.10"), Evidence.CHAIN_HEAD, proof("a")))
    world.tick(DAY_S)
    world.step(hold, Reopen(world.books.clock.now_ms // 1000))
    assert world.agrees().spent == 0
    world.tick(5)
    world.step(hold, Capture(usd("$0.10"), Evidence.CHAIN, proof("b")))
    assert world.agrees().spent == usd("$0.10")


@pytest.mark.parametrize(
    ("kind", "event", "spent"),
    [
        (HoldKind.PAYMENT, Correct(usd("$0.04"), Evidence.CHAIN, proof("c")), "$0"),
        (HoldKind.LLM, Correct(usd("$0.13"), Evidence.PROVIDER_USAGE), "$0.03"),
        (HoldKind.TOOL, None, "$0"),
    ],
)
def test_what_lapsed_a_day_late_counts_on_its_own_day_also_when_it_is_corrected(kind, event, spent):
    world = World()
    hold = world.hold(deadline_s=30, kind=kind, chain_evidence=False)
    world.tick(DAY_S)
    world.step(hold, Lapse())
    world.agrees()
    if event is not None:
        world.step(hold, event)
    assert world.agrees().spent == usd(spent)


EVENTS = st.one_of(
    st.tuples(st.just("hold"), st.integers(1, 30)),
    st.tuples(st.just("tick"), st.sampled_from([5, 600, DAY_S // 2, DAY_S])),
    st.tuples(
        st.sampled_from(["head", "claim", "chain", "lapse", "void", "reopen", "reopen by head"]), st.integers(0, 3)
    ),
)


@settings(deadline=None)
@given(st.lists(EVENTS, max_size=14))
def test_windows_agree_with_the_ledger_after_any_steps(steps):
    world, holds = World(), []
    for what, number in steps:
        if what == "hold":
            amount = f"$0.{number:02d}"
            holds.append((world.hold(amount, deadline_s=DAY_S, chain_evidence=number % 2 == 0), usd(amount)))
        elif what == "tick":
            world.tick(number)
        elif holds:
            hold, amount = holds[number % len(holds)]
            shown, final = proof("a", int(hold[1:])), proof("b", int(hold[1:]))  # a Transfer proves one payment
            # A correction upwards and then down again, after midnight, is where the ledger itself counts at least.
            most, part = amount * 3 // 4, amount * (number % 3 + 1) // 4
            now_s = world.books.clock.now_ms // 1000
            events = {
                "head": [
                    Capture(most, Evidence.CHAIN_HEAD, shown),
                    Correct(most, Evidence.CHAIN_HEAD, shown),
                ],
                "claim": [Capture(amount, Evidence.CLAIMED)],
                "chain": [Capture(part, Evidence.CHAIN, final), Correct(part, Evidence.CHAIN, final)],
                "lapse": [Lapse()],
                "void": [Void("nothing was sent")],
                "reopen": [Reopen(now_s)],
                "reopen by head": [Reopen(0)],
            }
            for event in events[what]:
                try:
                    world.step(hold, event)
                    break
                except IllegalTransition as error:
                    # The kernel itself refuses one thing here: to void a payment that had ended, and was reopened.
                    assert not error.rule or (what, error.rule) == ("void", "giving back")
        world.agrees()


def test_a_period_believes_what_was_known_in_it_and_counts_a_call_once():
    world = World()
    hold = world.hold()
    world.step(hold, Capture(usd("$0.10"), Evidence.CLAIMED))
    world.tick(DAY_S)
    middle = world.books.clock.now_ms - 1000
    world.step(hold, Correct(usd("$0.04"), Evidence.CHAIN, proof("a")))
    first, second = world.report("wallet", until_ms=middle), world.report("wallet", since_ms=middle)
    assert (first.view.sums.claimed, first.view.sums.proven, first.view.calls_count) == (usd("$0.10"), 0, 1)
    assert (first.view.chain.payments, first.view.chain.proven) == (1, 0)
    assert (second.view.spent, second.view.calls_count, second.view.chain.payments) == (-usd("$0.06"), 0, 0)
    assert any(remark.name == "corrected" and "-$0.06" in remark.words for remark in second.view.remarks)
    for report in (first, second):
        assert sum(row.nanos for row in report.captures()) == report.view.spent
    whole = world.report("wallet")
    assert [(row.evidence, row.now, row.transaction) for row in whole.captures()] == [
        ("claimed", "proven", "0x" + "a" * 64),
        ("chain", "proven", "0x" + "a" * 64),
    ]
    assert (whole.view.sums.proven, whole.view.calls_count) == (usd("$0.04"), 1)


def test_the_csv_of_a_window_is_that_of_the_window():
    world = World()
    world.step(world.hold(), Capture(usd("$0.10"), Evidence.CLAIMED))
    world.tick(DAY_S)
    world.step(world.hold(), Capture(usd("$0.03"), Evidence.CHAIN, proof("a")))
    report = world.report()
    assert sum(row.nanos for row in report.captures()) == report.view.spent == usd("$0.03")
