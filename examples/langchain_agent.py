"""LangChain under a budget: its model, its tools and what they cost in one ledger.

Run it with ``python examples/langchain_agent.py`` after ``pip install "x402guard[testnet]" langchain-openai``.
"""

import httpx2
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

import x402guard
from x402guard import Guard, Metering
from x402guard.httpx2 import GuardedTransport
from x402guard.testing import Completion, LlmCall, LlmServer, ToolCall


@tool
@x402guard.tool(cost="$0.01")  # held before each use, captured after it, by the session in context
def docket(number: int) -> str:
    """Find a docket by its number."""
    return f"docket {number}: settled"


def play(call: LlmCall) -> Completion:
    """Stand in for the model: it wants one docket, then it answers."""
    if len(call.body["messages"]) == 1:
        return Completion("", tool_calls=(ToolCall("docket", {"number": 42}),), input_tokens=60, output_tokens=15)
    return Completion("Docket 42 is settled.", input_tokens=90, output_tokens=8)


def main() -> None:
    """Let the model use its tool, and answer."""
    with LlmServer(play) as server:
        guard = Guard(ledger="memory://", metering=Metering(endpoints={server.base("openai"): "openai"}))
        with guard, guard.session("clerk", budget="$0.05") as session:
            http = httpx2.Client(transport=GuardedTransport(session))
            model = ChatOpenAI(
                model="gpt-4o-mini",
                api_key="none",
                base_url=f"{server.base('openai')}/v1",
                http_client=http,
                max_tokens=200,
            ).bind_tools([docket])
            messages: list[AnyMessage] = [HumanMessage("Is docket 42 settled?")]
            while (answer := model.invoke(messages)).tool_calls:
                messages += [answer, *(docket.invoke(call) for call in answer.tool_calls)]
            print(answer.content)
            http.close()
            print(session.report())


if __name__ == "__main__":
    main()
