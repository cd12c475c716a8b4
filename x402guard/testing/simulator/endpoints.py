"""JSON-RPC endpoints of the model chain: they lag, stand on a dead fork, answer nonsense, limit, lie, or are down.

``SimRpc`` stands in for ``JsonRpc`` below the real chain reader, which decodes its calldata, logs and blocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from eth_abi.abi import encode
from typing_extensions import override

from x402guard.chain.rpc import ChainUnreadable, JsonRpc, NodeRefuses, is_rate_limit, selector
from x402guard.kernel.evm import Address
from x402guard.kernel.typed_data import EXACT_PROXY, UPTO_PROXY
from x402guard.testing.simulator.chain import SimBlock, SimChain, Transaction
from x402guard.testing.simulator.draws import Draws

FUNDS_UNITS: Final = 10**12
"""The balance and the Permit2 allowance of the wallet, in atomic units."""

_SELLERS_CONTRACT: Final = "0x" + "77" * 20
_LIMITED: Final = {"code": -32016, "message": "over rate limit"}
_NONSENSE: Final[Sequence[Any]] = (None, "", "0x", "yes", -1, {}, True, "0x" + "f" * 70, {"hash": "0x12"})


@dataclass(slots=True)
class Endpoint:
    """One endpoint. ``lag`` is in blocks; ``fork`` is the blocks that it stands on since it left the network.

    ``led_to`` is the blocks of another chain, where nothing was ever paid; they grow. It says which chain that is, unless
    it ``lies``.
    """

    lag: int = 0
    fork: list[SimBlock] | None = None
    down: bool = False
    limited: bool = False
    nonsense: float = 0.0
    no_logs: bool = False
    led_to: list[SimBlock] | None = None
    lies: bool = False
    used_on_fork: dict[int, int] = field(default_factory=dict)
    """The block of each nonce that is used on its fork."""

    def leave(self, blocks: Sequence[SimBlock], used: Mapping[int, int]) -> None:
        """Let it stand on these blocks from now on; *used* is the block of each nonce in them."""
        self.fork, self.used_on_fork = list(blocks), dict(used)

    def heal(self) -> None:
        """Make it honest, complete and up to date."""
        well = Endpoint()
        for each in fields(self):
            setattr(self, each.name, getattr(well, each.name))

    def lead_away(self, *, lies: bool) -> None:
        """Let it answer from another chain."""
        self.heal()
        self.led_to, self.lies = [], lies

    @property
    def is_well(self) -> bool:
        """True if it answers everything, rightly."""
        return self == Endpoint()


class SimRpc(JsonRpc):
    """The client of several endpoints, asked in turn from the one that answered last.

    Args:
        network: the CAIP-2 id.
        chain: the canonical chain.
        endpoints: its endpoints.
        draws: the stream of what goes wrong in a call.
    """

    def __init__(self, network: str, chain: SimChain, endpoints: Sequence[Endpoint], draws: Draws) -> None:
        self.network = network
        self._chain, self._endpoints, self._draws = chain, endpoints, draws
        self._first = 0
        self._right: set[int] = set()
        self._pinned: int | None = None
        self.hops = 0.0
        self._calls: dict[str, Callable[[Endpoint, Sequence[Any]], Any]] = {
            "eth_blockNumber": lambda node, _: self._seen(node)[1],
            "eth_getBlockByNumber": self._block,
            "eth_getLogs": self._logs,
            "eth_getTransactionByHash": self._sent,
            "eth_getTransactionReceipt": self._receipt,
        }

    @override
    def each_node(self) -> Iterator[JsonRpc]:
        return self._pinning(self._in_turn())

    @override
    def others(self) -> Iterator[JsonRpc]:
        return self._pinning([at for at in self._in_turn() if at != self._pinned])

    def _pinning(self, turns: Sequence[int]) -> Iterator[JsonRpc]:
        before = self._pinned
        for at in turns:
            self._pinned = at
            try:
                yield self
            finally:
                self._pinned = before

    @override
    def check_chain(self) -> None:
        self._right.discard(self._first if self._pinned is None else self._pinned)
        self._node()

    @override
    def close(self) -> None:
        """Do nothing: there is no connection."""

    @override
    def _in_turn(self) -> Sequence[int]:
        turns = range(len(self._endpoints))
        return [(self._first + turn) % len(turns) for turn in turns]

    def _node(self) -> Endpoint:
        hop = self._draws.below(len(self._endpoints)) if self.hops and self._draws.chance(self.hops) else None
        if self._pinned is not None:
            turns: Sequence[int] = (self._pinned,)
        else:
            self._first = self._first if hop is None else hop
            turns = self._in_turn()
        for at in turns:
            node = self._endpoints[at]
            if not node.down:
                if at not in self._right:
                    self._note_chain(at, node)
                self._first = at
                return node
        raise ChainUnreadable("no endpoint answers")

    def _note_chain(self, at: int, node: Endpoint) -> None:
        """Ask an endpoint once which chain it serves, as the client does; it has served the right one before."""
        if node.led_to is not None and not node.lies:
            raise ChainUnreadable(f"chains[{self.network!r}]: the endpoint serves another chain")
        self._right.add(at)

    @override
    def call(self, method: str, *params: Any) -> Any:
        node = self._node()
        if node.limited and self._draws.chance(0.5):  # an error that says nothing about the question
            raise ChainUnreadable("limited") if is_rate_limit(_LIMITED) else NodeRefuses("limited")
        if node.nonsense and self._draws.chance(node.nonsense):
            return self._draws.pick(_NONSENSE)
        return self._calls[method](node, params)

    @override
    def view(self, contract: Address, name: str, types: Sequence[str], values: Sequence[Any], block: Any) -> int:
        node = self._node()
        if node.nonsense and self._draws.chance(node.nonsense):
            raise ChainUnreadable(f"{name} of {contract} returned 3 bytes, not 32")
        if name in ("balanceOf", "allowance"):
            return FUNDS_UNITS
        upto = self._upto(node, *self._seen(node), block)
        if name == "authorizationState":
            return int(self._used_upto(node, int.from_bytes(values[1], "big"), upto))
        nonce = self._chain.words.get(values[1])
        return 1 << (nonce & 0xFF) if nonce is not None and self._used_upto(node, nonce, upto) else 0

    def _used_upto(self, node: Endpoint, nonce: int, upto: int) -> bool:
        if node.led_to is not None:
            return False
        if node.fork is not None:
            number = node.used_on_fork.get(nonce)
            return number is not None and number <= upto
        number = self._chain.used.get(nonce)
        return number is not None and number <= upto

    def _others(self, node: Endpoint) -> list[SimBlock]:
        """Return the blocks of a node that has left the network, or answers from another chain."""
        if node.fork is not None:
            return node.fork
        known = node.led_to or []
        for each in self._chain.blocks[len(known) :]:
            known.append(SimBlock(each.number, f"0x{each.number:064x}", each.time))
        node.led_to = known
        return known

    def _seen(self, node: Endpoint) -> tuple[list[SimBlock], int]:
        """Return a node's blocks, and the number of the last that it knows. One that has left the network does not lag."""
        if node.fork is None and node.led_to is None:
            blocks = self._chain.blocks
            return blocks, max(len(blocks) - 1 - node.lag, 0)
        blocks = self._others(node)
        return blocks, max(len(blocks) - 1, 0)

    def _upto(self, node: Endpoint, blocks: list[SimBlock], last: int, block: Any) -> int:
        """Return the number of the block that *block* names: a tag, a number, or EIP-1898."""
        if block == "latest":
            return last
        if block in ("finalized", "safe"):
            behind = last - self._chain.depth
            follows = blocks is self._chain.blocks and not node.lag
            final = max(behind, self._chain.final_number) if follows else behind
            return min(max(final, 0), last)
        if type(block) is dict:
            for number in range(last, -1, -1):
                if blocks[number].hash == block["blockHash"]:
                    return number
            raise NodeRefuses("no canonical block has this hash")
        number = int(block, 16)
        if number > last:
            raise NodeRefuses("there is no such block yet")
        return number

    def _block(self, node: Endpoint, params: Sequence[Any]) -> Any:
        try:
            blocks, last = self._seen(node)
            block = blocks[self._upto(node, blocks, last, params[0])]
        except NodeRefuses:
            return None
        return {"hash": block.hash, "number": block.number, "timestamp": block.time}

    def _logs(self, node: Endpoint, params: Sequence[Any]) -> Any:
        if node.no_logs:
            raise NodeRefuses("this node keeps no old logs")
        query = params[0]
        wanted, address = query["topics"], query["address"].lower()
        kinds, rest = wanted[0] if type(wanted[0]) is list else wanted[:1], tuple(wanted[1:])
        first, last, upto = int(query["fromBlock"], 16), int(query["toBlock"], 16), len(wanted)
        return [
            log
            for block in self._eventful(node, address, kinds, first, last)
            for emitter, topics, log in block.events
            if emitter == address and topics[0] in kinds and topics[1:upto] == rest
        ]

    def _eventful(
        self, node: Endpoint, emitter: str, kinds: Iterable[str], first: int, last: int
    ) -> Sequence[SimBlock]:
        """Return the blocks from *first* to *last* in which a contract may have emitted events of these kinds."""
        if node.fork is not None or node.led_to is not None:
            return self._others(node)[first : last + 1]
        blocks, newest = self._seen(node)
        last = min(last, newest)
        numbers: set[int] = set()
        for kind in kinds:
            every = self._chain.eventful.get((emitter, kind), ())
            numbers.update(every[bisect_left(every, first) : bisect_right(every, last)])
        return [blocks[number] for number in sorted(numbers)]

    def _found(self, node: Endpoint, transaction: str) -> tuple[SimBlock, Transaction] | None:
        wanted = transaction.lower()
        if node.led_to is not None:
            return None
        if node.fork is None:
            number = self._chain.places.get(wanted)
            places = [] if number is None or number > self._seen(node)[1] else [self._chain.blocks[number]]
        else:
            places = node.fork[::-1]
        for block in places:
            for sent in block.transactions:
                if sent.hash == wanted:
                    return block, sent
        return None

    def _sent(self, node: Endpoint, params: Sequence[Any]) -> Any:
        found = self._found(node, params[0])
        if found is None:
            return None
        block, sent = found
        if sent.called is None:
            plain = sent.kind == "settle" and len(sent.parts) == 1
            sent.called = calldata(sent) if plain else (_SELLERS_CONTRACT, b"")
        to, data = sent.called
        return {"to": to, "input": data, "blockNumber": block.number, "hash": sent.hash}

    def _receipt(self, node: Endpoint, params: Sequence[Any]) -> Any:
        found = self._found(node, params[0])
        if found is None:
            return None
        block, sent = found
        logs = [log for _, _, log in block.events if log["transactionHash"] == sent.hash]
        return {"status": int(sent.succeeded), "blockNumber": block.number, "transactionHash": sent.hash, "logs": logs}


def calldata(sent: Transaction) -> tuple[str, bytes]:
    """Return the contract and the input of a plain settlement."""
    [part] = sent.parts
    intent, amount = part.intent, part.amount
    if intent.method == "eip3009":
        types: tuple[str, ...] = ("address", "address", "uint256", "uint256", "uint256", "bytes32", "bytes")
        nonce = intent.nonce.to_bytes(32, "big")
        values: tuple[Any, ...] = (
            intent.payer, intent.payee, intent.amount_atomic, intent.valid_after, intent.valid_until, nonce, b"\1" * 65,
        )  # fmt: skip
        return intent.token, selector("transferWithAuthorization", types) + encode(types, values)
    permit = ((intent.token, intent.amount_atomic), intent.nonce, intent.valid_until)
    if intent.scheme == "exact":
        types = ("((address,uint256),uint256,uint256)", "address", "(address,uint256)", "bytes")
        values = (permit, intent.payer, (intent.payee, intent.valid_after), b"\1" * 65)
        return EXACT_PROXY, selector("settle", types) + encode(types, values)
    types = ("((address,uint256),uint256,uint256)", "uint256", "address", "(address,address,uint256)", "bytes")
    values = (permit, amount, intent.payer, (intent.payee, intent.facilitator, intent.valid_after), b"\1" * 65)
    return UPTO_PROXY, selector("settle", types) + encode(types, values)
