"""Defines the contracts of the test network: their addresses, interfaces and runtime code."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from x402guard.testing.engine import JSON

CHAIN_ID = 84532
"""Base Sepolia's id, so that the network names, prices and asset tables of x402 SDKs apply to the test network."""

TOKEN = "0x036CbD53842c5426634e7929541eC2318f3dCF7e"  # noqa: S105 - an address
"""Base Sepolia's USDC."""
PERMIT2 = "0x000000000022D473030F116dDEE9F6B43aC78BA3"
"""Permit2, at the same address on every chain."""
EXACT_PROXY = "0x402085c248EeA27D92E8b30b2C58ed07f9E20001"
"""The spender that `exact` payments over Permit2 sign."""
UPTO_PROXY = "0x4020A4f3b7b90ccA423B9fabCc0CE57C6C240002"
"""The spender that `upto` payments sign."""

_CONTRACTS = {
    TOKEN: "DollarToken",
    PERMIT2: "Permit2Like",
    EXACT_PROXY: "ExactPermit2Proxy",
    UPTO_PROXY: "UptoPermit2Proxy",
}


@dataclass(frozen=True)
class Artifact:
    """One compiled contract: its JSON interface and the runtime code at its address."""

    abi: list[JSON]
    runtime_code: bytes


@cache
def artifact(name: str) -> Artifact:
    """Read the compiled contract `name`; raise FileNotFoundError if there is none."""
    text = (resources.files(__package__) / "artifacts" / f"{name}.json").read_text(encoding="utf-8")
    content = json.loads(text)
    return Artifact(content["abi"], bytes.fromhex(content["deployedBytecode"].removeprefix("0x")))


def abi_at(address: str) -> list[JSON]:
    """The interface of the contract at one of this module's addresses; raise KeyError for any other address."""
    return artifact(_CONTRACTS[address]).abi


def genesis_contracts() -> dict[str, bytes]:
    """The address and runtime code of each contract that the test network has from its first block on."""
    return {address: artifact(name).runtime_code for address, name in _CONTRACTS.items()}
