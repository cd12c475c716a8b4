"""Rehearses a payment: asks all that paying asks, of the ledger and the chains as they are. It signs, sends and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from x402guard.errors import ConfigError, ProtocolError, SignerError
from x402guard.flow.context import Context
from x402guard.flow.drivers import perform
from x402guard.flow.effects import Ask, Checkpoint, Effect, Flow, Notify, PeekBody, Reply, Send, Sign, TakeSlot
from x402guard.flow.receipt import Receipt
from x402guard.flow.shell import Shell
from x402guard.frozen import replace as replaced
from x402guard.http.logical import LogicalRequest
from x402guard.http.request import Incoming, describe_request, lines_of
from x402guard.http.response import decoded_body
from x402guard.kernel.evm import Address
from x402guard.kernel.rows import Hold
from x402guard.kernel.signer import Signable
from x402guard.ledger.store import LedgerReads, LedgerStore
from x402guard.ledger.view import Change, LedgerView, Scope
from x402guard.policy.approvals import ApprovalRequest
from x402guard.x402.flow import paid_request

if TYPE_CHECKING:
    import httpx

R = TypeVar("R")

_MOST_EFFECTS: Final = 10_000
_READ: Final = frozenset(name for port in (LedgerReads, LedgerStore) for name in vars(port) if not name.startswith("_"))


@runtime_checkable
class Rehearses(Protocol):
    """A store that decides a change and writes nothing."""

    def rehearse(self, scope: Scope, change: Change[R]) -> R:
        """Return what a change would return now. Raises what it raises."""


class RehearsedLedger:
    """A ledger in which each change is decided and none is written. What it reads is another store's, which stays open."""

    def __init__(self, store: LedgerStore) -> None:
        if not isinstance(store, Rehearses):
            raise ConfigError(f"ledger: a {type(store).__name__} cannot decide a change without writing it")
        self._store = store
        self._opening: tuple[Scope, Change[object]] | None = None

    def transact(self, scope: Scope, change: Change[R]) -> R:
        """Return what a change would return in a ledger that has the session which was opened here."""
        opening = self._opening
        if opening is None:
            return self._store.rehearse(scope, change)
        before, opens = opening

        def both(view: LedgerView) -> R:
            opens(view)
            return change(view)

        nodes, marks = (
            tuple(dict.fromkeys(chain(*each))) for each in ((before.nodes, scope.nodes), (before.marks, scope.marks))
        )
        return self._store.rehearse(replace(scope, nodes=nodes, marks=marks, durable=True), both)

    def open_later(self, _node_id: str, scope: Scope, change: Change[R], decide: Change[R]) -> R:
        """Open a session for all changes that come."""
        decided = self._store.rehearse(scope, decide)
        self._opening = (scope, change)
        return decided

    def write_openings(self, *_: object, **__: object) -> None:
        """Write nothing."""

    def forget_opening(self, _node_id: str) -> None:
        """Forget nothing: the session is open for each change."""

    def hold_life(self, _name: str) -> None:
        """Make no lock, and remove none: others know by it that a process has ended."""

    def close(self) -> None:
        """Leave the store open."""

    def __getattr__(self, name: str) -> Any:
        if name not in _READ:
            raise AttributeError(name)
        return getattr(self._store, name)


class NoKey(Struct, frozen=True):
    """Stands for the key of an account where nothing is signed."""

    address: Address
    inline = True

    def bind(self, lookup: Signable) -> None:
        """Do nothing: it signs no hold of any ledger."""

    def sign(self, hold: Hold) -> bytes:
        """Raise ``SignerError``."""
        raise _unsigned(hold)

    def sign_cancellation(self, hold: Hold) -> bytes:
        """Raise ``SignerError``."""
        raise _unsigned(hold)


def _unsigned(hold: Hold) -> SignerError:
    return SignerError(f"nothing is signed in a rehearsal (hold {hold.id[:16]}…)")


Rehearsed = Hold | ApprovalRequest | None
"""The payment that would be signed, the question that an approver would be asked, or None if nothing is to be paid."""


def rehearse(
    request: httpx.Request, answer: httpx.Response, raw: bytes, *, most: int, payer: tuple[Context, Shell]
) -> Rehearsed:
    """Return what paying would come to after the *answer* with the body *raw*, as it was sent.

    *most*: the largest body with terms, in bytes. *payer* are a session's context and shell, over a ``RehearsedLedger``.
    Raises the refusal.
    """
    context, shell = payer
    facts = describe_request(Incoming.of(request, LogicalRequest.of(request)), request.read())
    # Nothing of this process is under way, so nothing is waited for.
    context = replaced(context, policy=replaced(context.policy, wait_for_budget_s=0))
    reply = Reply(answer.status_code, lines_of(answer.headers))
    return _run(paid_request(facts, context, reply), shell, lambda: decoded_body(answer, raw, most))


def _run(flow: Flow[Receipt | None], shell: Shell, body: Callable[[], bytes | None]) -> Rehearsed:
    reply: Any = None
    failure: Exception | None = None
    for _ in range(_MOST_EFFECTS):
        try:
            effect = flow.send(reply) if failure is None else flow.throw(failure)
        except StopIteration:
            return None
        if isinstance(effect, Sign):
            flow.close()
            return effect.hold
        if isinstance(effect, Ask):
            flow.close()
            return effect.request
        reply, failure = None, None
        try:
            reply = _answered(effect, shell, body)
        except Exception as error:  # noqa: BLE001 - the flow decides what every failure means
            failure = error
    raise ProtocolError("the rehearsal does not come to an end", field="body")


def _answered(effect: Effect, shell: Shell, body: Callable[[], bytes | None]) -> Any:
    match effect:
        case Send():
            raise TypeError("a rehearsal sends nothing")
        case Notify():
            return None
        case Checkpoint():
            return not effect.others
        case PeekBody(limit):
            whole = body()
            return whole if whole is not None and len(whole) <= limit else None
        case TakeSlot():
            return shell.slots.enter(effect.where, effect.most, 0)
        case _:
            return perform(effect, shell)
