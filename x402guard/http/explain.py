"""Explains what the rules make of a URL or of a tool, without paying: for the owner at a terminal, and for a quote."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any, Final

import httpx
from msgspec import Struct
from msgspec.structs import replace

from x402guard.assets import AssetRegistry
from x402guard.errors import ConfigError, ProtocolError, X402GuardError
from x402guard.flow.request import RequestFacts
from x402guard.http.leaving import CONNECT
from x402guard.http.request import lines_of, mark_guarded, request_facts
from x402guard.http.response import decoded_body
from x402guard.kernel.rows import HoldKind, Nanos
from x402guard.ledger.authorize import Refusal
from x402guard.llm.meter import Meter, Polled, Unmetered, classify
from x402guard.money import format_dollars
from x402guard.policy import Policy
from x402guard.policy.judge import judge
from x402guard.policy.verdicts import Subject, Verdict
from x402guard.x402.foreign import payments_in
from x402guard.x402.offer import Offer, normalise
from x402guard.x402.offer_rules import Case, judge_offer, lifetime_s
from x402guard.x402.wire import PAYMENT_REQUIRED, decode_json, decode_payment_required, parse_payment_required

_WAIT_S: Final = 10.0
_WHOLE_S: Final = 30.0
MOST_BYTES: Final = 1_048_576
"""The most bytes of a body with terms, before and after it is decoded."""


class Explained(Struct, frozen=True):
    """What the rules make of one offer, of one tool, or of a URL without an offer.

    Attributes:
        what: the price, payee, network and scheme of an offer; the URL or the tool otherwise.
        verdict: ``allowed``, ``narrowed``, ``denied``, or the approval that it needs.
        rule, reason: the rule that objects and its reason, or "".
        signs: what would be signed; "" for all but an offer that may be paid.
        not_asked: what paying would ask beyond this, and was not asked; "" for nothing.
    """

    what: str
    verdict: str
    rule: str = ""
    reason: str = ""
    signs: str = ""
    not_asked: str = ""

    @property
    def is_denied(self) -> bool:
        """True if it would be refused."""
        return self.verdict.endswith("denied")

    def to_dict(self) -> dict[str, str]:
        """Return it as JSON values."""
        told = {"what": self.what, "verdict": self.verdict, "rule": self.rule, "reason": self.reason}
        more = {"signs": self.signs, "not_asked": self.not_asked}
        return told | {name: text for name, text in more.items() if text}


class Explainer(Struct, frozen=True):
    """Says what the owner's rules make of a tool or of an offer.

    Attributes:
        rules: the rules.
        registry: the tokens that may be paid with.
        asks: there is an approver.
        meter: knows the calls that are billed without a 402: none is sent to be explained.
    """

    rules: Policy
    registry: AssetRegistry
    asks: bool
    meter: Meter

    def tool(self, name: str) -> Explained:
        """Return what the rules make of a tool by its name."""
        return self._explained(name, judge(self.rules, Subject(HoldKind.TOOL, (name,), Nanos(0))))

    def ask(self, request: httpx.Request) -> tuple[httpx.Response, bytes]:
        """Send a request once, without a payment, and return its answer and the body as it was sent.

        Raises ``ConfigError``, also for what ``refuse_unheld`` names.
        """
        self.refuse_unheld(request)
        url = str(request.url)
        try:
            with httpx.Client(timeout=_WAIT_S, trust_env=False) as http:
                mark_guarded(request)
                with closing(http.send(request, stream=True)) as answer:
                    return answer, _read(answer)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"url: the request to {url[:200]!r} failed: {type(error).__name__}: {error}") from error

    def refuse_unheld(self, request: httpx.Request) -> None:
        """Raise ``ConfigError`` for a call that its provider bills, and for a payment in it: it is sent without a hold."""
        facts = request_facts(request)
        if facts.method == CONNECT or payments_in(list(lines_of(request.headers)), request.read()):
            what = "opens a tunnel" if facts.method == CONNECT else "has a payment in it, which would be sent along"
            raise ConfigError(f"url: this request {what}; ask for the price without it")
        found = classify(self.meter, facts.method, facts.host, facts.url)
        if found is not None and not isinstance(found, Unmetered | Polled):
            what = f"{facts.method} {facts.host} is metered, so asking would cost what the call costs"
            how = "call it within a budget: pay_and_fetch, or x402guard pay without --dry-run"
            raise ConfigError(f"url: {what}; {how}")

    def answer(self, request: httpx.Request, answer: httpx.Response, raw: bytes) -> list[Explained]:
        """Return what the rules make of the offers in an answer with the body *raw*, as it was sent."""
        url = str(request.url)
        if answer.status_code != httpx.codes.PAYMENT_REQUIRED:
            return [Explained(url, f"requires no payment (status {answer.status_code})")]
        try:
            required = _terms(answer, raw)
        except X402GuardError as error:
            return [Explained(url, "denied", error.code, str(error))]
        facts = request_facts(request)
        return [self._offer(offer, facts) for offer in normalise(required, self.registry)]

    def _offer(self, offer: Offer | Refusal, facts: RequestFacts) -> Explained:
        if isinstance(offer, Refusal):
            return Explained("an offer", "denied", offer.rule, offer.reason)
        what = f"${format_dollars(offer.amount_nanos)} to {offer.payee} on {offer.network}, {offer.scheme}"
        case = Case(facts, offer)
        objection = judge_offer(self.rules, case)
        if objection is not None:
            return Explained(what, "denied", objection.rule, objection.reason)
        verdict = judge(self.rules, case.subject)
        most = None if verdict.narrow is None else verdict.narrow.most
        if most is not None and offer.amount_nanos > most:
            reason = (
                f"rule {verdict.narrowed_by!r} narrows this to ${format_dollars(most)}, but the seller sets the price"
            )
            return Explained(what, "denied", verdict.narrowed_by, reason)
        signs = (
            f"{offer.amount_atomic} units of {offer.asset.symbol} ({offer.asset.address}) to {offer.payee} on {offer.network} by {offer.scheme}/{offer.method}, "
            f"good for {lifetime_s(self.rules, case)} s"
        )
        return replace(self._explained(what, verdict), signs=signs)

    def _explained(self, what: str, verdict: Verdict) -> Explained:
        if verdict.action == "ask" and not self.asks:
            verdict = replace(verdict, action="deny", reason=f"{verdict.reason}, but the settings name no approver")
        people = "needs approval" if verdict.approvers <= 1 else f"needs {verdict.approvers} approvals"
        words = {"allow": "allowed", "narrow": "narrowed", "ask": people, "deny": "denied"}
        level = f"{verdict.level}: " if verdict.level else ""
        return Explained(what, f"{level}{words[verdict.action]}", verdict.rule, verdict.reason)


def _read(answer: httpx.Response) -> bytes:
    raw, until = b"", time.monotonic() + _WHOLE_S
    for chunk in answer.iter_raw():
        raw += chunk
        if len(raw) > MOST_BYTES:
            raise ValueError(f"the answer has more than {MOST_BYTES} bytes")
        if time.monotonic() > until:
            raise ValueError(f"the answer took longer than {_WHOLE_S:.0f} s")
    return raw


def _terms(answer: httpx.Response, raw: bytes) -> Any:
    header = answer.headers.get(PAYMENT_REQUIRED)
    if header is not None:
        return decode_payment_required(header)
    value = decode_json(decoded_body(answer, raw, MOST_BYTES) or b"", field="body")
    if not isinstance(value, dict):
        raise ProtocolError("this 402 answer contains no x402 terms", field="body")
    return parse_payment_required(value, field="body")
