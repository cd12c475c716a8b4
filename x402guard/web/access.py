"""Says who may look at the live page and who may act: by an address of this machine, or by a token."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from enum import IntEnum


class Role(IntEnum):
    """What a visitor may do."""

    NONE = 0
    VIEWER = 1
    OWNER = 2


class Access:
    """The rules of one server. A token stands in the header ``Authorization: Bearer``, which no other site can send.

    Args:
        names: the names under which this machine alone reaches it: then everyone who does so may look. Empty if it
            listens to other machines.
        viewer, owner: the tokens, or "" for none. Compared in constant time.
    """

    def __init__(self, *, names: Collection[str], viewer: str, owner: str) -> None:
        self._names = frozenset(names)
        self._tokens = ((Role.OWNER, owner), (Role.VIEWER, viewer))

    def __repr__(self) -> str:
        return f"Access(names={sorted(self._names)})"  # without the tokens

    def role(self, headers: Mapping[str, str]) -> Role:
        """Return what the sender of a request may do. A token that is wrong lets nothing, also on this machine."""
        if not self.is_for_us(headers):
            return Role.NONE
        given = headers.get("authorization")
        if given is None:
            return Role.VIEWER if self._names else Role.NONE
        scheme, _, token = given.partition(" ")
        for role, known in self._tokens:
            if known and scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), known.encode()):
                return role
        return Role.NONE

    def is_for_us(self, headers: Mapping[str, str]) -> bool:
        """True if a request names this machine, or other machines are expected.

        Another name on loopback is a page elsewhere whose name was turned to this machine (DNS rebinding).
        """
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return False  # a script of another site
        host = headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        return not self._names or name.lower() in self._names


def local_names(host: str) -> frozenset[str]:
    """Return the names under which a browser on this machine reaches an address of it."""
    return frozenset({"localhost", "127.0.0.1", "[::1]", host.lower(), f"[{host.lower()}]"})
