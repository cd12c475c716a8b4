"""LangGraph under a budget: the graph buys pages until its budget says no, and its model reads why.

Run it with ``python examples/langgraph_agent.py`` after ``pip install "x402guard[testnet]" langgraph langchain-openai``.
"""

import httpx
import httpx2
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from x402guard import Guard, GuardedTransport, LocalSigner, Metering, PaymentRefused, Session
from x402guard.httpx2 import GuardedTransport as GuardedTransport2
from x402guard.testing import Completion, LlmCall, LlmServer, Testnet, ToolCall


def play(call: LlmCall) -> Completion:
    """Stand in for the model: it wants one document after another, until a tool says no."""
    said = [message["content"] for message in call.body["messages"] if message["role"] == "tool"]
    if said and "refused" in said[-1]:
        return Completion(f"I read {len(said) - 1} documents; then: {said[-1]}", input_tokens=90)
    return Completion("", tool_calls=(ToolCall("document", {"number": len(said) + 1}),), input_tokens=60)


def read(session: Session, shop: httpx.Client, base: str) -> str:
    """Run the graph, and return what the model says at its end."""

    @tool
    def document(number: int) -> str:
        """Buy a document by its number."""
        try:
            return shop.get(f"/documents/{number}").text
        except PaymentRefused as no:
            return f"refused: {no}"  # the guard's words, for the model

    http = httpx2.Client(transport=GuardedTransport2(session))
    llm = ChatOpenAI(model="gpt-4o-mini", api_key="none", base_url=base, http_client=http, max_tokens=200)
    model, graph = llm.bind_tools([document]), StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([document]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    with http:
        return str(graph.compile().invoke({"messages": [("user", "Read what you can.")]})["messages"][-1].content)


if __name__ == "__main__":
    with Testnet() as net, LlmServer(play) as server:
        metering = Metering(endpoints={server.base("openai"): "openai"})
        guard = Guard(signer=LocalSigner.from_key(net.payer_key), ledger="memory://", metering=metering)
        with guard, guard.session("reader", budget="$0.25") as session:
            with httpx.Client(transport=GuardedTransport(session), base_url=net.merchant.url) as shop:
                print(read(session, shop, f"{server.base('openai')}/v1"))
            print(session.report())
