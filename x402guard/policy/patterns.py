"""Patterns for tools, models and routes: ``delete_*``, ``gpt-*``, ``POST bank.example/*``. Only ``*`` is special."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Final, TypeVar
from urllib.parse import unquote

from x402guard.errors import ConfigError

V = TypeVar("V")

_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NAMESPACE: Final = re.compile(r"__|[./:]")
_LONGEST: Final = 500
_PORT: Final = re.compile(r":[0-9]+$")
_STAR: Final = "\0"  # occurs in no path
_HOST: Final = re.compile(
    r"[0-9]+(?:\.[0-9]+){3}(?::[0-9]+)?|[0-9]+(?:\.[0-9]+){1,2}\.\*|\[[0-9a-f:.]+\](?::[0-9]+)?"
    r"|(?:(?:[\w*-]+\.)+[a-z]{2,}|localhost)(?::[0-9]+|\.)|(?:[\w*-]+\.)+[\w-]*\*[\w*-]*(?::[0-9]{2,}|\.)",
    re.IGNORECASE,
)
"""What no tool and no model is called: an address, or a name with a port or a dot at its end; ``claude-*:0`` is a model."""

_ENDS_PLAINLY: Final = re.compile(r"(?:[\w*-]+\.)+[a-z][a-z0-9-]+|localhost", re.IGNORECASE | re.ASCII)
_MAY_BE_A_HOST: Final = re.compile(
    rf"{_ENDS_PLAINLY.pattern}|(?:[\w*-]+\.)+[a-z0-9-]*\*[a-z0-9*-]*", re.IGNORECASE | re.ASCII
)
"""With a ``*`` in its last part, as ``bank.*``, it may be any seller's host: it can restrain one, and frees none."""

_UNUSUAL: Final = re.compile(r"[%;\\]|//|/\.")
_PARAMETERS: Final = re.compile(r";[^/]*")
_DEEPEST_READING: Final = 4


def check_pattern(setting: str, pattern: object) -> str:
    """Return a pattern as it is compared. Raises ``ConfigError`` naming *setting* if it could never match."""
    if not isinstance(pattern, str) or not pattern.strip() or len(pattern) > _LONGEST:
        raise ConfigError(f"{setting}: {pattern!r:.80} is not a pattern; write 'delete_*', or 'POST bank.example/*'")
    if _HOST.fullmatch(pattern.strip()):
        raise ConfigError(f"{setting}: {pattern!r:.120} is a host; write a route such as '* bank.example/*'")
    if "://" in pattern:
        raise ConfigError(f"{setting}: {pattern!r:.120} is a URL; write a route such as 'POST bank.example/pay'")
    method, space, where = pattern.strip().partition(" ")
    if not space and "." not in pattern.partition("/")[0] * ("/" in pattern):
        return pattern.strip()  # a tool, or a model such as openai/gpt-4o
    if not space or ("/" not in where and where != "*") or (not method.replace("*", "").isalpha() and method != "*"):
        raise ConfigError(
            f"{setting}: {pattern!r:.120} is not a route; write method, host and path: 'POST bank.example/*', or '* bank.example/*'"
        )
    if where == "*":
        return f"{method.upper()} *"
    host, _, path = where.partition("/")
    fault = _never_matches(host, path)
    if fault:
        raise ConfigError(f"{setting}: {pattern!r:.120} matches no route: {fault}")
    return f"{method.upper()} {plain_host(host.lower())}{_plain_route_path(path)}"


def check_patterns(setting: str, named: Mapping[str, V]) -> dict[str, V]:
    """Return values by their patterns, as ``check_pattern`` does. Raises ``ConfigError`` also for one that is there twice."""
    found: dict[str, V] = {}
    for name, value in named.items():
        pattern = check_pattern(setting, name)
        if pattern in found:
            raise ConfigError(f"{setting}: {pattern!r:.120} is there twice, in two spellings; leave one out")
        found[pattern] = value
    return found


_DEFAULT_PORT: Final = re.compile(r":(80|443)$")


def _never_matches(host: str, path: str) -> str:
    """Return what keeps a route from ever matching, and what to write; "" for nothing."""
    if not host.isascii():
        return f"write the host as it goes over the wire, in ASCII (xn--…), not {host!r:.60}"
    if any(mark in host for mark in " @?#\\"):
        return f"{host!r:.60} is no host; write method, one space, host and path"
    if _DEFAULT_PORT.search(host):
        return "a route has no port if it is its scheme's own; leave it out"
    if "?" in path or "#" in path:
        return "a route ends before the query and the fragment; leave them out"
    return ""


def _plain_route_path(path: str) -> str:
    return plain_path(f"/{path}".replace("*", _STAR)).replace(_STAR, "*")


def host_name(host: str) -> str:
    """Return a host without its port."""
    return host.rpartition(":")[0] or host if not host.endswith("]") else host


def host_listed(host: str, listed: Collection[str]) -> bool:
    """True if a host, with its port if that is not the default one, is on a list of hosts and ``*.domain`` patterns."""
    name = host_name(host)
    return any(
        pattern in (host, name) or (pattern.startswith("*.") and name.endswith(pattern[1:])) for pattern in listed
    )


def is_route(pattern: str) -> bool:
    """Return whether a checked pattern is for routes, not for tools or models."""
    return " " in pattern


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    first, *others = map(re.escape, pattern.split("*"))
    if not others:
        return re.compile(first)
    # Each part is taken where it first fits, for good: other ways to cut the text would be tried without end.
    between = "".join(f"(?>.*?{part})" for part in others[:-1] if part)
    return re.compile(f"{first}{between}.*{others[-1]}", re.DOTALL)


def matches_route(pattern: str, route: str, *, frees: bool = False) -> bool:
    """Return whether a route (``METHOD host/path``, in full) matches, in any case, and with any port if none is named.

    A host of ``*`` alone is all that stands before the path; a ``*`` beside a name is about the host. A name with dots may
    be a tool's or a host's, and matches both; but with a ``*`` in its last part no host if what matches is to be freed.
    """
    if not is_route(pattern):
        named = _ENDS_PLAINLY.fullmatch(pattern) is not None if frees else may_be_host(pattern)
        return named and matches_route(f"* {pattern}/*", route)
    (method, host, path), (by, at, where) = _parts_of(pattern.lower()), _parts_of(route.lower())
    if not is_route(route) or not _fits_in(method, by):
        return False
    if path is None or where is None:  # "GET *" is about all; a tool with a blank in its name has no path
        return path is None
    if host == "*":
        return _fits_in(f"*/{path}", f"{at}/{where}")
    return _fits_in(path, where) and (_fits_in(host, at) or _fits_in(host, _PORT.sub("", at)))


def may_be_host(pattern: str) -> bool:
    """Return whether a checked pattern of one word may name a host, as well as a tool."""
    return _MAY_BE_A_HOST.fullmatch(pattern) is not None


def _parts_of(route: str) -> tuple[str, str, str | None]:
    """Return the method, host and path of a route or its pattern; None for the path of ``GET *``, which is about all."""
    method, _, where = route.partition(" ")
    host, slash, path = where.partition("/")
    return method, host, path if slash else None


def _fits_in(pattern: str, text: str) -> bool:
    return _compiled(pattern).fullmatch(text) is not None


def matches_word(pattern: str, word: str) -> bool:
    """Return whether a word, such as a model's name, matches. Ignores case."""
    return not is_route(pattern) and bool(_compiled(pattern.lower()).fullmatch(word.lower()))


def matches_name(pattern: str, tool: str, *, within: bool) -> bool:
    """Return whether a tool matches in any spelling: ``deleteUser`` and ``crm.delete-user`` match ``delete_*``.

    With *within* a match may begin at every word of the name; else only after a prefix such as a server's name.
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


def ends_with(word: str, tool: str) -> bool:
    """Return whether the last word of a tool's name, in any spelling, is *word*."""
    return word in _spellings(tool, within=True)


def allows_name(pattern: str, tool: str) -> bool:
    """Return whether a name or pattern on a list of what is allowed means a tool, in any spelling.

    A pattern that names no server is about the tool alone: ``search_*`` allows ``crm/search_users``, and not
    ``search/delete_user``. One that names a server is about no other: ``crm/*`` does not allow ``evil/crm/read``.
    """
    if "/" in pattern and "/" in tool:
        (server, _, named), (owner, _, name) = pattern.partition("/"), tool.partition("/")
        return _fits(server, owner) and _fits(named, name)
    own, wanted = _parts(tool), _parts(pattern)
    if len(wanted) > 1 and len(own) < 2:  # some agents join the names of server and tool
        return _fits("_".join(wanted), tool)
    if len(wanted) > 1:
        return any(_are_parts(wanted, parts) for parts in (own, own[1:] if own[:1] == [_ALL_SERVERS] else []))
    return matches_name(pattern, own[-1] if "*" in pattern and own else tool, within=False)


_ALL_SERVERS: Final = "mcp"  # some agents put it before the name of each server


def _parts(name: str) -> list[str]:
    return [part for part in _NAMESPACE.split(name) if part]


def _are_parts(wanted: list[str], own: list[str]) -> bool:
    """Return whether a name has the server that a pattern names, and its tool."""
    return len(own) > 1 and _fits(wanted[0], own[0]) and _fits("_".join(wanted[1:]), "_".join(own[1:]))


def _fits(pattern: str, name: str) -> bool:
    return _compiled("*".join(map(_plain, pattern.split("*")))).fullmatch(_plain(name)) is not None


def _spellings(tool: str, *, within: bool) -> set[str]:
    whole = _plain(tool).strip("_")
    found = {whole, *(_plain("_".join(part)).strip("_") for part in _tails(_NAMESPACE.split(tool)))}
    if within:
        found |= {"_".join(part) for part in _tails(whole.split("_"))}
    return found


def _tails(parts: list[str]) -> list[list[str]]:
    kept = [part for part in parts if part]
    return [kept[start:] for start in range(len(kept))]


@lru_cache(maxsize=1024)
def _plain(text: str) -> str:
    """Return a name as lower-case words and digits, separated by one underscore; one at either end stays."""
    folded = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return re.sub(r"[\W_]+", "_", _HUMP.sub("_", folded)).lower()


def without_words(words: re.Pattern[str], tool: str) -> str:
    """Return a tool's name as words, without those that match."""
    return words.sub("_", _plain(tool))


def is_disguised(tool: str) -> bool:
    """Return whether a name mixes Latin letters with others, which may look like them."""
    letters = [c for c in unicodedata.normalize("NFKD", tool) if c.isalpha()]
    return any(c.isascii() for c in letters) and not all(c.isascii() for c in letters)


@lru_cache(maxsize=1024)
def plain_path(path: str) -> str:
    """Return a path as the most lenient server may read it: unescaped, with empty and dot segments resolved.

    ``/v1/%63hat/../chat//completions`` is sent as written; whether it is metered is decided on the lenient reading.
    """
    return _resolved(unquote(path))


def spelt_path(path: str) -> str:
    """Return a path that is the same however it is escaped, and differs for what a server may tell apart.

    A slash that is escaped is no separator, and bytes that are no UTF-8 stay what they are.
    """
    return _resolved(unquote(_SLASH.sub("%252F", path), errors="surrogateescape"))


_SLASH: Final = re.compile("%2f", re.IGNORECASE)


def _resolved(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


@lru_cache(maxsize=1024)
def readings(path: str) -> tuple[str, ...]:
    """Return a path in all the ways in which servers may read it, the plain one first.

    They differ in whether they unescape it, how often, and before or after they resolve its dots; in what they take
    for a parameter (``;x=1``, RFC 3986, section 3.3) and leave out; and in whether a backslash is a slash.
    """
    if _UNUSUAL.search(path) is None:
        return (plain_path(path),)
    found, newest = {path}, [path]
    for _ in range(_DEEPEST_READING):
        newest = [said for one in newest for said in _read_on(one) if said not in found]
        found.update(newest)
    whole = ["/" + "/".join(filter(None, one.split("/"))) for one in sorted(found)]
    return tuple(dict.fromkeys([plain_path(path), *whole]))


def _read_on(path: str) -> Iterator[str]:
    yield unquote(path)
    yield _PARAMETERS.sub("", path)
    yield path.replace("\\", "/")
    yield _resolved(path)


def plain_host(host: str) -> str:
    """Return a host, with its port if it has one, without the trailing dot of a full name."""
    name, colon, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    return f"{name.rstrip('.')}{colon}{port}" if colon else host.rstrip(".")
