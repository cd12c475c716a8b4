"""One step of an agent as the guards see it (a payment, an LLM call or a tool use), and its deduplication key."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from decimal import Context, Decimal
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import NOTHING, Hold, HoldKind, Nanos
from x402guard.policy.patterns import (
    is_route,
    matches_name,
    matches_route,
    matches_word,
    plain_host,
    readings,
    spelt_path,
)
from x402guard.strict_json import NotReadable, json_writer, read_object

DIRECT: Final = "PAY"
"""The method of a payment whose offer did not come by HTTP."""

LOCAL: Final = "mcp"
"""The scheme of a place inside this machine: a process that the caller started, over its standard input and output."""

_LONGEST_NAME: Final = 200
_TIMES: Final = frozenset({"timestamp", "created_at"})


def reset_mark(run_id: str) -> MarkKey:
    """Return the key of the row with the time from which a run's loops and spikes count."""
    return "loop_reset", run_id


class Asked(Struct, frozen=True):
    """What a request says of itself that may change its price.

    Attributes:
        size: bytes of its body and query.
        output: a measure of the output that it asks for; 0 if it says nothing of it.
        model: the model that it names, or "".
        named: the caller's own ``price_class``, or "".
    """

    size: int = 0
    output: int = 0
    model: str = ""
    named: str = ""

    @property
    def label(self) -> str:
        """What has a history of prices of its own; "" for none."""
        return f"{self.model} {self.named}" if self.model or self.named else ""


NOT_ASKED: Final = Asked()
"""Of a step that is no request, or is over."""


class Step(Struct, frozen=True):
    """A step that is about to be held for.

    Attributes:
        kind: payment, LLM call or tool.
        name: the tool, or ``POST host/path``, as messages and the owner's settings name it.
        key: the deduplication key: SHA-256 in hex, the same for identical calls; "" if calls cannot be distinguished.
        node_id: the budget that pays.
        amount: nano-dollars to hold, if ``priced``.
        payee: the address that is paid; "" for an LLM call or a tool.
        priced: the amount and the payee are known.
        routes: of a request: its route in full, in all readings (``whole_routes``).
        begun: the name of the first hop, if a redirect has named this one; else "".
        fingerprint: of a payment: the same for the same request in any spelling.
        is_local: what is paid is a process of this machine (``LOCAL``), and its name a tool's.
        asks: of a payment: what its request says that may change its price.
        said_key: of an LLM call: the key of ``last_said``; "" if it is not known.
        run_id: the run: the outermost session. It follows from ``node_id``, as does the next.
        reset_key: the key of the row with the time from which the run's loops and spikes count.
    """

    kind: HoldKind
    name: str
    key: str
    node_id: str
    amount: Nanos = NOTHING
    payee: str = ""
    priced: bool = False
    routes: tuple[str, ...] = ()
    is_local: bool = False
    begun: str = ""
    fingerprint: str = ""
    asks: Asked = NOT_ASKED
    said_key: str = ""

    run_id: str = ""
    reset_key: MarkKey = reset_mark("")

    def __post_init__(self) -> None:
        run_id, reset_key = _run_of(self.node_id)
        force_setattr(self, "run_id", run_id)
        force_setattr(self, "reset_key", reset_key)

    @property
    def shown(self) -> str:
        """The name for messages that a model reads: no path that a seller's redirect has named."""
        return self.begun or self.name

    def at(self, amount: Nanos, payee: str = "") -> Step:
        """Return the step at its price."""
        return replace(self, amount=amount, payee=payee, priced=True)


def shown_host(host: str, begun: str, words: str = "") -> str:
    """Return *words*, or ``host …``, for messages that a model reads.

    A host that only a redirect has named is shown by the first hop's name, *begun*; so is one whose name is cut in it.
    """
    own = begun.partition(" ")[2].partition("/")[0]
    is_own = not begun or own == plain_host(host.lower())
    return (words or f"host {host}") if is_own else f"the host that {begun} redirected to"


def run_of(node_id: str) -> str:
    """Return the run of a budget: the id of its outermost session. Children share its counters."""
    return node_id.split("/", 1)[0]


@lru_cache(maxsize=256)
def _run_of(node_id: str) -> tuple[str, MarkKey]:
    return run_of(node_id), reset_mark(run_of(node_id))


def short_route(method: str, host: str, path: str) -> str:
    """Return a request's route, ``GET host/path``, as a policy names it; in any spelling, cut to 200 characters."""
    return whole_routes(method, host, path)[0][:_LONGEST_NAME]


@lru_cache(maxsize=1024)
def whole_routes(method: str, host: str, path: str) -> tuple[str, ...]:
    """Return the same in full, for rules, in all the ways in which a server may read it; the plain one first."""
    return tuple([f"{method.upper()} {plain_host(host.lower())}{read}" for read in readings(path)])


def is_named(pattern: str, step: Step, *, frees: bool = False) -> bool:
    """Return whether the owner's *pattern* names a step: a tool in any spelling, or a host or route in any reading.

    *frees*: what it names is limited less than other steps; see ``matches_route``.
    """
    if pattern == "*":
        return True
    return _is_named(pattern, step.name, step.routes, is_tool=step.kind is HoldKind.TOOL, frees=frees)


def is_tool_paid(pattern: str, step: Step) -> bool:
    """Return whether a step is the payment for a use of a tool that *pattern* names: it repeats as the tool does."""
    return step.is_local and not is_route(pattern) and matches_name(pattern, step.name.partition(" ")[2], within=False)


@lru_cache(maxsize=1024)
def _is_named(pattern: str, name: str, routes: tuple[str, ...], *, is_tool: bool, frees: bool) -> bool:
    if any(matches_route(pattern, route, frees=frees) for route in routes or (name,)):  # a name is cut
        return True
    if is_tool:
        return matches_name(pattern, name, within=False)
    return not is_route(name) and matches_word(pattern, name)  # a model whose use is recorded


def step_of(hold: Hold) -> Step:
    """Return the step that a hold was written for."""
    purpose = hold.purpose
    url = urlsplit(purpose.url)
    where = (purpose.method, purpose.host, url.path)
    name, routes = (short_route(*where), whole_routes(*where)) if purpose.method else (purpose.tool, ())
    payee, is_local = "" if hold.intent is None else hold.intent.payee, url.scheme == LOCAL
    return Step(
        hold.kind, name, purpose.step, hold.node_id, hold.amount, payee, priced=True, routes=routes, is_local=is_local
    )


def request_key(
    kind: HoldKind,
    method: str,
    url: str,
    body: bytes | Said,
    ignored: Collection[str],
    *,
    similar: bool = False,
) -> str:
    """Return the deduplication key of a request: kind, method, URL with its query, and its *body*, or what that says.

    A JSON body counts without its own fields that are *ignored*. Path and query always count in full, parameters in any
    order and spelling. *similar*: see ``_digest``.
    """
    parts = urlsplit(url)
    host, scheme = plain_host(parts.hostname or ""), parts.scheme
    port = None if parts.port == _PORTS.get(scheme) else parts.port
    pairs = parse_qsl(parts.query, keep_blank_values=True, errors="surrogateescape") if parts.query else []
    query = sorted(pairs, key=itemgetter(0))  # values of one name keep their order
    said = _counted(read_body(body) if isinstance(body, bytes) else body, ignored)
    return _digest([kind, method, [scheme, host, port, spelt_path(parts.path), query], said], similar=similar)


_PORTS: Final = {"http": 80, "https": 443}
_NO_BODY: Final = hashlib.sha256(b"").hexdigest()
_MOST_READ: Final = 2**18
"""The most bytes of a body that are read: a larger one would stop the event loop, for a second at 16 MB."""


def _parts_of(body: bytes) -> str:
    """Return SHA-256 over the parts of a multipart body (RFC 2046, 5.1.1), whose boundary a client draws for each request."""
    line = body[:_LONGEST_LINE].partition(b"\r\n")[0]
    if len(line) == _LONGEST_LINE or not body.rstrip(b"\r\n").endswith(line + b"--"):
        return hashlib.sha256(body).hexdigest()
    digest = hashlib.sha256(b"multipart")
    for part in (b"\r\n" + body).split(b"\r\n" + line):
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


_LONGEST_LINE: Final = 73
"""In bytes, over that of a boundary: two hyphens and 70 characters."""


Said = str | Mapping[str, Any] | list[Any]
"""What a body says: a JSON object, a list, or the hash of any other one."""


def read_body(body: bytes) -> Said:
    """Return what a body says.

    A JSON body of up to 256 KiB counts by its content, whatever its order and spaces, a form by its parts, and any other
    one by its bytes.
    """
    if not body:
        return _NO_BODY
    if body.startswith(b"--"):
        return _parts_of(body)
    if len(body) > _MOST_READ:
        return hashlib.sha256(body).hexdigest()
    try:
        if body.lstrip()[:1] == b"[":
            read = read_object(b'{"listed":' + body + b"}")
            return list(read["listed"]) if len(read) == 1 else hashlib.sha256(body).hexdigest()
        return read_object(body)
    except NotReadable:
        return hashlib.sha256(body).hexdigest()


def _counted(said: Said, ignored: Collection[str]) -> Said:
    if isinstance(said, Mapping):
        return masked(said, ignored)
    if isinstance(said, list):
        return [masked(item, ignored) if isinstance(item, Mapping) else item for item in said]
    return said


def tool_key(
    tool: str,
    arguments: Mapping[str, Any] | None,
    ignored: Collection[str],
    amount: Nanos = NOTHING,
    *,
    similar: bool = False,
) -> str:
    """Return the deduplication key of a tool use. Without arguments it is that of its name and *amount*: a bare key.

    Times count even if they are *ignored*: they are part of what a tool is asked for. *similar*: see ``_digest``.
    """
    if arguments is None:
        return bare_key(HoldKind.TOOL, tool, amount)
    return _digest([HoldKind.TOOL, tool, masked(arguments, set(ignored) - _TIMES)], similar=similar)


def messages_key(model: str, messages: object, *, similar: bool) -> str:
    """Return the deduplication key of a reported LLM call: the model, and what was sent to it.

    *similar*: the last message alone counts, because the history of an agent that repeats itself grows.
    """
    said = messages[-1:] if similar and isinstance(messages, list) else messages
    return _digest([HoldKind.LLM, model, said], similar=similar)


def last_said(model: str, body: Mapping[str, Any]) -> str:
    """Return the key of the model, a conversation, and the last message of an LLM request; "" for none.

    However much came between: the history of an agent that repeats itself grows. A conversation is known by its
    instructions, its sampling and its first two messages. What a function returned counts with the call of it, which may
    have no id.
    """
    listed: Any = next((body[name] for name in ("messages", "input", "contents", "prompt") if body.get(name)), None)
    if listed is None:
        return ""
    first: Any = None
    last = listed
    if isinstance(listed, list):
        first, last = listed[:2], listed[-1:]
        if "functionResponse" in str(last)[:_MOST_LOOKED_AT]:
            last = listed[-2:]
    around = [body.get(name) for name in _AROUND]
    return _digest([HoldKind.LLM, model, around, first, last])


_AROUND: Final = (
    "system", "instructions", "systemInstruction", "system_instruction", "seed", "temperature", "top_p",
    "generationConfig",
)  # fmt: skip
"""What a call asks for beside its messages; a sweep over seeds asks each time for something new."""

_MOST_LOOKED_AT: Final = 4_096


def state_step(state: object, node_id: str) -> Step:
    """Return the step of an agent that reports its *state*; the key is its hash.

    Raises ``TypeError`` for what is no plain JSON: an object's own text would differ each time.
    """
    json.dumps(state)
    return Step(HoldKind.TOOL, "session.step", _digest(["state", state]), node_id)


_BARE: Final = "~"


def bare_key(kind: HoldKind, name: str, amount: Nanos) -> str:
    """Return the deduplication key of a step of which no more is known than its name and amount."""
    return _BARE + _digest([kind, name, amount])


def is_bare(key: str) -> bool:
    """True for a key of a name and an amount alone: equal keys may stand for different calls."""
    return key.startswith(_BARE)


def masked(value: Mapping[str, Any], ignored: Collection[str]) -> dict[str, Any]:
    """Return a decoded JSON object without its own fields that are ignored."""
    return {key: item for key, item in value.items() if key not in ignored}


_VARIES: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|\b[0-9a-f]{8,}\b|\d+", re.IGNORECASE)


def _digest(parts: list[Any], *, similar: bool = False) -> str:
    """Return SHA-256 in hex of *parts* as JSON. *similar*: numbers, dates and ids that alone differ make no difference."""
    text = _ENCODED(parts)
    if similar:
        text = _VARIES.sub("#", text)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _number(value: object) -> object:
    """Return a decimal such that 1, 1.0, 1.00 and 1e0 are the same, and differ from any text."""
    shown = value.normalize(_EXACT) if isinstance(value, Decimal) and value.is_finite() else value
    if isinstance(shown, Decimal) and shown == shown.to_integral_value(context=_EXACT):
        return int(shown)
    return [type(value).__name__, str(shown)]


_EXACT: Final = Context(prec=1_000)
"""More digits than a number that is read may have."""


_ENCODED: Final = json_writer(sort_keys=True, separators=(",", ":"), default=_number)
