"""Defines the trusted tokens: symbol, decimals, dollar value, and EIP-712 domain.

An offer names a token by network and address only. Decimals, EIP-712 name and version, and the dollar value come from
this registry and never from the offer: a server that could choose them could make a thousand dollars look like a cent.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Final

from x402guard.errors import ConfigError
from x402guard.evm import parse_address
from x402guard.kernel.evm import Address
from x402guard.kernel.intent import TransferMethod
from x402guard.kernel.rows import Nanos
from x402guard.money import Dollars, atomic_to_nanos, dollars_to_nanos, format_dollars

_CAIP2 = re.compile(r"eip155:([1-9][0-9]{0,18})", re.ASCII)

# x402 v1 uses network names, v2 uses CAIP-2 ids. A rule for one form must also apply to the other.
_V1_CHAIN_IDS: Final = MappingProxyType(
    {
        "abstract": 2741, "abstract-testnet": 11124, "avalanche": 43114, "avalanche-fuji": 43113, "base": 8453,
        "base-sepolia": 84532, "celo": 42220, "educhain": 656476, "ethereum": 1, "flare": 14, "iotex": 4689,
        "megaeth": 4326, "monad": 143, "monad-testnet": 10143, "peaq": 3338, "polygon": 137, "polygon-amoy": 80002,
        "sei": 1329, "sei-testnet": 1328, "skale-base-sepolia": 1444673419, "stable": 988, "stable-testnet": 2201,
        "story": 1513,
    }
)  # fmt: skip

V1_NAMES: Final = tuple(_V1_CHAIN_IDS)
"""The network names of x402 v1."""

TEST_NETWORKS: Final = frozenset(
    f"eip155:{chain}"
    for chain in (51, 1328, 2201, 4801, 10143, 11124, 31611, 43113, 72344, 80002, 84532, 181228, 421614, 5042002, 11142220,
                  11155111, 11155420, 1444673419)
)  # fmt: skip
"""Networks whose tokens have no value. A policy without ``networks`` allows only these."""


def resolve_network(name: str) -> str | None:
    """Return the CAIP-2 name of an EVM network given by CAIP-2 or by its x402 v1 name, or None if it is neither."""
    if _CAIP2.fullmatch(name):
        return name
    chain = _V1_CHAIN_IDS.get(name)
    return None if chain is None else f"eip155:{chain}"


def chain_id_of(network: str) -> int:
    """Return the chain id of a CAIP-2 EVM network. Raises ``ValueError`` for any other text."""
    match = _CAIP2.fullmatch(network)
    if match is None:
        raise ValueError(f"{network[:60]!r} is not an EVM network in CAIP-2 form, such as eip155:8453")
    return int(match[1])


def near_network(name: object) -> str | None:
    """Return the v1 name that a wrong name of a network is close to, or None."""
    from difflib import get_close_matches  # for an error

    return next(iter(get_close_matches(str(name).lower(), V1_NAMES, n=1)), None)


@dataclass(frozen=True, slots=True)
class Asset:
    """One token on one network.

    Args:
        network: CAIP-2 (``"eip155:84532"``) or an x402 v1 name.
        address: the token's contract.
        symbol: the name shown in reports; it has no other use.
        decimals: atomic units in one token, as a power of ten (0 to 36).
        name: EIP-712 domain name of the contract.
        version: EIP-712 domain version of the contract.
        usd: the value of one whole token, in US dollars.
        methods: the signature methods that can move it.
        unsafe_replace_builtin: in place of the built-in token at that address, whatever the two differ in. In code alone:
            no setting can say so.

    Raises ``ConfigError`` naming the field that is wrong.
    """

    network: str
    address: str
    symbol: str
    decimals: int
    name: str
    version: str
    usd: Dollars = "1.00"
    methods: Collection[TransferMethod] = frozenset({"eip3009", "permit2"})
    unsafe_replace_builtin: bool = False

    def __post_init__(self) -> None:
        for name in ("network", "address", "symbol", "name", "version"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"Asset.{name}: {getattr(self, name)!r} is not a text")
        methods = frozenset(self.methods) if isinstance(self.methods, Collection) else frozenset()
        if not methods or not methods <= {"eip3009", "permit2"}:
            raise ConfigError(f"Asset.methods: {self.methods!r} is not a choice of 'eip3009' and 'permit2'")
        network = resolve_network(self.network)
        if network is None:
            raise ConfigError(f"Asset.network: {self.network!r} is not a known EVM network; write eip155:<chain id>")
        if type(self.decimals) is not int or not 0 <= self.decimals <= 36:
            raise ConfigError(f"Asset.decimals: {self.decimals!r} is not a whole number from 0 to 36")
        try:
            address = parse_address(self.address)
        except ValueError as error:
            raise ConfigError(f"Asset.address: {error}") from error
        try:
            peg = dollars_to_nanos(self.usd, field="Asset.usd")
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error
        if peg == 0:
            raise ConfigError("Asset.usd: a token without value cannot be counted; give its value in dollars")
        object.__setattr__(self, "network", network)
        object.__setattr__(self, "address", address)
        object.__setattr__(self, "methods", methods)
        object.__setattr__(self, "usd", f"{self.usd}".removeprefix("$"))
        if type(self.unsafe_replace_builtin) is not bool:
            raise ConfigError(f"Asset.unsafe_replace_builtin: {self.unsafe_replace_builtin!r} is not True or False")

    @property
    def contract(self) -> Address:
        """The token's contract in EIP-55 form."""
        return Address(self.address)

    @property
    def chain_id(self) -> int:
        """The chain id of the token's network."""
        return chain_id_of(self.network)

    def value_nanos(self, atomic: int) -> Nanos:
        """Return the value of *atomic* units in nano-dollars, rounded up."""
        return atomic_to_nanos(atomic, decimals=self.decimals, peg_nanos=dollars_to_nanos(self.usd))


def _usdc(chain: int, address: str, name: str = "USDC", symbol: str = "USDC", version: str = "2") -> Asset:
    return Asset(f"eip155:{chain}", address, symbol, 6, name, version)


def _permit2_only(chain: int, address: str, symbol: str, decimals: int, name: str) -> Asset:
    return Asset(f"eip155:{chain}", address, symbol, decimals, name, "1", methods=frozenset({"permit2"}))


@cache
def built_in() -> tuple[Asset, ...]:
    """Return the built-in dollar tokens, made on first use: a checksum takes a hash. ``Guard(assets=…)`` adds more."""
    return (
        _usdc(1, "0xA0b86991c6218b36c1d19D4a2e9Eb0cE3606eB48", "USD Coin"),
        _usdc(50, "0xfA2958CB79b0491CC627c1557F441eF849Ca8eb1"),
        _usdc(51, "0xb5AB69F7bBada22B28e79C8FFAECe55eF1c771D4"),
        _usdc(137, "0x3c499c542cEF5E3811e1192ce70d8cC03d5c3359", "USD Coin"),
        _usdc(143, "0x754704Bc059F8C67012fEd69BC8A327a5aafb603"),
        _usdc(1328, "0x4fCF1784B31630811181f670Aea7A7bEF803eaED"),
        _usdc(1329, "0xe15fC38F6D8c56aF07bbCBe3BAf5708A2Bf42392"),
        _usdc(5042, "0x3600000000000000000000000000000000000000"),
        _usdc(8453, "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913", "USD Coin"),
        _usdc(10143, "0x534b2f3A21130d7a60830c2Df862319e593943A3"),
        _usdc(42161, "0xaf88d065e77c8cC2239327C5EDb3A432268e5831", "USD Coin"),
        _usdc(42220, "0xcebA9300f2b948710d2653dD7B07f33A8B32118C"),
        _usdc(43113, "0x5425890298aed601595a70AB815c96711a31Bc65", "USD Coin"),
        _usdc(43114, "0xB97EF9Ef8734C71904D8002F8b6Bc66Dd9c48a6E", "USD Coin"),
        _usdc(80002, "0x41E94Eb019C0762f9Bfcf9Fb1E58725BfB0e7582"),
        _usdc(84532, "0x036CbD53842c5426634e7929541eC2318f3dCF7e"),
        _usdc(421614, "0x75faf114eafb1BDbe2F0316DF893fd58CE46AA4d", "USD Coin"),
        _usdc(5042002, "0x3600000000000000000000000000000000000000"),
        _usdc(11142220, "0x01C5C0122039549AD1493B8220cABEdD739BC44E"),
        _usdc(36900, "0x9cb8142aEBBcdc60AF7c97Af897A67A8f3CA71C2", "USDC.e", "USDC.e"),
        _usdc(181228, "0x401eCb1D350407f13ba348573E5630B83638E30D", "Bridged USDC", "USDC.e"),
        _usdc(190415, "0x401eCb1D350407f13ba348573E5630B83638E30D", "Bridged USDC", "USDC.e"),
        _usdc(14, "0xe7cd86e13AC4309349F30B3435a9d337750fC82D", "USD₮0", "USDT0", "1"),
        _usdc(988, "0x779Ded0c9e1022225f8E0630b35a9b54bE713736", "USDT0", "USDT0", "1"),
        _usdc(2201, "0x78Cf24370174180738C5B8E352B6D14c83a6c9A9", "USDT0", "USDT0", "1"),
        _usdc(42220, "0x48065fbBE25f71C9282ddf5e1cD6D6A887483D5e", "Tether USD", "USDT", "1"),
        _usdc(42220, "0xD2ab3C9A02DBBAB236BfEC45D1d755DF4267F771", "Tether America USD", "USAT", "1"),
        _permit2_only(4326, "0xFAfDdbb3FC7688494971a79cc65DCa3EF82079E7", "MegaUSD", 18, "MegaUSD"),
        _permit2_only(31611, "0x118917a40FAF1CD7a13dB0Ef56C86De7973Ac503", "mUSD", 18, "Mezo USD"),
        _permit2_only(31612, "0xdD468A1DDc392dcdbEf6db6e34E89AA338F9F186", "mUSD", 18, "Mezo USD"),
        _permit2_only(38833, "0xA5b8BF902b2844dA17d4506cc827F7F1681735E7", "USDC", 6, "USDC"),
        _permit2_only(72344, "0x33ad9e4BD16B69B5BFdED37D8B5D9fF9aba014Fb", "SBC", 6, "Stable Coin"),
        _permit2_only(723487, "0x33ad9e4BD16B69B5BFdED37D8B5D9fF9aba014Fb", "SBC", 6, "Stable Coin"),
    )


@cache
def published() -> tuple[Asset, ...]:
    """Return dollar tokens of networks that hosted facilitators serve, with the figures that their issuers publish.

    Their contracts are asked whether they say the same, as those of added tokens. Sources: Circle's list of USDC contracts
    (10, 130, 196, 480, 4801), SKALE's documentation of its network on Base (1187947933).
    """
    return (
        _usdc(10, "0x0b2C639c533813f4Aa9D7837CAf62653d097Ff85", "USD Coin"),
        _usdc(130, "0x078D782b760474a361dDA0AF3839290b0EF57AD6"),
        _usdc(196, "0x74b7F16337b8972027F6196A17a631aC6dE26d22", "USD Coin"),
        _usdc(480, "0x79A02482A880bCE3F13e09Da970dC34db4CD24d1"),
        _usdc(4801, "0x66145f38cBAC35Ca6F1Dfb4914dF98F1614aeA88"),
        _usdc(1187947933, "0x85889c8c714505E0c94b30fcfcF64fE3Ac8FCb20", "Bridged USDC (SKALE Bridge)", "USDC.e"),
    )


_EURC: Final = MappingProxyType(
    {
        "0x1aBaEA1f7C830bD89Acc67eC4af516284b1bC33c": ("eip155:1", "Euro Coin"),
        "0x60a3E35Cc302bFA44Cb288Bc5a4F316Fdb1adb42": ("eip155:8453", "EURC"),
        "0xC891EB4cbdEFf6e073e859e987815Ed1505c2ACD": ("eip155:43114", "Euro Coin"),
        "0x1C60ba0A0eD1019e8Eb035E6daF4155A5cE2380B": ("eip155:480", "EURC"),
        "0x808456652fdb597867f38412077A9182bf77359F": ("eip155:84532", "EURC"),
    }
)
"""EURC, by Circle's list of its contracts: address → network, EIP-712 name. A euro has no fixed value in dollars."""


def unpriced(network: str, contract: str) -> str:
    """Return what an owner writes to pay with a known token that has no price here; "" for an unknown token."""
    known = {address.lower(): (address, *rest) for address, rest in _EURC.items()}.get(contract.lower())
    if known is None or known[1] != network:
        return ""
    address, _, name = known
    return f'Asset("{network}", "{address}", "EURC", 6, "{name}", "2", usd="…")'


def _figures(asset: Asset) -> Mapping[str, object]:
    """Return what decides how much of a token is signed, and what it counts."""
    usd = format_dollars(dollars_to_nanos(asset.usd))
    return {"decimals": asset.decimals, "name": asset.name, "version": asset.version, "usd": usd}


def _refuse_unless_same(asset: Asset, known: Asset, *, is_built_in: bool) -> None:
    """Raise ``ConfigError`` for a token that says another figure than the one that is *known*: one of the two is wrong."""
    theirs = _figures(asset)
    for name, ours in _figures(known).items():
        if ours != theirs[name]:
            whose = f"has {name} {ours!r} built in" if is_built_in else f"is named twice, once with {name} {ours!r}"
            fix = "remove the entry; code that means it says Asset(unsafe_replace_builtin=True), and no setting can"
            raise ConfigError(
                f"assets: {asset.symbol} at {asset.contract} on {asset.network} {whose}, and here {theirs[name]!r}; "
                f"{fix if is_built_in else 'keep one of the two'}"
            )


class AssetRegistry:
    """Looks up tokens by network and contract address only.

    Args:
        added: tokens in addition to the built-in ones, which they replace only by ``unsafe_replace_builtin``.

    Raises ``ConfigError`` for one that says otherwise than a built-in token, or than another one.
    """

    def __init__(self, added: Iterable[Asset] = ()) -> None:
        self._built_in = {(asset.network, asset.contract): asset for asset in built_in()}
        self._by_contract = {(asset.network, asset.contract): asset for asset in published()} | self._built_in
        self._added = set[tuple[str, Address]]()
        for asset in added:
            key = asset.network, asset.contract
            if key in self._added or (key in self._built_in and not asset.unsafe_replace_builtin):
                _refuse_unless_same(asset, self._by_contract[key], is_built_in=key not in self._added)
            self._by_contract[key] = asset
            self._added.add(key)

    def find(self, network: str, contract: Address) -> Asset | None:
        """Return the asset at *contract* (EIP-55) on *network* (CAIP-2), or None if it is not trusted."""
        return self._by_contract.get((network, contract))

    def is_added(self, asset: Asset) -> bool:
        """True for a token whose figures are its owner's or its issuer's, and not those of a built-in one."""
        own = self._built_in.get((asset.network, asset.contract))
        return own is None or (own is not asset and _figures(own) != _figures(asset))

    def added(self) -> tuple[Asset, ...]:
        """Return the tokens that the owner has added, but for those that are built in."""
        own = (asset for key, asset in self._by_contract.items() if key in self._added)
        return tuple(filter(self.is_added, own))

    def all(self) -> tuple[Asset, ...]:
        """Return every asset."""
        return tuple(self._by_contract.values())

    def on(self, networks: Collection[str]) -> tuple[Asset, ...]:
        """Return every asset on the *networks* (CAIP-2)."""
        return tuple(asset for (network, _), asset in self._by_contract.items() if network in networks)
