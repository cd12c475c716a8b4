"""CrewAI under a budget: two lines guard its model and its tools, and its model reads why it stops.

Run it with ``python examples/crewai_agent.py`` after ``pip install "x402guard[testnet]" crewai``.
"""

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

import x402guard
from x402guard import Guard, Metering
from x402guard.testing import Completion, LlmCall, LlmServer, ToolCall


@tool("docket")
@x402guard.tool(cost="$0.02")
def docket(number: int) -> str:
    """Read a docket."""
    return f"docket {number}: settled"


def play(call: LlmCall) -> Completion:
    """Stand in for the model: it wants one docket after another, until a tool says no."""
    said = [str(message["content"]) for message in call.body["messages"] if message["role"] == "tool"]
    if said and "budget" in said[-1]:
        return Completion(f"I read {len(said) - 1} dockets; then: {said[-1]}", input_tokens=90)
    return Completion("", tool_calls=(ToolCall("docket", {"number": len(said) + 1}),), input_tokens=60)


def main() -> None:
    """Let the crew use its tool until its budget says no."""
    with LlmServer(play) as server:
        guard = Guard(ledger="memory://", metering=Metering(endpoints={server.base("openai"): "openai"}))
        with guard:
            session = x402guard.install(budget="$0.05", guard=guard)  # every httpx client of this process
            llm = LLM("openai/gpt-4o-mini", base_url=f"{server.base('openai')}/v1", api_key="none", max_tokens=200)
            clerk = Agent(role="clerk", goal="Read dockets.", backstory="You read.", llm=llm, tools=[docket])
            task = Task(description="Read the dockets.", expected_output="What they say.", agent=clerk)
            print(Crew(agents=[clerk], tasks=[task]).kickoff().raw)
            print(session.report())
            x402guard.uninstall()


if __name__ == "__main__":
    main()
