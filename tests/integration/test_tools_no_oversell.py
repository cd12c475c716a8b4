"""One budget, many who charge tools to it at once: threads, tasks and processes buy exactly what it pays for."""

import asyncio
import threading
from decimal import Decimal

import pytest

from tests.support import processes
from x402guard import BudgetExhausted, Guard, Policy

FITS = 100


@pytest.fixture(params=["memory", "sqlite"])
def session(request, tmp_path):
    ledger = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'l.db'}"
    with Guard(ledger=ledger, policy=Policy(loop=None)) as guard, guard.session("s", budget="$1.00") as session:
        yield session


def check(session, made):
    report = session.report().to_dict()
    assert (made, session.spent, session.held) == (FITS, Decimal("1.00"), 0)
    assert (report["tools"]["calls"], report["state"]) == (FITS, "open")


def test_32_threads_buy_exactly_what_fits(session):
    made, gate = [], threading.Barrier(32)

    @session.tool(cost="$0.01")
    def serp(query):
        made.append(query)

    def use(number):
        gate.wait()
        for call in range(8):
            try:
                if call % 2:
                    serp(number * 8 + call)
                else:
                    with session.hold("serp", up_to="$0.01") as job:
                        made.append(number)
                        job.capture("$0.01")
            except BudgetExhausted:
                continue

    threads = [threading.Thread(target=session.bind(use), args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(session, len(made))


def test_400_tasks_buy_exactly_what_fits(session):
    made = []

    async def use():
        try:
            await session.acharge("serp", "$0.01")
        except BudgetExhausted:
            return
        made.append(1)

    async def main():
        await asyncio.gather(*(use() for _ in range(400)))

    asyncio.run(main())
    check(session, len(made))


SPENDER = """
import sys
from x402guard import BudgetExhausted, Guard, Policy
made = 0
with Guard(ledger=sys.argv[1], policy=Policy(loop=None)) as guard, guard.session("s", id="run") as session:
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    sys.stdin.readline()
    for _ in range(40):
        try:
            session.charge("serp", "$0.01")
            made += 1
        except BudgetExhausted:
            pass
print(made)
"""


def test_8_processes_buy_exactly_what_fits(tmp_path):
    url = f"sqlite:///{tmp_path / 'l.db'}"
    with Guard(ledger=url, policy=Policy(loop=None)) as guard, guard.session("s", budget="$1.00", id="run") as session:
        spenders = [processes.start(SPENDER, url) for _ in range(8)]
        assert {spender.stdout.readline() for spender in spenders} == {"ready\n"}
        for spender in spenders:  # all at once, once all are there
            spender.stdin.write("go\n")
            spender.stdin.flush()
        made = [int(spender.communicate(timeout=60)[0]) for spender in spenders]
        check(session, sum(made))
