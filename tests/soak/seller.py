"""Sellers over the true chain that lie: each path names the manner, the kind of payment and the price."""

import heapq
import itertools
import random
import threading
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
from eth_utils.address import to_checksum_address
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.soak.layout import LIFETIME_S, SharedClock
from x402guard.testing import Facilitator, Testnet
from x402guard.testing.contracts import TOKEN
from x402guard.testing.hostile_answers import Dropped, demand, dripped, receipt_header
from x402guard.testing.hostile_records import Cheque, cheque_in
from x402guard.testing.payments import V1_NETWORKS
from x402guard.testing.server import Hosted

KINDS = ("eip3009", "permit2", "upto", "v1")
STALL_S = 3.0
"""Longer than an agent waits."""

PAYEES = 400
"""So many, because a look for a Permit2 payment walks through all that went to its payee."""

_MADE_UP = "0x" + "5a" * 32


def payee_of(name: str) -> str:
    """Who is paid for a purchase: the same one each time it is asked for."""
    return to_checksum_address(f"0x{0x50A4 << 32 | zlib.crc32(name.encode()) % PAYEES:040x}")


@dataclass(frozen=True)
class Visit:
    """One paid request."""

    request: Request
    kind: str
    price: int
    cheque: Cheque


class LyingSeller(Hosted):
    """Keeps every payment that it is given in `received`, by nonce, before it does anything with it."""

    def __init__(self, net: Testnet, facilitator: Facilitator, clock: SharedClock, seed: int) -> None:
        self.received: dict[str, Cheque] = {}
        self.shown: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._net, self._facilitator, self._clock = net, facilitator, clock
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._late: list[tuple[float, int, Cheque, int]] = []
        self._numbers = itertools.count()
        self._last_hash = _MADE_UP
        self.app = Starlette(routes=[Route("/{manner}/{kind}/{price:int}/{name}", self._answer)])

    async def _answer(self, request: Request) -> Response:
        kind, price = request.path_params["kind"], request.path_params["price"]
        cheque = cheque_in(request, request.path_params["manner"], self.url)
        if cheque is None:
            return self._ask(request, kind, price)
        with self._lock:
            self.received[cheque.nonce] = cheque
            self.shown[request.path_params["manner"]] += 1
        return await MANNERS[request.path_params["manner"]](self, Visit(request, kind, price, cheque))

    # ---- terms ----

    def _ask(self, request: Request, kind: str, price: int) -> Response:
        version = 1 if kind == "v1" else 2
        return demand(
            [self._offer(kind, price, payee_of(request.path_params["name"]))], url=str(request.url), version=version
        )

    def _offer(self, kind: str, price: int, payee: str) -> dict:
        extra = {"name": "USDC", "version": "2"}
        if kind in ("permit2", "upto"):
            extra["assetTransferMethod"] = "permit2"
        if kind == "upto":
            extra["facilitatorAddress"] = self._facilitator.address
        network = V1_NETWORKS[self._net.chain_id] if kind == "v1" else self._net.network
        return {
            "scheme": "upto" if kind == "upto" else "exact", "network": network, "asset": TOKEN,
            "payTo": payee, "amount": str(price), "maxTimeoutSeconds": LIFETIME_S, "extra": extra,
        }  # fmt: skip

    # ---- taking ----

    def share(self, cheque: Cheque) -> int:
        """What is taken of a payment, in atomic units: some part of an `upto`, all of any other."""
        if cheque.facilitator is None:
            return cheque.amount
        return max(1, int(cheque.amount * self._chance.choice((0.1, 0.37, 0.8, 1.0))))

    async def take(self, cheque: Cheque, amount: int) -> dict:
        """Settle a payment on the chain, and return a true receipt."""
        return await run_in_threadpool(self._take, cheque, amount)

    def _take(self, cheque: Cheque, amount: int) -> dict:
        kind = "v1" if cheque.version == 1 else "upto" if cheque.facilitator else "eip3009"
        if cheque.version == 1:
            terms = self._offer(kind, cheque.amount, cheque.payee) | {"maxAmountRequired": str(amount)}
        else:
            terms = dict(cheque.message["accepted"]) | {"amount": str(amount)}
        receipt = self._facilitator.settle(cheque.message, terms)
        with self._lock:
            self._last_hash = receipt["transaction"] or self._last_hash
            if not receipt["success"]:
                self.refused[receipt["errorReason"]] += 1
        return receipt

    def take_later(self, cheque: Cheque, *, at_deadline: bool) -> None:
        """Keep a payment, and settle it some time before it is worthless; at the very end of it where that is asked for."""
        left = cheque.valid_until - self._clock.unix
        wait = left - self._chance.uniform(0, 2) if at_deadline else self._chance.uniform(0, max(0, left))
        with self._lock:
            entry = (self._clock.unix + wait, next(self._numbers), cheque, self.share(cheque))
            heapq.heappush(self._late, entry)

    def settle_due(self, *, all_of_them: bool = False) -> int:
        """Settle what was kept until now; return how many were tried."""
        tried = 0
        while True:
            with self._lock:
                if not self._late or (self._late[0][0] > self._clock.unix and not all_of_them):
                    return tried
                _, _, cheque, amount = heapq.heappop(self._late)
            self._take(cheque, amount)
            tried += 1

    # ---- answering ----

    def claim(self, visit: Visit, transaction: str, amount: int) -> dict:
        """A receipt that says so."""
        network = V1_NETWORKS[self._net.chain_id] if visit.kind == "v1" else self._net.network
        claim = {"success": True, "transaction": transaction, "network": network, "payer": self._net.payer}
        return claim | ({"amount": str(amount)} if visit.kind == "upto" else {})

    def failure(self, visit: Visit) -> dict:
        """A receipt that denies it."""
        return self.claim(visit, "", 0) | {"success": False, "errorReason": "unexpected_settle_error"}

    def last_hash(self) -> str:
        """The transaction of some payment that was settled before."""
        with self._lock:
            return self._last_hash

    def ask_dearer(self, visit: Visit) -> Response:
        """The terms again, and a higher price."""
        return self._ask(visit.request, visit.kind, visit.price + 500)


def _sold(visit: Visit, receipt: dict, status: int = 200) -> Response:
    return JSONResponse({"bought": visit.request.url.path}, status, receipt_header(receipt, visit.cheque.version))


async def _honest(seller: LyingSeller, visit: Visit) -> Response:
    receipt = await seller.take(visit.cheque, seller.share(visit.cheque))
    return _sold(visit, receipt) if receipt["success"] else _sold(visit, receipt, 402)


async def _drops(seller: LyingSeller, visit: Visit) -> Response:
    await seller.take(visit.cheque, seller.share(visit.cheque))
    return Dropped()


async def _fails(seller: LyingSeller, visit: Visit) -> Response:
    await seller.take(visit.cheque, seller.share(visit.cheque))
    return _sold(visit, seller.failure(visit), 500)


async def _never(seller: LyingSeller, visit: Visit) -> Response:
    return _sold(visit, seller.claim(visit, _MADE_UP, visit.cheque.amount))


async def _mute(seller: LyingSeller, visit: Visit) -> Response:
    return JSONResponse({}, 500)


async def _late(seller: LyingSeller, visit: Visit) -> Response:
    seller.take_later(visit.cheque, at_deadline=False)
    return _sold(visit, seller.failure(visit), 402)


async def _latest(seller: LyingSeller, visit: Visit) -> Response:
    seller.take_later(visit.cheque, at_deadline=True)
    return _sold(visit, seller.claim(visit, "", visit.cheque.amount))


async def _less(seller: LyingSeller, visit: Visit) -> Response:
    receipt = await seller.take(visit.cheque, visit.cheque.amount)
    return _sold(visit, seller.claim(visit, receipt["transaction"], 1))


async def _least(seller: LyingSeller, visit: Visit) -> Response:
    seller.take_later(visit.cheque, at_deadline=True)
    return _sold(visit, seller.claim(visit, "", 1))


async def _another(seller: LyingSeller, visit: Visit) -> Response:
    before = seller.last_hash()
    amount = seller.share(visit.cheque)
    await seller.take(visit.cheque, amount)
    return _sold(visit, seller.claim(visit, before, amount))


async def _dearer(seller: LyingSeller, visit: Visit) -> Response:
    await seller.take(visit.cheque, seller.share(visit.cheque))
    return seller.ask_dearer(visit)


async def _drips(seller: LyingSeller, visit: Visit) -> Response:
    receipt = await seller.take(visit.cheque, seller.share(visit.cheque))
    return dripped(b'{"bought": 1}', seconds=STALL_S, headers=receipt_header(receipt, visit.cheque.version))


async def _stalls(seller: LyingSeller, visit: Visit) -> Response:
    await anyio.sleep(STALL_S)
    receipt = await seller.take(visit.cheque, seller.share(visit.cheque))
    return _sold(visit, receipt)


async def _greedy(seller: LyingSeller, visit: Visit) -> Response:
    receipt = await seller.take(visit.cheque, seller.share(visit.cheque))
    await seller.take(visit.cheque, visit.cheque.amount)
    return _sold(visit, receipt)


MANNERS: dict[str, Callable[[LyingSeller, Visit], Awaitable[Response]]] = {
    "honest": _honest,
    "drops": _drops,
    "fails": _fails,
    "never": _never,
    "mute": _mute,
    "late": _late,
    "latest": _latest,
    "less": _less,
    "least": _least,
    "another": _another,
    "dearer": _dearer,
    "drips": _drips,
    "stalls": _stalls,
    "greedy": _greedy,
}
"""What is done with a payment: settled and lost, denied, never, later, at the last moment, for more than is said, twice …"""
