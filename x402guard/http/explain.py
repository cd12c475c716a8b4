"""Explains what the rules make of a URL or of a tool, without paying: for the owner at a terminal, and for a quote."""

from __future__ import annotations

from contextlib import closing
from typing import Any, Final

import httpx
from msgspec import Struct

from x402guard.assets import AssetRegistry
from x402guard.errors import ConfigError, ProtocolError, X402GuardError
from x402guard.flow.request import RequestFacts
from x402guard.frozen import replace
from x402guard.http.request import mark_guarded, request_facts
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.model import HoldKind
from x402guard.money import Nanos, format_dollars
from x402guard.policy import Policy
from x402guard.policy.judge import judge
from x402guard.policy.verdicts import Subject, Verdict
from x402guard.x402.offer import Offer, normalise
from x402guard.x402.offer_rules import Case, judge_offer, lifetime_s
from x402guard.x402.wire import PAYMENT_REQUIRED, decode_json, decode_payment_required, parse_payment_required

_WAIT_S: Final = 10.0
_MOST_BYTES: Final = 1_048_576


class Explained(Struct, frozen=True):
    """What the rules make of one offer, of one tool, or of a URL without an offer.

    Attributes:
        what: the price, payee, network and scheme of an offer; the URL or the tool otherwise.
        verdict: ``allowed``, ``narrowed``, ``denied``, or the approval that it needs.
        rule, reason: the rule that objects and its reason, or "".
        signs: what would be signed; "" for all but an offer that may be paid.
    """

    what: str
    verdict: str
    rule: str = ""
    reason: str = ""
    signs: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return it as JSON values."""
        told = {"what": self.what, "verdict": self.verdict, "rule": self.rule, "reason": self.reason}
        return {**told, "signs": self.signs} if self.signs else told


def explain_tool(tool: str, rules: Policy, *, asks: bool) -> Explained:
    """Return what the rules make of a tool by its name. *asks*: there is an approver."""
    return _explained(tool, judge(rules, Subject(HoldKind.TOOL, (tool,), Nanos(0))), asks=asks)


def explain_url(request: httpx.Request, rules: Policy, registry: AssetRegistry, *, asks: bool) -> list[Explained]:
    """Send a request once, without a payment, and return what the rules make of each offer. Raises ``ConfigError``."""
    url = str(request.url)
    try:
        with httpx.Client(timeout=_WAIT_S, trust_env=False) as http:
            facts = request_facts(request)
            with closing(http.send(mark_guarded(request), stream=True)) as answer:
                body = _read(answer)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"url: the request to {url[:200]!r} failed: {type(error).__name__}: {error}") from error
    if answer.status_code != httpx.codes.PAYMENT_REQUIRED:
        return [Explained(url, f"requires no payment (status {answer.status_code})")]
    try:
        required = _terms(answer, body)
    except X402GuardError as error:
        return [Explained(url, "denied", error.code, str(error))]
    return [_explain_offer(offer, facts, rules, asks=asks) for offer in normalise(required, registry)]


def _read(answer: httpx.Response) -> bytes:
    body = b""
    for chunk in answer.iter_bytes():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise ValueError(f"the answer has more than {_MOST_BYTES} bytes")
    return body


def _terms(answer: httpx.Response, body: bytes) -> Any:
    header = answer.headers.get(PAYMENT_REQUIRED)
    if header is not None:
        return decode_payment_required(header)
    value = decode_json(body, field="body")
    if not isinstance(value, dict):
        raise ProtocolError("this 402 answer contains no x402 terms", field="body")
    return parse_payment_required(value, field="body")


def _explain_offer(offer: Offer | Refusal, facts: RequestFacts, rules: Policy, *, asks: bool) -> Explained:
    if isinstance(offer, Refusal):
        return Explained("an offer", "denied", offer.rule, offer.reason)
    what = f"${format_dollars(offer.amount_nanos)} to {offer.payee} on {offer.network}, {offer.scheme}"
    case = Case(facts, offer)
    objection = judge_offer(rules, case)
    if objection is not None:
        return Explained(what, "denied", objection.rule, objection.reason)
    verdict = judge(rules, case.subject)
    most = None if verdict.narrow is None else verdict.narrow.most
    if most is not None and offer.amount_nanos > most:
        reason = f"rule {verdict.narrowed_by!r} narrows this to ${format_dollars(most)}, but the seller sets the price"
        return Explained(what, "denied", verdict.narrowed_by, reason)
    signs = (
        f"{offer.amount_atomic} units of {offer.asset.symbol} ({offer.asset.address}) to {offer.payee} on {offer.network} by {offer.scheme}/{offer.method}, "
        f"good for {lifetime_s(rules, case)} s"
    )
    return replace(_explained(what, verdict, asks=asks), signs=signs)


def _explained(what: str, verdict: Verdict, *, asks: bool) -> Explained:
    if verdict.action == "ask" and not asks:
        verdict = replace(verdict, action="deny", reason=f"{verdict.reason}, but the settings name no approver")
    people = "needs approval" if verdict.approvers <= 1 else f"needs {verdict.approvers} approvals"
    words = {"allow": "allowed", "narrow": "narrowed", "ask": people, "deny": "denied"}
    level = f"{verdict.level}: " if verdict.level else ""
    return Explained(what, f"{level}{words[verdict.action]}", verdict.rule, verdict.reason)
