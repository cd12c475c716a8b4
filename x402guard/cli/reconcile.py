"""Defines the commands ``reconcile``, ``acknowledge``, ``holds cancel`` and ``holds forgive``."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Annotated

import typer

from x402guard.cli.arguments import AsJson, LedgerUrl, say, seconds, working
from x402guard.cli.sessions import holds, show
from x402guard.errors import LedgerUnavailable
from x402guard.guard.owner import Owner
from x402guard.money import format_dollars
from x402guard.views.words import printable
from x402guard.x402.reconciled import Reconciliation

Every = Annotated[
    str | None, typer.Option("--every", help="Repeat, with a pause such as 30s, 5m or 1h between two runs.")
]


def reconcile(every: Every = None, ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """Ask the chains about every payment that is not proven, and compare the wallet's transfers with the ledger.

    The findings are written to the ledger. Exit code 1 if a chain could not be read, or if money moved that the ledger
    does not explain. Example: x402guard reconcile --every 30s
    """
    pause_s = None if every is None else seconds("--every", every)
    with Owner(ledger) as owner:
        while True:
            try:
                with working("asking the chains"):
                    found = owner.reconcile()
            except LedgerUnavailable as error:
                if pause_s is None:
                    raise
                typer.echo(printable(f"{error}; the next run tries again"), err=True)
            else:
                typer.echo(json.dumps(found.to_dict()) if as_json else "\n".join(map(printable, _lines(found))))
                if pause_s is None:
                    raise typer.Exit(1 if found.is_alarming or found.unreadable else 0)
            time.sleep(pause_s)


def acknowledge(
    transfer: Annotated[
        str | None, typer.Argument(help="The transfer's id; without it, the transfers are listed.")
    ] = None,
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Say that you know a transfer out of the wallet that no payment explains: it is no alarm any more, and trips nothing.

    Without an id, lists those that are not acknowledged. Example: x402guard acknowledge 3f2a
    """
    if transfer is not None:
        with Owner(ledger) as owner:
            row = owner.acknowledge(transfer)
            said = f"acknowledged by {owner.by}: ${row.amount} of {row.symbol} to {row.payee}"
            say(f"{said}, {row.network} {row.transaction}", row.to_dict(), as_json=as_json)
        return
    with Owner(ledger, read_only=True) as owner:
        rows = [row.to_dict() for row in owner.unexplained()]
    brief = ("id", "amount", "symbol", "payee", "network", "transaction")
    show(rows, as_json=as_json, empty="no transfer is unexplained", brief=brief)


@holds.command("cancel")
def cancel(
    hold: Annotated[str, typer.Argument(help="The hold's id, or the beginning of it if that is unique.")],
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Sign the cancellation of a signed EIP-3009 payment. Any account can send it and pays the gas.

    The payment counts in full until the chain shows the cancellation and `x402guard reconcile` has read it.
    Example: x402guard holds cancel 5ec8c544
    """
    with Owner(ledger) as owner:
        made = owner.cancel(hold)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(made), indent=2))
        return
    typer.echo(f"Send this transaction on {made.network} before the payment is taken, from any account with gas:")
    typer.echo(f"  to    {made.to}\n  data  {made.data}")
    typer.echo(f"Then run `x402guard reconcile`. Until the chain shows it, hold {made.hold_id[:16]}… counts in full.")


@holds.command("forgive")
def forgive_purchase(
    hold: Annotated[str, typer.Argument(help="The hold's id, or the beginning of it if that is unique.")],
    *,
    unsafe_in_flight: Annotated[
        bool, typer.Option("--unsafe-in-flight", help="Also while its answer is under way: both may come, and be paid.")
    ] = False,
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Let the same request sign a new payment, although this one was or may be taken and its answer was lost.

    The payment itself is unchanged and counts as before. Example: x402guard holds forgive 5ec8c544
    """
    with Owner(ledger) as owner:
        after = owner.forgive(hold, unsafe_in_flight=unsafe_in_flight)
    values = {"id": after.id, "state": str(after.state), "delivery": str(after.delivery)}
    say(f"hold {after.id} is forgiven; the same request signs a new payment now", values, as_json=as_json)


def _lines(found: Reconciliation) -> list[str]:
    ended = [
        f"{count} {what}"
        for count, what in (
            (found.proven, "proven"),
            (found.captured, "captured"), (found.expired, "expired"), (found.voided, "voided"), (found.reopened, "reopened"),
        )
        if count
    ]  # fmt: skip
    lines = [f"asked about {found.asked}: {', '.join(ended) or 'nothing new'}; {found.still_open} still open"]
    if found.freed:
        lines.append(f"freed ${format_dollars(found.freed)}")
    if found.added:
        lines.append(f"counted ${format_dollars(found.added)} more than before")
    lines += [f"receipt contradicted by the chain: hold {hold_id[:16]}…" for hold_id in found.contradicted]
    lines += [
        f"left the wallet, not in the ledger: ${format_dollars(row['amount'])} to {row['payee']}, {row['network']} "
        f"{row['transaction']} (if you know it: x402guard acknowledge {row['id']})"
        for row in found.unexplained
    ]
    lines += [
        f"Permit2 may move ${format_dollars(row['exposed'])} of {row['symbol']} on {row['network']}, by signature"
        for row in found.allowances
    ]
    lines += [f"figures of a token that are not believed: {reason}" for reason in found.unproven_tokens]
    lines += [f"could not read {network}: {reason}" for network, reason in found.unreadable.items()]
    if not found.complete:
        lines.append("one run could not read all blocks; run it again")
    return lines
