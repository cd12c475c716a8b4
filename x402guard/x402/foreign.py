"""Payments that the guard did not make: finds them in a request, and reads what they may take."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from x402guard.assets import AssetRegistry, resolve_network
from x402guard.errors import ProtocolError
from x402guard.evm import MAX_UINT256, parse_address
from x402guard.flow.sealed import Sealed
from x402guard.money import Nanos
from x402guard.x402.wire import PAYMENT_HEADERS, decode_base64_json, decode_json

META: Final = "x402/payment"
"""The member of ``params._meta`` that holds a payment in JSON-RPC (x402 specification, MCP transport)."""

_AUTHORIZATION: Final = "authorization"
_MOST_MESSAGES: Final = 1000


@dataclass(frozen=True, slots=True)
class ForeignPayment:
    """One payment in a request.

    Attributes:
        where: the header or member that holds it.
        digest: the SHA-256 of it, 32 bytes.
        message: the payment as received; a header's text, or the JSON value of a member.
    """

    where: str
    digest: bytes
    message: Sealed[Any]


def payments_in(headers: Iterable[tuple[str, str]], body: bytes | None) -> tuple[ForeignPayment, ...]:
    """Return the payments in a request: x402's two headers, ``Authorization: Payment``, and JSON-RPC's ``_meta``.

    A *body* of None, one that streams, is not searched.
    """
    found = []
    for name, value in headers:
        lower = name.lower()
        if lower in PAYMENT_HEADERS or (lower == _AUTHORIZATION and value[:8].lower() == "payment "):
            where = f"the header {lower.upper()}" + (": Payment" if lower == _AUTHORIZATION else "")
            found.append(ForeignPayment(where, _digest(value), Sealed(value)))
    if body and b"x402" in body:
        where = f"_meta[{META!r}]"
        found += [ForeignPayment(where, _digest(repr(message)), Sealed(message)) for message in _members(body)]
    return tuple(found)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _members(body: bytes) -> Iterator[Any]:
    """Yield the payments in a JSON-RPC message, or in a batch of them. Unreadable JSON is no payment to any server."""
    try:
        value = decode_json(body, field="body")
    except ProtocolError:
        return
    for message in value[:_MOST_MESSAGES] if isinstance(value, list) else [value]:
        params = message.get("params") if isinstance(message, dict) else None
        meta = params.get("_meta") if isinstance(params, dict) else None
        if isinstance(meta, dict) and META in meta:
            yield meta[META]


def most_taken(payment: ForeignPayment, registry: AssetRegistry) -> Nanos | None:
    """Return the most that a payment may take, in nano-dollars rounded up; None if that cannot be read.

    The signed value counts, not the offer's. v1 names no token, so the dearest one of its network counts.
    """
    try:
        message = payment.message.reveal()
        if isinstance(message, str):
            message = decode_base64_json(message, field=payment.where)
        return _most(message, registry)
    except (ProtocolError, ValueError, KeyError, TypeError, AttributeError):
        return None  # of another protocol, or of no known form


def _most(message: Mapping[str, Any], registry: AssetRegistry) -> Nanos | None:
    accepted, payload = message.get("accepted") or message, message["payload"]
    network = resolve_network(accepted["network"])
    permit = payload.get("permit2Authorization")
    if permit is None:
        amount, token = payload["authorization"]["value"], accepted.get("asset")
    else:
        amount, token = permit["permitted"]["amount"], permit["permitted"]["token"]
    if network is None or not isinstance(amount, str) or not amount.isascii() or not amount.isdigit():
        return None
    if len(amount) > 78 or int(amount) > MAX_UINT256:
        return None
    if token is None:
        assets = registry.on({network})
    else:
        known = registry.find(network, parse_address(token))
        assets = () if known is None else (known,)
    return max((asset.value_nanos(int(amount)) for asset in assets), default=None)
