"""JSON-RPC: what a chain shows of a payment."""

__all__: list[str] = []
