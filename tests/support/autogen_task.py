"""Two AutoGen agents under ``x402guard.install``, and nothing of ours between them and their models.

``test_frameworks.py`` runs this in an environment of AutoGen's own and reads the last line that it prints.
"""

import asyncio
import json
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

import x402guard


def docket(number: int) -> str:
    """Read an entry of the docket."""
    return f"Entry {number}: the motion was granted in part."


def client(model):
    return OpenAIChatCompletionClient(model=model, base_url=os.environ["LLM_URL"], api_key="none")


large, small = client("gpt-4o"), client("gpt-4o-mini")  # made before it is installed, and guarded all the same
session = x402guard.install(budget=os.environ["BUDGET"])


async def main():
    clerk = AssistantAgent("clerk", large, tools=[docket], reflect_on_tool_use=True)
    writer = AssistantAgent("writer", small, model_client_stream=True)
    team = RoundRobinGroupChat([clerk, writer], max_turns=2)
    try:
        result = await team.run(task="What does entry 42 of the docket say? Tell the parties.")
    finally:
        await large.close()
        await small.close()
    return result.messages[-1].content


answer = error = refusal = None
try:
    answer = asyncio.run(main())
except Exception as raised:
    error, refusal = repr(raised), x402guard.refusal_from(raised)
report = session.report().to_dict()
x402guard.uninstall()
kind = None if refusal is None else type(refusal).__name__
print(json.dumps({"answer": answer, "error": error, "refusal": kind, "report": report}))
