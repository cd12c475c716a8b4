"""A web service with one client and one tool for all its customers: each request spends from its own session.

Run it with ``python examples/fastapi_server.py`` after ``pip install "x402guard[testnet]" fastapi``.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request

import x402guard
from x402guard import AsyncGuardedTransport, BudgetExhausted, Guard, LocalSigner
from x402guard.testing import Testnet


@x402guard.tool(cost="$0.01")  # declared once; the session in context pays
async def look_up(name: str) -> str:
    """Stand in for a search that costs a cent."""
    return f"all about {name}"


def service(net: Testnet) -> FastAPI:
    """Return the service: a guard, and one client for all sessions."""
    guard = Guard(signer=LocalSigner.from_key(net.payer_key), ledger="memory://", chains={net.network: net.rpc})

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        async with guard, httpx.AsyncClient(transport=AsyncGuardedTransport(guard)) as app.state.http:
            yield

    app = FastAPI(lifespan=running)

    @app.get("/ask/{customer}")
    async def ask(customer: str, request: Request) -> dict[str, str]:
        async with guard.asession(customer, budget="$0.02") as session:
            paid = await request.app.state.http.get(f"{net.merchant.url}/cents/1", params={"for": customer})
            await look_up(customer)
            try:
                last = await look_up("one thing too many")
            except BudgetExhausted:
                last = "refused"
        return {"status": str(paid.status_code), "spent": str(session.spent), "last": last}

    return app


async def main() -> None:
    """Serve a hundred customers at once; each has two cents."""
    with Testnet() as net:
        app = service(net)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            answers = await asyncio.gather(*(http.get(f"http://localhost/ask/customer-{n}") for n in range(100)))
        print(len(answers), "customers:", {tuple(answer.json().values()) for answer in answers})


if __name__ == "__main__":
    asyncio.run(main())
