"""Corners that reviews found: blocks left out of order, threads used up, loops that end, folders that change."""

import asyncio
import subprocess
import sys
import textwrap
from decimal import Decimal
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread
import httpx
import pytest

from tests.behaviour.payments.test_failing_books import Faulty
from tests.support.ledger import Clock
from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, receipt, required, upto
from x402guard import BudgetExhausted, ConfigError, LedgerUnavailable
from x402guard.stores import open_store

ROOT = Path(__file__).parents[3]
CENT = Decimal("0.01")


def test_a_scope_goes_on_narrowing_when_a_block_around_it_is_left_first():
    with make_guard() as guard:
        session = guard.session("s", budget="$1")

        def generator():
            with session.scope("$0.50"):
                yield

        with session:
            running = generator()
            next(running)
            with session.scope("$0.005"):
                running.close()
                with pytest.raises(BudgetExhausted):
                    client(session, Shop()).get(URL)
            client(session, Shop()).get(URL)


def test_a_session_that_was_left_in_another_context_is_over_here_too():
    import contextvars

    with make_guard() as guard:
        one, two = guard.session("one", budget="$1"), guard.session("two", budget="$1")
        one.__enter__()
        contextvars.copy_context().run(one.__exit__, None, None, None)
        assert client(two, Shop()).get(URL).status_code == 200


def test_a_relative_ledger_stays_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    with make_guard("sqlite:///spend.db") as guard:
        session = guard.session("s", budget="$1")
        monkeypatch.chdir(tmp_path / "sub")
        assert client(session, Shop()).get(URL).status_code == 200
    assert sorted(path.name for path in (tmp_path / "sub").iterdir()) == []


def test_a_guard_that_cannot_start_leaves_a_shared_store_open():
    store = open_store("memory://")
    with make_guard(store, budget="$5") as guard:
        session = guard.session("s", budget="$1")
        with pytest.raises(ConfigError):
            make_guard(store, budget="$6")
        make_guard(store).close()
        assert client(session, Shop()).get(URL).status_code == 200


def test_an_upto_that_was_answered_is_bought_again_and_not_presented_again():
    clock = Clock()
    paid = {"PAYMENT-RESPONSE": b64(receipt(amount="1"))}
    shop = Shop(required(upto(maxTimeoutSeconds=300)), paid=lambda request, shop: httpx.Response(200, headers=paid))
    with make_guard(open_store("memory://", clock_ms=clock)) as guard:
        session = guard.session("s", budget="$1")
        client(session, shop).get(URL)
        clock.tick(45)
        assert not client(session, shop).get(URL).extensions["x402guard"].represented
        assert len(shop.nonces) == 2


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_caller_who_uses_up_the_common_threads_does_not_lock_us_out(backend, tmp_path):
    async def main():
        async with async_client(session, Shop()) as http:

            def from_a_thread(number):
                return anyio.from_thread.run(http.get, f"{URL}/{number}").status_code

            statuses = []

            async def one(number):
                statuses.append(await anyio.to_thread.run_sync(from_a_thread, number))

            with anyio.fail_after(60):
                async with anyio.create_task_group() as tasks:
                    for number in range(45):
                        tasks.start_soon(one, number)
            assert statuses == [200] * 45

    with make_guard(f"sqlite:///{tmp_path / 'l.db'}") as guard:
        session = guard.session("s", budget="$1")
        anyio.run(main, backend=backend)


def test_a_ledger_error_reaches_the_caller_and_nobody_else(tmp_path):
    store = Faulty(open_store(f"sqlite:///{tmp_path / 'l.db'}"))
    store.inline = False
    noise = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))
        async with async_client(session, Shop()) as http:
            store.fail(1, LedgerUnavailable("disk full"))
            with pytest.raises(LedgerUnavailable):
                await http.get(URL)

    with make_guard(store) as guard:
        session = guard.session("s", budget="$1")
        asyncio.run(main())
        import gc

        gc.collect()
        assert noise == []
    store.close()


ENDS = textwrap.dedent("""
    import asyncio, sys, threading, time
    from tests.support.merchant import Shop, async_client, make_guard
    started = threading.Event()
    def answer(request, shop):
        started.set()
        time.sleep(0.5)  # the main thread returns meanwhile
        import httpx
        from tests.support.merchant import b64, receipt
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": b64(receipt())})
    guard = make_guard("sqlite:///" + sys.argv[1])
    session = guard.session("s", budget="$1")
    async def agent():
        async with async_client(session, Shop(paid=answer)) as http:
            response = await http.get("https://a.example/1")
            print(response.status_code, session.spent, session.held, flush=True)
    threading.Thread(target=lambda: asyncio.run(agent())).start()
    started.wait(10)
""")


def test_a_payment_in_a_thread_that_outlives_the_main_one_is_booked(tmp_path):
    command = [sys.executable, "-c", ENDS, str(tmp_path / "l.db")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "200 0.01 0.00\n", done.stderr


def test_a_coroutine_that_is_thrown_away_with_its_loop_notes_the_doubt():
    parked = []

    async def never(request):
        if "payment-signature" in request.headers:
            await asyncio.get_running_loop().create_future()
        return shop(request)

    shop = Shop()
    with make_guard() as guard:
        session = guard.session("s", budget="$1")

        async def main():
            http = async_client(session, never)
            coroutine = http._transport.handle_async_request(httpx.Request("GET", URL))
            while coroutine.send(None) is None:  # turns of the loop, until it waits for the answer
                pass
            parked.append(coroutine)

        asyncio.run(main())
        parked.pop().close()
        assert session.held == CENT
        [hold] = guard.shell.store.outstanding()
        assert hold.doubt
