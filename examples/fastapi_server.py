"""A web service with one client for all its customers: each request spends from its customer's budget.

Run it with ``python examples/fastapi_server.py`` after ``pip install "x402guard[testnet]" fastapi``.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import httpx
from fastapi import Depends, FastAPI, Request

from x402guard import AsyncGuardedTransport, BudgetExhausted, Guard, LocalSigner, Session
from x402guard.testing import Testnet


async def guarded_session(customer: str, request: Request) -> AsyncIterator[Session]:
    """Open a session under a budget of two cents a day for each customer."""
    budget = request.app.state.guard.budget(customer, "$0.02", per="day")
    async with budget.asession("request", budget="$0.02") as session:
        yield session


def service(net: Testnet) -> FastAPI:
    guard = Guard(signer=LocalSigner.from_key(net.payer_key), ledger="memory://", chains={net.network: net.rpc})

    @asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        async with guard, httpx.AsyncClient(transport=AsyncGuardedTransport(guard)) as http:
            app.state.guard, app.state.http = guard, http
            yield

    app = FastAPI(lifespan=running)

    @app.get("/ask/{customer}")
    async def ask(customer: str, session: Annotated[Session, Depends(guarded_session)]) -> list[str]:
        try:
            for number in (1, 2):
                paid = await app.state.http.get(f"{net.merchant.url}/cents/{number}", params={"for": customer})
        except BudgetExhausted:
            return ["refused", str(session.spent)]
        return [str(paid.status_code), str(session.spent)]

    return app


async def main() -> None:
    with Testnet() as net:
        app = service(net)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            for _ in range(2):
                answers = await asyncio.gather(*(http.get(f"http://here/ask/{n}") for n in range(100)))
                print(len(answers), "customers:", {tuple(answer.json()) for answer in answers})


asyncio.run(main())
