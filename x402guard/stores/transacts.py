"""Runs a change of the ledger as what the kernel takes: a decision over loaded rows that proposes a change set."""

from __future__ import annotations

from functools import cache
from typing import Generic, TypeVar, cast

from typing_extensions import override

from x402guard.assets import TEST_NETWORKS, Asset, built_in
from x402guard.kernel.change_set import ChangeSet, Opened, Scope, Token
from x402guard.kernel.ledger import Ledger
from x402guard.kernel.load import Loaded
from x402guard.ledger.view import Change, LedgerView
from x402guard.money import dollars_to_nanos
from x402guard.stores.clock import StoreClock

R = TypeVar("R")


class Proposal(Generic[R]):
    """One change, run on a view of the rows that the kernel has loaded."""

    def __init__(self, scope: Scope, change: Change[R]) -> None:
        self._scope, self._change = scope, change
        self._result: R | None = None

    def __call__(self, loaded: Loaded) -> ChangeSet:
        """Return what the change proposes. Raises what it raises."""
        view = LedgerView(loaded)
        self._result = self._change(view)
        return view.change_set(durable=self._scope.durable)

    def outcome(self) -> R:
        """Return what the last run of the change has returned."""
        return cast("R", self._result)


class Transacts(Ledger):
    """A ledger that runs changes: see ``LedgerStore.transact``."""

    _clock: StoreClock

    @override
    def clock(self) -> StoreClock:
        return self._clock

    def transact(self, scope: Scope, change: Change[R]) -> R:
        """See ``LedgerStore.transact``."""
        proposal = Proposal(scope, change)
        self.commit(scope, proposal)
        return proposal.outcome()

    @override
    def _built_in(self) -> Opened:
        return _opened()


@cache
def _opened() -> Opened:
    return Opened(tokens=tokens_of(built_in()), test_networks=TEST_NETWORKS)


def tokens_of(assets: tuple[Asset, ...]) -> dict[str, Token]:
    """Return assets as the kernel's table: what may be signed for, and what it is worth."""
    return {f"{each.network}/{each.contract}": Token(each.decimals, dollars_to_nanos(each.usd)) for each in assets}
