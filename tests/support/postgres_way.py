"""The way to a PostgreSQL server, which fails as a network does: at the write, before it, in it, behind it, or for a while."""

import os
import socket
import threading
import time
from contextlib import suppress

from x402guard.stores.postgres_schema import VERSION

WRITE = f"write_{VERSION}(".encode()
PORT = 10_000 + os.getpid() % 50_000  # only the name of a socket


class Way:
    """Listens on a socket beside the server's own, and carries what is said to the server, until ``plan`` says otherwise.

    ``plan`` is for the next write alone: ``before`` cuts in its place, ``half`` in the middle of it, ``after`` once the server has
    it and before the answer, ``late`` cuts and gives it to the server at ``deliver()``, ``slow`` gives it 0.2 s later.

    While it is ``silent``, it carries nothing, and cuts nothing either; ``go_down`` cuts all there is and refuses the next.
    """

    def __init__(self, folder):
        self.folder, self.plan, self.down, self.cuts = folder, None, False, 0
        self.silent = False
        self.trips, self._kept, self._open = 0, [], []
        self._listening = socket.socket(socket.AF_UNIX)
        self._path = folder / f".s.PGSQL.{PORT}"
        self._path.unlink(missing_ok=True)
        self._listening.bind(str(self._path))
        self._path.chmod(0o777)  # a pooler runs as another user
        self._listening.listen(64)
        self._threads = [self._run(self._accept)]

    def url(self, url):
        return f"{url}&port={PORT}"

    def _run(self, work, *given):
        thread = threading.Thread(target=work, args=given, daemon=True)
        thread.start()
        return thread

    def _accept(self):
        while True:
            try:
                theirs, _ = self._listening.accept()
            except OSError:
                return
            if self.down:
                theirs.close()
                continue
            ours = socket.socket(socket.AF_UNIX)
            try:
                ours.connect(str(self.folder / ".s.PGSQL.5432"))
            except OSError:
                ours.close()
                theirs.close()
                continue
            cut = threading.Event()
            self._open += [theirs, ours]
            self._threads += [self._run(self._up, theirs, ours, cut), self._run(self._back, ours, theirs, cut)]

    def _up(self, theirs, ours, cut):
        with suppress(OSError):
            while data := theirs.recv(1 << 20):
                self.trips += data[:1] == b"Q"
                while self.silent:
                    time.sleep(0.02)
                plan = self.plan if WRITE in data else None
                if plan is not None:
                    self.plan, self.cuts = None, self.cuts + 1
                if plan == "late":
                    self._kept.append((ours, data))
                    _end(theirs)
                    return
                if plan == "before":
                    break
                if plan == "half":
                    ours.sendall(data[: len(data) // 2])
                    break
                if plan == "slow":
                    time.sleep(0.2)
                if plan == "after":
                    cut.set()
                ours.sendall(data)
        _end(theirs, ours)

    def _back(self, ours, theirs, cut):
        with suppress(OSError):
            while data := ours.recv(1 << 20):
                if cut.is_set():
                    break
                theirs.sendall(data)
        if not any(ours is kept for kept, _ in self._kept):
            _end(theirs, ours)

    def go_down(self):
        self.down = True
        _end(*self._open)

    def deliver(self):
        """Give the server what was kept from it, and wait until it has answered."""
        for ours, data in self._kept:
            with suppress(OSError):  # the server may have gone meanwhile
                ours.sendall(data)
                ours.settimeout(5)
                ours.recv(1 << 16)
            _end(ours)
        self._kept.clear()

    def close(self):
        self.silent = False
        _end(self._listening, *self._open)
        for each in (self._listening, *self._open):
            each.close()
        for thread in self._threads:
            thread.join(5)
        self._path.unlink(missing_ok=True)


def _end(*sockets):
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
