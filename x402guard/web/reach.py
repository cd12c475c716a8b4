"""Says which hosts a model may fetch through the wallet: those of the internet by https, and those that the owner names."""

from __future__ import annotations

import ipaddress
from typing import Final

import anyio
import httpx

from x402guard.errors import PolicyDenied
from x402guard.flow.address import is_loopback
from x402guard.http.request import address_of
from x402guard.policy import Policy
from x402guard.policy.reach import host_listed

_INTERNET: Final = ipaddress.ip_network("2000::/3")
_TRANSLATED: Final = tuple(
    map(ipaddress.ip_network, ("2001::/23", "2002::/16"))
)  # Teredo and 6to4: an IPv4 in disguise
_OF_A_NETWORK: Final = ipaddress.ip_network("192.0.0.0/24")


async def refuse_inside(url: httpx.URL, rules: Policy) -> None:
    """Refuse a host of this network, and plain http, unless the owner's rules name the host.

    A model that is talked into it would else read what only this machine can reach. Raises ``PolicyDenied``, and
    ``httpx.ConnectError`` for a name without an address.
    """
    where, listed = address_of(url), rules.hosts
    if listed is not None:
        if not host_listed(where.host, listed):
            raise _denied(f"host {where.host} is not in policy.hosts")
        return
    if url.scheme != "https":
        raise _denied("only https is fetched; the owner can list a host in policy.hosts")
    if is_loopback(where.name) or not await _is_public(where.name, url.port or 443):
        raise _denied(f"host {where.host} is inside this network; the owner can list it in policy.hosts")


async def _is_public(name: str, port: int) -> bool:
    """True if each address of a name is one of the internet."""
    try:
        found = await anyio.getaddrinfo(name.strip("[]"), port)
    except (OSError, UnicodeError):
        raise httpx.ConnectError("the name has no address") from None
    return all(is_public(address[0].partition("%")[0]) for *_, address in found)


def is_public(text: str) -> bool:
    """True for an address of one machine of the internet, as it is written: none that a router translates to another."""
    address = ipaddress.ip_address(text)
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return address not in _OF_A_NETWORK
    return address in _INTERNET and not any(address in network for network in _TRANSLATED)


def _denied(reason: str) -> PolicyDenied:
    return PolicyDenied(f"hosts: {reason}", rule="hosts")
