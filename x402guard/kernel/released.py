"""Keeps which payments of this process the signer has been given, and makes ``Unsigned``.

A payment counts as given to the signer from its commit on. Only the process that wrote it can say otherwise, and only while
it has not given it: after a take-over, a restart, or a request to a remote signer that was not answered, no one can.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from x402guard.errors import SignerError
from x402guard.kernel.change_set import Step
from x402guard.kernel.proofs import Unsent, Unsigned


class Released:
    """What the signer was given, and how often (``given``); and where payments lie. One belongs to each open ledger."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fresh: set[str] = set()
        self._forgotten: set[str] = set()
        self._paths: dict[str, Sequence[str]] = {}
        self.given: dict[str, int] = {}

    def begun(self, hold_id: str) -> None:
        """Note that this process writes a new payment, which the signer has not been given."""
        with self._lock:
            self._fresh.add(hold_id)

    def lies(self, hold_id: str, path: Sequence[str]) -> None:
        """Note the nodes on the path of a payment that this process writes."""
        with self._lock:
            self._paths[hold_id] = path

    def check_within(self, hold_id: str, node_id: str) -> None:
        """Raise ``SignerError`` unless a payment lies in a node or below it: a session signs for no other."""
        with self._lock:
            if node_id not in self._paths.get(hold_id, ()):
                raise SignerError(
                    f"hold {hold_id} is no payment that this process has in the ledger within {node_id!r}"
                )

    def ended(self, hold_ids: Iterable[str]) -> None:
        """Forget payments whose rows have ended: the signer refuses them by their rows."""
        with self._lock:
            for hold_id in hold_ids:
                self._fresh.discard(hold_id)
                self._forgotten.discard(hold_id)
                self.given.pop(hold_id, None)
                self._paths.pop(hold_id, None)

    def give(self, hold_id: str, *, is_first: bool) -> bool:
        """Note that the signer is given a payment. Returns True if it had not been before.

        Raises ``SignerError`` for one that it was made to forget; and for one that would be signed for the *first* time,
        and that this process has not written.
        """
        with self._lock:
            if hold_id in self._forgotten:
                raise SignerError(f"hold {hold_id} was given back unsigned, so it is never signed")
            if is_first and hold_id not in self._fresh and hold_id not in self.given:
                raise SignerError(f"hold {hold_id} was written by another process, which alone signs it first")
            was_fresh = hold_id in self._fresh
            self._fresh.discard(hold_id)
            self.given[hold_id] = self.given.get(hold_id, 0) + 1
            return was_fresh

    def refused(self, hold_id: str, *, was_fresh: bool) -> None:
        """Note that a signer on another machine has answered with a no: nothing was signed."""
        with self._lock:
            self.given[hold_id] = self.given.get(hold_id, 1) - 1
            if was_fresh and not self.given[hold_id]:
                self._fresh.add(hold_id)

    def forget(self, hold_id: str) -> Unsigned | None:
        """Take a payment from the signer, at once and for good. Returns None if it may have been signed."""
        with self._lock:
            if hold_id in self._fresh:
                self._fresh.discard(hold_id)
                self._forgotten.add(hold_id)
            return Unsigned(hold_id) if hold_id in self._forgotten else None

    def known(self, steps: Iterable[Step]) -> tuple[frozenset[str], Mapping[str, int]]:
        """Return which of the holds that steps give back are forgotten, and how often each was given to the signer."""
        unsigned: set[str] = set()
        given: dict[str, int] = {}
        for step in steps:
            if isinstance(step.proof, Unsigned) and step.hold_id in self._forgotten:
                unsigned.add(step.hold_id)
            elif isinstance(step.proof, Unsent):
                given[step.hold_id] = self.given.get(step.hold_id, 0)
        return frozenset(unsigned), given
