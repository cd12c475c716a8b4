"""What a tool costs that no transport sees: held before it runs, captured when it has; or charged at once. Pure."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any, Final
from uuid import UUID

from x402guard.booking import book, error_name, give_back, hold_or_refuse
from x402guard.effects import Flow, checkpoint, transact, transact_anyway, warn
from x402guard.errors import ConfigError, LedgerUnavailable
from x402guard.held_calls import write_void
from x402guard.ledger.authorize import Refusal, authorize, check_open, lapse_due
from x402guard.ledger.model import Evidence, Hold, HoldKind, HoldState, Purpose
from x402guard.ledger.transitions import Capture, apply
from x402guard.ledger.view import LedgerView, Scope
from x402guard.metering.bill import Bill
from x402guard.money import Nanos, format_dollars
from x402guard.policy.guards import guard_marks, judge_amount, judge_step, note_taken
from x402guard.policy.steps import Step, step_of, tool_key
from x402guard.purchase import Terms
from x402guard.refusals import refused
from x402guard.settlement import Receipt, receipt_of

__all__ = [
    "TOOL_HOLD_S",
    "ToolCall",
    "ToolEnd",
    "charge_tool",
    "check_running",
    "check_tool",
    "end_tool",
    "fingerprint_of",
    "hold_tool",
    "plain_arguments",
]

TOOL_HOLD_S: Final = 900
"""A tool whose end nobody reports is captured at its ceiling after this many seconds, unless told otherwise."""

_SAYS_ITSELF: Final = (Decimal, UUID, dt.date, dt.time, PurePath, Enum)
_DEEPEST: Final = 64
_MOST_VALUES: Final = 10_000


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One use of a tool.

    Attributes:
        tool: its name, as it stands in reports.
        amount: nano-dollars: what it costs, or costs at most.
        entropy: 32 random bytes, from which its hold's id derives.
        arguments: its arguments as plain JSON, or None where they were not told. They go into no book.
        fingerprint: their SHA-256 in hex, or "" for None.
        lifetime_s: seconds after which its hold counts in full, if nobody says how it ended.
    """

    tool: str
    amount: Nanos
    entropy: bytes
    arguments: Mapping[str, Any] | None = field(default=None, repr=False)
    lifetime_s: int = TOOL_HOLD_S
    fingerprint: str = field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", _fingerprint(self.arguments))

    @property
    def hold_id(self) -> str:
        """The id of its hold: another than that of a payment or an LLM call of the same random bytes."""
        return hashlib.sha256(b"tool call" + self.entropy).hexdigest()


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """How a use of a tool ended.

    Attributes:
        amount: nano-dollars that it cost, or None where nobody says: the ceiling counts.
        void: why it was not billed, or None where it was, or may have been.
        note: for the books.
        forgotten: it ended well, and its caller said nothing: people ought to know.
    """

    amount: Nanos | None = None
    void: str | None = None
    note: str = ""
    forgotten: bool = False


def check_tool(tool: object) -> str:
    """Return a tool's name as plain text. Raises ``ConfigError`` for what is none: a report has to print it."""
    if not isinstance(tool, str):
        raise ConfigError(f"tool: a {type(tool).__name__} is not a name for a tool; write text such as 'serp'")
    name = str.__str__(tool)  # a subclass may say of itself what it likes
    if not name or not name.isprintable() or len(name) > 200:
        raise ConfigError(f"tool: {name[:60]!a} is not a name for a tool; write text such as 'serp'")
    return name


def hold_tool(terms: Terms, call: ToolCall) -> Flow[Hold]:
    """Hold what a tool costs at most, durably. Raises the refusal where it does not fit, ``LedgerUnavailable``; nothing held."""

    def undo(error: BaseException) -> Flow[None]:
        return give_back(terms, call.hold_id, f"the tool never ran: {error_name(error)}", error)

    step = _step(terms, call)
    held = yield from hold_or_refuse(
        terms, _scope(terms, call, step), lambda view: _hold(view, terms, call, step), undo
    )
    try:
        yield from checkpoint()  # cancelled while it was written: it is given back, before the tool has begun
    except GeneratorExit:
        raise
    except BaseException as error:
        yield from undo(error)
        raise
    return held


def charge_tool(terms: Terms, call: ToolCall) -> Flow[Receipt]:
    """Hold and capture what a tool costs, in one transaction. Raises as ``hold_tool`` does."""
    step = _step(terms, call)

    def change(view: LedgerView) -> Hold | Refusal:
        standing = view.hold(call.hold_id)
        held = _hold(view, terms, call, step) if standing is None else standing
        return held if isinstance(held, Refusal) else apply(view, held.id, Capture(call.amount, Evidence.ESTIMATE))

    def undo(error: BaseException) -> Flow[None]:
        # What was captured stays so: it costs budget, and was the caller's own word.
        return give_back(terms, call.hold_id, f"the tool never ran: {error_name(error)}", error)

    try:
        captured = yield from hold_or_refuse(terms, _scope(terms, call, step), change, undo)
    except LedgerUnavailable as error:
        error.advice = "The charge may have been booked: look at session.spent before you repeat it."
        raise
    return receipt_of(captured, represented=False)


def end_tool(terms: Terms, hold: Hold, end: ToolEnd, *, ceiling: Nanos) -> Flow[Receipt]:
    """Write down how a tool ended. What it cost is captured past the ceiling too; the ceiling, where nobody said.

    Books that cannot be written take nothing from the caller: the hold stands in full, and lapses to its ceiling.
    """
    try:
        if end.void is not None:
            voided = (yield from transact_anyway(*write_void(terms, hold.id, end.void, step=step_of(hold)))) or hold
            receipt = replace(receipt_of(voided, represented=False), note=end.void)
            return replace(receipt, amount=Decimal(0)) if voided.state is HoldState.VOIDED else receipt
        if end.amount is None:
            bill = Bill(ceiling, Evidence.ASSUMED, note=end.note)  # what is free is held as a nano-dollar
        else:
            bill = Bill(end.amount, Evidence.ESTIMATE, note=end.note)
        ended = yield from book(terms, hold, bill)
        if end.forgotten:
            yield from warn(
                f"tool {hold.purpose.tool!r}: {end.note}, so its ceiling ${format_dollars(ceiling)} is booked"
            )
        elif end.amount is not None and end.amount > hold.amount:
            cost, most = format_dollars(end.amount), format_dollars(ceiling)
            yield from warn(f"tool {hold.purpose.tool!r}: it cost ${cost}, above its ceiling ${most}")
    except LedgerUnavailable as error:
        problem = f"the books could not be written: {error}"
        yield from warn(f"tool {hold.purpose.tool!r}: {problem}; its hold {hold.id} counts in full")
        return replace(receipt_of(hold, represented=False), in_doubt=True, note=problem)
    return replace(receipt_of(ended, represented=False), note=end.note)


def check_running(terms: Terms) -> Flow[None]:
    """Raise the refusal of a session that is tripped or closed, for what costs no dollars."""
    closed = yield from transact(Scope(nodes=(terms.node_id,)), lambda view: check_open(view, terms.node_id))
    if closed is not None:
        raise (yield from refused(terms, closed))


def _scope(terms: Terms, call: ToolCall, step: Step) -> Scope:
    marks = guard_marks(terms.policy, terms.node_id, step)
    return Scope(nodes=(terms.node_id,), holds=(call.hold_id,), marks=marks, durable=True)


def _step(terms: Terms, call: ToolCall) -> Step:
    loop = terms.policy.loop
    key = "" if loop is None else tool_key(call.tool, call.arguments, loop.ignored)
    return Step(HoldKind.TOOL, call.tool, key, call.amount)


def _hold(view: LedgerView, terms: Terms, call: ToolCall, step: Step) -> Hold | Refusal:
    lapse_due(view)
    refusal = (
        check_open(view, terms.node_id)
        or judge_step(view, terms.policy, terms.node_id, step)
        or judge_amount(view, terms.policy, terms.node_id, step)
    )
    if refusal is not None:
        return replace(refusal, requested=call.amount)
    hold = Hold(
        id=call.hold_id,
        node_id=terms.node_id,
        kind=HoldKind.TOOL,
        amount=Nanos(max(1, call.amount)),
        created_ms=view.now_ms,
        deadline_unix=view.now_unix + call.lifetime_s,
        flying_since_ms=view.now_ms,
        owner=terms.instance,
        purpose=Purpose(tool=call.tool, fingerprint=call.fingerprint, step=step.key),
    )
    facts = {"kind": HoldKind.TOOL, "amount": hold.amount, "tool": call.tool, "deadline": hold.deadline_unix}
    if call.fingerprint:
        facts["arguments"] = call.fingerprint
    written = authorize(view, hold, facts)
    if not isinstance(written, Refusal):
        note_taken(view, terms.policy, terms.node_id, step)
    return written


def fingerprint_of(arguments: object) -> str:
    """Return the SHA-256 of a tool's arguments in hex, whatever their order; "" for None. Their values go into no book.

    Raises as ``plain_arguments`` does.
    """
    return _fingerprint(plain_arguments(arguments))


def _fingerprint(plain: Mapping[str, Any] | None) -> str:
    return "" if plain is None else hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def plain_arguments(arguments: object) -> Mapping[str, Any] | None:
    """Return a tool's arguments as plain JSON, so that two uses can be told apart; None where they were not told.

    Dates, decimals, paths, dataclasses and models count by what they say, bytes by their hash; with anything else among them
    nobody can tell, and None is returned. Raises ``ConfigError`` naming the argument for what is no mapping, nests deeper
    than 64 levels, or holds more than 10,000 values or a million characters.
    """
    if arguments is None:
        return None
    if not isinstance(arguments, Mapping):
        raise ConfigError(f'arguments: a {type(arguments).__name__} is no mapping; write {{"query": …}}')
    left = [_MOST_VALUES]
    try:
        plain = _plain(arguments, _DEEPEST, left)
        json.dumps(plain)
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"arguments: {error}") from error
    return plain if isinstance(plain, dict) and len(left) == 1 else None


def _plain(value: object, deeper: int, left: list[int]) -> object:
    left[0] -= 1 + (len(value) // 100 if isinstance(value, (str, bytes)) else 0)
    if left[0] < 0:
        raise ConfigError(f"arguments: more than {_MOST_VALUES:,} values; give those that tell one call from another")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if deeper == 0:
        raise ConfigError(f"arguments: nested deeper than {_DEEPEST} levels")
    if isinstance(value, Mapping):
        return {_key(key): _plain(item, deeper - 1, left) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, deeper - 1, left) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(item, deeper - 1, left)) for item in value)
    name = type(value).__qualname__
    if isinstance(value, bytes):
        return [name, hashlib.sha256(value).hexdigest()]
    if isinstance(value, _SAYS_ITSELF):
        return [name, hashlib.sha256(str(value).encode("utf-8", "replace")).hexdigest()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return [name, _plain(fields, deeper - 1, left)]
    if callable(dump := getattr(value, "model_dump", None)) and not isinstance(value, type):
        return [name, _plain(dump(), deeper - 1, left)]
    left.append(0)  # it says nothing of itself: nobody can tell it from another
    return [name]


def _key(key: object) -> str:
    if isinstance(key, str):
        return str.__str__(key)
    return (
        f"{type(key).__qualname__}:{key}"
        if isinstance(key, (int, float, bool, *_SAYS_ITSELF))
        else type(key).__qualname__
    )
