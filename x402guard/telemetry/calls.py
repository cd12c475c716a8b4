"""Says what a span shows of one hold: its name and its attributes. No server's text stands in them but names.

Sources: OpenTelemetry's semantic conventions for generative AI, and for HTTP (``server.address``, ``url.path``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from msgspec import Struct

from x402guard.evm import is_transaction
from x402guard.http.redaction import redacted
from x402guard.kernel.rows import NANOS_PER_DOLLAR, Entry, Evidence, Hold, HoldKind, HoldState, NodeKind
from x402guard.ledger.evidence import named_transaction, transaction_of
from x402guard.ledger.view import LedgerView

Attribute = str | bool | int | float
HOLD_ID: Final = "x402guard.hold.id"
KIND: Final = "x402guard.kind"
EVIDENCE: Final = "x402guard.evidence"
RULE: Final = "x402guard.rule"

ENDS: Final[Mapping[str, str]] = {
    "capture": HoldState.CAPTURED,
    "lapse": HoldState.CAPTURED,
    "void": HoldState.VOIDED,
    "expire": HoldState.EXPIRED,
}
"""The journal events that end a hold, and the state after them."""

_EMBEDDINGS: Final = ("/embeddings", ":embedContent", ":batchEmbedContents", "/embed")


class Call(Struct, frozen=True):
    """What a span shows of a hold before it ends."""

    name: str
    attributes: Mapping[str, Attribute]
    is_inside: bool
    """True for what runs inside this process: a tool."""


def dollars(nanos: int) -> float:
    """Return an amount as a float of dollars, for a chart. Spans have the exact one in nano-dollars beside it."""
    return nanos / NANOS_PER_DOLLAR


def describe(hold: Hold, facts: Mapping[str, Any], view: LedgerView) -> Call:
    """Return what a span shows of a hold; *facts* are those of its authorization, or empty if it is not known."""
    shared = {
        HOLD_ID: hold.id,
        KIND: str(hold.kind),
        "x402guard.held_nanos": hold.amount,
        **whereabouts(hold.node_id, view),
        **_address(hold.purpose.host),
    }
    if hold.kind is HoldKind.LLM:
        return _inference(hold, facts, shared)
    if hold.kind is HoldKind.TOOL:
        named = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": hold.purpose.tool}
        return Call(f"execute_tool {hold.purpose.tool}", shared | named, is_inside=True)
    path = {"url.path": urlsplit(hold.purpose.url).path}
    if hold.intent is not None:
        intent = hold.intent
        path |= {
            "x402.version": str(intent.version),
            "x402.scheme": intent.scheme,
            "x402.method": intent.method,
            "x402.network": intent.network,
            "x402.asset": intent.token,
            "x402.pay_to": intent.payee,
        }
    return Call("x402 payment", shared | path, is_inside=False)


def _inference(hold: Hold, facts: Mapping[str, Any], shared: Mapping[str, Attribute]) -> Call:
    path = urlsplit(hold.purpose.url).path
    operation = "embeddings" if path.endswith(_EMBEDDINGS) else "chat"
    named: dict[str, Attribute] = {"gen_ai.operation.name": operation, "gen_ai.request.model": hold.purpose.tool}
    if facts.get("provider"):
        named["gen_ai.provider.name"] = str(facts["provider"])
    return Call(f"{operation} {hold.purpose.tool}", {**shared, **named}, is_inside=False)


def _address(host: str) -> dict[str, Attribute]:
    name, _, port = host.rpartition(":")
    if not host:
        return {}
    return {"server.address": name, "server.port": int(port)} if name and port.isdigit() else {"server.address": host}


def whereabouts(node_id: str, view: LedgerView) -> dict[str, Attribute]:
    """Return the session and the customer that a node belongs to, as far as they are in view."""
    if not view.has_node(node_id):
        return {"x402guard.session.id": node_id}
    found: dict[str, Attribute] = {}
    for node in reversed(view.path(node_id)):
        if node.kind is NodeKind.BUDGET:
            found["x402guard.customer"] = node.name
        elif node.kind is NodeKind.SESSION:
            found |= {"x402guard.session.id": node.id, "x402guard.session.name": node.name}
        elif node.kind is NodeKind.SCOPE:
            found["x402guard.scope.id"] = node.id
    return found


def outcome(hold: Hold, entry: Entry) -> dict[str, Attribute]:
    """Return what the end of a hold adds to its span."""
    facts = entry.facts()
    found: dict[str, Attribute] = {"x402guard.outcome": ENDS[entry.event]}
    if ENDS[entry.event] == HoldState.CAPTURED:
        found |= {"x402guard.amount_nanos": entry.captured, "x402guard.amount_usd": dollars(entry.captured)}
        found[EVIDENCE] = str(facts["evidence"])
    for name, unit in (("gen_ai.usage.input_tokens", "input_tokens"), ("gen_ai.usage.output_tokens", "output_tokens")):
        if unit in (facts.get("usage") or {}):
            found[name] = int(facts["usage"][unit])
    found |= proof_of(hold, facts)
    if hold.doubt:
        found["x402guard.doubt"] = redacted(hold.doubt)
    return found


def proof_of(hold: Hold, facts: Mapping[str, Any]) -> dict[str, Attribute]:
    """Return the transaction that proves a payment, or that its seller names; nothing that is no hash."""
    named = transaction_of(facts.get("proof")) or named_transaction(hold)
    return {"x402.transaction": named} if is_transaction(named) else {}


def is_doubtful(hold: Hold) -> bool:
    """True if the outcome of a call is not known for sure: its doubt has no answer of the chain or a provider."""
    return bool(hold.doubt) and hold.evidence in (None, Evidence.ASSUMED, Evidence.CLAIMED)
