"""Ledger core: holds, budgets and their journal. Pure: no clock, no storage, no network."""

__all__: list[str] = []
