"""OpenAI's Responses: input and output by other names, and tools that the provider runs, each call at a price of its own.

A search costs $10 per 1,000, a file search $2.50. Of web search calls only those that search are charged: opening a page
and looking for a word in it are free.
"""

from typing import Any

from tests.data.bills_shape import CEILING, SSE, Bill, cut, events, text

URL = "https://api.openai.com/v1/responses"
SEARCH = {
    "type": "web_search",
    "filters": None,
    "search_context_size": "medium",
    "user_location": {"type": "approximate", "city": None, "country": "US", "region": None, "timezone": None},
}
FILES = {
    "type": "file_search",
    "filters": None,
    "max_num_results": 20,
    "ranking_options": {"ranker": "auto", "score_threshold": 0.0},
    "vector_store_ids": ["vs_68f0c1"],
}


def ask(model: str, words: int, limit: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "input": text(words), "max_output_tokens": limit, **more}


def usage(into: int, out: int, *, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": into,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": out,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": into + out,
    }


def message(said: str = "Grüße, 世界 🌍", status: str = "completed") -> dict[str, Any]:
    content = [{"type": "output_text", "annotations": [], "logprobs": [], "text": said}]
    return {"id": "msg_68f0c1", "type": "message", "status": status, "content": content, "role": "assistant"}


def searched(**action: Any) -> dict[str, Any]:
    return {"id": "ws_68f0c1", "type": "web_search_call", "status": "completed", "action": action}


def looked_up(query: str) -> dict[str, Any]:
    return {"id": "fs_68f0c1", "type": "file_search_call", "status": "completed", "queries": [query], "results": None}


def response(
    model: str, used: dict[str, Any] | None, *output: dict[str, Any], status: str = "completed", **more: Any
) -> dict[str, Any]:
    searches = sum(item.get("action", {}).get("type") == "search" for item in output)
    split = {"image_tokens": 0, "text_tokens": 0}
    drawn = {"input_tokens": 0, "input_tokens_details": split, "output_tokens": 0, "output_tokens_details": split}
    return {
        "id": "resp_68f0c1e2",
        "object": "response",
        "created_at": 1795348800,
        "status": status,
        "background": False,
        "billing": {"payer": "developer"},
        "completed_at": 1795348802 if status == "completed" else None,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "max_output_tokens": 2_000,
        "max_tool_calls": None,
        "model": model,
        "output": list(output),
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "prompt_cache_retention": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "auto" if status == "in_progress" else "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tool_usage": {"image_gen": {**drawn, "total_tokens": 0}, "web_search": {"num_requests": searches}},
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": used,
        "user": None,
        "metadata": {},
        **more,
    }


def streamed(model: str, used: dict[str, Any], *output: dict[str, Any], status: str = "completed", **more: Any) -> str:
    """Every event of a response: each item as it is added and done, the text of messages in between."""
    parts: list[dict[str, Any]] = []
    for kind in ("created", "in_progress"):
        parts.append({"type": f"response.{kind}", "response": response(model, None, status="in_progress", **more)})
    for index, item in enumerate(output):
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        empty = {**item, "status": "in_progress", **({"content": []} if item["type"] == "message" else {})}
        parts.append({"type": "response.output_item.added", "output_index": index, "item": empty})
        for said in item.get("content", ()):
            nothing = {**said, "text": ""}
            parts.append({"type": "response.content_part.added", **place, "part": nothing})
            for word in said["text"].split():
                parts.append({"type": "response.output_text.delta", **place, "delta": word, "logprobs": []})
            parts.append({"type": "response.output_text.done", **place, "text": said["text"], "logprobs": []})
            parts.append({"type": "response.content_part.done", **place, "part": said})
        parts.append({"type": "response.output_item.done", "output_index": index, "item": item})
    whole = response(model, used, *output, status=status, **more)
    parts.append({"type": f"response.{status}", "response": whole})
    return events(*({**part, "sequence_number": number} for number, part in enumerate(parts)))


_THOUGHT = {"id": "rs_68f0c1", "type": "reasoning", "summary": []}
_QUERY = {"type": "search", "query": "newest opinions", "queries": ["newest opinions"], "sources": None}

RESPONSES: list[Bill] = [
    Bill(
        name="responses-cached-lies-inside-the-input",
        url=URL,
        request=ask("gpt-4.1", 328, limit=100),
        answer=response("gpt-4.1-2025-04-14", usage(328, 52, cached=128), message()),
        nanos=880_000,
        arithmetic="200 in x 2,000 + 128 cached x 500 + 52 out x 8,000 = 880,000",
    ),
    Bill(
        name="responses-reasoning-lies-inside-the-output",
        url=URL,
        request=ask("gpt-5", 81, limit=2_000, reasoning={"effort": "medium"}),
        answer=response("gpt-5-2025-08-07", usage(81, 1_035, reasoning=832), _THOUGHT, message()),
        nanos=10_451_250,
        arithmetic="81 in x 1,250 + 1,035 out x 10,000 = 10,451,250",
    ),
    Bill(
        name="responses-auto-became-flex",
        url=URL,
        request=ask("o3", 400, limit=1_000, service_tier="auto"),
        answer=response("o3-2025-04-16", usage(400, 600, reasoning=512), _THOUGHT, message(), service_tier="flex"),
        nanos=2_800_000,
        arithmetic="400 in x 1,000 + 600 out x 4,000 = 2,800,000",
        genai="takes the tier from its caller, not from the answer: flex",
    ),
    Bill(
        name="responses-two-searches",
        url=URL,
        request=ask("gpt-4o", 2_000, limit=500, tools=[{"type": "web_search"}]),
        answer=response(
            "gpt-4o-2024-08-06", usage(2_000, 300), searched(**_QUERY), searched(**_QUERY), message(), tools=[SEARCH]
        ),
        nanos=28_000_000,
        arithmetic="2,000 in x 2,500 + 300 out x 10,000 + 2 searches x 10,000,000 = 28,000,000",
        genai="counts no web searches in a response",
    ),
    Bill(
        name="responses-a-page-opened-is-no-search",
        url=URL,
        request=ask("gpt-5", 3_000, limit=1_000, tools=[{"type": "web_search"}]),
        answer=response(
            "gpt-5-2025-08-07",
            usage(3_000, 500, reasoning=320),
            _THOUGHT,
            searched(**_QUERY),
            searched(type="open_page", url="https://courts.example/opinion/42"),
            searched(type="find_in_page", url="https://courts.example/opinion/42", pattern="fee"),
            message(),
            tools=[SEARCH],
        ),
        nanos=18_750_000,
        arithmetic="3,000 in x 1,250 + 500 out x 10,000 + 1 search x 10,000,000 = 18,750,000",
        genai="counts no web searches in a response",
    ),
    Bill(
        name="responses-two-file-searches",
        url=URL,
        request=ask("gpt-4o", 1_500, limit=500, tools=[{"type": "file_search", "vector_store_ids": ["vs_68f0c1"]}]),
        answer=response(
            "gpt-4o-2024-08-06", usage(1_500, 200), looked_up("fees"), looked_up("costs"), message(), tools=[FILES]
        ),
        nanos=10_750_000,
        arithmetic="1,500 in x 2,500 + 200 out x 10,000 + 2 file searches x 2,500,000 = 10,750,000",
        genai="counts no file searches in a response",
    ),
    Bill(
        name="responses-stream",
        url=URL,
        request=ask("gpt-4o-mini", 36, limit=100, stream=True),
        stream=streamed("gpt-4o-mini-2024-07-18", usage(36, 87), message()),
        content_type=SSE,
        nanos=57_600,
        arithmetic="36 in x 150 + 87 out x 600 = 57,600",
    ),
    Bill(
        name="responses-stream-that-searched",
        url=URL,
        request=ask("gpt-4o", 1_000, limit=200, stream=True, tools=[{"type": "web_search"}]),
        stream=streamed("gpt-4o-2024-08-06", usage(1_000, 100), searched(**_QUERY), message(), tools=[SEARCH]),
        content_type=SSE,
        nanos=13_500_000,
        arithmetic="1,000 in x 2,500 + 100 out x 10,000 + 1 search x 10,000,000 = 13,500,000",
        genai="counts no web searches in a response",
    ),
    Bill(
        name="responses-stream-that-met-its-limit",
        url=URL,
        request=ask("gpt-5-mini", 90, limit=256, stream=True),
        stream=streamed("gpt-5-mini-2025-08-07", usage(90, 256, reasoning=256), _THOUGHT, status="incomplete"),
        content_type=SSE,
        nanos=534_500,
        arithmetic="90 in x 250 + 256 out x 2,000 = 534,500",
    ),
    Bill(
        name="responses-stream-cut-off",
        url=URL,
        request=ask("gpt-4o-mini", 36, limit=400, stream=True),
        stream=cut(streamed("gpt-4o-mini-2024-07-18", usage(36, 87), message()), before="response.output_text.done"),
        content_type=SSE,
        nanos=CEILING,
        arithmetic="400 out x 600 = 240,000",
        genai="no usage ever came",
        evidence="assumed",
    ),
]
