"""What every conversation shares: effects, admission, capture, refusals, and the drivers that run it."""

__all__: list[str] = []
