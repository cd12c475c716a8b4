"""What a rule is shown: the plain facts of a request, and one frozen offer."""

from __future__ import annotations

from dataclasses import dataclass, field

from x402guard.x402.offer import Offer


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """One request as the core sees it; no HTTP library's type among it.

    Attributes:
        method: upper case.
        url: in full, query included; it never leaves the process.
        origin: ``scheme://host:port``, lower case, the port always written.
        host: host name, and the port where it is not the scheme's default.
        secure: the scheme is https.
        loopback: the host is this very machine.
        body_sha256: of the request body in hex; None where the body could not be kept.
        entropy: 32 random bytes; the hold's id and the payment's nonce.
        purchase: the caller's own name for what is bought, or None.
        pay_again: the caller wants a second payment although one may be in doubt.
        pays_itself: the caller put a payment header of its own on the request.
        redirected_from: the origin that the logical request began at, where this hop has another; else None.
        paid_by: the hold that this logical request has signed already, on an earlier hop; else None.
        paid_until: until when that signature is good, in unix seconds.
        body: of the request, as far as it was kept.
    """

    method: str
    url: str
    origin: str
    host: str
    secure: bool
    loopback: bool
    body_sha256: str | None
    entropy: bytes
    purchase: str | None = None
    pay_again: bool = False
    pays_itself: bool = False
    redirected_from: str | None = None
    paid_by: str | None = None
    paid_until: int = 0
    body: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Case:
    """One offer, made in answer to one request."""

    request: RequestFacts
    offer: Offer
