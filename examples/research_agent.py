"""An agent that thinks and buys out of one budget: model calls and paid documents in one ledger, on the local testnet.

No key, no account, no network: run it with ``python examples/research_agent.py`` after ``make demo`` or
``pip install "x402guard[testnet]"``.
"""

import tempfile
from pathlib import Path

import httpx

from x402guard import BudgetExhausted, Guard, GuardedTransport, LocalSigner, Metering, Session
from x402guard.testing import Completion, LlmCall, LlmServer, Testnet


def think(call: LlmCall) -> Completion:
    """Stand in for the model: it wants one more opinion each time it is asked."""
    asked = len(call.body["messages"])
    return Completion(f"Read opinion {asked}.", input_tokens=30 + 25 * asked, output_tokens=40)


def research(session: Session, shop: str, model: str) -> list[str]:
    """Ask the model what to read, buy that, and go on until the budget says no."""
    messages = [{"role": "user", "content": "Which opinions matter for the motion? One at a time, please."}]
    with httpx.Client(transport=GuardedTransport(session)) as http:
        while True:
            try:
                # No output limit is set: the guard holds what the model could write at most, or what is affordable.
                answer = http.post(f"{model}/v1/chat/completions", json={"model": "gpt-4o", "messages": messages})
                wish = answer.json()["choices"][0]["message"]["content"]
                title = str(http.get(f"{shop}/documents/{len(messages)}").json())
            except BudgetExhausted as no:
                print(f"stopped after {len(messages) // 2} documents: {no}\n")
                return [message["content"] for message in messages if message["role"] == "user"][1:]
            messages += [{"role": "assistant", "content": wish}, {"role": "user", "content": title}]


def main() -> None:
    """Give an agent fifty cents for all of it."""
    with Testnet() as net, LlmServer(think) as llm, tempfile.TemporaryDirectory() as folder:
        guard = Guard(
            signer=LocalSigner.from_key(net.payer_key),
            ledger=f"sqlite:///{Path(folder) / 'spend.db'}",
            chains={net.network: net.rpc},
            metering=Metering(endpoints={llm.base("openai"): "openai"}),
        )
        with guard, guard.session("research", budget="$0.50") as session:
            research(session, net.merchant.url, llm.base("openai"))
            print(session.report().to_text())


if __name__ == "__main__":
    main()
