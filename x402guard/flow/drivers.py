"""The drivers run a flow: one blocks, one awaits. No other module waits for a flow."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel
from anyio.lowlevel import RunVar
from msgspec import Struct

from x402guard.errors import SignerError
from x402guard.flow.detached import Aside, TooLate, in_event_loop
from x402guard.flow.effects import (
    Ask,
    AskChain,
    Checkpoint,
    Compute,
    Effect,
    Flow,
    Interrupted,
    Notify,
    PeekBody,
    Reply,
    Send,
    SendFailed,
    Sign,
    TakeSlot,
    Transact,
)
from x402guard.flow.ports import Signer, Slot
from x402guard.flow.sealed import Sealed, forgetting
from x402guard.flow.shell import LOG, Approver, Observer, Shell, is_logged
from x402guard.flow.threads import finish_change, run_in_daemon_thread
from x402guard.kernel.rows import Hold
from x402guard.ledger.view import Change, LedgerView, Notice, Scope
from x402guard.policy.approvals import NO_ANSWER, Answer, ApprovalRequest, count_people

R = TypeVar("R")
X = TypeVar("X")


class Exchange(Protocol):
    """The HTTP side of one request. Raises ``SendFailed`` if a request or its answer is lost."""

    def send(self, effect: Send) -> Reply:
        """Send the request as *effect* says; the response replaces the one kept before."""

    def peek(self, effect: PeekBody) -> bytes | None:
        """Return the kept response's decoded body, or None beyond the limit. The caller can still read it."""

    def keep(self, slot: Slot | None) -> None:
        """Keep a slot until the last response has ended, and release the one kept before."""


class AsyncExchange(Protocol):
    """``Exchange``, awaited."""

    async def send(self, effect: Send) -> Reply:
        """See ``Exchange.send``."""

    async def peek(self, effect: PeekBody) -> bytes | None:
        """See ``Exchange.peek``."""

    def keep(self, slot: Slot | None) -> None:
        """See ``Exchange.keep``."""


class _Result(Struct, Generic[R], frozen=True):
    value: R


def _advance(flow: Flow[R], answer: Any, failure: BaseException | None) -> Effect | _Result[R]:
    """Send a flow its answer or its failure. Returns its next effect, or its result."""
    try:
        return flow.send(answer) if failure is None else flow.throw(failure)
    except StopIteration as done:
        return _Result(done.value)
    except (Interrupted, SendFailed) as signal:
        raise signal.cause  # noqa: B904 - the signal is ours; the caller knows its cause


def run(flow: Flow[R], shell: Shell, exchange: Exchange | None = None) -> R:
    """Run *flow* to its end on this thread, and return its result. Only HTTP effects need an *exchange*."""
    answer: Any = None
    failure: BaseException | None = None
    while True:
        effect = _advance(flow, answer, failure)
        if isinstance(effect, _Result):
            return effect.value
        answer, failure = None, None
        try:
            if shell.observer is not None:
                _observe(effect, shell.observer)
            if isinstance(effect, Transact):
                answer = _told(_transact(effect, shell), shell)
            elif isinstance(effect, Compute):
                answer = effect.job(shell.store.now_ms())
            elif isinstance(effect, Send):
                answer = _needed(exchange).send(effect)
            elif isinstance(effect, PeekBody):
                answer = _needed(exchange).peek(effect)
            elif isinstance(effect, TakeSlot):
                _kept(exchange, None)  # release the previous slot first, so a flow never waits while it holds one
                # A blocking call on the thread of an event loop would keep the loop's other calls from ending.
                wait_s = 0 if in_event_loop() else effect.wait_s
                answer = _kept(exchange, shell.slots.enter(effect.where, effect.most, wait_s, _late(effect, shell)))
            elif isinstance(effect, Ask):
                answer = _ask(effect, shell)
            elif isinstance(effect, Checkpoint):
                if effect.others and in_event_loop():
                    answer = False
                elif effect.pause_s:
                    time.sleep(effect.pause_s)
            else:
                answer = perform(effect, shell)
        except Exception as error:  # noqa: BLE001 - the flow decides what every failure means
            failure = error
        except BaseException as error:  # noqa: BLE001 - Ctrl-C too: the flow updates the ledger first
            failure = Interrupted(error)


async def run_async(flow: Flow[R], shell: Shell, exchange: AsyncExchange | None = None) -> R:
    """Run *flow* to its end in this task, and return its result.

    Blocking effects run in a thread. A transaction always runs to its end, so a cancelled task never leaves a row half
    written. The cancellation is thrown into the flow, which updates the ledger and passes it on.
    """
    answer: Any = None
    failure: BaseException | None = None
    while True:
        effect = _advance(flow, answer, failure)
        if isinstance(effect, _Result):
            return effect.value
        answer, failure = None, None
        try:
            if shell.observer is not None:
                _observe(effect, shell.observer)
            if isinstance(effect, Send):
                answer = await _needed(exchange).send(effect)
            elif isinstance(effect, PeekBody):
                answer = await _needed(exchange).peek(effect)
            elif isinstance(effect, TakeSlot):
                _kept(exchange, None)
                late = _late(effect, shell)
                answer = _kept(exchange, await shell.slots.enter_async(effect.where, effect.most, effect.wait_s, late))
            elif isinstance(effect, Ask):
                answer = await _ask_async(effect, shell)
            elif isinstance(effect, Checkpoint):
                await anyio.sleep(effect.pause_s)
            else:
                is_inline = _is_inline(effect, shell)
                answer = _told(_perform(effect, shell) if is_inline else await _run_aside(effect, shell), shell)
        except Exception as error:  # noqa: BLE001 - the flow decides what every failure means
            failure = error
        except BaseException as error:  # noqa: BLE001 - cancellation: the flow updates the ledger first
            failure = Interrupted(error)


def _observe(effect: Effect, observer: Observer) -> None:
    if isinstance(effect, Sign):
        observer.step("sign", effect.hold.id)
    elif isinstance(effect, Send) and effect.pays is not None:
        observer.step("send", effect.pays)


class _Transacted(Struct, frozen=True):
    result: Any
    view: Any


class _Change:
    """A change as a store runs it, with what this guard says of it. Keeps the view of its last run."""

    def __init__(self, effect: Transact[Any], shell: Shell) -> None:
        self._change, self._shell = effect.change, shell
        self._is_logged = shell.observer is not None or is_logged("info")
        self.view: LedgerView | None = None

    def __call__(self, view: LedgerView) -> Any:
        self.view = view  # the change may run again: the last run is the committed one
        view.shadow, view.is_logged = self._shell.shadow, self._is_logged
        kill_file = self._shell.kill_file
        if kill_file is not None and _is_there(kill_file):
            view.killed_by = str(kill_file)
        return self._change(view)


def _told(answer: Any, shell: Shell) -> Any:
    """Return the result of an effect. After a transaction, send its notices and request checks of its claims."""
    if not isinstance(answer, _Transacted):
        return answer
    if shell.observer is not None:
        shell.observer.committed(answer.view)
    if answer.view.notices:
        shell.notifier.notify(answer.view.notices)
    if answer.view.recheck:
        shell.recheck()
    return answer.result


def perform(effect: Effect, shell: Shell) -> Any:
    """Run an effect that needs no HTTP and no approver, send its notices, and return its answer. Raises what it raises."""
    return _told(_perform(effect, shell), shell)


def transact_now(shell: Shell, scope: Scope, change: Change[R]) -> R:
    """Run one change outside a flow, and send its notices. Raises ``LedgerUnavailable``."""
    answer: R = _told(_transact(Transact(scope, change), shell), shell)
    return answer


def open_later(shell: Shell, scope: Scope, change: Change[R], *, node_id: str) -> R:
    """Decide the opening of a session now, and let it be written with the first change of it. Raises ``LedgerUnavailable``."""
    decided: R = shell.store.open_later(node_id, scope, change, _Change(Transact(scope, change), shell))
    return decided


def _transact(effect: Transact[Any], shell: Shell) -> _Transacted:
    if shell.late_writes is None:
        return _write(effect, shell)
    if effect.late is not None:
        transacted: _Transacted = shell.late_writes.write(
            lambda: _write(effect, shell),
            lambda answer: _told(answer, shell),
            end=effect.late,
            patient=effect.scope.durable,
        )
        return transacted
    shell.late_writes.catch_up()
    return _write(effect, shell)


def _write(effect: Transact[Any], shell: Shell) -> _Transacted:
    change = _Change(effect, shell)
    return _Transacted(shell.store.transact(effect.scope, change), change.view)


_SILENCE: Final = Answer.no(NO_ANSWER)


def _ask(effect: Ask, shell: Shell) -> Answer:
    try:
        return ask_aside(shell.approver, effect.request).within(effect.request.timeout_s)
    except TooLate:
        return _SILENCE


async def _ask_async(effect: Ask, shell: Shell) -> Answer:
    try:
        return await ask_aside(shell.approver, effect.request).awaited_within(effect.request.timeout_s)
    except TooLate:
        return _SILENCE


def _kept(exchange: Exchange | AsyncExchange | None, slot: Slot | None) -> Slot | None:
    if exchange is not None:
        exchange.keep(slot)
    return slot


def _is_there(path: Path) -> bool:
    try:
        return bool(path.lstat())
    except FileNotFoundError:
        return False
    except OSError:
        return True  # unknown: stop, to be safe


_OTHER_TURN: RunVar[anyio.CapacityLimiter] = RunVar("x402guard_other_turn")
_OTHER_THREADS: Final = 16


async def _run_aside(effect: Effect, shell: Shell) -> Any:
    """Run a blocking effect in a thread of our own: a caller who has used up the common ones cannot block it.

    A transaction runs to its end, even if the task is cancelled. Signers and chains are abandoned then: they may never
    return, and the flow knows that a signature may exist.
    """
    if isinstance(effect, Transact):
        return await _transact_async(effect, shell)
    try:
        limiter = _OTHER_TURN.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(_OTHER_THREADS)
        _OTHER_TURN.set(limiter)
    return await run_in_daemon_thread(partial(_perform, effect, shell), limiter)


async def _transact_async(effect: Transact[Any], shell: Shell) -> _Transacted:
    """Let the thread of the ledger run a transaction, together with others that wait."""
    may_drop = effect.late is None  # an end of an answer is nowhere else before it is tried
    if shell.late_writes is not None:
        call = partial(_transact, effect, shell)
        return await finish_change(call, shell, lambda answer: _told(answer, shell), may_drop=may_drop)
    from x402guard.flow.change_queue import change_in_queue  # not for programs without an event loop

    change = _Change(effect, shell)

    def late(result: Any) -> None:
        _told(_Transacted(result, change.view), shell)

    return _Transacted(await change_in_queue(shell.store, effect.scope, change, late, may_drop=may_drop), change.view)


def _late(effect: TakeSlot, shell: Shell) -> Callable[[], None] | None:
    """Return what says that a call waits for a slot."""
    return None if effect.told is None else partial(shell.notifier.notify, (effect.told,))


def _is_inline(effect: Effect, shell: Shell) -> bool:
    """Return whether an effect takes only microseconds, so that an event loop may run it without a thread."""
    match effect:
        case Transact():
            return shell.store.inline
        case Compute(_, quick):
            return quick  # it reads no store, whatever kind that is
        case Sign():
            # Signing reads the hold's row first, so it is as quick as the store is.
            return shell.signer is None or (shell.signer.inline and shell.store.inline)
        case AskChain():
            return shell.chain is None
        case _:
            return True


def _perform(effect: Effect, shell: Shell) -> Any:
    """Run an effect that needs no HTTP and no approver, and return its answer."""
    match effect:
        case Transact():
            return _transact(effect, shell)
        case Compute(job, _):
            return job(shell.store.now_ms())
        case Notify(Notice() as notice):
            shell.notifier.notify((notice,))
            return None
        case Notify(message):
            return LOG.warning(message)
        case Sign(hold, within):
            if shell.signer is None:
                raise SignerError("there is no signer")
            return _signed(shell, shell.signer, hold, within)
        case AskChain(question):
            return shell.single_flight.ask(question, shell.chain)
        case _:
            raise TypeError(f"{effect!r} is not an effect that a driver can run")


def _signed(shell: Shell, signer: Signer, hold: Hold, within: str) -> Sealed[bytes]:
    with forgetting():
        return Sealed(shell.store.sign(signer, hold, within=within))


def _needed(exchange: X | None) -> X:
    if exchange is None:
        raise TypeError("this flow sends a request, and was started without an exchange")
    return exchange


ABANDONED: Final[ContextVar[Callable[[], bool]]] = ContextVar("x402guard_abandoned", default=lambda: False)
"""Returns whether the caller no longer waits for the approver's answer."""


def ask_aside(approver: Approver | None, request: ApprovalRequest) -> Aside[Answer]:
    """Return the call that asks an approver. Any failure is a no."""

    def call() -> Answer:
        if approver is None:
            return Answer.no("this guard has no approver")
        ABANDONED.set(lambda: aside.was_left)
        try:
            answer: object = approver.ask(request)
        except Exception as error:  # noqa: BLE001 - an approver that fails allows nothing
            return Answer.no(f"asking failed: {type(error).__name__}")
        if not isinstance(answer, Answer):
            return Answer.no(f"the approver answered with a {type(answer).__name__}")
        if answer.allowed is True and count_people(answer.by) < request.approvers:
            return Answer.no(f"{request.approvers} different approvers have to allow it", answer.by)
        return answer

    aside = Aside(call)
    return aside
