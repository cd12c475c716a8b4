"""Every error x402guard raises. The first question each one answers: is money at risk?

::

    X402GuardError
    ├── ConfigError              a setting is wrong; nothing was sent
    ├── PaymentRefused           we said no; nothing was signed
    │   ├── BudgetExhausted      it does not fit into what is left
    │   ├── LoopDetected         the same call, again and again
    │   ├── SpendSpike           a step that costs far more than those before it
    │   ├── VelocityExceeded     too much in too short a time
    │   ├── CircuitOpen          this payee, host or tool keeps failing
    │   ├── PolicyDenied         a rule of the owner's policy
    │   ├── ApprovalDenied       a person said no, or nothing
    │   ├── NoAcceptableOffer    none of several offers may be paid
    │   ├── SessionTripped       the session is latched until its owner resets it
    │   ├── SessionClosed        the session has ended
    │   ├── Unpriced             nothing is known that says what this costs
    │   └── NeedsReview          a person has to look first
    ├── ProtocolError            the peer broke the protocol; nothing was signed
    ├── CallTimeout              our own time limit; what was held stays held
    ├── SettlementUncertain      a signature is out and stands as a liability
    │   └── PaidNotDelivered     the chain took the money and no answer came
    ├── SignerError              the key refused; the hold was voided
    ├── LedgerUnavailable        the books cannot be written, so nothing is signed
    └── IllegalTransition        a bug of ours: the ledger's table forbids this step

None of them is a subclass of an HTTP library's error, so a retry loop around network failures never pays twice by accident.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from x402guard.money import Nanos, nanos_to_decimal

Phase = Literal["configuration", "request", "offer", "policy", "ledger", "signing", "settlement"]
Retry = Literal["no", "later", "same_request", "after_change"]


class X402GuardError(Exception):
    """The root of every error of this library.

    Attributes, on the class or the instance:
        code: a stable machine-readable word.
        phase: how far the request had come.
        money_may_have_moved: True where a signature may be spendable or spent.
        retry: ``no``; ``later`` (the same call may pass when time has gone by); ``same_request`` (asking again is safe and
            re-presents the same payment); ``after_change`` (of a setting, or of the request).
        advice: one sentence on what to do next.
        request: the HTTP request it belongs to, where there is one (the HTTP library's own object).
    """

    code: ClassVar[str] = "x402guard_error"
    phase: Phase = "request"
    money_may_have_moved: bool = False
    retry: Retry = "no"
    advice: str = "Read the message; nothing was paid."
    request: Any = None

    def __init__(self, message: str, *, advice: str | None = None) -> None:
        super().__init__(message)
        if advice is not None:
            self.advice = advice

    def as_tool_result(self, tool_use_id: str, *, dialect: Dialect | None = None) -> dict[str, Any]:
        """Return this error as the result of the tool call that it ended, for the model to read.

        *dialect* is whose message it is: ``anthropic`` (a ``tool_result`` block), ``openai`` (a message of the role ``tool``) or
        ``openai_responses`` (a ``function_call_output``). Without, the id tells: OpenAI's begin with ``call_`` or ``fc_``. Raises
        ``ValueError`` for an id that is empty and a dialect that is not known.
        """
        told: dict[str, Any] = {"error": self.code, "message": str(self), "advice": self.advice, "retry": self.retry}
        wait_s = getattr(self, "retry_after", None)
        if wait_s is not None:
            told["retry_after"] = wait_s
        if self.money_may_have_moved:
            told["money_may_have_moved"] = True
        return as_tool_result(tool_use_id, told, dialect)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the request, which may hold sockets and headers."""
        state = {name: value for name, value in self.__dict__.items() if name != "request"}
        return _rebuild, (type(self), self.args, state)


def _rebuild(kind: type[X402GuardError], args: tuple[Any, ...], state: dict[str, Any]) -> X402GuardError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(X402GuardError):
    """A setting is missing or wrong; raised before anything is sent."""

    code = "config_error"
    phase: Phase = "configuration"
    retry: Retry = "after_change"
    advice = "Correct the setting that the message names."


class PaymentRefused(X402GuardError):
    """The guard said no, and nothing was signed. Built with amounts in nano-dollars, it shows them in dollars.

    Attributes:
        rule: the rule that decided, as it stands in the report.
        requested: dollars asked for, exact, or None where no price was known.
        available: dollars the rule would have let pass, exact, or None where it is not about an amount.
        session: the id of the session that refused.
        retry_after: seconds after which the same call may pass, or None where that is not known.
    """

    code = "payment_refused"
    phase: Phase = "policy"
    retry: Retry = "after_change"
    advice = "Nothing was paid. Change the request, or ask the owner of the budget to change the rule."

    def __init__(
        self,
        message: str,
        *,
        rule: str,
        requested: Nanos | None = None,
        available: Nanos | None = None,
        session: str | None = None,
        advice: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message, advice=advice)
        self.retry_after = retry_after
        self.rule = rule
        self.requested = None if requested is None else nanos_to_decimal(requested)
        self.available = None if available is None else nanos_to_decimal(available)
        self.session = session

    def amounts(self) -> dict[str, str]:
        """Return ``requested`` and ``available`` as decimal dollar strings, leaving out what is not known."""
        known = {"requested": self.requested, "available": self.available}
        return {name: format(value, "f") for name, value in known.items() if value is not None}


class BudgetExhausted(PaymentRefused):
    """The amount does not fit into what a budget on the path has left. A smaller payment may still pass."""

    code = "budget_exhausted"
    phase: Phase = "ledger"
    advice = "Nothing was paid. Finish with what you have, or ask the owner for a larger budget."


class LoopDetected(PaymentRefused):
    """The same call was made more often than the loop rule allows; the session is latched."""

    code = "loop_detected"
    phase: Phase = "ledger"
    advice = "Nothing was paid. Only the owner can reset this session."


class SpendSpike(PaymentRefused):
    """A step costs far more than the steps before it."""

    code = "spend_spike"
    phase: Phase = "ledger"


class VelocityExceeded(PaymentRefused):
    """Too much was spent in too short a time; it passes again when the window has moved on."""

    code = "velocity_exceeded"
    phase: Phase = "ledger"
    retry: Retry = "later"


class CircuitOpen(PaymentRefused):
    """This payee, host or tool has failed repeatedly and is given a rest."""

    code = "circuit_open"
    retry: Retry = "later"


class PolicyDenied(PaymentRefused):
    """A rule of the policy does not allow this payment."""

    code = "policy_denied"


class ApprovalDenied(PaymentRefused):
    """A person denied this payment, or did not answer in time."""

    code = "approval_denied"


class NoAcceptableOffer(PaymentRefused):
    """The server made several offers and none of them may be paid; the message gives the reason for each."""

    code = "no_acceptable_offer"
    phase: Phase = "offer"


class SessionTripped(PaymentRefused):
    """The session is latched: nothing is signed in it until its owner resets it."""

    code = "session_tripped"
    phase: Phase = "ledger"
    advice = "Nothing was paid. Only the owner can reset this session: x402guard reset SESSION."


class SessionClosed(PaymentRefused):
    """The session has ended; open it again by its id, or open another."""

    code = "session_closed"
    phase: Phase = "ledger"
    advice = "Nothing was paid. Open the session again by its id: guard.session(name, id=…)."


class Unpriced(PaymentRefused):
    """Nothing known says what this would cost, so it cannot be held."""

    code = "unpriced"


class NeedsReview(PaymentRefused):
    """A person has to look at this before it can go on."""

    code = "needs_review"


class ProtocolError(X402GuardError):
    """The peer sent something that the x402 protocol does not allow; nothing was signed.

    Attributes:
        field: the header or field that is wrong.
    """

    code = "protocol_error"
    phase: Phase = "offer"
    advice = "Nothing was paid. The server's offer is malformed; tell its operator."

    def __init__(self, message: str, *, field: str, advice: str | None = None) -> None:
        super().__init__(f"{field}: {message}", advice=advice)
        self.field = field


class CallTimeout(X402GuardError):
    """Our own time limit ran out; what was held stays held, or is booked in full.

    Attributes:
        hold_id: the hold in the ledger, where there is one.
        deadline: unix time in seconds after which the signature is worthless, where there is one.
    """

    code = "call_timeout"
    phase: Phase = "settlement"
    money_may_have_moved = True
    retry: Retry = "no"
    advice = "What it may have cost is booked. Asking again is a new call; a longer limit is policy.timeouts."
    hold_id: str | None = None
    deadline: int | None = None


class SettlementUncertain(X402GuardError):
    """A signed payment is out and nobody has said whether it was taken; it counts in full until that is known.

    Asking again means: the same request (``.request`` is it, without the payment), in the same session, before the deadline. That
    presents the same payment.

    Attributes:
        hold_id: the hold in the ledger.
        deadline: unix time in seconds after which the signature is worthless.
        amount: dollars that may be taken at most; None where it is not known here.
        payee, network: whom it pays, and where (CAIP-2); "" where it is not known here.
        place: method and URL that it was for, without the query; "" where it is not known here.
        payment_id: the ``payment-identifier`` that went with it, and goes with it again; None where the server takes none.
    """

    code = "settlement_uncertain"
    phase: Phase = "settlement"
    money_may_have_moved = True
    retry: Retry = "same_request"
    advice = "Ask again with the same request: it re-presents the same payment and never signs a second one."

    def __init__(
        self,
        message: str,
        *,
        hold_id: str,
        deadline: int,
        advice: str | None = None,
        amount: Nanos | None = None,
        payee: str = "",
        network: str = "",
        place: str = "",
        payment_id: str | None = None,
    ) -> None:
        super().__init__(message, advice=advice)
        self.hold_id = hold_id
        self.deadline = deadline
        self.amount = None if amount is None else nanos_to_decimal(amount)
        self.payee, self.network = payee, network
        self.place = place
        self.payment_id = payment_id


class PaidNotDelivered(SettlementUncertain):
    """The chain shows that the money was taken, and no answer came. Raised once: the next call may buy again."""

    code = "paid_not_delivered"
    retry: Retry = "no"
    advice = "The payment is captured. Take it up with the payee; asking again is a new purchase."


class SignerError(X402GuardError):
    """The key refused to sign; the hold was voided and nothing can be spent."""

    code = "signer_error"
    phase: Phase = "signing"
    retry: Retry = "after_change"
    advice = "Nothing was paid. Check the signer that the message names."


class LedgerUnavailable(X402GuardError):
    """The books cannot be read or written, so nothing is signed."""

    code = "ledger_unavailable"
    phase: Phase = "ledger"
    retry: Retry = "later"
    advice = "Nothing was paid. Make the ledger writable again, then repeat the call."


class IllegalTransition(X402GuardError):
    """The ledger's table has no such step: a bug in x402guard, or in a store."""

    code = "illegal_transition"
    phase: Phase = "ledger"
    advice = "This is a bug in x402guard. The transaction was rolled back; please report it."


Dialect = Literal["anthropic", "openai", "openai_responses"]


def as_tool_result(tool_use_id: str, told: Mapping[str, Any], dialect: Dialect | None = None) -> dict[str, Any]:
    """Return what is *told* as the result of a tool call that failed.

    Without a *dialect* the id tells: OpenAI's begin with ``call_`` or ``fc_``. Raises ``ValueError`` for an id that is empty and a
    dialect that is not known.
    """
    if not isinstance(tool_use_id, str) or not tool_use_id:
        raise ValueError(f"tool_use_id: {tool_use_id!r} is not the id of a tool call; take it from the model's request")
    if dialect is None:
        dialect = "openai" if tool_use_id.startswith(("call_", "fc_")) else "anthropic"
    text = json.dumps(dict(told), ensure_ascii=False).encode("utf-8", "replace").decode()  # no halves of characters
    match dialect:
        case "anthropic":
            return {"type": "tool_result", "tool_use_id": tool_use_id, "is_error": True, "content": text}
        case "openai":
            return {"role": "tool", "tool_call_id": tool_use_id, "content": text}
        case "openai_responses":
            return {"type": "function_call_output", "call_id": tool_use_id, "output": text}
        case _:
            raise ValueError(f"dialect: {dialect!r} is none of {', '.join(get_args(Dialect))}")
