"""Defines the records of a hostile server: every request, and every signed payment with what it allows."""

import base64
import json
from dataclasses import dataclass

from starlette.requests import Request

from x402guard.testing.engine import JSON
from x402guard.testing.payments import Permit2Payment, Refused, SignedPayment, read_payment

PAYMENT_HEADERS = {"payment-signature": 2, "x-payment": 1}
"""The headers that carry a payment, and the protocol version of each."""


@dataclass(frozen=True)
class Cheque:
    """One signed payment that was received: its holder can settle up to `amount` until `valid_until`.

    Amounts are in atomic units of `token`, times in unix seconds; `nonce` is 32 bytes in hex. `token` is taken from the
    payment, or from the terms that it claims to meet. `message` is the whole payment as JSON.
    """

    behaviour: str
    origin: str
    path: str
    version: int
    nonce: str
    amount: int
    payee: str
    token: str
    facilitator: str | None
    valid_until: int
    signed: SignedPayment
    message: JSON


@dataclass(frozen=True)
class Received:
    """One request: its time (unix seconds), its URL parts, headers (names in lower case), body, and payment or None."""

    at: float
    behaviour: str
    origin: str
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    cheque: Cheque | None

    @property
    def payment_header(self) -> str | None:
        """The unchanged value of the payment header, or None."""
        return next((value for name, value in self.headers if name in PAYMENT_HEADERS), None)


def cheque_in(request: Request, behaviour: str, origin: str) -> Cheque | None:
    """Return the payment of a request, or None if there is no readable one."""
    for name, version in PAYMENT_HEADERS.items():
        if name not in request.headers:
            continue
        try:
            message = json.loads(base64.b64decode(request.headers[name], validate=True))
            signed = read_payment(message)
        except (ValueError, Refused):
            return None
        return _cheque(message, signed, {"behaviour": behaviour, "origin": origin, "path": request.url.path}, version)
    return None


def _cheque(message: JSON, signed: SignedPayment, where: dict[str, str], version: int) -> Cheque:
    if isinstance(signed, Permit2Payment):
        return Cheque(
            **where, version=version, nonce=f"0x{signed.nonce:064x}", amount=signed.amount, payee=signed.payee,
            token=signed.token, facilitator=signed.facilitator, valid_until=signed.deadline, signed=signed, message=message,
        )  # fmt: skip
    accepted = message.get("accepted")
    token = str(accepted.get("asset", "")) if isinstance(accepted, dict) else ""
    return Cheque(
        **where, version=version, nonce="0x" + signed.nonce.hex(), amount=signed.value, payee=signed.payee,
        token=token, facilitator=None, valid_until=signed.valid_before, signed=signed, message=message,
    )  # fmt: skip
