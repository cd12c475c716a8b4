"""Where a URL leads: what the rules about origins and hosts compare."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Final

from msgspec import Struct

DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class Address(Struct, frozen=True):
    """Where a URL leads.

    Attributes:
        origin: ``scheme://host:port`` in lower case, always with the port.
        host: the host, with its port if the URL names one.
        name: the host alone, in lower case.
        plain: it is a name of letters, digits, ``-``, ``_`` and ``.``, or an IP address.
        loopback: it is this machine.
        named: the values of a ``Host`` header that mean the same.
    """

    origin: str
    host: str
    name: str
    plain: bool
    loopback: bool
    named: frozenset[str]


@lru_cache(maxsize=1024)
def address(scheme: str, raw_host: bytes, port: int | None) -> Address:
    """Return where a scheme, a host and a port lead; *port* is None for the scheme's own."""
    name, default = raw_host.decode("ascii").lower(), DEFAULT_PORTS.get(scheme, 0)
    bare = f"[{name}]" if ":" in name else name
    whole = f"{bare}:{port or default}"
    host = bare if port is None else f"{bare}:{port}"
    return Address(
        origin=f"{scheme}://{whole}",
        host=host,
        name=name,
        plain=_is_plain(host),
        loopback=is_loopback(name),
        named=_named(bare, port or default, default),
    )


def door_of(origin: str) -> str:
    """Return host and port of an origin. The plain and the secure default port are one; a dot after the host is left out."""
    scheme, _, where = origin.partition("://")
    host, _, port = where.rpartition(":")
    return f"{host.rstrip('.')}:{'' if port == str(DEFAULT_PORTS.get(scheme)) else port}"


def _named(bare: str, port: int, default: int) -> frozenset[str]:
    names = {bare, bare.rstrip(".")}
    return frozenset({"", *(f"{name}:{port}" for name in names), *(names if port == default else ())})


_HOST_NAME: Final = re.compile(r"[a-z0-9_-][a-z0-9_.-]*(:[0-9]+)?", re.ASCII)


def _is_plain(host: str) -> bool:
    if not host.startswith("["):
        return _HOST_NAME.fullmatch(host) is not None
    try:
        return ipaddress.ip_address(host[1:].partition("]")[0]).version == 6
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """True if a host is this machine: ``localhost``, or an address that no other machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
