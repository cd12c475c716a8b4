"""Runs a chain inside this process, on eth-tester and py-evm. It needs only Python.

py-evm's chain executes and stores. The JSON that clients ask for (blocks, transactions, receipts, logs) is kept beside
it, because eth-tester's own look-ups walk the whole chain. Every transaction is mined at once, in a separate block.
"""

import inspect
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from eth.exceptions import Revert, VMError
from eth.vm.forks.prague import PragueVM
from eth.vm.spoof import SpoofTransaction
from eth_tester.backends.pyevm.main import PyEVMBackend
from eth_utils.exceptions import ValidationError

from x402guard.testing.contracts import CHAIN_ID, genesis_contracts
from x402guard.testing.engine import JSON, RpcError
from x402guard.testing.evm_json import (
    INVALID_PARAMS,
    NOT_FOUND,
    block_json,
    hexed,
    log_matches,
    octets,
    quantity,
    receipt_json,
    revert_error,
    transaction_json,
)

REJECTED = -32000
METHOD_NOT_FOUND = -32601

_NOBODY = bytes(20)
_TIP_WEI = 10**9
_CALL_GAS = 10_000_000
_INTRINSIC_GAS = 53_000
_CALLDATA_BYTE_GAS = 40


class _SameSecondVM(PragueVM):
    """Prague, but a block may have its parent's timestamp.

    With at least one second per block, a chain that mines a block for every transaction would run ahead of real time,
    until offers that last a minute are expired when they are made.
    """

    @classmethod
    def validate_header(cls, header: Any, parent_header: Any) -> None:
        if parent_header is not None and header.timestamp == parent_header.timestamp:
            parent_header = parent_header.copy(timestamp=parent_header.timestamp - 1)
        super().validate_header(header, parent_header)


def _new_chain(chain_id: int, balances: Mapping[str, int], contracts: Mapping[str, bytes]) -> Any:
    accounts = {octets(address, 20): {"balance": wei, "code": b""} for address, wei in balances.items()}
    for address, code in contracts.items():
        accounts.setdefault(octets(address, 20), {"balance": 0})["code"] = code
    state = {address: {"nonce": 0, "storage": {}, **account} for address, account in accounts.items()}
    chain = PyEVMBackend(genesis_state=state, vm_configuration=((0, _SameSecondVM),)).chain
    # eth-tester writes its own id into the class of the chain. It makes a new class for every chain, so this changes
    # only this engine.
    type(chain).chain_id = chain_id
    return chain


class EthTesterEngine:
    """An Engine in this process, with contracts at fixed addresses from its first block on.

    `balances` gives accounts native coin (in wei); `contracts` is runtime code by address (default: the test
    network's). An empty block is mined every `tick_s` seconds; block times are real time plus what `advance` added. The
    latest block is final.
    """

    def __init__(
        self,
        *,
        chain_id: int = CHAIN_ID,
        balances: Mapping[str, int] | None = None,
        contracts: Mapping[str, bytes] | None = None,
        tick_s: float = 2.0,
    ) -> None:
        self._chain_id = chain_id
        self._chain = _new_chain(chain_id, balances or {}, genesis_contracts() if contracts is None else contracts)
        self._lock = threading.Lock()
        self._offset_s = 0
        self._blocks = [block_json(self._chain.get_canonical_block_by_number(0), [])]
        self._transactions: dict[str, JSON] = {}
        self._receipts: dict[str, JSON] = {}
        self._waiting: dict[tuple[bytes, int], Any] = {}
        self._methods = self._method_table()
        self._stopped = threading.Event()
        self._ticker = threading.Thread(target=self._tick, args=(tick_s,), name="x402guard-chain-ticker", daemon=True)
        self._ticker.start()

    @property
    def chain_id(self) -> int:
        """The chain's EIP-155 id, as contracts and JSON-RPC clients see it."""
        return self._chain_id

    def rpc(self, method: str, params: list[JSON]) -> JSON:
        """Answer one Ethereum JSON-RPC call; raise RpcError if a node would answer with an error."""
        call = self._methods.get(method)
        if call is None:
            raise RpcError(METHOD_NOT_FOUND, f"the method {method} does not exist")
        try:
            inspect.signature(call).bind(*params)
        except TypeError as error:
            raise RpcError(INVALID_PARAMS, f"{method}: {error}") from error
        with self._lock:
            return call(*params)

    def advance(self, seconds: int) -> None:
        """Move the chain's clock forward by whole `seconds` and mine a block; raise ValueError if that is negative."""
        if seconds < 0:
            raise ValueError("a chain's clock cannot go back")
        with self._lock:
            self._offset_s += seconds
            self._mine()

    def close(self) -> None:
        """Stop mining empty blocks. Idempotent."""
        self._stopped.set()
        self._ticker.join()

    def _tick(self, every_s: float) -> None:
        while not self._stopped.wait(every_s):
            with self._lock:
                self._mine()

    # ---- blocks and time ----

    def _set_clock(self) -> None:
        # A pending header keeps the second in which its parent was mined, even if that is long ago.
        latest = quantity(self._blocks[-1]["timestamp"])
        self._chain.set_header_timestamp(max(latest, int(time.time()) + self._offset_s))

    def _mine(self, transaction: Any = None) -> None:
        self._set_clock()
        outcome = self._chain.apply_transaction(transaction) if transaction is not None else None
        block = self._chain.mine_block(coinbase=_NOBODY, mix_hash=os.urandom(32), blob_gas_used=0)
        if outcome is None:
            self._blocks.append(block_json(block, []))
            return
        _, receipt, computation = outcome
        created = computation.msg.storage_address if not transaction.to and computation.is_success else None
        entry = transaction_json(transaction) | {
            "blockHash": hexed(block.hash),
            "blockNumber": hex(block.number),
            "transactionIndex": "0x0",
        }
        self._transactions[entry["hash"]] = entry
        self._receipts[entry["hash"]] = receipt_json(
            transaction, receipt, block.header, succeeded=computation.is_success, contract=created
        )
        self._blocks.append(block_json(block, [entry]))

    def _number(self, block: JSON) -> int:
        if isinstance(block, dict) and "blockHash" in block:
            number = self._number_of_hash(block["blockHash"])
            if number is None:
                raise RpcError(NOT_FOUND, f"block not found: {block['blockHash']}")
            return number
        if isinstance(block, dict):
            block = block.get("blockNumber")
        if block in ("latest", "pending", "finalized", "safe", None):
            return len(self._blocks) - 1
        return 0 if block == "earliest" else quantity(block)

    def _number_of_hash(self, block_hash: JSON) -> int | None:
        wanted = str(block_hash).lower()
        # Clients nearly always ask for one of the last blocks.
        for number in range(len(self._blocks) - 1, -1, -1):
            if self._blocks[number]["hash"] == wanted:
                return number
        return None

    def _vm(self, block: JSON) -> Any:
        if block in ("latest", "pending", None):
            # The state is the latest block's; the clock is that of the next block.
            self._set_clock()
            return self._chain.get_vm(self._chain.header)
        number = self._number(block)
        if number >= len(self._blocks):
            raise RpcError(NOT_FOUND, f"block not found: {block}")
        return self._chain.get_vm(self._chain.get_canonical_block_header_by_number(number))

    # ---- transactions ----

    def _send(self, raw: JSON) -> str:
        transaction = self._decoded(octets(raw))
        name = hexed(transaction.hash)
        if name in self._transactions:
            raise RpcError(REJECTED, "already known")
        due = self._chain.get_vm(self._chain.header).state.get_nonce(transaction.sender)
        if transaction.nonce < due:
            raise RpcError(REJECTED, f"nonce too low: next nonce {due}, tx nonce {transaction.nonce}")
        if transaction.nonce > due:
            # Threads that share a key may send out of order; a node keeps early transactions until their turn comes.
            self._waiting[transaction.sender, transaction.nonce] = transaction
            self._transactions[name] = transaction_json(transaction)
            return name
        try:
            self._mine(transaction)
        except ValidationError as error:
            raise RpcError(REJECTED, str(error)) from error
        self._send_waiting(transaction.sender, due + 1)
        return name

    def _send_waiting(self, sender: bytes, nonce: int) -> None:
        while (transaction := self._waiting.pop((sender, nonce), None)) is not None:
            try:
                self._mine(transaction)
            except ValidationError:
                # As in a node's pool: a transaction without enough coin is dropped, and its hash is unknown again.
                del self._transactions[hexed(transaction.hash)]
                return
            nonce += 1

    def _decoded(self, raw: bytes) -> Any:
        try:
            transaction: Any = self._chain.get_transaction_builder().decode(raw)
            transaction.check_signature_validity()
            chain_id = transaction.chain_id
        except Exception as error:  # py-evm, rlp and eth-keys raise different errors for invalid bytes
            raise RpcError(INVALID_PARAMS, f"not a transaction: {error}") from error
        if chain_id != self._chain_id:
            raise RpcError(REJECTED, f"invalid chain id for signer: have {chain_id} want {self._chain_id}")
        return transaction

    def _execute(self, call: JSON, block: JSON) -> Any:
        if not isinstance(call, dict):
            raise RpcError(INVALID_PARAMS, "a call must be an object")
        vm = self._vm(block)
        sender = octets(call.get("from") or hexed(_NOBODY), 20)
        # Calls are free: with a base fee of zero, an account without coin can make them too.
        free = self._chain.get_vm(vm.get_header().copy(base_fee_per_gas=0))
        unsigned = free.create_unsigned_transaction(
            nonce=free.state.get_nonce(sender),
            gas_price=0,
            gas=min(quantity(call.get("gas", _CALL_GAS)), _CALL_GAS),
            to=octets(call["to"], 20) if call.get("to") else b"",
            value=quantity(call.get("value", 0)),
            data=octets(call.get("data") or call.get("input") or "0x"),
        )
        try:
            computation = free.state.apply_transaction(SpoofTransaction(unsigned, from_=sender))
        except (ValidationError, VMError) as error:
            raise RpcError(REJECTED, str(error)) from error
        if computation.is_error and isinstance(computation.error, Revert):
            raise revert_error(computation.output)
        if computation.is_error:
            raise RpcError(REJECTED, f"execution failed: {computation.error!r}")
        return computation

    # ---- JSON-RPC ----

    def _method_table(self) -> dict[str, Callable[..., JSON]]:
        return {
            "web3_clientVersion": lambda: "x402guard/eth-tester",
            "net_version": lambda: str(self._chain_id),
            "eth_chainId": lambda: hex(self._chain_id),
            "eth_syncing": lambda: False,
            "eth_accounts": self._get_accounts,
            "eth_blockNumber": lambda: hex(len(self._blocks) - 1),
            "eth_gasPrice": lambda: hex(self._chain.header.base_fee_per_gas + _TIP_WEI),
            "eth_maxPriorityFeePerGas": lambda: hex(_TIP_WEI),
            "eth_getBalance": self._get_balance,
            "eth_getCode": self._get_code,
            "eth_getStorageAt": self._get_storage_at,
            "eth_getTransactionCount": self._get_transaction_count,
            "eth_call": self._call,
            "eth_estimateGas": self._estimate_gas,
            "eth_sendRawTransaction": self._send,
            "eth_getTransactionByHash": lambda name: self._transactions.get(str(name).lower()),
            "eth_getTransactionReceipt": lambda name: self._receipts.get(str(name).lower()),
            "eth_getBlockByNumber": self._get_block_by_number,
            "eth_getBlockByHash": self._get_block_by_hash,
            "eth_getLogs": self._get_logs,
            "evm_increaseTime": self._increase_time,
            "evm_mine": self._mine_on_request,
        }

    def _get_accounts(self) -> list[JSON]:
        return []

    def _get_balance(self, address: JSON, block: JSON = None) -> str:
        return hex(self._vm(block).state.get_balance(octets(address, 20)))

    def _get_code(self, address: JSON, block: JSON = None) -> str:
        return hexed(self._vm(block).state.get_code(octets(address, 20)))

    def _get_storage_at(self, address: JSON, slot: JSON, block: JSON = None) -> str:
        value: int = self._vm(block).state.get_storage(octets(address, 20), quantity(slot))
        return hexed(value.to_bytes(32, "big"))

    def _get_transaction_count(self, address: JSON, block: JSON = None) -> str:
        return hex(self._vm(block).state.get_nonce(octets(address, 20)))

    def _call(self, call: JSON, block: JSON = None, _overrides: JSON = None) -> str:
        return hexed(self._execute(call, block).output)

    def _estimate_gas(self, call: JSON, block: JSON = None) -> str:
        computation = self._execute(call, block)
        used: int = computation.get_gas_used() + _INTRINSIC_GAS + _CALLDATA_BYTE_GAS * len(computation.msg.data)
        # Nested calls get 63/64 of the gas left, and refunds come afterwards, so the limit needs a margin.
        return hex(used + used // 4)

    def _get_block_by_number(self, block: JSON, full: JSON = False) -> JSON:
        number = self._number(block)
        return self._shown(number, full=bool(full)) if number < len(self._blocks) else None

    def _get_block_by_hash(self, block_hash: JSON, full: JSON = False) -> JSON:
        number = self._number_of_hash(block_hash)
        return None if number is None else self._shown(number, full=bool(full))

    def _shown(self, number: int, *, full: bool) -> JSON:
        block = self._blocks[number]
        return block if full else block | {"transactions": [each["hash"] for each in block["transactions"]]}

    def _get_logs(self, query: JSON) -> list[JSON]:
        if not isinstance(query, dict):
            raise RpcError(INVALID_PARAMS, "a log filter must be an object")
        if "blockHash" in query:
            first = last = self._number({"blockHash": query["blockHash"]})
        else:
            first, last = self._number(query.get("fromBlock")), self._number(query.get("toBlock"))
        wanted = query.get("address") or []
        addresses = [each.lower() for each in (wanted if isinstance(wanted, list) else [wanted])]
        topics = query.get("topics") or []
        return [
            log
            for block in self._blocks[first : last + 1]
            for transaction in block["transactions"]
            for log in self._receipts[transaction["hash"]]["logs"]
            if log_matches(log, addresses, topics)
        ]

    def _increase_time(self, seconds: JSON) -> int:
        if quantity(seconds) < 0:
            raise RpcError(INVALID_PARAMS, "a chain's clock cannot go back")
        self._offset_s += quantity(seconds)
        return self._offset_s

    def _mine_on_request(self) -> str:
        self._mine()
        return "0x0"
