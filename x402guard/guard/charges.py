"""What a session pays for besides requests: tools, blocks that hold an amount, and LLM calls past the transport."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, ParamSpec, Protocol, TypeVar, overload

from x402guard.adapters.direct import Offered, Payment, apay, offered, pay
from x402guard.errors import ConfigError
from x402guard.flow.drivers import run, run_async
from x402guard.flow.effects import Flow
from x402guard.flow.receipt import Receipt
from x402guard.flow.request import POLLS
from x402guard.flow.surroundings import here
from x402guard.frozen import replace
from x402guard.http.guarded import MeteredPayer
from x402guard.llm.record import record_call
from x402guard.llm.reported import Statement, read_answer, read_statement
from x402guard.money import Dollars
from x402guard.policy import Policy
from x402guard.tools.counting import Mode
from x402guard.tools.decorator import RESULT_TOKENS, CostOf, Render, ToolOptions, decorate
from x402guard.tools.flow import TOOL_HOLD_S, charge_tool
from x402guard.tools.hold import FindsToolPayer, ToolHold, ToolPayer, tool_call
from x402guard.vendors.vendor_answers import as_mapping

P = ParamSpec("P")
R = TypeVar("R")


class Rendered(Protocol):
    """Decorates a function so that it returns a text, awaited if the function is."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, Any]], /) -> Callable[P, Coroutine[Any, Any, str]]: ...

    @overload
    def __call__(self, function: Callable[P, Any], /) -> Callable[P, str]: ...


class DeclaresTools(FindsToolPayer, Protocol):
    """What decorates functions as tools: a session, and ``x402guard.tool`` for the session in context."""

    @overload
    def tool(
        self, *, cost: Dollars, name: str | None = None, lifetime_s: int = TOOL_HOLD_S, timeout_s: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R]]: ...

    @overload
    def tool(
        self,
        *,
        cost: CostOf,
        up_to: Dollars,
        name: str | None = None,
        lifetime_s: int = TOOL_HOLD_S,
        timeout_s: int | None = None,
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
        timeout_s: int | None = None,
    ) -> Rendered: ...

    def tool(self, *only: Callable[..., Any], name: str | None = None, **options: Any) -> Callable[..., Any]:
        """Decorate a function, plain or ``async``, whose calls cost money or take tokens of the context.

        Args:
            cost: dollars for each call, held before and captured after it; or a function of the result.
            up_to: with such a function: the ceiling of a call, in dollars. It is held.
            name: the name in reports; by default the function's own.
            mode: how results are shown while there are enough tokens: ``raw``, ``table``, ``summary``, ``handle_only``.
                The call returns ``render(result, mode)`` in the mode that ``tokens`` suggests, cut to the granted size.
            render: with a mode: a function that returns the text of a result in a mode.
            max_tokens: the most tokens of one result, 4,000 by default; they are reserved while the tool runs.
            lifetime_s: seconds after which a call without a reported end counts in full.
            timeout_s: seconds that a call may take, 0 for any time; by default the policy's limit.

        A call that raises, or whose cost is unknown, captures what was held. Raises ``ConfigError`` naming the
        argument, ``TypeError`` for a float. Calls raise as ``charge``, and ``BudgetExhausted`` before they run if no
        token is left.
        """
        if only:
            raise ConfigError('tool: write @session.tool(cost="$0.01"), with the cost of a call, above the function')
        unknown = sorted(set(options) - set(ToolOptions.__dataclass_fields__))
        if unknown:
            raise ConfigError(f"{unknown[0]}: tool() takes {', '.join(ToolOptions.__dataclass_fields__)} and name")
        checked = ToolOptions(**options)
        return lambda function: decorate(self, checked, name, function)


class Charges(DeclaresTools, ToolPayer):
    """The part of a session for tools and reported calls. All of it pays from the innermost budget in context."""

    @abstractmethod
    def recording(self) -> MeteredPayer:
        """Return the budget that records what is owed already, even after the session's end."""

    # -- tools ------------------------------------------------------------------------------------------------------

    def charge(self, tool: str, cost: Dollars, *, arguments: Mapping[str, Any] | None = None) -> Receipt:
        """Capture the cost of one use of a tool, in dollars, before it runs. Returns its receipt.

        *arguments* distinguish one use from another; the ledger keeps only a hash of them. Raises ``BudgetExhausted``
        if the cost does not fit, ``SessionTripped`` or ``SessionClosed``, with nothing captured; ``TypeError`` for a
        float, ``ValueError`` for anything else that is not a dollar amount, ``ConfigError`` for another argument.
        """
        call = tool_call(tool, cost, field="cost", arguments=arguments, fixed=True)
        return run(charge_tool(self.innermost().context, call), self.shell)

    async def acharge(self, tool: str, cost: Dollars, *, arguments: Mapping[str, Any] | None = None) -> Receipt:
        """Do the same as ``charge``, awaited: the ledger is written off the event loop."""
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
        """Return a block, for ``with`` or ``async with``, that holds the ceiling of one use of a tool, in dollars.

        The block calls ``capture`` or ``void``; without a call its end captures the ceiling. If the process ends inside
        the block, the hold counts in full and is captured *lifetime_s* seconds after it began. Raises as ``charge``
        does; on entering if the ceiling does not fit.
        """
        return ToolHold(self, tool_call(tool, up_to, field="up_to", arguments=arguments, lifetime_s=lifetime_s))

    # -- offers that did not come by HTTP ----------------------------------------------------------------------------

    def pay(
        self,
        required: object,
        *,
        purchase: str | None = None,
        place: str | None = None,
        max_price: Dollars | None = None,
        pay_again: bool = False,
    ) -> Payment:
        """Hold and sign a payment for an offer that no transport of ours has seen, and return what to send.

        The policy, the guards and the budget judge it as if a transport had met it. End it with ``settled`` or
        ``failed``; without an end it stays held to its deadline.

        Args:
            required: the PaymentRequired: a model, a mapping, or the text of a ``PAYMENT-REQUIRED`` header.
            purchase: a name for what is bought, for which at most one payment is made.
            place: a URL that says where the offer came from, and what is bought there; ``mcp://name/tool`` for a process
                of this machine. The rules about hosts judge it. By default the offer's own resource: a seller's word.
            max_price: the price that was quoted, in dollars.
            pay_again: pay a second time even if a payment for it is in doubt.

        Raises ``PaymentRefused`` and its subclasses, ``ProtocolError``, ``SettlementUncertain``, ``SignerError``,
        ``LedgerUnavailable``, and ``ConfigError`` naming the argument.
        """
        offer = offered(required, purchase=purchase, place=place, max_price=max_price, pay_again=pay_again)
        _check_place(offer, self.innermost().context.policy)
        return pay(self.innermost(), offer)

    async def apay(
        self,
        required: object,
        *,
        purchase: str | None = None,
        place: str | None = None,
        max_price: Dollars | None = None,
        pay_again: bool = False,
    ) -> Payment:
        """Do the same as ``pay``, awaited; end it with ``asettled`` or ``afailed``."""
        offer = offered(required, purchase=purchase, place=place, max_price=max_price, pay_again=pay_again)
        _check_place(offer, self.innermost().context.policy)
        return await apay(self.innermost(), offer)

    # -- calls that no transport saw ----------------------------------------------------------------------------------

    def poll(self, purchase: str) -> dict[str, object]:
        """Return the ``extensions`` of a request that asks after a job: ``http.get(url, extensions=session.poll("job 7"))``.

        *purchase* is the name that the request had which began the job. Each poll of its origin shows that payment where
        the server asks for one, while it is valid, whatever earlier polls have brought. It signs no other payment.
        """
        return {"purchase": purchase, POLLS: True}

    def record_usage(self, provider: str, model: str, usage: object, *, messages: object = None) -> Receipt:
        """Record an LLM call past the transport (boto3, gRPC): what it used is owed already, so it counts in full.

        *usage* is in the units of the price book (``{"input_tokens": 200, "output_tokens": 100}``), or as the provider
        states it; *messages* are what was sent to the model, as plain JSON, for the loop detector. Trips the budgets
        that it exceeds. In a session that was tripped before, the call is recorded and ``SessionTripped`` raised, and
        ``LoopDetected`` after a call that is a loop. With nothing recorded, raises ``Unpriced`` if its price is unknown, and
        ``ValueError`` or ``TypeError`` for an unusable usage.
        """
        return run(self._recorded(_stated(provider, model, usage), messages), self.shell)

    async def arecord_usage(self, provider: str, model: str, usage: object, *, messages: object = None) -> Receipt:
        """Do the same as ``record_usage``, awaited."""
        return await run_async(self._recorded(_stated(provider, model, usage), messages), self.shell)

    def wrap(self, response: R, *, provider: str | None = None, model: str | None = None, messages: object = None) -> R:
        """Record the usage in a complete answer of a vendor's library, as ``record_usage`` does, and return the answer.

        Give *provider* and *model* if the answer does not name them: Bedrock's names no model, and many providers speak
        OpenAI's dialect. Raises as ``record_usage`` does.
        """
        run(self._recorded(_answered(response, provider, model), messages), self.shell)
        return response

    async def awrap(
        self, response: R, *, provider: str | None = None, model: str | None = None, messages: object = None
    ) -> R:
        """Do the same as ``wrap``, awaited."""
        await run_async(self._recorded(_answered(response, provider, model), messages), self.shell)
        return response

    def _recorded(self, statement: Statement, messages: object) -> Flow[Receipt]:
        payer = self.recording()
        stated = replace(statement, messages=messages)
        return record_call(payer.context, payer.meter, here().random_bytes(32), stated)


def _check_place(offer: Offered, policy: Policy) -> None:
    """Raise ``ConfigError`` where the owner lists hosts, and the host of an offer is its seller's own word."""
    if offer.by_offer and policy.hosts is not None:
        raise ConfigError(
            "place: policy.hosts is set, and the offer's own resource is its seller's word; say where it came from: "
            "place='https://seller.example/what'"
        )


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
