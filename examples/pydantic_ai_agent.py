"""pydantic-ai under a budget: its provider takes an awaited client of httpx2, its tools one decorator.

Run it with ``python examples/pydantic_ai_agent.py`` after ``pip install "x402guard[testnet]" "pydantic-ai-slim[openai]"``.
"""

import asyncio

import httpx2
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import x402guard
from x402guard import Guard, Metering
from x402guard.httpx2 import AsyncGuardedTransport
from x402guard.testing import Completion, LlmCall, LlmServer, ToolCall


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
            provider = OpenAIProvider(base_url=url, api_key="none", http_client=http)
            agent = Agent(OpenAIChatModel("gpt-4o-mini", provider=provider), tools=[docket])
            print((await agent.run("Is docket 42 settled?")).output)
        print(session.report())


def main() -> None:
    """Let the agent use its tool, and answer."""
    with LlmServer(play) as server:
        guard = Guard(ledger="memory://", metering=Metering(endpoints={server.base("openai"): "openai"}))
        with guard:
            asyncio.run(ask(guard, f"{server.base('openai')}/v1"))


if __name__ == "__main__":
    main()
