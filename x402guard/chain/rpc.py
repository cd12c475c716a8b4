"""JSON-RPC to one network: several endpoints in turn, retries with back-off, one chain id, answers of bounded size."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import httpx
from eth_hash.auto import keccak

from x402guard.assets import chain_id_of
from x402guard.errors import ConfigError
from x402guard.evm import MAX_UINT256, Address
from x402guard.http.redaction import hide_url, redacted
from x402guard.strict_json import check_depth

if TYPE_CHECKING:
    from web3.providers.base import JSONBaseProvider
    from web3.types import RPCEndpoint

ROUNDS: Final = 2
"""How often the endpoints of a network are tried in turn, before it counts as out of reach."""

FIRST_PAUSE_S: Final = 0.1
"""Seconds between the first two rounds; each pause after it is twice as long."""

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024

_SLOWEST: Final = 3
"""An answer that comes in pieces may take this many times the limit of a call."""

_WORD_DIGITS: Final = 66
_NUMBER_DIGITS: Final = 78


class ChainUnreadable(Exception):  # noqa: N818 - becomes the finding of that name
    """The chain could not be read: out of reach, or an answer that makes no sense."""


class PaymentUnreadable(ChainUnreadable):
    """One payment could not be read, on a chain that could."""


class RpcClient(httpx.Client):
    """Our own way to a chain: what guards every client of a process leaves this one alone."""


class JsonRpc:
    """One network's JSON-RPC endpoints: web3's codec over an httpx client, which closes what it opens.

    web3's own HTTP provider keeps a session for every thread that ever called it, and gives none of them back.

    Args:
        network: CAIP-2; every endpoint has to serve this chain id.
        urls: ``http(s)://…``, in the order in which they are asked. One that answered is asked first the next time.
        timeout_s: seconds for one call to one endpoint.
        pause: waits so many seconds between two rounds.
    """

    def __init__(
        self,
        network: str,
        urls: str | Sequence[str],
        *,
        timeout_s: float = 5.0,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.network = network
        self._urls = (urls,) if isinstance(urls, str) else tuple(urls)
        for url in self._urls:
            hide_url(url)  # most hold an access key, and httpx logs every URL whole
        self._timeout_s = timeout_s
        self._first = 0
        self._right: set[str] = set()
        # Nothing packed: a small answer could unpack to any size.
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        self._http = RpcClient(timeout=timeout_s, headers=headers)
        self._pause = pause
        self._lock = threading.Lock()
        self._codec: JSONBaseProvider | None = None

    @property
    def endpoint(self) -> int:
        """Which of the endpoints answered last."""
        return self._first

    def call(self, method: str, *params: Any) -> Any:
        """Return the result of one call.

        Raises ``ChainUnreadable`` where no endpoint gives one, ``ConfigError`` where one of them serves another chain.
        """
        failure = ChainUnreadable(f"{method}: no endpoint")
        for round_ in range(ROUNDS):
            if round_:
                self._pause(FIRST_PAUSE_S * 2 ** (round_ - 1))
            answered = False
            for turn in range(len(self._urls)):
                at = (self._first + turn) % len(self._urls)
                try:
                    answered, result = self._ask(self._urls[at], method, params)
                except ChainUnreadable as error:
                    failure = error
                    continue
                if not isinstance(result, ChainUnreadable):
                    self._first = at
                    return result
                failure = result
            if answered:
                break  # a node that answers with an error would do so again
        raise failure

    def _ask(self, url: str, method: str, params: Sequence[Any]) -> tuple[bool, Any]:
        """Return (True, the result or the node's own error). Raises ``ChainUnreadable`` where nothing came that makes sense."""
        if url not in self._right:
            found = quantity(self._request(url, "eth_chainId", ()))
            if found != chain_id_of(self.network):
                raise ConfigError(
                    f"chains[{self.network!r}]: the endpoint at {httpx.URL(url).host} serves chain {found}; "
                    "name one of this network"
                )
            self._right.add(url)
        try:
            return True, self._request(url, method, params)
        except NodeRefuses as error:
            return True, error

    def _request(self, url: str, method: str, params: Sequence[Any]) -> Any:
        codec = self._web3_codec()
        try:
            body = codec.encode_rpc_request(cast("RPCEndpoint", method), list(params))
            raw = self._posted(url, body)
            check_depth(raw)
            answer: Any = codec.decode_rpc_response(raw)
        except ChainUnreadable:
            raise
        except Exception as error:
            # httpx and web3 raise many kinds here, and every one of them means the same: we do not know.
            raise ChainUnreadable(f"{method}: {type(error).__name__}") from error
        if not isinstance(answer, Mapping) or "result" not in answer:
            problem = answer.get("error") if isinstance(answer, Mapping) else answer
            # Some nodes repeat the path that they were asked at, which is an access key.
            raise NodeRefuses(f"{method}: {redacted(str(problem))[:200]}")
        return answer["result"]

    def _posted(self, url: str, body: bytes) -> bytes:
        pieces, size = [], 0
        give_up = time.monotonic() + self._timeout_s * _SLOWEST
        with self._http.stream("POST", url, content=body) as response:
            response.raise_for_status()
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ChainUnreadable("an answer that is packed, which nobody asked for")
            for piece in response.iter_raw():
                size += len(piece)
                if size > MAX_ANSWER_BYTES:
                    raise NodeRefuses(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
                if time.monotonic() > give_up:
                    raise ChainUnreadable(f"an answer that was not whole after {self._timeout_s * _SLOWEST:g} s")
                pieces.append(piece)
        return b"".join(pieces)

    def _web3_codec(self) -> JSONBaseProvider:
        with self._lock:
            if self._codec is None:
                from web3.providers.base import JSONBaseProvider as Codec  # heavy: loaded when a chain is first read

                self._codec = Codec()
            return self._codec

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def view(self, contract: Address, name: str, types: Sequence[str], values: Sequence[Any], block: Any) -> int:
        """Return the one word that a view function of *contract* answers at *block* (a tag, or EIP-1898)."""
        from eth_abi.abi import encode

        data = "0x" + (selector(name, types) + encode(types, values)).hex()
        raw = octets(self.call("eth_call", {"to": contract, "data": data}, block))
        if len(raw) != 32:
            raise ChainUnreadable(f"{name} of {contract} answered {len(raw)} bytes, not one word")
        return int.from_bytes(raw, "big")


class NodeRefuses(ChainUnreadable):
    """A node that is there, and answers with an error, with nothing, or with more than we read: it would do so again."""


def selector(name: str, types: Sequence[str]) -> bytes:
    """Return the four bytes that stand for a contract's function."""
    return keccak(f"{name}({','.join(types)})".encode())[:4]


def octets(value: Any) -> bytes:
    """Return the bytes that a node's answer means. Raises ``ChainUnreadable`` for what is no hex."""
    try:
        return bytes(value) if isinstance(value, (bytes, bytearray)) else bytes.fromhex(str(value).removeprefix("0x"))
    except ValueError:
        raise ChainUnreadable(f"{str(value)[:80]!r} is not hex") from None


def quantity(value: Any) -> int:
    """Return the number that a node's answer means, up to 256 bits. Raises ``ChainUnreadable`` for what is none."""
    try:
        number = value if type(value) is int else int(str(value)[: _WORD_DIGITS + 1], 16)
    except ValueError:
        number = -1
    if not 0 <= number <= MAX_UINT256 or len(str(value)) > _NUMBER_DIGITS:
        raise ChainUnreadable(f"{str(value)[:80]!r} is not a number")
    return number
