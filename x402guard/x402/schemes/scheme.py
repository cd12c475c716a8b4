"""The interface of all payment schemes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Protocol

from msgspec import Struct
from msgspec.structs import asdict, replace

from x402guard.kernel.evm import Address
from x402guard.kernel.intent import Intent
from x402guard.kernel.typed_data import digest
from x402guard.x402.offer import Offer

V1_BACKDATE_S: Final = 600
"""Seconds by which v1 backdates ``validAfter``, for facilitators whose clock is behind."""


class Proposal(Struct, frozen=True):
    """The input of a payment.

    Attributes:
        offer: the checked offer.
        payer: the account that pays.
        now_unix: the ledger's clock in unix seconds.
        lifetime_s: the lifetime of the signature in seconds, already clamped.
        nonce: 32 new random bytes as an integer.
        payment_id: the ``payment-identifier`` to send if the server offers it.
    """

    offer: Offer
    payer: Address
    now_unix: int
    lifetime_s: int
    nonce: int
    payment_id: str


class Scheme(Protocol):
    """One way to pay: makes the unsigned intent of a proposal, and the payload to send."""

    def propose(self, proposal: Proposal) -> Intent:
        """Return the unsigned payment with its digest."""

    def payload(self, intent: Intent, signature: bytes) -> Mapping[str, Any]:
        """Return the ``payload`` object of the payment message."""


def draft(proposal: Proposal, *, spender: Address | None, domain: tuple[str, str]) -> Intent:
    """Return the intent of a proposal with its digest. The arguments are what differs between schemes."""
    offer = proposal.offer
    back = V1_BACKDATE_S if offer.version == 1 else None
    intent = Intent(
        **asdict(offer.terms),
        network_as_offered=offer.network_as_offered,
        chain_id=offer.asset.chain_id,
        domain_name=domain[0],
        domain_version=domain[1],
        payer=proposal.payer,
        valid_after=0 if back is None else proposal.now_unix - back,
        valid_until=proposal.now_unix + proposal.lifetime_s,
        nonce=proposal.nonce,
        spender=spender,
        facilitator=offer.facilitator,
        accepted_json=offer.accepted_json,
        resource_json=offer.resource_json,
        extensions_json=offer.extensions_json,
        payment_id=proposal.payment_id if _offers_identifier(offer) else None,
        digest="",
    )
    return replace(intent, digest=digest(intent).hex())


def _offers_identifier(offer: Offer) -> bool:
    if offer.extensions_json is None:
        return False
    extensions = json.loads(offer.extensions_json)
    return isinstance(extensions, dict) and isinstance(extensions.get("payment-identifier"), dict)
