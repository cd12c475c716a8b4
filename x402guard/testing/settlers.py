"""Settles the merchant's payments: through a facilitator over HTTP, or by checking signatures only."""

import secrets
import threading
import time
from dataclasses import dataclass
from typing import Protocol

import httpx

from x402guard.testing.contracts import CHAIN_ID
from x402guard.testing.engine import JSON
from x402guard.testing.payments import (
    Eip3009Payment,
    Refused,
    SignedPayment,
    Terms,
    check_payment,
    check_signature,
    read_payment,
    read_terms,
)

_TIMEOUT_S = 30.0


class SettlerUnavailable(Exception):  # noqa: N818 - a state, as its name says
    """The settling backend could not be reached, or its answer is invalid."""


class Settler(Protocol):
    """Verifies and settles payments for a Merchant, in the shapes of a facilitator's answers.

    Each method raises SettlerUnavailable if there is no valid answer.
    """

    async def facilitator_address(self) -> str:
        """The address that settles `upto` payments."""
        ...

    async def verify(self, payment: JSON, requirements: JSON) -> JSON:
        """Return whether `payment` can be settled: `{"isValid": ..., "invalidReason": ..., "payer": ...}`."""
        ...

    async def settle(self, payment: JSON, requirements: JSON, *, path: str) -> JSON:
        """Settle `payment` for the amount in `requirements`; `path` is the path of the paid request."""
        ...

    async def aclose(self) -> None:
        """Close connections."""
        ...


class FacilitatorClient:
    """A Settler that asks the facilitator at `url`. It belongs to the event loop that first uses it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http: httpx.AsyncClient | None = None
        self._address: str | None = None

    async def facilitator_address(self) -> str:
        """The address that settles `upto` payments, as /supported announces it; asked for once."""
        if self._address is None:
            kinds = (await self._ask("GET", "/supported"))["kinds"]
            announced = [
                (kind.get("extra") or {}).get("facilitatorAddress") for kind in kinds if kind["scheme"] == "upto"
            ]
            self._address = str(next(filter(None, announced), ""))
        return self._address

    async def verify(self, payment: JSON, requirements: JSON) -> JSON:
        """Post to /verify; raise SettlerUnavailable if there is no valid answer."""
        return await self._ask("POST", "/verify", _question(payment, requirements))

    async def settle(self, payment: JSON, requirements: JSON, *, path: str) -> JSON:  # noqa: ARG002 - of the protocol
        """Post to /settle; raise SettlerUnavailable if there is no valid answer."""
        return await self._ask("POST", "/settle", _question(payment, requirements))

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def _ask(self, method: str, path: str, content: JSON = None) -> JSON:
        if self._http is None:
            self._http = httpx.AsyncClient(base_url=self._url, timeout=_TIMEOUT_S, trust_env=False)
        try:
            return (await self._http.request(method, path, json=content)).raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise SettlerUnavailable(f"{method} {self._url}{path}: {error!r}") from error


def _question(payment: JSON, requirements: JSON) -> JSON:
    version = payment["x402Version"]
    return {"x402Version": version, "paymentPayload": payment, "paymentRequirements": requirements}


@dataclass(frozen=True)
class Payment:
    """One payment that a SignatureSettler settled: `amount` in atomic units, `nonce` as 32 bytes in hex."""

    payer: str
    nonce: str
    amount: int
    payee: str
    path: str


class SignatureSettler:
    """A Settler without a chain, for load tests: it checks terms, signature and nonce, and keeps `payments`.

    It knows no balances and allowances, and the transaction hashes are random.
    """

    def __init__(self, *, chain_id: int = CHAIN_ID, facilitator: str = "0x" + "11" * 20) -> None:
        self._chain_id = chain_id
        self._facilitator = facilitator
        self._lock = threading.Lock()
        self._used: set[tuple[str, str]] = set()
        self._payments: list[Payment] = []

    @property
    def payments(self) -> list[Payment]:
        """A copy of the payments settled so far, in order. May be read from any thread."""
        with self._lock:
            return list(self._payments)

    async def facilitator_address(self) -> str:
        """The address that `upto` payments have to name."""
        return self._facilitator

    async def verify(self, payment: JSON, requirements: JSON) -> JSON:
        """Check terms, signature and nonce."""
        try:
            _, signed = self._checked(payment, requirements)
        except Refused as refusal:
            return {"isValid": False, "invalidReason": refusal.reason}
        return {"isValid": True, "payer": signed.payer}

    async def settle(self, payment: JSON, requirements: JSON, *, path: str) -> JSON:
        """Settle the payment and mark its nonce as used. A charge of zero does neither."""
        network = requirements["network"]
        try:
            terms, signed = self._checked(payment, requirements)
            if terms.amount > 0:
                self._take(signed, terms, path)
        except Refused as refusal:
            return {"success": False, "errorReason": refusal.reason, "transaction": "", "network": network}
        transaction = "0x" + secrets.token_hex(32) if terms.amount > 0 else ""
        receipt = {"success": True, "payer": signed.payer, "transaction": transaction, "network": network}
        return receipt | ({"amount": str(terms.amount)} if terms.scheme == "upto" else {})

    async def aclose(self) -> None:
        """Do nothing: there are no connections."""

    def _checked(self, payment: JSON, requirements: JSON) -> tuple[Terms, SignedPayment]:
        terms, signed = read_terms(payment["x402Version"], requirements), read_payment(payment)
        agreed = terms
        if terms.scheme == "upto" and not isinstance(signed, Eip3009Payment) and terms.amount <= signed.amount:
            # At settlement the requirements contain the charge, at verification the ceiling. The offer has the ceiling.
            agreed = terms.with_amount(int(payment["accepted"]["amount"]))
        check_payment(signed, agreed, now=int(time.time()), facilitator=self._facilitator)
        check_signature(signed, agreed, self._chain_id)
        with self._lock:
            self._require_unused(signed)
        return terms, signed

    def _take(self, signed: SignedPayment, terms: Terms, path: str) -> None:
        with self._lock:
            self._require_unused(signed)
            self._used.add((signed.payer, _nonce(signed)))
            self._payments.append(Payment(signed.payer, _nonce(signed), terms.amount, signed.payee, path))

    def _require_unused(self, signed: SignedPayment) -> None:
        if (signed.payer, _nonce(signed)) in self._used:
            eip3009 = isinstance(signed, Eip3009Payment)
            raise Refused("invalid_exact_evm_nonce_already_used" if eip3009 else "permit2_invalid_nonce")


def _nonce(payment: SignedPayment) -> str:
    nonce = payment.nonce if isinstance(payment, Eip3009Payment) else payment.nonce.to_bytes(32, "big")
    return "0x" + nonce.hex()
