"""AutoGen under a budget: two lines guard its model and its tools, and its model reads why it stops.

Run it with ``python examples/autogen_agent.py`` after
``pip install "x402guard[testnet]" autogen-agentchat "autogen-ext[openai]"``.
"""

import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

import x402guard
from x402guard import Guard, Metering
from x402guard.testing import Completion, LlmCall, LlmServer, ToolCall


@x402guard.tool(cost="$0.02")
async def docket(number: int) -> str:
    """Read a docket."""
    return f"docket {number}: settled"


def play(call: LlmCall) -> Completion:
    """Stand in for the model: it wants one docket after another, until a tool says no."""
    said = [str(message["content"]) for message in call.body["messages"] if message["role"] == "tool"]
    if said and "budget" in said[-1]:
        return Completion(f"I read {len(said) - 1} dockets; then: {said[-1]}", input_tokens=90)
    return Completion("", tool_calls=(ToolCall("docket", {"number": len(said) + 1}),), input_tokens=60)


async def ask(url: str) -> str:
    """Run the agent, and return what its model says at its end."""
    llm = OpenAIChatCompletionClient(model="gpt-4o-mini", base_url=url, api_key="none", max_tokens=200)
    agent = AssistantAgent("clerk", llm, tools=[docket], max_tool_iterations=5)
    said = (await agent.run(task="Read the dockets.")).messages[-1]
    await llm.close()
    return said.to_text()


def main() -> None:
    """Let the agent use its tool until its budget says no."""
    with LlmServer(play) as server:
        guard = Guard(ledger="memory://", metering=Metering(endpoints={server.base("openai"): "openai"}))
        with guard:
            session = x402guard.install(budget="$0.05", guard=guard)  # every httpx client of this process
            print(asyncio.run(ask(f"{server.base('openai')}/v1")))
            print(session.report())
            x402guard.uninstall()


if __name__ == "__main__":
    main()
