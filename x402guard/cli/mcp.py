"""Defines the command ``mcp``: a wallet with a budget for any MCP client."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import anyio
import typer

from x402guard.cli.arguments import typed_budget
from x402guard.cli.policy import explainer_of
from x402guard.errors import ConfigError
from x402guard.guard.guard import Guard
from x402guard.guard.settings import load_settings
from x402guard.money import format_dollars


def mcp(
    *,
    budget: Annotated[str, typer.Option(help="The most that its client may spend, in dollars, such as 5.00.")],
) -> None:
    """Serve a wallet with a budget to an MCP client, over standard input and output, by the settings' rules.

    Example: x402guard mcp --budget 5.00
    """
    limit = typed_budget(budget, field="--budget")
    try:
        from x402guard.web.wallet import Wallet
    except ImportError:
        raise ConfigError("mcp: it needs one more package: pip install 'x402guard[mcp]'") from None
    settings = load_settings()
    explainer = explainer_of(settings)
    with (
        Guard(**settings.guard_arguments()) as guard,
        closing(guard.session("mcp", budget=f"${format_dollars(limit)}")) as session,
    ):
        anyio.run(Wallet(session, explainer).run)
