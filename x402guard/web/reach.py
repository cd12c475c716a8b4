"""Says which hosts may be reached through this machine: those of the internet by https, and those that the owner names."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread
import httpcore
import httpx
from typing_extensions import override

from x402guard.errors import PolicyDenied
from x402guard.flow.address import DEFAULT_PORTS, is_loopback
from x402guard.http.request import address_of
from x402guard.policy import Policy
from x402guard.policy.patterns import host_listed, plain_path

_INTERNET: Final = ipaddress.ip_network("2000::/3")
_TRANSLATED: Final = tuple(
    map(ipaddress.ip_network, ("2001::/23", "2002::/16"))
)  # Teredo and 6to4: an IPv4 in disguise
_OF_A_NETWORK: Final = ipaddress.ip_network("192.0.0.0/24")
_MOST_ADDRESSES: Final = 4


class Reach:
    """Which hosts a model, or a caller in another language, may reach: else it would read what only this machine can.

    Args:
        rules: the owner's. With ``hosts`` only those, whatever they are.
        named: the base URLs of APIs that the owner has named: what is below them may be asked, wherever it is.
    """

    def __init__(self, rules: Policy, named: Collection[str] = ()) -> None:
        self._rules, self._named = rules, tuple(map(httpx.URL, named))
        self._doors = frozenset(map(_door, self._named))

    def judge(self, url: httpx.URL) -> PolicyDenied | None:
        """Return the refusal of a URL by its name; None for one that may be asked, if its name has a public address."""
        where, listed = address_of(url), self._rules.hosts
        if any(_is_below(url, base) for base in self._named):
            return None
        if listed is not None:
            return None if host_listed(where.host, listed) else _denied(f"host {where.host} is not in policy.hosts")
        if url.scheme != "https":
            return _denied("only https is fetched; the owner can list a host in policy.hosts")
        name = where.name.strip("[]")
        inside = is_loopback(where.name) or (_is_address(name) and not is_public(name))
        # A host that is named for an API is connected to wherever it is, so nothing else of it is.
        return _inside(where.host) if inside or _door(url) in self._doors else None

    def transport(self, limits: httpx.Limits = httpx.Limits()) -> httpx.AsyncHTTPTransport:  # noqa: B008 - it is frozen
        """Return a transport that connects to public addresses alone, but for hosts that the owner names.

        A name is looked up once, where it is connected to: an answer that changes between two looks leads nowhere.
        """
        context = httpx.create_ssl_context()
        transport = httpx.AsyncHTTPTransport(limits=limits, verify=context, trust_env=False)
        # httpx has no argument for it, and a guard believes the errors of no class but httpx's own. A test holds it.
        transport._pool = httpcore.AsyncConnectionPool(  # noqa: SLF001
            ssl_context=context,
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            network_backend=_Outside(self._is_owners),
        )
        return transport

    def _is_owners(self, host: str, port: int) -> bool:
        """True for a host and a port that the owner names."""
        bare = f"[{host}]" if ":" in host else host
        names = {f"{bare}:{port}", *(bare for default in DEFAULT_PORTS.values() if port == default)}
        return (host, port) in self._doors or any(host_listed(name, self._rules.hosts or ()) for name in names)


def _door(url: httpx.URL) -> tuple[str, int]:
    return address_of(url).name.strip("[]"), url.port or DEFAULT_PORTS.get(url.scheme, 0)


def _is_below(url: httpx.URL, base: httpx.URL) -> bool:
    """True for a URL whose path begins with that of a base, also as the most lenient server reads it."""
    if (url.scheme, _door(url)) != (base.scheme, _door(base)):
        return False
    root = base.path.rstrip("/")
    path = plain_path(url.raw_path.partition(b"?")[0].decode("ascii", "replace"))
    return not root or path == root or path.startswith(f"{root}/")


def denied_by_address(error: BaseException) -> PolicyDenied | None:
    """Return the refusal of a host whose name leads to an address inside this network, from what httpx has raised."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, _LeadsInside):
        found = found.__cause__ or found.__context__
    return None if found is None else _inside(found.host)


def is_public(text: str) -> bool:
    """True for an address of one machine of the internet, as it is written: none that a router translates to another."""
    address = ipaddress.ip_address(text)
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return address not in _OF_A_NETWORK
    return address in _INTERNET and not any(address in network for network in _TRANSLATED)


class _LeadsInside(httpcore.ConnectError):
    """A name has an address that is not one of the internet."""

    def __init__(self, host: str) -> None:
        super().__init__("the name leads into this network")
        self.host = host


class _Outside(httpcore.AsyncNetworkBackend):
    """Connects to public addresses, and to whatever address a host of the owner's has."""

    def __init__(self, is_owners: Callable[[str, int], bool]) -> None:
        self._is_owners, self._inner = is_owners, httpcore.AnyIOBackend()

    @override
    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        more: dict[str, Any] = {"timeout": timeout, "local_address": local_address, "socket_options": socket_options}
        if self._is_owners(host, port):
            return await self._inner.connect_tcp(host, port, **more)
        addresses = await _addresses(host, port, within_s=timeout)
        if not all(map(is_public, addresses)):
            raise _LeadsInside(host)
        for number, address in enumerate(addresses, 1):
            try:
                return await self._inner.connect_tcp(address, port, **more)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if number == len(addresses):
                    raise
        raise httpcore.ConnectError("the name has no address")

    @override
    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        raise _LeadsInside(path)

    @override
    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


LOOKUPS: Final[ContextVar[anyio.CapacityLimiter | None]] = ContextVar("x402guard_lookups", default=None)
"""How many names one caller may look up at once: a name server that does not answer keeps a thread for half a minute."""


async def _addresses(host: str, port: int, *, within_s: float | None) -> tuple[str, ...]:
    """Return the addresses of a name, each once. Raises httpcore's errors."""
    look = partial(socket.getaddrinfo, host.strip("[]"), port, type=socket.SOCK_STREAM)
    try:
        with anyio.fail_after(within_s):
            found = await anyio.to_thread.run_sync(look, abandon_on_cancel=True, limiter=LOOKUPS.get())
    except TimeoutError:
        raise httpcore.ConnectTimeout("the name was not found in time") from None
    except (OSError, UnicodeError):
        raise httpcore.ConnectError("the name has no address") from None
    return tuple(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))[:_MOST_ADDRESSES]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _inside(host: str) -> PolicyDenied:
    return _denied(f"host {host} is inside this network; the owner can list it in policy.hosts")


def _denied(reason: str) -> PolicyDenied:
    return PolicyDenied(f"hosts: {reason}", rule="hosts")
