"""The built-in rules for offers: one function ``(Policy, Case) → Refusal or None`` per rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from x402guard.assets import TEST_NETWORKS
from x402guard.flow.request import RequestFacts, routes_of
from x402guard.kernel.rows import HoldKind, Nanos
from x402guard.ledger.authorize import Refusal
from x402guard.money import format_dollars
from x402guard.policy.patterns import host_listed, host_name
from x402guard.policy.settings import MIN_LIFETIME_S, Policy
from x402guard.policy.steps import shown_host
from x402guard.policy.verdicts import NO_VERDICT, Subject, Verdict
from x402guard.x402.offer import Offer


class Case(Struct, frozen=True):
    """One offer in answer to one request, the verdict of the owner's rules on it, and what the account can pay with.

    *funds* are in nano-dollars, by the chain; None where no chain is read. *excused* is the objection to it that shadow
    mode lets pass.
    """

    request: RequestFacts
    offer: Offer
    verdict: Verdict = NO_VERDICT
    funds: Nanos | None = None
    excused: Refusal | None = None

    def shown(self, words: str = "") -> str:
        """Return the request's host, or *words* for it, for messages that a model reads: no host that a redirect has named."""
        return shown_host(self.request.host, self.request.begun, words)

    @property
    def subject(self) -> Subject:
        """The payment as the owner's rules see it."""
        amount, payee = Nanos(self.offer.amount_nanos), self.offer.payee
        request = self.request
        return Subject(HoldKind.PAYMENT, routes_of(request), amount, payee, tool=request.tool, begun=request.begun)


OfferRule = Callable[[Policy, Case], Refusal | None]


def https(_policy: Policy, case: Case) -> Refusal | None:
    """Refuse plain http, because anyone on the path can change it; allowed only for loopback on a test network."""
    if case.request.secure or (case.request.loopback and case.offer.network in TEST_NETWORKS):
        return None
    where = "a real network" if case.request.loopback else "another machine"
    start = case.request.redirected_from  # who redirects chooses the other origin's name, so that is a word of theirs
    asked = case.request.origin if start is None else f"the origin to which {start} redirected"
    return Refusal(
        "https",
        f"{asked} is plain http to {where}; payments need https",
        advice="Ask the server over https.",
        words="" if start is None else case.request.origin,
    )


def redirect(policy: Policy, case: Case) -> Refusal | None:
    """Refuse an offer after a redirect to another origin."""
    start = case.request.redirected_from
    if start is None or policy.unsafe_pay_after_redirect:
        return None
    reason = f"{start} redirected to another origin, which asks for money; setting policy.unsafe_pay_after_redirect"
    advice = "If you know that address to be right, ask it itself, in another session."
    return Refusal("redirect", reason, words=case.request.origin, advice=advice)


def hosts(policy: Policy, case: Case) -> Refusal | None:
    """Allow only hosts on the list, if there is one. A name with other letters than ASCII's has to be on it."""
    if policy.hosts is None and any(part.startswith("xn--") for part in case.request.host.split(".")):
        reason = f"{case.shown()} has letters that can look like others; list it in policy.hosts, with all others that may be paid"
        return Refusal("hosts", reason, words=case.request.host if case.request.begun else "")
    return judge_host(policy, case.request.host, case.request.begun)


def networks(policy: Policy, case: Case) -> Refusal | None:
    """Allow only networks on the list (default: test networks)."""
    return judge_network(policy, case.offer.network)


def judge_network(policy: Policy, network: str) -> Refusal | None:
    """Return the refusal of a payment on a network that is not on the owner's list, or None."""
    if policy.networks is None or network in policy.networks:
        return None
    kind = "a test network" if network in TEST_NETWORKS else "real money"
    return Refusal("networks", f"{network} ({kind}) is not in policy.networks ({_some(policy.networks)})")


def assets(policy: Policy, case: Case) -> Refusal | None:
    """Allow only tokens on the list, if there is one; the symbols are those of the asset registry, not the offer's."""
    asset = case.offer.asset
    if policy.assets is None or asset.symbol.upper() in policy.assets or asset.contract in policy.assets:
        return None
    return Refusal("assets", f"{asset.symbol} at {asset.contract} is not in policy.assets ({_some(policy.assets)})")


def schemes(policy: Policy, case: Case) -> Refusal | None:
    """Allow only schemes on the list."""
    if case.offer.scheme in policy.schemes:
        return None
    return Refusal("schemes", f"scheme {case.offer.scheme} is not in policy.schemes ({_some(policy.schemes)})")


def flows(policy: Policy, case: Case) -> Refusal | None:
    """Allow only payment flows on the list: upfront and escrow flows move money before delivery."""
    if case.offer.flow in policy.flows:
        return None
    return Refusal("flows", f"extra.paymentFlow is not in policy.flows ({_some(policy.flows)})", words=case.offer.flow)


def payees(policy: Policy, case: Case) -> Refusal | None:
    """Allow only payees on the list, if there is one."""
    return judge_payee(policy, case.offer.payee)


def lifetime(policy: Policy, case: Case) -> Refusal | None:
    """Refuse a lifetime that is too short to use; a long one is lowered to ``max_lifetime_s``, not refused."""
    seconds = lifetime_s(policy, case)
    if seconds >= MIN_LIFETIME_S:
        return None
    return Refusal(
        "lifetime", f"maxTimeoutSeconds {case.offer.max_timeout_s} leaves less than the required {MIN_LIFETIME_S} s"
    )


def cap(policy: Policy, case: Case) -> Refusal | None:
    """Refuse a payment above the cap."""
    return judge_amount(policy, Nanos(case.offer.amount_nanos))


def judge_host(policy: Policy, host: str, begun: str = "") -> Refusal | None:
    """Return the refusal of a payment to a host that is not on the owner's list, or None.

    With a dot at its end it may be another host: a resolver adds no domain to it, and a list of hosts may not have it.
    *begun*: the name of the first hop, if a redirect has named the host.
    """
    if host_name(host).endswith("."):
        advice = "Write the host without the dot at its end."
        reason = f"{shown_host(host, begun)} ends with a dot, and is not what a list has"
        return Refusal("hosts", reason, advice=advice, words=host if begun else "")
    if policy.hosts is None or host_listed(host, policy.hosts):
        return None
    reason = f"{shown_host(host, begun)} is not in policy.hosts ({_some(policy.hosts)})"
    return Refusal("hosts", reason, words=host if begun else "")


def judge_payee(policy: Policy, payee: str) -> Refusal | None:
    """Return the refusal of a payment to a payee that is not on the owner's list, or None."""
    if policy.payees is None or payee in policy.payees:
        return None
    return Refusal("payees", f"payee {payee} is not in policy.payees ({_some(policy.payees)})")


def judge_amount(policy: Policy, amount: Nanos) -> Refusal | None:
    """Return the refusal of a payment above the cap, or None."""
    limit = policy.cap_nanos
    if limit is None or amount <= limit:
        return None
    reason = f"${format_dollars(amount)} is above policy.per_payment_cap (${format_dollars(limit)})"
    return Refusal("per_payment_cap", reason, amount, limit)


def resource(policy: Policy, case: Case) -> Refusal | None:
    """Refuse an offer for another host: the signature does not cover the URL, so it may be another buyer's offer."""
    named = resource_host(case)
    if policy.resource_mismatch == "warn" or named is None:
        return None
    return Refusal(
        "resource_mismatch",
        f"the offer is for another host than the request's: {case.shown(case.request.host)}; setting policy.resource_mismatch",
        words=named,
    )


def resource_host(case: Case) -> str | None:
    """Return the host in the offer's ``resource`` if it is not the request's; else None."""
    if case.offer.resource_url is None:
        return None
    try:
        url = urlsplit(case.offer.resource_url)
        named = None if url.scheme == "mcp" and not case.request.is_http else url.hostname
        asked = urlsplit(case.request.origin).hostname
    except ValueError:
        return "(unreadable)"
    if named is None or named == asked:
        return None
    return named if _HOST.fullmatch(named) else "(unreadable)"  # other characters are words for who reads the journal


_HOST: Final = re.compile(r"[\w.:%-]{1,253}", re.ASCII)


def lifetime_s(policy: Policy, case: Case) -> int:
    """Return the lifetime that a signature may have, in seconds: the server's request, at most ``max_lifetime_s``."""
    return min(case.offer.max_timeout_s, policy.max_lifetime_s)


def _some(values: Collection[str], most: int = 4) -> str:
    shown = sorted(values)
    rest = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + rest


OFFER_RULES: Final[tuple[OfferRule, ...]] = (
    https, redirect, hosts, networks, assets, schemes, flows, payees, lifetime, resource, cap,
)  # fmt: skip
"""The order is fixed and the first objection decides, so the refusal is the same every time."""


def judge_offer(policy: Policy, case: Case) -> Refusal | None:
    """Return the refusal of the first rule that objects to an offer, or None."""
    for rule in OFFER_RULES:
        objection = rule(policy, case)
        if objection is not None:
            return objection
    return None


def rank(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Return the offers, cheapest first; for equal amounts EIP-3009 before Permit2, then in the server's order."""
    return tuple(sorted(cases, key=_cost))


def _cost(case: Case) -> tuple[int, bool, int]:
    offer = case.offer
    return offer.amount_nanos, offer.method != "eip3009", offer.position
