"""Serves an untrustworthy facilitator in front of an honest one: it stalls, lies about settlements, settles late."""

import threading
from collections.abc import Awaitable, Callable
from types import MappingProxyType

import anyio
import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from x402guard.testing.engine import JSON
from x402guard.testing.server import Hosted, check_behaviour

_TIMEOUT_S = 30.0

FACILITATOR_LIES = MappingProxyType(
    {
        "honest": "settles, and says so",
        "stalls": "does not answer for `stall_s` seconds, and never settles",
        "success_without_settling": "says that it settled, but has sent nothing",
        "failure_after_settling": "settles, but says that it failed",
        "another_hash": "settles, but shows the transaction of the previous payment",
        "settles_late": "says that it failed, and settles later, at `settle_late`",
        "fails": "answers 500 and settles nothing",
        "garbage": "settles, and answers with invalid JSON",
    }
)
"""The behaviours by name, each with its description."""

_FAILED = {"success": False, "errorReason": "unexpected_settle_error", "transaction": ""}


class HostileFacilitator(Hosted):
    """Lets the facilitator at `honest_url` verify and settle, and answers as `behaviour` says.

    `behaviour` is one of `FACILITATOR_LIES`; `misbehave` changes it at any time. `asked` lists the requested
    settlements; `stall_s` is how long it stalls, in seconds. For a merchant:
    `FacilitatorClient(hostile_facilitator.url)`.
    """

    def __init__(self, honest_url: str, *, behaviour: str = "honest", stall_s: float = 2.0) -> None:
        self.behaviour = behaviour
        self.stall_s = stall_s
        self._lock = threading.Lock()
        self._honest = httpx.Client(base_url=honest_url, timeout=_TIMEOUT_S, trust_env=False)
        self._asked: list[JSON] = []
        self._late: list[JSON] = []
        self._last_hash = "0x" + "5a" * 32
        self.misbehave(behaviour)
        self._settling: dict[str, Callable[[JSON], Awaitable[Response]]] = {
            "stalls": self._stall,
            "success_without_settling": self._lie,
            "failure_after_settling": self._deny,
            "another_hash": self._confuse,
            "settles_late": self._postpone,
            "fails": self._fail,
            "garbage": self._mumble,
        }
        self.app = Starlette(
            routes=[
                Route("/verify", self._answer_verify, methods=["POST"]),
                Route("/settle", self._answer_settle, methods=["POST"]),
                Route("/supported", self._answer_supported, methods=["GET"]),
            ]
        )

    def misbehave(self, behaviour: str) -> None:
        """Change the behaviour; raise KeyError for a name that is not in `FACILITATOR_LIES`."""
        check_behaviour(behaviour, FACILITATOR_LIES)
        self.behaviour = behaviour

    @property
    def asked(self) -> list[JSON]:
        """A copy of every requested settlement, as it was posted."""
        with self._lock:
            return list(self._asked)

    def settle_late(self) -> list[JSON]:
        """Settle the postponed payments and return the receipts."""
        with self._lock:
            waiting, self._late = self._late, []
        return [self._truly("/settle", question) for question in waiting]

    def close(self) -> None:
        """Stop serving. Idempotent."""
        super().close()
        self._honest.close()

    def _truly(self, path: str, question: JSON) -> JSON:
        return self._honest.post(path, json=question).raise_for_status().json()

    async def _settled(self, question: JSON) -> JSON:
        receipt = await anyio.to_thread.run_sync(self._truly, "/settle", question)
        self._last_hash = receipt.get("transaction") or self._last_hash
        return receipt

    async def _answer_supported(self, _request: Request) -> Response:
        return JSONResponse((await anyio.to_thread.run_sync(self._honest.get, "/supported")).json())

    async def _answer_verify(self, request: Request) -> Response:
        return JSONResponse(await anyio.to_thread.run_sync(self._truly, "/verify", await request.json()))

    async def _answer_settle(self, request: Request) -> Response:
        question = await request.json()
        with self._lock:
            self._asked.append(question)
        return await self._settling.get(self.behaviour, self._settle)(question)

    async def _settle(self, question: JSON) -> Response:
        return JSONResponse(await self._settled(question))

    async def _stall(self, question: JSON) -> Response:
        await anyio.sleep(self.stall_s)
        return self._failed(question)

    async def _lie(self, question: JSON) -> Response:
        amount = question["paymentRequirements"].get("amount")
        claim = {"success": True, "transaction": "0x" + "11" * 32, "network": _network(question)}
        return JSONResponse(claim | _payer(question) | ({} if amount is None else {"amount": amount}))

    async def _deny(self, question: JSON) -> Response:
        await self._settled(question)
        return self._failed(question)

    async def _confuse(self, question: JSON) -> Response:
        before = self._last_hash
        return JSONResponse(await self._settled(question) | {"transaction": before})

    async def _postpone(self, question: JSON) -> Response:
        with self._lock:
            self._late.append(question)
        return self._failed(question)

    async def _fail(self, question: JSON) -> Response:
        return JSONResponse({"error": f"no settlement on {_network(question)}"}, 500)

    async def _mumble(self, question: JSON) -> Response:
        await self._settled(question)
        return Response(b"{", media_type="application/json")

    @staticmethod
    def _failed(question: JSON) -> Response:
        return JSONResponse(_FAILED | {"network": _network(question)})


def _network(question: JSON) -> str:
    return str(question["paymentRequirements"]["network"])


def _payer(question: JSON) -> JSON:
    payload = question["paymentPayload"]["payload"]
    signed = payload.get("authorization") or payload["permit2Authorization"]
    return {"payer": signed["from"]}
