"""The payment protocol: offers, schemes, signing, settlement, reconciliation."""

__all__: list[str] = []
