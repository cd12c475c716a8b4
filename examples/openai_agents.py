"""The OpenAI Agents SDK under a budget: one client for its model calls, one decorator for its tools.

Run it with ``python examples/openai_agents.py`` after ``pip install "x402guard[testnet]" openai-agents``.
"""

import asyncio

import httpx2
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

import x402guard
from x402guard import Guard, Metering
from x402guard.httpx2 import AsyncGuardedTransport
from x402guard.testing import Completion, LlmCall, LlmServer, ToolCall


@function_tool
@x402guard.tool(cost="$0.01")
async def docket(number: int) -> str:
    """Find a docket by its number."""
    return f"docket {number}: settled"


def play(call: LlmCall) -> Completion:
    """Stand in for the model: it wants one docket, then it answers."""
    if not any(message["role"] == "tool" for message in call.body["messages"]):
        return Completion("", tool_calls=(ToolCall("docket", {"number": 42}),), input_tokens=60, output_tokens=15)
    return Completion("Docket 42 is settled.", input_tokens=90, output_tokens=8)


async def ask(guard: Guard, url: str) -> None:
    """Run the agent in a session of five cents."""
    async with guard.asession("clerk", budget="$0.05") as session:
        async with httpx2.AsyncClient(transport=AsyncGuardedTransport(session)) as http:
            llm = AsyncOpenAI(api_key="none", base_url=url, http_client=http)
            model = OpenAIChatCompletionsModel(model="gpt-4o-mini", openai_client=llm)
            agent = Agent(name="Clerk", instructions="You know dockets.", model=model, tools=[docket])
            print((await Runner.run(agent, "Is docket 42 settled?")).final_output)
        print(session.report())


def main() -> None:
    """Let the agent use its tool, and answer."""
    set_tracing_disabled(disabled=True)  # tracing would send to a host of its own
    with LlmServer(play) as server:
        guard = Guard(ledger="memory://", metering=Metering(endpoints={server.base("openai"): "openai"}))
        with guard:
            asyncio.run(ask(guard, f"{server.base('openai')}/v1"))


if __name__ == "__main__":
    main()
