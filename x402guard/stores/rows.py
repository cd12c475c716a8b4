"""Converts nodes, holds, entries and marks to flat database records and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeVar

from msgspec.json import Decoder, Encoder
from msgspec.structs import asdict, astuple

from x402guard.errors import ConfigError
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.intent import Intent
from x402guard.kernel.rows import (
    Claim,
    Delivery,
    Entry,
    Evidence,
    Hold,
    HoldKind,
    HoldState,
    Nanos,
    Node,
    NodeKind,
    NodeState,
    Purpose,
)
from x402guard.ledger.sessions import check_window

T = TypeVar("T")


class UnreadableRecord(Exception):  # noqa: N818 - becomes a LedgerUnavailable
    """A record has contents that no version of this library writes: the file is damaged or was edited."""


_WRONG: Final = (ValueError, TypeError, KeyError, ConfigError)


def _unreadable(kind: str, record: Sequence[Any], error: Exception) -> UnreadableRecord:
    return UnreadableRecord(f"{kind} {str(record[0])[:80]!r} cannot be read: {error}")


_DIGITS: Final = 64
_TEXT: Final = Encoder()
_VALUE: Final = Decoder().decode


def mark_text(value: Mapping[str, Any]) -> str:
    """Return a mark's value as JSON."""
    return _TEXT.encode(value).decode()


NODE_COLUMNS: Final = (
    "id", "parent_id", "kind", "name", "max_nanos", "created_ms", "last_ms", "captured", "held", "granted_out",
    "granted_in", "state", "terminated_by", "starved", "openers", "closed_ms", "seq", "head",
    "live", "window", "since_ms", "past", "reserve", "finalized", "soft", "warned", "trip_reason", "until_ms",
)  # fmt: skip
BALANCES: Final = (
    "captured", "held", "granted_in", "granted_out", "seq", "head", "last_ms", "live", "since_ms", "past", "starved", "warned",
)  # fmt: skip
RULE_COLUMNS: Final = tuple(name for name in NODE_COLUMNS if name not in BALANCES)
"""What of a budget decides about payments below it that change nothing in it."""
_HOLD: Final = Hold.__struct_fields__
HOLD_COLUMNS: Final = tuple("owner" if name == "instance" else name for name in _HOLD)  # its name in every ledger
ENTRY_COLUMNS: Final = Entry.__struct_fields__

Value = str | int | None
Record = tuple[Value, ...]
"""One row, with its values in the order of its table's columns."""
Packed = tuple[Value | bytearray, ...]
"""The same with hashes and nonces as bytes."""


def node_record(node: Node) -> Record:
    """Return a node in the order of ``NODE_COLUMNS``."""
    return (
        node.id, node.parent_id, str(node.kind), node.name, node.limit, node.created_ms, node.last_ms, node.captured,
        node.held, node.granted_out, node.granted_in, str(node.state), node.terminated_by, node.starved,
        _listed(node.openers), node.closed_ms, node.seq, node.head, node.live,
        None if node.window is None else f"{node.window.per} {node.window.tz}", node.since_ms, node.past, node.reserve,
        int(node.finalized), _listed(node.soft), node.warned, node.trip_reason,
        node.until_ms,
    )  # fmt: skip


def _listed(values: tuple[str | int, ...]) -> str:
    return _TEXT.encode(values).decode() if values else "[]"


def to_node(record: Sequence[Any]) -> Node:
    """Return the node of a record in the order of ``NODE_COLUMNS``."""
    try:
        (
            node_id, parent_id, kind, name, limit, created_ms, last_ms, captured, held, granted_out, granted_in, state,
            terminated_by, starved, openers, closed_ms, seq, head, live, window, since_ms, past, reserve, finalized,
            soft, warned, trip_reason, until_ms,
        ) = record  # fmt: skip
        return Node(
            node_id, parent_id, NodeKind(kind), name, None if limit is None else Nanos(limit), created_ms, last_ms,
            captured, held, granted_out, granted_in, NodeState(state), terminated_by, starved,
            () if openers == "[]" else tuple(_VALUE(openers)), closed_ms, seq, head, live,
            None if window is None else check_window(*window.split(" ", 1)), since_ms, past, reserve, bool(finalized),
            () if soft == "[]" else tuple(_VALUE(soft)), warned, trip_reason,
            until_ms,
        )  # fmt: skip
    except _WRONG as error:
        raise _unreadable("node", record, error) from error


def hold_record(hold: Hold) -> Record:
    """Return a hold in the order of ``HOLD_COLUMNS``."""
    return (
        hold.id, hold.node_id, str(hold.kind), hold.amount, hold.created_ms, hold.deadline_unix, hold.flying_since_ms,
        hold.instance, _TEXT.encode(asdict(hold.purpose)).decode(), int(hold.chain_evidence), hold.purchase_key,
        None if hold.intent is None else intent_text(hold.intent), str(hold.state), hold.captured,
        None if hold.evidence is None else str(hold.evidence), hold.doubt,
        None if hold.claim is None else _TEXT.encode(asdict(hold.claim)).decode(), hold.proof, hold.ended_by,
        hold.checked_ms, hold.presented, hold.closed_ms, str(hold.delivery),
    )  # fmt: skip


def to_hold(record: Sequence[Any]) -> Hold:
    """Return the hold of a record in the order of ``HOLD_COLUMNS``."""
    try:
        row = dict(zip(_HOLD, record, strict=True))
        row.update(
            kind=HoldKind(row["kind"]),
            purpose=Purpose(**_VALUE(row["purpose"])),
            chain_evidence=bool(row["chain_evidence"]),
            intent=None if row["intent"] is None else read_intent(row["intent"]),
            state=HoldState(row["state"]),
            evidence=None if row["evidence"] is None else Evidence(row["evidence"]),
            claim=None if row["claim"] is None else _claim(_VALUE(row["claim"])),
            delivery=Delivery(row["delivery"]),
        )
        return Hold(**row)
    except _WRONG as error:
        raise _unreadable("hold", record, error) from error


def _claim(value: Mapping[str, Any]) -> Claim:
    return Claim(Nanos(value["amount"]), value["transaction"])


def to_mark(record: Sequence[Any]) -> tuple[MarkKey, Mapping[str, Any]]:
    """Return the key and the value of a record (kind, key, value) of the table of marks."""
    try:
        kind, key, value = record
        found = _VALUE(value)
        if not isinstance(found, dict):  # an empty list or text would read as a mark that says nothing
            raise TypeError(f"a mark is an object, not {type(found).__name__}")
        return (kind, key), found
    except _WRONG as error:
        raise _unreadable("mark", record, error) from error


def entry_record(entry: Entry) -> Record:
    """Return an entry in the order of ``ENTRY_COLUMNS``."""
    return astuple(entry)


def packed_record(entry: Entry) -> Packed:
    """Do the same with its hashes and the id of its hold ``packed``: they are most of its bytes."""
    node_id, seq, at_ms, event, hold_id, captured, held, granted_in, granted_out, data, previous, own = astuple(entry)
    return (
        node_id, seq, at_ms, event, hold_id and packed(hold_id), captured, held, granted_in, granted_out, data,
        packed(previous), packed(own),
    )  # fmt: skip


def packed(value: str) -> str | bytearray:
    """Return 32 bytes for a text of 64 lowercase hexadecimal digits, and every other one as it is.

    They are a ``bytearray``, because the driver looks for an adapter of every ``bytes``.
    """
    if len(value) != _DIGITS:
        return value
    try:
        found = bytearray.fromhex(value)
    except ValueError:
        return value
    return found if found.hex() == value else value


def unpacked(value: T | bytes) -> T | str:
    """Return the text of a ``packed`` value, and every other one as it is."""
    return value.hex() if isinstance(value, bytes) else value


def _text(value: object) -> str:
    if type(value) is str:
        return value
    raise TypeError("a hash or the id of its hold is neither text nor bytes")


def to_entry(record: Sequence[Any]) -> Entry:
    """Return the entry of a record, packed or not, in the order of ``ENTRY_COLUMNS``."""
    try:
        node_id, seq, at_ms, event, hold_id, captured, held, granted_in, granted_out, data, previous, own = record
        # Written out for bytes: a report reads a million of them.
        previous = previous.hex() if type(previous) is bytes else _text(previous)
        own = own.hex() if type(own) is bytes else _text(own)
        if hold_id is not None:
            hold_id = hold_id.hex() if type(hold_id) is bytes else _text(hold_id)
        return Entry(node_id, seq, at_ms, event, hold_id, captured, held, granted_in, granted_out, data, previous, own)
    except _WRONG as error:
        raise _unreadable("entry of node", record, error) from error


_INTENT_DECODED: Final = Decoder().decode
_INTENT_NAMES: Final = Intent.__struct_fields__
_INTENT_ENCODED: Final = json.JSONEncoder(separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode


@lru_cache(maxsize=256)  # a row is written several times, always with the same intent
def intent_text(intent: Intent) -> str:
    """Return an intent as JSON. 256-bit numbers are written as text, because JSON readers lose their digits."""
    values: dict[str, Any] = {name: getattr(intent, name) for name in _INTENT_NAMES}
    values["amount_atomic"] = str(intent.amount_atomic)
    values["nonce"] = f"0x{intent.nonce:064x}"
    return _INTENT_ENCODED(values)


def read_intent(text: str) -> Intent:
    """Return the intent written by ``intent_text``. Raises ``ValueError`` or ``TypeError`` for anything else."""
    values = _INTENT_DECODED(text)
    if set(values) != set(_INTENT_NAMES):
        raise ValueError("the fields of the stored payment differ from those that this version of x402guard writes")
    values["amount_atomic"] = int(values["amount_atomic"])
    values["nonce"] = int(values["nonce"], 16)
    return Intent(**values)
