"""``@session.tool``: charges every call of a function, and fits its results into the remaining tokens."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

from msgspec import Struct

from x402guard.errors import ApprovalDenied, ConfigError, LedgerUnavailable, PaymentRefused
from x402guard.flow.admission import Seat
from x402guard.flow.bulkheads import around
from x402guard.flow.context import Context
from x402guard.flow.drivers import run, run_async
from x402guard.flow.effects import Compute, Flow, Interrupted, Notify
from x402guard.flow.refusals import refused
from x402guard.frozen import replace
from x402guard.kernel.rows import HoldKind
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.token_budget import MOST_TOKENS
from x402guard.money import Dollars, dollars_to_nanos
from x402guard.policy import Narrow
from x402guard.policy.approvals import APPROVAL
from x402guard.policy.risk import RISK
from x402guard.policy.step_guard import Outcome
from x402guard.tools.binding import Binding, Bound
from x402guard.tools.counting import Mode, check_mode, suggest_mode
from x402guard.tools.flow import (
    TOOL_HOLD_S,
    Approved,
    HeldTool,
    ToolCall,
    ToolEnd,
    check_free,
    check_tool,
    end_free,
    end_tool,
    hold_tool,
)
from x402guard.tools.hold import LONGEST_S, FindsToolPayer, ToolPayer, tool_call
from x402guard.tools.runner import Running
from x402guard.tools.token_budget import Allotment, TokenBudget

RESULT_TOKENS: Final = 4_000
"""The default maximum of tokens in one result."""

ASYNC_TOOL_S: Final = 10
"""Seconds that a use of an ``async`` tool may take, unless its code or the policy says otherwise."""

QUICK_CHARACTERS: Final = 16_384
"""The largest result, in characters, that is cut and counted on the event loop once its counter has loaded."""

CostOf = Callable[[Any], Dollars]
"""Returns the cost of a call in dollars from its result."""

Render = Callable[[Any, Mode], str]
"""Returns the text of a result in a mode."""


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """The cost of a decorated tool and the rendering of its results; checked when it is constructed.

    Attributes:
        cost: dollars for each call, or a function of the result; None if the tool is not held for.
        up_to: with a function: the ceiling of a call, in dollars.
        mode: how to show a result if enough tokens are left; None returns it unchanged.
        render: with a mode: returns the text of a result in a mode.
        max_tokens: the most tokens of one result.
        lifetime_s: seconds after which a call without a reported end is captured at its ceiling.
        timeout_s: seconds that a call may take; None for the policy's limit, 0 for no limit. With one, a plain function
            runs in a thread of its own, which is left running after a time-out.
    """

    cost: Dollars | CostOf | None = None
    up_to: Dollars | None = None
    mode: Mode | None = None
    render: Render | None = None
    max_tokens: int = RESULT_TOKENS
    lifetime_s: int = TOOL_HOLD_S
    timeout_s: int | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None and (type(self.timeout_s) is not int or not 0 <= self.timeout_s <= LONGEST_S):
            raise ConfigError(
                f"timeout_s: {self.timeout_s!r} is not a whole number of seconds from 0 to {LONGEST_S}, or None"
            )
        if self.cost is None and self.mode is None:
            raise ConfigError(
                'cost: give the cost of a call, cost="$0.01" ("$0" if it is free), or a way to show it, mode="raw", render=…'
            )
        if callable(self.cost) and self.up_to is None:
            raise ConfigError('up_to: the cost is known after the call, so give its ceiling: up_to="$0.05"')
        if self.up_to is not None and not callable(self.cost):
            raise ConfigError(
                "up_to: it needs a cost that is a function of the result; a fixed cost is its own ceiling"
            )
        if (self.mode is None) is not (self.render is None):
            raise ConfigError('mode: it needs render, and render needs it: mode="raw", render=lambda result, mode: …')
        if self.mode is not None:
            check_mode("mode", self.mode)
            if not callable(self.render):
                raise ConfigError(f"render: {self.render!r} is not a function of a result and a mode")
            if type(self.max_tokens) is not int or not 0 < self.max_tokens <= MOST_TOKENS:
                raise ConfigError(f"max_tokens: {self.max_tokens!r:.60} is not a positive whole number of tokens")

    def call(self, tool: str) -> ToolCall | None:
        """Return one call of the tool, without its arguments; None if no cost is set."""
        if self.cost is None:
            return None
        if callable(self.cost):
            most = 0 if self.up_to is None else self.up_to
            return tool_call(tool, most, field="up_to", lifetime_s=self.lifetime_s)
        return tool_call(tool, self.cost, field="cost", lifetime_s=self.lifetime_s, fixed=True)


class _Use(Struct, frozen=True):
    """One running call: its hold, its reserved tokens, and the narrowing by the owner's rules."""

    context: Context
    held: HeldTool | None
    tokens: TokenBudget
    allotment: Allotment | None
    running: Running
    narrow: Narrow | None = None
    free: ToolCall | None = None


class _Outcome(Struct, frozen=True):
    """The end of a call, and the value or error for its caller."""

    end: ToolEnd
    used_tokens: int | None = None
    rendered: str | None = None
    value: Any = None
    error: BaseException | None = None


def decorate(
    payer: FindsToolPayer, options: ToolOptions, name: str | None, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return *function* wrapped, so that each call is held, captured and shown as *options* define.

    Raises ``ConfigError`` for a generator, which does not end with its call: use ``session.hold`` for it.
    """
    if not callable(function):
        raise ConfigError(f'tool: {function!r} is not a function; write @session.tool(cost="$0.01") above one')
    if isinstance(function, staticmethod):
        return staticmethod(decorate(payer, options, name, function.__func__))
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in (function, called)):
        raise ConfigError("tool: a generator continues after its call; use `with session.hold(…)` for it")
    tool = check_tool(name if name is not None else getattr(function, "__name__", type(function).__name__))
    options.call(tool)  # checks the amounts now, not at the first call
    binding = Binding(function)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
    unless_set_s = ASYNC_TOOL_S if is_async else None

    @wraps(function)
    def blocking(*args: Any, **kwargs: Any) -> Any:
        bound = binding.bind(args, kwargs)
        budget = payer.innermost()
        use = run(_begin(budget, options, tool, unless_set_s, bound), budget.shell)
        try:
            outcome = _outcome_of(options, use, bound.call_on(function, use.narrow))
            return _handed(run(_finish(use, outcome), budget.shell))
        finally:
            use.running.leave()

    @wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        bound = binding.bind(args, kwargs)
        budget = payer.innermost()
        use = await run_async(_begin(budget, options, tool, unless_set_s, bound), budget.shell)
        try:
            outcome = await _awaited_outcome_of(options, use, bound.call_on(function, use.narrow))
            return _handed(await run_async(_finish(use, outcome), budget.shell))
        finally:
            use.running.leave()

    return awaited if is_async else blocking


def _begin(budget: ToolPayer, options: ToolOptions, tool: str, unless_set_s: int | None, bound: Bound) -> Flow[_Use]:
    """Reserve the tokens, wait for a slot, then hold the dollars, so that an early refusal costs nothing.

    *unless_set_s* is the time limit, in seconds, of a tool for which neither its code nor the policy sets one.
    """
    paying, tokens = budget.context, budget.tokens
    seat = Seat(HoldKind.TOOL, tool)
    allotment = None
    try:
        if options.mode is not None:
            allotment = yield from tokens.reserve(options.max_tokens, tool)
        priced = options.call(tool) or tool_call(tool, 0, field="cost")
        call = replace(
            priced,
            arguments=bound.arguments,
            shown=bound.shown,
            needs=bound.needs,
            known=bound.known,
            groups=bound.groups,
        )
        set_s = paying.policy.timeouts.tool_s if options.timeout_s is None else options.timeout_s
        limit_s = unless_set_s if set_s is None else set_s or None
        if options.cost is None:
            narrow, approved = yield from check_free(paying, call, seat)
            if bound.changed(approved):
                yield from end_free(paying, call, outcome="unknown")
                yield from _refuse_changed(paying, call, approved)
            return _Use(paying, None, tokens, allotment, Running(tool, limit_s, seat.slot, None), narrow, free=call)
        held = yield from hold_tool(paying, call, seat)
        if bound.changed(held.approved):
            # It never ran.
            yield from end_tool(paying, held.hold, ToolEnd(void="its arguments were changed"), ceiling=held.ceiling)
            yield from _refuse_changed(paying, call, held.approved)
        return _Use(paying, held, tokens, allotment, Running(tool, limit_s, seat.slot, held.hold.id), held.narrow)
    except GeneratorExit:
        raise
    except BaseException:
        seat.leave()
        running = Running(tool, None, None, None)
        if allotment is not None:
            yield from _finish_tokens(_Use(paying, None, tokens, allotment, running), _Outcome(ToolEnd()))
        raise


def _refuse_changed(context: Context, call: ToolCall, approved: Approved | None) -> Flow[None]:
    """Refuse, because the arguments differ from those that were approved or judged."""
    if approved is not None and not approved.asks:
        reason = f"{call.tool}: its arguments were changed after policy.risk.classify had judged them"
        raise (yield from refused(context, Refusal(RISK, reason, call.amount)))
    reason = f"{call.tool}: its arguments were changed while an approver was asked about them"
    raise (
        yield from refused(
            context,
            Refusal(
                APPROVAL,
                reason,
                call.amount,
                error=ApprovalDenied,
                advice="Ask again if it matters, or continue without it.",
            ),
        )
    )


def _finish(use: _Use, outcome: _Outcome) -> Flow[_Outcome]:
    """Record the cost and the tokens; both, even if the first is interrupted."""
    try:
        outcome = yield from _fitted(use, outcome)
        yield from _finish_dollars(use, outcome)
    except Interrupted:
        # Either may have been interrupted; both are idempotent.
        yield from _finish_dollars(use, outcome)
        yield from _finish_tokens(use, outcome)
        raise
    yield from _finish_tokens(use, outcome)
    return outcome


def _finish_dollars(use: _Use, outcome: _Outcome) -> Flow[None]:
    if use.held is not None:
        yield from end_tool(use.context, use.held.hold, outcome.end, ceiling=use.held.ceiling)
    elif use.free is not None:
        yield from end_free(use.context, use.free, outcome=outcome.end.outcome)


def _finish_tokens(use: _Use, outcome: _Outcome) -> Flow[None]:
    """Record the tokens. If the ledger cannot be written, the reservation later counts as used."""
    if use.allotment is None:
        return
    try:
        yield from use.tokens.end(use.allotment.tokens.reservation, outcome.used_tokens)
    except LedgerUnavailable as error:
        yield Notify(f"tokens: the ledger could not be written: {error}; {int(use.allotment.tokens):,} stay reserved")


def _fitted(use: _Use, outcome: _Outcome) -> Flow[_Outcome]:
    """Cut a rendered result to the granted tokens and count it, off the event loop if that may take long."""
    if outcome.rendered is None or use.allotment is None:
        return outcome
    granted, rendered, tokens = int(use.allotment.tokens), outcome.rendered, use.tokens
    if use.narrow is not None and use.narrow.output_limit is not None:
        granted = min(granted, use.narrow.output_limit)

    def job(_now_ms: int) -> _Outcome:
        try:
            text = tokens.cut(rendered, granted)
            return replace(outcome, value=text, used_tokens=tokens.count(text))
        except Exception as error:  # noqa: BLE001 - the counter is the caller's code and may raise any error
            return replace(outcome, error=error)

    quick = tokens.counts_at_once and len(rendered) <= QUICK_CHARACTERS
    answer: _Outcome = yield Compute(job, quick=quick)
    return answer


def _outcome_of(options: ToolOptions, use: _Use, call: Callable[[], Any]) -> _Outcome:
    try:
        with around(use.running.slot):
            result = use.running.run(call)
    except BaseException as error:  # noqa: BLE001 - also Ctrl-C: it is raised after the ledger is written
        return _failed(error)
    if inspect.isgenerator(result):
        return _failed(TypeError("tool: the function returned a generator; use `with session.hold(…)` for it"))
    if inspect.isawaitable(result):
        close = getattr(result, "close", None)
        if close is not None:
            close()
        return _failed(TypeError("tool: the function returned an awaitable; decorate an `async def`"))
    return _shown(options, use, result)


async def _awaited_outcome_of(options: ToolOptions, use: _Use, call: Callable[[], Awaitable[Any]]) -> _Outcome:
    try:
        with around(use.running.slot):
            result = await use.running.awaited(call)
    except BaseException as error:  # noqa: BLE001 - also cancellation: it is raised after the ledger is written
        return _failed(error)
    return _shown(options, use, result)


def _failed(error: BaseException) -> _Outcome:
    # What the guard refuses inside a tool, such as a seller above the cap, is no fault of the tool.
    outcome: Outcome = "failed" if isinstance(error, Exception) and not _is_refusal(error) else "unknown"
    return _Outcome(ToolEnd(note=f"the tool raised {type(error).__name__}", outcome=outcome), error=error)


_LONGEST_CHAIN: Final = 32


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether an error is a refusal of the guard, was raised in place of one, or is a group of such errors."""
    for _ in range(_LONGEST_CHAIN):
        if error is None or isinstance(error, PaymentRefused):
            return error is not None
        if isinstance(error, BaseExceptionGroup) and all(map(_is_refusal, error.exceptions)):
            return True
        error = error.__cause__ or (error.__context__ if error.__suppress_context__ else None)  # from error, from None
    return False


def _shown(options: ToolOptions, use: _Use, result: Any) -> _Outcome:
    """Return the cost and the rendering of a result. Errors are for the caller; the tool has run, so it is captured."""
    end = ToolEnd(note="its cost was not reported")
    try:
        cost = _cost_of(options.cost, result) if callable(options.cost) else options.cost
        if cost is not None:
            end = ToolEnd(amount=dollars_to_nanos(cost, field="cost"))
        elif options.cost is not None:
            end = replace(end, forgotten=True)
        if use.allotment is None or options.mode is None or options.render is None:
            return _Outcome(end, value=result)
        mode = suggest_mode(options.mode, left=use.allotment.left, total=use.allotment.total)
        return _Outcome(end, rendered=_text(options.render(result, mode)))
    except BaseException as error:  # noqa: BLE001 - the caller's code may raise any error
        return _Outcome(end, error=error)


def _cost_of(cost: CostOf, result: Any) -> Dollars:
    try:
        return cost(result)
    except Exception as error:
        error.add_note("raised by the tool's cost function; the call is captured at its ceiling")
        raise


def _text(rendered: object) -> str:
    if not isinstance(rendered, str):
        raise TypeError(f"render: it returned a {type(rendered).__name__}, but has to return a string")
    return str.__str__(rendered)  # a subclass may override __str__


def _handed(outcome: _Outcome) -> Any:
    if outcome.error is not None:
        raise outcome.error
    return outcome.value
