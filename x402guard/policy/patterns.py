"""What an owner writes for tools, models and places: ``delete_*``, ``gpt-*``, ``POST bank.example/*``. Only ``*`` is special."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

from x402guard.errors import ConfigError

_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NAMESPACE: Final = re.compile(r"__|[./:]")
_LONGEST: Final = 500
_PORT: Final = re.compile(r"^(\S+ (?:\[[^\]]*\]|[^/:]*)):[0-9]+(?=/)")
_STAR: Final = "\0"  # stands in no path


def check_pattern(setting: str, pattern: object) -> str:
    """Return a pattern as it is compared. Raises ``ConfigError`` naming *setting* for what would never match."""
    if not isinstance(pattern, str) or not pattern.strip() or len(pattern) > _LONGEST:
        raise ConfigError(f"{setting}: {pattern!r:.80} is no pattern; write 'delete_*', or 'POST bank.example/*'")
    if "://" in pattern:
        raise ConfigError(
            f"{setting}: {pattern!r:.120} is a URL; write the method and the place, 'POST bank.example/pay'"
        )
    method, space, where = pattern.strip().partition(" ")
    if not space and "." not in pattern.partition("/")[0] * ("/" in pattern):
        return pattern.strip()  # a tool, or a model such as openai/gpt-4o
    if not space or ("/" not in where and where != "*") or (not method.replace("*", "").isalpha() and method != "*"):
        raise ConfigError(
            f"{setting}: {pattern!r:.120} is no place; write method, host and path: 'POST bank.example/*', or '* bank.example/*'"
        )
    if where == "*":
        return f"{method.upper()} *"
    host, _, path = where.partition("/")
    return f"{method.upper()} {plain_host(host.lower())}{_plain_place(path)}"


def _plain_route_path(path: str) -> str:
    return plain_path(f"/{path}".replace("*", _STAR)).replace(_STAR, "*")


def is_route(pattern: str) -> bool:
    """Return whether a checked pattern is one of places, and not of tools or models."""
    return " " in pattern


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)


def matches_route(pattern: str, route: str) -> bool:
    """Return whether a place (``METHOD host/path``, uncut) is one of a pattern's, whatever its case, and its port where none is named."""
    if not is_route(pattern):
        return False
    wanted = _compiled(pattern.lower())
    return any(wanted.fullmatch(spelled) for spelled in (route.lower(), _PORT.sub(r"\1", route.lower())))


def matches_word(pattern: str, word: str) -> bool:
    """Return whether a word, such as a model's name, is one of a pattern's, whatever its case."""
    return not is_route(pattern) and bool(_compiled(pattern.lower()).fullmatch(word.lower()))


def matches_name(pattern: str, tool: str, *, within: bool) -> bool:
    """Return whether a tool is one of a pattern's, in whatever spelling: ``deleteUser`` and ``crm.delete-user`` are ``delete_*``.

    *within* looks behind every word of the name; without, behind what parts a server from its tools alone.
    """
    if is_route(pattern):
        return False
    if matches_word(pattern, tool):
        return True
    wanted = "*".join(map(_plain, pattern.split("*")))
    spelled = _spellings(tool, within=within)
    if "*" not in pattern and wanted.replace("_", "") in {name.replace("_", "") for name in spelled}:
        return True
    bare = _spellings(tool, within=False)
    return any(_compiled(wanted).fullmatch(name) for name in spelled) or any(f"{name}_*" == wanted for name in bare)


def _spellings(tool: str, *, within: bool) -> set[str]:
    whole = _plain(tool).strip("_")
    found = {whole, *(_plain("_".join(part)).strip("_") for part in _tails(_NAMESPACE.split(tool)))}
    if within:
        found |= {"_".join(part) for part in _tails(whole.split("_"))}
    return found


def _tails(parts: list[str]) -> list[list[str]]:
    kept = [part for part in parts if part]
    return [kept[start:] for start in range(len(kept))]


def _plain(text: str) -> str:
    """Return a name as words of small letters and digits, parted by one underscore; one at either end stays."""
    folded = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return re.sub(r"[\W_]+", "_", _HUMP.sub("_", folded)).lower()


def is_disguised(tool: str) -> bool:
    """Return whether a name mixes letters of the Latin alphabet with others that look like them."""
    letters = [c for c in unicodedata.normalize("NFKD", tool) if c.isalpha()]
    return any(c.isascii() for c in letters) and not all(c.isascii() for c in letters)


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
