"""Checks offers against the ledger's marks of their origin: protocol version, payees and facilitators."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from x402guard.flow.request import RequestFacts, route_of
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import Hold
from x402guard.ledger.authorize import Latch, Refusal
from x402guard.ledger.upto_sellers import LAST_SETTLEMENTS, always_at_ceiling, ceiling_mark
from x402guard.ledger.view import LedgerView
from x402guard.policy.latches import aging, seen, seen_at
from x402guard.policy.patterns import host_name
from x402guard.policy.prices import price_route
from x402guard.policy.sellers import sellers_at, takes_any_payee
from x402guard.policy.settings import Policy
from x402guard.x402.offer import Offer
from x402guard.x402.offer_rules import Case, resource_host

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
    """Return the keys of an origin's marks: whether it was paid, and its facilitators. The last is written.

    An origin that only an offer has named is judged by both, and has a mark of its own: else any offer could say of any
    seller that it uses v2.
    """
    known = "origin", request.origin
    return [known, ("origin", _said(request))] if request.by_offer else [known]


def version_marks(request: RequestFacts) -> list[MarkKey]:
    """Return the keys of the marks that a route has used v2. The last is written.

    A place that a redirect has named is a seller's word: the route of the first hop is judged as well.
    """
    route = price_route(route_of(request))
    keys = [("v2", f"{request.origin} {route}")]
    if request.begun:
        keys.insert(0, ("v2", f"{request.redirected_from or request.origin} {price_route(request.begun)}"))
    return [*keys, ("v2", f"{_said(request)} {route}")] if request.by_offer else keys


def payee_marks(request: RequestFacts, payee: str) -> list[MarkKey]:
    """Return the keys of the marks that a payee was paid for an origin. The last is written."""
    known = "paid_at", f"{request.origin} {payee}"
    return [known, ("paid_at", f"{_said(request)} {payee}")] if request.by_offer else [known]


def _is_asked(request: RequestFacts) -> bool:
    """True if a request went to the host itself. An offer that came otherwise may name any."""
    return request.is_http and not request.by_offer


def _said(request: RequestFacts) -> str:
    return f"said {request.origin}"


_NOTHING_KNOWN: Final[Mapping[str, Any]] = {"facilitators": []}


def _known(view: LedgerView, request: RequestFacts, days: int | None) -> Mapping[str, Any]:
    """Return what is known of an origin, and was seen within *days* (None: ever)."""
    known = seen(view, ("origin", request.origin), days) or _NOTHING_KNOWN
    said = seen(view, ("origin", _said(request)), days) if request.by_offer else None
    if said is None:
        return known
    return {
        **said,
        **known,
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
    """Return the objection of the marks of an origin and a route to an offer, or None; update the marks.

    v1 is accepted only until a route has used v2. A host must not look like another one that was paid before, unless
    the owner lists it. A host that has kept one payee keeps it, if the policy says so. The facilitator of an ``upto`` has
    to be on the owner's list or, without a list, one of the first three of its origin. ``Policy.sellers`` lifts these rules
    for a host that was asked itself.
    """
    offer, days, request = case.offer, policy.latch_days, case.request
    known = _known(view, request, days)
    objection = (
        _downgrade(view, policy, case)
        or _look_alike(view, policy, case)
        or _no_meter(view, policy, offer)
        or _payee_change(view, policy, case, known)
        or _facilitator(view, policy, case, known)
    )
    if objection is not None:
        return objection
    if offer.facilitator is not None and not _takes_any_facilitator(policy, request):
        facilitators = list(dict.fromkeys([*known["facilitators"], offer.facilitator]))
        if policy.facilitators is None and facilitators != known["facilitators"]:
            _note(view, request, {**known, "facilitators": facilitators})
    if offer.version == 2:
        note_version(view, policy, request)
    return None


def _downgrade(view: LedgerView, policy: Policy, case: Case) -> Refusal | None:
    request, days = case.request, policy.latch_days
    if case.offer.version != 1 or not has_used_v2(view, policy, request):
        return None
    if _is_asked(request) and any(each.versions for each in sellers_at(policy.sellers, request.host)):
        return None
    where = f"{case.shown(request.origin)} has used x402 v2 for this route before and now offers v1"
    key = next(key for key in version_marks(request) if seen(view, key, days) is not None)
    latch = aging(key, view.mark(key) or {}, days)
    why = f"{where}: its v2 header may have been removed; if it uses both, see policy.sellers, versions"
    return Refusal("version_downgrade", why, latch=latch)


def has_used_v2(view: LedgerView, policy: Policy, request: RequestFacts) -> bool:
    """True if a route has used v2, as far as that still counts."""
    found = (seen(view, key, policy.latch_days) for key in version_marks(request))
    return any(row is not None and row["v2"] for row in found)


def _payee_change(view: LedgerView, policy: Policy, case: Case, known: Mapping[str, Any]) -> Refusal | None:
    request, payee = case.request, case.offer.payee
    if policy.payee_change != "refuse" or not known.get("paid") or not known.get("one_payee", True):
        return None
    if (
        payee in (policy.payees or ())
        or not _is_new(view, request, payee)
        or (_is_asked(request) and takes_any_payee(policy.sellers, request.host))
    ):
        return None
    reason = f"{case.shown(request.origin)} was paid before, but never to {payee}; setting policy.payee_change"
    return Refusal("payee_change", reason, latch=_latch(view, request, policy.latch_days))


def _takes_any_facilitator(policy: Policy, request: RequestFacts) -> bool:
    if not _is_asked(request):
        return False
    return any(each.facilitators == "any" for each in sellers_at(policy.sellers, request.host))


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
    request = case.request
    known = _known(view, request, policy.latch_days)
    if not _is_asked(request) or not takes_any_payee(policy.sellers, request.host):  # else a mark for each sale
        another = bool(known.get("paid")) and _is_new(view, request, case.offer.payee)
        known = {**known, "one_payee": known.get("one_payee", True) and not another}
        view.put_mark(payee_marks(request, case.offer.payee)[-1], {"known": True})
    _note(view, request, {**known, "paid": True})
    host, shape = host_name(case.request.host), shape_mark(case.request.host)
    shaped = seen(view, shape, policy.latch_days)
    if not case.request.by_offer and (shaped is None or shaped["host"] in ("", host)):
        view.put_mark(shape, {"host": host, "at_ms": seen_at(view, shaped)})


def note_secret(view: LedgerView, hold: Hold, case: Case) -> None:
    """Record an event if the URL of a payment to a new payee holds what looks like a key, without the key."""
    if _is_new(view, case.request, case.offer.payee) and _SECRET.search(unquote(case.request.url)):
        facts = {"name": "secret_in_url", "place": route_of(case.request), "payee": case.offer.payee}
        view.record(hold.node_id, "event", hold_id=hold.id, facts=facts)


def note_resource(view: LedgerView, hold: Hold, case: Case) -> None:
    """Record an event if an offer names another host than the one that was asked."""
    named = resource_host(case)
    if named is not None:
        facts = {"name": "resource_mismatch", "offered_for": named[:200], "asked": case.request.host}
        view.record(hold.node_id, "event", hold_id=hold.id, facts=facts)


def note_version(view: LedgerView, policy: Policy, request: RequestFacts) -> None:
    """Record that a route has used v2, also if its offer was refused."""
    key = version_marks(request)[-1]
    known = seen(view, key, policy.latch_days)
    view.put_mark(key, {"v2": True, "at_ms": seen_at(view, known)})


def _facilitator(view: LedgerView, policy: Policy, case: Case, known: Mapping[str, Any]) -> Refusal | None:
    facilitator, seen_before = case.offer.facilitator, known["facilitators"]
    if facilitator is None:
        return None
    if policy.facilitators is not None:
        if facilitator in policy.facilitators:
            return None
        return Refusal("facilitators", f"facilitator {facilitator} is not in policy.facilitators")
    if facilitator in seen_before or len(seen_before) < FACILITATORS_PER_ORIGIN:
        return None
    if _takes_any_facilitator(policy, case.request):
        return None
    return Refusal(
        "facilitators",
        f"facilitator {facilitator} is the fourth of this origin; list those you trust in policy.facilitators, or say "
        "that it has a pool: policy.sellers",
        latch=_latch(view, case.request, policy.latch_days),
    )
