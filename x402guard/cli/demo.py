"""``demo``: an agent with a dollar, a real chain, and the accounts afterwards."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import httpx
import typer

from x402guard.errors import BudgetExhausted
from x402guard.guard import Guard
from x402guard.session import Session
from x402guard.signers import LocalSigner
from x402guard.transport import EXTENSION, GuardedTransport

if TYPE_CHECKING:
    from x402guard.testing import Testnet

__all__ = ["demo"]

BUDGET: Final = "$1.00"
_UNITS: Final = 10**6  # the dollar token has six decimals


def demo() -> None:
    """Let a court-records agent spend a dollar on a local chain; exit 0 only if books and chain agree to the atomic unit."""
    from x402guard.testing import Testnet

    started = time.monotonic()
    typer.echo("A local chain posing as Base Sepolia, with a facilitator and a merchant, all on this machine …")
    with Testnet() as net, tempfile.TemporaryDirectory() as folder:
        typer.echo(f"  chain {net.chain_id} at {net.rpc}, merchant at {net.merchant.url}")
        before = {who: net.balance(who) for who in (net.payer, net.merchant.payee)}
        guard = Guard(
            signer=LocalSigner.from_key(net.payer_key),
            ledger=f"sqlite:///{Path(folder) / 'demo.db'}",
            chains={net.network: net.rpc},
        )
        with guard, guard.session("court-research", budget=BUDGET) as session:
            typer.echo(f"\nThe agent {net.payer} has ${before[net.payer] / _UNITS:,.2f} and may spend {BUDGET}.\n")
            refused = _research(net, session)
            session.close()
            agree = _compare(net, session, before)
    typer.echo(f"\n{time.monotonic() - started:.1f} s")
    if not (refused and agree):
        raise typer.Exit(1)


def _errands(net: Testnet) -> Iterator[tuple[str, str, str]]:
    """What the agent wants, in order: (label, method, path)."""
    routes = net.merchant.routes
    for number in range(1, 9):
        yield f"document {number}", "GET", routes["documents"].format(n=number)
    yield "document 9, by Permit2", "GET", routes["permit2"].format(n=9)
    yield "summary by an LLM, up to $0.05", "POST", routes["llm"]
    yield "document 10", "GET", routes["documents"].format(n=10)


def _research(net: Testnet, session: Session) -> bool:
    """Run the errands; True where the last is refused for lack of budget, and all before it were paid."""
    with httpx.Client(transport=GuardedTransport(session), base_url=net.merchant.url, timeout=30) as http:
        for label, method, path in _errands(net):
            try:
                response = http.request(method, path)
            except BudgetExhausted as refusal:
                typer.echo(f"  ✗ {label:<32} refused before signing: {refusal}")
                return True
            receipt = response.extensions[EXTENSION]
            typer.echo(
                f"  ✓ {label:<32} ${receipt.amount:<9} proven by the {receipt.evidence}, "
                f"tx {receipt.transaction[:10]}…  ${session.remaining} left"
            )
    typer.echo("  the budget was never exhausted: this is a bug")
    return False


def _compare(net: Testnet, session: Session, before: dict[str, int]) -> bool:
    """Print the report beside the chain's balances; True where they agree to the atomic unit."""
    typer.echo("\nThe books:")
    typer.echo(session.report().to_text())
    paid = before[net.payer] - net.balance(net.payer)
    received = net.balance(net.merchant.payee) - before[net.merchant.payee]
    moved = sum(transfer.amount for transfer in net.transfers())
    counted = session.spent * _UNITS
    typer.echo("\nThe chain:")
    typer.echo(f"  left the agent      ${Decimal(paid) / _UNITS}  ({paid} units)")
    typer.echo(f"  reached the payee   ${Decimal(received) / _UNITS}  ({received} units)")
    typer.echo(f"  transfers           {len(net.transfers())}, ${Decimal(moved) / _UNITS} in all")
    agree = counted == paid == received == moved and session.held == 0
    typer.echo(
        f"\nBooks and chain {'agree to the atomic unit' if agree else 'DO NOT AGREE'}: {counted:.0f} units counted."
    )
    return agree
