"""Reads a request's body: text to count, media, and parts whose cost the body's size does not bound."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct, field

from x402guard.vendors.media import Media
from x402guard.vendors.routes import Route

_DATA_URL: Final = re.compile(r"data:(?P<mime>[\w.+/-]*)(?:;[\w=.+-]+)*;base64,", re.ASCII | re.IGNORECASE)

_LINK_KEYS: Final = {
    "image_url": "image_url",
    "video_url": "video",
    "audio_url": "audio",
    "document_url": "document",
    "file_url": "document",
    "fileUri": "document",
    "file_uri": "document",
}
_OPAQUE: Final = frozenset(
    {"tools", "arguments", "args", "parameters", "metadata", "logit_bias", "documents", "document"}
)
"""Keys whose values a model reads as text, whatever they hold: schemas and the arguments of tool calls."""

_LONGEST_SCHEME: Final = 20
_PARTS: Final = {
    "audio": "audio",
    "image": "image_url",
    "input_audio": "audio",
    "input_image": "image_url",
    "input_video": "video",
    "video": "video",
}
"""Types of parts whose link may stand in a field of the same name → what it leads to."""
_SCHEMAS: Final = re.compile(r"(.*_)?schema|.*Schema")

_Where = tuple[Any, ...]
"""The path of a value, as (path of its parent, key)."""


class Content(Struct):
    """The result of ``read_content``.

    Attributes:
        texts: every text, as the model reads it; the last one has the names.
        names: the keys of structured parts.
        numbers: the tokens of numbers: one for a token id, else one for each character.
        media: images, audio, video and documents in the body.
        unbounded: the parts whose cost the body's size does not bound.
    """

    texts: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    numbers: int = 0
    media: list[Media] = field(default_factory=list)
    unbounded: list[Unbounded] = field(default_factory=list)


_FRAME: Final = frozenset(
    {"call_id", "content", "function", "id", "input", "name", "parts", "role", "source", "text", "tool_call_id",
     "tool_calls", "tool_use_id", "type"}
)  # fmt: skip
"""Keys of messages and their parts, which count with the frame of a message."""


def read_content(body: Mapping[str, Any], skip: frozenset[str], *, has_token_ids: bool = False) -> Content:
    """Return the content of *body* without the top-level keys in *skip*. Not recursive: a body may be nested deeply.

    *has_token_ids*: its numbers are the ids of tokens.
    """
    content = Content()
    pending = list(_read_object({key: value for key, value in body.items() if key not in skip}, (), content))
    while pending:
        value, where = pending.pop()
        if isinstance(value, str):
            content.texts.append(value)
        elif isinstance(value, list):
            pictures = where[1:] == ("images",)
            for index, item in enumerate(value):
                if pictures and isinstance(item, str):
                    _read_link(item, (where, index), content, "", "image_url")
                else:
                    pending.append((item, (where, index)))
        elif isinstance(value, dict):
            pending.extend(_read_object(value, where, content))
        elif value is not None and not isinstance(value, bool):
            content.numbers += 1 if has_token_ids else len(str(value))
    if content.names:
        content.texts.append('","'.join(content.names))
    return content


def _read_object(value: dict[str, Any], where: _Where, content: Content) -> Iterator[tuple[Any, _Where]]:
    """Add the recognised parts of an object to *content*, and yield its other values."""
    taken = _media(value, where, content) | _stored(value, where, content)
    detail = str(value.get("detail") or "")
    parent = where[1] if where else None
    for key, item in value.items():
        at = (where, key)
        if key in taken:
            continue
        if len(where) > 1 and key not in _FRAME:
            content.names.append(key)
        if _is_opaque(key, item, value):
            content.texts.append(item if isinstance(item, str) else _dumped(item))
        elif key in _LINK_KEYS and isinstance(item, str):
            _read_link(item, at, content, detail, _LINK_KEYS[key])
        elif key == "url" and isinstance(item, str) and parent in _LINK_KEYS:
            _read_link(item, at, content, detail, _LINK_KEYS[parent])
        elif key == "source" and isinstance(item, dict) and isinstance(item.get("url"), str):
            _read_link(
                item["url"], (at, "url"), content, "", "image_url" if value.get("type") == "image" else "document"
            )
        else:
            yield item, at


def _is_opaque(key: str, item: Any, parent: Mapping[str, Any]) -> bool:
    called = parent.get("type") in ("tool_use", "server_tool_use", "mcp_tool_use")
    return (
        (key in _OPAQUE and (key != "document" or isinstance(item, dict)))
        or _SCHEMAS.fullmatch(key) is not None
        or (key == "input" and called)
        or (key == "response" and isinstance(item, dict))
    )


def _stored(value: Mapping[str, Any], where: _Where, content: Content) -> frozenset[str]:
    """Add an object's references to data stored by the provider; return their keys."""
    if value.get("type") == "item_reference" or _is_stored_item(value, where):
        content.unbounded.append(Unbounded(_field(where), "stored_conversation"))
        return frozenset({"id"})
    if where[1:] == ("audio",) and isinstance(value.get("id"), str):
        content.unbounded.append(Unbounded(_field(where), "audio"))
        return frozenset({"id"})
    files = [key for key in ("file_id", "fileId") if isinstance(value.get(key), str)]
    content.unbounded.extend(Unbounded(_field((where, key)), "document") for key in files)
    return frozenset(files)


_ENVELOPE: Final = frozenset({"id", "phase", "role", "status", "type"})
_PAYLOADS: Final[Mapping[str, str]] = {
    "code_interpreter_call": "outputs",
    "compaction": "encrypted_content",
    "file_search_call": "results",
    "image_generation_call": "result",
    "mcp_call": "output",
    "reasoning": "encrypted_content",
    "web_search_call": "results",
}
"""Type of an item of a Responses input → the field with what the model reads of it; without it, it is read from the store."""


def _is_stored_item(value: Mapping[str, Any], where: _Where) -> bool:
    """True for an item of a Responses input with an id and no payload of its own: the provider has stored the payload."""
    of_input = len(where) == 2 and isinstance(where[1], int) and where[0] == ((), "input")
    if not of_input or not isinstance(value.get("id"), str):
        return False
    payload = _PAYLOADS.get(str(value.get("type")))
    if payload is not None:
        return value.get(payload) in _EMPTY
    return all(item in _EMPTY for key, item in value.items() if key not in _ENVELOPE)


_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})


def _media(value: dict[str, Any], where: _Where, content: Content) -> frozenset[str]:
    """Add an object's base64 part with its own type to the media; return its keys."""
    data = value.get("data")
    mime = value.get("media_type") or value.get("mimeType") or value.get("mime_type")
    if isinstance(data, str) and isinstance(mime, str):
        if mime.startswith("text/") and value.get("type") == "text":
            return frozenset()
        content.media.append(Media.of(_field((where, "data")), mime, data))
        return frozenset({"data"})
    named = value.get("type")
    said = value.get(named) if isinstance(named, str) and named in _PARTS else None
    if isinstance(said, str) and ("://" in said[:_LONGEST_SCHEME] or said.startswith("data:")):
        _read_link(said, (where, str(named)), content, "", _PARTS[str(named)])
        return frozenset({str(named)})
    if isinstance(data, str) and where[1:] == ("input_audio",):
        if "://" in data[:_LONGEST_SCHEME]:
            content.unbounded.append(Unbounded(_field((where, "data")), "audio"))
            return frozenset({"data"})
        content.media.append(Media.of(_field((where, "data")), "audio/any", data))
        return frozenset({"data"})
    filed = value.get("file_data")
    if isinstance(filed, str):
        match = _DATA_URL.match(filed)
        mime = match["mime"] if match else "application/octet-stream"
        content.media.append(Media.of(_field((where, "file_data")), mime, filed[match.end() if match else 0 :]))
        return frozenset({"file_data"})
    return frozenset()


def _read_link(text: str, where: _Where, content: Content, detail: str, kind: str) -> None:
    """Read a link: a data URL holds the media itself; any other URL is fetched by the provider, so it is unbounded."""
    match = _DATA_URL.match(text)
    if match is None:
        content.unbounded.append(Unbounded(_field(where), kind))
    else:
        content.media.append(Media.of(_field(where), match["mime"] or "text/plain", text[match.end() :], detail))


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def _field(where: _Where) -> str:
    parts: list[str] = []
    while where:
        where, key = where
        parts.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(parts)).lstrip(".")[:200]


ALLOWANCES: Final = (
    "audio",
    "cached_content",
    "code_execution",
    "computer_use",
    "document",
    "file_search",
    "image_generation",
    "image_url",
    "mcp",
    "model_fallback",
    "provider_tool",
    "stored_conversation",
    "video",
    "web_fetch",
    "web_search",
)
"""Every kind that can have an allowance; ``provider_tool`` is any tool without its own kind."""


class Unbounded(Struct, frozen=True):
    """A part of the body at path ``field``, of a kind in ``ALLOWANCES``, whose cost the body's size does not bound."""

    field: str
    kind: str


_FIELDS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "chat": (
        ("web_search_options", "web_search"),
        ("search_parameters", "web_search"),
        ("search_settings", "web_search"),
        ("models", "model_fallback"),
        ("compound_custom", "provider_tool"),
        ("data_sources", "file_search"),
    ),
    "responses": (
        ("multi_agent", "provider_tool"),
        ("previous_response_id", "stored_conversation"),
        ("conversation", "stored_conversation"),
        ("prompt", "stored_conversation"),
        ("context_management", "stored_conversation"),
        ("search_parameters", "web_search"),
        ("models", "model_fallback"),
    ),
    "messages": (("mcp_servers", "mcp"), ("container", "code_execution"), ("fallbacks", "model_fallback")),
    "gemini": (("cachedContent", "cached_content"), ("cached_content", "cached_content")),
    "cohere": (("connectors", "web_search"),),
    "converse": (("guardrailConfig", "provider_tool"), ("additionalModelRequestFields", "provider_tool")),
}
_MODELS: Final = (
    (re.compile(r":online\b"), "web_search"),
    (re.compile(r"-search(-preview|-api)?\b|deep-research"), "web_search"),
    (re.compile(r"\bcompound\b|\bmulti-agent\b"), "provider_tool"),
)
_OPENROUTERS_MODELS: Final = (
    (re.compile(r"\bimage\b"), "image_generation"),
    (re.compile(r"^perplexity/"), "web_search"),
)
"""Models that cost more than their tokens there, by prices that the book does not have."""
_CLIENT_TYPES: Final = frozenset(
    {"function", "custom", "local_shell", "apply_patch", "computer_use_preview", "computer"}
)
_CLIENT_ANTHROPIC: Final = re.compile(r"(custom|bash_\d+|text_editor_\d+|computer_\d+|memory_\d+)")
_CLIENT_GEMINI: Final = frozenset({"functionDeclarations", "function_declarations", "computerUse", "computer_use"})
_KINDS: Final = (
    (re.compile(r"web_?fetch|url_?context"), "web_fetch"),
    (re.compile(r"web_?search|google_?search|google_?maps|enterprise_?web|browser_?search|x_search"), "web_search"),
    (re.compile(r"file_?search|retrieval|collections"), "file_search"),
    (re.compile(r"code_?(interpreter|execution)|container|shell"), "code_execution"),
    (re.compile(r"image_?generation"), "image_generation"),
    (re.compile(r"mcp"), "mcp"),
    (re.compile(r"computer"), "computer_use"),
)


def tools_of(body: Mapping[str, Any]) -> list[Any]:
    """Return the tools that a request declares; an object is a list of one."""
    tools = body.get("tools")
    return tools if isinstance(tools, list) else [] if tools is None else [tools]


def declared_tools(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (field, tool) for every tool that a request declares: at its top, and in the items of its conversation."""
    for index, tool in enumerate(tools_of(body)):
        yield f"tools[{index}]", tool
    for key in ("input", "messages", "system"):
        for place, item in _items(body.get(key), key):
            yield from _added_tools(item, place)
            for inner, block in _items(item.get("content"), f"{place}.content"):
                yield from _added_tools(block, inner)


def _items(value: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for index, item in enumerate(value if isinstance(value, list) else ()):
        if isinstance(item, dict):
            yield f"{place}[{index}]", item


def _added_tools(item: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """Yield the tools that one item adds: OpenAI's ``additional_tools`` and found tools, Anthropic's ``tool_addition``."""
    for index, tool in enumerate(tools_of(item)):
        yield f"{place}.tools[{index}]", tool
    added = item.get("tool")
    if isinstance(added, dict) and "definition" in added:
        yield f"{place}.tool.definition", added["definition"]


_PLUGINS: Final[Mapping[str, str | None]] = {
    "auto-router": "model_fallback",
    "context-compression": None,
    "file-parser": "document",
    "moderation": None,
    "response-healing": None,
    "web": "web_search",
}
"""OpenRouter's plugins → the kind of what they add; None for those that cost nothing beside the tokens."""


def _plugins_of(body: Mapping[str, Any]) -> list[Any]:
    plugins = body.get("plugins")
    return plugins if isinstance(plugins, list) else [] if plugins is None else [plugins]


def find_unknown(body: Mapping[str, Any]) -> str | None:
    """Return the first field of a request that adds what cannot be known from the request, with the reason; or None."""
    for name in ("extra_body", "preset"):
        if body.get(name) not in _EMPTY:
            return f"{name}: what it adds to the request is not in the request; leave it out"
    for name, tool in declared_tools(body):
        if not isinstance(tool, dict):
            return f"{name}: a {type(tool).__name__} is not an object"
    for index, plugin in enumerate(_plugins_of(body)):
        known = plugin.get("id") if isinstance(plugin, dict) else None
        if not isinstance(known, str) or known not in _PLUGINS:
            return f"plugins[{index}]: it is not a known plugin; leave it out"
    return None


def find_unbounded(route: Route, model: str, body: Mapping[str, Any]) -> Iterator[Unbounded]:
    """Yield the fields of a request whose cost its size does not bound, except links to media."""
    flavour = "chat" if route.flavour == "completions" else route.flavour
    for name, kind in _FIELDS.get(flavour, ()):
        asked = body.get(name)
        is_off = isinstance(asked, dict) and asked.get("enabled") is False
        if asked not in (None, [], "", False) and not is_off:  # an empty object enables a search
            yield Unbounded(name, kind)
    if route.flavour == "messages" and "compact" in str(body.get("context_management")):
        yield Unbounded("context_management", "stored_conversation")  # a compaction is billed as a separate call
    for index, plugin in enumerate(_plugins_of(body)):
        kind_of_plugin = _PLUGINS.get(str(plugin.get("id"))) if isinstance(plugin, dict) else None
        if kind_of_plugin is not None:
            yield Unbounded(f"plugins[{index}]", kind_of_plugin)
    if route.flavour in ("chat", "responses"):
        for pattern, kind in _MODELS:
            if pattern.search(model):
                yield Unbounded("model", kind)
    if route.provider == "openrouter":
        for pattern, kind in _OPENROUTERS_MODELS:
            if pattern.search(model):
                yield Unbounded("model", kind)
    if route.flavour == "gemini":
        for outer in ("generationConfig", "generation_config"):
            config = body.get(outer)
            for inner in ("routingConfig", "routing_config"):
                if isinstance(config, dict) and config.get(inner) not in _EMPTY:
                    yield Unbounded(f"{outer}.{inner}", "model_fallback")  # Vertex may take another model
    if route.flavour == "converse":
        config = body.get("toolConfig")
        listed = config.get("tools") if isinstance(config, dict) else None
        for index, tool in enumerate(listed if isinstance(listed, list) else ()):
            if not isinstance(tool, dict) or tool.keys() - {"toolSpec", "cachePoint"}:
                yield Unbounded(f"toolConfig.tools[{index}]", "provider_tool")
    for field_name, tool in declared_tools(body):
        for name in _run_by_provider(route, tool):
            yield Unbounded(f"{field_name}.{name}"[:200], kind_of(name if name != "type" else str(tool["type"])))


def _run_by_provider(route: Route, tool: Any) -> Iterator[str]:
    """Yield the key that shows that the provider runs and bills a tool, or ``type`` if its value shows it."""
    if route.flavour == "gemini":
        yield from (key for key, value in tool.items() if key not in _CLIENT_GEMINI and value is not None)
        return
    kind = tool.get("type")
    place = tool.get("environment")
    if kind == "shell" and isinstance(place, dict) and place.get("type") == "local":
        return
    if route.flavour == "messages":
        if kind is not None and not _CLIENT_ANTHROPIC.fullmatch(str(kind)):
            yield "type"
    elif kind is not None and str(kind) not in _CLIENT_TYPES:
        yield "type"


def kind_of(name: str) -> str:
    """Return the kind of a tool, one of ``ALLOWANCES``, by its name."""
    lower = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    return next((kind for pattern, kind in _KINDS if pattern.search(lower)), "provider_tool")
