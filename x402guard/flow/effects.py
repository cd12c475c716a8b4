"""What a conversation may ask of the world, as values; and the typed helpers that ask.

A flow is a generator: it yields effects, is sent their answers, and returns a result. It is shown status, headers and bytes,
and never an HTTP library's object. ``drivers`` runs it, blocking or async.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from x402guard.errors import LedgerUnavailable
from x402guard.evm import Address
from x402guard.flow.ports import Funds, Outgoing, Place
from x402guard.flow.sealed import Sealed
from x402guard.ledger.evidence import Finding
from x402guard.ledger.model import Hold
from x402guard.ledger.view import Change, Scope
from x402guard.policy.approvals import Answer, ApprovalRequest

R = TypeVar("R")

HeaderLine = tuple[str, str | Sealed[str]]
"""The name and value of a header to be added to a request; sealed where it is a payment."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The head of a response: status, and header lines as they came."""

    status: int
    headers: tuple[tuple[str, str], ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request, with these header lines added to a copy of it. Answered by a ``Reply``.

    A payment is sealed among them, and ``pays`` its hold, or None; ``body`` is sent in place of the request's own, where it is
    not None. ``call_s`` is how many seconds it may all take to the end of the answer's body, ``chunk_s`` from one piece of that
    to the next; None for any time. Fails with ``SendFailed``.
    """

    headers: tuple[HeaderLine, ...] = ()
    pays: str | None = None
    body: bytes | None = None
    call_s: int | None = None
    chunk_s: int | None = None


@dataclass(frozen=True, slots=True)
class PeekBody:
    """Read the current response's body, at most *limit* bytes within *call_s* seconds, without taking it from the caller.

    Answered by the bytes, or None where there are more. Fails with ``SendFailed``.
    """

    limit: int
    call_s: int | None = None


@dataclass(frozen=True, slots=True)
class Transact(Generic[R]):
    """Run a change in the ledger. Never abandoned half-way; fails with ``LedgerUnavailable``."""

    scope: Scope
    change: Change[R]


@dataclass(frozen=True, slots=True)
class Compute(Generic[R]):
    """Run a pure function of the ledger's clock (unix milliseconds) that may take long: off the event loop, unless *quick*."""

    job: Callable[[int], R]
    quick: bool


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the people who run this, in one sentence, what they ought to know. It never fails."""

    message: str


@dataclass(frozen=True, slots=True)
class Enter:
    """Take one of so many places (``most``) at a host or tool, waiting at most *wait_s* seconds for it.

    Answered by a ``Place``, or None where none was left in time. It is left when the request's answer has ended; a flow without
    a request leaves it itself.
    """

    where: str
    most: int
    wait_s: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a person. Answered by an ``Answer``; silence and failures are a no."""

    request: ApprovalRequest


@dataclass(frozen=True, slots=True)
class Killed:
    """Is there a kill file? Answered by True or False; True where nobody can tell."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The last moment to be cancelled before a signature exists."""


@dataclass(frozen=True, slots=True)
class Sign:
    """Sign a committed hold. Answered by 65 bytes, sealed."""

    hold: Hold


@dataclass(frozen=True, slots=True)
class ReadChain:
    """Ask the chain about a payment hold. Answered by a ``Finding``; never fails."""

    hold: Hold


@dataclass(frozen=True, slots=True)
class ReadFunds:
    """Ask what an account could pay with. Answered by ``Funds``, or None where nobody knows; never fails."""

    network: str
    token: Address
    owner: Address


@dataclass(frozen=True, slots=True)
class ReadTransfers:
    """Ask what left the wallet; see ``WalletReader.transfers``. Answered by ``Transfers`` or ``Unreadable``; never fails."""

    network: str
    token: Address
    payer: Address
    after: int | None
    since_unix: int


@dataclass(frozen=True, slots=True)
class ReadNonce:
    """Ask which nonce moved a Transfer; see ``WalletReader.nonce_behind``. Answered by it, None or ``Unreadable``; never fails."""

    network: str
    token: Address
    payer: Address
    transfer: Outgoing


@dataclass(frozen=True, slots=True)
class Recheck:
    """Have the chain asked soon about what is claimed, without waiting for it. It never fails."""


Effect = (
    Send
    | PeekBody
    | Transact[Any]
    | Compute[Any]
    | Warn
    | Enter
    | Ask
    | Killed
    | Checkpoint
    | Sign
    | ReadChain
    | ReadFunds
    | ReadTransfers
    | ReadNonce
    | Recheck
)

Flow = Generator[Effect, Any, R]


class SendFailed(Exception):  # noqa: N818 - a signal between driver and flow, never seen by a user
    """The request or its answer was lost. ``cause`` is the HTTP library's error.

    ``before_connection`` is True where it is certain that nothing left this machine.
    """

    def __init__(self, cause: Exception, *, before_connection: bool) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.before_connection = before_connection


class Interrupted(BaseException):  # a signal between driver and flow, never seen by a user
    """The task was cancelled, or Ctrl-C came, while an effect ran. ``cause`` is what has to be raised in the end."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


def send(
    *headers: HeaderLine,
    pays: str | None = None,
    body: bytes | None = None,
    call_s: int | None = None,
    chunk_s: int | None = None,
) -> Flow[Reply]:
    """Send the request with *headers* added, and return the head of the response; see ``Send``."""
    reply: Reply = yield Send(headers, pays, body, call_s, chunk_s)
    return reply


def peek_body(limit: int, call_s: int | None = None) -> Flow[bytes | None]:
    """Return the response's body, or None where it is larger than *limit* bytes."""
    body: bytes | None = yield PeekBody(limit, call_s)
    return body


def transact(scope: Scope, change: Change[R]) -> Flow[R]:
    """Run *change* in the ledger and return its result."""
    result: R = yield Transact(scope, change)
    return result


def compute(job: Callable[[int], R], *, quick: bool) -> Flow[R]:
    """Run a pure *job*, given the ledger's clock in unix milliseconds, and return its result."""
    result: R = yield Compute(job, quick)
    return result


def transact_anyway(scope: Scope, change: Change[R]) -> Flow[R]:
    """Run a *change* that has to be done although the task is cancelled: it may not have begun, and twice has to do nothing."""
    try:
        return (yield from transact(scope, change))
    except Interrupted as cut:
        try:
            yield from transact(scope, change)
        except LedgerUnavailable as error:
            cut.cause.add_note(f"the books could not be written on the way out: {error}")
        raise


def warn(message: str) -> Flow[None]:
    """Tell the people who run this what they ought to know."""
    yield Warn(message)


def enter(where: str, most: int, wait_s: int) -> Flow[Place | None]:
    """Return one of *most* places, or None where none was left within *wait_s* seconds."""
    place: Place | None = yield Enter(where, most, wait_s)
    return place


def ask(request: ApprovalRequest) -> Flow[Answer]:
    """Return what a person says."""
    answer: Answer = yield Ask(request)
    return answer


def killed() -> Flow[bool]:
    """Return whether there is a kill file."""
    found: bool = yield Killed()
    return found


def checkpoint() -> Flow[None]:
    """Let a cancellation that is waiting happen now."""
    yield Checkpoint()


def sign(hold: Hold) -> Flow[Sealed[bytes]]:
    """Return the signature of a committed hold."""
    signature: Sealed[bytes] = yield Sign(hold)
    return signature


def read_chain(hold: Hold) -> Flow[Finding]:
    """Return what the chain shows of a payment hold."""
    finding: Finding = yield ReadChain(hold)
    return finding


def read_funds(network: str, token: Address, owner: Address) -> Flow[Funds | None]:
    """Return what *owner* could pay with, or None where it is not known."""
    funds: Funds | None = yield ReadFunds(network, token, owner)
    return funds


def recheck() -> Flow[None]:
    """Have the chain asked soon about what is claimed."""
    yield Recheck()


def error_name(error: BaseException) -> str:
    """Return the name of what stands behind a flow's signal."""
    return type(cause(error)).__name__


def cause(error: BaseException) -> BaseException:
    """Return what stands behind a flow's signal, or the error itself."""
    return error.cause if isinstance(error, (Interrupted, SendFailed)) else error
