"""Transfers out of the wallet that no payment explains: each is an alarm until its owner acknowledges it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any, Final

from x402guard.assets import Asset
from x402guard.flow.ports import OutgoingTransfer
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.evm import Address
from x402guard.kernel.given_back import proof_key
from x402guard.kernel.rows import WALLET
from x402guard.ledger.budgets import ACKNOWLEDGED, UNEXPLAINED
from x402guard.ledger.evidence import proven_by
from x402guard.ledger.store import LedgerReads
from x402guard.ledger.view import LedgerView

_MOST_WAITED_FOR: Final = 100


def unexplained_mark(network: str, transaction: str, log_index: int) -> MarkKey:
    """Return the key of the mark of a Transfer that no payment explains."""
    return "unexplained", f"{network}/{transaction}/{log_index}"


def transfer_row(token: Asset, transfer: OutgoingTransfer) -> dict[str, Any]:
    """Return the row of a Transfer; the amount is in nano-dollars."""
    key = unexplained_mark(token.network, transfer.transaction, transfer.log_index)
    return {
        "id": hashlib.sha256(key[1].encode()).hexdigest()[:12],
        "network": token.network,
        "token": token.contract,
        "symbol": token.symbol,
        "transaction": transfer.transaction,
        "payee": transfer.payee,
        "amount": token.value_nanos(transfer.amount_atomic),
    }


def note_unexplained(view: LedgerView, token: Asset, transfer: OutgoingTransfer) -> dict[str, Any] | None:
    """Record a Transfer that no payment explains, and return its row; None if it is recorded already."""
    row = transfer_row(token, transfer)
    known = view.mark(unexplained_mark(token.network, transfer.transaction, transfer.log_index))
    if known is not None and not known.get("waits_for"):
        return None
    _put(view, row, transfer, waits_for=())
    view.record(WALLET, "event", facts={"name": UNEXPLAINED, **row})
    return row


def note_waiting(
    view: LedgerView, token: Asset, payer: Address, transfer: OutgoingTransfer, hold_ids: Collection[str]
) -> None:
    """Record that a Transfer of *payer* may have taken one of these payments, once the chain has decided them."""
    _put(view, {**transfer_row(token, transfer), "payer": payer}, transfer, waits_for=hold_ids)


def _put(view: LedgerView, row: Mapping[str, Any], transfer: OutgoingTransfer, waits_for: Collection[str]) -> None:
    key = unexplained_mark(row["network"], transfer.transaction, transfer.log_index)
    more = {"log": transfer.log_index, "atomic": str(transfer.amount_atomic), "block": transfer.block}
    view.put_mark(
        key, {**row, **more, "at_ms": view.now_ms, "by": None, "waits_for": sorted(waits_for)[:_MOST_WAITED_FOR]}
    )


def waiting_in(ledger: LedgerReads, token: Asset, payer: Address) -> list[tuple[OutgoingTransfer, frozenset[str]]]:
    """Return the Transfers out of *payer* that were recorded as waiting, each with the payments that it waits for."""
    return [
        (
            OutgoingTransfer(row["transaction"], row["log"], row["payee"], int(row["atomic"]), row["block"]),
            frozenset(row["waits_for"]),
        )
        for row in ledger.marks("unexplained", f"{token.network}/").values()
        if row.get("waits_for") and row["token"] == token.contract and row.get("payer", payer) == payer
    ]


def note_explained(view: LedgerView, token: Asset, transfer: OutgoingTransfer) -> None:
    """Record that a Transfer which was waiting is explained."""
    key = unexplained_mark(token.network, transfer.transaction, transfer.log_index)
    row = view.mark(key)
    if row is not None:
        view.put_mark(key, {**row, "by": "a payment", "waits_for": []})


def unexplained_in(ledger: LedgerReads) -> list[dict[str, Any]]:
    """Return the Transfers that no payment explains and no owner has acknowledged, the oldest first."""
    rows = sorted(ledger.marks("unexplained", "").values(), key=lambda row: (row["at_ms"], row["id"]))
    return [
        {
            name: value
            for name, value in row.items()
            if name not in ("log", "by", "atomic", "block", "payer", "waits_for")
        }
        for row in rows
        if row["by"] is None and not row.get("waits_for") and not _is_proven(ledger, row)
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
