"""One answer to every request, whole or in pieces, and what the books say of a call that it is given to."""

import json

import httpx

from tests.support.merchant import client

ANTHROPIC = "https://api.anthropic.com/v1/messages"
CLAUDE = {"model": "claude-sonnet-4-5", "max_tokens": 4_000, "messages": [{"role": "user", "content": "hi " * 20}]}


def replies(body, status=200, kind="application/json"):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda request: httpx.Response(status, headers={"content-type": kind}, content=content)


def posted(session, url, request, body, **more):
    response = client(session, replies(body, **more)).post(url, json=request)
    return response, session.report().to_dict()


def message(**usage):
    return {"type": "message", "model": "claude-sonnet-4-5", "content": [], "stop_reason": "end_turn", "usage": usage}


def used(into, out):
    return {"prompt_tokens": into, "completion_tokens": out}
