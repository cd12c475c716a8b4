"""Holds for tools that cost money, as a ``with`` block; the same flow blocking and awaited."""

from __future__ import annotations

import threading
from decimal import Decimal
from typing import Final, Protocol, Self

from x402guard.errors import ConfigError
from x402guard.flow.context import Context
from x402guard.flow.drivers import run, run_async
from x402guard.flow.effects import Flow
from x402guard.flow.receipt import Receipt
from x402guard.flow.shell import Payer
from x402guard.flow.surroundings import here
from x402guard.kernel.rows import Nanos
from x402guard.money import Dollars, dollars_to_nanos, format_dollars, nanos_to_decimal
from x402guard.policy.step_guard import Outcome
from x402guard.tools.arguments import plain_arguments, readable
from x402guard.tools.flow import TOOL_HOLD_S, HeldTool, ToolCall, ToolEnd, check_tool, end_tool, hold_tool
from x402guard.tools.token_budget import TokenBudget

LONGEST_S: Final = 31 * 86_400
"""The maximum lifetime of a tool's hold, and of its timeout, in seconds."""


class FindsToolPayer(Protocol):
    """A session, or what finds the session in context."""

    def innermost(self) -> ToolPayer:
        """Return the innermost budget in context. Raises ``ConfigError`` if there is none."""


class ToolPayer(Payer, Protocol):
    """A budget that pays for tools: a session or a scope."""

    def innermost(self) -> ToolPayer:
        """Return the innermost budget in context (see ``Payer``)."""

    @property
    def tokens(self) -> TokenBudget:
        """The token budget of its context window."""


def tool_call(
    tool: object,
    amount: Dollars,
    *,
    field: str,
    arguments: object = None,
    lifetime_s: object = TOOL_HOLD_S,
    fixed: bool = False,
) -> ToolCall:
    """Return one use of a tool, checked. *field* names the amount in errors; *fixed*: it is the cost, not a ceiling.

    Raises ``TypeError`` for a float, ``ValueError`` for an invalid dollar amount, ``ConfigError`` for other errors.
    """
    name = check_tool(tool)
    if type(lifetime_s) is not int or not 1 <= lifetime_s <= LONGEST_S:
        raise ConfigError(f"lifetime_s: {lifetime_s!r} is not a whole number of seconds from 1 to {LONGEST_S}")
    nanos = dollars_to_nanos(amount, field=field)
    return ToolCall(
        name,
        nanos,
        here().random_bytes(32),
        plain_arguments(arguments),
        lifetime_s,
        fixed,
        shown=readable(arguments),
    )


class ToolHold:
    """The ceiling of one use of a tool, held while its block runs. Made by ``Session.hold``; blocking or async.

    The block reports the end: ``capture`` with the cost, or ``void`` if the tool was not billed. The exit of the block
    writes it. A block that reports nothing, or that an exception leaves before a report, captures the ceiling.
    """

    def __init__(self, payer: ToolPayer, call: ToolCall) -> None:
        self._payer = payer
        self._call = call
        self._lock = threading.Lock()
        self._context: Context | None = None
        self._held: HeldTool | None = None
        self._ending: str | None = None
        self._captured: Nanos | None = None
        self._voided: str | None = None
        self._left = False
        self._receipt: Receipt | None = None

    @property
    def amount(self) -> Decimal:
        """The ceiling in dollars, exact."""
        return nanos_to_decimal(self._call.amount if self._held is None else self._held.ceiling)

    @property
    def hold_id(self) -> str:
        """The id of the hold in the ledger."""
        return self._call.hold_id

    @property
    def receipt(self) -> Receipt | None:
        """The receipt after the exit of the block; None before."""
        return self._receipt

    def capture(self, amount: Dollars) -> None:
        """Report the cost in dollars. More than the ceiling is owed too, and trips the limits that it exceeds.

        Raises ``TypeError`` for a float, ``ValueError`` for an invalid dollar amount, ``ConfigError`` if the end was
        reported already, or outside the block.
        """
        nanos = dollars_to_nanos(amount, field="amount")
        self._end(f"captured ${format_dollars(nanos)}")
        self._captured = nanos

    def void(self, reason: str = "not billed") -> None:
        """Report that the tool was not billed: the hold is voided. Raises ``ConfigError`` as ``capture`` does."""
        self._end("voided")
        self._voided = str(reason)

    def _end(self, ending: str) -> None:
        if self._held is None or self._left:
            raise ConfigError(f"hold: {self._call.tool!r} is not held here; report its end inside its `with` block")
        if self._ending is not None:
            raise ConfigError(f"hold: the end of {self._call.tool!r} was reported already: {self._ending}")
        self._ending = ending

    def __enter__(self) -> Self:
        context = self._begin()
        self._held = run(hold_tool(context, self._call), self._payer.shell)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._receipt = run(self._written(error), self._payer.shell)

    async def __aenter__(self) -> Self:
        context = self._begin()
        self._held = await run_async(hold_tool(context, self._call), self._payer.shell)
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._receipt = await run_async(self._written(error), self._payer.shell)

    def _begin(self) -> Context:
        with self._lock:
            if self._context is not None:
                raise ConfigError(
                    f"hold: this hold of {self._call.tool!r} was used already; write session.hold(…) for each use"
                )
            self._context = self._payer.innermost().context
            return self._context

    def _written(self, error: BaseException | None) -> Flow[Receipt]:
        self._left = True
        if self._held is None or self._context is None:
            raise ConfigError(f"hold: the block of {self._call.tool!r} was never entered")
        if self._ending is not None:
            end = ToolEnd(amount=self._captured, void=self._voided)
        elif error is not None:
            outcome: Outcome = "failed" if isinstance(error, Exception) else "unknown"
            end = ToolEnd(note=f"its block was left by {type(error).__name__}", outcome=outcome)
        else:
            end = ToolEnd(note="its cost was not reported", forgotten=True)
        return end_tool(self._context, self._held.hold, end, ceiling=self._held.ceiling)
