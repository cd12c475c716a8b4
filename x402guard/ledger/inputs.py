"""Keeps what an agent asks another one of the same run, with the reply, and which session waits for which.

A session has one open question to another at a time. One that ends while a question to it has no reply has ignored
another agent, and ends as ``not_verified``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal

from msgspec import Struct, to_builtins
from msgspec.json import Encoder

from x402guard.errors import ConfigError
from x402guard.frozen import read_struct, readable, replace
from x402guard.kernel.change_set import MarkKey
from x402guard.ledger.view import LedgerView

MOST_INPUTS: Final = 100
"""The most questions to one session that are open at a time."""


@readable
class Input(Struct, frozen=True):
    """A question of one agent to another. ``payload`` and ``reply`` are JSON values; times are unix milliseconds.

    Attributes:
        sender, to: the ids of the sessions.
        number: of this question among those of the same sender to the same session, from 1 on.
        payload: what is asked.
        asked_ms: when it was asked; read_ms: when it was last read, or 0; replied_ms: when it got its reply, or 0.
        reply: the reply.
        taken: True once the sender has it.
    """

    sender: str
    to: str
    number: int
    payload: Any
    asked_ms: int
    read_ms: int = 0
    replied_ms: int = 0
    reply: Any = None
    taken: bool = False

    def __repr__(self) -> str:
        return (
            f"Input(sender={self.sender!r}, to={self.to!r}, number={self.number})"  # what agents say stays out of logs
        )

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("sender", self.sender), ("to", self.to), ("number", self.number)]

    @property
    def is_open(self) -> bool:
        """True if it has no reply."""
        return not self.replied_ms


def is_same(one: Any, other: Any) -> bool:
    """True if two values are the same JSON: to Python, 1 and True are equal."""
    return _ENCODED(one) == _ENCODED(other)


_ENCODED: Final = Encoder(order="sorted").encode


def input_mark(to: str, sender: str) -> MarkKey:
    """Return the key of the mark that keeps the last question of a session to another. No id contains a space."""
    return "input", f"{to} {sender}"


def inputs_mark(to: str) -> MarkKey:
    """Return the key of the mark that lists who waits for a reply of a session."""
    return "inputs", to


def input_of(view: LedgerView, to: str, sender: str) -> Input | None:
    """Return the last question of a session to another, or None."""
    row = view.mark(input_mark(to, sender))
    return None if row is None else read_input(row)


def read_input(row: Mapping[str, Any]) -> Input:
    """Return the question in a mark."""
    return read_struct(row, Input)


def senders_of(view: LedgerView, to: str) -> list[str]:
    """Return the ids of the sessions that wait for a reply of a session."""
    return list((view.mark(inputs_mark(to)) or {"open": []})["open"])


def put_input(view: LedgerView, to: str, sender: str, payload: Any) -> Input:
    """Write a question, and return it. The same one again is the same, until its sender has the reply.

    Raises ``ConfigError`` while another one of the same sender has no reply, and for too many open ones.
    """
    before = input_of(view, to, sender)
    if before is not None and not before.taken and is_same(before.payload, payload):
        return before
    if before is not None and before.is_open:
        raise ConfigError(f"input: the last one to {to!r} has no reply yet; wait for it")
    senders = senders_of(view, to)
    if len(senders) >= MOST_INPUTS:
        raise ConfigError(f"input: {MOST_INPUTS} others wait for a reply of {to!r} already")
    number = 1 if before is None else before.number + 1
    asked = Input(sender, to, number, payload, view.now_ms)
    view.put_mark(input_mark(to, sender), to_builtins(asked))
    view.put_mark(inputs_mark(to), {"open": [*senders, sender]})
    view.record(sender, "event", facts={"name": "input_asked", "to": to, "number": number})
    return asked


def note_read(view: LedgerView, to: str, sender: str) -> Input | None:
    """Note that an open question was read, and return it; None if there is none."""
    found = input_of(view, to, sender)
    if found is None or not found.is_open:
        return None
    read = replace(found, read_ms=view.now_ms)
    view.put_mark(input_mark(to, sender), to_builtins(read))
    return read


def take_reply(view: LedgerView, found: Input) -> Input:
    """Note that the sender has the reply of a question, and return it."""
    taken = replace(found, taken=True)
    view.put_mark(input_mark(found.to, found.sender), to_builtins(taken))
    return taken


def put_reply(view: LedgerView, to: str, sender: str, reply: Any, number: int | None = None) -> Input:
    """Write the reply of the session *to*. Raises ``ConfigError`` if no question of *sender* with that number is open."""
    found = input_of(view, to, sender)
    if found is None or not found.is_open or number not in (None, found.number):
        raise ConfigError(f"input: {sender!r} waits for no reply of {to!r}")
    replied = replace(found, reply=reply, read_ms=found.read_ms or view.now_ms, replied_ms=view.now_ms)
    view.put_mark(input_mark(to, sender), to_builtins(replied))
    view.put_mark(inputs_mark(to), {"open": [each for each in senders_of(view, to) if each != sender]})
    view.record(to, "event", facts={"name": "input_replied", "to": sender, "number": found.number})
    return replied


def withdraw(view: LedgerView, to: str, sender: str) -> None:
    """End the open question of a session that waits for no reply any more: its task is over."""
    found = input_of(view, to, sender)
    if found is not None and found.is_open:
        view.put_mark(input_mark(to, sender), to_builtins(replace(found, replied_ms=view.now_ms, taken=True)))
        view.put_mark(inputs_mark(to), {"open": [each for each in senders_of(view, to) if each != sender]})


def note_ignored(view: LedgerView, node_id: str) -> bool:
    """Return whether other agents wait for a reply of a session that ends, and tell it."""
    ignored = senders_of(view, node_id)
    if ignored:
        message = f"session {node_id} ends without a reply to {', '.join(ignored)}"
        view.record(node_id, "event", facts={"name": "not_verified", "ignored": ignored})
        view.tell("not_verified", "warning", message, session=node_id, facts={"ignored": ignored})
    return bool(ignored)


# -- waiting ------------------------------------------------------------------------------------------------------------

Awaited = Literal["result", "reply"]


class Wait(Struct, frozen=True):
    """A session that waits for another: for the result of its task, or for a reply.

    Attributes:
        waiter, target: the ids of the sessions.
        awaits: what it waits for.
        since_ms: since when, in unix milliseconds.
    """

    waiter: str
    target: str
    awaits: Awaited
    since_ms: int = 0


def wait_mark(waiter: str, target: str) -> MarkKey:
    """Return the key of the mark that says that a session waits for another."""
    return "wait", f"{waiter} {target}"


def begin_wait(view: LedgerView, wait: Wait, call: str) -> None:
    """Note that a call waits; *call* is its own id, which begins with that of its instance and ``#``."""
    key = wait_mark(wait.waiter, wait.target)
    row = view.mark(key) or {"waiter": wait.waiter, "target": wait.target, "calls": {}}
    if call in row["calls"]:
        return
    view.put_mark(key, {**row, "calls": {**row["calls"], call: [wait.awaits, view.now_ms]}})


def end_wait(view: LedgerView, wait: Wait, call: str) -> None:
    """Note that a call waits no longer. Again, it changes nothing."""
    key = wait_mark(wait.waiter, wait.target)
    row = view.mark(key)
    if row is not None and call in row["calls"]:
        view.put_mark(key, {**row, "calls": {each: value for each, value in row["calls"].items() if each != call}})


def waits_of(row: Mapping[str, Any], gone: Callable[[str], bool]) -> list[Wait]:
    """Return the wait in a mark: that of its first call whose instance is not *gone*; none without one."""
    calls = [value for call, value in row["calls"].items() if not gone(call.rpartition("#")[0])]
    waits = [Wait(row["waiter"], row["target"], awaits, since_ms) for awaits, since_ms in calls]
    return sorted(waits, key=lambda each: each.since_ms)[:1]


def find_cycles(waits: Iterable[Wait], inputs: Mapping[tuple[str, str], Input]) -> list[tuple[Wait, ...]]:
    """Return the cycles of sessions of which each waits for the next, and none can go on. No session is in two of them.

    *inputs* are the last questions by (asked session, sender). A session that waits for several goes on as soon as one of
    them does. One that waits for a result goes on when the other one asks it.
    """
    out: dict[str, list[Wait]] = {}
    for wait in waits:
        out.setdefault(wait.waiter, []).append(wait)
    vain = {(wait.waiter, wait.target) for each in out.values() for wait in each}
    before = -1
    while len(vain) != before:
        before = len(vain)
        vain = {
            (wait.waiter, wait.target)
            for each in out.values()
            for wait in each
            if (wait.waiter, wait.target) in vain and not _may_end(wait, out.get(wait.target, []), inputs, vain)
        }
    after = {wait.waiter: wait for each in out.values() for wait in each if (wait.waiter, wait.target) in vain}
    cycles, seen = [], set[str]()
    for first in sorted(after):
        path: list[Wait] = []
        waiter = first
        while waiter not in seen:
            seen.add(waiter)
            path.append(after[waiter])
            waiter = after[waiter].target
        begins = [number for number, wait in enumerate(path) if wait.waiter == waiter]
        if begins:
            cycles.append(tuple(path[begins[0] :]))
    return cycles


def _may_end(
    wait: Wait, others: list[Wait], inputs: Mapping[tuple[str, str], Input], vain: set[tuple[str, str]]
) -> bool:
    """True if the session that is waited for can go on; *others* are its own waits, *vain* those that nothing ends."""
    if any((each.waiter, each.target) not in vain for each in others) or not others:
        return True
    if wait.awaits == "result":
        return any(each.awaits == "reply" and each.target == wait.waiter for each in others)
    asked = inputs.get((wait.target, wait.waiter))
    if asked is None or not asked.is_open:
        return True
    # What has read the question is another task of that session than those that waited before.
    return bool(asked.read_ms) and all(each.since_ms < asked.read_ms for each in others)
