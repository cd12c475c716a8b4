"""Defines the command ``serve``: the live page of a ledger."""

from __future__ import annotations

import errno
import secrets
import socket
from contextlib import ExitStack, closing
from typing import Annotated

import typer

from x402guard.cli.arguments import LedgerUrl, tell_as_of
from x402guard.errors import ConfigError
from x402guard.flow.address import is_loopback
from x402guard.guard.owner import Owner


def serve(
    ledger: LedgerUrl = None,
    *,
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65_535)] = 8402,
    host: Annotated[
        str, typer.Option(help="Another address than this machine's own needs a token to look.")
    ] = "127.0.0.1",
    owner: Annotated[bool, typer.Option("--owner", help="Print a token that may also allow, deny and stop.")] = False,
) -> None:
    """Serve the live page of a ledger to a browser, until Ctrl-C. Who looks can change nothing.

    Example: x402guard serve --owner
    """
    try:
        from x402guard.web.access import Access, local_names
        from x402guard.web.app import Live
        from x402guard.web.server import Server
    except ImportError:
        raise ConfigError("serve: it needs three more packages: pip install 'x402guard[serve]'") from None
    is_local = is_loopback(host)
    viewer = "" if is_local else secrets.token_urlsafe(24)
    owners = secrets.token_urlsafe(24) if owner else ""
    with Owner(ledger, read_only=True) as reading, closing(listen(host, port)) as listening:
        access = Access(names=local_names(host) if is_local else (), viewer=viewer, owner=owners)
        live = Live(reading, lambda: Owner(reading.url), access)
        tell_as_of(reading.as_of)
        typer.echo(f"The ledger {reading.url} is shown at {address_of(host, listening.getsockname()[1])}")
        if viewer:
            typer.echo(f"To look, sign in there with the token {viewer}")
        if owners:
            typer.echo(f"To allow, deny and stop, sign in there with the owner's token {owners}")
        typer.echo("Ctrl-C ends it.")

        # The streams of open pages would keep it: they end first.
        Server(
            live.app(), on_exit=live.end, log_level="warning", lifespan="off",
            timeout_graceful_shutdown=3, limit_concurrency=200,
        ).run(sockets=[listening])  # fmt: skip


def address_of(host: str, port: int) -> str:
    """Return the address for a browser; for one that listens everywhere, with this machine's name."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104 - the owner has chosen it
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ``ConfigError`` for an address or a port that cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with ExitStack() as undo:
            made = undo.enter_context(closing(socket.socket(family, kind, protocol)))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(64)
            undo.pop_all()
    except (socket.gaierror, UnicodeError):
        raise ConfigError(f"--host: {host:.80} is no address of this machine; leave it out for 127.0.0.1") from None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"--host: {host:.80} is no address of this machine; leave it out for 127.0.0.1") from None
        raise ConfigError(
            f"--port: {host}:{port} cannot be listened at: {error.strerror}; --port 0 takes a free one"
        ) from None
    return made
