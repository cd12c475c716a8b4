"""Reads payments and wallets from chains over JSON-RPC."""

__all__: list[str] = []
