"""The proxy's own answers: problem+json, with a header that no seller's answer has."""

from __future__ import annotations

import json
from typing import Final

import httpx
from starlette.responses import Response

from x402guard.errors import SettlementUncertain, X402GuardError
from x402guard.http.logical import LOGICAL, LogicalRequest, may_be_billed
from x402guard.http.response import problem, problem_headers, status_of

ANSWERED: Final = "x402guard-answered"
"""The header of the proxy's own answers. No other one has it: a seller may send any status, and any body."""


def problem_answer(error: X402GuardError, *, closes: bool = False) -> Response:
    """Return an error of the guard as problem+json; it *closes* the connection if the request was not read."""
    headers = {**problem_headers(error), ANSWERED: "true", **({"connection": "close"} if closes else {})}
    return Response(json.dumps(problem(error)), status_of(error), headers=headers)


def ended(request: httpx.Request | None) -> Response:
    """Return the answer to a request that is not answered to its end here: it denies no payment."""
    logical = None if request is None else request.extensions.get(LOGICAL)
    paid_by = logical.paid_by if isinstance(logical, LogicalRequest) else None
    if request is not None and may_be_billed(request):
        return said(503, "the proxy ends, or has failed; the call may be billed, and counts until then", closes=True)
    if paid_by is None:
        return said(503, "the proxy ends, or has failed, and nothing was paid for this request", closes=True)
    words = f"the proxy ends, or has failed; the payment of hold {paid_by[:16]}… may be taken until its deadline"
    return problem_answer(SettlementUncertain(words, hold_id=paid_by, deadline=0))


def said(status: int, words: str, *, closes: bool = False) -> Response:
    """Return an answer of the proxy's own as problem+json. Nothing was sent, or nothing came back."""
    told = {
        "type": "about:blank",
        "title": "x402guard proxy",
        "status": status,
        "detail": words,
        "error": {"message": words, "type": "x402guard", "code": "proxy"},
    }
    headers = {
        "content-type": "application/problem+json",
        ANSWERED: "true",
        **({"connection": "close"} if closes else {}),
    }
    return Response(json.dumps(told), status, headers=headers)
