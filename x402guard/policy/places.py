"""Hosts and paths in one spelling, so that no other spelling of them is another place."""

from __future__ import annotations

from urllib.parse import unquote


def plain_path(path: str) -> str:
    """Return a path as the most lenient server may read it: escapes undone, empty and dot segments resolved.

    ``/v1/%63hat/../chat//completions`` is sent as it was written; what it may be taken for decides whether it is metered.
    """
    parts: list[str] = []
    for part in unquote(path).split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


def plain_host(host: str) -> str:
    """Return a host, with its port where there is one, without the dot that a full name may end with."""
    name, colon, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    return f"{name.rstrip('.')}{colon}{port}" if colon else host.rstrip(".")
