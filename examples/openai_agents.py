"""The OpenAI Agents SDK under a budget: one client for its model calls, one decorator for its tools.

Run it with ``python examples/openai_agents.py`` after ``pip install "x402guard[testnet]" openai-agents``.
"""

import asyncio

import httpx2
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunContextWrapper,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

import x402guard
from x402guard import Guard, Metering
from x402guard.httpx2 import AsyncGuardedTransport
from x402guard.testing import Completion, LlmCall, LlmServer, ToolCall


def refused(_: RunContextWrapper[None], error: Exception) -> str:
    """Tell the model why: the SDK's own words for a failed tool hide the reason."""
    return f"refused: {error}"


@function_tool(failure_error_function=refused)
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
        async with httpx2.AsyncClient(transport=AsyncGuardedTransport(session)) as http:
            llm = AsyncOpenAI(api_key="none", base_url=url, http_client=http)
            model = OpenAIChatCompletionsModel(model="gpt-4o-mini", openai_client=llm)
            bounded = ModelSettings(max_tokens=200)
            agent = Agent(name="Clerk", model=model, model_settings=bounded, tools=[docket])
            print((await Runner.run(agent, "Read the dockets.")).final_output)
        print(session.report())


def main() -> None:
    """Let the agent use its tool until its budget says no."""
    set_tracing_disabled(disabled=True)  # tracing would send to a host of its own
    with LlmServer(play) as server:
        guard = Guard(ledger="memory://", metering=Metering(endpoints={server.base("openai"): "openai"}))
        with guard:
            asyncio.run(ask(guard, f"{server.base('openai')}/v1"))


if __name__ == "__main__":
    main()
