"""The transports for httpx and httpx2: requests, responses, streams, deadlines."""

__all__: list[str] = []
