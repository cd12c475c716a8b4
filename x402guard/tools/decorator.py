"""``@session.tool``: a function whose every call is paid for, and whose results are shown in as many tokens as there are."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Final

from x402guard.errors import ApprovalDenied, ConfigError, LedgerUnavailable
from x402guard.flow.admission import Seat
from x402guard.flow.context import Context
from x402guard.flow.drivers import run, run_async
from x402guard.flow.effects import Compute, Flow, Interrupted, Notify
from x402guard.flow.ports import Slot
from x402guard.flow.refusals import refused
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.model import HoldKind
from x402guard.ledger.token_budget import MOST_TOKENS
from x402guard.money import Dollars, dollars_to_nanos
from x402guard.policy import Narrow
from x402guard.policy.approvals import APPROVAL
from x402guard.policy.step_guard import Outcome
from x402guard.tools.binding import Binding, Bound
from x402guard.tools.counting import Mode, check_mode, suggest_mode
from x402guard.tools.flow import (
    TOOL_HOLD_S,
    HeldTool,
    ToolCall,
    ToolEnd,
    check_free,
    check_tool,
    end_free,
    end_tool,
    hold_tool,
)
from x402guard.tools.hold import LONGEST_S, ToolPayer, tool_call
from x402guard.tools.runner import Running
from x402guard.tools.token_budget import Allotment, TokenBudget

RESULT_TOKENS: Final = 4_000
"""The most tokens of one result, unless told otherwise."""


QUICK_CHARACTERS: Final = 16_384
"""A result up to this size is cut and counted on the event loop, once its counter has loaded."""

CostOf = Callable[[Any], Dollars]
"""What a call cost in dollars, told from its result."""

Render = Callable[[Any, Mode], str]
"""The text of a result in a mode."""


@dataclass(frozen=True, kw_only=True)
class ToolOptions:
    """What a decorated tool costs, and how its results are shown; checked when it is written down.

    Attributes:
        cost: dollars for each call, or a function of the result; None for what costs none.
        up_to: with a function: the most that a call may cost, in dollars.
        mode: how a result is shown where there are tokens enough; None shows it as it is.
        render: with a mode: the text of a result in a mode.
        max_tokens: the most tokens of one result.
        lifetime_s: seconds after which a call whose end nobody reports counts in full.
        timeout_s: seconds that a call may take; None for the policy's, 0 for any time.
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
                'cost: say what a call costs, cost="$0.01" (or "$0" for what is free), or how it is shown, '
                'mode="raw", render=…'
            )
        if callable(self.cost) and self.up_to is None:
            raise ConfigError('up_to: the cost is known after the call, so say what it may be at most: up_to="$0.05"')
        if self.up_to is not None and not callable(self.cost):
            raise ConfigError(
                "up_to: it goes with a cost that is a function of the result; a fixed cost is its own ceiling"
            )
        if (self.mode is None) is not (self.render is None):
            raise ConfigError('mode: it goes with render: mode="raw", render=lambda result, mode: …')
        if self.mode is not None:
            check_mode("mode", self.mode)
            if not callable(self.render):
                raise ConfigError(f"render: {self.render!r} is no function of a result and a mode")
            if type(self.max_tokens) is not int or not 0 < self.max_tokens <= MOST_TOKENS:
                raise ConfigError(f"max_tokens: {self.max_tokens!r:.60} is not a positive whole number of tokens")

    def call(self, tool: str) -> ToolCall | None:
        """Return one call of the tool, without its arguments; None where it costs nothing."""
        if self.cost is None:
            return None
        if callable(self.cost):
            most = 0 if self.up_to is None else self.up_to
            return tool_call(tool, most, field="up_to", lifetime_s=self.lifetime_s)
        return tool_call(tool, self.cost, field="cost", lifetime_s=self.lifetime_s, fixed=True)


@dataclass(frozen=True, slots=True)
class _Use:
    """One call under way: what is held for it, what is kept of the context, and what the owner's rules leave of it."""

    context: Context
    held: HeldTool | None
    tokens: TokenBudget
    allotment: Allotment | None
    running: Running
    narrow: Narrow | None = None
    free: ToolCall | None = None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a call ended, and what its caller is given: a value, or an error."""

    end: ToolEnd
    used_tokens: int | None = None
    rendered: str | None = None
    value: Any = None
    error: BaseException | None = None


def decorate(
    payer: ToolPayer, options: ToolOptions, name: str | None, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Return *function* such that every call of it is held for, captured and shown as *terms* say.

    Raises ``ConfigError`` for what cannot be called once and be over: a generator is held for with ``session.hold``.
    """
    if not callable(function):
        raise ConfigError(f'tool: {function!r} is no function; write @session.tool(cost="$0.01") above one')
    if isinstance(function, staticmethod):
        return staticmethod(decorate(payer, options, name, function.__func__))
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004
    if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in (function, called)):
        raise ConfigError("tool: a generator goes on after its call; hold for it with `with session.hold(…)`")
    tool = check_tool(name if name is not None else getattr(function, "__name__", type(function).__name__))
    options.call(tool)  # the amounts are checked here, and not at the first call
    binding = Binding(function)

    @wraps(function)
    def blocking(*args: Any, **kwargs: Any) -> Any:
        bound = binding.bind(args, kwargs)
        use = run(_begin(payer, options, tool, bound), payer.shell)
        try:
            outcome = _outcome_of(options, use, bound.call_on(function, use.narrow))
            return _handed(run(_finish(use, outcome), payer.shell))
        finally:
            use.running.leave()

    @wraps(function)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        bound = binding.bind(args, kwargs)
        use = await run_async(_begin(payer, options, tool, bound), payer.shell)
        try:
            outcome = await _awaited_outcome_of(options, use, bound.call_on(function, use.narrow))
            return _handed(await run_async(_finish(use, outcome), payer.shell))
        finally:
            use.running.leave()

    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
    return awaited if is_async else blocking


_INSIDE: Final[ContextVar[frozenset[str]]] = ContextVar("x402guard_inside_tools", default=frozenset())
"""The tools that run in this context."""


def _slot_of(seat: Seat | None) -> Slot | None:
    return None if seat is None else seat.slot


def _begin(payer: ToolPayer, options: ToolOptions, tool: str, bound: Bound) -> Flow[_Use]:
    """Reserve the tokens, wait for a slot, then hold the dollars: what is refused first costs nothing."""
    budget = payer.innermost()
    paying, tokens = budget.context, budget.tokens
    seat = None if tool in _INSIDE.get() else Seat(HoldKind.TOOL, tool)  # one that calls itself would wait for itself
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
        limit_s = paying.policy.timeouts.tool_s if options.timeout_s is None else options.timeout_s or None
        if options.cost is None:
            narrow = yield from check_free(paying, call, seat)
            return _Use(
                paying, None, tokens, allotment, Running(tool, limit_s, _slot_of(seat), None), narrow, free=call
            )
        held = yield from hold_tool(paying, call, seat)
        if bound.changed(held.fingerprint, held.narrow):
            yield from _refuse_changed(paying, held, call)
        return _Use(paying, held, tokens, allotment, Running(tool, limit_s, _slot_of(seat), held.hold.id), held.narrow)
    except GeneratorExit:
        raise
    except BaseException:
        if seat is not None:
            seat.leave()
        running = Running(tool, None, None, None)
        if allotment is not None:
            yield from _finish_tokens(_Use(paying, None, tokens, allotment, running), _Outcome(ToolEnd()))
        raise


def _refuse_changed(context: Context, held: HeldTool, call: ToolCall) -> Flow[None]:
    """A yes was said to other arguments than there are by now."""
    yield from end_tool(context, held.hold, ToolEnd(void="its arguments were changed"), ceiling=held.ceiling)
    reason = f"{call.tool}: its arguments were changed while a person was asked about them"
    raise (
        yield from refused(
            context,
            Refusal(
                APPROVAL, reason, call.amount, error=ApprovalDenied, advice="Ask again if it matters, or go on without."
            ),
        )
    )


def _finish(use: _Use, outcome: _Outcome) -> Flow[_Outcome]:
    """Write down what it cost and what it showed; both, whatever interrupts the first."""
    try:
        outcome = yield from _fitted(use, outcome)
        yield from _finish_dollars(use, outcome)
    except Interrupted:
        # Whichever was cut short: writing it twice does nothing.
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
    """Books that cannot be written take nothing from the caller: the reservation counts as used when its time is over."""
    if use.allotment is None:
        return
    try:
        yield from use.tokens.end(use.allotment.tokens.reservation, outcome.used_tokens)
    except LedgerUnavailable as error:
        yield Notify(f"tokens: the books could not be written: {error}; {int(use.allotment.tokens):,} stay reserved")


def _fitted(use: _Use, outcome: _Outcome) -> Flow[_Outcome]:
    """Cut a rendered result to what was granted, and count it: off the event loop where that may take long."""
    if outcome.rendered is None or use.allotment is None:
        return outcome
    granted, rendered, tokens = int(use.allotment.tokens), outcome.rendered, use.tokens
    if use.narrow is not None and use.narrow.output_limit is not None:
        granted = min(granted, use.narrow.output_limit)

    def job(_now_ms: int) -> _Outcome:
        try:
            text = tokens.cut(rendered, granted)
            return replace(outcome, value=text, used_tokens=tokens.count(text))
        except Exception as error:  # noqa: BLE001 - a counter is the caller's own code, and may raise anything
            return replace(outcome, error=error)

    quick = tokens.counts_at_once and len(rendered) <= QUICK_CHARACTERS
    answer: _Outcome = yield Compute(job, quick=quick)
    return answer


def _outcome_of(options: ToolOptions, use: _Use, call: Callable[[], Any]) -> _Outcome:
    before = _INSIDE.get()
    _INSIDE.set(before | {use.running.tool})
    try:
        result = use.running.run(call)
    except BaseException as error:  # noqa: BLE001 - Ctrl-C too: it is raised once the books are in order
        return _failed(error)
    finally:
        _INSIDE.set(before)  # a coroutine may be thrown away in another context
    if inspect.isgenerator(result):
        return _failed(TypeError("tool: the function returned a generator; hold for it with `with session.hold(…)`"))
    if inspect.isawaitable(result):
        close = getattr(result, "close", None)
        if close is not None:
            close()
        return _failed(TypeError("tool: the function returned something to await; decorate an `async def`"))
    return _shown(options, use, result)


async def _awaited_outcome_of(options: ToolOptions, use: _Use, call: Callable[[], Awaitable[Any]]) -> _Outcome:
    before = _INSIDE.get()
    _INSIDE.set(before | {use.running.tool})
    try:
        result = await use.running.awaited(call)
    except BaseException as error:  # noqa: BLE001 - cancellation too: it is raised once the books are in order
        return _failed(error)
    finally:
        _INSIDE.set(before)  # a coroutine may be thrown away in another context
    return _shown(options, use, result)


def _failed(error: BaseException) -> _Outcome:
    outcome: Outcome = "failed" if isinstance(error, Exception) else "unknown"
    return _Outcome(ToolEnd(note=f"the tool raised {type(error).__name__}", outcome=outcome), error=error)


def _shown(options: ToolOptions, use: _Use, result: Any) -> _Outcome:
    """Return what a result cost and how it is shown. What goes wrong here is raised; the tool has run, and is paid for."""
    end = ToolEnd(note="nobody said what it cost")
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
    except BaseException as error:  # noqa: BLE001 - it is the caller's own code, and may raise anything
        return _Outcome(end, error=error)


def _cost_of(cost: CostOf, result: Any) -> Dollars:
    try:
        return cost(result)
    except Exception as error:
        error.add_note("raised by the tool's cost function; what was held for the call is booked")
        raise


def _text(rendered: object) -> str:
    if not isinstance(rendered, str):
        raise TypeError(f"render: it returned a {type(rendered).__name__}, and is to return a text")
    return str.__str__(rendered)  # a subclass may say of itself what it likes


def _handed(outcome: _Outcome) -> Any:
    if outcome.error is not None:
        raise outcome.error
    return outcome.value
