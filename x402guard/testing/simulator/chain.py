"""A model of a chain: blocks, finality, a pool of transactions, reorganisations. Amounts are in atomic units."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from x402guard.chain.logs import CANCELED, INVALIDATED, TRANSFER, USED, padded
from x402guard.kernel.evm import Address
from x402guard.kernel.intent import Intent
from x402guard.kernel.typed_data import PERMIT2
from x402guard.testing.simulator.draws import Draws

STRANGER: Final = "0x" + "5a" * 20
"""The address that transfers past the ledger go to."""

EventLog = tuple[str, tuple[str, ...], bytes]
"""The address, the topics and the data of an event."""

SimEvent = tuple[str, tuple[str, ...], dict[str, Any]]
"""The emitting contract in lower case, the topics, and the log as a node shows it."""


@dataclass(slots=True)
class Part:
    """One authorization in a transaction, and the amount that it takes."""

    intent: Intent
    amount: int


@dataclass(eq=False, slots=True)
class Transaction:
    """A transaction. ``wrapped`` hides the calls of a settlement in a contract of the seller's.

    Attributes:
        parts: the authorizations that it settles or cancels.
        not_before: the earliest time of its block, in unix seconds.
        outside: of a transfer past the ledger: token, wallet, amount.
        called: the contract and the input of its call, once an endpoint has shown them.
        succeeded: whether it did anything, in the block that holds it.
    """

    hash: str
    kind: Literal["settle", "wrapped", "cancel", "outside"]
    parts: tuple[Part, ...] = ()
    not_before: int = 0
    outside: tuple[Address, Address, int] | None = None
    called: tuple[str, bytes] | None = None
    succeeded: bool = True


@dataclass(slots=True)
class SimBlock:
    """A block. ``used`` holds for each nonce used in it: what used it, the amount taken, and the transaction."""

    number: int
    hash: str
    time: int
    transactions: list[Transaction] = field(default_factory=list)
    used: dict[int, tuple[str, int, Transaction]] = field(default_factory=dict)
    events: list[SimEvent] = field(default_factory=list)


class SimChain:
    """The canonical chain, with a block each *block_s* seconds, and finality *depth* blocks behind the last.

    A reorganisation replaces ``blocks``, so that an endpoint can keep the blocks of a fork.
    ``used`` is the block of each nonce that is used, ``places`` the block of each transaction by its hash; ``words`` the
    nonce behind each word of Permit2's bitmap, used once on any fork (nonces are random, so that no two share a word).
    ``eventful`` are the numbers of the blocks, in their order, in which a contract (in lower case) emits events of one kind
    (their first topic).
    """

    def __init__(self, draws: Draws, now_unix: int, depth: int, block_s: int) -> None:
        self._draws, self.depth, self.block_s = draws, depth, block_s
        self.blocks: list[SimBlock] = []
        self.eventful: dict[tuple[str, str], list[int]] = {}
        self.used: dict[int, int] = {}
        self.places: dict[str, int] = {}
        self.words: dict[int, int] = {}
        self.pool: list[Transaction] = []
        self.touched: list[int] = []
        """The nonces whose fate has changed since the last check."""
        self.outside_units = 0
        self.final_number = 2  # what was there before the ledger began is final
        for number in range(3):
            self.blocks.append(SimBlock(number, self.new_hash(), now_unix - (2 - number) * block_s))

    def new_hash(self) -> str:
        """Return a hash that no block and no transaction has."""
        return f"0x{self._draws.bits(256):064x}"

    @property
    def final(self) -> SimBlock:
        """The last block that no reorganisation undoes."""
        return self.blocks[self.final_number]

    def fate(self, nonce: int) -> tuple[str, int, bool] | None:
        """Return what used a nonce, the amount that it took, and whether that is final; None if it is unused."""
        number = self.used.get(nonce)
        if number is None:
            return None
        kind, amount, _ = self.blocks[number].used[nonce]
        return kind, amount, number <= self.final_number

    def takeable(self, intent: Intent) -> int:
        """Return the atomic units that a signature has taken on this chain, or may still take."""
        fate = self.fate(intent.nonce)
        if fate is not None and fate[2]:
            return fate[1]
        return 0 if intent.dead_at(self.final.time) else intent.amount_atomic  # block times only grow

    def taken(self, nonce: int) -> int:
        """Return the atomic units that a nonce has taken as of the last block."""
        fate = self.fate(nonce)
        return 0 if fate is None else fate[1]

    def submit(self, transaction: Transaction) -> str:
        """Put a transaction into the pool, and return its hash."""
        self.pool.append(transaction)
        return transaction.hash

    def knows(self, transaction: Transaction) -> bool:
        """Return whether a transaction waits in the pool, or one of its authorizations is used in a block."""
        return transaction in self.pool or any(part.intent.nonce in self.used for part in transaction.parts)

    def mine(self, now_unix: int, *, left_out: frozenset[str] = frozenset()) -> None:
        """Add a block. The transactions *left_out* (by hash) wait for a later one."""
        parent = self.blocks[-1]
        block = SimBlock(parent.number + 1, self.new_hash(), max(parent.time + 1, now_unix))
        self.blocks.append(block)
        if self.pool:
            waiting = []
            for each in self.pool:
                if each.not_before > block.time or each.hash in left_out:
                    waiting.append(each)
                    continue
                self._execute(each, block)
                block.transactions.append(each)
                self.places[each.hash] = block.number
            self.pool = waiting
            for kind in {(emitter, topics[0]): None for emitter, topics, _ in block.events}:
                self.eventful.setdefault(kind, []).append(block.number)
        self.final_number = max(self.final_number, block.number - self.depth)

    def _execute(self, transaction: Transaction, block: SimBlock) -> None:
        events: list[EventLog] = []
        if transaction.outside is not None:
            token, wallet, amount = transaction.outside
            events.append(_transfer(token, wallet, STRANGER, amount))
            self.outside_units += amount
        for part in transaction.parts:
            if self._is_valid(part, block):
                self._use(transaction, part, block, events)
        transaction.succeeded = bool(events)
        for emitter, topics, data in events:
            log = {"address": emitter, "topics": topics, "data": data, "logIndex": len(block.events)}
            log |= {"transactionHash": transaction.hash, "blockNumber": block.number}
            block.events.append((emitter.lower(), topics, log))

    def _is_valid(self, part: Part, block: SimBlock) -> bool:
        intent = part.intent
        started = intent.valid_after < block.time if intent.method == "eip3009" else intent.valid_after <= block.time
        return started and not intent.dead_at(block.time) and intent.nonce not in self.used

    def _use(self, transaction: Transaction, part: Part, block: SimBlock, events: list[EventLog]) -> None:
        intent, cancels = part.intent, transaction.kind == "cancel"
        self.used[intent.nonce] = block.number
        self.words[intent.nonce >> 8] = intent.nonce
        self.touched.append(intent.nonce)
        block.used[intent.nonce] = ("cancel", 0, transaction) if cancels else ("settle", part.amount, transaction)
        nonce = f"0x{intent.nonce:064x}"
        if cancels and intent.method == "eip3009":
            events.append((intent.token, (CANCELED, padded(intent.payer), nonce), b""))
        elif cancels:
            word, bit = (intent.nonce >> 8).to_bytes(32, "big"), (1 << (intent.nonce & 0xFF)).to_bytes(32, "big")
            events.append((PERMIT2, (INVALIDATED, padded(intent.payer)), word + bit))
        else:
            if intent.method == "eip3009":
                events.append((intent.token, (USED, padded(intent.payer), nonce), b""))
            events.append(_transfer(intent.token, intent.payer, intent.payee, part.amount))

    def reorganise(self, count: int, draws: Draws, *, dropped: float, twist: bool) -> bool:
        """Replace the last *count* blocks, but no final one. Returns whether there was one to replace.

        A part *dropped* of their transactions is forgotten by the pool; with *twist*, some settle another amount or
        cancel instead.
        """
        count = min(count, len(self.blocks) - 1 - self.final_number)
        if count <= 0:
            return False
        undone = self.blocks[-count:]
        self.blocks = self.blocks[:-count]
        for numbers in self.eventful.values():
            del numbers[bisect_left(numbers, len(self.blocks)) :]
        for block in undone:
            for nonce in block.used:
                del self.used[nonce]
                self.touched.append(nonce)
            for each in block.transactions:
                del self.places[each.hash]
                if each.outside is not None:
                    self.outside_units -= each.outside[2]
                elif draws.chance(dropped):
                    continue  # the seller holds the authorization, and may send it again
                self.pool.append(self._twisted(each, draws) if twist else each)
        draws.shuffle(self.pool)
        for block in undone:
            self.mine(block.time)
        return True

    def _twisted(self, each: Transaction, draws: Draws) -> Transaction:
        """Return another transaction with the same authorizations, as a seller may send once the first is undone."""
        if each.outside is not None or not draws.chance(0.4):
            return Transaction(self.new_hash(), each.kind, each.parts, each.not_before, each.outside)
        if draws.chance(0.5):
            kind: Literal["settle", "cancel"] = "cancel" if each.kind != "cancel" else "settle"
            intent = each.parts[0].intent
            part = Part(intent, 0 if kind == "cancel" else intent.amount_atomic)
            return Transaction(self.new_hash(), kind, (part,), each.not_before)
        changed = tuple(
            Part(part.intent, 1 + draws.below(part.intent.amount_atomic)) if part.intent.scheme == "upto" else part
            for part in each.parts
        )
        return Transaction(self.new_hash(), each.kind, changed, each.not_before)


def _transfer(token: str, source: str, target: str, amount: int) -> EventLog:
    return token, (TRANSFER, padded(source), padded(target)), amount.to_bytes(32, "big")
