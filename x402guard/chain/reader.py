"""Reads the outcome of a payment over JSON-RPC: nonce, settling transaction, event logs, block time.

Sources: EIP-3009 (authorizationState), Permit2's SignatureTransfer (nonceBitmap), EIP-1898 (state at a block's hash).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, Self, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from x402guard.assets import near_network, resolve_network
from x402guard.chain.capabilities import COSTS, missing
from x402guard.chain.logs import (
    Block,
    Log,
    block_at,
    find_cause,
    head_of,
    is_canonical,
    nonce_behind,
    nonce_used,
    nonce_used_at,
    outgoing_logs,
    settlement_in,
    transaction_in,
)
from x402guard.chain.rpc import ChainUnreadable, JsonRpc, NodeRefuses, PaymentUnreadable, quantity
from x402guard.chain.settings import Chain, Endpoints, Finality
from x402guard.errors import ConfigError
from x402guard.evm import is_transaction
from x402guard.flow.ports import Funds, OutgoingTransfer, TokenSays, Transfers
from x402guard.kernel.evm import Address
from x402guard.kernel.intent import Intent
from x402guard.kernel.rows import Hold
from x402guard.kernel.typed_data import PERMIT2
from x402guard.ledger.findings import Cancelled, Finding, Settled, Unreadable, Unused, Used

R = TypeVar("R")

_LOG: Final = logging.getLogger("x402guard")

FUNDS_FRESH_S: Final = 5.0
"""How long a cached balance is used, in seconds."""


class RpcChainReader:
    """A ``ChainReader`` on JSON-RPC endpoints.

    Args:
        chains: network (CAIP-2 or v1 name) → URL, ``web3.Web3``, several of these, or a ``Chain``.
        monotonic_s: a monotonic clock in seconds, for the age of a cached balance.
        wall_s: this machine's clock in unix seconds, for the age of an endpoint's final block.
        pause: waits that many seconds between two rounds over the endpoints.

    Raises ``ConfigError`` for an invalid network or URL.
    """

    def __init__(
        self,
        chains: Mapping[str, Endpoints],
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rpcs: dict[str, JsonRpc] = {}
        self._finality: dict[str, Finality] = {}
        for name, given in chains.items():
            network = resolve_network(name) if isinstance(name, str) else None
            if network is None:
                raise ConfigError(f"chains: {name!r:.60} is not an EVM network; {_meant(name)}")
            if network in self._rpcs:
                raise ConfigError(f"chains: {network} is named twice, once as {name!r}")
            chain = _as_chain(name, given)
            self._rpcs[network] = JsonRpc(network, chain.urls, timeout_s=chain.timeout_s, pause=pause)
            self._finality[network] = chain.finality
        self._monotonic, self._wall = monotonic_s, wall_s
        self._told: set[str] = set()
        self._tokens: dict[tuple[str, Address, bool], TokenSays] = {}
        self._funds: dict[tuple[str, Address, Address], tuple[float, Funds]] = {}

    @classmethod
    def over(
        cls,
        rpcs: Mapping[str, JsonRpc],
        finality: Mapping[str, Finality],
        *,
        monotonic_s: Callable[[], float],
        wall_s: Callable[[], float],
    ) -> Self:
        """Return a reader over JSON-RPC clients that exist already, by network (CAIP-2)."""
        reader = cls({}, monotonic_s=monotonic_s, wall_s=wall_s)
        reader._rpcs.update(rpcs)
        reader._finality.update(finality)
        return reader

    @property
    def networks(self) -> frozenset[str]:
        """The networks (CAIP-2) that can be read."""
        return frozenset(self._rpcs)

    def rpc(self, network: str) -> JsonRpc:
        """Return the JSON-RPC client of a network (CAIP-2). Raises ``ConfigError`` if it is not read."""
        if network not in self._rpcs:
            raise ConfigError(f"chains: {network} has no endpoint; add it to [chains]")
        return self._rpcs[network]

    def read(self, hold: Hold) -> Finding:
        """See ``ChainReader.read``."""
        intent = hold.payment()
        transaction = "" if hold.claim is None else hold.claim.transaction
        held_unix, now_unix = hold.created_ms // 1000, int(self._wall())

        def look(rpc: JsonRpc) -> Finding:
            return _read(rpc, intent, transaction, held_unix, self._finality[intent.network], now_unix=now_unix)

        found = self._readable(intent.network, look)
        if not isinstance(found, Unreadable):
            self._tell_lacks(intent.network)
        return found

    def _tell_lacks(self, network: str) -> None:
        """Log, once a payment of a network was read, what its nodes cannot tell and what that costs."""
        if network in self._told:
            return
        self._told.add(network)
        with suppress(ChainUnreadable, ConfigError, *INVALID):  # it is away by now, and `doctor` asks again
            for lack in missing(next(self._rpcs[network].each_node()), self._finality[network]):
                _LOG.warning("chains[%r]: the node has not %s: %s", network, lack, COSTS[lack])

    def funds(self, network: str, token: Address, owner: Address) -> Funds | None:
        """See ``ChainReader.funds``. Cached for 5 s. Raises ``ConfigError`` if an endpoint serves another chain."""
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

    def token(self, network: str, contract: Address, *, signs: bool) -> TokenSays | None:
        """See ``TokenReader.token``. What was read is known from then on: a contract that changes is another token."""
        key = (network, contract, signs)
        rpc = self._rpcs.get(network)
        if key in self._tokens or rpc is None:
            return self._tokens.get(key)
        try:
            decimals = rpc.view(contract, "decimals", [], [], "latest")
        except ChainUnreadable:
            return None
        separator = None
        if signs:
            try:
                separator = rpc.view(contract, "DOMAIN_SEPARATOR", [], [], "latest").to_bytes(32, "big")
            except ChainUnreadable:  # it has none, or the node is gone since: it is asked again
                return TokenSays(decimals, None)
        self._tokens[key] = says = TokenSays(decimals, separator)
        return says

    def head_unix(self, network: str) -> int | None:
        """See ``HeadReader.head_unix``."""
        found = self._readable(network, lambda rpc: _final_block(rpc, 0).time)
        return None if isinstance(found, Unreadable) else found

    def transfers(
        self, network: str, token: Address, payer: Address, *, after: int | None, since_unix: int
    ) -> Transfers | Unreadable:
        """See ``WalletReader.transfers``."""

        def look(rpc: JsonRpc) -> Transfers:
            final = _final_block(rpc, self._finality[network])
            # From the ledger's first second on: earlier transfers of the wallet do not concern this ledger.
            first = (block_at(rpc, since_unix - 1, head_of(rpc)) if after is None else after) + 1
            if after is not None and after > final.number + _APART:
                raise ChainUnreadable(f"{after} blocks are compared, and the last final one is {final.number}")
            upto, found = first - 1, []
            for end, logs in outgoing_logs(rpc, token, payer, first, final.number):
                found += [
                    OutgoingTransfer(log.transaction, log.index, log.payee, log.amount, log.block) for log in logs
                ]
                upto = end
            rpc.check_chain()  # after it, so that the blocks of another chain are not taken for those of this one
            known = Counter((each.transaction, each.payee, each.amount_atomic) for each in found)
            search = partial(outgoing_logs, token=token, payer=payer, first=first, last=upto)
            now_unix = int(self._wall())
            for other in rpc.others():
                if _shows_more(search, other, known) or _is_apart(final, other, self._finality[network], now_unix):
                    raise ChainUnreadable("another endpoint shows other transfers of the wallet, or far other blocks")
            complete = upto >= final.number
            return Transfers(max(upto, 0), tuple(found), complete, final.time if complete else 0)

        return self._readable(network, partial(_by_one_node, look))

    def nonce_behind(
        self, network: str, token: Address, payer: Address, transfer: OutgoingTransfer
    ) -> int | Unreadable | None:
        """See ``WalletReader.nonce_behind``."""

        def look(rpc: JsonRpc) -> int | None:
            return nonce_behind(rpc, token, payer, transfer.transaction, transfer.log_index)

        return self._readable(network, partial(_by_one_node, look))

    def _readable(self, network: str, look: Callable[[JsonRpc], R]) -> R | Unreadable:
        rpc = self._rpcs.get(network)
        if rpc is None:
            return Unreadable(f"no RPC for {network}")
        try:
            return look(rpc)
        except (ChainUnreadable, ConfigError) as error:
            return Unreadable(str(error), alone=isinstance(error, PaymentUnreadable))
        except INVALID as error:
            return Unreadable(_invalid(error), alone=True)

    def close(self) -> None:
        """See ``ChainReader.close``."""
        for rpc in self._rpcs.values():
            rpc.close()


def _meant(name: object) -> str:
    """Return what a wrong name of a network may have meant."""
    if type(name) is int and name > 0:
        return f"write 'eip155:{name}'"
    near = near_network(name)
    return f"did you mean {near!r}?" if near else "write eip155:<chain id>, such as 'eip155:8453'"


def _as_chain(name: str, given: Endpoints) -> Chain:
    if isinstance(given, Chain):
        return given
    try:
        return Chain(given)
    except ConfigError as error:
        wrong = str(error).removeprefix("urls: ")
    raise ConfigError(f"chains[{name!r}]: {wrong}")


class _LogsRefused(PaymentUnreadable):
    """A node shows that a payment can no longer be taken and that its nonce is used, and not by what."""


class _NotVisible(PaymentUnreadable):
    """A node shows that a nonce is used, and does not show the transaction that the seller has named."""


INVALID: Final = (KeyError, TypeError, AttributeError, ValueError, OverflowError)
"""What the reading of an invalid answer raises."""


def _invalid(error: Exception) -> str:
    return f"an answer of the RPC endpoint is invalid: {type(error).__name__}"


def _by_one_node(look: Callable[[JsonRpc], R], rpc: JsonRpc) -> R:
    """Return what *look* finds at the first endpoint that answers all of it. Raises ``ChainUnreadable`` if none does.

    A node that is behind, or on a dead fork, shows no logs of the blocks that another node has just named. Where one node
    can only not read this payment, and the others fail, the network can be read: ``PaymentUnreadable``.
    """
    failures: list[ChainUnreadable] = []
    for node in rpc.each_node():
        try:
            return look(node)
        except ChainUnreadable as error:
            failures.append(error)
        except INVALID as error:
            failures.append(PaymentUnreadable(_invalid(error)))
    known = [each for each in failures if not isinstance(each, _LogsRefused)]
    if known and any(isinstance(each, PaymentUnreadable) for each in failures):
        raise PaymentUnreadable(str(known[-1])) from known[-1]
    raise (known or failures)[-1]


def _final_block(rpc: JsonRpc, finality: Finality) -> Block:
    if isinstance(finality, int):
        head = quantity(rpc.call("eth_blockNumber"))
        return Block.of(rpc.call("eth_getBlockByNumber", hex(max(0, head - finality)), False))  # noqa: FBT003 - the RPC's own
    try:
        return Block.of(rpc.call("eth_getBlockByNumber", finality, False))  # noqa: FBT003
    except NodeRefuses as error:
        raise NodeRefuses(
            f"no {finality} block ({error}); set a number of blocks instead: Chain(urls, finality=…)"
        ) from error


class _Seen(Struct, frozen=True):
    """What an endpoint shows of a payment, and the time of its latest block."""

    finding: Finding
    head_unix: int


class _Contradicted(Exception):  # noqa: N818 - becomes the finding ``Unreadable``
    """Two endpoints contradict each other, and one of them would give budget back."""


def _read(
    rpc: JsonRpc,
    intent: Intent,
    transaction: str,
    held_unix: int = 0,
    finality: Finality = "finalized",
    *,
    now_unix: int = 0,
) -> Finding:
    """Return what the first node shows that shows all of it: of two, one may be on a fork that the other one has left.

    What would give budget back, or says little, is asked of each other node as well: what shows the most taken counts.
    Raises ``PaymentUnreadable`` if one contradicts, and ``ChainUnreadable`` if none answers.
    """
    look = partial(_read_at, intent=intent, transaction=transaction, held_unix=held_unix, finality=finality)

    def looked(node: JsonRpc) -> Finding:
        found = look(node)
        if not _may_need_others(found, intent, now_unix):
            return found
        seen = _Seen(found, head_of(node).time)
        if _needs_others(seen, intent, now_unix):
            node.check_chain()  # an endpoint may have been led to another chain, on which every nonce is unused
            for other in node.others():
                seen = _compared(seen, other, intent, look, now_unix)
                if not _needs_others(seen, intent, now_unix):
                    break
        return seen.finding

    try:
        return _by_one_node(looked, rpc)
    except _LogsRefused:
        # No node keeps old logs or shows such a receipt, so only the use of the nonce can ever be known.
        return Used(final=True)
    except _Contradicted:
        raise PaymentUnreadable("one endpoint shows that a payment took less than another endpoint shows") from None


def _may_need_others(found: Finding, intent: Intent, now_unix: int) -> bool:
    """True for what frees budget, and for what another node may know better."""
    old = isinstance(found, Unused) and found.block_time < now_unix - _BEHIND_S
    return old or isinstance(found, Used) or _gives_back(found, intent)


def _needs_others(seen: _Seen, intent: Intent, now_unix: int) -> bool:
    """The same, where the time of the latest block is known: final ones are hours behind it on some networks."""
    if isinstance(seen.finding, Unused) and not intent.dead_at(seen.finding.block_time):
        return seen.head_unix < now_unix - _BEHIND_S
    return _may_need_others(seen.finding, intent, now_unix)


def _gives_back(found: Finding, intent: Intent) -> bool:
    """True for a finding that frees budget, so that another payment may be signed with it."""
    match found:
        case Unused(block_time):
            return intent.dead_at(block_time)
        case Cancelled(final=final):
            return final
        case Settled(amount, final=final):
            return final and amount < intent.amount_atomic
        case _:
            return False


def _compared(seen: _Seen, node: JsonRpc, intent: Intent, look: Callable[[JsonRpc], Finding], now_unix: int) -> _Seen:
    """Return what counts of two endpoints: the one that shows more taken, or knows by what. See ``_weightier``.

    One that is behind, or cannot be read, is no witness; and none that keeps no logs, against a Transfer that was found.
    """
    found = seen.finding
    over = isinstance(found, Unused) and intent.dead_at(found.block_time)
    try:
        if over and not nonce_used(node, intent, "latest"):
            return seen
    except (ChainUnreadable, ConfigError, *INVALID):
        return seen
    try:
        node.check_chain()
        other = look(node)
    except (ChainUnreadable, ConfigError, *INVALID) as error:
        if over or (isinstance(found, Cancelled) and isinstance(error, _NotVisible)):
            raise _Contradicted from error  # it has shown that the nonce is used
        refuses = isinstance(error, _LogsRefused) and isinstance(found, Unused)
        return _Seen(Used(final=True), seen.head_unix) if refuses else seen
    return _weightier(seen, _Seen(other, _head_unix(node, other)), intent, now_unix)


def _head_unix(node: JsonRpc, found: Finding) -> int:
    """Return the time of an endpoint's latest block; if it cannot be read, one by which no endpoint is behind."""
    try:
        return head_of(node).time
    except (ChainUnreadable, ConfigError, *INVALID):
        return 2**63 if isinstance(found, Unused) else 0


def _weightier(seen: _Seen, other: _Seen, intent: Intent, now_unix: int) -> _Seen:
    """Return the one of two that counts. Raises ``_Contradicted`` where neither does."""
    match seen.finding, other.finding:
        case Unused(block_time), Unused(later):
            return seen if intent.dead_at(block_time) or later <= block_time else other
        case Unused(block_time), Cancelled() if intent.dead_at(block_time):
            return seen
        case Cancelled(), Used():
            raise _Contradicted
    for one, another in ((seen, other), (other, seen)):
        alive = isinstance(one.finding, Unused) and not intent.dead_at(one.finding.block_time)
        if alive and _gives_back(another.finding, intent) and not _is_behind(one, another, now_unix):
            raise _Contradicted
    match seen.finding, other.finding:
        case (Unused(), _) | (Used() | Cancelled(), Settled()):
            return other
        case Settled(amount), Settled(more) if more > amount:
            return other
        case _:
            return seen


def _is_behind(one: _Seen, other: _Seen, now_unix: int) -> bool:
    """True if an endpoint's latest block is over an hour before that of another one, or before now if that is earlier."""
    return one.head_unix < min(other.head_unix, now_unix) - _BEHIND_S


def _shows_more(
    search: Callable[[JsonRpc], Iterator[tuple[int, list[Log]]]],
    node: JsonRpc,
    known: Counter[tuple[str, Address, int]],
) -> bool:
    """True if a node shows a Transfer out of the wallet that is not *known*. One that cannot be read is no witness."""
    try:
        shown = Counter((log.transaction, log.payee, log.amount) for _, logs in search(node) for log in logs)
        return bool(shown - known)
    except (ChainUnreadable, ConfigError, *INVALID):
        return False


_APART: Final = 1_000
_APART_S: Final = 600
"""How many blocks the final ones of two endpoints of about the same time may be apart, and what counts as that, in seconds."""

_BEHIND_S: Final = 3_600
"""By how many seconds an endpoint's block may be before that of another one before the endpoint counts as behind."""


def _is_apart(final: Block, node: JsonRpc, finality: Finality, now_unix: int) -> bool:
    """True if a node's final block is far before *final*, and not by its time, or far after it: one of both is wrong.

    One that is behind, or cannot be read, is no witness.
    """
    try:
        other = _final_block(node, finality)
    except (ChainUnreadable, ConfigError, *INVALID):
        return False
    far_before = other.number < final.number - _APART and final.time - other.time < _APART_S
    return far_before or final.time < min(other.time, now_unix) - _BEHIND_S


def _read_at(rpc: JsonRpc, intent: Intent, transaction: str, held_unix: int, finality: Finality) -> Finding:
    used_at_head = nonce_used(rpc, intent, "latest")
    final = _final_block(rpc, finality)
    used = nonce_used_at(rpc, intent, final)
    if used is False and not used_at_head:
        return Unused(final.time)
    named = transaction if is_transaction(transaction) else ""
    too_late = bool(used) and intent.dead_at(final.time)
    try:
        seen = _seen(rpc, named) if named else None
        cause: Settled | Cancelled | None = None if seen is None else settlement_in(rpc, intent, named, seen, final)
        cause = cause or find_cause(rpc, intent, held_unix, final)
    except NodeRefuses as error:
        raise (_LogsRefused if too_late else PaymentUnreadable)(str(error)) from error
    if cause is None and named and seen is None and not intent.dead_at(final.time):
        # The transaction may still appear until the deadline.
        raise _NotVisible(f"transaction {transaction} is not visible yet")
    if cause is None:
        return Used(final=used is True)
    # Its backends may disagree: a cause is final only if the state of the final block, or else its block, confirms it.
    confirmed = used or (used is None and cause.final and is_canonical(rpc, cause.transaction, final))
    return cause if confirmed else replace(cause, final=False)


def _seen(rpc: JsonRpc, named: str) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Return the transaction that a seller names, and its receipt; None if no node shows it (the logs still may)."""
    try:
        return transaction_in(rpc, named)
    except NodeRefuses:
        return None
