"""What was captured, entry by entry: one row for each, whose amounts add up to what is spent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from msgspec import Struct

from x402guard.kernel.rows import Entry, Nanos, Node, NodeKind
from x402guard.ledger.lines import HoldLine
from x402guard.ledger.tree import path
from x402guard.views.taken import NAMES


class CaptureRow(Struct, frozen=True):
    """One entry that has captured money, or given some of it back.

    Attributes:
        at_ms: unix milliseconds.
        customer: the name of the nearest named budget around the session, or "".
        session, agent: the id and the name of the session that has spent it.
        kind: ``payment``, ``llm`` or ``tool``.
        event: ``capture``, ``lapse``, ``correct`` or ``reopen``.
        method, host, path: of the request, without its query; or "".
        payee, network, transaction: of a payment; or "". The transaction is the one that is known now.
        provider, model: of an LLM call; or "".
        tool: of a tool; or "".
        tokens_in, tokens_out: of an LLM call.
        nanos: nano-dollars; negative for what was given back.
        evidence: why the entry's amount was believed when it was written.
        now: why what its call has captured is believed now, in a report's words: ``proven``, ``claimed``, ``stated``,
            ``priced`` or ``assumed``.
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
    now: str
    hold: str
    entry: str


def capture_rows(
    nodes: Mapping[str, Node],
    entries: Iterable[Entry],
    lines: Mapping[str, HoldLine],
    *,
    since_ms: int = 0,
    until_ms: int | None = None,
) -> list[CaptureRow]:
    """Return a row for each entry of the journals that has changed what is captured, in the order of their times.

    *nodes* are those of the journals and all above them, *lines* every hold, both by id. With *since_ms* and *until_ms*
    (unix milliseconds, the second not included) only the entries between them.
    """
    until_ms = until_ms or 2**63
    ordered = sorted(
        (
            entry
            for entry in entries
            if entry.captured and entry.hold_id in lines and since_ms <= entry.at_ms < until_ms
        ),
        key=lambda each: (each.at_ms, each.node_id, each.seq),
    )
    tokens = {node.id for node in nodes.values() if node.kind is NodeKind.TOKENS}
    where = {node_id: _whereabouts(nodes, node_id) for node_id in {entry.node_id for entry in ordered}}
    return [
        _row(entry, lines[entry.hold_id or ""], where[entry.node_id])
        for entry in ordered
        if entry.node_id not in tokens
    ]


def _whereabouts(nodes: Mapping[str, Node], node_id: str) -> tuple[str, str, str]:
    """Return the customer's name, and the session's id and name."""
    above = path(nodes, node_id)
    session = next((node for node in above if node.kind is NodeKind.SESSION), above[0])
    return next((node.name for node in above if node.kind is NodeKind.BUDGET), ""), session.id, session.name


def _row(entry: Entry, line: HoldLine, where: tuple[str, str, str]) -> CaptureRow:
    facts, held = entry.facts(), line.facts
    customer, session, agent = where
    method, _, url = str(held.get("request") or "").partition(" ")
    usage = facts.get("usage") or {}
    return CaptureRow(
        at_ms=entry.at_ms,
        customer=customer,
        session=session,
        agent=agent,
        kind=str(held.get("kind", "")),
        event=entry.event,
        method=method,
        host=str(held.get("host") or ""),
        path=urlsplit(url).path if url else "",
        payee=str(held.get("payee") or ""),
        network=str(held.get("network") or ""),
        transaction=line.known_transaction,
        provider=str(held.get("provider") or ""),
        model=str(held.get("model") or ""),
        tool=str(held.get("tool") or ""),
        tokens_in=int(usage.get("input_tokens", 0)),
        tokens_out=int(usage.get("output_tokens", 0)),
        nanos=Nanos(entry.captured),
        evidence=str(facts.get("evidence") or ""),
        now=NAMES.get(line.evidence or "", ""),
        hold=line.hold_id,
        entry=entry.hash,
    )
