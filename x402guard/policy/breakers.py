"""Circuit breakers and bulkheads: a payee, host or tool that keeps failing is given a rest, and may hold up so many calls at once.

A breaker lies in the ledger, so that it survives a restart and one process of a run learns from another. It counts failures in a row; when there are too many it is
open, and whoever calls is told at once how long to wait. After its rest one call may try: if that goes well it is closed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from x402guard.errors import CircuitOpen, ConfigError
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.model import HoldKind
from x402guard.ledger.view import LedgerView, MarkKey, Notice
from x402guard.policy.steps import Step, run_of

BREAKER: Final = "breaker_open"
_LOST_PROBE_MS: Final = 60_000
_FORGOTTEN_MS: Final = 3_600_000


@dataclass(frozen=True, kw_only=True)
class Breaker:
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
        _check_whole("breaker.failures", self.failures, 1_000)
        _check_whole("breaker.rest_s", self.rest_s, 86_400)


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
            if getattr(self, name) is not None:
                _check_whole(f"bulkhead.{name}", getattr(self, name), 10_000)


def _check_whole(name: str, value: object, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"policy.{name}: {value!r} is not a whole number from 1 to {most:,}")


def slot_of(bulkhead: Bulkhead | None, kind: HoldKind, name: str) -> tuple[str, int] | None:
    """Return what a call takes a place of, and how many places there are; None where it needs none."""
    if bulkhead is None:
        return None
    what, most = ("tool", bulkhead.per_tool) if kind is HoldKind.TOOL else ("host", bulkhead.per_host)
    return None if most is None else (f"{what} {name}", most)


def _watched(node_id: str, step: Step, payee: str) -> Iterator[tuple[str, str]]:
    """Yield (what it is called, where its state stands) of everything that a step may find broken."""
    # Of its run alone: a server may name anybody's address and fail in that one's name, and an agent may make any call fail.
    run_id = run_of(node_id)
    if step.kind is HoldKind.TOOL:
        yield f"tool {step.name}", f"{run_id} tool {step.name}"
    elif step.name:
        host = step.name.partition(" ")[2].partition("/")[0]
        yield f"host {host}", f"{run_id} host {host}"
    if payee:
        yield f"payee {payee}", f"{run_id} payee {payee}"


def _key(place: str) -> MarkKey:
    return "breaker", place


def breaker_marks(
    breaker: Breaker | None, node_id: str, step: Step, payees: tuple[str, ...] = ()
) -> tuple[MarkKey, ...]:
    """Return the small rows that the functions below have to see. *payees* are whom the step may pay."""
    if breaker is None:
        return ()
    places = (place for payee in payees or ("",) for _, place in _watched(node_id, step, payee))
    return tuple(_key(place) for place in dict.fromkeys(places))


def find_open(view: LedgerView, breaker: Breaker | None, node_id: str, step: Step) -> Refusal | None:
    """Return the refusal of a step whose payee, host or tool has a rest; None where it may go, be it as the one that tries."""
    if breaker is None:
        return None
    for what, place in _watched(node_id, step, step.payee):
        row = _row(view, place)
        if row["opened_ms"] is None:
            continue
        ends_ms = int(row["opened_ms"]) + breaker.rest_s * 1000
        if view.now_ms < ends_ms:
            wait_s = -(-(ends_ms - view.now_ms) // 1000)
        elif row["trying"] is not None and view.now_ms < int(row["tried_ms"]) + _LOST_PROBE_MS:
            wait_s = 1
        else:
            continue
        again = "one call is trying it now" if view.now_ms >= ends_ms else f"it rests for {wait_s} s more"
        reason = f"{what} has failed {row['failures']} times in a row; {again} (policy.breaker)"
        return Refusal(
            BREAKER,
            reason,
            step.amount or None,
            retry_after_s=wait_s,
            error=CircuitOpen,
            advice="Do something else meanwhile, or ask another server or tool.",
        )
    return None


def note_try(view: LedgerView, breaker: Breaker | None, node_id: str, step: Step, hold_id: str) -> None:
    """Remember who tries what has had its rest: nobody else may until that has ended."""
    if breaker is None:
        return
    for _, place in _watched(node_id, step, step.payee):
        row = _row(view, place)
        if row["opened_ms"] is not None:
            view.put_mark(_key(place), {**row, "trying": hold_id, "tried_ms": view.now_ms})


def note_end(
    view: LedgerView,
    breaker: Breaker | None,
    node_id: str,
    step: Step,
    hold_id: str,
    *,
    well: bool | None,
    late: bool = False,
) -> None:
    """Count how the step of a hold ended: well, or not; None where it says nothing of whom it called.

    *late*: it had begun well, and was counted so, before it failed after all.
    """
    if breaker is None:
        return
    for what, place in _watched(node_id, step, step.payee):
        row = _row(view, place)
        if row["trying"] == hold_id:
            row = {**row, "trying": None}
            view.put_mark(_key(place), row)
        if well is False:
            before = int(row["before"]) if late else int(row["failures"])
            _note_failure(view, breaker, what, place, row=row, before=before)
        elif well and row != _CLOSED:
            view.put_mark(_key(place), {**_CLOSED, "before": row["failures"]})


def _note_failure(
    view: LedgerView, breaker: Breaker, what: str, place: str, *, row: Mapping[str, Any], before: int
) -> None:
    forgotten = row["opened_ms"] is None and row["failed_ms"] <= view.now_ms - _FORGOTTEN_MS and not row["before"]
    failures = 1 if forgotten else before + 1
    opens = failures >= breaker.failures
    if opens and row["opened_ms"] is None:
        message = f"{what} has failed {failures} times in a row, and is given a rest of {breaker.rest_s} s"
        view.notices.append(Notice(BREAKER, message, {"what": what, "failures": failures, "rest_s": breaker.rest_s}))
    opened_ms = view.now_ms if opens else None
    stamps = {"failed_ms": view.now_ms, "opened_ms": opened_ms, "before": 0}
    view.put_mark(_key(place), {**row, "failures": failures, **stamps})  # another may be trying meanwhile


_CLOSED: Final = {"failures": 0, "before": 0, "failed_ms": 0, "opened_ms": None, "trying": None, "tried_ms": 0}


def _row(view: LedgerView, place: str) -> Mapping[str, Any]:
    return view.mark(_key(place)) or _CLOSED
