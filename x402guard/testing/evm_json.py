"""Converts py-evm's objects to the shapes of Ethereum JSON-RPC."""

from typing import Any

from eth_abi.abi import decode as abi_decode
from eth_abi.exceptions import DecodingError

from x402guard.testing.engine import JSON, RpcError

INVALID_PARAMS = -32602
NOT_FOUND = -32001
REVERTED = 3

_ERROR_STRING = bytes.fromhex("08c379a0")
_LEGACY, _DYNAMIC_FEE = 0, 2


def quantity(value: JSON) -> int:
    """Read a JSON-RPC quantity (a hex string; a plain number is accepted too); raise RpcError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    try:
        return int(str(value), 16)
    except ValueError as error:
        raise RpcError(INVALID_PARAMS, f"not a quantity: {value!r}") from error


def octets(value: JSON, length: int | None = None) -> bytes:
    """Read JSON-RPC data (0x and hex digits), of exactly `length` bytes if given; raise RpcError for anything else."""
    try:
        data = bytes.fromhex(str(value).removeprefix("0x"))
    except ValueError as error:
        raise RpcError(INVALID_PARAMS, f"not hex data: {value!r}") from error
    if length is not None and len(data) != length:
        raise RpcError(INVALID_PARAMS, f"{length} bytes expected, got {len(data)}")
    return data


def hexed(data: bytes) -> str:
    """Write bytes as JSON-RPC data."""
    return "0x" + data.hex()


def revert_error(data: bytes) -> RpcError:
    """The error of a reverted call: code 3, the contract's reason as text if it gave one, and its data."""
    message = "execution reverted"
    if data.startswith(_ERROR_STRING):
        try:
            message += f": {abi_decode(['string'], data[4:])[0]}"
        except DecodingError:
            # The caller still gets the bytes as data.
            return RpcError(REVERTED, message, hexed(data))
    return RpcError(REVERTED, message, hexed(data))


def block_json(block: Any, transactions: list[JSON]) -> dict[str, JSON]:
    """A mined block, with its transactions as given (whole objects)."""
    header = block.header
    return {
        "number": hex(header.block_number),
        "hash": hexed(header.hash),
        "parentHash": hexed(header.parent_hash),
        "nonce": hexed(header.nonce),
        "mixHash": hexed(header.mix_hash),
        "sha3Uncles": hexed(header.uncles_hash),
        "logsBloom": hexed(header.bloom.to_bytes(256, "big")),
        "transactionsRoot": hexed(header.transaction_root),
        "receiptsRoot": hexed(header.receipt_root),
        "stateRoot": hexed(header.state_root),
        "miner": hexed(header.coinbase),
        "difficulty": hex(header.difficulty),
        "totalDifficulty": hex(header.difficulty),
        "extraData": hexed(header.extra_data),
        "size": "0x0",
        "gasLimit": hex(header.gas_limit),
        "gasUsed": hex(header.gas_used),
        "baseFeePerGas": hex(header.base_fee_per_gas),
        "timestamp": hex(header.timestamp),
        "transactions": transactions,
        "uncles": [],
    }


def transaction_json(transaction: Any) -> dict[str, JSON]:
    """A transaction that is not in a block yet: its block fields are null."""
    kind = getattr(transaction, "type_id", None) or _LEGACY
    fields: dict[str, JSON] = {
        "hash": hexed(transaction.hash),
        "type": hex(kind),
        "nonce": hex(transaction.nonce),
        "from": hexed(transaction.sender),
        "to": hexed(transaction.to) if transaction.to else None,
        "value": hex(transaction.value),
        "gas": hex(transaction.gas),
        "input": hexed(transaction.data),
        "chainId": hex(transaction.chain_id),
        "r": hex(transaction.r),
        "s": hex(transaction.s),
        "v": hex(transaction.v if kind == _LEGACY else transaction.y_parity),
        "blockHash": None,
        "blockNumber": None,
        "transactionIndex": None,
    }
    if kind != _LEGACY:
        fields["yParity"] = fields["v"]
        fields["accessList"] = [
            {"address": hexed(address), "storageKeys": [hexed(slot.to_bytes(32, "big")) for slot in slots]}
            for address, slots in transaction.access_list
        ]
    if kind < _DYNAMIC_FEE:
        fields["gasPrice"] = hex(transaction.gas_price)
    else:
        fields["maxFeePerGas"] = fields["gasPrice"] = hex(transaction.max_fee_per_gas)
        fields["maxPriorityFeePerGas"] = hex(transaction.max_priority_fee_per_gas)
    return fields


def receipt_json(transaction: Any, receipt: Any, header: Any, *, succeeded: bool, contract: bytes | None) -> JSON:
    """The receipt of the only transaction in the block of `header`; `contract` is the address it created, or None."""
    place = {
        "transactionHash": hexed(transaction.hash),
        "transactionIndex": "0x0",
        "blockHash": hexed(header.hash),
        "blockNumber": hex(header.block_number),
    }
    logs = [
        {
            **place,
            "address": hexed(log.address),
            "topics": [hexed(topic.to_bytes(32, "big")) for topic in log.topics],
            "data": hexed(log.data),
            "logIndex": hex(number),
            "removed": False,
        }
        for number, log in enumerate(receipt.logs)
    ]
    kind = getattr(transaction, "type_id", None) or _LEGACY
    price = (
        transaction.gas_price
        if kind < _DYNAMIC_FEE
        else min(transaction.max_fee_per_gas, header.base_fee_per_gas + transaction.max_priority_fee_per_gas)
    )
    return {
        **place,
        "from": hexed(transaction.sender),
        "to": hexed(transaction.to) if transaction.to else None,
        "contractAddress": hexed(contract) if contract else None,
        "cumulativeGasUsed": hex(receipt.gas_used),
        "gasUsed": hex(receipt.gas_used),
        "effectiveGasPrice": hex(price),
        "logs": logs,
        "logsBloom": hexed(receipt.bloom.to_bytes(256, "big")),
        "status": "0x1" if succeeded else "0x0",
        "type": hex(kind),
    }


def log_matches(log: JSON, addresses: list[str], topics: list[JSON]) -> bool:
    """Whether a log passes an `eth_getLogs` filter: one of the addresses (or no list), and each topic in order."""
    if addresses and log["address"] not in addresses:
        return False
    if len(topics) > len(log["topics"]):
        return False
    for wanted, topic in zip(topics, log["topics"], strict=False):
        choices = wanted if isinstance(wanted, list) else [wanted]
        if wanted is not None and topic not in [str(choice).lower() for choice in choices]:
            return False
    return True
