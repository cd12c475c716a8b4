"""Defines the command ``demo``: an agent spends dollars and tokens on a local chain; then ledger and chain are compared."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import typer

from x402guard.cli.engines import EngineName, EngineOption, engine_maker
from x402guard.errors import BudgetExhausted
from x402guard.flow.receipt import Receipt
from x402guard.guard.guard import Guard
from x402guard.guard.session import Session
from x402guard.http.streams import EXTENSION
from x402guard.http.transport import GuardedTransport
from x402guard.llm import Metering
from x402guard.money import format_dollars
from x402guard.tools import TokenBudget
from x402guard.x402.signer import LocalSigner

if TYPE_CHECKING:
    from x402guard.testing import Completion, LlmCall, LlmServer, Testnet

BUDGET: Final = "$1.00"
CONTEXT: Final = 2_800
LAST: Final = "document 10"
_UNITS: Final = 10**6  # the dollar token has six decimals
_BELIEVED: Final = {"captured": "as its receipt claims", "held": "held in full, whatever its receipt claims"}


def demo(engine: EngineOption = EngineName.ETH_TESTER) -> None:
    """Let a court-records agent spend a dollar on a local chain. Exit code 0 only if ledger and chain agree exactly.

    Example: x402guard demo --engine anvil
    """
    from x402guard.testing import LlmServer, Testnet

    started = time.monotonic()
    # The demo shows final payments and does not wait for 64 blocks.
    make_engine = engine_maker(engine, final_at_once=True)
    typer.echo("A local chain that poses as Base Sepolia, a facilitator, a merchant and a model, on this machine …")
    with Testnet(make_engine=make_engine) as net, LlmServer(_think) as llm, tempfile.TemporaryDirectory() as folder:
        typer.echo(
            f"  chain {net.chain_id} at {net.rpc}, merchant at {net.merchant.url}, model at {llm.base('openai')}"
        )
        before = {who: net.balance(who) for who in (net.payer, net.merchant.payee)}
        guard = Guard(
            signer=LocalSigner.from_key(net.payer_key),
            ledger=f"sqlite:///{Path(folder) / 'demo.db'}",
            chains={net.network: net.rpc},
            metering=Metering(endpoints={llm.base("openai"): "openai"}),
            on_notice=lambda notice: typer.echo(f"  ! {notice.message}"),
            background_checks=False,  # so that every run prints the same lines
        )
        logging.getLogger("x402guard").addHandler(logging.NullHandler())  # ``on_notice`` prints the notices
        with guard, guard.session("court-research", budget=BUDGET, tokens=TokenBudget(CONTEXT)) as session:
            typer.echo(
                f"\nThe agent {net.payer} has ${before[net.payer] / _UNITS:,.2f}. It may spend {BUDGET}, and its token "
                f"budget is {CONTEXT:,} tokens.\n"
            )
            refused = _research(net, llm, session)
            session.close()
            _ask_chain(guard)
            agree = _compare(net, session, before)
            shown = _write_page(session)
    typer.echo(f"\n{time.monotonic() - started:.1f} s. The report as a page, to open in a browser: {shown}")
    if not (refused and agree):
        raise typer.Exit(1)


def _think(call: LlmCall) -> Completion:
    """Return the answer of a simulated model: the demo has no network and shows only the bill."""
    from x402guard.testing import Completion

    return Completion("Read the first nine opinions.", input_tokens=40 + 20 * len(call.model), output_tokens=180)


def _errands(net: Testnet, llm: LlmServer) -> Iterator[tuple[str, str, str, dict[str, Any] | None]]:
    """Yield the agent's requests, in order: (label, method, url, JSON body)."""
    shop, routes = net.merchant.url, net.merchant.routes
    model = f"{llm.base('openai')}/v1/chat/completions"
    yield "ask gpt-4o for a plan", "POST", model, _question("gpt-4o", "Which opinions shall I read?")
    for number in range(1, 9):
        yield f"document {number}", "GET", shop + routes["documents"].format(n=number), None
    yield "document 9, by Permit2", "GET", shop + routes["permit2"].format(n=9), None
    yield "summary by usage, up to $0.05", "POST", shop + routes["llm"], None
    yield "ask gpt-4o-mini what is missing", "POST", model, _question("gpt-4o-mini", "Which opinion is missing?")
    yield LAST, "GET", shop + routes["documents"].format(n=10), None


def _look_up(session: Session) -> None:
    """Use a tool without HTTP requests, until its results are rendered shorter because of the token budget."""

    @session.tool(cost="$0.005", mode="raw", render=_render, name="citations")
    def citations(opinion: int) -> list[dict[str, str]]:
        return [
            {"case": f"No. {opinion}-{row:03d}", "court": "9th Cir.", "says": "followed as to costs"}
            for row in range(60)
        ]

    typer.echo("    a tool without HTTP requests; the fewer tokens are left, the shorter its results are rendered:")
    for opinion in range(1, 5):
        shown = citations(opinion)
        typer.echo(
            f"  ✓ {f'citations of opinion {opinion}':<34} $0.005     at its price, as {shown.partition(':')[0]}, "
            f"{session.tokens.count(shown):,} tokens  ${session.remaining} and {session.tokens.remaining:,} tokens left"
        )


def _render(rows: list[dict[str, str]], mode: str) -> str:
    """Return a result in a mode. The author of a tool decides what a shorter result leaves out."""
    if mode == "raw":
        return f"raw: {json.dumps(rows)}"
    if mode == "table":
        return "table: " + "; ".join(row["case"] for row in rows)
    return f"{mode}: {len(rows)} citations, from {rows[0]['case']} to {rows[-1]['case']}"


def _question(model: str, text: str) -> dict[str, Any]:
    prompt = f"You are a clerk of the court. {text} " + "Answer with case numbers, one a line. " * 20
    return {"model": model, "max_completion_tokens": 400, "messages": [{"role": "user", "content": prompt}]}


def _research(net: Testnet, llm: LlmServer, session: Session) -> bool:
    """Send the requests. True if the last one is refused for lack of budget and all before it were paid."""
    with httpx.Client(transport=GuardedTransport(session), timeout=30) as http:
        for label, method, url, body in _errands(net, llm):
            if label == LAST:
                _look_up(session)
            try:
                response = http.request(method, url, json=body)
            except BudgetExhausted as refusal:
                typer.echo(f"  ✗ {label:<34} refused before signing: {refusal}")
                return True
            receipt = response.extensions[EXTENSION]
            proof = f"tx {receipt.transaction[:10]}…" if receipt.transaction else _tokens(receipt)
            believed = "as the provider reports" if receipt.model else _BELIEVED[receipt.state]
            typer.echo(f"  ✓ {label:<34} ${receipt.amount:<9} {believed}, {proof}  ${session.remaining} left")
    typer.echo("  the budget was never exhausted: this is a bug")
    return False


def _tokens(receipt: Receipt) -> str:
    usage = receipt.usage or {}
    return f"{usage.get('input_tokens', 0)} + {usage.get('output_tokens', 0)} tokens"


def _ask_chain(guard: Guard) -> None:
    found = guard.reconcile()
    typer.echo("\nThe chain is asked about the sellers' claims:")
    typer.echo(f"  {found.asked} payments asked about, {found.still_open} of them not proven")
    typer.echo(f"  transfers out of the wallet that no payment explains: {len(found.unexplained)}")
    for row in found.allowances:
        typer.echo(f"  allowance: Permit2 may move ${format_dollars(row['exposed'])} of {row['symbol']}, by signature")


def _write_page(session: Session) -> Path:
    """Write the report as a page that outlives the demo, and return its path."""
    page = Path(tempfile.gettempdir()) / f"x402guard-demo-{session.id}.html"
    # Transactions are no links: no block explorer knows the local chain.
    page.write_text(session.report().to_html(links=False), "utf-8")
    return page


def _compare(net: Testnet, session: Session, before: dict[str, int]) -> bool:
    """Print the report and the chain's balances. True if they agree to the atomic unit."""
    typer.echo("\nThe ledger:")
    typer.echo(session.report().to_text())
    paid = before[net.payer] - net.balance(net.payer)
    received = net.balance(net.merchant.payee) - before[net.merchant.payee]
    moved = sum(transfer.amount for transfer in net.transfers())
    counted = Decimal(session.report().to_dict()["payments"]["total"]) * _UNITS
    typer.echo("\nThe chain:")
    typer.echo(f"  left the agent      ${Decimal(paid) / _UNITS}  ({paid} units)")
    typer.echo(f"  reached the payee   ${Decimal(received) / _UNITS}  ({received} units)")
    typer.echo(f"  transfers           {len(net.transfers())}, ${Decimal(moved) / _UNITS} in all")
    agree = counted == paid == received == moved and session.held == 0
    typer.echo(
        f"\nLedger and chain {'agree to the atomic unit' if agree else 'DO NOT AGREE'}: {counted:.0f} units counted."
    )
    return agree
