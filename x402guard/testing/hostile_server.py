"""Serves an untrustworthy seller: it speaks x402 v1 and v2 correctly, and misbehaves in one named way per path.

`GET {url}/lost_answer/1` settles the payment and then drops the connection; `BEHAVIOURS` lists all behaviours. Sources:
x402 specification v1 and v2 (the 402 answer, PAYMENT-SIGNATURE, PAYMENT-RESPONSE), transport over HTTP.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Self

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from x402guard.testing.contracts import CHAIN_ID, TOKEN
from x402guard.testing.engine import JSON
from x402guard.testing.hostile_behaviours import BEHAVIOURS, HONEST
from x402guard.testing.hostile_records import PAYMENT_HEADERS, Cheque, Received, cheque_in
from x402guard.testing.hostile_visit import Visit
from x402guard.testing.payments import V1_NETWORKS
from x402guard.testing.routes import CENT
from x402guard.testing.server import Hosted, Server, check_behaviour
from x402guard.testing.settlers import Settler, SignatureSettler

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_PAYEE = "0x209693Bc6afc0C5328bA36FaF03C514EF312287C"
_FACILITATOR = "0x6C6D4539DE4FC56445d4Eff7Da256B40D6014233"
_SETTLING_S = 30


class HostileServer(Hosted):
    """Serves every behaviour of `BEHAVIOURS`, and `honest`, at a path with its name; see `url_of`.

    Args:
        settler: settles the payments; by default only signatures are checked. To use a chain's facilitator:
            `FacilitatorClient(testnet.facilitator)`.
        payee: the paid address.
        price: the price of everything, in atomic units of the token (default: a cent).
        chain_id: the chain of the requested payments; by default a test network.
        facilitator: the address that settles `upto` payments.
        slow_s: how long a slow answer takes, in seconds.

    It records everything received in `requests` and `cheques`. It needs Starlette and uvicorn:
    `pip install "x402guard[testnet]"`.
    """

    def __init__(
        self,
        *,
        settler: Settler | None = None,
        payee: str = _PAYEE,
        price: int = CENT,
        chain_id: int = CHAIN_ID,
        facilitator: str = _FACILITATOR,
        slow_s: float = 5.0,
    ) -> None:
        self.payee, self.price, self.facilitator, self.slow_s = payee, price, facilitator, slow_s
        self.network = f"eip155:{chain_id}"
        self.network_v1 = V1_NETWORKS.get(chain_id, "")
        self.token = TOKEN
        self.withheld: list[Cheque] = []
        """Payments that were reported as failed and kept."""
        self._settler = settler or SignatureSettler(chain_id=chain_id, facilitator=facilitator)
        self._lock = threading.Lock()
        self._requests: list[Received] = []
        self._counts: Counter[tuple[str, bool]] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._elsewhere: Server | None = None
        self._routes = [Route("/{behaviour}/{rest:path}", self._answer, methods=list(_METHODS))]
        self.app = Starlette(routes=self._routes, lifespan=self._lifespan)

    # ---- for tests ----

    def url_of(self, behaviour: str, rest: object = 1) -> str:
        """Return the URL of a behaviour; raise KeyError for an unknown name."""
        check_behaviour(behaviour, ("honest", *BEHAVIOURS))
        return f"{self.url}/{behaviour}/{rest}"

    @property
    def elsewhere(self) -> str:
        """The URL of the same server at another origin: a payment header that arrives there has leaked."""
        if self._elsewhere is None:
            raise RuntimeError("this HostileServer is not being served: call start() first")
        return self._elsewhere.url

    @property
    def requests(self) -> list[Received]:
        """A copy of the received requests, in order. May be read from any thread."""
        with self._lock:
            return list(self._requests)

    @property
    def cheques(self) -> list[Cheque]:
        """Every received payment, in order; a payment that was presented twice is listed twice."""
        return [received.cheque for received in self.requests if received.cheque is not None]

    @property
    def nonces(self) -> set[str]:
        """The distinct nonces received. Their number is how many signed payments the client sent."""
        return {cheque.nonce for cheque in self.cheques}

    @property
    def signed(self) -> int:
        """The sum of atomic units over distinct nonces: the most that the client can lose."""
        return sum({cheque.nonce: cheque.amount for cheque in self.cheques}.values())

    @property
    def leaked(self) -> list[Received]:
        """The requests at the other origin with a payment header that was made for this origin."""
        home = {received.payment_header for received in self.requests if received.origin == self.url} - {None}
        return [each for each in self.requests if each.origin != self.url and each.payment_header in home]

    def settle_withheld(self) -> list[JSON]:
        """Settle the withheld payments and return the receipts; raise RuntimeError before the first request."""
        if self._loop is None:
            raise RuntimeError("no request has come yet")
        waiting, self.withheld = self.withheld, []
        return [
            asyncio.run_coroutine_threadsafe(self.take(cheque), self._loop).result(_SETTLING_S) for cheque in waiting
        ]

    # ---- for behaviours ----

    async def take(self, cheque: Cheque, amount: int | None = None) -> JSON:
        """Settle a payment on the terms that it claims to meet, for `amount` atomic units if given."""
        settling = self._settler.settle(cheque.message, self._requirements(cheque, amount), path=cheque.path)
        if self._loop is None or self._loop is asyncio.get_running_loop():
            return await settling
        # A settler belongs to one event loop, and the two origins have different ones.
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_awaited(settling), self._loop))

    def _requirements(self, cheque: Cheque, amount: int | None) -> JSON:
        asked = str(cheque.amount if amount is None else amount)
        if cheque.version == 2:
            return dict(cheque.message["accepted"]) | {"amount": asked}
        return {
            "scheme": "exact", "network": self.network_v1, "asset": self.token, "payTo": cheque.payee,
            "maxAmountRequired": asked, "maxTimeoutSeconds": 60, "extra": {"name": "USDC", "version": "2"},
        }  # fmt: skip

    # ---- serving ----

    def start(self) -> Self:
        """Serve at two origins on loopback; return this object."""
        if self._elsewhere is None:
            self._elsewhere = Server(Starlette(routes=self._routes))
        return super().start()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        super().close()
        if self._elsewhere is not None:
            self._elsewhere.close()
            self._elsewhere = None

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        yield
        await self._settler.aclose()

    async def _answer(self, request: Request) -> Response:
        name = request.path_params["behaviour"]
        behaviour = BEHAVIOURS.get(name, HONEST if name == "honest" else None)
        if behaviour is None:
            return JSONResponse({"error": f"there is no behaviour {name}"}, 404)
        visit = self._received(name, request, await request.body())
        carries_payment = any(header in request.headers for header in PAYMENT_HEADERS)
        if carries_payment and visit.cheque is not None:
            return await behaviour.paid(visit)
        return await behaviour.unpaid(visit)

    def _received(self, name: str, request: Request, body: bytes) -> Visit:
        origin = f"{request.url.scheme}://{request.url.netloc}"
        cheque = cheque_in(request, name, origin)
        headers = tuple((key.decode("latin-1").lower(), value.decode("latin-1")) for key, value in request.headers.raw)
        received = Received(time.time(), name, origin, request.method, request.url.path, headers, body, cheque)
        with self._lock:
            self._requests.append(received)
            numbers = self._counts[name, False], self._counts[name, True]
            self._counts[name, cheque is not None] += 1
        return Visit(self, name, request, cheque, *numbers)


async def _awaited(settling: Awaitable[JSON]) -> JSON:
    return await settling
