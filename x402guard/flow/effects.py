"""The effects of a flow, as values.

A flow is a generator: it yields effects, is sent their answers, and returns a result. It sees status, headers and
bytes, never an HTTP library's object. ``drivers`` runs it, blocking or async.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from msgspec import Struct

from x402guard.errors import LedgerUnavailable
from x402guard.flow.ports import ChainQuestion
from x402guard.flow.sealed import Sealed
from x402guard.kernel.proofs import Unsent
from x402guard.kernel.rows import Hold
from x402guard.ledger.lost import LateEnd
from x402guard.ledger.view import Change, Notice, Scope
from x402guard.policy.approvals import ApprovalRequest

R = TypeVar("R")

HeaderLine = tuple[str, str | Sealed[str]]
"""Name and value of a header to add to a request; sealed if it is a payment."""


class Reply(Struct, frozen=True):
    """The head of a response: status, and the header lines as received.

    *is_less*: it has less than what was asked for: a part, the word that nothing has changed, or that a job has begun.
    """

    status: int
    headers: tuple[tuple[str, str], ...]
    is_less: bool = False

    def __repr__(self) -> str:
        return f"Reply(status={self.status})"  # a header may hold a receipt or a cookie

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("status", self.status)]


class Send(Struct, frozen=True):
    """Send a copy of the request with these header lines added. Answered by a ``Reply``.

    A payment header is sealed, and ``pays`` is its hold, or None; ``body`` replaces the request's own unless it is
    None. ``call_s`` limits the seconds to the end of the answer's body, ``chunk_s`` those between two of its chunks;
    None for no limit. ``limited_by`` names what sets ``call_s``. ``head`` limits the seconds to the answer's head, and
    names what sets that. Fails with ``SendFailed``.
    """

    headers: tuple[HeaderLine, ...] = ()
    pays: str | None = None
    body: bytes | None = None
    call_s: float | None = None
    chunk_s: int | None = None
    limited_by: str = ""
    head: tuple[float, str] | None = None


class PeekBody(Struct, frozen=True):
    """Read at most *limit* bytes of the current response's body in *call_s* seconds. The caller can still read it.

    Answered by the bytes, or None if there are more. Fails with ``SendFailed``.
    """

    limit: int
    call_s: int | None = None


class Transact(Struct, Generic[R], frozen=True):
    """Run a change in the ledger. It is never abandoned halfway. Fails with ``LedgerUnavailable``.

    ``late``: the caller has its answer, and only this end of it is written. On a ledger of several machines that does not
    answer in two seconds it fails, and is written later. A durable change restrains, so it is waited for.
    """

    scope: Scope
    change: Change[R]
    late: LateEnd | None = None


class Compute(Struct, Generic[R], frozen=True):
    """Run a pure function of the ledger's clock (unix milliseconds): off the event loop, unless it is *quick*."""

    job: Callable[[int], R]
    quick: bool


class Notify(Struct, frozen=True):
    """Send a notice to the owner; a sentence alone is logged as a warning. It never fails."""

    said: str | Notice


class TakeSlot(Struct, frozen=True):
    """Take one of *most* slots at a host or tool. Waits at most *wait_s* seconds.

    Answered by a ``Slot``, or None if none is free in time. *told* is said once it has waited for a second. It is released
    when the request's answer has ended; a flow without a request releases it itself.
    """

    where: str
    most: int
    wait_s: int
    told: Notice | None = None


class Ask(Struct, frozen=True):
    """Ask an approver. Answered by an ``Answer``; no answer in time and failures are a no."""

    request: ApprovalRequest


class Checkpoint(Struct, frozen=True):
    """A moment at which the task can be cancelled, after a pause in seconds.

    *others*: the pause is for other calls of this process. A blocking call on the thread of an event loop would keep those
    from ending, so it does not pause, and is answered False.
    """

    pause_s: float = 0
    others: bool = False


class Sign(Struct, frozen=True):
    """Sign a committed hold, which lies in a node or below it: the session that signs. Answered by 65 bytes, sealed."""

    hold: Hold
    within: str


class AskChain(Struct, frozen=True):
    """Ask a chain; the question names the type of its answer. It never fails: "could not be read" is an answer."""

    question: ChainQuestion


Effect = Send | PeekBody | Transact[Any] | Compute[Any] | Notify | TakeSlot | Ask | Checkpoint | Sign | AskChain

Flow = Generator[Effect, Any, R]


class SendFailed(Exception):  # noqa: N818 - a signal between driver and flow, never seen by a user
    """The request or its answer was lost. ``cause`` is the HTTP library's error.

    ``before_connection``: it is certain that nothing left this machine.
    """

    def __init__(self, cause: Exception, *, before_connection: bool) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.before_connection = before_connection

    def unsent(self, hold_id: str) -> Unsent | None:
        """Return the proof that no byte of the request with this payment has left, if that is certain."""
        return Unsent(hold_id) if self.before_connection else None


class Interrupted(BaseException):  # a signal between driver and flow, never seen by a user
    """The task was cancelled, or Ctrl-C came, while an effect ran. ``cause`` has to be raised in the end."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


def transact(scope: Scope, change: Change[R]) -> Flow[R]:
    """Run *change* in the ledger and return its result: ``Transact`` as a flow."""
    result: R = yield Transact(scope, change)
    return result


def transact_anyway(scope: Scope, change: Change[R], *, late: LateEnd | None = None) -> Flow[R]:
    """Run *change* even if the task is cancelled. It may run twice, so it must be idempotent. *late*: see ``Transact``."""
    try:
        result: R = yield Transact(scope, change, late)
    except Interrupted as cut:
        try:
            yield Transact(scope, change, late)
        except LedgerUnavailable as error:
            cut.cause.add_note(f"the ledger could not be written after the cancellation: {error}")
        raise
    return result


def error_name(error: BaseException) -> str:
    """Return the name of the error behind a flow's signal."""
    return type(cause(error)).__name__


def cause(error: BaseException) -> BaseException:
    """Return the error behind a flow's signal, or the error itself."""
    return error.cause if isinstance(error, (Interrupted, SendFailed)) else error
