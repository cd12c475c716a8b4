"""What the parent and its agents share: where things are, one clock, and files that survive whoever writes them."""

import json
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIFETIME_S = 20
"""The longest that an agent's signature is good for."""

MOST_JUMPS_S = 540
"""How far all jumps together may go: version 1 dates a payment back by 600 s, and facilitators look at their own clock."""


@dataclass(frozen=True)
class Plan:
    """What an agent is told when it starts. `fault` breaks its guard on purpose; "" is the real one."""

    folder: str
    front: str
    sellers: tuple[str, ...]
    network: str
    key: str
    seed: int
    fault: str = ""
    ledger: str = ""

    def path(self, name: str) -> Path:
        """A file of the run."""
        return Path(self.folder, name)


class SharedClock:
    """Unix milliseconds as this machine has them, and what was added since: the same in all processes, as soon as it is added."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._added = mmap.mmap(file.fileno(), 8)

    @property
    def added_s(self) -> int:
        """Whole seconds that were added."""
        return struct.unpack("<q", self._added[:8])[0]

    def add(self, seconds: int) -> None:
        """Let so many seconds pass at once."""
        self._added[:8] = struct.pack("<q", self.added_s + seconds)

    def __call__(self) -> int:
        """Unix milliseconds."""
        return time.time_ns() // 1_000_000 + self.added_s * 1000

    @property
    def unix(self) -> float:
        """Unix seconds."""
        return self() / 1000


class Lines:
    """A file of JSON lines that many processes add to. One write a line: a process that is killed leaves whole ones."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        self._read = 0
        self._begun = b""

    def add(self, **facts: Any) -> None:
        """Add a line; it is in the file when this returns."""
        os.write(self._file, json.dumps(facts).encode() + b"\n")

    def fresh(self) -> list[dict[str, Any]]:
        """The lines that were added since this was asked last."""
        size = os.fstat(self._file).st_size
        raw = self._begun + os.pread(self._file, size - self._read, self._read)
        self._read = size
        *whole, self._begun = raw.split(b"\n")
        return [json.loads(line) for line in whole]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
