"""Builds the keys of a report's JSON out of the rows of the ledger. They are frozen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from x402guard.kernel.rows import Entry, Evidence, HoldKind, Node
from x402guard.kernel.windows import window_end_ms
from x402guard.ledger.lines import HoldLine
from x402guard.ledger.token_budget import tokens_left
from x402guard.ledger.tree import remaining
from x402guard.money import format_dollars
from x402guard.views.books import Books, TokenAccount
from x402guard.views.build import bound_of, last_short, tokens_used
from x402guard.views.groups import ended_by
from x402guard.views.remarks import shadow_of
from x402guard.views.taken import Period, exposed_until

REPORT_SCHEMA: Final = "x402guard.report.v1"

_EVIDENCE_KEYS: Final = (
    Evidence.CHAIN,
    Evidence.CLAIMED,
    Evidence.PROVIDER_USAGE,
    Evidence.ESTIMATE,
    Evidence.ASSUMED,
)


def keys_of(books: Books) -> dict[str, Any]:
    """Return the keys of ``x402guard.report.v1``."""
    nodes, session, lines, counters, now_ms = books.nodes, books.node, books.lines, books.counters, books.now_ms
    left, total = remaining(nodes, session.id), sum(line.captured for line in lines.values())
    return {
        "schema": REPORT_SCHEMA,
        "kind": str(session.kind),
        "session": session.name,
        "id": session.id,
        "parent": session.parent_id,
        "state": books.standing(session),
        "terminated_by": ended_by(session),
        "why": _why(books),
        "budget": None if session.limit is None else format_dollars(session.limit),
        "per": None if session.window is None else f"{session.window.per} {session.window.tz}",
        "window": _window(session, now_ms),
        "spent": format_dollars(total if session.window is None else session.spent),
        "spent_total": format_dollars(total),
        "held": format_dollars(sum(line.held for line in lines.values())),
        "remaining": None if left is None else format_dollars(left),
        "bound_by": _bound_by(books),
        "reserve": format_dollars(session.reserve) if session.reserve else None,
        "trip_reason": session.trip_reason,
        **_uses(books),
        "allowances": [_allowance(row) for row in books.allowances],
        "tokens": None if books.tokens is None else _tokens(books.tokens),
        "refusals": _refusals(counters),
        "shadow": _shadow(books),
        "outstanding": [_outstanding(line) for line in lines.values() if line.held > 0],
        "events": [_event(entry) for entry in books.entries if entry.event in _SHOWN],
        "duration_s": ((session.closed_ms or now_ms) - session.created_ms) / 1000,
    }


def _window(session: Node, now_ms: int) -> dict[str, Any] | None:
    """Return the current window of a budget that begins again: from and to in unix seconds, and what it has spent."""
    if session.window is None:
        return None
    ends = window_end_ms(session.window, now_ms) // 1000
    return {"from": session.since_ms // 1000, "to": ends, "spent": format_dollars(session.spent)}


def _bound_by(books: Books) -> dict[str, str] | None:
    bound = bound_of(books)
    return None if bound is None else {"kind": bound.kind, "id": bound.id, "name": bound.name}


def _uses(books: Books) -> dict[str, Any]:
    """Return the keys of the report that say what the money was used for, and on what evidence."""
    lines = books.lines.values()
    by_model, by_tool = (_by_name(lines, kind, books.refused) for kind in (HoldKind.LLM, HoldKind.TOOL))
    payees = {"by_payee": "payee", "by_host": "host", "by_route": "request", "by_scheme": "scheme"}
    return {
        "evidence": _by_evidence(lines),
        "settlement": _settlement(lines),
        "disputed": format_dollars(sum(line.disputed for line in lines)),
        "llm": _group(lines, HoldKind.LLM, {}) | {"by_model": by_model},
        "tools": _group(lines, HoldKind.TOOL, {}) | {"by_tool": by_tool},
        "payments": _group(lines, HoldKind.PAYMENT, payees),
        "by_agent": _by_agent(books),
    }


def _tokens(account: TokenAccount) -> dict[str, Any]:
    llm, by_tool, other = tokens_used(account)
    node = account.node
    return {
        "total": node.limit,
        "used": node.captured,
        "reserved": node.held,
        "remaining": tokens_left(node),
        "llm": llm,
        "by_tool": by_tool,
        "other": other,
    }


_SHOWN: Final = frozenset(
    {"authorize", "represent", "note", "capture", "void", "expire", "lapse", "correct", "reopen", "trip", "reset", "limit", "resume",
     "close", "event"}
)  # fmt: skip
_AMOUNTS: Final = ("amount", "claimed", "chain", "from", "to", "limit")


def _by_evidence(lines: Iterable[HoldLine]) -> dict[str, str]:
    totals = dict.fromkeys(_EVIDENCE_KEYS, 0)
    for line in lines:
        if line.evidence is not None:
            # A block that is not final yet is still chain evidence; the events show whether it is final.
            key = Evidence.CHAIN if line.evidence == Evidence.CHAIN_HEAD else Evidence(line.evidence)
            totals[key] += line.captured
    return {str(key): format_dollars(total) for key, total in totals.items()}


def _settlement(lines: Iterable[HoldLine]) -> dict[str, str]:
    """Return payment sums: proven by the chain, claimed by sellers, assumed at the ceiling, and exposed (held).

    ``exposed_to_reorg`` are the remainders that are in use before the block that shows them is final.
    """
    totals = dict.fromkeys(("proven", "claimed", "assumed", "exposed", "exposed_to_reorg"), 0)
    for line in lines:
        if line.kind == HoldKind.PAYMENT:
            totals["exposed"] += line.held
            if line.evidence == Evidence.CHAIN_HEAD:
                totals["exposed_to_reorg"] += int(line.facts["amount"]) - line.captured
            if line.evidence is not None:
                totals[_SETTLED.get(line.evidence, line.evidence)] += line.captured
    return {name: format_dollars(total) for name, total in totals.items()}


_SETTLED: Final[Mapping[str, str]] = {Evidence.CHAIN: "proven", Evidence.CHAIN_HEAD: "proven"}


def _allowance(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "network": row["network"],
        "token": row["token"],
        "symbol": row["symbol"],
        "exposed": format_dollars(row["exposed"]),
        "at": row["at_ms"] / 1000,
    }


def _group(lines: Collection[HoldLine], kind: HoldKind, keys: Mapping[str, str]) -> dict[str, Any]:
    chosen = [line for line in lines if line.kind == kind and line.was_captured]
    out = sum(line.held for line in lines if line.kind == kind)
    total = sum(line.captured for line in chosen)
    group: dict[str, Any] = {"total": format_dollars(total), "out": format_dollars(out), "calls": len(chosen)}
    for key, fact in keys.items():
        sums: dict[str, int] = {}
        for line in chosen:
            name = str(line.facts.get(fact) or "unknown")
            sums[name] = sums.get(name, 0) + line.captured
        group[key] = {name: format_dollars(total) for name, total in sorted(sums.items())}
    return group


@dataclass(slots=True)
class _Use:
    """What a model, a tool or an agent has used."""

    amount: int = 0
    calls: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    refusals: int = 0

    def add(self, line: HoldLine) -> None:
        """Count a hold that was captured."""
        self.amount += line.captured
        self.calls += 1
        self.tokens_in += line.tokens_in
        self.tokens_out += line.tokens_out

    def to_dict(self) -> dict[str, Any]:
        return {
            "amount": format_dollars(self.amount),
            "calls": self.calls,
            "tokens_in": self.tokens_in,
            "tokens_out": self.tokens_out,
            "refusals": self.refusals,
        }


def _by_name(
    lines: Iterable[HoldLine], kind: HoldKind, refused: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return what each model or tool has used, and how often it was refused."""
    uses: dict[str, _Use] = {}
    for line in lines:
        if line.kind == kind and line.was_captured:
            uses.setdefault(line.to, _Use()).add(line)
    for row in refused:
        if row["kind"] == kind:
            uses.setdefault(str(row["what"]), _Use()).refusals += int(row["count"])
    return {name: use.to_dict() for name, use in sorted(uses.items())}


def _by_agent(books: Books) -> dict[str, dict[str, Any]]:
    """Return what the session and each session below it have used themselves, by id; a scope counts for its session."""
    uses = {node_id: _Use() for node_id in dict.fromkeys(books.agents.values())}
    for line in books.lines.values():
        if line.was_captured and line.kind != HoldKind.TOKENS:
            uses[books.agents[line.node_id]].add(line)
    for counter in books.counters:
        uses[books.agents[counter["node"]]].refusals += int(counter["count"])
    return {node_id: _agent(books, books.nodes[node_id], use) for node_id, use in uses.items()}


def _agent(books: Books, node: Node, use: _Use) -> dict[str, Any]:
    return {"name": node.name, "state": books.standing(node), "terminated_by": ended_by(node), **use.to_dict()}


def _why(books: Books) -> str | None:
    """Return the reason behind ``terminated_by`` in words."""
    if books.node.trip_reason is not None:
        return books.node.trip_reason
    last = last_short(books) if ended_by(books.node) == "budget_exhausted" else None
    return None if last is None else str(last["reason"])


def _refusals(counters: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for counter in sorted(counters, key=lambda c: int(c["at_ms"])):
        row = rows.setdefault(str(counter["rule"]), {"rule": counter["rule"], "count": 0})
        row["count"] += counter["count"]
        for key in ("requested", "available"):
            row[key] = None if counter[key] is None else format_dollars(counter[key])
        row["reason"], row["at"] = counter["reason"], counter["at_ms"] / 1000
    order = ("rule", "reason", "count", "requested", "available", "at")
    return [{key: row[key] for key in order} for row in rows.values()]


def _shadow(books: Books) -> dict[str, Any] | None:
    """Return the calls that passed in shadow mode although a rule would have refused them, with what they count."""
    shadow = shadow_of(books, Period())
    if not shadow.calls:
        return None
    by_rule = [{**row, "amount": format_dollars(row["amount"])} for row in shadow.rules.values()]
    return {"calls": shadow.calls, "total": format_dollars(shadow.total), "by_rule": by_rule}


def _outstanding(line: HoldLine) -> dict[str, Any]:
    return {
        "hold_id": line.hold_id,
        "amount": format_dollars(line.held),
        "payee": line.facts.get("payee"),
        "request": line.facts.get("request"),
        "transaction": line.transaction or None,
        "deadline": line.facts.get("deadline"),
        "exposed_until": exposed_until(line.facts.get("deadline"), line.facts.get("method")),
    }


def _event(entry: Entry) -> dict[str, Any]:
    facts = dict(entry.facts())
    for name in _AMOUNTS:
        if isinstance(facts.get(name), int):
            facts[name] = format_dollars(facts[name])
    if isinstance(claim := facts.get("claim"), dict):
        facts["claim"] = {**claim, "amount": format_dollars(claim["amount"])}
    evidence = facts.get("evidence")
    if evidence in (Evidence.CHAIN, Evidence.CHAIN_HEAD):
        facts["evidence"], facts["final"] = str(Evidence.CHAIN), evidence == Evidence.CHAIN
    event = facts.pop("name", entry.event) if entry.event == "event" else entry.event
    return {"at": entry.at_ms / 1000, "event": event, "hold_id": entry.hold_id, **facts}
