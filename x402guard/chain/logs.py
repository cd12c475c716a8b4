"""Searches a chain's event logs for the use of a nonce, and for the transfers that left the wallet.

Sources: EIP-20 (Transfer), EIP-3009 (AuthorizationUsed, AuthorizationCanceled), Permit2's SignatureTransfer
(UnorderedNonceInvalidation; it emits nothing when a payment uses a nonce).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, Final

from msgspec import Struct

from x402guard.chain.calldata import amount_settled, nonce_settled
from x402guard.chain.rpc import (
    ChainUnreadable,
    JsonRpc,
    NodeRefuses,
    PaymentUnreadable,
    hexadecimal,
    octets,
    quantity,
)
from x402guard.kernel.evm import Address, checksum_address
from x402guard.kernel.intent import Intent
from x402guard.kernel.typed_data import PERMIT2
from x402guard.ledger.findings import Cancelled, Settled
from x402guard.ledger.owner import MOST_AHEAD_MS

BLOCKS_AT_ONCE: Final = 2_000
"""The maximum number of blocks in one log query: public nodes accept no more."""

MAX_ASKED: Final = 200
"""The maximum number of log queries in one search."""


MOST_READ: Final = 100
"""The maximum number of transactions read to find one payment."""

_SPACING_S: Final = 2
"""Seconds between two blocks, for the first guess where a time is. Most chains of x402 have this spacing."""

CLOCKS_APART_S: Final = 600
"""The maximum difference between the local clock and a chain's clock, in seconds, that a search of logs allows for."""


TRANSFER: Final = (
    "0xddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"  # Transfer(address,address,uint256)
)
USED: Final = "0x98de503528ee59b575ef0c0a2576a82497bfc029a5685b209e9ec333479b10a5"  # AuthorizationUsed(address,bytes32)
CANCELED: Final = (
    "0x1cdd46ff242716cdaa72d159d339a485b3438398348d68f09d7c8c0a59353d81"  # AuthorizationCanceled(address,bytes32)
)
INVALIDATED: Final = "0x3704902f963766a4e561bbaab6e6cdc1b1dd12f6e9e99648da8843b3f46b918d"  # UnorderedNonceInvalidation(address,uint256,uint256)


class Block(Struct, frozen=True):
    """A block: its hash, number, and time in unix seconds."""

    hash: str
    number: int
    time: int

    @classmethod
    def of(cls, answer: Any) -> Block:
        """Return the block in a node's answer. Raises ``NodeRefuses`` if there is none."""
        if type(answer) is not dict and not isinstance(answer, Mapping):
            raise NodeRefuses("the node has no such block")
        return cls(hexadecimal(answer["hash"]), quantity(answer["number"]), quantity(answer["timestamp"]))


class Log(Struct, frozen=True):
    """One event log."""

    address: str
    topics: tuple[str, ...]
    data: bytes
    transaction: str
    index: int
    block: int

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Log:
        """Return the log in a node's answer. Raises ``KeyError`` if a field is missing."""
        return cls(
            address=str(answer["address"]).lower(),
            topics=tuple(map(hexadecimal, answer["topics"])),
            data=octets(answer["data"]),
            transaction=hexadecimal(answer["transactionHash"]),
            index=quantity(answer["logIndex"]),
            block=quantity(answer["blockNumber"]),
        )

    def is_transfer(self, token: Address, payer: Address, payee: Address | None = None) -> bool:
        """True for a Transfer of *token* from *payer*, and to *payee* if given."""
        wanted = (TRANSFER, padded(payer)) if payee is None else (TRANSFER, padded(payer), padded(payee))
        return self.address == token.lower() and len(self.topics) == 3 and self.topics[: len(wanted)] == wanted

    @property
    def amount(self) -> int:
        """The amount of a Transfer, in atomic units."""
        return int.from_bytes(self.data, "big")

    @property
    def payee(self) -> Address:
        """The receiving address of a Transfer."""
        return checksum_address(bytes.fromhex(self.topics[2][-40:]))


def padded(address: str) -> str:
    """Return an address as a topic of an event log: 32 bytes as 0x and hex."""
    return "0x" + address[2:].lower().rjust(64, "0")


def head_of(rpc: JsonRpc) -> Block:
    """Return the latest block."""
    return Block.of(rpc.call("eth_getBlockByNumber", "latest", False))  # noqa: FBT003 - the RPC's own signature


def numbered(rpc: JsonRpc, number: int) -> Block:
    """Return the block of a number, of the chain that the node takes for the right one."""
    return Block.of(rpc.call("eth_getBlockByNumber", hex(number), False))  # noqa: FBT003


def is_canonical(rpc: JsonRpc, transaction: str, final: Block) -> bool:
    """True if the block of a transaction is the node's own of its number, and no later than *final*."""
    receipt = rpc.call("eth_getTransactionReceipt", transaction)
    if not isinstance(receipt, Mapping):
        return False
    number = quantity(receipt["blockNumber"])
    return number <= final.number and numbered(rpc, number).hash == hexadecimal(receipt["blockHash"])


def block_at(rpc: JsonRpc, time_unix: int, head: Block, low: int = 0) -> int:
    """Return the number of the last block, from *low* to *head*, that is not later than *time_unix* (unix seconds).

    Returns *low* if all of them are later. Blocks are about evenly spaced, so it looks where the blocks that it knows say
    that the answer is; each third look halves what is left, which bounds their number.
    """
    if head.time <= time_unix:
        return max(low, head.number)
    late, early, high, looks = head, None, head.number - 1, 0
    while low < high:
        other = early or head
        blocks, seconds = abs(late.number - other.number), abs(late.time - other.time)
        if not blocks or not seconds:
            blocks, seconds = 1, _SPACING_S
        guess = late.number - -(-(late.time - time_unix) * blocks // seconds)
        looks += 1
        seen = min(max(guess if looks % 3 else (low + high + 1) // 2, low + 1), high)
        block = Block.of(rpc.call("eth_getBlockByNumber", hex(seen), False))  # noqa: FBT003
        if block.time <= time_unix:
            early, low = block, seen
        else:
            late, high = block, seen - 1
    return low


def _logs(rpc: JsonRpc, address: str, topics: Sequence[Any], first: int, last: int) -> Iterator[tuple[int, list[Log]]]:
    """Yield (last block searched, logs up to it), one range at a time. After a refusal by a node, the range is halved.

    It ends after ``MAX_ASKED`` queries, so a caller that needs all logs has to check the last block.
    """
    size, asked = BLOCKS_AT_ONCE, 0
    while first <= last and asked < MAX_ASKED:
        asked += 1
        end = min(last, first + size - 1)
        query = {"address": address, "topics": list(topics), "fromBlock": hex(first), "toBlock": hex(end)}
        try:
            found = _listed(rpc.call("eth_getLogs", query))
        except NodeRefuses:
            if size == 1:
                raise
            size //= 2
            continue
        # Checked here too, because a node may ignore the filter.
        yield end, [log for log in map(Log.of, found) if log.address == address.lower() and first <= log.block <= end]
        first = end + 1


def _listed(answer: Any) -> Sequence[Any]:
    """Return a node's list of logs. Raises ``TypeError`` if it is none: an empty text or object does not mean no logs."""
    if isinstance(answer, list | tuple):
        return answer
    raise TypeError(f"logs are a list, not {type(answer).__name__}")


def _all_logs_of(rpc: JsonRpc, address: str, topics: Sequence[Any], first: int, last: int) -> Iterator[Log]:
    """Yield every log. Raises ``NodeRefuses`` if one search does not reach the last block."""
    upto = first - 1
    for end, logs in _logs(rpc, address, topics, first, last):
        yield from logs
        upto = end
    if upto < last:
        raise NodeRefuses(f"{last - upto} blocks are left after the log queries that one search may send")


def nonce_used(rpc: JsonRpc, intent: Intent, block: Any) -> bool:
    """True if the payment's nonce is used as of *block* (a tag, a number, or EIP-1898)."""
    if intent.method == "eip3009":
        nonce = intent.nonce.to_bytes(32, "big")
        types = ["address", "bytes32"]
        # Some tokens return more than 0 and 1: a cancelled authorization is not unused.
        return rpc.view(intent.token, "authorizationState", types, [intent.payer, nonce], block) != 0
    # Permit2 keeps one bit per nonce: the high 248 bits name the word, the low 8 the bit in it.
    word = rpc.view(PERMIT2, "nonceBitmap", ["address", "uint256"], [intent.payer, intent.nonce >> 8], block)
    return bool(word >> (intent.nonce & 0xFF) & 1)


def nonce_used_at(rpc: JsonRpc, intent: Intent, final: Block) -> bool | None:
    """Return whether a nonce is used as of a final block; None where the node does not keep that state, and it is used now.

    A pruned node has the state of few blocks, and some know no EIP-1898. A used nonce never becomes unused: one that is
    unused at a later block was unused at each ancestor of it.
    """
    try:
        return nonce_used(rpc, intent, {"blockHash": final.hash, "requireCanonical": True})
    except NodeRefuses as refusal:
        head = head_of(rpc)
        if head.number < final.number or numbered(rpc, final.number).hash != final.hash:
            raise PaymentUnreadable("the newest block does not follow the final one") from refusal
        used = _used_now(rpc, intent, head)
        if not used and numbered(rpc, head.number).hash != head.hash:
            raise PaymentUnreadable("the newest block was undone meanwhile") from refusal
        return None if used else False


def _used_now(rpc: JsonRpc, intent: Intent, head: Block) -> bool:
    try:
        return nonce_used(rpc, intent, {"blockHash": head.hash, "requireCanonical": True})
    except NodeRefuses:
        return nonce_used(rpc, intent, hex(head.number))


def transaction_in(rpc: JsonRpc, transaction: str) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Return (transaction, receipt), or None if the node does not show both."""
    sent = rpc.call("eth_getTransactionByHash", transaction)
    receipt = rpc.call("eth_getTransactionReceipt", transaction)
    return (sent, receipt) if isinstance(sent, Mapping) and isinstance(receipt, Mapping) else None


def settlement_in(
    rpc: JsonRpc, intent: Intent, transaction: str, shown: tuple[Mapping[str, Any], Mapping[str, Any]], final: Block
) -> Settled | None:
    """Return the settlement of this payment by this transaction, *shown* with its receipt; or None.

    Its calldata, its status and exactly one Transfer log have to show it.
    """
    sent, receipt = shown
    # Receipts had no status before Byzantium, and a seller may name any transaction. Some nodes write true.
    status = receipt.get("status", 0)
    if not (status if isinstance(status, bool) else quantity(status) == 1):
        return None
    amount = _amount_in(intent, sent)
    if amount is None:
        return None
    logs = [log for log in _transfers(receipt, intent) if log.amount == amount]
    if len(logs) != 1:
        return None
    index = _index_in_block(rpc, intent, logs[0], receipt)
    return Settled(amount, transaction.lower(), index, quantity(receipt["blockNumber"]) <= final.number)


def _index_in_block(rpc: JsonRpc, intent: Intent, found: Log, receipt: Mapping[str, Any]) -> int:
    """Return the number of a Transfer in its block, by which ``eth_getLogs`` names it.

    Some nodes count the logs of a receipt from 0 in each transaction. Then it is looked up; where there are no logs, the
    receipt's own number names it.
    """
    first = min((quantity(log["logIndex"]) for log in _listed(receipt["logs"])), default=0)
    if first or not quantity(receipt.get("transactionIndex", 0)):
        return found.index
    asked = [TRANSFER, padded(intent.payer), padded(intent.payee)]
    try:
        same = [
            log
            for log in _all_logs_of(rpc, intent.token, asked, found.block, found.block)
            if log.transaction == found.transaction and log.amount == found.amount
        ]
    except NodeRefuses:
        return found.index
    return same[0].index if len(same) == 1 else found.index


def _amount_in(intent: Intent, sent: Mapping[str, Any]) -> int | None:
    """Return the amount of *intent* that a transaction's own call settles, in atomic units; None for another call."""
    return amount_settled(intent, str(sent.get("to")), octets(sent.get("input", "0x")))


def _all_logs(receipt: Mapping[str, Any]) -> list[Log]:
    around = {"transactionHash": receipt.get("transactionHash", "0x"), "blockNumber": receipt["blockNumber"]}
    return [Log.of({**around, **log}) for log in _listed(receipt["logs"])]


def _transfers(receipt: Mapping[str, Any], intent: Intent) -> list[Log]:
    return [log for log in _all_logs(receipt) if log.is_transfer(intent.token, intent.payer, intent.payee)]


def find_cause(rpc: JsonRpc, intent: Intent, held_unix: int, final: Block) -> Settled | Cancelled | None:
    """Search the logs for the transaction that used a nonce; None if they do not show it.

    *held_unix* is when the hold was written, in unix seconds. The search starts ``CLOCKS_APART_S`` earlier, because
    clocks differ.
    """
    head = max(head_of(rpc), final, key=lambda block: block.number)  # another node may have named the final block
    first = cache(lambda: block_at(rpc, held_unix - CLOCKS_APART_S, head))
    if intent.method == "eip3009":
        return _cause_of_authorization(rpc, intent, first(), head.number, final)
    near = block_at(rpc, held_unix, head)
    last = _last_that_takes(rpc, intent, head, near)
    # Most payments are found from the block of the hold on: the first block is searched for where one is not.
    return _payment_by_permit(rpc, intent, (first, near, last), final) or _cancelled_permit(
        rpc, intent, (first(), held_unix), head, final
    )


def _last_that_takes(rpc: JsonRpc, intent: Intent, head: Block, near: int) -> int:
    """Return the last block that a payment's deadline allows; the head if the node does not show one of the blocks."""
    try:
        return block_at(rpc, intent.valid_until, head, near)
    except NodeRefuses:
        return head.number


def _cause_of_authorization(
    rpc: JsonRpc, intent: Intent, first: int, head: int, final: Block
) -> Settled | Cancelled | None:
    nonce = f"0x{intent.nonce:064x}"
    for log in _all_logs_of(rpc, intent.token, [[USED, CANCELED], padded(intent.payer), nonce], first, head):
        if log.topics == (CANCELED, padded(intent.payer), nonce):
            return Cancelled(log.transaction, final=log.block <= final.number)
        if log.topics == (USED, padded(intent.payer), nonce):
            return _settled_by_event(rpc, intent, log, final)
    return None


def _settled_by_event(rpc: JsonRpc, intent: Intent, used: Log, final: Block) -> Settled | None:
    """Return the settlement of an ``AuthorizationUsed`` event: the next fitting Transfer, in any kind of call."""
    # The token's logs of that block, not the receipt: a seller can fill the transaction with more logs than are read.
    asked = [TRANSFER, padded(intent.payer), padded(intent.payee)]
    for log in _all_logs_of(rpc, intent.token, asked, used.block, used.block):
        right = log.transaction == used.transaction and log.amount == intent.amount_atomic
        if right and log.index > used.index and log.is_transfer(intent.token, intent.payer, intent.payee):
            return Settled(intent.amount_atomic, used.transaction, log.index, used.block <= final.number)
    return None


Span = tuple[Callable[[], int], int, int]
"""The first block to search, as a function, because finding it asks the node; that of the hold; the last one that may take
the payment."""


def _payment_by_permit(rpc: JsonRpc, intent: Intent, blocks: Span, final: Block) -> Settled | None:
    """Search the wallet's Transfers to the payee for the payment, starting at those nearest to the block of the hold.

    A payee may have been paid thousands of times in *blocks*. A payment that is not among the nearest ``MOST_READ`` counts
    at its ceiling, and ``reconcile`` finds it when it compares the whole wallet.
    """
    for log in islice(_fitting(rpc, intent, blocks), MOST_READ):
        sent = rpc.call("eth_getTransactionByHash", log.transaction)
        if not isinstance(sent, Mapping) or _amount_in(intent, sent) is None:
            continue  # another payment to this payee: its receipt is not asked for
        receipt = rpc.call("eth_getTransactionReceipt", log.transaction)
        if isinstance(receipt, Mapping):
            settled = settlement_in(rpc, intent, log.transaction, (sent, receipt), final)
            if settled is not None:
                return settled
    return None


def _fitting(rpc: JsonRpc, intent: Intent, blocks: Span) -> Iterator[Log]:
    """Yield the Transfers to the payee that may be this payment's by their amount, from its hold on, then before it."""
    first, near, last = blocks
    asked = [TRANSFER, padded(intent.payer), padded(intent.payee)]
    least = intent.amount_atomic if intent.scheme == "exact" else 1

    def fitting(since: int, upto: int) -> list[Log]:
        found = _all_logs_of(rpc, intent.token, asked, since, upto)
        return [log for log in found if least <= log.amount <= intent.amount_atomic]

    yield from fitting(near, last)
    yield from reversed(fitting(first(), near - 1))


def _cancelled_permit(
    rpc: JsonRpc, intent: Intent, since: tuple[int, int], head: Block, final: Block
) -> Cancelled | None:
    """Search for the event that gave a nonce up. *since*: the first block to search, and when the hold was written."""
    first, held_unix = since
    events = _all_logs_of(rpc, PERMIT2, [INVALIDATED, padded(intent.payer)], first, head.number)
    log = next((log for log in events if _invalidates(log, intent)), None)
    if log is None:
        return None
    # Permit2 emits the event also for a nonce that a payment has used. Only an unused nonce can be cancelled.
    found = Cancelled(log.transaction, final=log.block <= final.number)
    try:
        if not log.block or nonce_used(rpc, intent, hex(log.block - 1)):
            return None
    except NodeRefuses:  # most nodes keep the state of an hour or less, and all logs
        if _paid_in(rpc, intent, block_at(rpc, held_unix - MOST_AHEAD_MS // 1000, head), log.block):
            raise
        return found
    return None if _paid_in(rpc, intent, log.block, log.block) else found


def _paid_in(rpc: JsonRpc, intent: Intent, first: int, last: int) -> bool:
    """True if a Transfer to the payee in these blocks may be this payment's: its nonce is this one, or it is not shown.

    A separate query: a longer search may not have reached it.
    """
    asked = [TRANSFER, padded(intent.payer), padded(intent.payee)]
    # Any account can emit a Transfer of 0 from any wallet.
    paid = [log for log in _all_logs_of(rpc, intent.token, asked, first, last) if log.amount]
    if len(paid) > MOST_READ:
        return True
    for log in paid:
        sent = rpc.call("eth_getTransactionByHash", log.transaction)
        # The calldata alone: an event of another payment in the same transaction may stand before this Transfer.
        if not isinstance(sent, Mapping):
            return True
        if nonce_settled(intent.token, str(sent.get("to")), octets(sent.get("input", "0x"))) in (None, intent.nonce):
            return True
    return False


def _invalidates(log: Log, intent: Intent) -> bool:
    if log.topics != (INVALIDATED, padded(intent.payer)) or len(log.data) != 64:
        return False
    word, mask = int.from_bytes(log.data[:32], "big"), int.from_bytes(log.data[32:], "big")
    return word == intent.nonce >> 8 and bool(mask >> (intent.nonce & 0xFF) & 1)


def outgoing_logs(
    rpc: JsonRpc, token: Address, payer: Address, first: int, last: int
) -> Iterator[tuple[int, list[Log]]]:
    """Yield (last block searched, the Transfers of *token* that left *payer* up to it), one range at a time."""
    for end, logs in _logs(rpc, token, [TRANSFER, padded(payer)], first, last):
        # Any account can emit a Transfer of 0 from any wallet, and some spam every wallet that way.
        yield end, [log for log in logs if log.is_transfer(token, payer) and log.amount]


def nonce_behind(rpc: JsonRpc, token: Address, payer: Address, transaction: str, log_index: int) -> int | None:
    """Return the nonce whose authorization moved a Transfer, by the calldata or the token's event before it; else None.

    Raises ``ChainUnreadable`` if the node does not show the transaction.
    """
    sent = rpc.call("eth_getTransactionByHash", transaction)
    if not isinstance(sent, Mapping):
        raise ChainUnreadable(f"transaction {transaction} is in the logs, but the node does not show it")
    nonce = nonce_settled(token, str(sent.get("to")), octets(sent.get("input", "0x")))
    if nonce is not None:
        return nonce
    block = quantity(sent["blockNumber"])
    used = [
        log for log in _all_logs_of(rpc, token, [USED, padded(payer)], block, block)
        if log.transaction == transaction and log.topics[:2] == (USED, padded(payer)) and log.index < log_index
    ]  # fmt: skip
    return int(used[-1].topics[2], 16) if used and len(used[-1].topics) == 3 else None
