"""Run a flow: one short loop that blocks, one that awaits. The only place that waits."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Generic, Protocol, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.lowlevel import RunVar

from x402guard.effects import (
    Checkpoint,
    Compute,
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
    Warn,
)
from x402guard.errors import SignerError
from x402guard.evm import Address
from x402guard.ledger.evidence import Finding, Unreadable
from x402guard.ledger.model import Hold
from x402guard.ports import ChainReader, Funds, LedgerStore, Signer
from x402guard.signers import normalise_signature

__all__ = ["AsyncExchange", "Exchange", "Shell", "run", "run_async"]

_LOG: Final = logging.getLogger("x402guard")

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

    def send(self, headers: tuple[tuple[str, str], ...], pays: str | None, body: bytes | None) -> Reply:
        """Send the request with *headers* added, which pay the hold *pays*; keep the response in place of the one before.

        *body* goes in place of the request's own, where it is not None.
        """

    def peek(self, limit: int) -> bytes | None:
        """Return the kept response's decoded body, or None beyond *limit* bytes; it stays readable for the caller."""


class AsyncExchange(Protocol):
    """The same as ``Exchange``, awaited."""

    async def send(self, headers: tuple[tuple[str, str], ...], pays: str | None, body: bytes | None) -> Reply:
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
                answer = _needed(exchange).send(effect.headers, effect.pays, effect.body)
            elif isinstance(effect, PeekBody):
                answer = _needed(exchange).peek(effect.limit)
            elif not isinstance(effect, Checkpoint):
                answer = _call(effect, shell)[1]()
        except Exception as error:  # noqa: BLE001 - the flow decides what every failure means
            failure = error
        except BaseException as error:  # noqa: BLE001 - Ctrl-C too: the flow brings the books in order first
            failure = Interrupted(error)


async def run_async(flow: Flow[R], shell: Shell, exchange: AsyncExchange | None = None) -> R:
    """Run *flow* to its end in this task, and return its result.

    What blocks runs in a thread; a transaction is waited for to its end, so a cancelled task never leaves a row half done. The
    cancellation is thrown into the flow, which puts the books in order and lets it go on.
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
                answer = await _needed(exchange).send(effect.headers, effect.pays, effect.body)
            elif isinstance(effect, PeekBody):
                answer = await _needed(exchange).peek(effect.limit)
            elif isinstance(effect, Checkpoint):
                await anyio.lowlevel.checkpoint()
            else:
                inline, call = _call(effect, shell)
                answer = call() if inline else await _in_thread(effect, call, shell)
        except Exception as error:  # noqa: BLE001 - the flow decides what every failure means
            failure = error
        except BaseException as error:  # noqa: BLE001 - cancellation: the flow brings the books in order first
            failure = Interrupted(error)


_OTHER_TURN: RunVar[anyio.CapacityLimiter] = RunVar("x402guard_other_turn")
_LEDGER_THREADS: Final = 2
_OTHER_THREADS: Final = 16


async def _in_thread(effect: Effect, call: Callable[[], Any], shell: Shell) -> Any:
    """Run a blocking call in a thread of our own, so that a caller who has used up the common ones cannot lock us out.

    A transaction is waited for to its end, whatever becomes of the task. Signers and chains are abandoned when the task is
    cancelled: they may take for ever, and the flow knows that a signature may exist.
    """
    if isinstance(effect, Transact):
        return await _to_the_end(call, shell)
    try:
        limiter = _OTHER_TURN.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(_OTHER_THREADS)
        _OTHER_TURN.set(limiter)
    return await anyio.to_thread.run_sync(call, limiter=limiter, abandon_on_cancel=True)


async def _to_the_end(call: Callable[[], Any], shell: Shell) -> Any:
    """Run a transaction and wait for it although the task is cancelled meanwhile; then let the cancellation go on.

    asyncio's own ``task.cancel()`` (``wait_for``, ``timeout``, ``TaskGroup``, the end of the loop) pierces anyio's shield, and a
    transaction that ran on behind our back would be followed by one that came too early. Waiting happens in the event loop,
    two transactions a ledger at a time, and not in forty threads: the books are written one at a time anyway, and every
    waiting thread would fight the loop for the interpreter.
    """
    try:
        work = _ledger_threads(os.getpid(), id(shell.store)).submit(call)
    except RuntimeError:
        return call()  # the interpreter is ending and takes no more work; the books still have to be put in order
    if _on_trio():
        return await _wait_on_trio(work)
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(done.set)

    work.add_done_callback(wake)
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            with anyio.CancelScope(shield=True):
                await done.wait()
        except asyncio.CancelledError as error:
            if work.cancel():
                raise  # it had not begun
            cancelled = error
    if cancelled is not None:
        raise cancelled  # the flow learns of the cancellation, and looks into the books for the rest
    return work.result()


async def _wait_on_trio(work: Future[Any]) -> Any:
    import trio  # it runs us, so it is there

    done, token = trio.Event(), trio.lowlevel.current_trio_token()

    def wake(_: object) -> None:
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(done.set)

    work.add_done_callback(wake)
    with trio.CancelScope(shield=True):  # on trio, cancellation comes by scopes alone
        await done.wait()
    return work.result()


@lru_cache(maxsize=64)
def _ledger_threads(_pid: int, _store: int) -> ThreadPoolExecutor:
    # One pool a ledger, so that none waits for another; and a process: a parent's threads do not exist after a fork.
    return ThreadPoolExecutor(_LEDGER_THREADS, thread_name_prefix="x402guard-ledger")


def _on_trio() -> bool:
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_run())


def _call(effect: Effect, shell: Shell) -> tuple[bool, Callable[[], Any]]:
    """Return what an effect runs, and whether that is over in microseconds."""
    match effect:
        case Transact(scope, change):
            return shell.store.inline, lambda: shell.store.transact(scope, change)
        case Compute(job, quick):
            return quick and shell.store.inline, lambda: job(shell.store.now_ms())
        case Warn(message):
            return True, lambda: _LOG.warning(message)
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
            return False, lambda: _read(chain, hold)
        case ReadFunds(network, token, owner):
            chain = shell.chain
            if chain is None:
                return True, lambda: None
            return False, lambda: _funds(chain, network, token, owner)
        case _:
            raise TypeError(f"{effect!r} is not an effect that a driver can run")


def _read(chain: ChainReader, hold: Hold) -> Finding:
    try:
        return chain.read(hold)
    except Exception as error:  # noqa: BLE001 - "could not read" is an answer, also from a reader of the user's
        return Unreadable(f"the chain reader failed: {type(error).__name__}")


def _funds(chain: ChainReader, network: str, token: Address, owner: Address) -> Funds | None:
    try:
        return chain.funds(network, token, owner)
    except Exception:  # noqa: BLE001 - see _read
        return None


def _needed(exchange: X | None) -> X:
    if exchange is None:
        raise TypeError("this flow sends a request, and was started without one")
    return exchange
