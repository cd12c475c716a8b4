"""Stores and connections that fail, or are interrupted, where they are told to."""

import anyio
import anyio.from_thread
import httpx

from x402guard import LedgerUnavailable


class Faulty:
    """A store that fails where it is told to: before or after the n-th transaction from now on."""

    inline = True

    def __init__(self, store):
        self._store = store
        self.countdown, self.error, self.committed = None, None, False

    def __getattr__(self, name):
        return getattr(self._store, name)

    def fail(self, n, error, *, committed=False):
        self.countdown, self.error, self.committed = n, error, committed

    def transact(self, scope, change):
        if self.countdown is not None:
            self.countdown -= 1
            if self.countdown == 0:
                self.countdown = None
                if self.committed:
                    self._store.transact(scope, change)
                raise self.error
        return self._store.transact(scope, change)


class Tripwire:
    """A store that cancels a scope from its worker thread, before or after its n-th transaction is committed."""

    inline = False

    def __init__(self, store, n, *, after):
        self._store, self._n, self._after = store, n, after
        self.scope = self.token = None

    def __getattr__(self, name):
        return getattr(self._store, name)

    def transact(self, scope, change):
        if self.scope is None:
            return self._store.transact(scope, change)
        self._n -= 1
        if self._n == 0 and not self._after:
            anyio.from_thread.run_sync(self.scope.cancel, token=self.token)
        result = self._store.transact(scope, change)
        if self._n == 0 and self._after:
            anyio.from_thread.run_sync(self.scope.cancel, token=self.token)
        return result


class Breaking(httpx.SyncByteStream):
    """A 402's body whose connection breaks when it is closed."""

    def __iter__(self):
        yield b""

    def close(self):
        raise httpx.CloseError("broken")


class FailingFrom:
    """A store whose books cannot be written from some transaction on; the change was made or not, as told."""

    def __init__(self, store, *, at=None, after_commit=False):
        self.store, self.at, self.after_commit, self.count = store, at, after_commit, 0

    def __getattr__(self, name):
        return getattr(self.store, name)

    def transact(self, scope, change):
        self.count += 1
        fails = self.at is not None and self.count >= self.at
        if fails and not self.after_commit:
            raise LedgerUnavailable("the disk is full")
        result = self.store.transact(scope, change)
        if fails:
            raise LedgerUnavailable("the answer of the commit was lost")
        return result
