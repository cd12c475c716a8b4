"""Run a flow: one short loop that blocks, one that awaits. The only place that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.lowlevel import RunVar

from x402guard.effects import (
    Checkpoint,
    Effect,
    Flow,
    Interrupted,
    PeekBody,
    ReadChain,
    ReadFunds,
    Reply,
    Send,
    SendFailed,
    Sign,
    Transact,
)
from x402guard.errors import SignerError
from x402guard.ledger.evidence import Unreadable
from x402guard.ports import ChainReader, LedgerStore, Signer
from x402guard.signers import normalise_signature

__all__ = ["AsyncExchange", "Exchange", "Shell", "run", "run_async"]

R = TypeVar("R")
X = TypeVar("X")


@dataclass(frozen=True, slots=True)
class Shell:
    """The ports that every flow of a guard runs on: the books, the key (if any) and the chains (if any)."""

    store: LedgerStore
    signer: Signer | None
    chain: ChainReader | None


class Exchange(Protocol):
    """One request's HTTP side. Raises ``SendFailed`` where a request or its answer is lost."""

    def send(self, headers: tuple[tuple[str, str], ...]) -> Reply:
        """Send the request with *headers* added, and keep the response, in place of the one before it."""

    def peek(self, limit: int) -> bytes | None:
        """Return the kept response's decoded body, or None beyond *limit* bytes; it stays readable for the caller."""


class AsyncExchange(Protocol):
    """The same as ``Exchange``, awaited."""

    async def send(self, headers: tuple[tuple[str, str], ...]) -> Reply:
        """See ``Exchange.send``."""

    async def peek(self, limit: int) -> bytes | None:
        """See ``Exchange.peek``."""


@dataclass(frozen=True, slots=True)
class _Result(Generic[R]):
    value: R


def _advance(flow: Flow[R], answer: Any, failure: BaseException | None) -> Effect | _Result[R]:
    """Give a flow its answer or its failure; return what it asks for next, or its result."""
    try:
        return flow.send(answer) if failure is None else flow.throw(failure)
    except StopIteration as done:
        return _Result(done.value)
    except (Interrupted, SendFailed) as signal:
        raise signal.cause  # noqa: B904 - the signal is ours; the caller knows its cause


def run(flow: Flow[R], shell: Shell, exchange: Exchange | None = None) -> R:
    """Run *flow* to its end on this thread, and return its result. A flow without HTTP effects needs no *exchange*."""
    answer: Any = None
    failure: BaseException | None = None
    while True:
        effect = _advance(flow, answer, failure)
        if isinstance(effect, _Result):
            return effect.value
        answer, failure = None, None
        try:
            if isinstance(effect, Send):
                answer = _present(exchange).send(effect.headers)
            elif isinstance(effect, PeekBody):
                answer = _present(exchange).peek(effect.limit)
            elif not isinstance(effect, Checkpoint):
                answer = _call(effect, shell)[1]()
        except Exception as error:  # noqa: BLE001 - the flow decides what every failure means
            failure = error
        except BaseException as error:  # noqa: BLE001 - Ctrl-C too: the flow brings the books in order first
            failure = Interrupted(error)


async def run_async(flow: Flow[R], shell: Shell, exchange: AsyncExchange | None = None) -> R:
    """Run *flow* to its end in this task, and return its result.

    What blocks runs in a worker thread, shielded: a cancelled task never leaves a row half done. The cancellation is thrown
    into the flow, which puts the books in order and lets it go on.
    """
    answer: Any = None
    failure: BaseException | None = None
    while True:
        effect = _advance(flow, answer, failure)
        if isinstance(effect, _Result):
            return effect.value
        answer, failure = None, None
        try:
            if isinstance(effect, Send):
                answer = await _present(exchange).send(effect.headers)
            elif isinstance(effect, PeekBody):
                answer = await _present(exchange).peek(effect.limit)
            elif isinstance(effect, Checkpoint):
                await anyio.lowlevel.checkpoint()
            else:
                inline, call = _call(effect, shell)
                answer = call() if inline else await _in_thread(effect, call)
        except Exception as error:  # noqa: BLE001 - the flow decides what every failure means
            failure = error
        except BaseException as error:  # noqa: BLE001 - cancellation: the flow brings the books in order first
            failure = Interrupted(error)


_LEDGER_TURN: RunVar[anyio.CapacityLimiter] = RunVar("x402guard_ledger_turn")
_CHAIN_TURN: RunVar[anyio.CapacityLimiter] = RunVar("x402guard_chain_turn")


def _limiter(effect: Effect) -> anyio.CapacityLimiter:
    """Threads of our own, so that a caller who has used up the common ones cannot lock us out.

    Two for the ledger: its calls wait for their turn in the event loop, because the books are written one at a time anyway
    and every waiting thread would fight the loop for the interpreter. Sixteen for the chain, which is another machine.
    """
    turn, size = (_LEDGER_TURN, 2) if isinstance(effect, (Transact, Sign)) else (_CHAIN_TURN, 16)
    try:
        return turn.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(size)
        turn.set(limiter)
        return limiter


async def _in_thread(effect: Effect, call: Callable[[], Any]) -> Any:
    """Run a blocking call in a worker thread, to its end, whatever becomes of the task."""
    limiter = _limiter(effect)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with anyio.CancelScope(shield=True):  # on trio, cancellation comes by scopes alone
            return await anyio.to_thread.run_sync(call, limiter=limiter)
    return await _to_the_end(asyncio.ensure_future(anyio.to_thread.run_sync(call, limiter=limiter)))


async def _to_the_end(work: asyncio.Future[Any]) -> Any:
    """Wait for *work* although the task is cancelled meanwhile; then let the cancellation go on.

    asyncio's own ``task.cancel()`` (``wait_for``, ``timeout``, ``TaskGroup``) pierces anyio's shield, and a transaction that
    runs on behind our back would be followed by one that came too early.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            with anyio.CancelScope(shield=True):
                await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        work.exception()  # the flow learns of the cancellation, and looks into the books for the rest
        raise cancelled
    return work.result()


def _call(effect: Effect, shell: Shell) -> tuple[bool, Callable[[], Any]]:
    """Return what an effect runs, and whether that is over in microseconds."""
    match effect:
        case Transact(scope, change):
            return shell.store.inline, lambda: shell.store.transact(scope, change)
        case Sign(hold):
            signer = shell.signer
            if signer is None:
                raise SignerError("there is no signer")
            # Signing reads the hold's row first, so it is as quick as the store is.
            return signer.inline and shell.store.inline, lambda: normalise_signature(signer.sign(hold))
        case ReadChain(hold):
            chain = shell.chain
            if chain is None:
                return True, lambda: Unreadable("no chain is configured")
            return False, lambda: chain.read(hold)
        case ReadFunds(network, token, owner):
            chain = shell.chain
            if chain is None:
                return True, lambda: None
            return False, lambda: chain.funds(network, token, owner)
        case _:
            raise TypeError(f"{effect!r} is not an effect that a driver can run")


def _present(exchange: X | None) -> X:
    if exchange is None:
        raise TypeError("this flow sends a request, and was started without one")
    return exchange
