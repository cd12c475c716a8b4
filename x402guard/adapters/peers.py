"""Checks what a caller names: the budget that pays, and the place of a peer."""

from __future__ import annotations

from urllib.parse import quote

from x402guard.adapters.direct import Offered
from x402guard.errors import ConfigError
from x402guard.policy.steps import LOCAL


def checked_budget(session: object) -> None:
    """Raise ``ConfigError`` for what is neither a session nor a guard."""
    if isinstance(session, type) or not hasattr(session, "innermost"):
        raise ConfigError(f"session: {session!r:.60} is neither a Session nor a Guard")


def place_named(field: str, name: object, example: str) -> str:
    """Return the place of a peer by the owner's own name of it, or by its URL. Raises ``ConfigError`` naming *field*."""
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"{field}: give the {field} a name of your own, such as {example!r}, or its URL")
    place = name.rstrip("/") if "://" in name else f"{LOCAL}://{quote(name, safe='')}"
    Offered({}, place).facts()  # an address that cannot be judged is refused now
    return place
