"""Threads that are used up, hang or outlive the main one, and event loops that end: what is paid is booked."""

import asyncio
import textwrap
import threading
from decimal import Decimal
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread
import httpx
import pytest

from tests.support import processes
from tests.support.merchant import URL, Shop, async_client, make_guard
from tests.support.signers import SpySigner

ROOT = Path(__file__).parents[3]
CENT = Decimal("0.01")


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
    done = processes.run(ENDS, tmp_path / "l.db")
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


def test_a_hung_signer_holds_up_nobody_else():
    import threading
    import time

    import anyio

    from tests.support.merchant import KEY, async_client
    from x402guard import LocalSigner

    release = threading.Event()

    class Remote:
        inline = False

        def __init__(self):
            self._signer = LocalSigner.from_key(KEY)
            self.address = self._signer.address
            self.bind = self._signer.bind

        def sign(self, hold):
            release.wait(20)
            return self._signer.sign(hold)

    async def main():
        with make_guard(signer=Remote()) as guard:
            session = guard.session("s", budget="$1")
            async with async_client(session, Shop()) as http:
                start = time.monotonic()
                with anyio.move_on_after(0.2):
                    async with anyio.create_task_group() as tasks:
                        for number in range(4):
                            tasks.start_soon(http.get, f"{URL}/{number}")
                assert time.monotonic() - start < 5
                assert session.held == 4 * CENT  # each may have been signed
                assert all(hold.doubt for hold in guard.shell.store.outstanding())
            release.set()

    anyio.run(main)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_signer_may_go_back_to_the_loop(backend):
    async def main():
        async def wait():
            await anyio.sleep(0)

        signer = SpySigner(before=lambda _: (anyio.from_thread.check_cancelled(), anyio.from_thread.run(wait)))
        with make_guard(signer=signer) as guard:
            session = guard.session("s", budget="$1")
            async with async_client(session, Shop()) as http:
                assert (await http.get(URL)).status_code == 200
        assert len(signer.signed) == 1

    anyio.run(main, backend=backend)


def test_sessions_that_end_slowly_keep_no_guard_open():
    release = threading.Event()

    async def main():
        async def ends_slowly(number):
            async with slow.asession(f"s{number}", budget="$0.01") as session:
                close = session.close
                session.close = lambda *args, **more: (release.wait(20), close(*args, **more))

        with make_guard() as slow:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for number in range(45):
                        tasks.create_task(ends_slowly(number))
                    await asyncio.sleep(0.3)
                    async with asyncio.timeout(5), make_guard():
                        pass
                    release.set()
            finally:
                release.set()

    asyncio.run(main())


OUTLIVES = textwrap.dedent("""
    import asyncio, threading
    from tests.support.merchant import make_guard

    async def main():
        async with make_guard():
            while threading.main_thread().is_alive():
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
        print("closed", flush=True)

    threading.Thread(target=lambda: asyncio.run(main())).start()
""")


def test_a_guard_closes_in_a_loop_that_outlives_the_main_thread():
    done = processes.run(OUTLIVES)
    assert done.stdout == "closed\n", done.stderr
