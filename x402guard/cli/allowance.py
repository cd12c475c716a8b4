"""Defines the commands ``allowance show | grant | revoke``: what Permit2 may move of the wallet's tokens."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from x402guard.cli.arguments import AsJson, LedgerUrl, confirmed, say, typed_amount, working
from x402guard.cli.sessions import show
from x402guard.guard.owner import Owner
from x402guard.guard.owner_rows import AllowanceRow
from x402guard.money import nanos_to_decimal

allowance = typer.Typer(no_args_is_help=True, help="What Permit2 may move of the wallet's tokens, as an exact sum.")

Network = Annotated[str | None, typer.Option("--network", help="The network, such as base or eip155:8453.")]
Token = Annotated[str | None, typer.Option("--token", help="The token: its symbol or its contract.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask before the transaction is signed and sent.")]


@allowance.command("show")
def show_allowances(ledger: LedgerUrl = None, as_json: AsJson = False) -> None:
    """Show what Permit2 may move of each token that the wallet has, read from the chains now.

    Example: x402guard allowance show
    """
    with Owner(ledger) as owner, working("reading the chains"):
        rows: list[dict[str, Any]] = [row.to_dict() for row in owner.allowances()]
    for row in rows:
        del row["transaction"]
        if row["allowance"] is None and not as_json:
            row["allowance"] = "no limit"
    show(rows, as_json=as_json, empty="the wallet has no token that Permit2 can move, on the chains of the settings")


@allowance.command("grant")
def grant(
    amount: Annotated[str, typer.Argument(help="The sum in dollars, such as 20.00, without a $.")],
    *,
    network: Network = None,
    token: Token = None,
    ledger: LedgerUrl = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Set what Permit2 may move of one token to exactly this sum. The wallet signs a transaction and pays its gas.

    A Permit2 payment uses the allowance up; when it is used up, grant anew. Example: x402guard allowance grant 20.00
    """
    _set(f"{nanos_to_decimal(typed_amount(amount)):f}", network, token, ledger, yes=yes, as_json=as_json)


@allowance.command("revoke")
def revoke(
    network: Network = None, token: Token = None, ledger: LedgerUrl = None, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Set what Permit2 may move of one token to nothing: no Permit2 payment can be taken then.

    Example: x402guard allowance revoke --network base
    """
    _set("0.00", network, token, ledger, yes=yes, as_json=as_json)


def _set(amount: str, network: str | None, token: str | None, ledger: str | None, *, yes: bool, as_json: bool) -> None:
    with Owner(ledger) as owner:
        before = owner.allowance(network=network, token=token)
        what = f"Permit2 may move {_sum(before)} of {before.symbol} on {before.network}"
        if not yes:
            asked = f"{what}; set it to ${amount}, by a transaction of the wallet"
            confirmed(f"{asked}?", f"allowance: {asked}; --yes does it without a question")
        with working("waiting for a block"):
            after = owner.set_allowance(amount, network=network, token=token)
    say(f"{what} → {_sum(after)}, by the transaction {after.transaction}", after.to_dict(), as_json=as_json)


def _sum(row: AllowanceRow) -> str:
    return "any sum" if row.allowance is None else f"${row.allowance:f}"
