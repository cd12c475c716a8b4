"""Books that fail while a tool runs, or is cancelled: its result and its own error come through."""

import asyncio

import pytest

from tests.support.faults import FailingFrom
from x402guard import Guard, LedgerUnavailable
from x402guard.stores import open_store


@pytest.mark.parametrize("at", range(1, 8))
@pytest.mark.parametrize("raises", [False, True])
def test_no_failing_books_take_a_paid_result_or_hide_a_tools_own_error(at, raises, caplog):
    store = FailingFrom(open_store("memory://"))
    with Guard(ledger=store) as guard:
        session = guard.session("s", budget="$1.00")
        ran = []

        @session.tool(cost="$0.01", mode="raw", render=lambda result, _mode: result)
        def serp():
            ran.append(store.count)
            if raises:
                raise ZeroDivisionError
            return "found"

        store.at, store.count = at, 0
        if at <= 2:  # tokens, then dollars: it never ran
            with pytest.raises(LedgerUnavailable):
                serp()
            assert not ran
        elif raises:
            with pytest.raises(ZeroDivisionError):
                serp()
        else:
            assert serp() == "found"
        assert bool(caplog.records) is (at in (2, 3, 4))
        store.at = None


@pytest.mark.parametrize("ledger", ["memory", "sqlite"])
def test_cancelled_while_the_books_fail_is_cancelled_all_the_same(tmp_path, ledger):
    store = FailingFrom(open_store("memory://" if ledger == "memory" else f"sqlite:///{tmp_path / 'l.db'}"))

    async def main():
        with Guard(ledger=store) as guard:
            session = guard.session("s", budget="$1.00")

            async def use():
                async with session.hold("render", up_to="$0.50"):
                    store.at, store.count = 1, 0
                    await asyncio.sleep(10)

            task = asyncio.create_task(use())
            while store.at is None:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            store.at = None

    asyncio.run(main())
