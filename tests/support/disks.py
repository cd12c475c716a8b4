"""A disk that a power cut empties: what was committed under ``synchronous=FULL`` is on it, and nothing later has to be."""

import functools
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.ledger import sealed
from x402guard.kernel.rows import WALLET
from x402guard.stores.sqlite import SqliteStore

FULL = 2


@dataclass
class Image:
    """What a FULL commit left on the disk, and what must be true of it until the next one."""

    database: bytes
    log: bytes
    least: int = 0
    promises: list = field(default_factory=list)


class Disk:
    """Watches one ledger file. ``least`` says, at any moment, what the books have to count at least (atomic units)."""

    def __init__(self, path, least=lambda: 0):
        self.path, self.least = Path(path), least
        self.images, self.kept, self.commits = [], [], []

    def read(self):
        log = Path(f"{self.path}-wal")
        return self.path.read_bytes(), log.read_bytes() if log.exists() else b""

    def committed(self, level):
        self.commits.append(level)
        if level == FULL:
            self.images.append(Image(*self.read(), promises=list(self.kept)))
        self.moment()

    def moment(self):
        """Remember what the books would have to count if the power went now."""
        if self.images:
            image = self.images[-1]
            image.least = max(image.least, self.least())

    def promise(self, kept):
        """Something was done and its caller told so: *kept*, a function of a store, is true of every image from here on."""
        self.kept.append(kept)
        self.images[-1].promises.append(kept)
        self.moment()

    def check(self, folder, clock):
        """Bring the power back after every cut."""
        assert self.images
        for number, image in enumerate(self.images):
            revived(folder / f"cut-{number}.db", image.database, image.log, image, clock)


def revived(path, database, log, image, clock):
    """Open the copy as the next process would, and hold it to what was promised; return what it counts (atomic units)."""
    path.write_bytes(database)
    Path(f"{path}-wal").write_bytes(log)
    store = SqliteStore(path, clock_ms=clock, accept_file=True)  # as the disk itself after the cut
    try:
        check_journal(store)
        wallets = [node for node in store.nodes() if node.id == WALLET]
        assert wallets or not image.promises, path.name  # at first it is made, step by step, and nothing is in it
        counted = sum(wallet.spent + wallet.live for wallet in wallets) // 1000
        assert counted >= image.least, path.name
        for kept in image.promises:
            assert kept(store), path.name
        return counted
    finally:
        store.close()


def check_journal(store):
    """Every entry hashes the one before it, and all of them together are the balances."""
    for node in store.nodes():
        own = [entry for entry in store.entries(node.id) if entry.node_id == node.id]
        assert [entry.seq for entry in own] == list(range(1, node.seq + 1))
        head = ""
        for entry in own:
            assert entry.previous == head
            assert sealed(entry).hash == entry.hash
            head = entry.hash
        assert head == node.head
        sums = [
            sum(getattr(entry, name) for entry in own) for name in ("captured", "held", "granted_in", "granted_out")
        ]
        assert sums == [node.captured, node.held, node.granted_in, node.granted_out]


def watching(disk):
    """Return a ``sqlite3.connect`` whose connections tell *disk* of every commit to its file, and how well it was synced."""

    class Watched(sqlite3.Connection):
        def __init__(self, database, *args, **more):
            super().__init__(database, *args, **more)
            self.is_watched = Path(database) == disk.path

        def execute(self, sql, *values):
            if sql != "COMMIT" or not self.is_watched:
                return super().execute(sql, *values)
            [level] = super().execute("PRAGMA synchronous").fetchone()
            done = super().execute(sql, *values)
            disk.committed(level)
            return done

    return functools.partial(sqlite3.connect, factory=Watched)
