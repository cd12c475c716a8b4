"""Reads over JSON-RPC what became of a payment: nonce, settling transaction, Transfer log, block time.

Sources: EIP-3009 (authorizationState), Permit2's SignatureTransfer (nonceBitmap), EIP-1898 (state at a block's hash).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import httpx

from x402guard.assets import chain_id_of, resolve_network
from x402guard.errors import ConfigError
from x402guard.evm import Address, keccak
from x402guard.ledger.evidence import Finding, Settled, Unreadable, Unused, Used
from x402guard.ledger.intent import Intent
from x402guard.ledger.model import Hold
from x402guard.ports import Funds
from x402guard.schemes.exact import EXACT_PROXY
from x402guard.schemes.terms import PERMIT2
from x402guard.schemes.upto import UPTO_PROXY

if TYPE_CHECKING:
    from web3.providers.base import JSONBaseProvider
    from web3.types import RPCEndpoint

__all__ = ["ChainUnreadable", "JsonRpc", "RpcChainReader", "RpcClient"]

FUNDS_FRESH_S: Final = 5.0
"""How long a balance is believed, in seconds."""

_HASH: Final = re.compile(r"0x[0-9a-fA-F]{64}", re.ASCII)
_PERMIT: Final = "((address,uint256),uint256,uint256)"
_PERMIT_2612: Final = "(uint256,uint256,bytes32,bytes32,uint8)"
_EXACT_WITNESS: Final = "(address,uint256)"
_UPTO_WITNESS: Final = "(address,address,uint256)"
_TRANSFER_AUTHORIZATION: Final = ("address", "address", "uint256", "uint256", "uint256", "bytes32")
_TRANSFER_TOPIC: Final = "0x" + keccak(b"Transfer(address,address,uint256)").hex()


def _selector(name: str, types: Sequence[str]) -> bytes:
    return keccak(f"{name}({','.join(types)})".encode())[:4]


class ChainUnreadable(Exception):  # noqa: N818 - becomes the finding of that name
    """The chain could not be read: out of reach, another chain than it should be, or an answer that makes no sense."""


class RpcClient(httpx.Client):
    """Our own way to a chain: what guards every client of a process leaves this one alone."""


class JsonRpc:
    """One network's JSON-RPC endpoint: web3's codec over an httpx client, which closes what it opens.

    web3's own HTTP provider keeps a session for every thread that ever called it, and gives none of them back.

    Args:
        network: CAIP-2; the endpoint has to serve this chain id.
        url: ``http(s)://…``.
        timeout_s: seconds for one call.
    """

    def __init__(self, network: str, url: str, *, timeout_s: float = 5.0) -> None:
        self.network = network
        self._url = url
        self._http = RpcClient(timeout=timeout_s, headers={"content-type": "application/json"})
        self._lock = threading.Lock()
        self._codec: JSONBaseProvider | None = None
        self._right_chain = False

    def call(self, method: str, *params: Any) -> Any:
        """Return the result of one call. Raises ``ChainUnreadable`` for anything but a result."""
        if not self._right_chain:
            found = _number(self._request("eth_chainId", ()))
            if found != chain_id_of(self.network):
                raise ChainUnreadable(f"the RPC for {self.network} serves chain {found}")
            self._right_chain = True
        return self._request(method, params)

    def _request(self, method: str, params: Sequence[Any]) -> Any:
        codec = self._web3_codec()
        try:
            body = codec.encode_rpc_request(cast("RPCEndpoint", method), list(params))
            response = self._http.post(self._url, content=body).raise_for_status()
            answer: Any = codec.decode_rpc_response(response.content)
        except Exception as error:
            # httpx and web3 raise many kinds here, and every one of them means the same: we do not know.
            raise ChainUnreadable(f"{method}: {type(error).__name__}") from error
        if not isinstance(answer, Mapping) or "result" not in answer:
            problem = answer.get("error") if isinstance(answer, Mapping) else answer
            raise ChainUnreadable(f"{method}: {str(problem)[:200]}")
        return answer["result"]

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

        data = "0x" + (_selector(name, types) + encode(types, values)).hex()
        answer = self.call("eth_call", {"to": contract, "data": data}, block)
        raw = _bytes(answer)
        if len(raw) != 32:
            raise ChainUnreadable(f"{name} of {contract} answered {len(raw)} bytes, not one word")
        return int.from_bytes(raw, "big")


@dataclass(frozen=True, slots=True)
class _Final:
    """The last block that cannot be undone."""

    hash: str
    number: int
    time: int


class RpcChainReader:
    """A ``ChainReader`` on one JSON-RPC endpoint per network.

    Args:
        urls: network (CAIP-2 or v1 name) → URL.
        timeout_s: seconds for one call.
        monotonic_s: a clock in seconds, for how old a cached balance is.

    Raises ``ConfigError`` for a network or URL that is none.
    """

    def __init__(
        self, urls: Mapping[str, str], *, timeout_s: float = 5.0, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._rpcs: dict[str, JsonRpc] = {}
        for name, url in urls.items():
            network = resolve_network(name) if isinstance(name, str) else None
            if network is None:
                raise ConfigError(f"chains: {name!r} is not an EVM network; write eip155:<chain id>")
            if not isinstance(url, str) or not url.startswith(("http://", "https://")):
                # The URL itself is not repeated: most hold an access key.
                raise ConfigError(f"chains[{name!r}]: not an http:// or https:// URL of a JSON-RPC endpoint")
            if network in self._rpcs:
                raise ConfigError(f"chains: {network} is named twice, once as {name!r}")
            self._rpcs[network] = JsonRpc(network, url, timeout_s=timeout_s)
        self._monotonic = monotonic_s
        self._funds: dict[tuple[str, Address, Address], tuple[float, Funds]] = {}

    @property
    def networks(self) -> frozenset[str]:
        """The networks (CAIP-2) that can be read."""
        return frozenset(self._rpcs)

    def read(self, hold: Hold) -> Finding:
        """See ``ChainReader.read``."""
        intent = hold.payment()
        rpc = self._rpcs.get(intent.network)
        if rpc is None:
            return Unreadable(f"no RPC for {intent.network}")
        try:
            return _read(rpc, intent, "" if hold.claim is None else hold.claim.transaction)
        except ChainUnreadable as error:
            return Unreadable(str(error))
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            return Unreadable(f"an answer of the RPC makes no sense: {type(error).__name__}")

    def funds(self, network: str, token: Address, owner: Address) -> Funds | None:
        """See ``ChainReader.funds``. Believed for five seconds."""
        key = (network, token, owner)
        cached = self._funds.get(key)
        if cached is not None and self._monotonic() - cached[0] < FUNDS_FRESH_S:
            return cached[1]
        rpc = self._rpcs.get(network)
        if rpc is None:
            return None
        try:
            balance = rpc.view(token, "balanceOf", ["address"], [owner], "latest")
            allowance = rpc.view(token, "allowance", ["address", "address"], [owner, PERMIT2], "latest")
        except ChainUnreadable:
            return None
        funds = Funds(balance, allowance)
        self._funds[key] = (self._monotonic(), funds)
        return funds

    def close(self) -> None:
        """See ``ChainReader.close``."""
        for rpc in self._rpcs.values():
            rpc.close()


def _read(rpc: JsonRpc, intent: Intent, transaction: str) -> Finding:
    used_at_head = _nonce_used(rpc, intent, "latest")
    block = rpc.call("eth_getBlockByNumber", "finalized", False)  # noqa: FBT003 - the RPC's own signature
    if not isinstance(block, Mapping):
        raise ChainUnreadable("there is no final block")
    final = _Final(_hex(block["hash"]), _number(block["number"]), _number(block["timestamp"]))
    used = _nonce_used(rpc, intent, {"blockHash": final.hash, "requireCanonical": True})
    if not used and not used_at_head:
        return Unused(final.time)
    settled = _settlement(rpc, intent, transaction, final) if transaction else None
    return settled if settled is not None else Used(final=used)


def _nonce_used(rpc: JsonRpc, intent: Intent, block: Any) -> bool:
    if intent.method == "eip3009":
        nonce = intent.nonce.to_bytes(32, "big")
        types = ["address", "bytes32"]
        return rpc.view(intent.token, "authorizationState", types, [intent.payer, nonce], block) == 1
    # Permit2 keeps one bit per nonce: the high 248 bits name the word, the low 8 the bit in it.
    word = rpc.view(PERMIT2, "nonceBitmap", ["address", "uint256"], [intent.payer, intent.nonce >> 8], block)
    return bool(word >> (intent.nonce & 0xFF) & 1)


def _settlement(rpc: JsonRpc, intent: Intent, transaction: str, final: _Final) -> Settled | None:
    """Does this very transaction settle this very payment? By its own calldata, its status and one Transfer log."""
    if not _HASH.fullmatch(transaction):
        return None
    sent = rpc.call("eth_getTransactionByHash", transaction)
    receipt = rpc.call("eth_getTransactionReceipt", transaction)
    if not isinstance(sent, Mapping) or not isinstance(receipt, Mapping):
        if intent.dead_at(final.time):
            return None  # whoever wanted to show it has had all the time there was
        raise ChainUnreadable(f"transaction {transaction} is not to be seen yet")
    if _number(receipt["status"]) != 1:
        return None
    amount = _amount_in_calldata(intent, str(sent.get("to")), _bytes(sent.get("input", "0x")))
    if amount is None:
        return None
    logs = [log for log in receipt["logs"] if _is_transfer(log, intent, amount)]
    if len(logs) != 1:
        return None
    is_final = _number(receipt["blockNumber"]) <= final.number
    return Settled(amount, transaction.lower(), _number(logs[0]["logIndex"]), is_final)


def _amount_in_calldata(intent: Intent, to: str, data: bytes) -> int | None:
    """Return what a call settles of *intent*, or None where it is another call, or about another payment.

    Decoding takes what the signature says and ignores bytes behind it: facilitators append a suffix.
    """
    from eth_abi.abi import decode
    from eth_abi.exceptions import DecodingError

    for contract, name, types, amount_of in _settling_calls(intent):
        if to.lower() == contract.lower() and data[:4] == _selector(name, types):
            try:
                return amount_of(decode(types, data[4:], strict=False))
            except DecodingError:
                return None
    return None


Call = tuple[Address, str, tuple[str, ...], Callable[[tuple[Any, ...]], int | None]]


def _settling_calls(intent: Intent) -> list[Call]:
    if intent.method == "eip3009":
        return [
            (
                intent.token,
                "transferWithAuthorization",
                (*_TRANSFER_AUTHORIZATION, *signature),
                _by_authorization(intent),
            )
            for signature in (("uint8", "bytes32", "bytes32"), ("bytes",))
        ]
    proxy, witness, amount = (
        (EXACT_PROXY, _EXACT_WITNESS, ()) if intent.scheme == "exact" else (UPTO_PROXY, _UPTO_WITNESS, ("uint256",))
    )
    plain = (_PERMIT, *amount, "address", witness, "bytes")
    return [
        (proxy, "settle", plain, _by_permit(intent)),
        (proxy, "settleWithPermit", (_PERMIT_2612, *plain), lambda args: _by_permit(intent)(args[1:])),
    ]


def _by_authorization(intent: Intent) -> Callable[[tuple[Any, ...]], int | None]:
    def amount(args: tuple[Any, ...]) -> int | None:
        payer, payee, value, _, _, nonce = args[:6]
        ours = (intent.payer.lower(), intent.payee.lower(), intent.amount_atomic, intent.nonce)
        return value if (payer, payee, value, int.from_bytes(nonce, "big")) == ours else None

    return amount


def _by_permit(intent: Intent) -> Callable[[tuple[Any, ...]], int | None]:
    def amount(args: tuple[Any, ...]) -> int | None:
        ((token, ceiling), nonce, _), *rest = args
        settled = rest.pop(0) if intent.scheme == "upto" else ceiling
        payer, witness = rest[0], rest[1]
        ours = (intent.token.lower(), intent.amount_atomic, intent.nonce, intent.payer.lower(), intent.payee.lower())
        right = (token, ceiling, nonce, payer, witness[0]) == ours and settled <= ceiling
        return settled if right else None

    return amount


def _is_transfer(log: Mapping[str, Any], intent: Intent, amount: int) -> bool:
    topics = [_hex(topic) for topic in log["topics"]]
    wanted = [_TRANSFER_TOPIC, _topic(intent.payer), _topic(intent.payee)]
    same_token = str(log["address"]).lower() == intent.token.lower()
    return same_token and topics == wanted and int.from_bytes(_bytes(log["data"]), "big") == amount


def _topic(address: Address) -> str:
    return "0x" + address[2:].lower().rjust(64, "0")


def _hex(value: Any) -> str:
    return "0x" + _bytes(value).hex()


def _bytes(value: Any) -> bytes:
    try:
        return bytes(value) if isinstance(value, (bytes, bytearray)) else bytes.fromhex(str(value).removeprefix("0x"))
    except ValueError:
        raise ChainUnreadable(f"{str(value)[:80]!r} is not hex") from None


def _number(value: Any) -> int:
    try:
        return value if isinstance(value, int) else int(str(value), 16)
    except ValueError:
        raise ChainUnreadable(f"{str(value)[:80]!r} is not a number") from None
