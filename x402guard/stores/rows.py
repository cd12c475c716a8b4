"""Converts nodes, holds, entries and marks to flat database records and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.json import Decoder, Encoder
from msgspec.structs import asdict, astuple

from x402guard.errors import ConfigError
from x402guard.ledger.intent import Intent
from x402guard.ledger.model import (
    Claim,
    Delivery,
    Entry,
    Evidence,
    Hold,
    HoldKind,
    HoldState,
    Node,
    NodeKind,
    NodeState,
    Purpose,
)
from x402guard.ledger.view import MarkKey
from x402guard.ledger.windows import check_window
from x402guard.money import Nanos


class UnreadableRecord(Exception):  # noqa: N818 - becomes a LedgerUnavailable
    """A record has contents that no version of this library writes: the file is damaged or was edited."""


_WRONG: Final = (ValueError, TypeError, KeyError, ConfigError)


def _unreadable(kind: str, record: Sequence[Any], error: Exception) -> UnreadableRecord:
    return UnreadableRecord(f"{kind} {str(record[0])[:80]!r} cannot be read: {error}")


_TEXT: Final = Encoder()
_VALUE: Final = Decoder().decode


def mark_text(value: Mapping[str, Any]) -> str:
    """Return a mark's value as JSON."""
    return _TEXT.encode(value).decode()


NODE_COLUMNS: Final = (
    "id", "parent_id", "kind", "name", "max_nanos", "created_ms", "last_ms", "captured", "held", "granted_out",
    "granted_in", "state", "terminated_by", "starved", "openers", "closed_ms", "seq", "head",
    "live", "window", "since_ms", "past", "reserve", "finalized", "soft", "warned", "trip_reason", "until_ms", "wrote",
)  # fmt: skip
_HOLD: Final = Hold.__struct_fields__
HOLD_COLUMNS: Final = tuple("owner" if name == "instance" else name for name in _HOLD)  # its name in every ledger
ENTRY_COLUMNS: Final = Entry.__struct_fields__

Value = str | int | None
Record = tuple[Value, ...]
"""One row, with its values in the order of its table's columns."""


def node_record(node: Node) -> Record:
    """Return a node in the order of ``NODE_COLUMNS``."""
    return (
        node.id, node.parent_id, str(node.kind), node.name, node.limit, node.created_ms, node.last_ms, node.captured,
        node.held, node.granted_out, node.granted_in, str(node.state), node.terminated_by, node.starved,
        _listed(node.openers), node.closed_ms, node.seq, node.head, node.live,
        None if node.window is None else f"{node.window.per} {node.window.tz}", node.since_ms, node.past, node.reserve,
        int(node.finalized), _listed(node.soft), node.warned, node.trip_reason,
        node.until_ms,
        node.seq,  # column ``wrote``: an older version does not set it, and a trigger refuses its write
    )  # fmt: skip


def _listed(values: tuple[str | int, ...]) -> str:
    return _TEXT.encode(values).decode() if values else "[]"


def to_node(record: Sequence[Any]) -> Node:
    """Return the node of a record in the order of ``NODE_COLUMNS``."""
    try:
        (
            node_id, parent_id, kind, name, limit, created_ms, last_ms, captured, held, granted_out, granted_in, state,
            terminated_by, starved, openers, closed_ms, seq, head, live, window, since_ms, past, reserve, finalized,
            soft, warned, trip_reason, until_ms, _wrote,
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
    row = dict(zip(_HOLD, astuple(hold), strict=True))
    row.update(
        kind=str(hold.kind),
        purpose=_TEXT.encode(asdict(hold.purpose)).decode(),
        chain_evidence=int(hold.chain_evidence),
        intent=None if hold.intent is None else hold.intent.to_json(),
        state=str(hold.state),
        evidence=None if hold.evidence is None else str(hold.evidence),
        claim=None if hold.claim is None else _TEXT.encode(asdict(hold.claim)).decode(),
        delivery=str(hold.delivery),
    )
    return tuple(row.values())


def to_hold(record: Sequence[Any]) -> Hold:
    """Return the hold of a record in the order of ``HOLD_COLUMNS``."""
    try:
        row = dict(zip(_HOLD, record, strict=True))
        row.update(
            kind=HoldKind(row["kind"]),
            purpose=Purpose(**_VALUE(row["purpose"])),
            chain_evidence=bool(row["chain_evidence"]),
            intent=None if row["intent"] is None else Intent.from_json(row["intent"]),
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


def to_entry(record: Sequence[Any]) -> Entry:
    """Return the entry of a record in the order of ``ENTRY_COLUMNS``."""
    try:
        return Entry(*record)
    except TypeError as error:
        raise _unreadable("entry of node", record, error) from error
