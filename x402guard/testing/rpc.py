"""Serves an Engine as JSON-RPC 2.0 over HTTP."""

import json

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from x402guard.testing.engine import JSON, Engine, RpcError

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603


def rpc_app(engine: Engine) -> ASGIApp:
    """An ASGI application that answers JSON-RPC calls and batches, posted to `/`, from `engine`."""

    async def answer(request: Request) -> Response:
        try:
            message = json.loads(await request.body())
        except ValueError as error:
            return JSONResponse(_failure(None, RpcError(PARSE_ERROR, f"parse error: {error}")))
        # A thread, because the engine works for milliseconds and takes a lock.
        reply = await run_in_threadpool(_reply, engine, message)
        return JSONResponse(reply) if reply is not None else Response(status_code=204)

    return Starlette(routes=[Route("/", answer, methods=["POST"])])


def _reply(engine: Engine, message: JSON) -> JSON:
    if not isinstance(message, list):
        return _reply_to_one(engine, message)
    if not message:
        return _failure(None, RpcError(INVALID_REQUEST, "an empty batch"))
    replies = [reply for reply in (_reply_to_one(engine, each) for each in message) if reply is not None]
    return replies or None


def _reply_to_one(engine: Engine, call: JSON) -> JSON:
    if not isinstance(call, dict) or not isinstance(call.get("method"), str):
        return _failure(None, RpcError(INVALID_REQUEST, "not a JSON-RPC call"))
    call_id, params = call.get("id"), call.get("params", [])
    if not isinstance(params, list):
        return _failure(call_id, RpcError(INVALID_PARAMS, "params must be an array"))
    try:
        reply = {"jsonrpc": "2.0", "id": call_id, "result": engine.rpc(call["method"], params)}
    except RpcError as error:
        reply = _failure(call_id, error)
    except Exception as error:  # a call that breaks the engine must not stop the server
        reply = _failure(call_id, RpcError(INTERNAL_ERROR, f"{type(error).__name__}: {error}"))
    # In JSON-RPC, a call without an id is a notification and gets no answer.
    return reply if "id" in call else None


def _failure(call_id: JSON, error: RpcError) -> JSON:
    content = {"code": error.code, "message": error.message}
    if error.data is not None:
        content["data"] = error.data
    return {"jsonrpc": "2.0", "id": call_id, "error": content}
