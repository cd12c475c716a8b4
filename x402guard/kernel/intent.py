"""Defines a payment's terms, and the intent: its unsigned fields, written to the ledger before anything is signed."""

from __future__ import annotations

from operator import attrgetter
from typing import Final, Literal

from msgspec import Struct

from x402guard.kernel.evm import Address

TransferMethod = Literal["eip3009", "permit2"]
"""How the token moves: by its own ``transferWithAuthorization``, or by Permit2 through an x402 proxy."""


class Terms(Struct, frozen=True, gc=False):
    """What a payment moves, to whom and how: as offered, as asked about, and as signed. Terms are compared by ``==``.

    Attributes:
        version: x402 version of the offer, 1 or 2.
        scheme, method: ``exact`` or ``upto``; ``eip3009`` or ``permit2``.
        network: the CAIP-2 id.
        token, payee: the token contract, and the paid address.
        amount_atomic: atomic units; the ceiling for ``upto``.
    """

    version: Literal[1, 2]
    scheme: str
    method: TransferMethod
    network: str
    token: Address
    amount_atomic: int
    payee: Address

    @property
    def terms(self) -> Terms:
        """The terms alone, of an offer or an intent."""
        return Terms(*_terms(self))


_terms: Final = attrgetter(*Terms.__struct_fields__)


class Intent(Terms, frozen=True, kw_only=True, gc=False):
    """Every field of a payment except its signature. The payment header can be rebuilt from the row alone.

    Attributes:
        network_as_offered: the name of the network that the offer used (v1 names differ). chain_id: of that network.
        domain_name, domain_version: the token's EIP-712 domain, from the asset registry.
        payer: the paying address.
        valid_after, valid_until: unix time in seconds. EIP-3009 is valid while t < ``valid_until``, Permit2 while
            t ≤ ``valid_until``.
        nonce: 32 bytes as an integer.
        spender, facilitator: Permit2's spender (an x402 proxy), and the address that may settle an ``upto``; else None.
        accepted_json, resource_json, extensions_json: the parts of the server's offer that a payment echoes.
        payment_id: the ``payment-identifier`` sent if the server offers that extension, else None.
        digest: the EIP-712 digest that is signed, 32 bytes as hex.
    """

    network_as_offered: str
    chain_id: int
    domain_name: str
    domain_version: str
    payer: Address
    valid_after: int
    valid_until: int
    nonce: int
    spender: Address | None
    facilitator: Address | None
    accepted_json: str
    resource_json: str | None
    extensions_json: str | None
    payment_id: str | None
    digest: str

    def dead_at(self, block_time: int) -> bool:
        """True if a block of *block_time* (unix seconds) can no longer take this payment.

        EIP-3009 requires t < validBefore; Permit2 refuses t > deadline.
        """
        return block_time >= self.valid_until if self.method == "eip3009" else block_time > self.valid_until
