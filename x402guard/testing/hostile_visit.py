"""Defines one request to a hostile server, and the correct answers to it."""

from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from x402guard.testing.engine import JSON
from x402guard.testing.hostile_answers import demand, receipt_header
from x402guard.testing.hostile_records import Cheque


class Seller(Protocol):
    """The part of the server that a behaviour may use; prices in atomic units, times in seconds."""

    payee: str
    price: int
    facilitator: str
    slow_s: float
    network: str
    network_v1: str
    token: str
    withheld: list[Cheque]

    @property
    def url(self) -> str:
        """The selling origin."""
        ...

    @property
    def elsewhere(self) -> str:
        """The other origin."""
        ...

    async def take(self, cheque: Cheque, amount: int | None = None) -> JSON:
        """Settle a payment, for `amount` atomic units if given."""
        ...


@dataclass(frozen=True)
class Visit:
    """One request to a path. `number` counts the unpaid requests before it, `paid_number` the paid ones, from 0."""

    server: Seller
    behaviour: str
    request: Request
    cheque: Cheque | None
    number: int
    paid_number: int

    def offer(self, amount: int | None = None, **changes: JSON) -> JSON:
        """An honest `exact` offer by EIP-3009 (`amount` in atomic units), with `changes`; None leaves a field out."""
        server = self.server
        terms = {
            "scheme": "exact", "network": server.network, "asset": server.token, "payTo": server.payee,
            "amount": str(server.price if amount is None else amount), "maxTimeoutSeconds": 60,
            "extra": {"name": "USDC", "version": "2"},
        }  # fmt: skip
        return {name: value for name, value in (terms | changes).items() if value is not None}

    def upto(self, ceiling: int | None = None, *, facilitator: str | None = None, **changes: JSON) -> JSON:
        """An honest `upto` offer by Permit2: at most `ceiling` atomic units, by default five times the price."""
        extra = {
            "name": "USDC", "version": "2", "assetTransferMethod": "permit2",
            "facilitatorAddress": facilitator or self.server.facilitator,
        }  # fmt: skip
        amount = 5 * self.server.price if ceiling is None else ceiling
        return self.offer(amount, scheme="upto", extra=extra, **changes)

    def demand(self, *offers: JSON, version: int = 2, **changes: JSON) -> Response:
        """A 402 with these offers; by default with one honest offer."""
        url = str(self.request.url)
        return demand(list(offers) or [self.offer()], url=url, version=version, **changes)

    async def settle(self, amount: int | None = None) -> JSON:
        """Settle the payment, in full or for `amount` atomic units, and return a correct receipt."""
        if self.cheque is None:
            raise ValueError("nothing was paid")
        return await self.server.take(self.cheque, amount)

    def keep(self) -> None:
        """Keep the payment for `HostileServer.settle_withheld`."""
        if self.cheque is not None:
            self.server.withheld.append(self.cheque)

    def deliver(self, receipt: JSON = None, *, status: int = 200, content: JSON = None) -> Response:
        """The purchased content, with `receipt` if given."""
        version = 2 if self.cheque is None else self.cheque.version
        headers = {} if receipt is None else receipt_header(receipt, version)
        return JSONResponse({"bought": self.request.url.path} if content is None else content, status, headers)
