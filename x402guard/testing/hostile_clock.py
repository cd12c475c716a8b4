"""Provides a clock for tests that stands still, jumps ahead or runs back."""

import threading

_START_MS = 1_800_000_000_000


class HostileClock:
    """A clock in unix milliseconds that only its methods move, from any thread. `start_ms` is the initial time.

    For a store: `open_store(url, clock_ms=clock, steady_ms=clock.steady)`.
    """

    def __init__(self, start_ms: int = _START_MS) -> None:
        self._lock = threading.Lock()
        self._now_ms = start_ms
        self._steady_ms = 0

    def __call__(self) -> int:
        """The time that the machine's clock shows, in unix milliseconds."""
        with self._lock:
            return self._now_ms

    def steady(self) -> int:
        """The milliseconds that have really passed; they cannot be set."""
        with self._lock:
            return self._steady_ms

    @property
    def unix(self) -> int:
        """The time in whole unix seconds."""
        return self() // 1000

    def forward(self, seconds: float) -> None:
        """Let time pass; raise ValueError if `seconds` is negative."""
        if seconds < 0:
            raise ValueError("time cannot pass backwards; use jump")
        with self._lock:
            self._now_ms += int(seconds * 1000)
            self._steady_ms += int(seconds * 1000)

    def jump(self, seconds: float) -> None:
        """Set the clock ahead, or back if `seconds` is negative, while no time passes."""
        with self._lock:
            self._now_ms += int(seconds * 1000)

    def stand(self, seconds: float) -> None:
        """Let time pass that the clock does not show; raise ValueError if `seconds` is negative."""
        self.forward(seconds)
        self.jump(-seconds)
