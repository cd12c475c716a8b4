"""Defines the command ``pay``: one request through the guard, or what the guard would make of it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import httpx
import typer

from x402guard.cli.arguments import AsJson, Data, Header, Method, typed_amount, typed_request
from x402guard.cli.policy import explained, show_verdicts
from x402guard.errors import ConfigError
from x402guard.flow.receipt import Receipt, undelivered
from x402guard.flow.shell import LOG
from x402guard.guard.guard import Guard
from x402guard.guard.settings import load_settings
from x402guard.http.logical import may_be_billed
from x402guard.http.transport import GuardedTransport
from x402guard.money import dollars_to_nanos, format_dollars
from x402guard.views.words import json_text, printable

_WAIT_S = 30.0


def pay(
    url: Annotated[str, typer.Argument(help="What to request, and to pay for if its server asks for it.")],
    *,
    budget: Annotated[str, typer.Option("--budget", help="The most that it may cost, in dollars, such as 0.10.")],
    method: Method = "GET",
    header: Header = None,
    data: Data = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Ask all that paying asks, pay nothing, and show what would become of it."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Request a URL with the settings' key, policy and ledger, and print its answer.

    Example: x402guard pay https://seller.example/opinion/42 --budget 0.05 --dry-run
    """
    limit, request = (
        f"${format_dollars(typed_amount(budget, field='--budget'))}",
        typed_request(url, method, header, data),
    )
    if dry_run:
        show_verdicts(explained(load_settings(), request, dollars_to_nanos(limit)), as_json=as_json)
        return
    # `main` puts the null device in place of a stream that is closed. With `> /dev/null` the stream has its usual name.
    if getattr(sys.stdout, "name", "") == os.devnull:
        raise ConfigError("stdout is closed: what is paid for would be lost; give it a place, such as > answer")
    with _refusals_said_once(), Guard.from_env() as guard, guard.session("x402guard pay", budget=limit) as session:
        with httpx.Client(transport=GuardedTransport(session), timeout=_WAIT_S, trust_env=False) as http:
            answer, receipt = _sent(http, request)
        _show(answer, receipt, as_json=as_json)
    raise typer.Exit(1 if answer.is_error else 0)


@contextmanager
def _refusals_said_once() -> Iterator[None]:
    """A block that logs no refusal: the command ends with it."""

    def is_other(record: logging.LogRecord) -> bool:
        return getattr(record, "event", "") != "refused"

    LOG.addFilter(is_other)
    try:
        yield
    finally:
        LOG.removeFilter(is_other)


_BILLED: Final = "Its provider may bill the call all the same: it counts in the budget at what it may cost."


def _sent(http: httpx.Client, request: httpx.Request) -> tuple[httpx.Response, Receipt | None]:
    """Return the whole answer and its receipt. Raises ``PaidNotDelivered`` if what was paid for did not come whole."""
    receipt: object = None
    try:
        answer = http.send(request, stream=True)
        receipt = answer.extensions.get("x402guard")
        answer.read()
    except httpx.HTTPError as error:
        what = f"url: the request to {str(request.url)[:200]!r} failed: {type(error).__name__}: {error}"
        if not isinstance(receipt, Receipt):
            advice = _BILLED if may_be_billed(request) else "Nothing was paid."
            raise ConfigError(what, advice=advice) from error
        raise undelivered(
            f"{what}; ${receipt.amount} to {receipt.payee} was paid, or may still be taken (hold {receipt.hold_id[:16]}…)",
            receipt,
            advice="Running it again signs a new payment. x402guard holds and report show this one.",
        ) from error
    return answer, receipt if isinstance(receipt, Receipt) else None


def _show(answer: httpx.Response, receipt: Receipt | None, *, as_json: bool) -> None:
    """Print the answer on stdout, and what was paid for it on stderr; or both as JSON.

    If the answer cannot be printed, what was paid is said all the same.
    """
    line = _line(answer, receipt)
    try:
        if as_json:
            paid = receipt and _paid(receipt)
            typer.echo(json_text({"status": answer.status_code, "paid": paid, "body": _text(answer)}, None))
        # A pipe gets the bytes; a terminal would do what they say.
        elif sys.stdout.isatty():
            typer.echo("\n".join(printable(line.expandtabs()) for line in _text(answer).splitlines()))
        else:
            typer.echo(answer.content, nl=False)
    except OSError:
        typer.echo(f"\n{line}", err=True)
        if receipt is not None:
            typer.echo("Running it again signs a new payment. x402guard sessions and report show this one.", err=True)
        raise
    if not as_json:
        typer.echo(f"\n{line}" if receipt is None else line, err=True)


def _text(answer: httpx.Response) -> str:
    """Return the body as text; as UTF-8 if the charset that its seller names decodes no text."""
    try:
        return answer.text
    except Exception:  # noqa: BLE001 - codecs raise what they like
        return answer.content.decode(errors="replace")


def _paid(receipt: Receipt) -> dict[str, object]:
    return {
        "amount": format(receipt.amount, "f"),
        "payee": receipt.payee,
        "network": receipt.network,
        "evidence": receipt.evidence,
        "state": receipt.state,
        "transaction": receipt.transaction,
        "hold_id": receipt.hold_id,
    }


def _line(answer: httpx.Response, receipt: Receipt | None) -> str:
    """Return in one line what was paid for an answer."""
    if receipt is None:
        return f"status {answer.status_code}; nothing was paid"
    to = f" to {receipt.payee} on {receipt.network}" if receipt.payee else ""
    doubt = "held, and in doubt" if receipt.in_doubt else "held"
    word = f"paid, {receipt.evidence}" if receipt.state == "captured" else doubt
    return printable(f"status {answer.status_code}; ${receipt.amount}{to} is {word} (hold {receipt.hold_id[:16]}…)")
