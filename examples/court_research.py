"""An agent that buys court records until its budget says no, on the local testnet: no key, no account, no network.

Run it with ``python examples/court_research.py`` after ``make demo`` or ``pip install "x402guard[testnet]"``.
"""

import asyncio
import tempfile
from pathlib import Path

import httpx

from x402guard import AsyncGuardedTransport, BudgetExhausted, Guard, GuardedTransport, LocalSigner, Policy, Session
from x402guard.testing import Testnet


def read_documents(session: Session, shop: str) -> list[str]:
    """Buy documents one after another; each costs ten cents."""
    titles = []
    with httpx.Client(transport=GuardedTransport(session), base_url=shop) as http:
        for number in range(1, 100):
            try:
                titles.append(str(http.get(f"/documents/{number}").json()))
            except BudgetExhausted as no:
                print(f"stopped after {len(titles)} documents: {no}")
                break
    return titles


async def ask_three_at_once(session: Session, shop: str) -> list[int]:
    """Three calls of a metered model side by side: five cents are held for each, what it used is charged."""
    async with httpx.AsyncClient(transport=AsyncGuardedTransport(session), base_url=shop) as http:
        answers = await asyncio.gather(*(http.post("/llm", json={"question": n}) for n in range(3)))
        return [answer.status_code for answer in answers]


def main() -> None:
    """Give an agent fifty cents for reading and twenty for asking, out of one dollar."""
    with Testnet() as net, tempfile.TemporaryDirectory() as folder:
        guard = Guard(
            signer=LocalSigner.from_key(net.payer_key),
            ledger=f"sqlite:///{Path(folder) / 'spend.db'}",
            chains={net.network: net.rpc},
            policy=Policy(per_payment_cap="$0.25", payees={net.merchant.payee}),
            budget="$1.00",
        )
        with guard, guard.session("court-research", budget="$0.70") as session:
            with session.child("reader", budget="$0.50") as reader:
                read_documents(reader, net.merchant.url)
            with session.child("asker", budget="$0.20") as asker:
                print("answers:", asyncio.run(ask_three_at_once(asker, net.merchant.url)))
            session.reconcile()
            print(session.report().to_text())


if __name__ == "__main__":
    main()
