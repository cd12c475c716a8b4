"""The end of a session: what ``reversible`` functions have done in it becomes final, or is undone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

from x402guard.errors import BudgetExhausted
from x402guard.flow.drivers import close_to_the_end, transact_now
from x402guard.guard.account import Account
from x402guard.guard.agent import AgentSteps
from x402guard.guard.opening import undoing
from x402guard.ledger.actions import OPEN_STATES, actions_mark, begin_end, end, note_abnormal
from x402guard.ledger.authorize import BUDGET
from x402guard.ledger.model import NodeKind
from x402guard.ledger.sessions import Closing, Ending, close_node
from x402guard.ledger.view import Change, Scope
from x402guard.policy.steps import run_of
from x402guard.tools.undo import actions_of, commit, roll_back

P = ParamSpec("P")
R = TypeVar("R")


class Endings(Account, AgentSteps):
    """What ends a session, and makes final what was done in it."""

    _kind: NodeKind
    _opener: str
    _ended: bool
    _failed: bool

    @abstractmethod
    def bind(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return *function* so that it runs inside this session."""

    @abstractmethod
    def _report_id(self) -> str: ...

    def commit(self) -> None:
        """Make what ``reversible`` functions have done in this session and below final, and run what is staged now.

        Raises what a staged function raises, after all have run; ``SessionTripped`` if the session is tripped, or
        something above it; ``LedgerUnavailable``.
        """
        commit(self.shell, self.context, self._report_id())

    async def acommit(self) -> None:
        """Do the same, awaited; a cancelled task waits for its end."""
        await close_to_the_end(self.commit)

    def close(self, error: BaseException | None = None) -> None:
        """End this opening of the session; *error* is the error that left its block. Live holds still count.

        With the last opening, what ``reversible`` functions have done becomes final, or is undone after an abnormal end.
        """
        refused = isinstance(error, BudgetExhausted) and error.rule == BUDGET and error.session == self._report_id()
        failed = self._failed or error is not None
        closing = Closing(self._opener, left_by_refusal=refused, said=self._end, failed=failed)
        if self._ended or self._kind is not NodeKind.SESSION:
            self._ended = True
            self._write_end(lambda view: close_node(view, self._node_id, closing))
            return
        run_id = run_of(self._node_id)
        try:
            ending = self._write_end(lambda view: begin_end(view, run_id, self._node_id, closing))
            if ending is not None:
                try:
                    self._end_actions(ending, closing)
                finally:
                    self._write_end(lambda view: end(view, run_id, self._node_id, closing))
        finally:
            self._ended = True

    def _write_end(self, change: Change[R]) -> R:
        return transact_now(
            self.shell, Scope(nodes=(self._node_id,), marks=(actions_mark(run_of(self._node_id)),)), change
        )

    def _end_actions(self, ending: Ending, closing: Closing) -> None:
        """Commit what was done in this session and below; or undo it, also where it cannot be committed."""
        if ending == "normal":
            try:
                self.bind(self.commit)()
            except BaseException:
                self._write_end(lambda view: note_abnormal(view, run_of(self._node_id), self._node_id, closing))
                self._roll_back()
                raise
        else:
            self._roll_back()

    def _roll_back(self) -> None:
        store = self.shell.store
        if any(each.state in OPEN_STATES for each in actions_of(store, self._report_id())):
            with undoing(store, self._node_id):
                self.bind(roll_back)(store, partial(transact_now, self.shell), self._report_id())
