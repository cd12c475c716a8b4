"""LangChain under a budget: its model, its tools and what they cost in one ledger; its model reads why it stops.

Run it with ``python examples/langchain_agent.py`` after ``pip install "x402guard[testnet]" langchain-openai``.
"""

import httpx2
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

import x402guard
from x402guard import Guard, Metering, PaymentRefused
from x402guard.httpx2 import GuardedTransport
from x402guard.testing import Completion, LlmCall, LlmServer, ToolCall


@x402guard.tool(cost="$0.02")  # held before each use, captured after it, by the session in context
def read(number: int) -> str:
    """Read a docket."""
    return f"docket {number}: settled"


@tool
def docket(number: int) -> str:
    """Read a docket."""
    try:
        return str(read(number))
    except PaymentRefused as no:
        return f"refused: {no}"  # the guard's words, for the model


def play(call: LlmCall) -> Completion:
    """Stand in for the model: it wants one docket after another, until a tool says no."""
    said = [str(message["content"]) for message in call.body["messages"] if message["role"] == "tool"]
    if said and "budget" in said[-1]:
        return Completion(f"I read {len(said) - 1} dockets; then: {said[-1]}", input_tokens=90)
    return Completion("", tool_calls=(ToolCall("docket", {"number": len(said) + 1}),), input_tokens=60)


def main() -> None:
    """Let the model use its tool until its budget says no."""
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
            messages: list[AnyMessage] = [HumanMessage("Read the dockets.")]
            while (answer := model.invoke(messages)).tool_calls:
                messages += [answer, *(docket.invoke(call) for call in answer.tool_calls)]
            print(answer.content)
            http.close()
            print(session.report())


if __name__ == "__main__":
    main()
