"""Defines the commands ``prices``: of models, from a price file, and of a seller's route. They fetch nothing."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer

from x402guard.cli.arguments import AsJson, LedgerUrl, say, typed_amount
from x402guard.cli.sessions import show
from x402guard.guard.owner import Owner
from x402guard.guard.settings import load_settings
from x402guard.money import format_dollars, nanos_to_decimal
from x402guard.vendors.genai_prices import GenaiPriceBook
from x402guard.vendors.models import READ_ON
from x402guard.vendors.price_file import PRICES_FILE, PriceChange, compare, open_book, read_prices, write_prices

prices = typer.Typer(
    no_args_is_help=True,
    help="List the prices of models, compare a price file with them, or install one; accept what a seller asks.",
)

_BRIEF = ("provider", "model", "input", "cached_input", "output")
_MOST_SHOWN = 200
_UNITS = {"input_tokens": "input", "cache_read_tokens": "cached_input", "output_tokens": "output"}

File = Annotated[Path, typer.Argument(help="A price file in the format of genai-prices: a JSON list of providers.")]


def _current() -> tuple[GenaiPriceBook, str | None]:
    path = load_settings().metering.prices
    # A file named in the settings may be missing: the first update writes it.
    return open_book(path if path is not None and Path(path).exists() else None), path


@prices.command("list")
def listing(
    search: Annotated[str, typer.Argument(help="Part of a model's name or provider; default: all models.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the present prices of models, in dollars per million tokens.

    Example: x402guard prices list gpt-4o
    """
    book, _ = _current()
    rows: list[dict[str, Any]] = []
    for provider, model, found in book.listing(int(time.time())):
        if search.lower() in f"{provider}/{model}".lower():
            named = {_UNITS.get(unit, unit): str(price) for unit, price in found.items()}
            rows.append({"provider": provider, "model": model, **dict.fromkeys(_BRIEF[2:]), **named})
    show(rows, as_json=as_json, empty="no model with that name has a price", brief=_BRIEF)


@prices.command("diff")
def diff(file: File, as_json: AsJson = False) -> None:
    """Show every price that differs between FILE and the prices in use, and FILE's hash. Changes nothing.

    Example: x402guard prices diff prices.json
    """
    new, sha256 = read_prices(file)
    changes = list(compare(_current()[0], new, int(time.time())))
    _show(changes, as_json=as_json)
    if not as_json:
        typer.echo(f"{len(changes)} prices differ; sha256 {sha256}")


@prices.command("accept")
def accept(
    route: Annotated[str, typer.Argument(help="METHOD host/path, as the refusal names it.")],
    amount: Annotated[str, typer.Argument(help="Dollars, such as 0.25, without a $; 0 takes it back.")],
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
) -> None:
    """Let a seller's route cost up to AMOUNT, for every run of the ledger, whatever it has cost before.

    A cap and a budget still hold. Example: x402guard prices accept 'POST shop.example/v1/chat' 0.25
    """
    nanos = typed_amount(amount)
    with Owner(ledger) as owner:
        accepted = owner.accept_price(route, nanos_to_decimal(nanos))
    said = f"may cost up to ${format_dollars(nanos)}" if nanos else "is compared with what it has cost"
    wider = "; * is any segment with a digit" if "*" in accepted else ""
    say(f"{accepted} {said}{wider}", {"route": accepted, "most": format_dollars(nanos)}, as_json=as_json)


@prices.command("update")
def update(
    file: Annotated[
        Path | None, typer.Argument(help="A price file in the format of genai-prices; default: say how old ours are.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Accept prices that fall by more than half without a question.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Install FILE's prices: write them, with their hash, to the price file of the settings.

    A price that falls by more than half needs a confirmation, because a forged price file could make every call look
    cheap. Without FILE, say which prices are in use and how to get newer ones. Example: x402guard prices update prices.json
    """
    old, path = _current()
    if file is None:
        _say_age(old, path, as_json=as_json)
        return
    new, sha256 = read_prices(file)
    changes = list(compare(old, new, int(time.time())))
    falling = [change for change in changes if change.falls_by_half]
    if not as_json:
        typer.echo(f"{file}: {len(changes)} prices differ from those in use; sha256 {sha256}")
    if falling and not as_json:
        _show(falling, as_json=False)
        typer.echo(f"{len(falling)} prices fall by more than half.")
    if falling and not yes:
        asked = "Accept them?" if not as_json else f"{len(falling)} prices fall by more than half. Accept them?"
        if not typer.confirm(asked, default=False, err=as_json):
            typer.echo("Nothing was changed.", err=as_json)
            raise typer.Exit(1)
    target = Path(path or PRICES_FILE)
    write_prices(file, target, seen=sha256)
    where = "" if path else f'; to use it, set prices = "{target}" under [metering], or X402GUARD_METERING__PRICES'
    values = {"file": str(target), "sha256": sha256, "changed": len(changes), "falling": len(falling)}
    say(f"written to {target}{where}", values, as_json=as_json)


def _say_age(book: GenaiPriceBook, path: str | None, *, as_json: bool) -> None:
    """Say which prices are in use, how old they are, and where newer ones come from: nothing is fetched."""
    models = sum(1 for _ in book.names())
    known = book.find("openai", "gpt-4o", int(time.time()))
    source, version = ("the price file", "") if known is None else (known.source, known.version)
    age = (datetime.now(UTC).date() - READ_ON).days
    ours = "" if path else f", looked up on {READ_ON}, {age} day{'' if age == 1 else 's'} ago"
    told = (
        f"{models:,} names of models have a price: {source} {version}{ours}. Newer ones: `pip install --upgrade genai-prices`, or "
        "its file of prices from a place that you trust, and `x402guard prices update FILE`"
    )
    values = {"source": source, "version": version, "names": models, "read_on": None if path else READ_ON.isoformat()}
    say(told, values, as_json=as_json)


def _show(changes: list[PriceChange], *, as_json: bool) -> None:
    shown = changes if as_json else changes[:_MOST_SHOWN]
    show([_row(change) for change in shown], as_json=as_json, empty="no price differs")
    if len(changes) > len(shown):
        typer.echo(f"… and {len(changes) - len(shown)} more; `x402guard prices diff --json` shows all")


def _row(change: PriceChange) -> dict[str, Any]:
    return {
        "provider": change.provider,
        "model": change.model,
        "unit": change.unit,
        "before": _text(change.before),
        "after": _text(change.after),
    }


def _text(price: Decimal | None) -> str | None:
    return None if price is None else str(price)
