"""The Claude Agent SDK under a budget: it sends through ``x402guard proxy``, and its model reads why it stops.

Run it with ``python examples/claude_agent.py`` after ``pip install "x402guard[testnet,serve]" claude-agent-sdk``.
"""

import asyncio
import json
import subprocess
import sys
from typing import Any

import httpx
from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool

from x402guard.testing import Completion, LlmCall, LlmServer, Testnet, ToolCall

BUYS = "mcp__shop__document"


def play(call: LlmCall) -> Completion:
    """Stand in for the model: it wants one document after another, until a tool says no."""
    blocks = [block for message in call.body["messages"] for block in message["content"] if isinstance(block, dict)]
    said = [str(block["content"]) for block in blocks if block["type"] == "tool_result"]
    if said and "budget" in said[-1]:
        return Completion(f"I read {len(said) - 1} documents; then: {said[-1]}", input_tokens=90)
    return Completion("", tool_calls=(ToolCall(BUYS, {"number": len(said) + 1}),), input_tokens=60)


async def ask(proxy: str, shop: str, token: str) -> None:
    """Run the agent, and print what it says at its end. The SDK has the proxy's token, and no key."""

    @tool("document", "Buy a document by its number.", {"number": int})
    async def document(args: dict[str, Any]) -> dict[str, Any]:
        async with httpx.AsyncClient(headers={"X402guard-Session": token}) as http:
            answer = await http.get(f"{proxy}{shop}/documents/{args['number']}", timeout=60)
        text = answer.text if answer.is_success else answer.json()["detail"]  # the guard's words, for the model
        return {"content": [{"type": "text", "text": text}], "is_error": not answer.is_success}

    options = ClaudeAgentOptions(
        model="claude-haiku-4-5",
        mcp_servers={"shop": create_sdk_mcp_server("shop", tools=[document])},
        tools=[],
        allowed_tools=[BUYS],
        setting_sources=[],
        env={
            "ANTHROPIC_BASE_URL": f"{proxy}anthropic",
            "ANTHROPIC_API_KEY": token,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1000",  # each call is held at the most that it may cost
        },
    )
    async for message in query(prompt="Read what you can.", options=options):
        if isinstance(message, ResultMessage):
            print(message.result)


if __name__ == "__main__":
    with Testnet() as net, LlmServer(play) as server:
        settings = {
            "X402GUARD_PRIVATE_KEY": net.payer_key,
            "X402GUARD_CHAINS": json.dumps({net.network: net.rpc}),
            "X402GUARD_LEDGER": "memory://",
            "X402GUARD_METERING": json.dumps({"endpoints": {server.base("anthropic"): "anthropic"}}),
            "ANTHROPIC_API_KEY": "none",
        }
        command = [sys.executable, "-m", "x402guard", "proxy", "--port", "0", "--budget", "0.25", "--json"]
        with subprocess.Popen(command, env=settings, stdout=subprocess.PIPE) as proxy:  # noqa: S603 - our own
            try:
                told = json.loads(proxy.stdout.readline())
                asyncio.run(ask(told["url"], net.merchant.url, told["sessions"][0]["token"]))
            finally:
                proxy.terminate()
