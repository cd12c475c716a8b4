"""Gathers the rows that a report is made of: one read of the ledger for all of its renderings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Final

from x402guard.errors import ConfigError
from x402guard.kernel.rows import Entry, Node, NodeKind
from x402guard.ledger.lines import HoldLine, fold_holds
from x402guard.ledger.queries import ALLOWANCE, Gone, ended_instances, nodes_of, standing
from x402guard.ledger.store import LedgerReads, LedgerStore
from x402guard.ledger.token_budget import tokens_node
from x402guard.ledger.tree import below, path


@dataclass(frozen=True)
class TokenAccount:
    """A token budget and its journal."""

    node: Node
    entries: Sequence[Entry]


@dataclass(frozen=True)
class Books:
    """The rows of a node and all below it, as they stood at one moment.

    Attributes:
        nodes: the node, all below it and all above it, by id, with windows moved to *now_ms*.
        node_id: whose books these are.
        entries: the journals of the node and of all below it, without grants.
        counters: what was refused: a row for each node and rule, as ``note_refusal`` writes it, with its ``node``.
        samples: the first and the last refusals of each rule, with their ``node``.
        refused: how often a model or tool was refused.
        tokens: the account of the tokens that the node counts in, or None.
        allowances: what Permit2 may still move of the wallet's tokens, as ``reconcile`` has seen it.
        payer: the wallet's address, or "".
        gone: instances that are known to have ended.
        forgotten: how many sessions below it that have ended are in these books no more, and what they captured.
        scanned_ms: when ``reconcile`` last compared the wallet's transfers, in unix milliseconds, or None.
        now_ms: unix milliseconds.
    """

    nodes: Mapping[str, Node]
    node_id: str
    entries: Sequence[Entry]
    counters: Sequence[Mapping[str, Any]]
    _: KW_ONLY
    now_ms: int
    samples: Sequence[Mapping[str, Any]] = ()
    refused: Sequence[Mapping[str, Any]] = ()
    tokens: TokenAccount | None = None
    allowances: Sequence[Mapping[str, Any]] = ()
    payer: str = ""
    gone: Collection[str] = ()
    forgotten: tuple[int, int] = (0, 0)
    scanned_ms: int | None = None

    @property
    def node(self) -> Node:
        """The node whose books these are."""
        return self.nodes[self.node_id]

    def standing(self, node: Node) -> str:
        """Return the state of one of these nodes as it is shown."""
        return standing(node, self.gone)

    @cached_property
    def below(self) -> list[Node]:
        """The node and all below it."""
        return below(self.nodes, self.node_id)

    @cached_property
    def lines(self) -> dict[str, HoldLine]:
        """Every hold, by id."""
        return fold_holds(self.entries)

    @cached_property
    def agents(self) -> dict[str, str]:
        """The session that a node counts for in a list of agents: itself, or for a scope the nearest one above it."""
        listed = {node.id for node in self.below if node.id == self.node_id or node.kind is not NodeKind.SCOPE}
        return {
            node.id: next(above.id for above in path(self.nodes, node.id) if above.id in listed) for node in self.below
        }


def books_of(store: LedgerStore, node_id: str, *, gone: Gone = ended_instances) -> Books:
    """Return the books of any node of a ledger at one moment. Raises ``ConfigError`` if there is no such node.

    *gone* returns the instances that are known to have ended.
    """
    with store.at_one_moment(node_id) as ledger:
        nodes = nodes_of(ledger, node_id)
        if node_id not in nodes:
            raise ConfigError(f"session: there is no session {node_id!r} in this ledger")
        inside = {node.id for node in below(nodes, node_id)}
        forgotten = [sums for above, sums in ledger.forgotten().items() if above in inside]
        scans = [int(row["at_ms"]) for row in ledger.marks("scan", "").values()]
        return Books(
            nodes,
            node_id,
            ledger.entries(node_id, grants=False),
            _of_nodes(ledger, "refusals", inside),
            samples=_of_nodes(ledger, "refusal", inside),
            refused=_of_nodes(ledger, "refused_what", inside),
            tokens=_tokens_of(ledger, [node.id for node in path(nodes, node_id)]),
            allowances=[row for row in ledger.marks(ALLOWANCE, "").values() if row["allowance"]],
            payer=str(ledger.marks("wallet", "payer").get("payer", {}).get("address", "")),
            gone=gone(ledger),
            forgotten=(sum(count for count, _ in forgotten), sum(nanos for _, nanos in forgotten)),
            scanned_ms=max(scans, default=None),
            now_ms=ledger.now_ms(),
        )


_AT_ONCE: Final = 50


def _of_nodes(ledger: LedgerReads, kind: str, inside: set[str]) -> list[dict[str, Any]]:
    """Return the marks of a kind that belong to these nodes, each with its ``node``; keys begin with the node's id."""
    found = (
        ledger.marks(kind, "").items()
        if len(inside) > _AT_ONCE
        else [item for one in sorted(inside) for item in ledger.marks(kind, f"{one} ").items()]
    )
    rows = ({**row, "node": key.partition(" ")[0]} for key, row in found)
    return [row for row in rows if row["node"] in inside]


def _tokens_of(ledger: LedgerReads, path_ids: list[str]) -> TokenAccount | None:
    """Return the token account that a node counts in: its own, or that of the nearest ancestor that has one."""
    for node_id in path_ids:
        for node in ledger.path(tokens_node(node_id)):
            return TokenAccount(node, ledger.entries(node.id))
    return None
