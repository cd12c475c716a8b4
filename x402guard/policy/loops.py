"""The loop detector: the same call, again and again, is stopped long before the budget is.

Pure, and of the same cost at the millionth call: a ring of stamps for each key, and for each period one count of how long the
latest steps have repeated. All of it lies in the ledger, so that it survives a restart and spans processes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from x402guard.errors import ConfigError
from x402guard.ledger.view import LedgerView, MarkKey
from x402guard.policy.steps import Step, as_place, reset_mark

_IGNORED: Final = frozenset({"request_id", "idempotency_key", "trace_id", "nonce", "timestamp", "created_at"})
_MOST_CALLS: Final = 1_000
_SHORT: Final = 16
_STREAK_MS: Final = 3_600_000


@dataclass(frozen=True, kw_only=True)
class Loop:
    """When the same call is one too many. What trips here latches the session until its owner resets it.

    Args:
        calls: how many identical calls may fall within the window (1 to 1,000); one more trips.
        window_s: in seconds (1 to 86,400).
        longest_cycle: how many different steps may make up a cycle, such as A-B-A-B (2); more than ``calls`` full repeats of one
            trip, unless a pause longer than the window parts them. 1 looks for no cycles; at most 16.
        failures: so many payments in a row to one payee without what was paid for trip, too; 0 counts none.
        ignored: fields of a JSON body or of a tool's arguments that do not tell one call from another, wherever they stand.
        own: tool, or ``METHOD host/path`` → its own number of calls, or None for one that may repeat for ever.

    Raises ``ConfigError`` naming the setting.
    """

    calls: int = 10
    window_s: int = 60
    longest_cycle: int = 4
    failures: int = 5
    ignored: Collection[str] = _IGNORED
    own: Mapping[str, int | None] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_whole("calls", self.calls, 1, _MOST_CALLS)
        _check_whole("window_s", self.window_s, 1, 86_400)
        _check_whole("longest_cycle", self.longest_cycle, 1, 16)
        _check_whole("failures", self.failures, 0, _MOST_CALLS)
        if isinstance(self.ignored, str) or not all(isinstance(name, str) for name in self.ignored):
            raise ConfigError(f"policy.loop.ignored: {self.ignored!r} is no list of field names")
        if not isinstance(self.own, Mapping):
            raise ConfigError(f"policy.loop.own: {self.own!r} is no mapping from a tool or route to a number of calls")
        for name, calls in self.own.items():
            if calls is not None:
                _check_whole(f"own[{name!r}]", calls, 1, _MOST_CALLS)
        named = {as_place("loop.own", name): calls for name, calls in self.own.items()}
        object.__setattr__(self, "own", MappingProxyType(named))
        object.__setattr__(self, "ignored", frozenset(self.ignored))

    def calls_of(self, name: str) -> int | None:
        """Return how many identical calls of a tool or route may fall within the window; None for any number."""
        return self.own.get(name, self.calls)


def _check_whole(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"policy.loop.{name}: {value!r} is not a whole number from {least} to {most}")


def _ring(run_id: str, step: Step) -> MarkKey:
    return "loop", f"{run_id} {step.key}"


def _cycle(run_id: str) -> MarkKey:
    return "cycle", run_id


def streak_mark(run_id: str, payee: str) -> MarkKey:
    """Return the key of the small row that counts a payee's failures."""
    return "streak", f"{run_id} {payee}"


def loop_marks(loop: Loop | None, run_id: str, step: Step) -> tuple[MarkKey, ...]:
    """Return the small rows that ``find_loop`` and ``note_step`` have to see."""
    if loop is None or not step.key or loop.calls_of(step.name) is None:
        return ()
    return _ring(run_id, step), _cycle(run_id), reset_mark(run_id)


def find_loop(view: LedgerView, loop: Loop | None, run_id: str, step: Step) -> str | None:
    """Return why *step* is one too many, or None."""
    if loop is None or not loop_marks(loop, run_id, step):
        return None
    calls = loop.calls_of(step.name) or 0
    since_ms = max(view.clock_ms - loop.window_s * 1000, _reset_ms(view, run_id) + 1)
    if len([at for at in _stamps(view, run_id, step) if at >= since_ms]) >= calls:
        words = f"{step.name} was called {calls} times within {loop.window_s} s, and is asked for once more in the same words"
        return f"{words} (policy.loop; own= gives a tool or route its own number)"
    keys, runs = _cycle_of(view, loop, run_id)
    for period, matches in _matches(loop, keys, runs, step):
        if matches >= period * loop.calls:
            return f"the last {period} different steps have repeated {loop.calls} times; the next is {step.name}"
    return None


def note_step(view: LedgerView, loop: Loop | None, run_id: str, step: Step) -> None:
    """Remember a step that was taken."""
    if loop is None or not loop_marks(loop, run_id, step):
        return
    calls = loop.calls_of(step.name) or 0
    view.put_mark(_ring(run_id, step), {"at": [*_stamps(view, run_id, step), view.clock_ms][-calls:]})
    keys, runs = _cycle_of(view, loop, run_id)
    after = {str(period): matches for period, matches in _matches(loop, keys, runs, step)}
    kept = [*keys, step.key[:_SHORT]][-loop.longest_cycle :]
    before = {"keys": list(keys), "runs": dict(runs)}
    view.put_mark(_cycle(run_id), {"keys": kept, "runs": after, "at": view.clock_ms, "before": before})


def _stamps(view: LedgerView, run_id: str, step: Step) -> list[int]:
    """Return when a step was taken, by the clock; what a clock wrote that was set back since is forgotten."""
    return [at for at in (view.mark(_ring(run_id, step)) or {"at": []})["at"] if at <= view.clock_ms]


def forget_step(view: LedgerView, loop: Loop | None, run_id: str, step: Step, at_ms: int) -> None:
    """Take back a step that was noted at *at_ms* (unix milliseconds) and never paid for."""
    if loop is None or not loop_marks(loop, run_id, step):
        return
    stamps = list((view.mark(_ring(run_id, step)) or {"at": []})["at"])
    taken = [at for at in stamps if at <= at_ms]
    if taken:
        stamps.remove(taken[-1])
        view.put_mark(_ring(run_id, step), {"at": stamps})
    row = view.mark(_cycle(run_id))
    if row is not None and row.get("before") is not None and row["keys"][-1:] == [step.key[:_SHORT]]:
        view.put_mark(_cycle(run_id), {**row["before"], "at": row["at"], "before": None})


def _reset_ms(view: LedgerView, run_id: str) -> int:
    row = view.mark(reset_mark(run_id))
    return -1 if row is None or row["at"] > view.clock_ms else int(row["at"])


def _cycle_of(view: LedgerView, loop: Loop, run_id: str) -> tuple[list[str], Mapping[str, int]]:
    row: Mapping[str, Any] = view.mark(_cycle(run_id)) or {"keys": [], "runs": {}, "at": 0}
    paused = not view.clock_ms - loop.window_s * 1000 <= row["at"] <= view.clock_ms
    return ([], {}) if paused or row["at"] <= _reset_ms(view, run_id) else (row["keys"], row["runs"])


def _matches(loop: Loop, keys: list[str], runs: Mapping[str, int], step: Step) -> Iterator[tuple[int, int]]:
    """Yield (period, how many of the latest steps were the same as those a period before), *step* included."""
    key = step.key[:_SHORT]
    for period in range(2, loop.longest_cycle + 1):
        latest = [*keys, key][-period:]
        # One call over and over is no cycle: the ring of its stamps has it, and a slow one is a poll.
        repeats = len(keys) >= period and keys[-period] == key and len(set(latest)) > 1
        yield period, runs.get(str(period), 0) + 1 if repeats else 0


def forget_before(view: LedgerView, run_id: str) -> None:
    """Count from now on: the owner has reset the run."""
    view.put_mark(reset_mark(run_id), {"at": view.clock_ms})


def note_failure(view: LedgerView, loop: Loop | None, run_id: str, payee: str, *, late: bool = False) -> str | None:
    """Count a payment whose answer is a failure; return why that is one too many, or None.

    *late*: the answer had begun well, and was counted so.
    """
    if loop is None or not loop.failures:
        return None
    key = streak_mark(run_id, payee)
    row = view.mark(key) or {"failures": 0, "at": 0}
    over = row["at"] <= max(_reset_ms(view, run_id), view.clock_ms - _STREAK_MS)
    before = 0 if over else int(row.get("before", 0) if late else row["failures"])
    view.put_mark(key, {"failures": before + 1, "at": view.clock_ms})
    if before + 1 < loop.failures:
        return None
    return f"{before + 1} payments in a row to {payee} were not answered with what was paid for"


def note_success(view: LedgerView, run_id: str, payee: str) -> None:
    """Forget a payee's failures: it has delivered."""
    row = view.mark(streak_mark(run_id, payee))
    if row is not None:
        view.put_mark(streak_mark(run_id, payee), {"failures": 0, "before": row["failures"], "at": view.clock_ms})
