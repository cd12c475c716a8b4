"""Circuit breakers and bulkheads: a payee, host or tool that keeps failing is given a rest, and may hold up so many calls at once.

A breaker lies in the ledger, so that it survives a restart and one process of a run learns from another. It counts failures in a row; when there are too many it is
open, and whoever calls is told at once how long to wait. After its rest one call may try: if that goes well it is closed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

from x402guard.errors import CircuitOpen
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.model import HoldKind
from x402guard.ledger.view import LedgerView, MarkKey, Notice
from x402guard.policy.checks import check_whole
from x402guard.policy.step_guard import StepEnd, StepGuard
from x402guard.policy.steps import Step

BREAKER: Final = "breaker_open"
_LOST_PROBE_MS: Final = 60_000
_FORGOTTEN_MS: Final = 3_600_000


@dataclass(frozen=True, kw_only=True)
class Breaker(StepGuard):
    """When a payee, host or tool is given a rest.

    Failures are answers that were lost or late, a 5xx, and a payment that was not answered with what was paid for; of a tool,
    what it raises.

    Args:
        failures: so many in a row, none an hour after the last, open it (1 to 1,000).
        rest_s: seconds after which one call may try again (1 to 86,400).

    Raises ``ConfigError`` naming the setting.
    """

    failures: int = 3
    rest_s: int = 30

    def __post_init__(self) -> None:
        check_whole("policy.breaker.failures", self.failures, 1, 1_000)
        check_whole("policy.breaker.rest_s", self.rest_s, 1, 86_400)

    @override
    def marks(self, step: Step, payees: tuple[str, ...], *, ending: bool) -> list[MarkKey]:
        target = _target(step)
        marks = [_key(target[1])] if target else []
        for payee in payees or ((step.payee,) if step.payee else ()):
            marks.append(_key(_payee(step, payee)[1]))
        return marks

    @override
    def judge(self, view: LedgerView, step: Step) -> Refusal | None:
        # The host or tool is asked about before the price is known, the payee once it is.
        if step.priced:
            target = _payee(step, step.payee) if step.payee else None
        else:
            target = _target(step)
        return None if target is None else self._open(view, step, *target)

    def _open(self, view: LedgerView, step: Step, what: str, watched: str) -> Refusal | None:
        """Return the refusal of a step while a circuit is open; None where it may go, be it as the probe."""
        row = _row(view, watched)
        if row["opened_ms"] is None:
            return None
        ends_ms = int(row["opened_ms"]) + self.rest_s * 1000
        if view.now_ms < ends_ms:
            wait_s = -(-(ends_ms - view.now_ms) // 1000)
        elif row["trying"] is not None and view.now_ms < int(row["tried_ms"]) + _LOST_PROBE_MS:
            wait_s = 1
        else:
            return None
        again = "one call is trying it now" if view.now_ms >= ends_ms else f"it rests for {wait_s} s more"
        reason = f"{what} has failed {row['failures']} times in a row; {again} (policy.breaker)"
        advice = "Do something else meanwhile, or ask another server or tool."
        requested = step.amount or None
        return Refusal(BREAKER, reason, requested, retry_after_s=wait_s, error=CircuitOpen, advice=advice)

    @override
    def taken(self, view: LedgerView, step: Step, hold_id: str) -> None:
        if not hold_id:
            return
        for _, watched in _targets(step):
            row = _row(view, watched)
            if row["opened_ms"] is not None:  # this call is the probe; every other one waits for its end
                view.put_mark(_key(watched), {**row, "trying": hold_id, "tried_ms": view.now_ms})

    @override
    def ended(self, view: LedgerView, step: Step, end: StepEnd) -> None:
        for what, watched in _targets(step):
            row = _row(view, watched)
            if row["trying"] == end.hold_id:
                row = {**row, "trying": None}
                view.put_mark(_key(watched), row)
            if end.outcome == "failed":
                before = int(row["before"]) if end.late else int(row["failures"])
                self._note_failure(view, what, watched, row=row, before=before)
            elif end.outcome == "ok" and row != _CLOSED:
                view.put_mark(_key(watched), {**_CLOSED, "before": row["failures"]})

    def _note_failure(self, view: LedgerView, what: str, watched: str, *, row: Mapping[str, Any], before: int) -> None:
        forgotten = row["opened_ms"] is None and row["failed_ms"] <= view.now_ms - _FORGOTTEN_MS and not row["before"]
        failures = 1 if forgotten else before + 1
        opens = failures >= self.failures
        if opens and row["opened_ms"] is None:
            message = f"{what} has failed {failures} times in a row, and is given a rest of {self.rest_s} s"
            view.notices.append(Notice(BREAKER, message, {"what": what, "failures": failures, "rest_s": self.rest_s}))
        opened_ms = view.now_ms if opens else None
        stamps = {"failed_ms": view.now_ms, "opened_ms": opened_ms, "before": 0}
        view.put_mark(_key(watched), {**row, "failures": failures, **stamps})  # another may be trying meanwhile


def _target(step: Step) -> tuple[str, str] | None:
    """Return (what it is called, where its state stands) of the host or tool that a step calls."""
    # Of its run alone: a server may name any address as payee and fail in its name, and an agent may make any call fail.
    if step.kind is HoldKind.TOOL:
        return f"tool {step.name}", f"{step.run_id} tool {step.name}"
    if step.name:
        host = step.name.partition(" ")[2].partition("/")[0]
        return f"host {host}", f"{step.run_id} host {host}"
    return None


def _payee(step: Step, payee: str) -> tuple[str, str]:
    return f"payee {payee}", f"{step.run_id} payee {payee}"


def _targets(step: Step) -> list[tuple[str, str]]:
    """Return the host or tool that a step calls and, once that is known, the payee."""
    target = _target(step)
    found = [] if target is None else [target]
    return [*found, _payee(step, step.payee)] if step.payee else found


def _key(watched: str) -> MarkKey:
    return "breaker", watched


_CLOSED: Final = {"failures": 0, "before": 0, "failed_ms": 0, "opened_ms": None, "trying": None, "tried_ms": 0}


def _row(view: LedgerView, watched: str) -> Mapping[str, Any]:
    return view.mark(_key(watched)) or _CLOSED


@dataclass(frozen=True, kw_only=True)
class Bulkhead:
    """How many calls to one host, or uses of one tool, may be under way at once in this process; the next waits its turn.

    Args:
        per_host: payments and LLM calls to one host (1 to 10,000); None for any number.
        per_tool: uses of one decorated tool; None for any number.

    Raises ``ConfigError`` naming the setting.
    """

    per_host: int | None = 8
    per_tool: int | None = 8

    def __post_init__(self) -> None:
        for name in ("per_host", "per_tool"):
            check_whole(f"policy.bulkhead.{name}", getattr(self, name), 1, 10_000, optional=True)


def slot_of(bulkhead: Bulkhead | None, kind: HoldKind, name: str) -> tuple[str, int] | None:
    """Return what a call takes a place of, and how many places there are; None where it needs none."""
    if bulkhead is None:
        return None
    what, most = ("tool", bulkhead.per_tool) if kind is HoldKind.TOOL else ("host", bulkhead.per_host)
    return None if most is None else (f"{what} {name}", most)
