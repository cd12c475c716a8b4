"""``TokenBudget``: limits the tokens of an agent's context over all calls, so that small results do not overflow it."""

from __future__ import annotations

import threading
from typing import Any, Final

from msgspec import Struct

from x402guard.errors import ConfigError, LedgerUnavailable, PaymentRefused, TokensExhausted
from x402guard.flow.context import Context
from x402guard.flow.drivers import run, run_async
from x402guard.flow.effects import Flow, Interrupted, Transact, cause, transact, transact_anyway
from x402guard.flow.refusals import refused
from x402guard.flow.shell import Shell
from x402guard.flow.surroundings import here
from x402guard.kernel.rows import Hold, HoldState, Node
from x402guard.ledger.authorize import TOKENS, Refusal
from x402guard.ledger.token_budget import (
    DEFAULT_TOKENS,
    MOST_TOKENS,
    Reservation,
    TokenLimit,
    end_reservation,
    lapse_reservations,
    open_tokens,
    record_tokens,
    reserve_tokens,
    soft_mark,
    tokens_left,
)
from x402guard.ledger.view import LedgerView, Scope
from x402guard.policy.checks import check_flag
from x402guard.stores import open_store
from x402guard.tools.counting import (
    CharsPerToken,
    ContextCounter,
    Mode,
    TextCounter,
    check_mode,
    counting,
    cut,
    suggest_mode,
)
from x402guard.tools.flow import check_tool

_ALONE: Final = "tokens"


class Allocation(int):
    """The number of granted tokens, with their reservation.

    Attributes:
        reservation: the hold's id in the ledger.
        requested: the number of requested tokens.
    """

    reservation: str = ""
    requested: int = 0

    @classmethod
    def of(cls, hold: Hold, requested: int) -> Allocation:
        """Return the allocation of a hold of tokens."""
        allocation = cls(hold.amount)
        allocation.reservation, allocation.requested = hold.id, requested
        return allocation

    def __repr__(self) -> str:
        return f"Allocation({int(self)} of {self.requested})"

    def __str__(self) -> str:
        return int.__repr__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (int(self), self.reservation, self.requested)


def _restored(tokens: int, reservation: str, requested: int) -> Allocation:
    allocation = Allocation(tokens)
    allocation.reservation, allocation.requested = reservation, requested
    return allocation


class Allotment(Struct, frozen=True):
    """An allocation, with the remaining and total tokens of the budget before it."""

    tokens: Allocation
    left: int
    total: int


class TokenBudget:
    """A token budget over many calls. All usage counts, past the total too; only allocations are refused.

    Alone it is kept in this process. Given to a session, ``guard.session(…, tokens=TokenBudget(…))``, it is kept in the
    ledger, shared by every process that opens the session, and counts the session's metered calls. Thread-safe and
    task-safe.

    Args:
        total: tokens; default: 100,000, or the total of a resumed session.
        soft: used tokens at which one notice is given, and one event in the report; None for none.
        hard: an LLM call whose input and output may not fit is limited to what is left, or refused. Without, calls count
            and are never refused.
        counter: an object with ``count(text)``, or a function of a text. ``TiktokenCounter()`` counts as OpenAI does.

    Raises ``ConfigError`` naming the argument.
    """

    def __init__(
        self,
        total: int | None = None,
        soft: int | None = None,
        counter: ContextCounter | TextCounter | None = None,
        *,
        hard: bool = False,
    ) -> None:
        check_flag("hard", hard)
        self._total = None if total is None else _positive("total", total)
        self._soft = None if soft is None else _positive("soft", soft)
        if self._soft is not None and self._total is not None and self._soft > self._total:
            raise ConfigError(
                f"soft: {self._soft:,} is above the total of {self._total:,}, so it could not be reached first"
            )
        self._hard = hard
        self._counter = CharsPerToken() if counter is None else counter
        self._count = counting(self._counter)
        self._lock = threading.Lock()
        self._shell: Shell | None = None
        self._limit = TokenLimit(_ALONE, self._soft)
        self._context: Context | None = None

    def _keep(self) -> Shell:
        """Return the shell of its ledger: the session's, or its own in memory."""
        with self._lock:
            if self._shell is None:
                store = open_store("memory://")
                total = self._total
                store.transact(Scope(nodes=(_ALONE,)), lambda view: open_tokens(view, _ALONE, total, _ALONE))
                self._shell = Shell(store, None, None)
            return self._shell

    def bind(self, shell: Shell, context: Context, limit: TokenLimit) -> None:
        """Keep it in a session's ledger (called by the session). Raises ``ConfigError`` if it was used before."""
        with self._lock:
            if self._shell is not None:
                raise ConfigError(
                    "tokens: this TokenBudget was used before the session; give the session its own TokenBudget"
                )
            self._shell, self._context, self._limit = shell, context, limit

    @property
    def limit(self) -> TokenLimit:
        """Its node and soft limit in the ledger."""
        return self._limit

    @property
    def asked(self) -> tuple[int | None, int | None]:
        """The total and the soft limit as given, each None if not given."""
        return self._total, self._soft

    @property
    def hard(self) -> bool:
        """True if LLM calls that may not fit are limited or refused."""
        return self._hard

    def refuse_calls(self) -> None:
        """Limit or refuse LLM calls that may not fit, as ``hard`` does (called by the session)."""
        self._hard = True

    def kept_in(self, shell: Shell) -> bool | None:
        """True if it is kept in the ledger of *shell*, False if in another one, None if it is not in use yet."""
        with self._lock:
            return None if self._shell is None else self._shell.store is shell.store

    def _node(self) -> Node:
        store = self._keep().store
        return store.path(self._limit.node_id)[0]

    @property
    def total(self) -> int:
        """The limit of allocations, in tokens."""
        return self._node().limit or 0

    @property
    def used(self) -> int:
        """All recorded tokens, past the total too."""
        return self._node().captured

    @property
    def reserved(self) -> int:
        """Tokens that are allocated, and neither recorded nor released yet."""
        return self._node().held

    @property
    def remaining(self) -> int:
        """Tokens that are neither used nor reserved, never below zero."""
        return tokens_left(self._node())

    @property
    def usage_fraction(self) -> float:
        """The used part of the total; above 1 if the total is exceeded."""
        node = self._node()
        return node.captured / (node.limit or 1)

    def suggested_mode(self, requested: Mode) -> Mode:
        """Return the mode in which to show a result: *requested* while more than half remains, or one that shows less.

        At most 50 % left: ``raw`` becomes ``table``; at most 20 %: ``summary``; below 5 %: ``handle_only``. Never shows
        more than *requested*. Raises ``ConfigError`` if it is not a mode.
        """
        node = self._node()
        return suggest_mode(check_mode("requested", requested), left=tokens_left(node), total=node.limit or 0)

    def count(self, text: str) -> int:
        """Return the number of tokens of *text*, by this budget's counter."""
        return self._count(text)

    @property
    def counts_at_once(self) -> bool:
        """True if the counter has loaded its data."""
        return bool(getattr(self._counter, "ready", True))

    def cut(self, text: str, tokens: int) -> str:
        """Return *text*, or its longest beginning with at most *tokens* tokens including a final "…"."""
        return cut(text, tokens, self._count)

    def allocate(self, requested: int, *, tool: str = "") -> Allocation:
        """Reserve *requested* tokens, or the remaining ones if they are fewer, and return the allocation.

        Raises ``TokensExhausted`` if nothing is left, ``ConfigError`` unless *requested* is a positive whole number. A
        reservation that is neither recorded nor released within 900 s counts as used.
        """
        return run(self._allocate(requested, tool), self._keep())

    async def aallocate(self, requested: int, *, tool: str = "") -> Allocation:
        """``allocate`` for asynchronous code: the ledger is written off the event loop."""
        return await run_async(self._allocate(requested, tool), self._keep())

    def record_usage(self, actual: int, reservation: Allocation | None = None) -> None:
        """Count *actual* tokens as used, in place of their *reservation* if given; more than it counts in full.

        Raises ``ConfigError`` for a reservation that was recorded or released already, or is of another budget.
        """
        run(self._record(actual, reservation), self._keep())

    async def arecord_usage(self, actual: int, reservation: Allocation | None = None) -> None:
        """``record_usage`` for asynchronous code."""
        await run_async(self._record(actual, reservation), self._keep())

    def release(self, reservation: Allocation) -> None:
        """Give a reservation back unused. Raises ``ConfigError`` as ``record_usage`` does."""
        run(self.end(_id_of(reservation), None), self._keep())

    async def arelease(self, reservation: Allocation) -> None:
        """``release`` for asynchronous code."""
        await run_async(self.end(_id_of(reservation), None), self._keep())

    def _scope(self, hold_id: str) -> Scope:
        node_id, session_id = self._limit.node_id, self._limit.session_id
        nodes = (node_id,) if session_id is None else (node_id, session_id)
        return Scope(nodes=nodes, holds=(hold_id,), marks=(soft_mark(node_id),))

    def _instance(self) -> str:
        return "" if self._context is None else self._context.instance

    def reserve(self, requested: int, tool: str) -> Flow[Allotment]:
        """Return the flow of ``allocate``. It returns the allotment."""
        named = check_tool(tool) if tool != "" else ""
        wanted = Reservation(here().random_bytes(32).hex(), _positive("requested", requested), self._instance(), named)

        def change(view: LedgerView) -> tuple[Hold | None, Node]:
            lapse_reservations(view, self._limit)
            before = view.node(self._limit.node_id)
            return reserve_tokens(view, before.id, wanted), before

        scope = self._scope(wanted.id)
        try:
            hold, before = yield Transact(scope, change)
        except (Interrupted, LedgerUnavailable) as error:
            # The write may have succeeded although its answer was lost.
            yield from self._give_back(scope, wanted.id, error)
            raise
        if hold is None:
            raise (yield from self._exhausted(before, wanted.requested))
        return Allotment(Allocation.of(hold, requested), tokens_left(before), before.limit or 0)

    def _give_back(self, scope: Scope, hold_id: str, error: BaseException) -> Flow[None]:
        try:
            yield Transact(scope, lambda view: self._end_if_held(view, hold_id, None))
        except LedgerUnavailable as again:
            cause(error).add_note(f"the tokens of {hold_id} could not be given back: {again}")

    def _allocate(self, requested: int, tool: str) -> Flow[Allocation]:
        return (yield from self.reserve(requested, tool)).tokens

    def _exhausted(self, node: Node, requested: int) -> Flow[PaymentRefused]:
        reason = (
            f"nothing is left of {node.limit or 0:,} tokens ({node.captured:,} used, {node.held:,} reserved); "
            f"{requested:,} were requested"
        )
        if self._context is None:
            return TokensExhausted(f"{TOKENS}: {reason}", rule=TOKENS)
        return (
            yield from refused(
                self._context,
                Refusal(
                    TOKENS,
                    reason,
                    error=TokensExhausted,
                    advice="Finish with what the context holds, or ask for a larger token budget.",
                ),
            )
        )

    def _record(self, actual: int, reservation: Allocation | None) -> Flow[None]:
        used = _whole(actual)
        if not 0 <= used <= MOST_TOKENS:
            shown = repr(actual)[:60] if isinstance(actual, (str, float)) or used < MOST_TOKENS else "that"
            raise ConfigError(f"actual: {shown} is not a whole number of tokens; count a text with count(text)")
        if reservation is not None:
            yield from self.end(_id_of(reservation), used)
            return
        use = Reservation(here().random_bytes(32).hex(), used, self._instance())
        yield from transact_anyway(self._scope(use.id), lambda view: record_tokens(view, self._limit, use))

    def end(self, hold_id: str, used: int | None) -> Flow[None]:
        """Return the flow of ``record_usage`` and ``release``: *used* tokens, or None to release the reservation."""
        scope = self._scope(hold_id)
        try:
            yield from transact(scope, lambda view: end_reservation(view, self._limit, hold_id, used))
        except Interrupted:
            yield Transact(scope, lambda view: self._end_if_held(view, hold_id, used))
            raise

    def _end_if_held(self, view: LedgerView, hold_id: str, used: int | None) -> None:
        hold = view.hold(hold_id)
        if hold is not None and hold.state is HoldState.HELD:
            end_reservation(view, self._limit, hold_id, used)

    def __repr__(self) -> str:
        return f"TokenBudget(total={DEFAULT_TOKENS if self._total is None else self._total}, soft={self._soft})"


def _whole(value: object) -> int:
    """Return a whole number as a plain int, because a subclass may override comparisons; -1 for anything else."""
    return int.__index__(value) if isinstance(value, int) and not isinstance(value, bool) else -1


def _positive(name: str, value: object) -> int:
    number = _whole(value)
    if not 0 < number <= MOST_TOKENS:
        shown = repr(value)[:60] if isinstance(value, (str, float)) or -MOST_TOKENS < number < MOST_TOKENS else "that"
        raise ConfigError(f"{name}: {shown} is not a positive whole number of tokens, such as 4000")
    return number


def _id_of(reservation: object) -> str:
    if not isinstance(reservation, Allocation) or not reservation.reservation:
        raise ConfigError(f"reservation: {reservation!r} is not what allocate() returned")
    return reservation.reservation
