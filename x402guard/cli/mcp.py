"""Defines the command ``mcp``: a wallet with a budget for any MCP client."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
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
        _input_that_ctrl_c_ends() as interrupted,
    ):
        guard.shell.store.write_openings()  # so that the owner sees it and can stop it before it spends
        anyio.run(Wallet(session, explainer).run)
    if interrupted.is_set():
        raise typer.Exit(130)


@contextmanager
def _input_that_ctrl_c_ends() -> Iterator[threading.Event]:
    """A block in which Ctrl-C ends standard input: the thread that reads it cannot be interrupted itself.

    The event is set by Ctrl-C.
    """
    interrupted, given = threading.Event(), os.dup(0)
    reading, writing = socket.socketpair()
    os.dup2(reading.fileno(), 0)

    def copy() -> None:
        with suppress(OSError):  # it has ended
            while some := os.read(given, 65_536):
                writing.sendall(some)
            writing.shutdown(socket.SHUT_WR)

    def end(*_signal: object) -> None:
        interrupted.set()
        with suppress(OSError):  # it has ended already
            writing.shutdown(socket.SHUT_WR)

    before = signal.signal(signal.SIGINT, end)
    threading.Thread(target=copy, name="x402guard-mcp-input", daemon=True).start()
    try:
        with reading:
            yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
        os.dup2(given, 0)
