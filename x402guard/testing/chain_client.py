"""Sends calls and transactions to a chain over JSON-RPC, for the facilitator and the test network."""

import itertools
import threading
import time
from typing import Any

import httpx
from eth_abi.abi import encode
from eth_abi.grammar import parse
from eth_account.signers.local import LocalAccount
from eth_utils.crypto import keccak

from x402guard.testing.engine import JSON, RpcError

_POLL_S = 0.005
_RECEIPT_TIMEOUT_S = 30.0
_TIP_WEI = 10**9


def selector(signature: str) -> str:
    """The four-byte selector, in hex, of a function or a custom error such as `InvalidNonce()`."""
    return "0x" + keccak(text=signature)[:4].hex()


def calldata(signature: str, *arguments: Any) -> str:
    """Encode a contract call as hex data; `signature` is the function's signature, such as `balanceOf(address)`."""
    if not arguments:
        return selector(signature)
    start = signature.index("(")
    types = [component.to_type_str() for component in parse(signature[start:]).components]
    return selector(signature) + encode(types, arguments).hex()


class ChainClient:
    """A JSON-RPC client for one chain, for use by any number of threads.

    Its methods raise httpx.HTTPError if the node cannot be reached, and RpcError if it answers with an error.
    """

    def __init__(self, url: str, chain_id: int) -> None:
        self._http = httpx.Client(base_url=url, timeout=_RECEIPT_TIMEOUT_S, trust_env=False)
        self._chain_id = chain_id
        self._ids = itertools.count(1)
        self._sending = threading.Lock()

    def rpc(self, method: str, *params: JSON) -> JSON:
        """Send one call and return its result."""
        message = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params}
        reply = self._http.post("/", json=message).raise_for_status().json()
        if "error" in reply:
            error = reply["error"]
            raise RpcError(error["code"], error["message"], error.get("data"))
        return reply["result"]

    def call(self, to: str, data: str, sender: str | None = None) -> bytes:
        """Execute a call on the latest state, without a transaction, and return the contract's result."""
        transaction = {"to": to, "data": data} | ({"from": sender} if sender else {})
        return bytes.fromhex(self.rpc("eth_call", transaction, "latest").removeprefix("0x"))

    def read_uint(self, to: str, signature: str, *arguments: Any) -> int:
        """Call a contract's view function that returns one unsigned number."""
        return int.from_bytes(self.call(to, calldata(signature, *arguments)), "big")

    def send(self, account: LocalAccount, to: str, data: str = "0x", *, gas: int, wei: int = 0) -> str:
        """Sign and send a transaction from `account` with the limit `gas`; return its hash without waiting."""
        price = int(self.rpc("eth_gasPrice"), 16)
        # Threads that share the key must not read the same next nonce.
        with self._sending:
            fields: dict[str, Any] = {
                "to": to,
                "data": data,
                "value": wei,
                "gas": gas,
                "nonce": int(self.rpc("eth_getTransactionCount", account.address, "pending"), 16),
                "chainId": self._chain_id,
                "maxFeePerGas": 2 * price,
                "maxPriorityFeePerGas": _TIP_WEI,
            }
            signed = account.sign_transaction(fields)
            return str(self.rpc("eth_sendRawTransaction", "0x" + signed.raw_transaction.hex()))

    def receipt(self, transaction: str, *, timeout_s: float = _RECEIPT_TIMEOUT_S) -> dict[str, JSON]:
        """Wait for a transaction's receipt; raise TimeoutError after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while (found := self.rpc("eth_getTransactionReceipt", transaction)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no receipt of {transaction} after {timeout_s} s")
            time.sleep(_POLL_S)
        return dict(found)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
