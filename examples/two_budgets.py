"""An agent with two budgets, dollars and context: tools that no transport sees, and results shown in as few words as fit.

No key, no account, no network: run it with ``python examples/two_budgets.py`` after ``make demo`` or
``pip install "x402guard[testnet]"``.
"""

import asyncio
import json
import tempfile
from pathlib import Path

import httpx

from x402guard import BudgetExhausted, Guard, GuardedTransport, Metering, Session, TokenBudget
from x402guard.testing import Completion, LlmCall, LlmServer

PROMPT = "You are a clerk of the court. Say which case to search for next, by its number, and say why. " * 5
MODEL = {"model": "gpt-4o-mini", "max_completion_tokens": 400}


def think(call: LlmCall) -> Completion:
    """Stand in for the model: it reads what it is asked, and answers in a sentence."""
    return Completion(f"{call.model}: search for the next case.", input_tokens=110, output_tokens=60)


def show(hits: list[dict[str, str]], mode: str) -> str:
    """Give the text of a result in a mode: the author of a tool knows what may be left out of its results."""
    if mode == "raw":
        return json.dumps(hits)
    if mode == "table":
        return "\n".join(hit["title"] for hit in hits)
    if mode == "summary":
        return f"{len(hits)} hits; the first is {hits[0]['title']}"
    return f"{len(hits)} hits, kept as {hits[0]['kept_as']}"


def work(session: Session, model: str) -> None:
    """Search, think, search again: until one of the two budgets says no."""

    @session.tool(cost="$0.01", mode="raw", render=show, max_tokens=2_000)
    def search(query: str) -> list[dict[str, str]]:
        # A search engine that bills by the month: nothing of it is to be seen on the wire.
        return [
            {"title": f"{query}, hit {n}", "text": "followed as to costs " * 5, "kept_as": "hits-1"} for n in range(40)
        ]

    @session.tool(cost=lambda page: f"{0.002 * page['pages']:.3f}", up_to="$0.02")
    async def read_aloud(title: str) -> dict[str, int]:
        # What it costs is known afterwards; what it may cost at most is held before.
        return {"pages": len(title) % 5 + 1}

    with httpx.Client(transport=GuardedTransport(session)) as http:
        for number in range(1, 100):
            try:
                question = [{"role": "user", "content": f"{PROMPT} {number - 1} were found."}]
                http.post(f"{model}/v1/chat/completions", json={**MODEL, "messages": question})
                mode = session.tokens.suggested_mode("raw")
                hits = search(f"case {number}")
                asyncio.run(read_aloud(hits))
            except BudgetExhausted as no:
                print(f"stopped at search {number}: {no}\n")
                return
            print(
                f"search {number}: shown as {mode}, {session.tokens.remaining:,} tokens and ${session.remaining} left"
            )


def main() -> None:
    """Give an agent a quarter of a dollar, and room for 10,000 tokens."""
    with LlmServer(think) as llm, tempfile.TemporaryDirectory() as folder:
        guard = Guard(
            signer=None,  # it meters and charges, and signs nothing
            ledger=f"sqlite:///{Path(folder) / 'spend.db'}",
            metering=Metering(endpoints={llm.base("openai"): "openai"}),
        )
        tokens = TokenBudget(total=10_000, soft=8_000)
        with guard, guard.session("two-budgets", budget="$0.25", tokens=tokens) as session:
            session.charge("licence", "$0.02")  # a flat fee, paid before the first search
            with session.hold("render", up_to="$0.05") as film:
                film.capture("$0.03")  # said by the tool when it was done; unsaid, it would be the whole $0.05
            work(session, llm.base("openai"))
            print(session.report().to_text())


if __name__ == "__main__":
    main()
