"""What a ledger says of its sessions: one session's report, and what those of a name have cost so far."""

from __future__ import annotations

from x402guard.drivers import Shell
from x402guard.errors import ConfigError
from x402guard.ledger.prediction import Prediction, predict
from x402guard.ledger.report import Report, TokenAccount, below, build_report, path
from x402guard.ledger.tokens import tokens_node
from x402guard.ports import LedgerStore

__all__ = ["prediction_of", "report_of"]


def report_of(shell: Shell, node_id: str) -> Report:
    """Return the report of any node of a ledger. Raises ``ConfigError`` where there is no such node."""
    store = shell.store
    nodes = {node.id: node for node in store.nodes(node_id)}
    if node_id not in nodes:
        raise ConfigError(f"session: there is no session {node_id!r} in this ledger")
    counters = [
        counter for node in below(nodes, node_id) for counter in store.marks("refusals", f"{node.id} ").values()
    ]
    tokens = _tokens_of(store, [node.id for node in path(nodes, node_id)])
    return build_report(nodes, node_id, store.entries(node_id), counters, now_ms=store.now_ms(), tokens=tokens)


def _tokens_of(store: LedgerStore, path_ids: list[str]) -> TokenAccount | None:
    """Return the account of the tokens that a node counts in: its own, or those of the nearest session around it."""
    for node_id in path_ids:
        for node in store.nodes(tokens_node(node_id)):
            return TokenAccount(node, tuple(store.entries(node.id)))
    return None


def prediction_of(store: LedgerStore, name: str, *, but: str | None = None) -> Prediction:
    """Return what past sessions of *name* have cost, all but the one of the id *but*."""
    gone = {instance for instance, row in store.marks("instance", "").items() if row["ended"]}
    return predict(store.nodes(), name, gone=gone, but=but)
