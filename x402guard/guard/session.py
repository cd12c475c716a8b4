"""A session: the budget of one run, its report, and the budgets nested in it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import ParamSpec, Self, TypeVar

from msgspec import Struct
from typing_extensions import override

from x402guard.errors import ConfigError, SessionClosed
from x402guard.flow.bulkheads import carry_around
from x402guard.flow.context import Context
from x402guard.flow.drivers import open_later, transact_now
from x402guard.flow.shell import LOG
from x402guard.flow.surroundings import current_task, here
from x402guard.flow.threads import finish_closing, run_in_daemon_thread
from x402guard.frozen import replace
from x402guard.guard.agent import Endings
from x402guard.guard.charges import Charges
from x402guard.guard.opening import (
    Basis,
    Finalizing,
    TokenLimiting,
    as_budget,
    bind_tokens,
    check_name,
    check_tokens,
    finalizing_ids,
    limited_tokens,
    opener_of,
    parse_limit,
    undoing_ids,
)
from x402guard.kernel.rows import Nanos, Node, NodeKind
from x402guard.ledger.authorize import OUTLIVES_CHILD
from x402guard.ledger.queries import Prediction, prediction_of
from x402guard.ledger.sessions import NodeRequest, open_node, opening_scope
from x402guard.ledger.token_budget import DEFAULT_TOKENS, open_tokens, tokens_node
from x402guard.ledger.view import LedgerView
from x402guard.llm.meter import Meter
from x402guard.money import Dollars
from x402guard.policy.checks import check_dollars
from x402guard.policy.patterns import check_pattern, is_route
from x402guard.policy.reach import Reach, reach_of
from x402guard.policy.steps import run_of
from x402guard.tools.token_budget import TokenBudget
from x402guard.vendors.model_price import ModelPrice
from x402guard.x402.reconciled import Reconciliation

P = ParamSpec("P")
R = TypeVar("R")

Quotes = tuple[tuple[str, Nanos], ...]
"""(pattern of routes, nano-dollars): the prices that a session expects."""


class _Block(Struct, frozen=True):
    """A session's block, and the block around it. Kept in the context, because tasks may share the session."""

    session: Session
    outer: _Block | None
    entered_by: Callable[[], object] = lambda: None
    """Returns the task or the thread that entered it, while that lives: their ids are used again."""


_CURRENT: ContextVar[_Block | None] = ContextVar("x402guard_session", default=None)


def current_session() -> Session | None:
    """Return the innermost session or scope whose block is open in this context, or None."""
    found = block = _CURRENT.get()
    is_inherited = False
    # A run that was left in another context is over here, too. What is inside another one is skipped only by the task
    # that entered it (an async generator that is left early ends in another task); a task that inherited it would lose
    # its limit and its rights.
    # One that was closed inside its own block, by a callback or another thread, is not left: it stays, and is refused.
    while block is not None and block.session.has_ended and not block.session.is_entered:
        is_own = block.entered_by() is current_task()
        if not is_own and not (block.outer is None and block.session.is_over):
            break
        is_inherited = is_inherited or not is_own
        block = block.outer
    if block is not found and not is_inherited:
        _CURRENT.set(block)  # tasks that begin from here on do not inherit what is over
    return None if block is None else block.session


def outlived_session() -> Session | None:
    """Return the run that this task or thread was begun in and that has ended, if no session is open in this context."""
    block = _CURRENT.get() if current_session() is None else None
    return None if block is None else block.session


class Session(Charges, Endings):
    """The budget of one run. Made by ``Guard.session`` and ``Session.child``; used as a block, sync or async.

    Inside its block it is the session in context: tasks and ``to_thread`` inherit it, plain threads get it by ``bind``.
    """

    def __init__(
        self,
        basis: Basis,
        node: Node,
        opener: str,
        parent: Session | None,
        *,
        tokens: TokenBudget | None = None,
        reach: tuple[Reach, ...] = (),
        quotes: Quotes = (),
    ) -> None:
        self._basis = basis
        self._node_id = node.id
        self._name = node.name
        self._kind = node.kind
        self._opener = opener
        self._parent = parent
        self._blocks = self._scopes = 0
        self._told_unscoped = False
        self._lock = threading.Lock()
        self._ended = self._failed = False
        self._models: dict[str, ModelPrice] = {}
        self._quotes = quotes
        context = replace(basis.context, node_id=node.id, session_id=self._report_id())
        if parent is None or tokens is not None:
            self._tokens = bind_tokens(basis.shell, context, node, tokens)
        else:
            self._tokens = parent.tokens
        self._reach: tuple[Reach, ...] = (*(() if parent is None else parent._reach), *reach)
        self._named_by: dict[str, str] = {} if parent is None else parent._named_by
        self._context = replace(context, tokens=self._tokens.limit, reach=self._reach, named_by=self._named_by)

    @classmethod
    def open(
        cls,
        basis: Basis,
        request: NodeRequest,
        parent: Session | None,
        *,
        tokens: TokenBudget | int | None = None,
        reach: tuple[Reach, ...] = (),
        quotes: Quotes = (),
        later: bool = False,
    ) -> Session:
        """Open or resume a node and its token budget; *later*: a new one is written with its first hold. Raises ``ConfigError``."""
        given = as_budget(tokens)
        around = parent._path_ids() if parent is not None else ()
        check_tokens(basis.shell, (request.id, *around), given)
        shares = parent is not None and given is parent.tokens
        most = None if parent is None or given is None or shares else parent.tokens.total
        total = None if given is None else given.asked[0]
        # The default token limit sends no notices. A budget with its own soft limits keeps them.
        parts = () if given is None or given.asked[1] is not None else request.soft or basis.context.policy.soft_parts
        if most is not None and (total or DEFAULT_TOKENS) > most:
            raise ConfigError(
                f"tokens: {total or DEFAULT_TOKENS:,} are more than the {most:,} of the session around it"
            )
        own = tokens_node(request.id)
        has_own = (parent is None or given is not None) and (given is None or given.kept_in(basis.shell) is None)
        scope = opening_scope(request, *((own,) if has_own else ()))

        def change(view: LedgerView) -> Node:
            node = open_node(view, request)
            if has_own:
                open_tokens(view, own, total, node.name, parts)
            return node

        opens = partial(open_later, node_id=request.id) if later else transact_now
        node = opens(basis.shell, scope, change)
        session = cls(basis, node, request.opener, parent, tokens=given, reach=reach, quotes=quotes)
        if later:  # one that was never used, and cannot be used any more, is never written
            weakref.finalize(session.tokens, basis.shell.store.forget_opening, node.id).atexit = False
        return session

    def _report_id(self) -> str:
        return self._parent._node_id if self._kind is NodeKind.SCOPE and self._parent is not None else self._node_id

    @property
    def has_ended(self) -> bool:
        """True if this session or scope has ended."""
        return self._ended

    @property
    def is_entered(self) -> bool:
        """True while a block of this session is entered and not left."""
        return self._blocks > 0

    @property
    def is_over(self) -> bool:
        """True if this is a run, not a child or a scope, and has ended."""
        return self._ended and self._kind is NodeKind.SESSION and self._parent is None

    @property
    def tokens(self) -> TokenBudget:
        """The token budget of this session: its own, or that of the session around it. Metered calls count in it."""
        return self._tokens

    def recording(self) -> Session:
        """Return the budget for what is owed already, even after the session's end or inside the block of another."""
        inner = current_session()
        return inner if inner is not None and inner._descends_from(self) else self

    def innermost(self) -> Session:
        """Return the innermost budget in context: this session, or one inside it.

        Raises ``ConfigError`` if the block in context belongs to another session: paying from one budget inside
        another's block is a mistake, and neither is chosen silently.
        """
        self._check_open()
        inner = current_session()
        if inner is None and self._scopes and not self._told_unscoped:
            self._told_unscoped = True
            LOG.warning(
                "session %r: a scope of it is open, and this thread or task does not have it in context: what it spends is "
                "not narrowed. Wrap its function with session.bind(…)",
                self._name,
            )
        if inner is None or self._descends_from(inner):
            return self
        if inner._descends_from(self):
            return inner
        if (around := inner.nearest_open()).has_ended or self._descends_from(around):
            return self  # a worker that was begun in the block of a job before this one
        raise ConfigError(
            f"this pays from session {self._name!r} ({self.id}), but the block in context belongs to {inner._name!r} "
            f"({inner.id}), which is not inside it; leave that block first, or pay from that session"
        )

    @property
    def context(self) -> Context:
        """The settings that the flows of this session work under."""
        finalizing, quotes = finalizing_ids(), self._all_quotes()
        if not finalizing and not quotes:
            return self._context
        return replace(self._context, finalizing=finalizing, undoing=undoing_ids(), quotes=quotes)

    @property
    def meter(self) -> Meter:
        """How LLM calls are held and priced, with the prices registered here and above."""
        models: dict[str, ModelPrice] = {}
        session: Session | None = self
        while session is not None:
            models = {**session._models, **models}
            session = session._parent
        meter = self._basis.meter
        return replace(meter, book=replace(meter.book, session_prices=models)) if models else meter

    def register_model(
        self,
        name: str,
        *,
        input: Dollars,  # noqa: A002 - the field's word
        output: Dollars,
        cached_input: Dollars | None = None,
        max_output: int | None = None,
    ) -> None:
        """Set a price for a model that the price book lacks, in dollars per million tokens, in this session and below.

        *max_output* is the most tokens of an answer: calls without an output limit are held at that. A known price can
        be raised, never lowered. Raises ``ConfigError`` naming the argument.
        """
        price = ModelPrice(input=input, output=output, cached_input=cached_input, max_output=max_output)
        self.meter.book.register(name, price, self.shell.store.now_ms() // 1000)
        with self._lock:
            self._models = {**self._models, name: price}

    def expect(self, pattern: str, price: Dollars) -> None:
        """Refuse offers above the quoted *price*, in dollars, at the routes of *pattern*, in this session and below.

        *pattern* is a route as in the owner's rules, such as ``GET seller.example/*``. A later, higher price for it
        does not loosen an earlier one. ``extensions={"max_price": "$0.01"}`` does the same for one request. Raises
        ``ConfigError`` naming the argument.
        """
        quote = (check_pattern("pattern", pattern), check_dollars("price", price))
        if not is_route(quote[0]):
            raise ConfigError(f"pattern: {pattern!r} is not a route; write 'GET seller.example/*'")
        with self._lock:
            self._quotes = (*self._quotes, quote)

    def _all_quotes(self) -> Quotes:
        above = () if self._parent is None else self._parent._all_quotes()
        return (*above, *self._quotes)

    def _path_ids(self) -> tuple[str, ...]:
        return (self._node_id, *(() if self._parent is None else self._parent._path_ids()))

    def _descends_from(self, other: Session) -> bool:
        session: Session | None = self
        while session is not None:
            if session._node_id == other._node_id and session._basis is other._basis:
                return True
            session = session._parent
        return False

    def predict(self) -> Prediction:
        """Return p50 and p95 of the cost of past sessions of this name, in dollars; none under five. Limits nothing."""
        return prediction_of(self.shell.store, self._name, but=self._node_id)

    # -- progress -----------------------------------------------------------------------------------------------------

    def reconcile(self) -> Reconciliation:
        """Ask the chains about every unproven payment of this session and below, and record the answers.

        ``Guard.reconcile`` does so for all sessions, and compares the wallet with the ledger. Raises
        ``LedgerUnavailable``; the result names a chain that cannot be read.
        """
        from x402guard.x402.reconciliation import reconcile_node  # loaded at the first one

        return reconcile_node(self.shell, self._context, self._node_id)

    async def areconcile(self) -> Reconciliation:
        """Do the same, awaited."""
        return await run_in_daemon_thread(self.reconcile)

    def finalizing(self) -> Finalizing:
        """Return a block, for ``with`` or ``async with``, whose LLM calls may use the session's reserve; only once.

        Raises ``ConfigError`` on entering if the session has no reserve, or has used it before.
        """
        return Finalizing(self.shell.store, self._node_id)

    # -- nesting ----------------------------------------------------------------------------------------------------

    def child(
        self,
        name: str,
        *,
        budget: Dollars,
        tokens: TokenBudget | int | None = None,
        token_limit: TokenLimiting = "count",  # noqa: S107 - no password
        hosts: Collection[str] | None = None,
        payees: Collection[str] | None = None,
        tools: Collection[str] | None = None,
    ) -> Session:
        """Open a session inside this one, with its own part of this one's budget.

        *tokens* gives it its own context; without, it shares this one's. *token_limit* is that of its own tokens, and
        ``refuse`` wherever this one refuses. *hosts*, *payees* and *tools* narrow what it may pay and use, further than
        this one. Raises ``ConfigError`` naming the argument, also for *tokens* below a task whose planner has limited them.
        """
        check_name(name)
        worker = self._worker()
        task = None if worker is None else worker.task
        if task is not None and task.request.token_budget is not None and tokens not in (None, self.tokens):
            raise ConfigError(
                "tokens: the token_budget of a task is for all of it, so a child shares it; leave tokens= out"
            )
        reach = reach_of(self._context.policy, hosts, payees, tools)
        return self._nest(NodeKind.SESSION, name, budget, limited_tokens(tokens, token_limit, of=self.tokens), reach)

    @contextmanager
    def scope(
        self,
        budget: Dollars,
        *,
        hosts: Collection[str] | None = None,
        payees: Collection[str] | None = None,
        tools: Collection[str] | None = None,
    ) -> Iterator[Session]:
        """Narrow a block: it spends at most *budget* of this session. The report stays this session's.

        Tasks and ``asyncio.to_thread`` inherit it; threads of a pool do not: wrap their functions with ``bind``.

        *hosts*, *payees* and *tools* narrow what the block may pay and use. Raises ``ConfigError`` naming the argument.
        """
        reach = reach_of(self._context.policy, hosts, payees, tools)
        self._scopes += 1
        try:
            with self._nest(NodeKind.SCOPE, "scope", budget, reach=reach) as scope:
                yield scope
        finally:
            self._scopes -= 1

    def _check_open(self) -> None:
        if self._ended:
            advice = f"Nothing was paid. Open it again with guard.session(…, id={self.id!r})."
            advice = advice if self._parent is None else OUTLIVES_CHILD
            raise SessionClosed(
                f"session {self._name!r} has ended", rule="session_closed", session=self._report_id(), advice=advice
            )

    def _nest(
        self,
        kind: NodeKind,
        name: str,
        budget: Dollars,
        tokens: TokenBudget | int | None = None,
        reach: tuple[Reach, ...] = (),
    ) -> Session:
        self._check_open()
        return Session.open(
            self._basis,
            NodeRequest(
                id=f"{self._node_id}/{kind}-{here().random_bytes(8).hex()}",
                parent_id=self._node_id,
                kind=kind,
                name=name,
                limit=parse_limit(budget, field="budget"),
                opener=opener_of(self._basis.context),
                soft=self._context.policy.soft_parts if kind is NodeKind.SESSION else None,
            ),
            self,
            tokens=tokens,
            reach=reach,
        )

    def bind(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return *function* so that it runs inside this session, even in a plain thread, which inherits no context.

        ``asyncio.to_thread`` and tasks inherit the context; ``ThreadPoolExecutor`` and ``run_in_executor`` do not. Inside
        an open scope or child of this session, the function runs inside that one.
        """
        if not callable(function):
            raise ConfigError(f"bind: a {type(function).__name__} is no function")
        inner = current_session()
        around = None if inner is None else inner.nearest_open()
        inside = around if around is not None and not around.has_ended and around._descends_from(self) else self
        carried = carry_around(function)

        @wraps(function)
        def bound(*args: P.args, **kwargs: P.kwargs) -> R:
            before = _CURRENT.get()
            _CURRENT.set(_Block(inside, before))
            try:
                return carried(*args, **kwargs)
            finally:
                _CURRENT.set(before)

        return bound

    # -- block ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with self._lock:
            if self._ended:
                raise ConfigError(
                    f"session {self._name!r} has ended; open it again with guard.session(…, id={self.id!r})"
                )
            self._blocks += 1
        _CURRENT.set(_Block(self, _CURRENT.get(), weakref.ref(current_task())))
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._failed = self._failed or error is not None
        if self._leave():
            self.close(error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._failed = self._failed or error is not None
        if self._leave():
            await finish_closing(partial(self.close, error))

    def _leave(self) -> bool:
        """Restore the block around this one. Returns True if it was the last.

        ``Token.reset`` fails if a framework enters and leaves in different contexts, so the old value is set instead.
        """
        above: list[Session] = []
        block = _CURRENT.get()
        while block is not None and block.session is not self:
            above.append(block.session)
            block = block.outer
        if block is not None:
            outer = block.outer
            for session in reversed(above):  # open blocks inside this one still narrow
                outer = _Block(session, outer, weakref.ref(current_task()))
            _CURRENT.set(outer)
        with self._lock:
            self._blocks -= 1
            return self._blocks == 0

    @override
    def _tripped_with_it(self) -> str:
        """Return what ``trip`` stops: the run; for a worker and what is inside it, the session of its task."""
        worker = self._worker()
        return run_of(self._node_id) if worker is None else worker.id

    def _worker(self) -> Session | None:
        """Return the session of the task that this one works for, if any."""
        session: Session | None = self
        while session is not None and session.task is None:
            session = session._parent
        return session

    def nearest_open(self) -> Session:
        """Return this session, or the nearest around it that has not ended in this process."""
        session = self
        while session.has_ended and session._parent is not None:
            session = session._parent
        return session
