"""Loop detector: stops a call that repeats, long before the budget is used up.

Pure, with the same cost for every call: a ring of stamps for each key, and for each cycle length a count of the latest
steps that repeat. All of it is kept in the ledger, so it survives a restart and spans processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from typing_extensions import override

from x402guard.errors import ConfigError, LoopDetected
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import HoldKind
from x402guard.ledger.authorize import ONLY_RESET, Refusal
from x402guard.ledger.budgets import trip
from x402guard.ledger.view import LedgerView
from x402guard.policy.checks import check_flag, check_whole
from x402guard.policy.patterns import check_patterns
from x402guard.policy.step_guard import Moment, Rows, StepEnd, StepGuard, Unusual
from x402guard.policy.steps import Step, is_bare, is_named, is_tool_paid, reset_mark

_IGNORED: Final = frozenset({"request_id", "idempotency_key", "trace_id", "nonce", "timestamp", "created_at"})
LOOP: Final = "loop_detected"
_MOST_CALLS: Final = 1_000
_SHORT: Final = 16
_STREAK_MS: Final = 3_600_000
_AT_ONCE_MS: Final = 2_000
"""So long after a refusal, others of the same call are of the same moment: an agent that samples makes many at once."""

_NO_STREAK: Final = {"failures": 0, "before": 0, "at": 0, "late": None, "every": 0}
_NO_REFUSALS: Final = {"count": 0, "at": 0, "together": 0, "bursts": 0}

_MOST_TOGETHER: Final = 3
"""So many times the failures in a row trip the run also if they are few moments: of payments under way all fail at once."""


@dataclass(frozen=True, kw_only=True)
class Loop(StepGuard):
    """When a repeated call is a loop. The call is refused, and passes again when the window has moved on.

    Args:
        calls: identical calls that are allowed within the window (1 to 1,000); one more is refused.
        calls_without_arguments: the same for calls of which only the name and the amount are known (1 to 1,000).
        latch_after: so many refusals of the same call, which does not pass between them, trip the run until its owner
            resets it (1 to 1,000); 0 for never. Those within two seconds count as one.
        repeats: how often a run may make the same call, however slowly, while it makes no new one between (1 to 1,000); one
            more is refused. Of an LLM call the model, the beginning of the conversation and the last message count; to ask
            the model is no new call for a tool. Calls of which only the name and the amount are known are not counted.
        states: how often a run may report the same state (``session.step(state=…)``), however slowly (1 to 1,000); one
            more is refused.
        similar: calls that differ in numbers, dates and ids alone are identical.
        window_s: the window in seconds (1 to 86,400).
        longest_cycle: the most different steps in a cycle (1 to 16; A-B-A-B has 2); after more than ``calls`` full
            repeats the next step is refused, unless a pause longer than the window separates them. 1 looks for no
            cycles.
        failures: consecutive payments to one payee without delivery that trip the run; 0 counts none.
        ignored: top-level fields of a JSON body or of a tool's arguments that do not distinguish calls.
        own: tool, host, or ``METHOD host/path``, or a pattern of these with ``*`` → its own number of calls, or None for
            no limit; the first that matches counts. One with a ``*`` in its last part, as ``search.*``, gives tools more
            calls, and no host.

    Raises ``ConfigError`` naming the setting.
    """

    calls: int = 10
    calls_without_arguments: int = 50
    latch_after: int = 3
    repeats: int = 25
    states: int = 3
    similar: bool = False
    window_s: int = 60
    longest_cycle: int = 4
    failures: int = 5
    ignored: Collection[str] = _IGNORED
    own: Mapping[str, int | None] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_whole("policy.loop.calls", self.calls, 1, _MOST_CALLS)
        check_whole("policy.loop.calls_without_arguments", self.calls_without_arguments, 1, _MOST_CALLS)
        check_whole("policy.loop.repeats", self.repeats, 1, _MOST_CALLS)
        check_whole("policy.loop.states", self.states, 1, _MOST_CALLS)
        check_whole("policy.loop.latch_after", self.latch_after, 0, _MOST_CALLS)
        check_flag("policy.loop.similar", self.similar)
        check_whole("policy.loop.window_s", self.window_s, 1, 86_400)
        check_whole("policy.loop.longest_cycle", self.longest_cycle, 1, 16)
        check_whole("policy.loop.failures", self.failures, 0, _MOST_CALLS)
        if (
            isinstance(self.ignored, str)
            or not isinstance(self.ignored, Collection)
            or not all(isinstance(name, str) for name in self.ignored)
        ):
            raise ConfigError(f"policy.loop.ignored: {self.ignored!r} is not a list of field names")
        if not isinstance(self.own, Mapping):
            raise ConfigError(f"policy.loop.own: {self.own!r} is not a mapping: tool or route to a number of calls")
        for name, calls in self.own.items():
            check_whole(f"policy.loop.own[{name!r}]", calls, 1, _MOST_CALLS, optional=True)
        object.__setattr__(self, "own", MappingProxyType(check_patterns("policy.loop.own", self.own)))
        object.__setattr__(self, "ignored", frozenset(self.ignored))

    def calls_of(self, step: Step) -> int | None:
        """Return how many steps identical to *step* are allowed within the window; None for no limit."""
        found: int | None = self.calls_without_arguments if is_bare(step.key) else self.calls
        if not self.own:
            return found
        at_most: list[int] = []
        for pattern, calls in self.own.items():
            if is_named(pattern, step, frees=True) or is_tool_paid(pattern, step):
                found = calls
                break
            if calls is not None and is_named(pattern, step):
                at_most.append(calls)  # it may name any seller's host
        if not at_most:
            return found
        return min(at_most) if found is None else min(found, *at_most)

    def _counts(self, step: Step) -> bool:
        return bool(step.key) and self.calls_of(step) is not None

    @override
    def acts(self, moment: Moment, kind: HoldKind, *, late: bool) -> bool:
        if moment == "judge":
            return not late
        if moment == "ended":
            return kind is HoldKind.PAYMENT  # only a payment has a payee
        return super().acts(moment, kind, late=late)

    @override
    def marks(self, step: Step, payees: tuple[str, ...], *, ending: bool) -> tuple[MarkKey, ...]:
        reset = step.reset_key
        if ending:
            return (reset, streak_mark(step.run_id, step.payee)) if step.payee else (reset,)
        return (reset, _ring(step), _cycle(step), _row(step)) if self._counts(step) else (reset,)

    @override
    def judge(self, view: LedgerView, step: Step) -> Refusal | None:
        loop = None if step.priced else self.find_loop(view, step)
        return None if loop is None else self.refuse(view, step, loop, is_done=False)

    def refuse(self, view: LedgerView, step: Step, loop: str, *, is_done: bool = True) -> Refusal:
        """Return the refusal of a step that is a *loop*. Trips the run at the ``latch_after``-th in a row of the same call.

        *is_done*: the step has been made, so each one counts; of calls that are not made, those at once count as one.
        As many at once as would trip the run count also if one has passed since, within two windows.
        """
        row = view.mark(_row(step))
        row = {**_NO_REFUSALS, **row} if row is not None and row["at"] > _reset_ms(view, step) else _NO_REFUSALS
        before, since_ms = int(row["count"]), view.clock_ms - row["at"]
        moment_ms = min(_AT_ONCE_MS, self.window_s * 1000 // (self.latch_after + 1))  # all fit in the window
        if before and not is_done and 0 <= since_ms < moment_ms:
            together = row["together"] + 1  # they do not know of each other's refusal
            bursts = row["bursts"] + (together == self.latch_after)
            row = {**row, "together": together, "bursts": bursts}
        else:
            bursts = row["bursts"] if 0 <= since_ms <= 2 * self.window_s * 1000 else 0
            row = {"count": before + 1, "at": view.clock_ms, "together": 1, "bursts": bursts}
        view.put_mark(_row(step), row)
        before = max(int(row["count"]), bursts) - 1
        if self.latch_after and before + 1 >= self.latch_after:
            trip(view, step.run_id, LOOP, loop)
            reason = f"{loop}; the run is tripped until its owner resets it"
            return Refusal(LOOP, reason, error=LoopDetected, advice=ONLY_RESET)
        left, warning = self.latch_after - before - 1, ""
        if self.latch_after:
            at_once = f" (those within {moment_ms / 1000:g} s are one)"
            warning = (
                f"; {left} more refusal{'' if left == 1 else 's'} of it{at_once} trip{'s' if left == 1 else ''} the run"
            )
        slow = loop.endswith(_REPEATED)
        advice = "a new call has been made" if slow else "the window has moved on"
        return Refusal(
            LOOP,
            f"{loop}{warning}",
            retry_after_s=None if slow else self.window_s,
            error=LoopDetected,
            advice=f"Do something else: the same call passes again when {advice}.",
        )

    def state_marks(self, step: Step) -> tuple[MarkKey, ...]:
        """Return the keys of the rows that ``judge_state`` reads."""
        return step.reset_key, _state(step), _row(step)

    def judge_state(self, view: LedgerView, step: Step) -> Refusal | None:
        """Count a reported state, or return the refusal of one that the run has had too often."""
        row = view.mark(_state(step))
        before = 0 if row is None or row["at"] <= _reset_ms(view, step) else int(row["count"])
        if before >= self.states:
            times = "once" if before == 1 else f"{before} times"
            return self.refuse(view, step, f"the run has had the same state {times} before (policy.loop.states)")
        view.put_mark(_state(step), {"count": before + 1, "at": view.clock_ms})
        return None

    def find_loop(self, view: LedgerView, step: Step) -> str | None:
        """Return why *step* is a loop, or None."""
        calls = self.calls_of(step)
        if not step.key or calls is None:
            return None
        reset_ms = _reset_ms(view, step)
        since_ms = max(view.clock_ms - self.window_s * 1000, reset_ms + 1)
        if len([at for at in _stamps(view, step) if at >= since_ms]) >= calls:
            identical = "this call has the same amount" if is_bare(step.key) else "this call is identical"
            words = f"{step.shown} was called {calls} times within {self.window_s} s, and {identical}"
            return f"{words} (policy.loop; own= gives a tool or route its own number)"
        if self._repeated(view, step)[1].get(_said(step), 0) >= max(self.repeats, calls):
            return f"{step.shown} was called {max(self.repeats, calls)} times, identically, and nothing new between{_REPEATED}"
        keys, runs = self._cycle_of(view, step, reset_ms)
        for period, matches in self._matches(keys, runs, step):
            if matches >= period * calls:
                words = f"the last {period} different steps have repeated {calls} times; the next is {step.shown}"
                return f"{words} (policy.loop.longest_cycle; own= gives a tool or route its own number)"
        return None

    @override
    def taken(self, view: LedgerView, step: Step, hold_id: str) -> None:
        calls = self.calls_of(step)
        if not step.key or calls is None:
            return
        refused = view.mark(_row(step))
        if refused is not None:
            view.put_mark(_row(step), {**refused, "count": 0})
        view.put_mark(_ring(step), {"at": [*_stamps(view, step), view.clock_ms][-calls:]})
        cycle, latest = self._cycle_of(view, step, _reset_ms(view, step)), self._repeated(view, step)
        after = self._with(step, cycle, self._matches(*cycle, step), latest, now_ms=view.clock_ms)
        view.put_mark(_cycle(step), after)

    @override
    def plainly(self, view: LedgerView, step: Step) -> Rows | Unusual:
        calls, now_ms = self.calls_of(step), view.clock_ms
        if not step.key or calls is None:
            return ()
        if view.mark(step.reset_key) is not None or view.mark(_row(step)) is not None:
            return _REFUSED
        ring, row = view.mark(_ring(step)), view.mark(_cycle(step))
        stamps, since_ms = [] if ring is None else ring["at"], now_ms - self.window_s * 1000
        if stamps and (max(stamps) > now_ms or len([at for at in stamps if at >= since_ms]) >= calls):
            return _MANY
        latest: tuple[list[str], dict[str, int]] = (
            ([], {}) if row is None else (row.get("seen", []), row.get("times", {}))
        )
        is_new = row is None or not since_ms <= row["at"] <= now_ms
        cycle: tuple[list[str], Mapping[str, int]] = ([], {}) if row is None or is_new else (row["keys"], row["runs"])
        matches = self._matches(*cycle, step)
        repeats = latest[1].get(_said(step), 0) >= max(self.repeats, calls)
        if repeats or any(count >= period * calls for period, count in matches):
            return _MANY
        after = self._with(step, cycle, matches, latest, now_ms=now_ms)
        return (_ring(step), {"at": [*stamps, now_ms][-calls:]}), (_cycle(step), after)

    def _with(
        self,
        step: Step,
        cycle: tuple[list[str], Mapping[str, int]],
        matches: list[tuple[int, int]],
        latest: tuple[list[str], dict[str, int]],
        *,
        now_ms: int,
    ) -> Mapping[str, Any]:
        """Return the row of a run's latest steps, with a step."""
        keys, runs = cycle
        after = {str(period): count for period, count in matches}
        kept = [*keys, step.key[:_SHORT]][-self.longest_cycle :]
        seen, times = latest
        before = {"keys": list(keys), "runs": dict(runs), "seen": seen, "times": times}
        said = _said(step)
        if not is_bare(step.key):
            seen = seen.copy()  # what it was stands in ``before``
            if said in seen:
                seen.remove(said)
                times = {**times, said: times.get(said, 0) + 1}
            else:  # to ask a model is nothing new for a tool: an agent does that before each of its uses
                times = {key: count for key, count in times.items() if step.kind is HoldKind.LLM and key[0] != said[0]}
                times[said] = 1
            seen.append(said)
            if len(seen) > _MOST_SEEN:
                times.pop(seen.pop(0), None)
        return {"keys": kept, "runs": after, "seen": seen, "times": times, "at": now_ms, "before": before}

    @override
    def given_back(self, view: LedgerView, step: Step, at_ms: int) -> None:
        if not self._counts(step):
            return
        stamps = list((view.mark(_ring(step)) or {"at": []})["at"])
        taken = [at for at in stamps if at <= at_ms]
        if taken:
            stamps.remove(taken[-1])
            view.put_mark(_ring(step), {"at": stamps})
        row = view.mark(_cycle(step))
        if row is not None and row.get("before") is not None and row["keys"][-1:] == [step.key[:_SHORT]]:
            view.put_mark(_cycle(step), {**row["before"], "at": row["at"], "before": None})

    @override
    def ended(self, view: LedgerView, step: Step, end: StepEnd) -> None:
        if not step.payee or end.outcome == "unknown":
            return
        key = streak_mark(step.run_id, step.payee)
        row = view.mark(key)
        if end.outcome == "ok":
            if row is not None:
                late = None if row.get("late") == end.hold_id else row.get("late")  # it is presented again
                view.put_mark(
                    key, {"failures": 0, "before": row["failures"], "at": view.clock_ms, "late": late, "every": 0}
                )
        elif self.failures and not end.again:
            self._note_failure(view, step, {**_NO_STREAK, **(row or {})}, end)

    def _note_failure(self, view: LedgerView, step: Step, row: Mapping[str, Any], end: StepEnd) -> None:
        if end.late and row["late"] == end.hold_id:
            return  # it may be written twice
        over = row["at"] <= max(_reset_ms(view, step), view.clock_ms - _STREAK_MS)
        before = 0 if over else max(row["failures"], row["before"]) if end.late else row["failures"]
        every = 1 if over else row["every"] + 1
        if not over and row["failures"] and 0 < end.begun_ms < row["at"]:
            # It was under way already when the last one failed: one fault of the payee fails all that are.
            view.put_mark(streak_mark(step.run_id, step.payee), {**row, "every": every})
            failures = before
        else:
            failures, late = before + 1, end.hold_id if end.late else row["late"]
            row = {"failures": failures, "before": 0, "at": view.clock_ms, "late": late, "every": every}
            view.put_mark(streak_mark(step.run_id, step.payee), row)
        if failures >= self.failures or every >= _MOST_TOGETHER * self.failures:
            reason = (
                f"{max(failures, every)} payments in a row to {step.payee} were not answered with what was paid for"
            )
            trip(view, step.run_id, LOOP, reason)

    def _repeated(self, view: LedgerView, step: Step) -> tuple[list[str], dict[str, int]]:
        """Return the latest different calls of the run, the last one last, and how often it made each since a new one."""
        row = view.mark(_cycle(step))
        if row is None or row["at"] <= _reset_ms(view, step):
            return [], {}
        return list(row.get("seen", [])), dict(row.get("times", {}))

    def _cycle_of(self, view: LedgerView, step: Step, reset_ms: int) -> tuple[list[str], Mapping[str, int]]:
        row: Mapping[str, Any] = view.mark(_cycle(step)) or {"keys": [], "runs": {}, "at": 0}
        paused = not view.clock_ms - self.window_s * 1000 <= row["at"] <= view.clock_ms
        return ([], {}) if paused or row["at"] <= reset_ms else (row["keys"], row["runs"])

    def _matches(self, keys: list[str], runs: Mapping[str, int], step: Step) -> list[tuple[int, int]]:
        """Return (cycle length, how many of the latest steps equal the step one cycle earlier), *step* included."""
        key = step.key[:_SHORT]
        if key not in keys:
            return [(period, 0) for period in range(2, self.longest_cycle + 1)]
        found = []
        for period in range(2, self.longest_cycle + 1):
            latest = [*keys, key][-period:]
            # One repeated call is no cycle: the ring of its stamps counts it, and a slow repetition is polling.
            repeats = len(keys) >= period and keys[-period] == key and len(set(latest)) > 1
            found.append((period, runs.get(str(period), 0) + 1 if repeats else 0))
        return found


_REFUSED: Final = Unusual("a call like it was refused, or its run was reset")
_MANY: Final = Unusual("it may be a loop")
_REPEATED: Final = " (policy.loop.repeats; own= gives a tool or route its own number)"
_MOST_SEEN: Final = 32
"""So many different calls are known of a run; one that was made before them is new again."""


def _said(step: Step) -> str:
    """Return the key by which a call is the same however slowly it is made; the first letter tells LLM calls apart."""
    return ("l" if step.kind is HoldKind.LLM else "t") + (step.said_key or step.key)[:_SHORT]


def _ring(step: Step) -> MarkKey:
    return "loop", f"{step.run_id} {step.key}"


def _row(step: Step) -> MarkKey:
    """Return the key of the row that counts a call's refusals in a row.

    It is the call's own: between two refusals of a tool an agent asks its model, and that passes.
    """
    return "loop_refused", f"{step.run_id} {step.said_key or step.key}"


def _state(step: Step) -> MarkKey:
    return "state", f"{step.run_id} {step.key}"


def _cycle(step: Step) -> MarkKey:
    return "cycle", step.run_id


def streak_mark(run_id: str, payee: str) -> MarkKey:
    """Return the key of the row that counts consecutive failures of a payee."""
    return "streak", f"{run_id} {payee}"


def _stamps(view: LedgerView, step: Step) -> list[int]:
    """Return the stamps of a step, without those later than now: the clock was set back after them."""
    return [at for at in (view.mark(_ring(step)) or {"at": []})["at"] if at <= view.clock_ms]


def _reset_ms(view: LedgerView, step: Step) -> int:
    row = view.mark(step.reset_key)
    return -1 if row is None or row["at"] > view.clock_ms else int(row["at"])


def forget_before(view: LedgerView, run_id: str) -> None:
    """Count from now on, because the owner has reset the run."""
    view.put_mark(reset_mark(run_id), {"at": view.clock_ms})
