"""A planner gives three researchers a part of its budget each, and takes what comes back as far as it can be believed.

Run it with ``python examples/three_researchers.py`` after ``pip install x402guard``. Here the researchers are tasks of one
program; a worker in another process opens the same ledger and redeems its token in the same way.
"""

import asyncio
import time

import x402guard
from x402guard import BudgetExhausted, Guard, NeedsReview, TaskRequest

CUSTOMER = "Ada Lovelace"


@x402guard.tool(cost="$0.02")
async def search(query: str) -> int:
    """Stand in for a search engine: returns how much it has found."""
    return len(query)


async def research(guard: Guard, token: str, confidence: float) -> None:
    """Work on a task, within what its token allows."""
    async with guard.aredeem(token) as session:
        topic = session.task.request.payload["topic"]
        if topic == "letters":
            topic += await session.task.aask({"need": "customer"})  # it was withheld, and may be asked for
        found = [await search(f"{topic} {page}") for page in range(session.task.request.payload["pages"])]
        await session.task.aanswer({"found": sum(found)}, confidence=confidence)


async def main() -> None:
    """Delegate three tasks, answer what the researchers ask, and say what has become of each."""
    guard = Guard(ledger="sqlite:///spend.db")
    async with guard.asession("planner", budget="$0.20") as planner:
        usual = {"task_type": "research", "budget": "$0.06", "deadline": int(time.time()) + 60}
        tasks, running = {}, []
        for topic, pages, confidence in [("letters", 2, 0.9), ("portraits", 2, 0.4), ("machines", 9, 0.9)]:
            work = {"topic": topic, "pages": pages}
            tasks[topic] = await planner.adelegate(TaskRequest(payload=work, withheld=["customer"], **usual))
            running.append(research(guard, tasks[topic].token, confidence))
        done = asyncio.gather(*running, return_exceptions=True)
        for topic, task in tasks.items():
            try:
                result = await task.aresult()
                if result.status == "needs_clarification":
                    await task.areply(CUSTOMER)
                    result = await task.aresult()
                print(f"{topic}: {result.status}, {result.output or result.error}, for ${result.cost}")
            except NeedsReview as unsure:
                print(f"{topic}: held back, {unsure.advice.partition(':')[0]}")
        assert sum(isinstance(each, BudgetExhausted) for each in await done) == 1
    print(planner.report().to_text())
    guard.close()


asyncio.run(main())
