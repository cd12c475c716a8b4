"""What an agent's tool came to, as a message to its model: Anthropic's and OpenAI's dialects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

Dialect = Literal["anthropic", "openai", "openai_responses"]


def as_tool_result(tool_use_id: str, told: Mapping[str, Any], dialect: Dialect | None = None) -> dict[str, Any]:
    """Return what is *told* as the result of a tool call that failed.

    Without a *dialect* the id tells: OpenAI's begin with ``call_`` or ``fc_``. Raises ``ValueError`` for an id that is empty and a
    dialect that is not known.
    """
    if not isinstance(tool_use_id, str) or not tool_use_id:
        raise ValueError(f"tool_use_id: {tool_use_id!r} is not the id of a tool call; take it from the model's request")
    if dialect is None:
        dialect = "openai" if tool_use_id.startswith(("call_", "fc_")) else "anthropic"
    text = json.dumps(dict(told), ensure_ascii=False).encode("utf-8", "replace").decode()  # no halves of characters
    match dialect:
        case "anthropic":
            return {"type": "tool_result", "tool_use_id": tool_use_id, "is_error": True, "content": text}
        case "openai":
            return {"role": "tool", "tool_call_id": tool_use_id, "content": text}
        case "openai_responses":
            return {"type": "function_call_output", "call_id": tool_use_id, "output": text}
        case _:
            raise ValueError(f"dialect: {dialect!r} is none of {', '.join(get_args(Dialect))}")
