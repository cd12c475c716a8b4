"""Circuit breakers stop calls to a payee, host or tool that keeps failing; bulkheads limit how many run at once.

A breaker's state is a row in the ledger: it survives a restart, and a run's processes share it. Too many consecutive
failures open the circuit, which refuses calls at once. After ``rest_s`` one call may probe; if it succeeds, it closes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from typing_extensions import override

from x402guard.errors import CircuitOpen
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import HoldKind
from x402guard.ledger.authorize import Latch, Refusal
from x402guard.ledger.view import LedgerView
from x402guard.policy.checks import check_whole
from x402guard.policy.step_guard import Moment, Rows, StepEnd, StepGuard, Unusual
from x402guard.policy.steps import Step, shown_host

BREAKER: Final = "breaker_open"
_LOST_PROBE_MS: Final = 60_000
_FORGOTTEN_MS: Final = 3_600_000


@dataclass(frozen=True, kw_only=True)
class Breaker(StepGuard):
    """When the circuit of a payee, host or tool opens.

    Failures are a lost or late answer, a 5xx, a payment without its delivery, and an error that a tool raises.

    Args:
        failures: consecutive failures that open the circuit (1 to 1,000); forgotten an hour after the last one.
        rest_s: seconds until one call may probe an open circuit (1 to 86,400).

    Raises ``ConfigError`` naming the setting.
    """

    failures: int = 3
    rest_s: int = 30

    def __post_init__(self) -> None:
        check_whole("policy.breaker.failures", self.failures, 1, 1_000)
        check_whole("policy.breaker.rest_s", self.rest_s, 1, 86_400)

    @override
    def acts(self, moment: Moment, kind: HoldKind, *, late: bool) -> bool:
        if moment == "judge" and late:
            return kind is HoldKind.PAYMENT  # only a payment has a payee
        return super().acts(moment, kind, late=late)

    @override
    def marks(self, step: Step, payees: tuple[str, ...], *, ending: bool) -> list[MarkKey]:
        target = _target(step)
        marks = [_key(target[1])] if target else []
        known = (step.payee,) if step.payee else ()
        return [*marks, *(_key(_payee(step, payee)[1]) for payee in payees or known)]

    @override
    def judge(self, view: LedgerView, step: Step) -> Refusal | None:
        # The host or tool is judged before the price is known, the payee once it is.
        target = _target(step)
        if step.priced:
            target = _payee(step, step.payee) if step.payee else None
        return None if target is None else self._open(view, step, *target)

    def quiet_s(self, view: LedgerView, steps: Iterable[Step]) -> int:
        """Return the seconds since the last failure of what these steps call or pay."""
        failed_ms = [int(_row(view, watched)["failed_ms"]) for step in steps for _, watched in _targets(step)]
        return (view.now_ms - max(failed_ms, default=0)) // 1000

    def _open(self, view: LedgerView, step: Step, what: str, watched: str) -> Refusal | None:
        """Return the refusal of a step while the circuit is open; None if it may pass, also as the probe."""
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
        again = "a probe is under way" if view.now_ms >= ends_ms else f"the circuit is open for {wait_s} s more"
        reason = f"{what} has failed {row['failures']} times in a row; {again} (policy.breaker)"
        advice = "Wait, or use another server or tool."
        requested = step.amount or None
        latch = Latch(_key(watched), view.now_ms + wait_s * 1000)
        return Refusal(BREAKER, reason, requested, retry_after_s=wait_s, error=CircuitOpen, advice=advice, latch=latch)

    @override
    def plainly(self, view: LedgerView, step: Step) -> Rows | Unusual:
        return _FAILED if any(view.mark(_key(watched)) is not None for _, watched in _targets(step)) else ()

    @override
    def taken(self, view: LedgerView, step: Step, hold_id: str) -> None:
        if not hold_id:
            return
        for _, watched in _targets(step):
            row = _row(view, watched)
            if row["opened_ms"] is not None:  # this call is the probe; all others wait for its end
                view.put_mark(_key(watched), {**row, "trying": hold_id, "tried_ms": view.now_ms})

    @override
    def ended(self, view: LedgerView, step: Step, end: StepEnd) -> None:
        for what, watched in _targets(step):
            row = _row(view, watched)
            if row["trying"] == end.hold_id:
                row = {**row, "trying": None}
                view.put_mark(_key(watched), row)
            if end.outcome == "failed" and not (end.late and row.get("late") == end.hold_id):  # it may be written twice
                row = {**row, "late": end.hold_id} if end.late else row
                self._note_failure(view, what, watched, row=row, late=end.late, run_id=step.run_id)
            elif end.outcome == "ok" and row != _CLOSED:
                late = None if row.get("late") == end.hold_id else row.get("late")  # it is presented again
                view.put_mark(_key(watched), {**_CLOSED, "before": row["failures"], "late": late})

    def _note_failure(
        self, view: LedgerView, what: str, watched: str, *, row: Mapping[str, Any], late: bool, run_id: str
    ) -> None:
        forgotten = row["opened_ms"] is None and row["failed_ms"] <= view.now_ms - _FORGOTTEN_MS and not row["before"]
        # A late failure follows those before its own success, or those that came after it.
        before = max(row["failures"], row["before"]) if late else row["failures"]
        failures = 1 if forgotten else before + 1
        opens = failures >= self.failures
        if opens and row["opened_ms"] is None:
            message = f"{what} has failed {failures} times in a row; its circuit is open for {self.rest_s} s"
            facts = {"what": what, "failures": failures, "rest_s": self.rest_s}
            view.tell(BREAKER, "warning", message, session=run_id, rule=BREAKER, facts=facts)
        opened_ms = view.now_ms if opens else None
        stamps = {"failed_ms": view.now_ms, "opened_ms": opened_ms, "before": 0}
        view.put_mark(_key(watched), {**row, "failures": failures, **stamps})  # a probe may be under way


def _target(step: Step) -> tuple[str, str] | None:
    """Return (label, key of its state) of the host or tool that a step calls, or None."""
    # Kept by run: a server may name any address as payee and fail in its name, and an agent may make any call fail.
    if step.kind is HoldKind.TOOL:
        return f"tool {step.name}", f"{step.run_id} tool {step.name}"
    if step.name:
        host = step.name.partition(" ")[2].partition("/")[0]
        return shown_host(host, step.begun), f"{step.run_id} host {host}"
    return None


def _payee(step: Step, payee: str) -> tuple[str, str]:
    return f"payee {payee}", f"{step.run_id} payee {payee}"


def _targets(step: Step) -> list[tuple[str, str]]:
    """Return the host or tool that a step calls and, if known, the payee."""
    target = _target(step)
    found = [] if target is None else [target]
    return [*found, _payee(step, step.payee)] if step.payee else found


def _key(watched: str) -> MarkKey:
    return "breaker", watched


_CLOSED: Final = {
    "failures": 0, "before": 0, "failed_ms": 0, "opened_ms": None, "trying": None, "tried_ms": 0, "late": None,
}  # fmt: skip


_FAILED: Final = Unusual("what it calls has failed before")


def _row(view: LedgerView, watched: str) -> Mapping[str, Any]:
    return view.mark(_key(watched)) or _CLOSED


@dataclass(frozen=True, kw_only=True)
class Bulkhead:
    """How many calls to one host, or uses of one tool, a run may have under way in this process; the others wait for a slot.

    Args:
        per_host: payments to one host (1 to 10,000); None for no limit.
        per_llm_host: LLM calls to one host (1 to 10,000); by default None, for no limit: a vendor limits them itself.
        per_tool: uses of one decorated tool (1 to 10,000); None for no limit.

    Raises ``ConfigError`` naming the setting.
    """

    per_host: int | None = 8
    per_tool: int | None = 8
    per_llm_host: int | None = None

    def __post_init__(self) -> None:
        for name in ("per_host", "per_tool", "per_llm_host"):
            check_whole(f"policy.bulkhead.{name}", getattr(self, name), 1, 10_000, optional=True)


def slot_of(bulkhead: Bulkhead | None, kind: HoldKind, name: str) -> tuple[str, int] | None:
    """Return the name and the number of the slots that a call needs one of; None if it needs none."""
    if bulkhead is None:
        return None
    what, most = {
        HoldKind.TOOL: ("tool", bulkhead.per_tool),
        HoldKind.LLM: ("LLM host", bulkhead.per_llm_host),
        HoldKind.PAYMENT: ("host", bulkhead.per_host),
    }[kind]
    return None if most is None else (f"{what} {name}", most)
