"""Builds a session's report by one fold over its journal, so that every amount in it comes from the ledger."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final

from msgspec import Struct

from x402guard.ledger.authorize import BUDGET, WOULD_REFUSE
from x402guard.ledger.model import Entry, Evidence, HoldKind, Node, NodeKind, NodeState
from x402guard.ledger.report_text import render
from x402guard.ledger.token_budget import tokens_left
from x402guard.ledger.windows import window_end_ms
from x402guard.money import Nanos, format_dollars

REPORT_SCHEMA: Final = "x402guard.report.v1"

_EVIDENCE_KEYS: Final = (
    Evidence.CHAIN,
    Evidence.CLAIMED,
    Evidence.PROVIDER_USAGE,
    Evidence.ESTIMATE,
    Evidence.ASSUMED,
)


@dataclass(slots=True)
class HoldLine:
    """The state of one hold after its entries. Amounts are in nano-dollars, times in unix ms, deadlines in unix s."""

    hold_id: str
    node_id: str
    facts: Mapping[str, Any]
    held: int
    at_ms: int
    captured: int = 0
    ended: bool = False
    event: str = "authorize"
    evidence: str | None = None
    proof: str | None = None
    doubt: str | None = None
    claimed: int = 0
    transaction: str = ""
    tokens_in: int = 0
    tokens_out: int = 0

    @property
    def kind(self) -> str:
        """``payment``, ``llm``, ``tool`` or ``tokens``."""
        return str(self.facts.get("kind", HoldKind.PAYMENT))

    @property
    def disputed(self) -> int:
        """What a provider claims for an LLM call beyond what is booked."""
        return max(0, self.claimed - self.captured) if self.kind == HoldKind.LLM else 0

    @property
    def was_captured(self) -> bool:
        """True if the hold ended in a capture, also one of zero."""
        return self.ended and self.evidence is not None


def fold_holds(entries: Iterable[Entry]) -> dict[str, HoldLine]:
    """Return every hold in *entries* (in order within each node), by id."""
    lines: dict[str, HoldLine] = {}
    for entry in entries:
        if entry.hold_id is None or (entry.event != "authorize" and entry.hold_id not in lines):
            continue
        facts = entry.facts()
        if entry.event == "authorize":
            lines[entry.hold_id] = HoldLine(entry.hold_id, entry.node_id, facts, entry.held, entry.at_ms)
            continue
        line = lines[entry.hold_id]
        line.held += entry.held
        line.captured += entry.captured
        line.ended = line.ended or entry.event in ("capture", "lapse", "correct", "void", "expire")
        line.doubt = facts.get("doubt", line.doubt)
        claim = facts.get("claim") or {}
        line.claimed = claim.get("amount", line.claimed)
        line.transaction = claim.get("transaction", line.transaction)
        if entry.event == "reopen":
            line.ended, line.event, line.evidence, line.proof = False, "authorize", None, None
        if entry.event in ("capture", "lapse", "correct", "void", "expire"):
            line.event = entry.event
            line.evidence = facts.get("evidence", line.evidence)
            usage = facts.get("usage") or {}
            line.tokens_in = int(usage.get("input_tokens", line.tokens_in))
            line.tokens_out = int(usage.get("output_tokens", line.tokens_out))
            line.proof = facts.get("proof", line.proof)
    return lines


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a session. The keys of ``to_dict`` are stable; amounts are decimal strings in dollars."""

    values: Mapping[str, Any] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values: text, numbers, lists and dicts."""
        copy: dict[str, Any] = json.loads(json.dumps(self.values))
        return copy

    def to_json(self) -> str:
        """Return the report as JSON, indented by two spaces, in a fixed order."""
        return json.dumps(self.values, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """Return the report as plain text for a terminal or a log."""
        return render(self.values)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.to_text())}</pre>"  # what a notebook shows


def build_report(
    nodes: Mapping[str, Node],
    session_id: str,
    entries: Iterable[Entry],
    refusals: Iterable[Mapping[str, Any]],
    *,
    now_ms: int,
    refused: Iterable[Mapping[str, Any]] = (),
    tokens: TokenAccount | None = None,
    allowances: Iterable[Mapping[str, Any]] = (),
) -> Report:
    """Return the report of a session and everything nested in it.

    Args:
        nodes: the session, all below it and all above it, by id.
        session_id: whose report it is.
        entries: the journals of the session and of all below it.
        refusals: refusal counters of the same nodes, as ``note_refusal`` writes them.
        now_ms: unix milliseconds.
        refused: how often a model or tool was refused in a node, as ``note_refusal`` writes it.
        tokens: the account of the tokens that the session counts in, or None.
        allowances: what Permit2 may still move of the wallet's tokens, as ``reconcile`` has seen it.
    """
    session = nodes[session_id]
    journal = list(entries)
    lines, counters, denied = fold_holds(journal), list(refusals), list(refused)
    left, total = remaining(nodes, session_id), sum(line.captured for line in lines.values())
    values = {
        "schema": REPORT_SCHEMA,
        "kind": str(session.kind),
        "session": session.name,
        "id": session.id,
        "parent": session.parent_id,
        "state": str(session.state),
        "terminated_by": _ended_by(session),
        "why": _why(session, counters),
        "budget": None if session.limit is None else format_dollars(session.limit),
        "per": None if session.window is None else f"{session.window.per} {session.window.tz}",
        "window": _window(session, now_ms),
        "spent": format_dollars(total if session.window is None else session.spent),
        "spent_total": format_dollars(total),
        "held": format_dollars(sum(line.held for line in lines.values())),
        "remaining": None if left is None else format_dollars(left),
        "bound_by": _bound_by(nodes, session_id),
        "reserve": format_dollars(session.reserve) if session.reserve else None,
        "trip_reason": session.trip_reason,
        **_uses(nodes, session_id, lines.values(), counters, denied),
        "allowances": [_allowance(row) for row in allowances],
        "tokens": None if tokens is None else _tokens(tokens),
        "refusals": _refusals(counters),
        "shadow": _shadow(journal, lines),
        "outstanding": [_outstanding(line) for line in lines.values() if line.held > 0],
        "events": [_event(entry) for entry in journal if entry.event in _SHOWN],
        "duration_s": ((session.closed_ms or now_ms) - session.created_ms) / 1000,
    }
    return Report(values)


def _window(session: Node, now_ms: int) -> dict[str, Any] | None:
    """Return the current window of a budget that begins again: from and to in unix seconds, and what it has spent."""
    if session.window is None:
        return None
    ends = window_end_ms(session.window, now_ms) // 1000
    return {"from": session.since_ms // 1000, "to": ends, "spent": format_dollars(session.spent)}


def _bound_by(nodes: Mapping[str, Node], node_id: str) -> dict[str, str] | None:
    """Return the budget above that leaves less than this one has left itself; None if there is none."""
    own, *above = path(nodes, node_id)
    limited = [node for node in above if node.plain_room is not None]
    tightest = min(limited, key=lambda node: node.plain_room or 0, default=None)
    if tightest is None or (own.plain_room is not None and own.plain_room <= (tightest.plain_room or 0)):
        return None
    return {"kind": str(tightest.kind), "id": tightest.id, "name": tightest.name}


def _uses(
    nodes: Mapping[str, Node],
    session_id: str,
    lines: Collection[HoldLine],
    counters: Iterable[Mapping[str, Any]],
    denied: Collection[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the keys of the report that say what the money was used for, and on what evidence."""
    by_model, by_tool = (_by_name(lines, kind, denied) for kind in (HoldKind.LLM, HoldKind.TOOL))
    payees = {"by_payee": "payee", "by_host": "host", "by_route": "request", "by_scheme": "scheme"}
    return {
        "evidence": _by_evidence(lines),
        "settlement": _settlement(lines),
        "disputed": format_dollars(sum(line.disputed for line in lines)),
        "llm": _group(lines, HoldKind.LLM, {}) | {"by_model": by_model},
        "tools": _group(lines, HoldKind.TOOL, {}) | {"by_tool": by_tool},
        "payments": _group(lines, HoldKind.PAYMENT, payees),
        "by_agent": _by_agent(nodes, session_id, lines, counters),
    }


class TokenAccount(Struct, frozen=True):
    """A token budget and its journal."""

    node: Node
    entries: tuple[Entry, ...]


def _tokens(account: TokenAccount) -> dict[str, Any]:
    by_tool: dict[str, int] = {}
    llm = sum(entry.captured for entry in account.entries if entry.hold_id is None)
    for line in fold_holds(account.entries).values():
        tool = line.facts.get("tool")
        if line.facts.get("llm"):
            llm += line.captured
        elif tool and line.captured:
            by_tool[tool] = by_tool.get(tool, 0) + line.captured
    node = account.node
    return {
        "total": node.limit,
        "used": node.captured,
        "reserved": node.held,
        "remaining": tokens_left(node),
        "llm": llm,
        "by_tool": dict(sorted(by_tool.items())),
        "other": node.captured - llm - sum(by_tool.values()),
    }


_SHOWN: Final = frozenset(
    {"authorize", "represent", "note", "capture", "void", "expire", "lapse", "correct", "reopen", "trip", "reset", "limit", "resume",
     "close", "event"}
)  # fmt: skip
_AMOUNTS: Final = ("amount", "claimed", "chain", "from", "to", "limit")


def path(nodes: Mapping[str, Node], node_id: str) -> list[Node]:
    """Return a node and its ancestors, leaf first, out of *nodes* by id."""
    climbed = [nodes[node_id]]
    while (parent := climbed[-1].parent_id) is not None and parent in nodes:
        climbed.append(nodes[parent])
    return climbed


def remaining(nodes: Mapping[str, Node], node_id: str) -> Nanos | None:
    """Return the largest amount (nano-dollars) that fits every budget on a node's path; None if none has a limit."""
    rooms = [node.plain_room for node in path(nodes, node_id) if node.plain_room is not None]
    return Nanos(max(0, min(rooms))) if rooms else None


def below(nodes: Mapping[str, Node], node_id: str) -> list[Node]:
    """Return a node and all its descendants, out of *nodes* by id."""
    return [node for node in nodes.values() if any(above.id == node_id for above in path(nodes, node.id))]


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


_NAMED_BY: Final[Mapping[str, str]] = {HoldKind.LLM: "model", HoldKind.TOOL: "tool"}


def _by_name(
    lines: Iterable[HoldLine], kind: HoldKind, refused: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return what each model or tool has used, and how often it was refused."""
    uses: dict[str, _Use] = {}
    for line in lines:
        if line.kind == kind and line.was_captured:
            uses.setdefault(str(line.facts.get(_NAMED_BY[kind]) or "unknown"), _Use()).add(line)
    for row in refused:
        if row["kind"] == kind:
            uses.setdefault(str(row["what"]), _Use()).refusals += int(row["count"])
    return {name: use.to_dict() for name, use in sorted(uses.items())}


def _by_agent(
    nodes: Mapping[str, Node], session_id: str, lines: Iterable[HoldLine], counters: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return what the session and each session below it have used themselves, by id; a scope counts for its session."""
    below_it = [node for node in below(nodes, session_id) if node.id == session_id or node.kind is not NodeKind.SCOPE]
    uses = {node.id: _Use() for node in below_it}

    def of(node_id: str) -> _Use:
        return uses[next(node.id for node in path(nodes, node_id) if node.id in uses)]

    for line in lines:
        if line.was_captured and line.kind != HoldKind.TOKENS:
            of(line.node_id).add(line)
    for counter in counters:
        if "node" in counter:
            of(str(counter["node"])).refusals += int(counter["count"])
    return {
        node.id: {
            "name": node.name,
            "state": str(node.state),
            "terminated_by": _ended_by(node),
            **uses[node.id].to_dict(),
        }
        for node in below_it
    }


def _ended_by(node: Node) -> str | None:
    """Return why a session has ended; for one that is open, why it can spend no more."""
    if node.terminated_by is None and node.starved and node.state is NodeState.OPEN:
        return "budget_exhausted"
    return node.terminated_by


def _why(session: Node, counters: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the reason behind ``terminated_by`` in words."""
    if session.trip_reason is not None:
        return session.trip_reason
    if _ended_by(session) != "budget_exhausted":
        return None
    last = max((row for row in counters if row["rule"] == BUDGET), key=lambda row: int(row["at_ms"]), default=None)
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


def _shadow(journal: Iterable[Entry], lines: Mapping[str, HoldLine]) -> dict[str, Any] | None:
    """Return the calls that passed in shadow mode although a rule would have refused them, with what they count."""
    rules: dict[str, dict[str, Any]] = {}
    calls = total = 0
    for entry in journal:
        facts = entry.facts() if entry.event == "event" else {}
        if facts.get("name") != WOULD_REFUSE:
            continue
        line = lines.get(entry.hold_id or "")
        amount = 0 if line is None else line.captured + line.held
        row = rules.setdefault(facts["rule"], {"rule": facts["rule"], "calls": 0, "amount": 0})
        row["calls"], row["amount"], row["reason"] = row["calls"] + 1, row["amount"] + amount, facts["reason"]
        calls, total = calls + 1, total + amount
    if not calls:
        return None
    by_rule = [{**row, "amount": format_dollars(row["amount"])} for row in rules.values()]
    return {"calls": calls, "total": format_dollars(total), "by_rule": by_rule}


def _outstanding(line: HoldLine) -> dict[str, Any]:
    return {
        "hold_id": line.hold_id,
        "amount": format_dollars(line.held),
        "payee": line.facts.get("payee"),
        "request": line.facts.get("request"),
        "transaction": line.transaction or None,
        "deadline": line.facts.get("deadline"),
        "exposed_until": _exposed_until(line.facts),
    }


def _exposed_until(facts: Mapping[str, Any]) -> int | None:
    """Return the first second at which the payment can no longer be taken, in unix seconds; None without a deadline.

    EIP-3009 is valid while t < deadline, Permit2 while t ≤ deadline.
    """
    deadline = facts.get("deadline")
    if deadline is None:
        return None
    return int(deadline) + (facts.get("method") == "permit2")


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
