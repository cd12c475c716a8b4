"""A tool whose task is cancelled, at whatever await: what never ran is not held, what ran costs what it said or its ceiling."""

from decimal import Decimal

import anyio
import anyio.lowlevel
import pytest

from tests.support.cancellation import cancelled_after
from tests.support.faults import Tripwire
from x402guard import Guard, TokenBudget
from x402guard.stores import open_store

STEPS = 30
both_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])


class Turns:
    """A tool of three turns of the event loop; it remembers how far it came."""

    def __init__(self):
        self.begun = self.ended = False

    async def __call__(self):
        self.begun = True
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        self.ended = True
        return "found"


def as_block(session, turns):
    async def use():
        async with session.hold("serp", up_to="$0.05") as job:
            await turns()
            job.capture("$0.02")

    return use


def as_tool(session, turns):
    @session.tool(
        cost=lambda _: "$0.02", up_to="$0.05", mode="raw", render=lambda result, _mode: result, max_tokens=100
    )
    async def serp():
        return await turns()

    return serp


FORMS = pytest.mark.parametrize("form", [as_block, as_tool])


def outcome(session):
    """``nothing``, ``ceiling`` or ``said``; anything else is a hold that leaks or a cost that is lost."""
    assert (session.held, session.tokens.reserved) == (0, 0)
    return {Decimal(0): "nothing", Decimal("0.05"): "ceiling", Decimal("0.02"): "said"}[session.spent]


@both_loops
@FORMS
def test_cancellation_at_every_await_leaves_true_books(backend, form):
    outcomes = set()
    for steps in range(STEPS):
        with Guard(ledger="memory://") as guard, guard.session("s", budget="$1", tokens=TokenBudget(1_000)) as session:
            turns = Turns()
            finished = anyio.run(cancelled_after, steps, form(session, turns), backend=backend)
            found = outcome(session)
            assert found == "said" if turns.ended else found == ("ceiling" if turns.begun else "nothing"), steps
            assert turns.ended or not finished
            outcomes.add(found)
    assert outcomes >= {"ceiling", "said"}  # both were really met


# Which transaction is which: a block holds, then captures; a tool reserves, holds, captures, records.
PLACES = [(as_block, 1, "nothing"), (as_block, 2, "said"), (as_tool, 1, "nothing"), (as_tool, 2, "nothing"),
          (as_tool, 3, "said"), (as_tool, 4, "said")]  # fmt: skip


@both_loops
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("form", "n", "expected"), PLACES)
def test_cancelled_around_any_of_its_transactions_a_tool_is_booked_as_far_as_it_ran(
    backend, form, n, expected, after, tmp_path
):
    store = Tripwire(open_store(f"sqlite:///{tmp_path / 'ledger.db'}"), n, after=after)
    turns = Turns()

    async def main():
        store.token = anyio.lowlevel.current_token()
        with anyio.CancelScope() as store.scope:
            await form(session, turns)()

    with Guard(ledger=store) as guard, guard.session("s", budget="$1", tokens=TokenBudget(1_000)) as session:
        anyio.run(main, backend=backend)
        assert outcome(session) == expected
        assert turns.ended is (expected == "said")
    store.close()


@both_loops
def test_a_reported_call_is_owed_whatever_becomes_of_its_task(backend, tmp_path):
    async def report(session):
        await session.arecord_usage("openai", "gpt-4o-mini", {"input_tokens": 100, "output_tokens": 10})

    for url in ("memory://", f"sqlite:///{tmp_path / 'ledger.db'}"):
        for steps in range(1, 8):
            with Guard(ledger=url) as guard, guard.session(f"s{steps}", budget="$1") as session:
                begun = []

                async def use(session=session, begun=begun):
                    begun.append(1)
                    await report(session)

                anyio.run(cancelled_after, steps, use, backend=backend)
                assert (session.spent, session.tokens.used) == ((Decimal("0.000021"), 110) if begun else (0, 0)), steps
