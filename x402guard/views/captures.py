"""What was captured, entry by entry: one row for each, whose amounts add up to what is spent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from x402guard.ledger.model import Entry, Node, NodeKind
from x402guard.ledger.tree import path
from x402guard.money import Nanos


class CaptureRow(Struct, frozen=True):
    """One entry that has captured money, or given some of it back.

    Attributes:
        at_ms: unix milliseconds.
        customer: the name of the nearest named budget around the session, or "".
        session, agent: the id and the name of the session that has spent it.
        kind: ``payment``, ``llm`` or ``tool``.
        event: ``capture``, ``lapse``, ``correct`` or ``reopen``.
        method, host, path: of the request, without its query; or "".
        payee, network, transaction: of a payment; or "".
        provider, model: of an LLM call; or "".
        tool: of a tool; or "".
        tokens_in, tokens_out: of an LLM call.
        nanos: nano-dollars; negative for what was given back.
        evidence: why the amount is believed.
        hold: the id of the hold.
        entry: the hash of the journal's entry: the same row never has another one.
    """

    at_ms: int
    customer: str
    session: str
    agent: str
    kind: str
    event: str
    method: str
    host: str
    path: str
    payee: str
    network: str
    transaction: str
    provider: str
    model: str
    tool: str
    tokens_in: int
    tokens_out: int
    nanos: Nanos
    evidence: str
    hold: str
    entry: str


def capture_rows(
    nodes: Mapping[str, Node], entries: Iterable[Entry], *, since_ms: int = 0, until_ms: int | None = None
) -> list[CaptureRow]:
    """Return a row for each entry of the journals that has changed what is captured, in the order of their times.

    *nodes* are those of the journals and all above them, by id. With *since_ms* and *until_ms* (unix milliseconds, the
    second not included) only the entries between them.
    """
    authorized: dict[str, Mapping[str, Any]] = {}
    claimed: dict[str, str] = {}
    rows = []
    for entry in sorted(entries, key=lambda each: (each.at_ms, each.node_id, each.seq)):
        if entry.hold_id is None or nodes[entry.node_id].kind is NodeKind.TOKENS:
            continue
        facts = entry.facts()
        if entry.event == "authorize":
            authorized[entry.hold_id] = facts
        claim = facts.get("claim")
        if isinstance(claim, Mapping):
            claimed[entry.hold_id] = str(claim.get("transaction", ""))
        if entry.captured and since_ms <= entry.at_ms and (until_ms is None or entry.at_ms < until_ms):
            held = authorized.get(entry.hold_id, {})
            rows.append(_row(nodes, entry, held, facts, claimed.get(entry.hold_id, "")))
    return rows


def _row(
    nodes: Mapping[str, Node], entry: Entry, held: Mapping[str, Any], facts: Mapping[str, Any], transaction: str
) -> CaptureRow:
    above = path(nodes, entry.node_id)
    session = next((node for node in above if node.kind is NodeKind.SESSION), above[0])
    customer = next((node.name for node in above if node.kind is NodeKind.BUDGET), "")
    method, _, url = str(held.get("request") or "").partition(" ")
    proof = str(facts.get("proof") or "")
    usage = facts.get("usage") or {}
    return CaptureRow(
        at_ms=entry.at_ms,
        customer=customer,
        session=session.id,
        agent=session.name,
        kind=str(held.get("kind", "")),
        event=entry.event,
        method=method,
        host=str(held.get("host") or ""),
        path=urlsplit(url).path,
        payee=str(held.get("payee") or ""),
        network=str(held.get("network") or ""),
        transaction=_transaction(proof) or transaction,
        provider=str(held.get("provider") or ""),
        model=str(held.get("model") or ""),
        tool=str(held.get("tool") or ""),
        tokens_in=int(usage.get("input_tokens", 0)),
        tokens_out=int(usage.get("output_tokens", 0)),
        nanos=Nanos(entry.captured),
        evidence=str(facts.get("evidence") or ""),
        hold=entry.hold_id or "",
        entry=entry.hash,
    )


def _transaction(proof: str) -> str:
    """Return the transaction of a proof, ``NETWORK/TRANSACTION/LOG``."""
    parts = proof.split("/")
    return parts[1] if len(parts) > 1 else ""
