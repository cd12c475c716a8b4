"""A clock that does what clocks do to ledgers: stands still, jumps, runs back."""

import threading

_START_MS = 1_800_000_000_000


class HostileClock:
    """Unix milliseconds that pass only when told to: `open_store(url, clock_ms=clock, steady_ms=clock.steady)`.

    `start_ms` is the time that it begins with. May be read and set from any thread.
    """

    def __init__(self, start_ms: int = _START_MS) -> None:
        self._lock = threading.Lock()
        self._now_ms = start_ms
        self._steady_ms = 0

    def __call__(self) -> int:
        """The time that the machine believes it is, in unix milliseconds."""
        with self._lock:
            return self._now_ms

    def steady(self) -> int:
        """Milliseconds that have truly passed; nobody can set these."""
        with self._lock:
            return self._steady_ms

    @property
    def unix(self) -> int:
        """The time in whole unix seconds."""
        return self() // 1000

    def forward(self, seconds: float) -> None:
        """Let time pass; raise ValueError for less than none."""
        if seconds < 0:
            raise ValueError("time does not pass backwards; use jump")
        with self._lock:
            self._now_ms += int(seconds * 1000)
            self._steady_ms += int(seconds * 1000)

    def jump(self, seconds: float) -> None:
        """Set the clock ahead, or back where `seconds` is negative, while no time passes."""
        with self._lock:
            self._now_ms += int(seconds * 1000)

    def stand(self, seconds: float) -> None:
        """Let time pass that the clock does not show; raise ValueError for less than none."""
        self.forward(seconds)
        self.jump(-seconds)
