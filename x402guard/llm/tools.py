"""What a request may cost beyond its own size and output: tools that the provider runs, and what it has stored."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from x402guard.llm.routes import Route

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
    "plugin",
    "provider_tool",
    "stored_conversation",
    "video",
    "web_fetch",
    "web_search",
)
"""Every kind that an owner can set an allowance for; ``provider_tool`` is any tool that has no kind of its own."""


@dataclass(frozen=True, slots=True)
class Unbounded:
    """Something whose cost the size of the body does not bound.

    Attributes:
        field: where it stands in the body.
        kind: one of ``ALLOWANCES``.
    """

    field: str
    kind: str


_FIELDS: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "chat": (
        ("web_search_options", "web_search"),
        ("search_parameters", "web_search"),
        ("search_settings", "web_search"),
        ("plugins", "plugin"),
        ("models", "model_fallback"),
        ("compound_custom", "provider_tool"),
        ("data_sources", "file_search"),
    ),
    "responses": (
        ("previous_response_id", "stored_conversation"),
        ("conversation", "stored_conversation"),
        ("prompt", "stored_conversation"),
        ("search_parameters", "web_search"),
        ("plugins", "plugin"),
        ("models", "model_fallback"),
    ),
    "messages": (("mcp_servers", "mcp"), ("container", "code_execution")),
    "gemini": (("cachedContent", "cached_content"), ("cached_content", "cached_content")),
    "cohere": (("connectors", "web_search"),),
}
_MODELS: Final = (
    (re.compile(r":online\b"), "web_search"),
    (re.compile(r"-search(-preview|-api)?\b|deep-research"), "web_search"),
    (re.compile(r"\bcompound\b"), "provider_tool"),
)
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
    """Return the tools that a request declares, whatever they are."""
    tools = body.get("tools")
    return tools if isinstance(tools, list) else []


def find_unbounded(route: Route, model: str, body: Mapping[str, Any]) -> Iterator[Unbounded]:
    """Yield the fields of a request whose cost its size does not bound, links to media left out."""
    flavour = "chat" if route.flavour == "completions" else route.flavour
    for field, kind in _FIELDS.get(flavour, ()):
        if body.get(field) not in (None, [], "", False):  # an empty object switches a search on
            yield Unbounded(field, kind)
    if route.flavour == "messages" and "compact" in str(body.get("context_management")):
        yield Unbounded("context_management", "stored_conversation")  # what is summed up is billed as a call of its own
    if route.flavour in ("chat", "responses"):
        for pattern, kind in _MODELS:
            if pattern.search(model):
                yield Unbounded("model", kind)
    for index, tool in enumerate(tools_of(body)):
        for name in _run_by_provider(route, tool):
            yield Unbounded(f"tools[{index}].{name}", kind_of(name if name != "type" else str(tool["type"])))


def _run_by_provider(route: Route, tool: Any) -> Iterator[str]:
    """Yield the key, or ``type``, by which a tool is one that the provider runs and bills."""
    if not isinstance(tool, dict):
        return
    if route.flavour == "gemini":
        yield from (key for key, value in tool.items() if key not in _CLIENT_GEMINI and value is not None)
        return
    kind = tool.get("type")
    if route.flavour == "messages":
        if kind is not None and not _CLIENT_ANTHROPIC.fullmatch(str(kind)):
            yield "type"
    elif kind is not None and str(kind) not in _CLIENT_TYPES:
        yield "type"


def kind_of(name: str) -> str:
    """Return the kind of a tool by its name, one of ``ALLOWANCES``."""
    lower = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    return next((kind for pattern, kind in _KINDS if pattern.search(lower)), "provider_tool")
