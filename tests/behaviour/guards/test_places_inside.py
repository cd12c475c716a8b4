"""Calls inside calls: those that have all the slots may wait for slots themselves. Each gets one, and no other one more than its number."""

import asyncio
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import anyio
import httpx
import pytest

from tests.behaviour.guards.test_places import PAID, lazily
from tests.support.llm_provider import CHAT, ask, chunk, sse
from tests.support.merchant import URL, Shop, async_client, b64, client, make_guard, required
from x402guard import Bulkhead, CircuitOpen, Policy

WAIT_S = 5  # far below the five minutes of a slot


def opened(most):
    return make_guard(
        policy=Policy(breaker=None, loop=None, bulkhead=Bulkhead(per_host=most, per_tool=most, per_llm_host=most))
    )


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("x402guard.flow.admission.LONGEST_WAIT_S", WAIT_S)


def answer(request):
    if str(request.url).startswith(URL):
        if "payment-signature" in request.headers:
            return lazily(200, PAID, b"a", b"b")
        return httpx.Response(402, headers={"PAYMENT-REQUIRED": b64(required())})
    usage = {"prompt_tokens": 20, "completion_tokens": 5}
    return lazily(200, {"content-type": "text/event-stream"}, *sse(chunk("a"), chunk("b", usage=usage), "[DONE]"))


def build(http, what, n):
    if what == "payment":
        return http.build_request("GET", f"{URL}/{n}")
    return http.build_request("POST", CHAT, json=ask(stream=True, seed=n))


OUTER_INNER = [("llm", "llm"), ("payment", "payment"), ("llm", "payment"), ("payment", "llm")]


@pytest.mark.parametrize("most", [1, 2, 8])
@pytest.mark.parametrize(("outer", "inner"), OUTER_INNER)
@pytest.mark.parametrize("backend", ["threads", "asyncio", "trio"])
def test_answers_that_are_read_piece_by_piece_with_calls_between(backend, outer, inner, most):
    """Both hosts are full of answers whose readers wait for the other one, or for the same."""
    done = []
    with opened(most) as guard, guard.session("s", budget="$5") as session:
        every = threading.Barrier(most)

        def one(n):
            with session, client(session, answer) as http:
                first = http.send(build(http, outer if n % 2 else inner, n), stream=True)
                every.wait(10)
                for piece in first.iter_raw():
                    if piece:
                        again = http.send(build(http, inner if n % 2 else outer, f"{n} {len(done)}"), stream=True)
                        again.read()
                        done.append(again.status_code)

        async def one_awaited(n, ready):
            async with async_client(session, answer) as http:
                first = await http.send(build(http, outer if n % 2 else inner, n), stream=True)
                ready.append(n)
                while len(ready) < most:
                    await anyio.sleep(0.001)
                async for piece in first.aiter_raw():
                    if piece:
                        again = await http.send(build(http, inner if n % 2 else outer, f"{n} {len(done)}"), stream=True)
                        await again.aread()
                        done.append(again.status_code)

        async def all_of_them():
            ready = []
            async with anyio.create_task_group() as group:
                for n in range(most):
                    group.start_soon(one_awaited, n, ready)

        if backend == "threads":
            with ThreadPoolExecutor(most) as pool:
                for each in [pool.submit(one, n) for n in range(most)]:
                    each.result()
        else:
            anyio.run(all_of_them, backend=backend)
        assert done
        assert set(done) == {200}
        assert session.held == 0
        assert (session.shell.slots._taken, session.shell.slots._extra) == ({}, {})


@pytest.mark.parametrize("most", [1, 2, 8])
@pytest.mark.parametrize("awaits", [False, True])
def test_two_tools_that_use_each_other(awaits, most):
    with opened(most) as guard, guard.session("s", budget="$5") as session:
        every, ended = threading.Barrier(2 * most), []
        if not awaits:
            tools = []

            def call(own):
                def body(which):
                    if which == "outer":
                        every.wait(10)
                        tools[1 - own]("inner")
                    ended.append(which)

                return session.tool(cost="$0.01", name=f"tool_{own}")(body)

            tools += [call(0), call(1)]
            threads = [threading.Thread(target=session.bind(tools[n % 2]), args=("outer",)) for n in range(2 * most)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert not any(thread.is_alive() for thread in threads)
        else:

            async def go():
                inside, full, tools = [], asyncio.Event(), []

                def declared(own):
                    async def body(which):
                        if which == "outer":
                            inside.append(own)
                            if len(inside) == 2 * most:
                                full.set()
                            await full.wait()
                            await tools[1 - own]("inner")
                        ended.append(which)

                    return session.tool(cost="$0.01", name=f"tool_{own}")(body)

                tools += [declared(0), declared(1)]
                await asyncio.wait_for(asyncio.gather(*(tools[n % 2]("outer") for n in range(2 * most))), WAIT_S)

            asyncio.run(go())
        assert sorted(ended) == ["inner"] * 2 * most + ["outer"] * 2 * most
        assert session.shell.slots._taken == {}


@pytest.mark.parametrize("awaits", [False, True])
def test_a_tool_that_uses_itself_keeps_others_out(awaits):
    """One at a time, however deep: what another caller sees between is never half done."""
    with opened(1) as guard, guard.session("s", budget="$5") as session:
        inside, seen = [], []

        if awaits:

            @session.tool(cost="$0.001", name="nested")
            async def nested(who, depth):
                inside.append(who)
                seen.append(set(inside))
                if depth:
                    await nested(who, depth - 1)
                await asyncio.sleep(0.002)
                seen.append(set(inside))
                inside.remove(who)

            async def go():
                await asyncio.wait_for(asyncio.gather(*(nested(who, 3) for who in "abcd")), WAIT_S)

            asyncio.run(go())
        else:

            @session.tool(cost="$0.001", name="nested")
            def nested(who, depth):
                inside.append(who)
                seen.append(set(inside))
                if depth:
                    nested(who, depth - 1)
                time.sleep(0.002)
                seen.append(set(inside))
                inside.remove(who)

            with ThreadPoolExecutor(4) as pool:
                for each in [pool.submit(session.bind(nested), who, 3) for who in "abcd"]:
                    each.result(WAIT_S)
        assert {len(each) for each in seen} == {1}
        assert len(seen) == 32


@pytest.mark.parametrize("most", [1, 2, 8])
def test_a_tool_that_fans_out_to_itself_in_bound_threads(most):
    with opened(most) as guard, guard.session("s", budget="$5") as session:
        leaves = []

        @session.tool(cost="$0.001", name="tree")
        def tree(depth):
            if not depth:
                leaves.append(depth)
                return
            with ThreadPoolExecutor(3) as pool:
                for each in [pool.submit(session.bind(tree), depth - 1) for _ in range(3)]:
                    each.result(4 * WAIT_S)

        with ThreadPoolExecutor(most) as pool:
            for each in [pool.submit(session.bind(tree), 3) for _ in range(most)]:
                each.result(4 * WAIT_S)
        assert len(leaves) == 27 * most


def test_one_that_is_outside_waits_while_those_inside_go_on():
    with opened(1) as guard, guard.session("s", budget="$5") as session:
        order, is_in = [], threading.Event()

        @session.tool(cost="$0.001", name="tool")
        def tool(what):
            order.append(what)
            if what == "outer":
                is_in.set()
                time.sleep(0.05)  # the stranger is in the queue, before what is inside
                tool("inner")
                order.append("end")

        stranger = threading.Thread(target=lambda: (is_in.wait(5), session.bind(tool)("stranger")))
        stranger.start()
        tool("outer")
        stranger.join(5)
        assert order == ["outer", "inner", "end", "stranger"]


def test_calls_that_do_not_wait_for_slots_are_waited_for():
    """Whoever has the slots works: nothing is stuck, and no one gets more."""
    with opened(1) as guard, guard.session("s", budget="$5") as session:
        shop = Shop(paid=lambda request, _shop: lazily(200, PAID, b"a"))
        is_in, let_go = threading.Event(), threading.Event()

        @session.tool(cost="$0.001", name="slow")
        def holder():
            is_in.set()
            let_go.wait(20)

        thread = threading.Thread(target=session.bind(holder))
        thread.start()
        assert is_in.wait(5)

        @session.tool(cost="$0.001", name="asks")
        def asks():
            holder()

        with client(session, shop) as http, pytest.raises(CircuitOpen):
            first = http.send(http.build_request("GET", URL), stream=True)
            try:
                asks()
            finally:
                first.close()
                let_go.set()
                thread.join(5)


@pytest.mark.parametrize("at_once", [8, 16])
def test_uses_inside_uses_of_the_same_tool_run_at_once(at_once):
    """All slots have calls that only wait for their inner ones: eight of those work, and not one after the other."""
    with opened(8) as guard, guard.session("s", budget="$5") as session:
        inner, most = [], []

        @session.tool(cost="$0.001", name="research")
        async def research(depth):
            if depth:
                await research(depth - 1)
                return
            inner.append(depth)
            most.append(len(inner))
            await asyncio.sleep(0.1)
            inner.pop()

        async def go():
            await asyncio.gather(*(research(1) for _ in range(at_once)))

        asyncio.run(go())
        assert (max(most), len(most)) == (8, at_once)


def test_one_task_that_opens_answers_for_others_to_read_waits_for_these():
    """What it has opened it does not read: nothing of it is inside the reading."""
    counts = {"now": 0, "most": 0}

    class Body(httpx.AsyncByteStream):
        async def __aiter__(self):
            await anyio.sleep(0.02)
            yield b"a"

        async def aclose(self):
            counts["now"] -= 1

    async def seller(request):
        if "payment-signature" not in request.headers:
            return httpx.Response(402, headers={"PAYMENT-REQUIRED": b64(required(url=str(request.url)))})
        counts["now"] += 1
        counts["most"] = max(counts["most"], counts["now"])
        return httpx.Response(200, headers=PAID, stream=Body())

    async def go(session):
        async with async_client(session, seller) as http, asyncio.TaskGroup() as tasks:
            for n in range(12):
                tasks.create_task((await http.send(http.build_request("GET", f"{URL}/{n}"), stream=True)).aread())

    with opened(2) as guard, guard.session("s", budget="$5") as session:
        asyncio.run(go(session))
        assert counts == {"now": 0, "most": 2}


@pytest.mark.parametrize("most", [1, 2, 8])
def test_a_tool_that_uses_itself_and_a_busy_one_at_the_same_time(most):
    with opened(most) as guard, guard.session("s", budget="$5") as session:
        search = session.tool(cost="$0.01", name="search")(asyncio.sleep)

        @session.tool(cost="$0.01", name="research")
        async def research(depth):
            if depth:
                await asyncio.gather(search(0.01), research(depth - 1))

        async def go():
            others = [asyncio.create_task(search(0.2)) for _ in range(most)]
            await asyncio.sleep(0.05)
            await asyncio.gather(*(research(1) for _ in range(most)), *others)

        asyncio.run(go())  # a use that gets no slot is refused


@pytest.mark.parametrize("status", [402, 500])
def test_an_answer_that_is_read_ahead_is_not_read_by_its_caller(status):
    """It is too large to be read to its end ahead, and another task reads it: the one that opens them waits."""
    counts = {"now": 0, "most": 0}

    class Body(httpx.AsyncByteStream):
        async def __aiter__(self):
            for _ in range(40):
                yield b"x" * 8_192
            await anyio.sleep(0.05)
            yield b"y"

        async def aclose(self):
            counts["now"] -= 1

    async def provider(_request):
        counts["now"] += 1
        counts["most"] = max(counts["most"], counts["now"])
        return httpx.Response(status, headers={"content-type": "application/json"}, stream=Body())

    async def go(session):
        async with async_client(session, provider) as http, asyncio.TaskGroup() as tasks:
            for n in range(8):
                tasks.create_task((await http.send(build(http, "llm", n), stream=True)).aread())

    with opened(2) as guard, guard.session("s", budget="$5") as session:
        asyncio.run(go(session))
        assert counts["most"] <= 3  # a slot is left before the body is closed


def test_a_tool_whose_caller_is_interrupted_keeps_its_slot_until_its_thread_ends():
    with opened(1) as guard, guard.session("s", budget="$5") as session:
        running, most, go_on = [], [], threading.Event()
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))

        @session.tool(cost="$0.01", name="slow", timeout_s=30)
        def slow(waits):
            running.append(waits)
            most.append(len(running))
            if waits:
                timer.start()
                go_on.wait(10)
            running.remove(waits)

        with pytest.raises(KeyboardInterrupt):
            slow(True)
        timer.join()
        threading.Timer(0.2, go_on.set).start()
        slow(False)
        assert most == [1, 1]
