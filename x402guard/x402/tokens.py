"""Compares a token that its owner has added with what its contract says. The table stays as given; a difference refuses it."""

from __future__ import annotations

from x402guard.assets import Asset
from x402guard.flow.ports import TokenFacts, TokenSays
from x402guard.kernel.typed_data import token_separator


def facts_of(asset: Asset) -> TokenFacts:
    """Return the question about a token. Where a signature moves the token itself (EIP-3009), its domain is asked for."""
    return TokenFacts(asset.network, asset.contract, "eip3009" in asset.methods)


def doubt_of(asset: Asset, says: TokenSays | None) -> str | None:
    """Return why a token is not paid with, as a sentence, or None if its contract says the same.

    Decimals have to agree; and so has the domain separator, which binds name, version, chain and contract, but of a token
    that only Permit2 moves. What a token is worth no contract can say.
    """
    named = f"{asset.symbol} at {asset.contract} on {asset.network}"
    if says is None:
        return f"no endpoint says what {named} is, and it is not built in; set [chains], or unsafe_no_chain"
    if says.decimals != asset.decimals:
        return (
            f"{named} has {says.decimals} decimals, as its contract says, and the entry of assets says {asset.decimals}"
        )
    if "eip3009" not in asset.methods:
        return None
    if says.separator is None:
        return f'{named} shows no DOMAIN_SEPARATOR; if only Permit2 can move it, write methods = ["permit2"]'
    if says.separator != token_separator(asset.chain_id, asset.contract, asset.name, asset.version):
        return f"{named} signs under another name or version than {asset.name!r} and {asset.version!r}, as its contract says"
    return None
