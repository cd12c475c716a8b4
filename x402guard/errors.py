"""Defines every error that x402guard raises. Each one says first whether money is at risk.

::

    X402GuardError
    ├── ConfigError              a setting is wrong; nothing was sent
    ├── PaymentRefused           the guard refused; nothing was signed
    │   ├── BudgetExhausted      the amount does not fit into the budget that is left
    │   │   └── TokensExhausted  the tokens do not fit into the session's context
    │   ├── LoopDetected         the same call was repeated too often
    │   ├── SpendSpike           a step costs far more than the steps before it
    │   ├── VelocityExceeded     too much was spent in too short a time
    │   ├── CircuitOpen          this payee, host or tool failed repeatedly
    │   ├── PolicyDenied         a rule of the owner's policy refused
    │   ├── ApprovalDenied       an approver denied it, or no approver answered in time
    │   ├── NoAcceptableOffer    none of several offers may be paid
    │   ├── SessionTripped       the session is tripped until its owner resets it
    │   ├── SessionClosed        the session has ended
    │   ├── Unpriced             the cost is unknown
    │   ├── NeedsReview          a person has to review it first
    │   └── AlreadyPaid          this named purchase was paid and handed over
    ├── ProtocolError            the peer broke the protocol; nothing was signed
    ├── CallTimeout              a time limit of the guard ran out; the hold stays held
    ├── SettlementUncertain      a signed payment was sent and may still be taken
    │   └── PaidNotDelivered     the money was taken, and its answer was not handed over
    ├── SignerError              the signer refused; the hold was voided
    ├── LedgerUnavailable        the ledger cannot be written, so nothing is signed
    │   └── InconsistentLedger   a row of it breaks a rule of the kernel
    └── IllegalTransition        a bug in x402guard: the ledger's table forbids this step

None of them is a subclass of an HTTP library's error, so a retry loop for network errors never pays twice by accident.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, ClassVar, Final, Literal, get_args

Phase = Literal["configuration", "request", "offer", "policy", "ledger", "signing", "settlement"]
Retry = Literal["no", "later", "same_request", "after_change"]

MOST_QUOTED: Final = 200
"""How many characters of a peer's words are kept."""

_MOST_READ: Final = 4_096
_ADDRESS_DIGITS: Final = 40
_MAY_BE_A_KEY: Final = re.compile(
    rf"(?<![0-9a-fA-F])(?!(?<=0[xX])[0-9a-fA-F]{{{_ADDRESS_DIGITS}}}(?![0-9a-fA-F]))([0-9a-fA-F]{{6}})[0-9a-fA-F]{{27,}}"
)
"""A key, or a part of one that an error has cut. An address, with its ``0x``, is none."""

_SPENDABLE: Final = re.compile(r"[A-Za-z0-9+/_=-]{80,}")


class X402GuardError(Exception):
    """The base class of every error of this library.

    Attributes, on the class or the instance:
        code: a stable machine-readable word: the name of the class in snake case.
        phase: the phase that the request had reached.
        money_may_have_moved: True if a signed payment may be taken or was taken.
        retry: ``no``; ``later`` (the same call may pass later); ``same_request`` (repeating the request is safe and
            presents the same payment again); ``after_change`` (of a setting, or of the request).
        advice: what to do next.
        detail: the peer's own words that the error is about, quoted, at most 200 characters; else "". They may be
            instructions for a model, so they stand in no message, tool result or problem+json.
        request: the HTTP request of the error as the HTTP library's own object, or None.
    """

    code: ClassVar[str] = "x402guard_error"
    phase: Phase = "request"
    money_may_have_moved: bool = False
    retry: Retry = "no"
    advice: str = "Read the message; nothing was paid."
    detail: str = ""
    request: Any = None

    def __init_subclass__(cls) -> None:
        cls.code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, message: str, *, advice: str | None = None) -> None:
        super().__init__(message)
        if advice is not None:
            self.advice = advice

    def as_tool_result(self, tool_use_id: str, *, dialect: Dialect | None = None) -> dict[str, Any]:
        """Return this error as the result of the failed tool call, for the model to read.

        *dialect* is the message format: ``anthropic`` (a ``tool_result`` block), ``openai`` (a message with the role
        ``tool``) or ``openai_responses`` (a ``function_call_output``). Without it, ids that begin with ``call_`` or
        ``fc_`` are OpenAI's, all others Anthropic's. Raises ``ValueError`` for an empty id or an unknown dialect.
        """
        told: dict[str, Any] = {"error": self.code, "message": str(self), "advice": self.advice, "retry": self.retry}
        wait_s = getattr(self, "retry_after", None)
        if wait_s is not None:
            told["retry_after"] = wait_s
        if self.money_may_have_moved:
            told["money_may_have_moved"] = True
        return as_tool_result(tool_use_id, told, dialect)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the request, which may contain sockets and headers."""
        state = {name: value for name, value in self.__dict__.items() if name != "request"}
        return _rebuild, (type(self), self.args, state)


def quoted(words: object) -> str:
    """Return the first 200 characters of a peer's words in quotes, as one line; "" for none.

    What may be a signature in them, or a payment, is left out: it may be spendable.
    """
    text = _SPENDABLE.sub("[redacted]", str(words)[:_MOST_READ])[:MOST_QUOTED]
    return repr(text) if text else ""


def _in_dollars(nanos: int | None) -> Decimal | None:
    """Return nano-dollars as an exact number of dollars, with at least two places."""
    if nanos is None:
        return None
    digits = f"{abs(nanos):010d}"
    part = digits[-9:].rstrip("0").ljust(2, "0")
    return Decimal(f"{'-' if nanos < 0 else ''}{digits[:-9]}.{part}")


def _rebuild(kind: type[X402GuardError], args: tuple[Any, ...], state: dict[str, Any]) -> X402GuardError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(X402GuardError):
    """A setting is missing or wrong. Raised before anything is sent.

    What is longer in hex digits than an address is shown by its beginning alone: it may be a key in the wrong setting.
    *public* is a part of the message that is none, such as a transaction's hash.
    """

    phase: Phase = "configuration"
    retry: Retry = "after_change"
    advice = "Nothing was sent or paid."

    def __init__(self, message: str, *, advice: str | None = None, public: str = "") -> None:
        parts = message.split(public) if public else [message]
        super().__init__(public.join(_MAY_BE_A_KEY.sub(r"\1…", part) for part in parts), advice=advice)


class PaymentRefused(X402GuardError):
    """The guard refused, and nothing was signed. The constructor takes nano-dollars, the attributes are dollars.

    Attributes:
        rule: the rule that refused, as named in the report.
        requested: the requested amount in dollars, exact; None if no price is known.
        available: the amount in dollars that the rule would allow, exact; None if the rule is not about an amount.
        session: the id of the session that refused.
        retry_after: seconds after which the same call may pass; None if unknown.
    """

    phase: Phase = "policy"
    retry: Retry = "after_change"
    advice = "Nothing was paid. Change the request, or ask the owner of the budget to change the rule."

    def __init__(
        self,
        message: str,
        *,
        rule: str,
        requested: int | None = None,
        available: int | None = None,
        session: str | None = None,
        advice: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message, advice=advice)
        self.retry_after = retry_after
        if retry_after is not None and self.retry == "after_change":
            self.retry = "later"
        self.rule = rule
        self.requested = _in_dollars(requested)
        self.available = _in_dollars(available)
        self.session = session

    def amounts(self) -> dict[str, str]:
        """Return ``requested`` and ``available`` as decimal dollar strings, without unknown ones."""
        known = {"requested": self.requested, "available": self.available}
        return {name: format(value, "f") for name, value in known.items() if value is not None}


class BudgetExhausted(PaymentRefused):
    """The amount does not fit into the rest of a budget on the path. A smaller payment may still pass."""

    phase: Phase = "ledger"
    advice = "Nothing was paid. Finish the task with what you have, or ask the owner for a larger budget."


class TokensExhausted(BudgetExhausted):
    """The tokens do not fit into what a token budget has left: an allocation, or an LLM call under a hard limit."""

    advice = "Nothing was sent. Finish with what the context holds, or ask the owner for a larger token budget."


class LoopDetected(PaymentRefused):
    """The same call was made more often than the loop rule allows. The third refusal of it trips the run."""

    phase: Phase = "ledger"
    advice = "Nothing was paid. Do something else: the same call passes again when the window has moved on."


class SpendSpike(PaymentRefused):
    """A step costs far more than the steps before it."""

    phase: Phase = "ledger"


class VelocityExceeded(PaymentRefused):
    """Too much was spent in too short a time. The call may pass again after ``retry_after`` seconds, if there are any."""

    phase: Phase = "ledger"
    advice = (
        "Nothing was paid. It is above the limit by itself: buy what is cheaper, or ask the owner to raise the limit."
    )


class CircuitOpen(PaymentRefused):
    """This payee, host or tool has failed repeatedly, and its circuit is open for some time."""

    retry: Retry = "later"


class PolicyDenied(PaymentRefused):
    """A rule of the policy does not allow this payment."""


class ApprovalDenied(PaymentRefused):
    """An approver denied this call, or no approver answered in time."""


class NoAcceptableOffer(PaymentRefused):
    """The server made several offers and none of them may be paid; the message gives the reason for each."""

    phase: Phase = "offer"


class SessionTripped(PaymentRefused):
    """The session is tripped: nothing is signed in it until its owner resets it."""

    phase: Phase = "ledger"
    advice = "Nothing was paid. Only the owner can reset this session: x402guard reset SESSION."


class SessionClosed(PaymentRefused):
    """The session has ended. Open it again by its id, or open another one."""

    phase: Phase = "ledger"
    advice = "Nothing was paid. Open the session again by its id: guard.session(name, id=…)."


class Unpriced(PaymentRefused):
    """The cost is unknown, so no hold can be written."""


class NeedsReview(PaymentRefused):
    """A person has to review this before it can continue."""


class AlreadyPaid(PaymentRefused):
    """A purchase of this name was paid, and its answer was handed over. A name is good for one payment.

    Attributes:
        receipt: the ``Receipt`` of that payment.
    """

    phase: Phase = "ledger"
    retry: Retry = "no"
    advice = (
        "Nothing was paid now. Use the answer of that payment; to pay a second time, use another name, or "
        "extensions={'pay_again': True}."
    )
    receipt: object = None


class ProtocolError(X402GuardError):
    """The peer sent something that the x402 protocol does not allow. Nothing was signed.

    Attributes:
        field: the header or field that is wrong.
    """

    phase: Phase = "offer"
    advice = "Nothing was paid. The server's offer is malformed; tell its operator."

    def __init__(self, message: str, *, field: str, advice: str | None = None, words: object = "") -> None:
        super().__init__(f"{field}: {message}", advice=advice)
        self.field = field
        self.detail = quoted(words)


class CallTimeout(X402GuardError):
    """A time limit of the guard ran out. The hold stays held, or its ceiling is captured.

    Attributes:
        hold_id: the hold in the ledger, or None.
        deadline: unix time in seconds after which the signature is worthless, or None.
        amount: what was taken in dollars, or the ceiling as long as that is unknown; None if nothing was held.
        payee, network: the paid address and its network (CAIP-2); "" for a call that is no payment.
        place: the method and URL of the request, without the query; "" for a tool.
        transaction: the transaction that took it, as far as the server has named it; else "".
    """

    phase: Phase = "settlement"
    money_may_have_moved = True
    retry: Retry = "no"
    amount: Decimal | None = None
    payee = network = place = transaction = ""
    advice = (
        "Its ceiling counts against the budget. A repeated call is a new call; policy.timeouts sets the time limits."
    )
    hold_id: str | None = None
    deadline: int | None = None


class SettlementUncertain(X402GuardError):
    """A signed payment was sent and its outcome is unknown. It counts in full until the outcome is known.

    To ask again, repeat the same request (``.request``, without the payment) in the same session before the deadline.
    That presents the same payment again.

    Attributes:
        hold_id: the hold in the ledger.
        deadline: unix time in seconds after which the signature is worthless.
        amount: what was taken in dollars, or the ceiling of the payment as long as that is unknown; None if unknown here.
        payee, network: the paid address and its network (CAIP-2); "" if unknown here.
        place: the method and URL of the request, without the query; "" if unknown here.
        payment_id: the ``payment-identifier`` that is sent each time; None if the server does not use it.
        transaction: the transaction that took it, as far as a chain or the server has named it; else "".
    """

    phase: Phase = "settlement"
    money_may_have_moved = True
    retry: Retry = "same_request"
    advice = "Repeat the same request: it presents the same payment again and never signs a second one."

    def __init__(
        self,
        message: str,
        *,
        hold_id: str,
        deadline: int,
        advice: str | None = None,
        amount: int | None = None,
        payee: str = "",
        network: str = "",
        place: str = "",
        payment_id: str | None = None,
        transaction: str = "",
    ) -> None:
        super().__init__(message, advice=advice)
        self.hold_id = hold_id
        self.deadline = deadline
        self.amount = _in_dollars(amount)
        self.payee, self.network = payee, network
        self.place = place
        self.payment_id = payment_id
        self.transaction = transaction


class PaidNotDelivered(SettlementUncertain):
    """The money was taken, and its answer was not handed over. Raised for each identical request that gets no answer.

    Such a request presents the same payment until its deadline, and signs no other. A new payment needs
    ``extensions={"pay_again": True}`` on the request, ``x402guard holds forgive ID`` by the owner, or
    ``purchase_memory_s`` (24 hours) to pass.
    """

    retry: Retry = "no"
    advice = (
        "The payment is captured, and no other was signed. Until its deadline, the same request presents it again. Else "
        "contact the payee; to pay a second time, send the request with extensions={'pay_again': True}."
    )


class SignerError(X402GuardError):
    """The signer refused to sign. The hold was voided, and nothing can be taken."""

    phase: Phase = "signing"
    retry: Retry = "after_change"
    advice = "Nothing was paid. Check the signer that the message names."


class LedgerUnavailable(X402GuardError):
    """The ledger cannot be read or written, so nothing is signed."""

    phase: Phase = "ledger"
    retry: Retry = "later"
    advice = "Nothing was paid. Make the ledger writable again, then repeat the call."

    def __init__(self, message: str, *, advice: str | None = None, retry: Retry | None = None) -> None:
        super().__init__(message, advice=advice)
        if retry is not None:
            self.retry = retry


class InconsistentLedger(LedgerUnavailable):
    """A row of the ledger breaks a rule of the kernel: a file was edited, or two were mixed. Nothing is authorized there."""

    retry: Retry = "after_change"
    advice = "Nothing was paid. `x402guard verify` shows what is wrong; restore a copy of the ledger that you trust."


class IllegalTransition(X402GuardError):
    """The kernel refuses a change of the ledger: a bug in x402guard, in a store, or in a guard or rule of yours.

    Attributes:
        rule: the rule of the kernel that forbids it, or "" where the ledger's own table does.
        row: the hold, node or mark that it is about, or "".
    """

    phase: Phase = "ledger"
    advice = "This is a bug in x402guard. The transaction was rolled back; please report it."

    def __init__(self, message: str, *, rule: str = "", row: str = "") -> None:
        super().__init__(message)
        self.rule, self.row = rule, row


Dialect = Literal["anthropic", "openai", "openai_responses"]


def as_tool_result(tool_use_id: str, told: Mapping[str, Any], dialect: Dialect | None = None) -> dict[str, Any]:
    """Return the facts *told* as the result of a failed tool call.

    Without a *dialect*, ids that begin with ``call_`` or ``fc_`` are OpenAI's, all others Anthropic's. Raises
    ``ValueError`` for an empty id or an unknown dialect.
    """
    if not isinstance(tool_use_id, str) or not tool_use_id:
        raise ValueError(f"tool_use_id: {tool_use_id!r} is not the id of a tool call; take it from the model's request")
    if dialect is None:
        dialect = "openai" if tool_use_id.startswith(("call_", "fc_")) else "anthropic"
    text = json.dumps(dict(told), ensure_ascii=False).encode("utf-8", "replace").decode()  # replaces lone surrogates
    match dialect:
        case "anthropic":
            return {"type": "tool_result", "tool_use_id": tool_use_id, "is_error": True, "content": text}
        case "openai":
            return {"role": "tool", "tool_call_id": tool_use_id, "content": text}
        case "openai_responses":
            return {"type": "function_call_output", "call_id": tool_use_id, "output": text}
        case _:
            raise ValueError(f"dialect: {dialect!r} is not one of {', '.join(get_args(Dialect))}")
