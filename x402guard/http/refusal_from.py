"""``refusal_from``: finds the typed refusal behind the exception of a vendor's SDK."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from x402guard.errors import PaidNotDelivered, PaymentRefused, SettlementUncertain, X402GuardError
from x402guard.http.response import REFUSAL
from x402guard.kernel.rows import Nanos
from x402guard.money import dollars_to_nanos

_MOST_CAUSES: Final = 100
_URN: Final = "urn:x402guard:"
_NAMED: Final = re.compile(r"\[urn:x402guard:(?P<code>\w+):(?P<rule>\w*)\]")
_MOST_WORDS: Final = 100_000
_RESPONSES: Final = ("response", "raw_response", "http_response")
_BODIES: Final = ("body", "details", "response_json", "message")


def refusal_from(error: BaseException) -> X402GuardError | None:
    """Return the ``X402GuardError`` that caused *error*, or None if another error caused it.

    Searches causes, contexts and groups for an error of a transport, and the responses that SDKs keep for the local 402
    of ``on_refusal="respond"``.
    """
    for link in _chain(error):
        if isinstance(link, X402GuardError):
            return link
        for name in _RESPONSES:
            found = _of_response(getattr(link, name, None))
            if found is not None:
                return found
        for name in _BODIES:
            found = _of_problem(getattr(link, name, None))
            if found is not None:
                return found
    return next(filter(None, map(_of_words, _chain(error))), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    pending, seen = [error], set[int]()
    while pending and len(seen) < _MOST_CAUSES:
        link = pending.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        members = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        pending.extend(cause for cause in (link.__cause__, link.__context__, *members) if cause is not None)


def _of_response(response: object) -> X402GuardError | None:
    extensions = getattr(response, "extensions", None)
    kept = extensions.get(REFUSAL) if isinstance(extensions, Mapping) else None
    return kept if isinstance(kept, X402GuardError) else None


def _of_problem(told: object) -> X402GuardError | None:
    """Return the error in a problem+json body, given as text or decoded."""
    if isinstance(told, (bytes, str)) and len(told) < 100_000:
        text = told.decode("utf-8", "replace") if isinstance(told, bytes) else told
        try:
            told = json.loads(text[text.index("{") : text.rindex("}") + 1])
        except ValueError:
            return None
    if not isinstance(told, Mapping):
        return None
    if not str(told.get("type", "")).startswith(_URN):
        inner = told.get("error")
        return _of_problem(inner) if isinstance(inner, Mapping) and inner is not told else None
    if told.get("money_may_have_moved") is True:
        return _uncertain(told)
    kind = _KINDS.get(str(told.get("code")), PaymentRefused)
    return kind(
        str(told.get("detail", "")),
        rule=str(told.get("rule", "")),
        requested=_nanos(told.get("requested")),
        available=_nanos(told.get("available")),
        session=told.get("session"),
        advice=str(told.get("advice", "")) or None,
        retry_after=wait_s if type(wait_s := told.get("retry_after")) is int else None,
    )


def _uncertain(told: Mapping[str, Any]) -> SettlementUncertain:
    """Return the doubt about a payment that was signed elsewhere: by ``x402guard proxy``."""
    kind = PaidNotDelivered if told.get("code") == PaidNotDelivered.code else SettlementUncertain
    deadline = told.get("deadline")
    return kind(
        str(told.get("detail", "")),
        hold_id=str(told.get("hold_id", "")),
        deadline=deadline if type(deadline) is int else 0,
        advice=str(told.get("advice", "")) or None,
    )


def _of_words(error: BaseException) -> PaymentRefused | None:
    """Return the refusal named at the end of an error's message: some frameworks keep only the message."""
    words = str(error)[:_MOST_WORDS]
    match = _NAMED.search(words)
    if match is None:
        return None
    return _KINDS.get(match["code"], PaymentRefused)(words[: match.start()].strip(), rule=match["rule"])


def _nanos(dollars: Any) -> Nanos | None:
    if dollars is None:
        return None
    try:
        return dollars_to_nanos(Decimal(str(dollars)[:40]))
    except (ArithmeticError, ValueError):
        return None  # a body of another origin


def _every(kind: type[PaymentRefused]) -> Iterator[type[PaymentRefused]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _every(below)


_KINDS: Final = {kind.code: kind for kind in _every(PaymentRefused)}
