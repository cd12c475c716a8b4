"""Transfers out of the wallet that no payment explains: each is an alarm until its owner acknowledges it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from x402guard.assets import Asset
from x402guard.flow.ports import OutgoingTransfer
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.given_back import proof_key
from x402guard.kernel.rows import WALLET
from x402guard.ledger.budgets import ACKNOWLEDGED, UNEXPLAINED
from x402guard.ledger.evidence import proven_by
from x402guard.ledger.store import LedgerReads
from x402guard.ledger.view import LedgerView


def unexplained_mark(network: str, transaction: str, log_index: int) -> MarkKey:
    """Return the key of the mark of a Transfer that no payment explains."""
    return "unexplained", f"{network}/{transaction}/{log_index}"


def note_unexplained(view: LedgerView, token: Asset, transfer: OutgoingTransfer) -> dict[str, Any]:
    """Record a Transfer that no payment explains, and return its row; the amount is in nano-dollars."""
    key = unexplained_mark(token.network, transfer.transaction, transfer.log_index)
    row = {
        "id": hashlib.sha256(key[1].encode()).hexdigest()[:12],
        "network": token.network,
        "token": token.contract,
        "symbol": token.symbol,
        "transaction": transfer.transaction,
        "payee": transfer.payee,
        "amount": token.value_nanos(transfer.amount_atomic),
    }
    view.put_mark(key, {**row, "log": transfer.log_index, "at_ms": view.now_ms, "by": None})
    view.record(WALLET, "event", facts={"name": UNEXPLAINED, **row})
    return row


def unexplained_in(ledger: LedgerReads) -> list[dict[str, Any]]:
    """Return the Transfers that no payment explains and no owner has acknowledged, the oldest first."""
    rows = sorted(ledger.marks("unexplained", "").values(), key=lambda row: (row["at_ms"], row["id"]))
    return [
        {name: value for name, value in row.items() if name not in ("log", "by")}
        for row in rows
        if row["by"] is None and not _is_proven(ledger, row)
    ]


def _is_proven(ledger: LedgerReads, row: Mapping[str, Any]) -> bool:
    """True if it proves a payment by now: one that the ledger's server had lost, and that was entered again."""
    kind, name = proof_key(row["network"], row["transaction"], row["log"])
    return proven_by(ledger.marks(kind, name).get(name)) is not None


def key_of(ledger: LedgerReads, transfer_id: str) -> MarkKey:
    """Return the key of the mark of a Transfer by its id."""
    rows = ledger.marks("unexplained", "").items()
    return "unexplained", next(key for key, row in rows if row["id"] == transfer_id)


def acknowledge(view: LedgerView, key: MarkKey, by: str) -> None:
    """Record that the owner knows of a Transfer: it is no alarm any more, and trips nothing."""
    row = view.mark(key)
    if row is not None and row["by"] is None:
        view.put_mark(key, {**row, "by": by})
        facts = {name: row[name] for name in ("id", "network", "transaction", "payee", "amount")}
        view.record(WALLET, "event", facts={"name": ACKNOWLEDGED, **facts, "by": by})
