"""What a conversation may ask of the world, as values.

A flow is a generator: it yields effects, is sent their answers, and returns a result. It is shown status, headers and bytes,
and never an HTTP library's object. ``drivers`` runs it, blocking or async.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from x402guard.errors import LedgerUnavailable
from x402guard.flow.ports import ChainQuestion
from x402guard.flow.sealed import Sealed
from x402guard.ledger.model import Hold
from x402guard.ledger.view import Change, Scope
from x402guard.policy.approvals import ApprovalRequest

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
class Notify:
    """Write a warning for the owner into the log, in one sentence. It never fails."""

    message: str


@dataclass(frozen=True, slots=True)
class TakeSlot:
    """Take one of *most* slots at a host or tool, waiting at most *wait_s* seconds for it.

    Answered by a ``Slot``, or None where none came free in time. It is left when the request's answer has ended; a flow without
    a request leaves it itself.
    """

    where: str
    most: int
    wait_s: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask an approver. Answered by an ``Answer``; silence and failures are a no."""

    request: ApprovalRequest


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The last moment to be cancelled before a signature exists."""


@dataclass(frozen=True, slots=True)
class Sign:
    """Sign a committed hold. Answered by 65 bytes, sealed."""

    hold: Hold


@dataclass(frozen=True, slots=True)
class AskChain:
    """Ask a chain; the question says what it is answered by. It never fails: "could not be read" is an answer."""

    question: ChainQuestion


Effect = Send | PeekBody | Transact[Any] | Compute[Any] | Notify | TakeSlot | Ask | Checkpoint | Sign | AskChain

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


def transact(scope: Scope, change: Change[R]) -> Flow[R]:
    """Run *change* in the ledger and return its result: ``Transact`` as a flow of its own."""
    result: R = yield Transact(scope, change)
    return result


def transact_anyway(scope: Scope, change: Change[R]) -> Flow[R]:
    """Run *change* even if the task is cancelled. It may run twice, so it must be idempotent."""
    try:
        result: R = yield Transact(scope, change)
    except Interrupted as cut:
        try:
            yield Transact(scope, change)
        except LedgerUnavailable as error:
            cut.cause.add_note(f"the books could not be written on the way out: {error}")
        raise
    return result


def error_name(error: BaseException) -> str:
    """Return the name of what stands behind a flow's signal."""
    return type(cause(error)).__name__


def cause(error: BaseException) -> BaseException:
    """Return what stands behind a flow's signal, or the error itself."""
    return error.cause if isinstance(error, (Interrupted, SendFailed)) else error
