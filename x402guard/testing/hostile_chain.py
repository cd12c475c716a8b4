"""Serves untrustworthy JSON-RPC in front of an honest engine: dead, hanging, stale, or lying."""

import json
import threading
from collections.abc import Callable
from types import MappingProxyType

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from x402guard.testing.engine import JSON, Engine, RpcError
from x402guard.testing.hostile_answers import Dropped
from x402guard.testing.server import Hosted, check_behaviour

_TAGS = ("latest", "safe", "finalized", "pending")
_SERVER_ERROR = -32000

CHAIN_LIES = MappingProxyType(
    {
        "honest": "answers like the engine",
        "dead": "closes every connection without an answer",
        "hangs": "does not answer for `stall_s` seconds",
        "garbage": "answers with invalid JSON",
        "wrong_chain": "answers another chain id",
        "stale": "answers as of the block at which `misbehave` was called, including its time",
        "denies_transactions": "shows no transaction and no receipt",
        "hides_logs": "shows receipts without logs, and finds no logs",
        "errors": "answers every call with a JSON-RPC error",
        "rate_limited": "answers 429",
        "null": "answers every call with null",
    }
)
"""The behaviours by name, each with its description."""


class HostileChain(Hosted):
    """JSON-RPC over HTTP in front of `engine`, which answers as `behaviour` says.

    `behaviour` is one of `CHAIN_LIES`; `misbehave` changes it at any time. `stall_s` is how long it hangs, in seconds.
    `asked` lists the called methods. The caller closes the engine.
    """

    def __init__(self, engine: Engine, *, behaviour: str = "honest", stall_s: float = 2.0) -> None:
        self.stall_s = stall_s
        self.behaviour = "honest"
        self._engine = engine
        self._lock = threading.Lock()
        self._asked: list[str] = []
        self._stale_at: JSON = None
        self._lies: dict[str, Callable[[str, list[JSON]], JSON]] = {
            "wrong_chain": self._elsewhere,
            "stale": self._as_of_then,
            "denies_transactions": self._unseen,
            "hides_logs": self._without_logs,
            "errors": self._broken,
            "null": lambda _method, _params: None,
        }
        self.misbehave(behaviour)
        self.app = Starlette(routes=[Route("/", self._answer, methods=["POST"])])

    def misbehave(self, behaviour: str) -> None:
        """Change the behaviour; raise KeyError for a name that is not in `CHAIN_LIES`."""
        check_behaviour(behaviour, CHAIN_LIES)
        if behaviour == "stale":
            self._stale_at = self._engine.rpc("eth_getBlockByNumber", ["latest", False])["number"]
        self.behaviour = behaviour

    @property
    def asked(self) -> list[str]:
        """A copy of the called methods, in order."""
        with self._lock:
            return list(self._asked)

    async def _answer(self, request: Request) -> Response:
        behaviour = self.behaviour
        message = json.loads(await request.body())
        with self._lock:
            self._asked.append(str(message.get("method")))
        if behaviour == "dead":
            return Dropped()
        if behaviour == "hangs":
            await anyio.sleep(self.stall_s)
            return Response(status_code=504)
        if behaviour == "rate_limited":
            return JSONResponse({"error": "too many requests"}, 429)
        if behaviour == "garbage":
            return Response(b"\xff<html>{", media_type="application/json")
        reply = await run_in_threadpool(self._reply, behaviour, message["method"], message.get("params", []))
        return JSONResponse({"jsonrpc": "2.0", "id": message.get("id")} | reply)

    def _reply(self, behaviour: str, method: str, params: list[JSON]) -> JSON:
        try:
            return {"result": self._lies.get(behaviour, self._engine.rpc)(method, params)}
        except RpcError as error:
            return {"error": {"code": error.code, "message": error.message}}

    def _elsewhere(self, method: str, params: list[JSON]) -> JSON:
        return hex(self._engine.chain_id + 1) if method == "eth_chainId" else self._engine.rpc(method, params)

    def _as_of_then(self, method: str, params: list[JSON]) -> JSON:
        if method == "eth_blockNumber":
            return self._stale_at
        if method in ("eth_getTransactionReceipt", "eth_getTransactionByHash"):
            found = self._engine.rpc(method, params)
            late = found is not None and int(found["blockNumber"] or "0x0", 16) > int(self._stale_at, 16)
            return None if late else found
        return self._engine.rpc(method, [self._stale_at if each in _TAGS else each for each in params])

    def _unseen(self, method: str, params: list[JSON]) -> JSON:
        unseen = method in ("eth_getTransactionReceipt", "eth_getTransactionByHash")
        return None if unseen else self._engine.rpc(method, params)

    def _without_logs(self, method: str, params: list[JSON]) -> JSON:
        if method == "eth_getLogs":
            return []
        found = self._engine.rpc(method, params)
        return {**found, "logs": []} if method == "eth_getTransactionReceipt" and found is not None else found

    def _broken(self, method: str, _params: list[JSON]) -> JSON:
        raise RpcError(_SERVER_ERROR, f"{method}: the node is not in sync")
