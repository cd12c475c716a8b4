"""Real HTTP, real threads and tasks: as many LLM calls go out as the budget is for, and not one more."""

import threading
from contextlib import AsyncExitStack
from decimal import Decimal

import anyio
import httpx
import pytest

from tests.support.llm_provider import BOOK, COUNTER
from x402guard import (
    AsyncGuardedTransport,
    BudgetExhausted,
    Guard,
    GuardedTransport,
    Metering,
    ModelPrice,
    PaymentRefused,
    Policy,
)
from x402guard.testing import Completion, LlmServer

pytestmark = pytest.mark.xdist_group("llm-oversell")

WORKERS, CENT = 32, Decimal("0.01")
ASK = {"model": "house-model", "max_completion_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
PRICE = ModelPrice(input="$0", output="$1000")  # ten tokens, as asked for and as used: a cent, held and captured


@pytest.fixture(scope="module")
def server():
    with LlmServer(Completion(output_tokens=10)) as running:
        yield running


@pytest.fixture(params=[pytest.param("memory", marks=pytest.mark.long), "sqlite"])
def guard(request, tmp_path, server):
    server.forget()
    ledger = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'spend.db'}"
    endpoints, models = {f"{server.base('openai')}/v1": "openai"}, {"house-model": PRICE}
    metering = Metering(endpoints=endpoints, models=models, counter=COUNTER, prices=BOOK)
    policy = Policy(loop=None)  # they all ask the same
    with Guard(signer=None, ledger=ledger, metering=metering, policy=policy, budget="$5.00") as guard:
        yield guard


@pytest.fixture(params=[320, pytest.param(1_600, marks=pytest.mark.long)])
def calls(request):
    return request.param


@pytest.fixture
def session(guard, calls):
    with guard.session("fleet", budget=fitting(calls) * CENT) as session:
        yield session


def fitting(calls):
    return calls * 5 // 16


def check(server, session, answered, calls):
    fits = fitting(calls)
    assert len(server.calls) == answered == fits
    report = session.report().to_dict()
    assert (session.spent, session.held, session.remaining) == (fits * CENT, 0, 0)  # overshoot $0.00
    assert (report["llm"]["calls"], report["evidence"]["provider_usage"]) == (fits, f"{fits * CENT}")
    [refusals] = report["refusals"]
    assert (refusals["rule"], refusals["count"]) == ("budget", calls - fits)


def test_32_threads_send_exactly_what_fits(server, session, calls):
    barrier, answered, failed = threading.Barrier(WORKERS), [], []

    def work():
        inner = httpx.HTTPTransport(verify=False)
        with httpx.Client(
            transport=GuardedTransport(session, inner), base_url=server.base("openai"), timeout=60
        ) as http:
            barrier.wait()
            for _ in range(calls // WORKERS):
                try:
                    assert http.post("/v1/chat/completions", json=ASK).status_code == 200
                    answered.append(1)
                except BudgetExhausted:
                    pass
                except BaseException as error:
                    failed.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    check(server, session, len(answered), calls)


@pytest.mark.one_in(3)
def test_as_many_tasks_send_exactly_what_fits(server, session, calls):
    """All at once on one loop; 32 clients, because a pool of one client is quadratic in the requests that wait."""
    answered = []

    async def call(http):
        try:
            assert (await http.post("/v1/chat/completions", json=ASK)).status_code == 200
            answered.append(1)
        except BudgetExhausted:
            pass

    def new_client():
        inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=4), verify=False)
        transport = AsyncGuardedTransport(session, inner)
        return httpx.AsyncClient(transport=transport, base_url=server.base("openai"), timeout=60)

    async def main():
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(new_client()) for _ in range(WORKERS)]
            async with anyio.create_task_group() as tasks:
                for number in range(calls):
                    tasks.start_soon(call, clients[number % WORKERS])

    anyio.run(main)
    check(server, session, len(answered), calls)


def test_calls_and_streams_of_siblings_share_one_budget(server, guard):
    """Held is held, whoever holds it: what one leaves open, no other may spend."""
    with guard.session("parent", budget="$0.05") as parent:
        children = [parent.child(f"c{number}", budget="$0.05") for number in range(3)]
        clients = [
            httpx.Client(transport=GuardedTransport(child), base_url=server.base("openai")) for child in children
        ]
        sent, left_open, refused = 0, [], 0
        for number in range(12):
            http = clients[number % 3]
            request = http.build_request("POST", "/v1/chat/completions", json={**ASK, "stream": number % 2 == 0})
            try:
                left_open.append(http.send(request, stream=True))
                sent += 1
            except PaymentRefused:
                refused += 1
        assert (sent, refused, parent.held, parent.remaining) == (5, 7, Decimal("0.05"), 0)
        for response in left_open:
            response.read()
        assert (parent.spent, parent.held) == (Decimal("0.05"), 0)
        for http in clients:
            http.close()
    assert len(server.calls) == 5
