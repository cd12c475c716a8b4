"""What Permit2 may move of a wallet's tokens: shown, granted as an exact sum, and revoked. Only the owner can.

Permit2 moves a token only by a signature of the wallet *and* up to the allowance that the wallet gave it on the token
(ERC-20 ``approve``). So an exact allowance bounds what a leaked signature can take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from msgspec import Struct

from x402guard.assets import Asset, resolve_network
from x402guard.chain.reader import RpcChainReader
from x402guard.chain.rpc import ChainUnreadable, JsonRpc, NodeRefuses, quantity
from x402guard.errors import ConfigError, SignerError
from x402guard.flow.drivers import transact_now
from x402guard.flow.shell import LOG, Shell
from x402guard.frozen import replace
from x402guard.guard.guard import Guard
from x402guard.guard.owner_rows import AllowanceRow
from x402guard.kernel.evm import Address, keccak
from x402guard.kernel.rows import WALLET, Nanos
from x402guard.kernel.signer import AllowanceTerms
from x402guard.kernel.typed_data import PERMIT2
from x402guard.ledger.view import LedgerView, Scope
from x402guard.money import dollars_to_nanos, nanos_to_decimal
from x402guard.x402.signer import LocalSigner

_RECEIPT_S: Final = 120
_REFUSED_S: Final = 2
_POLL_S: Final = 0.2
_TIP_WEI: Final = 10**9
_MOST_FEE_WEI: Final = 5 * 10**16
_MOST_CHEAP_WEI: Final = 5 * 10**18
"""The most that one transaction may cost, in the network's own coin: 0.05 of it, or 5 of a cheap one. A node says what it costs."""

_CHEAP: Final = frozenset(
    {14, 50, 51, 100, 114, 137, 143, 988, 1329, 1514, 3338, 4689, 5042, 42220, 43113, 43114, 80002, 5042002}
)
"""The chains whose coin is worth less than a hundredth of an ether."""

_LEAST_GAS: Final = 21_000
_MOST_NONCE: Final = 2**64 - 2  # EIP-2681
_SENT: Final = "The transaction was signed and sent. Look at it before you repeat this: its fee may be paid, and the allowance be set."

_SHOWN_S: Final = 5
"""How many seconds a node may show the allowance from before, after it has shown the transaction in a block."""


class Wallet(Struct, frozen=True):
    """A wallet on the chains of the settings.

    Attributes:
        shell: the ledger, the signer and the chains.
        payer: its account.
        assets: the tokens of its chains that Permit2 can move.
    """

    shell: Shell
    payer: Address
    assets: tuple[Asset, ...]

    def rows(self) -> list[AllowanceRow]:
        """Return the allowance of each token that the wallet has, or that Permit2 may move. Raises ``ConfigError``."""
        found = [self.row(asset) for asset in self.assets]
        return [row for row in found if row.balance or row.allowance != 0]

    def row(self, asset: Asset) -> AllowanceRow:
        """Return the allowance of one token, read from the chain now."""
        balance, allowance = self._read(asset)
        most = asset.value_nanos(allowance)
        return AllowanceRow(
            asset.network,
            asset.contract,
            asset.symbol,
            nanos_to_decimal(asset.value_nanos(balance)),
            None if most > _UNLIMITED else nanos_to_decimal(most),
            nanos_to_decimal(asset.value_nanos(min(balance, allowance))),
        )

    def asset(self, network: str | None, token: str | None) -> Asset:
        """Return the one token that is meant. Raises ``ConfigError`` that names those to choose from."""
        fits = [
            asset
            for asset in self.assets
            if (network is None or resolve_network(network) == asset.network)
            and (token is None or token.lower() in _names(asset))
        ]
        if len(fits) == 1:
            return fits[0]
        known = ", ".join(f"{asset.symbol} on {asset.network}" for asset in (fits or self.assets)[:6])
        what = "no token fits" if not fits else f"{len(fits)} tokens fit"
        raise ConfigError(
            f"token: {what}; name one with --network and --token: {known or 'none on the chains of chains='}"
        )

    def set(self, asset: Asset, amount: Nanos, *, pause: Callable[[float], None] = time.sleep) -> AllowanceRow:
        """Sign and send the transaction that sets the allowance to exactly *amount* (nano-dollars); wait for its block.

        It is recorded in the ledger before it is signed. Raises ``ConfigError`` for a sum that the token cannot
        express, for a transaction that is too dear or fails, and if the chain shows another allowance after it;
        ``SignerError`` for a key that cannot sign it.
        """
        signer = self.shell.signer
        if not isinstance(signer, LocalSigner):
            raise SignerError(
                "an allowance is signed with a key in this process (X402GUARD_PRIVATE_KEY, X402GUARD_KEYSTORE)"
            )
        atomic = atomic_of(asset, amount)
        rpc = self._rpc(asset.network)
        try:
            terms = _terms(rpc, self.payer, asset, atomic)
        except ChainUnreadable as error:
            raise ConfigError(f"allowance: {asset.symbol} on {asset.network}: {error}") from None
        self._record(asset, amount, terms)
        sent = _send(rpc, asset, signer.sign_allowance(terms), pause)
        found = "does not show the allowance"
        for _ in range(int(_SHOWN_S / _POLL_S)):
            with suppress(ConfigError):  # a node that limits may answer the next question
                _, shown = self._read(asset)
                if shown == atomic:
                    return replace(self.row(asset), transaction=sent)
                found = f"shows ${nanos_to_decimal(asset.value_nanos(shown)):f}, not ${nanos_to_decimal(amount):f}"
            pause(_POLL_S)
        raise ConfigError(
            f"allowance: {sent} is in a block, and the node {found}; look at it with another node, before you count on it",
            advice=_SENT,
            public=sent,
        )

    def _record(self, asset: Asset, amount: Nanos, terms: AllowanceTerms) -> None:
        facts = {
            "name": "allowance_requested",
            "network": asset.network,
            "token": asset.contract,
            "symbol": asset.symbol,
            "amount": amount,
            "account_nonce": terms.account_nonce,
            "most_fee_wei": str(terms.gas * terms.max_fee_wei),
        }

        def change(view: LedgerView) -> None:
            view.record(WALLET, "event", facts=facts)

        transact_now(self.shell, Scope(nodes=(WALLET,), durable=True), change)

    def _rpc(self, network: str) -> JsonRpc:
        chain = self.shell.chain
        if not isinstance(chain, RpcChainReader):
            raise ConfigError("chains: allowances are read from the chains of the settings; none is set")
        return chain.rpc(network)

    def _read(self, asset: Asset) -> tuple[int, int]:
        rpc = self._rpc(asset.network)
        try:
            balance = rpc.view(asset.contract, "balanceOf", ["address"], [self.payer], "latest")
            return balance, rpc.view(
                asset.contract, "allowance", ["address", "address"], [self.payer, PERMIT2], "latest"
            )
        except ChainUnreadable as error:
            raise ConfigError(f"chains[{asset.network!r}]: {asset.symbol} cannot be read: {error}") from None


_UNLIMITED: Final = 10**18  # nano-dollars: a billion dollars


def wallet_of(guard: Guard) -> Wallet:
    """Return the wallet of a guard. Raises ``ConfigError`` without a key or a chain."""
    payer, networks = guard.context.payer, guard.context.chains
    if payer is None:
        raise ConfigError("private_key: no key is set; an allowance is the wallet's own")
    if not networks:
        raise ConfigError("chains: allowances are read from the chains of the settings; none is set")
    assets = (asset for asset in guard.context.registry.on(networks) if "permit2" in asset.methods)
    return Wallet(guard.shell, payer, tuple(assets))


def atomic_of(asset: Asset, amount: Nanos) -> int:
    """Return *amount* (nano-dollars) in the token's atomic units. Raises ``ConfigError`` if it is not a whole number."""
    unit: int = 10**asset.decimals
    atomic, rest = divmod(amount * unit, dollars_to_nanos(asset.usd))
    if rest:
        raise ConfigError(f"amount: ${nanos_to_decimal(amount)} is no whole number of units of {asset.symbol}")
    return atomic


def _names(asset: Asset) -> set[str]:
    return {asset.symbol.lower(), asset.contract.lower()}


def _terms(rpc: JsonRpc, payer: Address, asset: Asset, atomic: int) -> AllowanceTerms:
    draft = AllowanceTerms(asset.chain_id, asset.contract, atomic, 0, 0, 0, 0)
    gas = quantity(rpc.call("eth_estimateGas", {"from": payer, "to": draft.token, "data": "0x" + draft.data().hex()}))
    block = rpc.call("eth_getBlockByNumber", "latest", False)  # noqa: FBT003
    base = quantity(_mapping(block, "block").get("baseFeePerGas") or 0)
    try:
        tip = quantity(rpc.call("eth_maxPriorityFeePerGas"))
    except ChainUnreadable:
        tip = _TIP_WEI
    nonce = quantity(rpc.call("eth_getTransactionCount", payer, "pending"))
    if gas < _LEAST_GAS or nonce > _MOST_NONCE:
        raise ChainUnreadable(f"the node names {gas} gas and the nonce {nonce}, which no transaction has")
    terms = replace(draft, account_nonce=nonce, gas=gas * 6 // 5, max_fee_wei=2 * base + tip, tip_wei=tip)
    most, fee = _MOST_CHEAP_WEI if asset.chain_id in _CHEAP else _MOST_FEE_WEI, terms.gas * terms.max_fee_wei
    if fee > most:
        dear, limit = nanos_to_decimal(Nanos(fee // 10**9)), nanos_to_decimal(Nanos(most // 10**9))
        raise ConfigError(
            f"allowance: the node asks for a fee of up to {dear:f} of the network's coin, more than {limit:f}; nothing is "
            "signed: wait until it costs less, or name another node in chains"
        )
    return terms


def _send(rpc: JsonRpc, asset: Asset, raw: bytes, pause: Callable[[float], None]) -> str:
    """Send a signed transaction, wait for its block, and return its hash. Raises ``ConfigError`` if it may not have its effect.

    The answer of a node that has taken it may be lost, and another one then says that it knows it: its block decides.
    """
    sent, refused = "0x" + keccak(raw).hex(), ""
    try:
        rpc.call("eth_sendRawTransaction", "0x" + raw.hex())
    except NodeRefuses as error:
        refused = str(error)
    except ChainUnreadable:
        pass
    try:
        for number in range(int(_RECEIPT_S / _POLL_S)):
            receipt = rpc.call("eth_getTransactionReceipt", sent)
            if receipt is not None:
                if quantity(_mapping(receipt, "receipt").get("status")) == 1:
                    return sent
                raise ConfigError(
                    f"allowance: {sent} was reverted; the allowance is as it was, and its fee is paid",
                    advice="",
                    public=sent,
                )
            if refused and number == int(_REFUSED_S / _POLL_S):
                if rpc.call("eth_getTransactionByHash", sent) is None:
                    raise ConfigError(
                        f"allowance: {asset.symbol} on {asset.network}: {refused}",
                        advice=f"The node does not have {sent}. If another endpoint has taken it, it may still come.",
                    )
                refused = ""  # it has it, in whatever words it says so
            pause(_POLL_S)
    except KeyboardInterrupt:
        LOG.error("allowance: %s was sent, and its block is not awaited any more. %s", sent, _SENT)
        raise
    except ChainUnreadable as error:
        raise ConfigError(
            f"allowance: {sent} was sent, and its block cannot be read: {error}", advice=_SENT, public=sent
        ) from None
    raise ConfigError(f"allowance: {sent} was sent, and is in no block after {_RECEIPT_S} s", advice=_SENT, public=sent)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ChainUnreadable(f"the node gives no {what}")
    return value
