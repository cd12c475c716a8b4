"""pydantic-ai under a budget: its provider takes an awaited client of httpx2, its tools one decorator.

Run it with ``python examples/pydantic_ai_agent.py`` after ``pip install "x402guard[testnet]" "pydantic-ai-slim[openai]"``.
"""

import asyncio

import httpx2
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import x402guard
from x402guard import Guard, Metering, PaymentRefused
from x402guard.httpx2 import AsyncGuardedTransport
from x402guard.testing import Completion, LlmCall, LlmServer, ToolCall


@x402guard.tool(cost="$0.02")
async def read(number: int) -> str:
    """Read a docket."""
    return f"docket {number}: settled"


async def docket(number: int) -> str:
    """Read a docket."""
    try:
        return str(await read(number))
    except PaymentRefused as no:
        return f"refused: {no}"  # the guard's words, for the model


def play(call: LlmCall) -> Completion:
    """Stand in for the model: it wants one docket after another, until a tool says no."""
    said = [str(message["content"]) for message in call.body["messages"] if message["role"] == "tool"]
    if said and "budget" in said[-1]:
        return Completion(f"I read {len(said) - 1} dockets; then: {said[-1]}", input_tokens=90)
    return Completion("", tool_calls=(ToolCall("docket", {"number": len(said) + 1}),), input_tokens=60)


async def ask(guard: Guard, url: str) -> None:
    """Run the agent in a session of five cents."""
    async with guard.asession("clerk", budget="$0.05") as session:
        async with httpx2.AsyncClient(transport=AsyncGuardedTransport(session)) as http:
            provider = OpenAIProvider(base_url=url, api_key="none", http_client=http)
            agent = Agent(
                OpenAIChatModel("gpt-4o-mini", provider=provider), tools=[docket], model_settings={"max_tokens": 200}
            )
            print((await agent.run("Read the dockets.")).output)
        print(session.report())


def main() -> None:
    """Let the agent use its tool until its budget says no."""
    with LlmServer(play) as server:
        guard = Guard(ledger="memory://", metering=Metering(endpoints={server.base("openai"): "openai"}))
        with guard:
            asyncio.run(ask(guard, f"{server.base('openai')}/v1"))


if __name__ == "__main__":
    main()
