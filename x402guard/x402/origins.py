"""Checks offers against the ledger's marks of their origin: protocol version, payees and facilitators."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from msgspec.structs import replace

from x402guard.flow.request import RequestFacts, route_of
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Hold
from x402guard.ledger.authorize import Latch, Refusal
from x402guard.ledger.upto_sellers import LAST_SETTLEMENTS, always_at_ceiling, ceiling_mark
from x402guard.ledger.view import LedgerView
from x402guard.policy.latches import aging, seen, seen_at
from x402guard.policy.patterns import host_name
from x402guard.policy.settings import Policy
from x402guard.x402.offer import Offer
from x402guard.x402.offer_rules import Case

_LOOKS_LIKE: Final = str.maketrans({"0": "o", "1": "l", "i": "l", "5": "s", "-": None, "_": None})

_SECRET: Final = re.compile(
    r"\bsk-[\w-]{16,}|\bgh[pousr]_\w{20,}|\bAKIA[0-9A-Z]{16}\b|\bxox[abprs]-[\w-]{10,}|\beyJ[\w-]{10,300}\.[\w-]{10}"
    r"|\b0x[0-9a-fA-F]{64}\b|-----BEGIN ",
    re.ASCII,
)
"""What looks like an API key, a token, or a private key."""

FACILITATORS_PER_ORIGIN: Final = 3
"""Accepted facilitators per origin without a list: official servers use several addresses of one facilitator."""


def origin_marks(request: RequestFacts) -> list[MarkKey]:
    """Return the keys of an origin's marks: whether it used v2 or was paid, and its facilitators. The last is written.

    An origin that only an offer has named is judged by both, and has a mark of its own: else any offer could say of any
    seller that it uses v2.
    """
    known = "origin", request.origin
    return [known, ("origin", _said(request))] if request.by_offer else [known]


def payee_marks(request: RequestFacts, payee: str) -> list[MarkKey]:
    """Return the keys of the marks that a payee was paid for an origin. The last is written."""
    known = "paid_at", f"{request.origin} {payee}"
    return [known, ("paid_at", f"{_said(request)} {payee}")] if request.by_offer else [known]


def _said(request: RequestFacts) -> str:
    return f"said {request.origin}"


_NOTHING_KNOWN: Final[Mapping[str, Any]] = {"v2": False, "facilitators": []}


def _known(view: LedgerView, request: RequestFacts, days: int | None) -> Mapping[str, Any]:
    """Return what is known of an origin, and was seen within *days* (None: ever)."""
    known = seen(view, ("origin", request.origin), days) or _NOTHING_KNOWN
    said = seen(view, ("origin", _said(request)), days) if request.by_offer else None
    if said is None:
        return known
    return {
        **said,
        **known,
        "v2": known["v2"] or said["v2"],
        "facilitators": list(dict.fromkeys([*known["facilitators"], *said["facilitators"]])),
    }


def _is_new(view: LedgerView, request: RequestFacts, payee: str) -> bool:
    keys = payee_marks(request, payee)
    return view.mark(keys[0]) is None and view.mark(keys[-1]) is None


def shape_mark(host: str) -> MarkKey:
    """Return the key of the mark of hosts that look alike: ``weather-rep0rt.example`` and ``weatherreport.example``."""
    return "shape", host_name(host).translate(_LOOKS_LIKE).replace("rn", "m").replace("vv", "w")


def _is_sibling(one: str, two: str) -> bool:
    """True for one host, or two of one domain: ``eu-1.shop.example`` and ``eu1.shop.example`` have one owner.

    Under a short second label (``co.uk``, ``com.au``) the domain has three labels.
    """
    ours, theirs = one.split("."), two.split(".")
    labels = 2 if len(ours[-2:][0]) > 3 or len(ours) == 2 else 3
    return one == two or (min(len(ours), len(theirs)) > labels and ours[-labels:] == theirs[-labels:])


def judge_live(view: LedgerView, policy: Policy, case: Case) -> Refusal | None:
    """Return the objection of the origin's marks to an offer, or None; update the marks.

    v1 is accepted only until an origin has used v2. A host must not look like another one that was paid before, unless
    the owner lists it. The facilitator of an ``upto`` has to be on the owner's list or,
    without a list, one of the first three of its origin.
    """
    offer, days = case.offer, policy.latch_days
    known = _known(view, case.request, days)
    if offer.version == 1 and known["v2"]:
        reason = f"{case.shown(case.request.origin)} has used x402 v2 before and now offers v1: its v2 header may have been removed"
        return Refusal("version_downgrade", reason, latch=_latch(view, case.request, days))
    alike = _look_alike(view, policy, case) or _no_meter(view, policy, offer)
    if alike is not None:
        return alike
    changed = bool(known.get("paid")) and _is_new(view, case.request, offer.payee)
    if policy.payee_change == "refuse" and changed:
        reason = f"{case.shown(case.request.origin)} was paid before, but never to {offer.payee}; setting policy.payee_change"
        return Refusal("payee_change", reason, latch=_latch(view, case.request, days))
    facilitators = list(known["facilitators"])
    if offer.facilitator is not None:
        objection = _facilitator(policy, offer, facilitators)
        if objection is not None:
            listed = policy.facilitators is not None
            return objection if listed else replace(objection, latch=_latch(view, case.request, days))
        if offer.facilitator not in facilitators and policy.facilitators is None:
            facilitators.append(offer.facilitator)
    if offer.version == 2:
        _note(view, case.request, {**known, "v2": True, "facilitators": facilitators})
    return None


def _note(view: LedgerView, request: RequestFacts, known: Mapping[str, Any]) -> None:
    """Write what is known of an origin, and when it was seen last."""
    view.put_mark(origin_marks(request)[-1], {**known, "at_ms": seen_at(view, known)})


def _latch(view: LedgerView, request: RequestFacts, days: int | None) -> Latch:
    """Return the latch of an origin: that of what was seen itself, else that of what an offer has said of it."""
    keys = [key for key in origin_marks(request) if seen(view, key, days) is not None]
    return aging(keys[0], view.mark(keys[0]) or {}, days)


def _look_alike(view: LedgerView, policy: Policy, case: Case) -> Refusal | None:
    host, key = host_name(case.request.host), shape_mark(case.request.host)
    shaped = seen(view, key, policy.latch_days)
    if policy.hosts is not None or shaped is None or not shaped["host"] or _is_sibling(shaped["host"], host):
        return None
    reason = f"{case.shown(case.request.host)} looks like {shaped['host']}, which was paid before; list it in policy.hosts, with all others that may be paid"
    advice = "Check the name of the host. If it is right, its owner clears the latch: x402guard latches"
    return Refusal("look_alike_host", reason, advice=advice, latch=aging(key, shaped, policy.latch_days))


def _no_meter(view: LedgerView, policy: Policy, offer: Offer) -> Refusal | None:
    if policy.upto_at_ceiling != "refuse" or offer.scheme != "upto":
        return None
    key = ceiling_mark(offer.payee)
    settled = seen(view, key, policy.latch_days)
    if settled is None or not always_at_ceiling(view, offer.payee):
        return None
    reason = f"the last {LAST_SETTLEMENTS} settlements of {offer.payee} took the whole ceiling, so use is not measured"
    latch = aging(key, settled, policy.latch_days)
    return Refusal("upto_at_ceiling", f"{reason} (policy.upto_at_ceiling)", latch=latch)


def note_payee(view: LedgerView, policy: Policy, case: Case) -> None:
    """Record the payee of an origin: one mark each, so that the cost of a decision does not grow with their number."""
    _note(view, case.request, {**_known(view, case.request, policy.latch_days), "paid": True})
    view.put_mark(payee_marks(case.request, case.offer.payee)[-1], {"known": True})
    host, shape = host_name(case.request.host), shape_mark(case.request.host)
    shaped = seen(view, shape, policy.latch_days)
    if not case.request.by_offer and (shaped is None or shaped["host"] in ("", host)):
        view.put_mark(shape, {"host": host, "at_ms": seen_at(view, shaped)})


def note_secret(view: LedgerView, hold: Hold, case: Case) -> None:
    """Record an event if the URL of a payment to a new payee holds what looks like a key, without the key."""
    if _is_new(view, case.request, case.offer.payee) and _SECRET.search(unquote(case.request.url)):
        facts = {"name": "secret_in_url", "place": route_of(case.request), "payee": case.offer.payee}
        view.record(hold.node_id, "event", hold_id=hold.id, facts=facts)


def note_version(view: LedgerView, policy: Policy, request: RequestFacts) -> None:
    """Record that an origin has used v2, also if its offer was refused, which makes nothing else of it known anew."""
    known = _known(view, request, policy.latch_days)
    view.put_mark(origin_marks(request)[-1], {"at_ms": view.now_ms, **known, "v2": True})


def _facilitator(policy: Policy, offer: Offer, seen: list[str]) -> Refusal | None:
    if policy.facilitators is not None:
        if offer.facilitator in policy.facilitators:
            return None
        return Refusal("facilitators", f"facilitator {offer.facilitator} is not in policy.facilitators")
    if offer.facilitator in seen or len(seen) < FACILITATORS_PER_ORIGIN:
        return None
    return Refusal(
        "facilitators",
        f"facilitator {offer.facilitator} is the fourth of this origin; list those you trust in policy.facilitators",
    )
