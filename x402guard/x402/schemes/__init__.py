"""The supported payment schemes, one file each. A new scheme needs a file and an entry here.

Source: x402 specification, ``schemes/exact`` and ``schemes/upto`` on EVM.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from x402guard.errors import IllegalTransition
from x402guard.kernel.intent import Intent
from x402guard.x402.schemes import exact, upto
from x402guard.x402.schemes.envelope import envelope
from x402guard.x402.schemes.scheme import Scheme

__all__ = ["SCHEMES", "payment_header", "scheme_for"]

SCHEMES: Final[Mapping[tuple[str, str], Scheme]] = MappingProxyType(
    {
        ("exact", "eip3009"): exact.Eip3009(),
        ("exact", "permit2"): exact.Permit2(),
        ("upto", "permit2"): upto.Permit2(),
    }
)


def scheme_for(name: str, method: str) -> Scheme:
    """Return the scheme *name* with the transfer method *method*. Raises ``IllegalTransition`` if there is none."""
    try:
        return SCHEMES[name, method]
    except KeyError:
        raise IllegalTransition(f"no scheme {name!r} by {method!r}") from None


def payment_header(intent: Intent, signature: bytes) -> tuple[str, str]:
    """Return the name and value of the payment header for *intent* with a 65-byte signature."""
    return envelope(intent, scheme_for(intent.scheme, intent.method).payload(intent, signature))
