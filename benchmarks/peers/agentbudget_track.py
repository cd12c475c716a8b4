"""agentbudget's ``track`` with 200 names. Reads how many calls to time from each line; prints their times in µs."""

import sys
import time

from agentbudget import AgentBudget


def main() -> None:
    budget = AgentBudget(max_spend="$1000000")
    with budget.session() as session:
        number = 0
        for line in sys.stdin:
            times = []
            for _ in range(int(line)):
                number += 1
                began = time.perf_counter_ns()
                session.track(None, cost=0.000001, tool_name=f"tool{number % 200}")
                times.append((time.perf_counter_ns() - began) / 1000)
            print(*times, flush=True)


main()
