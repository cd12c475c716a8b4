"""Calls JSON-RPC on one network: endpoints in turn, retries with back-off, one chain id, answers of bounded size."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, cast

import httpx
from msgspec.json import encode
from typing_extensions import override

from x402guard.assets import chain_id_of
from x402guard.chain.settings import as_endpoints
from x402guard.errors import ConfigError
from x402guard.http.redaction import hide_url, redacted
from x402guard.kernel.evm import MAX_UINT256, Address, keccak
from x402guard.strict_json import read_json

if TYPE_CHECKING:
    from web3 import Web3
    from web3.types import RPCEndpoint

ROUNDS: Final = 2
"""How often the endpoints of a network are tried in turn before it counts as unreachable."""

_SILENT_S: Final = (60.0, 600.0)
_SILENT_TIMES: Final = 10
"""How long a witness is not asked a kind of question at which it failed slowly: so many times as long, within these seconds."""

_SLOW_S: Final = 0.5
"""An error that comes sooner keeps payments waiting no longer than most answers do, so the witness is asked again."""

_WHICH_CHAIN: Final = "the chain that it serves"

FIRST_PAUSE_S: Final = 0.1
"""Seconds between the first two rounds; each pause after it is twice as long."""

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024

_SLOWEST: Final = 3
"""An answer that arrives in pieces may take this many times ``timeout_s``."""

_MOST_SAID: Final = 4_000
_WORD_DIGITS: Final = 66
_NUMBER_DIGITS: Final = 78


class ChainUnreadable(Exception):  # noqa: N818 - becomes the finding ``Unreadable``
    """The chain could not be read: it is unreachable, or an answer is invalid."""


class PaymentUnreadable(ChainUnreadable):
    """One payment could not be read, although the chain could."""


class RpcClient(httpx.Client):
    """The HTTP client for chain reads. The instrumentation that guards all clients of a process skips this class."""


class JsonRpc:
    """One network's JSON-RPC endpoints: an httpx client that closes its connections, or a caller's Web3.

    web3's own HTTP provider keeps a session for every thread that ever called it and never closes one.

    Args:
        network: the CAIP-2 id; every endpoint must serve this chain id.
        endpoints: ``http(s)://…``, or a ``web3.Web3``, whose provider is asked and which its owner closes; in the order
            in which they are asked. The last one that answered is asked first.
        timeout_s: seconds for one call to one endpoint.
        pause: waits that many seconds between two rounds.
    """

    def __init__(
        self,
        network: str,
        endpoints: str | Web3 | Sequence[str | Web3],
        *,
        timeout_s: float = 5.0,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.network = network
        self._nodes = as_endpoints(endpoints)
        for endpoint in self._nodes:
            # Most URLs contain an access key, and httpx and web3 log every URL in full.
            url = endpoint if isinstance(endpoint, str) else getattr(endpoint.provider, "endpoint_uri", None)
            if url:
                hide_url(str(url))
        self._timeout_s = timeout_s
        self._first = 0
        self._right: set[int] = set()
        self._once_right: set[int] = set()
        self._silent_until: dict[tuple[int, str], float] = {}
        # No compression: a small answer could decompress to any size.
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        self._http = RpcClient(timeout=timeout_s, headers=headers)
        self._pause = pause

    def each_node(self) -> Iterator[JsonRpc]:
        """Yield a client for each endpoint alone, first for the one that answered last.

        Two endpoints may stand at different blocks: what belongs together is asked of one.
        """
        for at in self._in_turn():
            yield OneNode(self, at)

    def others(self) -> Iterator[JsonRpc]:
        """Yield a client for each endpoint but this one, which asks it once. None for a client of all endpoints.

        One may raise at once: see ``ask_once``. None of them is asked first from then on.
        """
        return iter(())

    def _others_of(self, at: int) -> Iterator[JsonRpc]:
        for other in range(len(self._nodes)):
            if other != at:
                yield OneNode(self, other, is_witness=True)

    def check_chain(self) -> None:
        """Ask the endpoint that answered last anew which chain it serves. Raises as ``call`` does."""
        self._right.discard(self._first)
        self.call_at((self._first,), "eth_chainId", ())

    def _in_turn(self) -> Sequence[int]:
        turns = range(len(self._nodes))
        return [(self._first + turn) % len(turns) for turn in turns]

    def call(self, method: str, *params: Any) -> Any:
        """Return the result of one call, of the first endpoint that gives one.

        Raises ``ChainUnreadable`` if no endpoint gives one (``NodeRefuses`` if a node answers with an error), and
        ``ConfigError`` if an endpoint serves another chain and has never served this one.
        """
        return self.call_at(self._in_turn(), method, params)

    def ask_once(self, at: int, method: str, params: Sequence[Any]) -> Any:
        """Do the same with one endpoint, by its index: once, and without asking it first from then on.

        Raises ``ChainUnreadable`` at once for a question of a kind at which it failed slowly; for any question if that is
        which chain it serves, and that is not known. One that limits searches of logs still says that a nonce is used.
        """
        kind = _kind_of(method, params)
        if at not in self._right:
            # Asked for by itself, it is a last look at an endpoint that has just answered.
            with self._noting_silence(at, kind if method == "eth_chainId" else _WHICH_CHAIN):
                self._check_right(at)
        with self._noting_silence(at, kind):
            return self._request(self._nodes[at], method, params)

    @contextmanager
    def _noting_silence(self, at: int, kind: str) -> Iterator[None]:
        """Raise at once for a kind of question that is not asked now. Note one that fails slowly in the block."""
        began = time.monotonic()
        if began < self._silent_until.get((at, kind), began):
            raise ChainUnreadable("the endpoint failed slowly at a question of this kind, and is not asked again yet")
        try:
            yield
        except NodeRefuses:
            raise  # an answer
        except ChainUnreadable:
            ended = time.monotonic()
            took = min(ended - began, self._timeout_s * _SLOWEST)  # this process may have been stopped meanwhile
            if took >= min(_SLOW_S, self._timeout_s / 2):
                least, most = _SILENT_S
                self._silent_until[at, kind] = ended + min(max(least, _SILENT_TIMES * took), most)
            raise

    def call_at(self, nodes: Sequence[int], method: str, params: Sequence[Any]) -> Any:
        """Do the same with the endpoints *nodes* alone, by their index."""
        failure = ChainUnreadable(f"{method}: no endpoint is configured")
        for round_ in range(ROUNDS):
            if round_:
                self._pause(FIRST_PAUSE_S * 2 ** (round_ - 1))
            answered = False
            for at in nodes:
                try:
                    answered, result = self._ask(at, method, params)
                except ChainUnreadable as error:
                    failure = error
                    continue
                if not isinstance(result, ChainUnreadable):
                    self._first = at
                    return result
                failure = result
            if answered:
                break  # a node that answered with an error would answer the same again
        raise failure

    def _ask(self, at: int, method: str, params: Sequence[Any]) -> tuple[bool, Any]:
        """Return (True, the result or the node's own error). Raises ``ChainUnreadable`` if no valid answer came."""
        self._check_right(at)
        try:
            return True, self._request(self._nodes[at], method, params)
        except NodeRefuses as error:
            return True, error

    def _check_right(self, at: int) -> None:
        """Ask an endpoint which chain it serves, if it is not known. Raises as ``call`` does."""
        if at in self._right:
            return
        endpoint = self._nodes[at]
        found = quantity(self._request(endpoint, "eth_chainId", ()))
        if found != chain_id_of(self.network):
            where = f"endpoint at {httpx.URL(endpoint).host}" if isinstance(endpoint, str) else "Web3 that is given"
            told = f"chains[{self.network!r}]: the {where} serves chain {found}; use an endpoint of this network"
            # One that was right before is led away, and another endpoint can take its place.
            raise ChainUnreadable(told) if at in self._once_right else ConfigError(told)
        self._right.add(at)
        self._once_right.add(at)

    def _request(self, endpoint: str | Web3, method: str, params: Sequence[Any]) -> Any:
        answer = (
            self._posted(endpoint, method, params) if isinstance(endpoint, str) else _by_web3(endpoint, method, params)
        )
        if not isinstance(answer, Mapping) or "result" not in answer:
            problem = answer.get("error") if isinstance(answer, Mapping) else answer
            # Some nodes repeat the requested path, which contains an access key.
            told = f"{method}: {redacted(str(problem)[:_MOST_SAID])[:200]}"
            raise ChainUnreadable(told) if is_rate_limit(problem) else NodeRefuses(told)
        return answer["result"]

    def _posted(self, url: str, method: str, params: Sequence[Any]) -> Any:
        try:
            return read_json(self._answer(url, encode({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})))
        except ChainUnreadable:
            raise
        except Exception as error:
            # httpx raises many error types here, and all of them mean that the answer is unknown.
            raise ChainUnreadable(f"{method}: {type(error).__name__}") from error

    def _answer(self, url: str, body: bytes) -> bytes:
        pieces, size = [], 0
        give_up = time.monotonic() + self._timeout_s * _SLOWEST
        with self._http.stream("POST", url, content=body) as response:
            response.raise_for_status()
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ChainUnreadable("the answer is compressed, although the request did not allow it")
            for piece in response.iter_raw():
                size += len(piece)
                if size > MAX_ANSWER_BYTES:
                    raise NodeRefuses(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
                if time.monotonic() > give_up:
                    raise ChainUnreadable(f"the answer was not complete after {self._timeout_s * _SLOWEST:g} s")
                pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def view(self, contract: Address, name: str, types: Sequence[str], values: Sequence[Any], block: Any) -> int:
        """Return the one 32-byte word that a view function of *contract* returns at *block* (a tag, or EIP-1898).

        Raises ``ChainUnreadable`` for an answer of another length, and as ``call`` does.
        """
        from eth_abi import abi  # heavy: loaded at the first chain read

        data = "0x" + (selector(name, types) + abi.encode(types, values)).hex()
        raw = octets(self.call("eth_call", {"to": contract, "data": data}, block))
        if len(raw) != 32:
            raise ChainUnreadable(f"{name} of {contract} returned {len(raw)} bytes, not 32")
        return int.from_bytes(raw, "big")


class OneNode(JsonRpc):
    """One endpoint of a network's client. What it answers makes it the one that is asked first, but as a witness."""

    def __init__(self, rpc: JsonRpc, at: int, *, is_witness: bool = False) -> None:
        self._rpc, self._at, self._is_witness, self.network = rpc, at, is_witness, rpc.network

    @override
    def call(self, method: str, *params: Any) -> Any:
        if self._is_witness:
            return self._rpc.ask_once(self._at, method, params)
        return self._rpc.call_at((self._at,), method, params)

    @override
    def others(self) -> Iterator[JsonRpc]:
        return self._rpc._others_of(self._at)  # noqa: SLF001 - of this module

    @override
    def check_chain(self) -> None:
        self._rpc._right.discard(self._at)  # noqa: SLF001 - of this module
        self.call("eth_chainId")

    @override
    def each_node(self) -> Iterator[JsonRpc]:
        yield self

    @override
    def close(self) -> None:
        """Do nothing: the connections are those of the network's client."""


def _kind_of(method: str, params: Sequence[Any]) -> str:
    """Return what else a witness is not asked with a question: what it would answer as slowly, and few kinds in all.

    Old state may be slow to read, and that of the head is not; the logs of one payment are fewer than the whole wallet's.
    """
    match method, params:
        case "eth_call", [{"to": contract}, block]:
            asked = "now" if block == "latest" else "at a block's number" if isinstance(block, str) else "at a block"
            return f"{method} of {contract} {asked}"
        case "eth_getLogs", [{"address": contract, "topics": [topic, *more]}]:
            return f"{method} of {contract} {topic} {len(more)}"
        case _:
            return method


def _by_web3(web3: Web3, method: str, params: Sequence[Any]) -> Any:
    """Return the answer of a caller's provider, without the formatters of its ``Web3``."""
    try:
        return web3.provider.make_request(cast("RPCEndpoint", method), list(params))
    except Exception as error:  # noqa: BLE001 - providers raise many types, and all mean that the answer is unknown
        why = type(error).__name__
    raise ChainUnreadable(f"{method}: {why}")  # outside the block: the error names the URL with its access key


class NodeRefuses(ChainUnreadable):
    """A reachable node answers with an error, with nothing, or with too many bytes, so a repeated call is useless."""


_RATE_CODES: Final = frozenset({-32016, -32029, 429})
_RATE_WORDS: Final = re.compile(
    r"rate.?limit|too many requests|request (limit|count)|throttl|compute units", re.IGNORECASE
)


def is_rate_limit(problem: Any) -> bool:
    """True for an error that says nothing about the question: the node answers it later, or another node does."""
    code = problem.get("code") if isinstance(problem, Mapping) else None
    return code in _RATE_CODES or _RATE_WORDS.search(str(problem)[:1_000]) is not None


def selector(name: str, types: Sequence[str]) -> bytes:
    """Return the four-byte selector of a contract's function."""
    return keccak(f"{name}({','.join(types)})".encode())[:4]


def octets(value: Any) -> bytes:
    """Return the bytes of a node's hex answer. Raises ``ChainUnreadable`` if it is not hex."""
    try:
        return bytes(value) if isinstance(value, (bytes, bytearray)) else bytes.fromhex(str(value).removeprefix("0x"))
    except ValueError:
        raise ChainUnreadable(f"{str(value)[:80]!r} is not hex") from None


def hexadecimal(value: Any) -> str:
    """Return the bytes of a node's answer as 0x and lower-case hex. Raises ``ChainUnreadable`` if it is not hex."""
    return _word(value) if type(value) is str and len(value) <= _WORD_DIGITS else "0x" + octets(value).hex()


@lru_cache(maxsize=1_024)  # the topics of logs, and the hashes of transactions and blocks, come again and again
def _word(value: str) -> str:
    return "0x" + octets(value).hex()


def quantity(value: Any) -> int:
    """Return the number in a node's answer, up to 256 bits. Raises ``ChainUnreadable`` if it is not one."""
    if type(value) is int and 0 <= value <= MAX_UINT256:
        return value
    try:
        number = -1 if type(value) is int else int(str(value)[: _WORD_DIGITS + 1], 16)
    except ValueError:
        number = -1
    if not 0 <= number <= MAX_UINT256 or len(str(value)) > _NUMBER_DIGITS:
        raise ChainUnreadable(f"{str(value)[:80]!r} is not a number")
    return number
