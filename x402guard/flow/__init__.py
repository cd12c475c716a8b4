"""Common parts of all flows: effects, admission, capture, refusals, and the drivers."""

__all__: list[str] = []
