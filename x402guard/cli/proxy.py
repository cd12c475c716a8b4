"""Defines the command ``proxy``: the guard for callers in any language."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack, closing, suppress
from typing import Annotated, Any, Final

import typer

from x402guard.cli.arguments import typed_budget
from x402guard.cli.serve import address_of, listen
from x402guard.errors import ConfigError
from x402guard.flow.address import is_loopback
from x402guard.flow.surroundings import ending_signals
from x402guard.guard.guard import Guard
from x402guard.guard.settings import load_settings
from x402guard.kernel.rows import Nanos
from x402guard.money import format_dollars

_NAME = "proxy"


def proxy(
    *,
    budget: Annotated[
        str | None, typer.Option(help="The most that its callers may spend, in dollars, such as 5.00.")
    ] = None,
    session: Annotated[
        list[str] | None,
        typer.Option(help="NAME=DOLLARS: a session with a token of its own. May be repeated."),
    ] = None,
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65_535)] = 8403,
    host: Annotated[
        str, typer.Option(help="The address to listen at. Requests to it are not encrypted.")
    ] = "127.0.0.1",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the address and the tokens as one line of JSON.")
    ] = False,
) -> None:
    """Pay and meter for callers in any language, until Ctrl-C: they send requests to /https://host/path, with a token.

    Example: x402guard proxy --budget 5.00
    """
    budgets = _budgets(budget, session or [])
    try:
        from x402guard.web.access import Access, local_names
        from x402guard.web.proxy import Proxy, new_token
        from x402guard.web.reach import Reach
        from x402guard.web.server import Server
        from x402guard.web.upstream import Keys, upstreams
    except ImportError:
        raise ConfigError("proxy: it needs two more packages: pip install 'x402guard[serve]'") from None
    settings = load_settings()
    metering = settings.metering.build()
    known = upstreams(metering.endpoints)
    # While it opens and closes its sessions: the server takes its signals itself.
    for number in ending_signals():
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt), ExitStack() as opened:
        listening = opened.enter_context(closing(listen(host, port)))
        guard = opened.enter_context(Guard(**settings.guard_arguments()))
        # Not as blocks: none of them is the session in context of every request.
        sessions = {
            name: opened.enter_context(closing(guard.session(name, budget=f"${format_dollars(limit)}")))
            for name, limit in budgets.items()
        }
        guard.shell.store.write_openings()  # so that the owner sees them and can stop them before they spend
        tokens = {name: new_token() for name in sessions}
        own = (host, listening.getsockname()[1])
        app = Proxy(
            {tokens[name]: session for name, session in sessions.items()},
            upstreams=known,
            keys=Keys(os.environ, metering, settings.proxy.paths),
            reach=Reach(guard.context.policy, [each.base for each in known.values()]),
            access=Access(names=local_names(host) if is_loopback(host) else (), viewer="", owner=""),
            own=own,
        )
        if guard.context.payer is None:
            typer.echo("No key is set (x402guard keys new): LLM calls are metered, and nothing is paid.", err=True)
        _say(address_of(*own), budgets, tokens, as_json=as_json)
        Server(app, **_SERVING).run(sockets=[listening])


_SERVING: Final[dict[str, Any]] = {
    "ws": "none",
    "lifespan": "on",
    "log_level": "critical",
    "server_header": False,
    "date_header": False,
    "timeout_graceful_shutdown": 3,
    "timeout_keep_alive": 75,  # clients close theirs after 5 s or so: who closes first loses a request
}


def _budgets(budget: str | None, sessions: list[str]) -> dict[str, Nanos]:
    """Return name → nano-dollars. Raises ``ConfigError`` naming the option."""
    found: dict[str, Nanos] = {}
    if budget is not None:
        found[_NAME] = typed_budget(budget, field="--budget")
    for given in sessions:
        name, sign, amount = given.rpartition("=")
        if not sign or not name.strip():
            raise ConfigError(f"--session: {given[:60]!r} is not NAME=DOLLARS, such as research=5.00")
        if name in found:
            raise ConfigError(f"--session: {name[:60]!r} is given twice; each session has its own name")
        found[name] = typed_budget(amount, field=f"--session {name}")
    if not found:
        raise ConfigError("--budget: say how much its callers may spend, such as --budget 5.00")
    return found


def _say(url: str, budgets: dict[str, Nanos], tokens: dict[str, str], *, as_json: bool) -> None:
    """Print where callers send their requests, and the tokens: each is good until the command ends."""
    amounts = {name: f"${format_dollars(limit)}" for name, limit in budgets.items()}
    if as_json:
        rows = [{"name": name, "budget": amounts[name], "token": token} for name, token in tokens.items()]
        typer.echo(json.dumps({"url": url, "sessions": rows}))
        return
    first = next(iter(tokens.values()))
    for name, token in tokens.items():
        typer.echo(f"{name}, {amounts[name]}: token {token}")
    typer.echo(f"""
A paid page:  curl -H "X402guard-Session: {first}" {url}https://seller.example/page
An LLM's SDK: OPENAI_BASE_URL={url}openai OPENAI_API_KEY={first}
Ctrl-C ends it.""")
