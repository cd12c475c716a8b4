"""What a session can be charged with beside requests: tools, anything that a block holds for, and calls that no transport saw."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, ParamSpec, Protocol, TypeVar, overload

from x402guard.errors import ConfigError
from x402guard.flow.drivers import run, run_async
from x402guard.flow.effects import Flow
from x402guard.flow.receipt import Receipt
from x402guard.http.guarded import MeteredPayer
from x402guard.llm.record import record_call
from x402guard.llm.reported import Statement, read_answer, read_statement
from x402guard.llm.vendor_answers import as_mapping
from x402guard.money import Dollars
from x402guard.tools.counting import Mode
from x402guard.tools.decorator import RESULT_TOKENS, CostOf, Render, ToolOptions, decorate
from x402guard.tools.flow import TOOL_HOLD_S, charge_tool
from x402guard.tools.hold import ToolHold, ToolPayer, tool_call

P = ParamSpec("P")
R = TypeVar("R")


class Rendered(Protocol):
    """Decorates a function such that it returns a text, and awaits one where it was awaited."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, Any]], /) -> Callable[P, Coroutine[Any, Any, str]]: ...

    @overload
    def __call__(self, function: Callable[P, Any], /) -> Callable[P, str]: ...


class Charges(ToolPayer):
    """The part of a session that tools and reported calls go through. All of it pays from the innermost budget in context."""

    @abstractmethod
    def recording(self) -> MeteredPayer:
        """Return the budget in which what is owed already is booked: also after the session's end."""

    # -- tools ------------------------------------------------------------------------------------------------------

    def charge(self, tool: str, cost: Dollars, *, arguments: Mapping[str, Any] | None = None) -> Receipt:
        """Book what one use of a tool costs, in dollars, before it runs; return its receipt.

        *arguments* tell one use from another; a hash of them goes into the books, and nothing else. Raises
        ``BudgetExhausted`` where it does not fit and ``SessionTripped`` or ``SessionClosed``, with nothing booked; ``TypeError``
        for a float, ``ValueError`` for what is no dollar amount, ``ConfigError`` for another argument.
        """
        call = tool_call(tool, cost, field="cost", arguments=arguments, fixed=True)
        return run(charge_tool(self.innermost().context, call), self.shell)

    async def acharge(self, tool: str, cost: Dollars, *, arguments: Mapping[str, Any] | None = None) -> Receipt:
        """The same as ``charge``, awaited: the ledger is written off the event loop."""
        call = tool_call(tool, cost, field="cost", arguments=arguments, fixed=True)
        return await run_async(charge_tool(self.innermost().context, call), self.shell)

    def hold(
        self,
        tool: str,
        *,
        up_to: Dollars,
        arguments: Mapping[str, Any] | None = None,
        lifetime_s: int = TOOL_HOLD_S,
    ) -> ToolHold:
        """Return a block, for ``with`` or ``async with``, that holds what one use of a tool may cost at most, in dollars.

        The block says ``capture`` or ``void``; whatever leaves it without a word captures the ceiling. A process that ends within
        it leaves a hold that counts in full, and is captured *lifetime_s* seconds after it began. Raises as ``charge`` does, on
        entering where it does not fit.
        """
        return ToolHold(self, tool_call(tool, up_to, field="up_to", arguments=arguments, lifetime_s=lifetime_s))

    @overload
    def tool(
        self, *, cost: Dollars, name: str | None = None, lifetime_s: int = TOOL_HOLD_S
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

    @overload
    def tool(
        self, *, cost: CostOf, up_to: Dollars, name: str | None = None, lifetime_s: int = TOOL_HOLD_S
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

    @overload
    def tool(
        self,
        *,
        mode: Mode,
        render: Render,
        max_tokens: int = RESULT_TOKENS,
        cost: Dollars | CostOf | None = None,
        up_to: Dollars | None = None,
        name: str | None = None,
        lifetime_s: int = TOOL_HOLD_S,
    ) -> Rendered: ...

    def tool(self, *only: Callable[..., Any], name: str | None = None, **options: Any) -> Callable[..., Any]:
        """Decorate a function, plain or ``async``, whose every call costs money or takes room in the context.

        Args:
            cost: dollars for each call, held before it and captured after it; or a function of the result that says so.
            up_to: with such a function: the most that a call may cost, in dollars. It is held.
            name: as it stands in reports; the function's own by default.
            mode: how results are shown while there are tokens enough: ``raw``, ``table``, ``summary``, ``handle_only``. The call
                then returns the text of ``render(result, mode)`` in the mode that ``tokens`` suggests, cut to what was granted.
            render: with a mode: the text of a result in a mode.
            max_tokens: the most tokens of one result, 4,000 by default; so many are reserved while the tool runs.
            lifetime_s: seconds after which a call whose end nobody reports counts in full.

        A call that raises, or whose cost cannot be told, captures what was held. Raises ``ConfigError`` naming the argument,
        ``TypeError`` for a float; the calls raise as ``charge`` does, and ``BudgetExhausted`` where no token is left, before the
        function is run.
        """
        if only:
            raise ConfigError('tool: write @session.tool(cost="$0.01"), saying what a call costs, above the function')
        unknown = sorted(set(options) - set(ToolOptions.__dataclass_fields__))
        if unknown:
            raise ConfigError(f"{unknown[0]}: tool() takes {', '.join(ToolOptions.__dataclass_fields__)} and name")
        checked = ToolOptions(**options)
        return lambda function: decorate(self, checked, name, function)

    # -- calls that no transport saw ----------------------------------------------------------------------------------

    def record_usage(self, provider: str, model: str, usage: object) -> Receipt:
        """Book an LLM call that went past the transport (boto3, gRPC): what it used is owed already, so it counts in full.

        *usage* is in the units of the price book (``{"input_tokens": 200, "output_tokens": 100}``), or as the provider states it.
        What it exceeds is tripped; in a session that was tripped before, the call is booked and ``SessionTripped`` raised.
        Raises ``Unpriced`` where nobody can say what it cost and ``ValueError`` or ``TypeError`` for a usage that says nothing, with
        nothing booked.
        """
        return run(self._recorded(_stated(provider, model, usage)), self.shell)

    async def arecord_usage(self, provider: str, model: str, usage: object) -> Receipt:
        """The same as ``record_usage``, awaited."""
        return await run_async(self._recorded(_stated(provider, model, usage)), self.shell)

    def wrap(self, response: R, *, provider: str | None = None, model: str | None = None) -> R:
        """Book what a whole answer of a vendor's library says it used, as ``record_usage`` does, and return the answer.

        *provider* and *model* where the answer does not name them: Bedrock's names no model, and OpenAI's dialect is spoken by
        many. Raises as ``record_usage`` does.
        """
        run(self._recorded(_answered(response, provider, model)), self.shell)
        return response

    async def awrap(self, response: R, *, provider: str | None = None, model: str | None = None) -> R:
        """The same as ``wrap``, awaited."""
        await run_async(self._recorded(_answered(response, provider, model)), self.shell)
        return response

    def _recorded(self, statement: Statement) -> Flow[Receipt]:
        payer = self.recording()
        return record_call(payer.context, payer.meter, secrets.token_bytes(32), statement)


def _stated(provider: str, model: str, usage: object) -> Statement:
    _check_name("provider", provider)
    _check_name("model", model)
    return read_statement(provider, model, as_mapping(usage, field="usage"))


def _answered(response: object, provider: str | None, model: str | None) -> Statement:
    if provider is not None:
        _check_name("provider", provider)
    if model is not None:
        _check_name("model", model)
    return read_answer(as_mapping(response, field="response"), provider, model)


def _check_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not value.strip() or len(value) > _LONGEST_NAME:
        shown = repr(value)[:100] if isinstance(value, (str, bytes, int)) else type(value).__name__
        raise ConfigError(f"{name}: {shown} is not the name of a {name}; write text such as {_EXAMPLES[name]!r}")


_EXAMPLES: Final = {"provider": "openai", "model": "gpt-4o-mini"}
_LONGEST_NAME: Final = 300
