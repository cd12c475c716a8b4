"""A client session of MCP whose tools are guarded: free ones count as tools, paid ones are bought through the guard.

Source: x402 specification, transport MCP: terms in the result of a tool or in a JSON-RPC error, the payment in
``_meta["x402/payment"]``, the receipt in ``_meta["x402/payment-response"]``.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from copy import deepcopy
from typing import Any, Final, Protocol
from urllib.parse import SplitResult, quote, unquote, urlsplit

import anyio
from msgspec.structs import replace

from x402guard.adapters.direct import Offered, Payment, apay
from x402guard.adapters.peers import checked_budget, place_named
from x402guard.errors import (
    ConfigError,
    PaidNotDelivered,
    PaymentRefused,
    PolicyDenied,
    ProtocolError,
    SettlementUncertain,
)
from x402guard.flow.admission import Seat
from x402guard.flow.drivers import run_async
from x402guard.flow.receipt import Receipt, undelivered
from x402guard.flow.refusals import refused
from x402guard.flow.shell import Payer
from x402guard.kernel.rows import HoldKind, HoldState
from x402guard.ledger.authorize import Refusal
from x402guard.money import Dollars
from x402guard.policy.step_guard import Outcome
from x402guard.strict_json import NotReadable, read_json
from x402guard.tools.flow import check_free, end_free
from x402guard.tools.hold import tool_call
from x402guard.x402.foreign import META
from x402guard.x402.rails import CODES

PAYMENT_RESPONSE: Final = "x402/payment-response"
RECEIPT: Final = "x402guard/receipt"
"""The key of ``_meta`` under which a result of ours has the receipt of its payment."""

_MOST_TEXT: Final = 262_144
_SWAPPED: Final = "swapped_tool"


class PayingSession(Protocol):
    """A session that pays, and declares tools."""

    def innermost(self) -> Payer:
        """Return the innermost budget in context."""

    def tool(self, *, cost: Dollars, name: str, timeout_s: int) -> Callable[[Any], Any]:
        """Decorate a function whose calls cost money."""


class GuardedMCPSession:
    """A ``ClientSession`` (or ``Client``) of the package ``mcp`` whose tools are called through a session of the guard.

    A free tool counts as a tool: loops, risk, approvals and ``max_calls`` judge it under the name ``SERVER/TOOL``. One
    that asks for a payment is bought; a purchase is server, tool and canonical arguments. Everything else is passed on.

    Args:
        mcp: the client session, connected.
        session: the budget that pays.
        server: your own name of the server, or its URL: the rules about hosts judge it. The server's own word is none.
        costs: tool → dollars for a call of a tool that is paid for elsewhere, held before and captured after it.

    Raises ``ConfigError`` naming the argument.
    """

    def __init__(
        self,
        mcp: Any,
        session: PayingSession,
        *,
        server: str,
        costs: Mapping[str, Dollars] | None = None,
    ) -> None:
        if not hasattr(mcp, "call_tool"):
            raise ConfigError(f"mcp: a {type(mcp).__name__} has no call_tool; give a ClientSession of the package mcp")
        checked_budget(session)
        self._mcp, self._session, self._costs = mcp, session, dict(costs or {})
        self._place = place_named("server", server, "weather")
        self._name = urlsplit(self._place).hostname or server
        self._known = _identity(mcp)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mcp, name)

    async def call_tool(
        self,
        name: str,
        arguments: dict[str, Any] | None = None,
        *,
        purchase: str | None = None,
        max_price: Dollars | None = None,
        pay_again: bool = False,
        **options: Any,
    ) -> Any:
        """Call a tool, and buy its result if it asks for a payment. Returns the server's result.

        *purchase*, *max_price* and *pay_again* are those of ``session.pay``; *options* go to the client session. The
        receipt of a payment is in the result's ``meta["x402guard/receipt"]``. Raises as ``session.pay`` does, and what the
        client session raises for a call that is not paid.
        """

        async def call(**given: Any) -> Any:
            place = f"{self._place}/{quote(name, safe='')}"
            offer = Offered({}, place, _canonical(given), purchase, pay_again, max_price, tool)
            return await self._bought(name, given, offer, options)

        arguments = _copied(arguments or {})  # as they are judged and shown, they are sent
        tool = f"{self._name}/{name}"
        rules = self._session.innermost().context.policy.rules or ()
        if name in self._costs or not any(rule.remove for rule in rules):
            _canonical(arguments)  # what cannot be sent costs nothing, unless a rule removes it
        if name not in self._costs:
            return await self._counted(tool, arguments, call)
        declared = self._session.tool(cost=self._costs[name], name=tool, timeout_s=0)
        called: Callable[..., Coroutine[Any, Any, Any]] = declared(call)
        return await called(**arguments)

    async def _counted(self, tool: str, arguments: dict[str, Any], call: Callable[..., Awaitable[Any]]) -> Any:
        """Call a tool that costs no dollars of its own: the rules and the guards judge it, and count its end."""
        budget = self._session.innermost()
        use = tool_call(tool, 0, field="cost", arguments=arguments)
        seat = Seat(HoldKind.TOOL, tool)
        outcome: Outcome = "failed"
        try:
            narrow, _ = await run_async(check_free(budget.context, use, seat), budget.shell)
            left_out = set() if narrow is None else set(narrow.remove)
            result = await call(**{key: value for key, value in arguments.items() if key not in left_out})
            outcome = "failed" if getattr(result, "is_error", False) else "ok"
            return result
        except BaseException as error:
            outcome = (
                "failed"
                if isinstance(error, Exception) and not isinstance(error, (PaymentRefused, ConfigError))
                else "unknown"
            )
            raise
        finally:
            seat.leave()
            with anyio.CancelScope(shield=True):
                await run_async(end_free(budget.context, use, outcome=outcome), budget.shell)

    async def _bought(self, name: str, arguments: dict[str, Any], offer: Offered, options: dict[str, Any]) -> Any:
        try:
            result = await self._mcp.call_tool(name, arguments, **options)
        except Exception as error:
            result, terms, beside = None, _terms_in_error(error), b""
            if terms is None:
                raise
        else:
            terms, beside = _terms_of(result)
        if terms is None:
            return _with_receipt(result, None)
        budget = self._session.innermost()
        await self._refuse_swap(budget, name, terms)
        payment = await apay(budget, replace(offer, required=terms, beside=beside))
        return await self._paid(payment, name, arguments, options)

    async def _paid(self, payment: Payment, name: str, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
        """Call the tool with its payment. From here on no error denies the payment."""
        meta = options.pop("meta", None) or {}
        try:  # no local variable has the payment
            result = await self._mcp.call_tool(name, arguments, meta={**meta, META: payment.payload}, **options)
        except BaseException as error:  # noqa: BLE001 - the error in its place is raised
            response = _object(getattr(error, "data", None), PAYMENT_RESPONSE)
            if response is None:
                await payment.abroken(error)
            raise _undelivered(name, await payment.afailed(response)) from payment.without_payment(error)
        response = _object(getattr(result, "meta", None), PAYMENT_RESPONSE)
        receipt = await (payment.afailed if getattr(result, "is_error", True) else payment.asettled)(response)
        return _with_receipt(result, receipt)

    async def _refuse_swap(self, budget: Payer, name: str, terms: Mapping[str, Any]) -> None:
        """Refuse terms for another tool, and a server that has become another one since it was wrapped."""
        if names_another_tool(terms, name):
            reason = f"{self._name}/{name} was called, and the terms are for another tool"
        elif _identity(self._mcp) != self._known:
            reason = f"{self._name} has become another server since it was wrapped"
        else:
            return
        words = str(_url_of(terms).geturl())
        refusal = Refusal(
            _SWAPPED, reason, error=PolicyDenied, words=words, advice="Connect again, and ask for a new quote."
        )
        raise await run_async(refused(budget.context, refusal), budget.shell)


def names_another_tool(terms: Mapping[str, Any], name: str) -> bool:
    """True if the resource of *terms* is ``mcp://tool/NAME``, the official SDK's form, of another tool, or cannot be read.

    A resource on another host is the server's own.
    """
    url = _url_of(terms)
    sold = unquote(url.path.strip("/"))
    host = (url.hostname or "").rstrip(".")
    names_a_tool = url.scheme == "mcp" and (host == "tool" or (not host and url.path.startswith(("/", "tool/"))))
    return names_a_tool and name not in (sold, sold.rpartition("/")[2])


def _url_of(terms: Mapping[str, Any]) -> SplitResult:
    """Return the parts of a resource's URL; of one that cannot be read those of a tool of no name, which is none called."""
    resource = terms.get("resource")
    try:
        return urlsplit(str(resource.get("url")) if isinstance(resource, Mapping) else "")
    except ValueError:
        return urlsplit("mcp://tool/")


def _identity(mcp: Any) -> tuple[object, object]:
    """Return what a server calls itself, and its version."""
    info = getattr(mcp, "server_info", None)
    return getattr(info, "name", None), getattr(info, "version", None)


def _copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a call's arguments. Raises ``ConfigError`` for what cannot be copied."""
    try:
        return deepcopy(arguments)
    except Exception as error:  # noqa: BLE001 - it is the caller's code
        what = type(error).__name__
        raise ConfigError(
            f"arguments: they are no JSON and cannot be copied ({what}); give a dict of plain values"
        ) from None


def _canonical(arguments: Mapping[str, Any] | None) -> bytes:
    """Return the arguments of a call as one text, whatever the order of their keys. Raises ``ConfigError``."""
    try:
        text = json.dumps(arguments or {}, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")
    except (TypeError, ValueError, RecursionError):
        raise ConfigError("arguments: they are no JSON; give a dict of plain values") from None


def _terms_of(result: Any) -> tuple[Mapping[str, Any] | None, bytes]:
    """Return the terms in a result that is an error: in its structured content, or in its first text; and a text beside them.

    A model reads the text, a client the structured content: both are read, and have to say the same. Raises
    ``ProtocolError`` for a text with terms that two readers could read differently.
    """
    if not getattr(result, "is_error", False):
        return None, b""
    found = getattr(result, "structured_content", None)
    first = getattr(next(iter(getattr(result, "content", None) or ()), None), "text", None)
    text = first if isinstance(first, str) and "x402Version" in first and len(first) <= _MOST_TEXT else ""
    told = _terms_in_text(text)
    return (found, text.encode("utf-8", "replace")) if _are_terms(found) else (told, b"")


def _terms_in_text(text: str) -> Mapping[str, Any] | None:
    if not text:
        return None
    try:
        found = read_json(text)
    except NotReadable as error:
        if error.words:
            raise ProtocolError(str(error), field="content[0].text", words=error.words) from None
        return None
    return found if _are_terms(found) else None


def _terms_in_error(error: Exception) -> Mapping[str, Any] | None:
    data = getattr(error, "data", None)
    return data if _code_of(error) in CODES and _are_terms(data) else None


def _are_terms(value: object) -> bool:
    return isinstance(value, Mapping) and "x402Version" in value and "accepts" in value


def _code_of(error: BaseException) -> int | None:
    """Return the code of a JSON-RPC error; None for any other error."""
    code = getattr(error, "code", None)
    return code if type(code) is int and hasattr(error, "data") else None


def _object(values: object, name: str) -> Mapping[str, Any] | None:
    """Return an object in ``_meta`` or in the data of an error; None for anything else."""
    found = values.get(name) if isinstance(values, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _undelivered(name: str, receipt: Receipt) -> SettlementUncertain:
    """Return what the caller of a tool gets that answers its payment with an error, and says what it took."""
    kind = PaidNotDelivered if receipt.state == HoldState.CAPTURED else SettlementUncertain
    reason = f"{name}: the server answered the payment with an error (hold {receipt.hold_id[:16]}…)"
    return undelivered(reason, receipt, kind=kind)


def _with_receipt(result: Any, receipt: Receipt | None) -> Any:
    """Return a result with the receipt of its payment in its ``meta``, or without one: a server's own is none."""
    meta, copied = getattr(result, "meta", None), getattr(result, "model_copy", None)
    kept = {key: value for key, value in meta.items() if key != RECEIPT} if isinstance(meta, dict) else {}
    if copied is None or (receipt is None and kept == (meta or {})):
        return result
    return copied(update={"meta": kept if receipt is None else {**kept, RECEIPT: receipt.facts()}})
