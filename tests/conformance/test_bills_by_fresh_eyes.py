"""Answers whose bills were worked out from the vendors' pages and the list of prices by somebody who had not seen this code."""

import json
from pathlib import Path

import httpx
import pytest

from tests.support.merchant import make_guard
from x402guard import GuardedTransport, Metering, Policy, Unpriced
from x402guard.stores import open_store

CASES = json.loads((Path(__file__).parents[1] / "data" / "bills_by_fresh_eyes.json").read_text())
NOON = 1_796_040_000_000
"""30 November 2026, 12:00 UTC: no peak hour of DeepSeek's."""


def written_out(value):
    """A value in which a long text was written as what it repeats."""
    if isinstance(value, dict):
        if set(value) == {"repeat"}:
            return value["repeat"][0] * value["repeat"][1]
        if set(value) == {"join"}:
            head, (unit, times), tail = value["join"]
            return head + unit * times + tail
        return {key: written_out(each) for key, each in value.items()}
    return [written_out(each) for each in value] if isinstance(value, list) else value


class Vendor:
    """Answers as the case says, and sees what is held meanwhile."""

    def __init__(self, session, case):
        self.session, self.answer, self.held = session, written_out(case["response"]), 0

    def __call__(self, _request):
        self.held = int(self.session.held * 10**9)
        content = self.answer.get("text", "") or (json.dumps(self.answer["json"]) if "json" in self.answer else "")
        kind = self.answer.get("content_type", "application/json")
        return httpx.Response(self.answer.get("status", 200), headers={"content-type": kind}, content=content.encode())


def sent(session, case):
    vendor = Vendor(session, case)
    with httpx.Client(transport=GuardedTransport(session, httpx.MockTransport(vendor))) as http:
        said = written_out({name: case[name] for name in ("request", "request_text") if name in case})
        body = {"json": said["request"]} if "request" in said else {"content": said["request_text"].encode()}
        http.post(case["url"], headers=case.get("headers"), **body)
    return vendor.held


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_bill_that_fresh_eyes_have_worked_out(case):
    allowed = {kind: str(dollars) for kind, dollars in case.get("allowances", {}).items()}
    store = open_store("memory://", clock_ms=lambda: NOON)
    with make_guard(store, metering=Metering(allowances=allowed), policy=Policy(velocity=None)) as guard:
        session, reported = guard.session("s", budget="$100000.00"), case["mode"] == "record_usage"
        if case.get("refused"):
            with pytest.raises(Unpriced):
                sent(session, case)
            return
        if reported and "total above" in case["name"]:  # counts that contradict each other are its caller's mistake
            with pytest.raises(ValueError, match="total_tokens"):
                session.record_usage(case["provider"], case["model"], case["usage"])
            return
        held = None if reported else sent(session, case)
        if reported:
            session.record_usage(case["provider"], case["model"], case["usage"])
        spent = int(session.spent * 10**9)
        assert spent == case["expected_nanos"] if "expected_nanos" in case else spent >= case["at_least_nanos"]
        if held is not None and "expected_nanos" in case:
            assert held >= spent, "what the request asks for is held before it is sent"
