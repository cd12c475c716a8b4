"""LlamaIndex under a budget: one client for its model, one decorator for its tools; its model reads why it stops.

Run it with ``python examples/llamaindex_agent.py`` after
``pip install "x402guard[testnet]" llama-index-core llama-index-llms-openai``.
"""

import asyncio

import httpx
from llama_index.core.agent import FunctionAgent
from llama_index.llms.openai import OpenAI

import x402guard
from x402guard import AsyncGuardedTransport, Guard, Metering
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


async def ask(guard: Guard, url: str) -> None:
    """Run the agent in a session of five cents."""
    async with guard.asession("clerk", budget="$0.05") as session:
        async with httpx.AsyncClient(transport=AsyncGuardedTransport(session)) as http:
            llm = OpenAI("gpt-4o-mini", api_base=url, api_key="none", max_tokens=200, async_http_client=http)
            print(await FunctionAgent(tools=[docket], llm=llm).run("Read the dockets."))
        print(session.report())


def main() -> None:
    """Let the agent use its tool until its budget says no."""
    with LlmServer(play) as server:
        guard = Guard(ledger="memory://", metering=Metering(endpoints={server.base("openai"): "openai"}))
        with guard:
            asyncio.run(ask(guard, f"{server.base('openai')}/v1"))


if __name__ == "__main__":
    main()
