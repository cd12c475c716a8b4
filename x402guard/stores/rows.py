"""Converts nodes, holds, entries and marks to flat database records and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from x402guard.errors import ConfigError
from x402guard.frozen import values_of
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


@contextmanager
def _reading(kind: str, record: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, ConfigError) as error:
        raise UnreadableRecord(f"{kind} {str(record[0])[:80]!r} cannot be read: {error}") from error


NODE_COLUMNS: Final = (
    "id", "parent_id", "kind", "name", "max_nanos", "created_ms", "last_ms", "captured", "held", "granted_out",
    "granted_in", "state", "terminated_by", "starved", "openers", "closed_ms", "seq", "head",
    "live", "window", "since_ms", "past", "reserve", "finalized", "soft", "warned", "trip_reason", "wrote",
)  # fmt: skip
_HOLD: Final = Hold.__struct_fields__
HOLD_COLUMNS: Final = tuple("owner" if name == "instance" else name for name in _HOLD)  # its name in every ledger
_PURPOSE: Final = Purpose.__struct_fields__
ENTRY_COLUMNS: Final = Entry.__struct_fields__

Value = str | int | None
Record = tuple[Value, ...]
"""One row, with its values in the order of its table's columns."""


def node_record(node: Node) -> Record:
    """Return a node in the order of ``NODE_COLUMNS``."""
    return (
        node.id, node.parent_id, str(node.kind), node.name, node.limit, node.created_ms, node.last_ms, node.captured,
        node.held, node.granted_out, node.granted_in, str(node.state), node.terminated_by, int(node.starved),
        json.dumps(node.openers), node.closed_ms, node.seq, node.head, node.live,
        None if node.window is None else f"{node.window.per} {node.window.tz}", node.since_ms, node.past, node.reserve,
        int(node.finalized), json.dumps(node.soft), node.warned, node.trip_reason,
        node.seq,  # column ``wrote``: an older version does not set it, and a trigger refuses its write
    )  # fmt: skip


def to_node(record: Sequence[Any]) -> Node:
    """Return the node of a record in the order of ``NODE_COLUMNS``."""
    with _reading("node", record):
        row = dict(zip(NODE_COLUMNS, record, strict=True))
        limit = row.pop("max_nanos")
        row.pop("wrote")
        row.update(
            kind=NodeKind(row["kind"]),
            state=NodeState(row["state"]),
            starved=bool(row["starved"]),
            openers=tuple(json.loads(row["openers"])),
            window=None if row["window"] is None else check_window(*row["window"].split(" ", 1)),
            finalized=bool(row["finalized"]),
            soft=tuple(json.loads(row["soft"])),
        )
        return Node(limit=None if limit is None else Nanos(limit), **row)


def hold_record(hold: Hold) -> Record:
    """Return a hold in the order of ``HOLD_COLUMNS``."""
    row: dict[str, Any] = {name: getattr(hold, name) for name in _HOLD}
    row.update(
        kind=str(hold.kind),
        purpose=json.dumps({name: getattr(hold.purpose, name) for name in _PURPOSE}, ensure_ascii=False),
        chain_evidence=int(hold.chain_evidence),
        intent=None if hold.intent is None else hold.intent.to_json(),
        state=str(hold.state),
        evidence=None if hold.evidence is None else str(hold.evidence),
        claim=None if hold.claim is None else json.dumps(values_of(hold.claim)),
        delivery=str(hold.delivery),
    )
    return tuple(row.values())


def to_hold(record: Sequence[Any]) -> Hold:
    """Return the hold of a record in the order of ``HOLD_COLUMNS``."""
    with _reading("hold", record):
        row = dict(zip(_HOLD, record, strict=True))
        row.update(
            kind=HoldKind(row["kind"]),
            purpose=Purpose(**json.loads(row["purpose"])),
            chain_evidence=bool(row["chain_evidence"]),
            intent=None if row["intent"] is None else Intent.from_json(row["intent"]),
            state=HoldState(row["state"]),
            evidence=None if row["evidence"] is None else Evidence(row["evidence"]),
            claim=None if row["claim"] is None else _claim(json.loads(row["claim"])),
            delivery=Delivery(row["delivery"]),
        )
        return Hold(**row)


def _claim(value: Mapping[str, Any]) -> Claim:
    return Claim(Nanos(value["amount"]), value["transaction"])


def to_mark(record: Sequence[Any]) -> tuple[MarkKey, Mapping[str, Any]]:
    """Return the key and the value of a record (kind, key, value) of the table of marks."""
    with _reading("mark", record):
        kind, key, value = record
        return (kind, key), dict(json.loads(value))


def entry_record(entry: Entry) -> Record:
    """Return an entry in the order of ``ENTRY_COLUMNS``."""
    return tuple(getattr(entry, name) for name in ENTRY_COLUMNS)


def to_entry(record: Sequence[Any]) -> Entry:
    """Return the entry of a record in the order of ``ENTRY_COLUMNS``."""
    with _reading("entry of node", record):
        return Entry(*record)
