"""Two CrewAI agents under ``x402guard.install``, and nothing of ours between them and their models.

``test_frameworks.py`` runs this in an environment of CrewAI's own and reads the last line that it prints.
"""

import json
import os

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

import x402guard

session = x402guard.install(budget=os.environ["BUDGET"])


@tool("docket")
def docket(number: int) -> str:
    """Read an entry of the docket."""
    return f"Entry {number}: the motion was granted in part."


def agent(role, model, *tools):
    llm = LLM(model=f"openai/{model}", base_url=os.environ["LLM_URL"], api_key="none")
    return Agent(role=role, goal="Be exact.", backstory="You work for the court.", llm=llm, tools=list(tools))


clerk, writer = agent("clerk", "gpt-4o", docket), agent("writer", "gpt-4o-mini")
read = Task(description="What does entry 42 of the docket say?", expected_output="A sentence.", agent=clerk)
tell = Task(description="Tell the parties.", expected_output="A sentence.", agent=writer, context=[read])

answer = error = refusal = None
try:
    answer = Crew(agents=[clerk, writer], tasks=[read, tell]).kickoff().raw
except Exception as raised:
    error, refusal = repr(raised), x402guard.refusal_from(raised)
report = session.report().to_dict()
x402guard.uninstall()
kind = None if refusal is None else type(refusal).__name__
print(json.dumps({"answer": answer, "error": error, "refusal": kind, "report": report}))
