"""The rails on which an agent can pay: by which header, member of JSON-RPC and code a payment, and its receipt, are known.

A payment that the guard has not made is seen by these names, whichever rail it takes; so are the vouchers of x402's batch
settlement and of MPP's sessions, which stand where a payment does. ``SIGN-IN-WITH-X`` is no rail: it proves an address, and
moves nothing. Sources: x402 specification (HTTP, MCP and A2A transports); the "Payment" HTTP authentication scheme and its MCP
binding (MPP); L402 protocol specification.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class Rail(Struct, frozen=True):
    """One way to pay over HTTP and JSON-RPC. Names of headers in lower case.

    Attributes:
        headers: request headers that hold a payment, or a proof of one.
        schemes: schemes of ``Authorization`` that do.
        members: members of ``params._meta`` that do, in JSON-RPC.
        receipts: response headers that show one.
        codes: JSON-RPC errors that ask for one.
    """

    name: str
    headers: tuple[str, ...] = ()
    schemes: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    receipts: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()


RAILS: Final = (
    Rail(
        "x402",
        headers=("payment-signature", "x-payment"),
        members=("x402/payment",),
        receipts=("payment-response", "x-payment-response"),
        codes=(402,),
    ),
    Rail(
        "mpp",
        headers=("payment-authorization",),
        schemes=("payment",),
        members=("org.paymentauth/credential",),
        receipts=("payment-receipt",),
        codes=(-32042, -32043),
    ),
    Rail("l402", headers=("macaroon", "grpc-metadata-macaroon"), schemes=("l402", "lsat")),
)

REQUEST_HEADERS: Final = frozenset(name for rail in RAILS for name in rail.headers)
SCHEMES: Final = frozenset(name for rail in RAILS for name in rail.schemes)
MEMBERS: Final = tuple(name for rail in RAILS for name in rail.members)
RECEIPT_HEADERS: Final = frozenset(name for rail in RAILS for name in rail.receipts)
CODES: Final = frozenset(code for rail in RAILS for code in rail.codes)
