"""Counts what runs have reached: states and events, effects and interruptions, pairs of actors in both orders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from x402guard.flow.effects import (
    Ask,
    AskChain,
    Checkpoint,
    Compute,
    Notify,
    PeekBody,
    Send,
    Sign,
    TakeSlot,
    Transact,
)
from x402guard.ledger.events import TABLE

EFFECTS: Final = tuple(
    kind.__name__ for kind in (Send, PeekBody, Transact, Compute, Notify, TakeSlot, Ask, Checkpoint, Sign, AskChain)
)
INTERRUPTIONS: Final = ("none", "cancelled before", "cancelled after", "failed before", "failed after", "process died")
ACTORS: Final = (
    "payment", "answer", "sweep", "recheck", "reconcile", "owner", "opening", "llm", "llm_end", "tool", "tool_end",
    "chain",
)  # fmt: skip

_IMPOSSIBLE: Final = frozenset(
    {
        (effect, word)
        for effect in ("Checkpoint", "Notify", "TakeSlot", "Compute")
        for word in ("failed before", "failed after")
    }
    | {(effect, "failed after") for effect in ("Ask", "AskChain", "PeekBody")}
    | {(effect, "failed before") for effect in ("Ask", "AskChain")}
    | {("Notify", "cancelled before"), ("Notify", "cancelled after"), ("Notify", "process died")}
)
"""What cannot happen: these effects do not fail, or end at once."""

_ON_HOLDS: Final = frozenset(ACTORS) - {"opening", "chain"}


@dataclass(slots=True)
class Coverage:
    """What runs have reached, as counts. ``events`` is (kind, state, event) of holds; ``notes`` anything else.

    ``ways`` says how often a step was taken the short way, and why it was not; see ``testing.both_ways``.
    """

    events: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    effects: Counter[tuple[str, str]] = field(default_factory=Counter)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    ways: Counter[str] = field(default_factory=Counter)

    def add(self, other: Coverage) -> None:
        """Add the counts of other runs."""
        self.events.update(other.events)
        self.effects.update(other.effects)
        self.pairs.update(other.pairs)
        self.notes.update(other.notes)
        self.ways.update(other.ways)

    def unreached(self) -> dict[str, list[str]]:
        """Return what no run has reached, by table."""
        seen = {(state.split("+")[0].split("/")[0], event) for _, state, event in self.events}
        rows = sorted((str(state), event.__name__.lower()) for state, event in TABLE)
        effects = [(e, i) for e in EFFECTS for i in INTERRUPTIONS if (e, i) not in _IMPOSSIBLE]
        pairs = [(a, b) for a in ACTORS for b in ACTORS if _may_follow(a, b)]
        return {
            "events": [f"{state} {event}" for state, event in rows if (state, event) not in seen],
            "effects": [f"{effect} {how}" for effect, how in effects if not self.effects[effect, how]],
            "pairs": [f"{first} then {second}" for first, second in pairs if not self.pairs[first, second]],
        }

    def table(self) -> str:
        """Return all of it as Markdown."""
        lines = ["| hold | state | events |", "|---|---|---|"]
        for kind, state in sorted({(kind, state) for kind, state, _ in self.events}):
            found = {event: count for (k, s, event), count in self.events.items() if (k, s) == (kind, state)}
            counts = ", ".join(
                f"{event} {count:,}" for event, count in sorted(found.items(), key=lambda item: -item[1])
            )
            lines.append(f"| {kind} | {state} | {counts} |")
        lines += ["", *_matrix("effect", EFFECTS, INTERRUPTIONS, self.effects)]
        lines += ["", *_matrix("first, then", ACTORS, ACTORS, self.pairs)]
        lines += ["", "| short way | steps |", "|---|---|"]
        lines += [f"| {why} | {count:,} |" for why, count in self.ways.most_common()]
        return "\n".join(lines)


def _may_follow(first: str, second: str) -> bool:
    payment = {"payment", "answer", "sweep", "recheck", "reconcile", "owner", "chain"}
    families = (payment, {"llm", "llm_end"}, {"tool", "tool_end"})
    return any(first in family and second in family for family in families) and {first, second} & _ON_HOLDS != set()


def _matrix(corner: str, rows: Iterable[str], columns: Iterable[str], counts: Counter[tuple[str, str]]) -> list[str]:
    columns = tuple(columns)
    lines = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    return lines + [f"| {row} | {' | '.join(f'{counts[row, each]:,}' for each in columns)} |" for row in rows]
