"""Which offer, if any: the rules on each, then the cheapest of what is left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from x402guard.ledger.authorize import Refusal
from x402guard.ledger.upto_sellers import LAST_SETTLEMENTS, always_at_ceiling
from x402guard.ledger.view import LedgerView, MarkKey
from x402guard.policy.settings import Policy
from x402guard.x402.offer import Offer
from x402guard.x402.offer_rules import Case

FACILITATORS_PER_ORIGIN: Final = 3
"""Official servers pick among several addresses of their facilitator; a fourth new one is no longer that."""


def origin_mark(origin: str) -> MarkKey:
    """Return the key of what the ledger remembers of an origin: that it has spoken v2, and its facilitators."""
    return "origin", origin


def payee_mark(origin: str, payee: str) -> MarkKey:
    """Return the key of the small row that says that an origin was paid by way of a payee."""
    return "paid_at", f"{origin} {payee}"


def judge_live(view: LedgerView, policy: Policy, case: Case) -> Refusal | None:
    """Return what the ledger's memory of the origin has against an offer, and remember what is new.

    v1 is taken only until an origin has spoken v2. The facilitator of an ``upto`` is on the owner's list or, without a
    list, one of the first three of its origin.
    """
    offer, key = case.offer, origin_mark(case.request.origin)
    known: Mapping[str, Any] = view.mark(key) or {"v2": False, "facilitators": []}
    if offer.version == 1 and known["v2"]:
        reason = (
            f"{case.request.origin} has spoken x402 v2 before and now offers v1: somebody may have stripped its header"
        )
        return Refusal("version_downgrade", reason)
    if policy.upto_at_ceiling == "refuse" and offer.scheme == "upto" and always_at_ceiling(view, offer.payee):
        reason = (
            f"the last {LAST_SETTLEMENTS} settlements of {offer.payee} took the whole ceiling: that is no measured use"
        )
        return Refusal("upto_at_ceiling", f"{reason} (policy.upto_at_ceiling)")
    paid = bool(known.get("paid"))
    if policy.payee_change == "refuse" and paid and view.mark(payee_mark(case.request.origin, offer.payee)) is None:
        reason = f"{case.request.origin} was paid before and never by way of {offer.payee}; setting policy.payee_change"
        return Refusal("payee_change", reason)
    seen = list(known["facilitators"])
    if offer.facilitator is not None:
        objection = _facilitator(policy, offer, seen)
        if objection is not None:
            return objection
        if offer.facilitator not in seen and policy.facilitators is None:
            seen.append(offer.facilitator)
    if offer.version == 2:
        view.put_mark(key, {**known, "v2": True, "facilitators": seen})
    return None


def note_payee(view: LedgerView, case: Case) -> None:
    """Remember whom an origin was paid by way of: a row each, so that no decision grows with their number."""
    origin = case.request.origin
    known: Mapping[str, Any] = view.mark(origin_mark(origin)) or {"v2": False, "facilitators": []}
    view.put_mark(origin_mark(origin), {**known, "paid": True})
    view.put_mark(payee_mark(origin, case.offer.payee), {"known": True})


def note_version(view: LedgerView, origin: str) -> None:
    """Remember that an origin has spoken v2, also where its offer was refused."""
    key = origin_mark(origin)
    view.put_mark(key, {"facilitators": [], **(view.mark(key) or {}), "v2": True})


def _facilitator(policy: Policy, offer: Offer, seen: list[str]) -> Refusal | None:
    if policy.facilitators is not None:
        if offer.facilitator in policy.facilitators:
            return None
        return Refusal("facilitators", f"facilitator {offer.facilitator} is not in policy.facilitators")
    if offer.facilitator in seen or len(seen) < FACILITATORS_PER_ORIGIN:
        return None
    return Refusal(
        "facilitators",
        f"facilitator {offer.facilitator} is the fourth that this origin shows; list those you trust in policy.facilitators",
    )
