"""Runs a flow one effect at a time, as a driver would, and lets things go wrong between any two of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Generic, Protocol, TypeVar

from x402guard.errors import IllegalTransition, LedgerUnavailable, SignerError, X402GuardError
from x402guard.flow.context import Context
from x402guard.flow.drivers import perform
from x402guard.flow.effects import (
    Ask,
    AskChain,
    Checkpoint,
    Effect,
    Flow,
    Interrupted,
    Notify,
    PeekBody,
    Send,
    SendFailed,
    Sign,
    TakeSlot,
    Transact,
)
from x402guard.flow.ports import Slot
from x402guard.kernel.rows import Hold
from x402guard.policy.approvals import NO_ANSWER, Answer
from x402guard.testing.simulator.books import Actor, Books
from x402guard.testing.simulator.draws import Draws
from x402guard.testing.simulator.ledgers import WatchedStore
from x402guard.testing.simulator.machine import SimProcess
from x402guard.testing.simulator.market import Want
from x402guard.testing.simulator.world import Violation, World

R = TypeVar("R")

_PAUSES_MS: Final = (0, 0, 0, 1, 1, 2, 5, 20, 100, 700)
_STALLS_MS: Final = (2_500, 12_000, 40_000)
_SLOT_MS: Final = 500
_CHAIN_MS: Final = (0, 100, 500, 3_000, 20_000, 60_000)
_LATE_MS: Final = 600_000


@contextmanager
def failing(process: SimProcess, how: str) -> Iterator[None]:
    """A block in which the next change of a process fails: ``before`` or ``after`` its commit, or not (``""``)."""
    store = None if process.guard is None else process.guard.shell.store
    if isinstance(store, WatchedStore):
        store.fails = how
    try:
        yield
    finally:
        if isinstance(store, WatchedStore):
            store.fails = ""


class Line(Protocol):
    """The HTTP side of one request: how a ``Send`` travels, and how its body is read."""

    def send(self, task: Task[Any], effect: Send) -> None:
        """Let the request travel, and resume the task once its answer is there, or lost."""

    def peek(self, effect: PeekBody) -> bytes | None:
        """Return the answer's body, or None beyond the limit."""


OnEnd = Callable[[Any, BaseException | None], None]


class Tasks:
    """Every flow under way.

    Attributes:
        on_signed: called with a hold and its task once a payment is signed.
    """

    def __init__(self, world: World, books: Books, on_signed: Callable[[Hold, Task[Any]], None]) -> None:
        self.world, self.books, self.on_signed = world, books, on_signed
        self.running: dict[int, Task[Any]] = {}
        self.dead: list[Any] = []
        self._serial = 0

    def begin(
        self,
        kind: str,
        flow: Flow[Any],
        process: SimProcess,
        draws: Draws,
        *,
        context: Context | None = None,
        line: Line | None = None,
        want: Want | None = None,
        on_end: OnEnd | None = None,
    ) -> Task[Any]:
        """Run a flow in a process. *on_end* gets its result, or its error."""
        self._serial += 1
        actor = Actor(kind, process, context, want, 0 if want is None else want.generation)
        task: Task[Any] = Task(self, self._serial, actor, flow, draws=draws, line=line, on_end=on_end)
        self.running[self._serial] = task
        task.resume(None)
        return task

    def kill(self, process: SimProcess) -> None:
        """End every flow of a process in the middle: none of its code runs any more."""
        for number, task in list(self.running.items()):
            if task.home is process:
                self.world.coverage.effects[type(task.effect).__name__, "process died"] += 1
                task.is_over = True
                self.dead.append(task.flow)  # a generator that is forgotten would run its last handlers
                del self.running[number]


class Task(Generic[R]):
    """One flow under way.

    Attributes:
        effect: the effect that it waits for.
        home: the process that it runs in.
        is_over: True once it has ended, or its process has.
    """

    def __init__(
        self,
        tasks: Tasks,
        number: int,
        actor: Actor,
        flow: Flow[R],
        *,
        draws: Draws,
        line: Line | None,
        on_end: OnEnd | None,
    ) -> None:
        if actor.process is None:
            raise Violation("no-process", actor.kind)
        self.number, self.actor, self.flow, self.home = number, actor, flow, actor.process
        self.draws, self.line, self.is_over = draws, line, False
        self.effect: Effect | None = None
        self._context = self.home.context.copy()
        self._tasks, self._world, self._on_end = tasks, tasks.world, on_end
        self._turn = 0
        self._slot: Slot | None = None
        self._slot_until_ms = 0
        self._cancelled = False

    # -- the generator ------------------------------------------------------------------------------------------------

    def resume(self, answer: Any, failure: BaseException | None = None) -> None:
        """Send the flow its answer, or its failure, and plan its next effect."""
        if self.is_over:
            return
        if failure is None:
            self._count("none")
        self._turn += 1
        books = self._tasks.books
        books.actor = self.actor
        try:
            if failure is None:
                self.effect = self._context.run(self.flow.send, answer)
            else:
                self.effect = self._context.run(self.flow.throw, failure)
        except StopIteration as done:
            self._end(done.value, None)
        except (Interrupted, SendFailed) as signal:
            self._end(None, signal.cause)
        except (X402GuardError, KeyboardInterrupt) as error:
            self._end(None, error)
        else:
            pause_ms = self.draws.pick(_PAUSES_MS)
            if isinstance(self.effect, Checkpoint):
                pause_ms = int(self.effect.pause_s * 1000)
            presents = self.actor.kind == "payment" and isinstance(self.effect, (Sign, Send))
            if self._world.goes_wrong(
                "stalled", 0.04 if presents else 0.01, self.draws
            ):  # a process that is stopped, or swapped out
                pause_ms += self.draws.pick(_STALLS_MS)
            self._plan(pause_ms, self._step)

    def _plan(self, pause_ms: int, action: Callable[[], None]) -> None:
        turn = self._turn

        def act() -> None:
            if not self.is_over and self._turn == turn:
                action()

        self._world.after(pause_ms, act)

    def _end(self, value: R | None, error: BaseException | None) -> None:
        self.is_over = True
        del self._tasks.running[self.number]
        self.leave_slot()
        if self._world.trace is not None:
            # What is under way holds a policy with sets, whose order differs from process to process.
            answer = type(value).__name__ if hasattr(value, "context") else value
            self._world.say(f"{self} ends: {answer if error is None else f'{type(error).__name__}: {error}'}"[:260])
        if isinstance(error, IllegalTransition):
            raise Violation("illegal-transition", f"{self}: {error}") from error
        if error is not None:
            told = f"{error} {getattr(error, 'advice', '')} {error.__notes__ if hasattr(error, '__notes__') else ''}"
            self._tasks.books.check_shown(f"the error of {self}", told)
        if self._on_end is not None:
            self._on_end(value, error)

    def leave_slot(self) -> None:
        """Release its slot of a bulkhead, if it has one."""
        if self._slot is not None:
            self._slot.leave()
            self._slot = None

    # -- one effect ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if not self._cancelled and self._world.goes_wrong("cancelled", 0.008, self.draws):
            self._cancel(after=self.draws.chance(0.5))
        else:
            _STEPS.get(type(self.effect), Task._answer)(self, self.effect)

    def _send(self, effect: Send) -> None:
        if self.line is None:
            raise Violation("no-line", f"{self} sends a request")
        self.line.send(self, effect)

    def _answer(self, effect: object) -> None:
        """Perform an effect that is answered at once."""
        failure = self._fault()
        if failure is not None:
            self._world.say(f"{self} {type(effect).__name__} fails: {failure}")
            self.resume(None, failure)
            return
        try:
            answer = self.perform()
        except Exception as error:
            if isinstance(error, Violation):
                raise
            self.resume(None, error)
        else:
            self.resume(answer)

    def perform(self) -> Any:
        """Run the effect, as a driver does."""
        effect = self.effect
        if isinstance(effect, Notify) and "keeps its state" in str(effect.said):
            raise Violation("illegal-transition", str(effect.said))
        if isinstance(effect, PeekBody):
            return None if self.line is None else self.line.peek(effect)
        if isinstance(effect, Checkpoint):
            return None
        if self.home.guard is None or effect is None:
            raise Violation("runs-after-death", str(self))
        self._tasks.books.actor = self.actor
        guard = self.home.guard
        answer = self.home.context.run(perform, effect, guard.shell)
        if isinstance(effect, Sign):
            self._tasks.on_signed(effect.hold, self)
        return answer

    def _fault(self) -> BaseException | None:
        """Return the failure of this effect, if it fails. It may have run before."""
        world, draws, effect = self._world, self.draws, self.effect
        waits = isinstance(effect, Transact) and effect.late is not None and self.home.late is not None
        if isinstance(effect, Transact) and world.goes_wrong(*(("away", 0.3) if waits else ("ledger", 0.006)), draws):
            after = draws.chance(0.5)
            self._count("failed after" if after else "failed before")
            if waits:
                return self._write_late("after" if after else "before")
            try:
                if after:
                    self.perform()
            except X402GuardError as error:
                return error
            return LedgerUnavailable("the commit's answer was lost" if after else "the ledger could not be written")
        if isinstance(effect, Sign) and world.goes_wrong("signer", 0.04, draws):
            after = draws.chance(0.6)
            self._count("failed after" if after else "failed before")
            if not after:
                return SignerError("the simulated signer says no")
            try:
                self.perform()
            except X402GuardError as error:
                return error
            self._tasks.books.signed[effect.hold.id].sent = True  # the signature is out there
            return TimeoutError("a remote signer")
        return None

    def _write_late(self, fails: str) -> X402GuardError:
        """Let the store fail inside the write of an end, so that it waits. Return what the flow gets for it."""
        with failing(self.home, fails):
            try:
                self.perform()
            except X402GuardError as error:
                return error
        raise Violation("no-fault", f"{self}: the ledger was away, and the write went through")

    def _cancel(self, *, after: bool) -> None:
        """Cancel the task while its effect runs: before anything of it has happened, or after all of it."""
        self._cancelled = True
        effect = self.effect
        after = after and not isinstance(effect, (Send, Ask, TakeSlot))
        self._count("cancelled after" if after else "cancelled before")
        self._world.say(f"{self} is cancelled {'after' if after else 'before'} {type(effect).__name__}")
        if after:
            try:
                self.perform()
            except (X402GuardError, SendFailed):
                after = False  # the cancellation comes first, whatever the effect would have said
        self.resume(None, Interrupted(KeyboardInterrupt()))

    def cancel_while_waiting(self) -> None:
        """Cancel the task while its request is out."""
        if not self._cancelled:
            self._cancelled = True
            self._count("cancelled after")
            self._world.say(f"{self} is cancelled while its request is out")
            self.resume(None, Interrupted(KeyboardInterrupt()))

    def fail(self, error: Exception, *, before_connection: bool) -> None:
        """Let the request fail."""
        self._count("failed before" if before_connection else "failed after")
        self.resume(None, SendFailed(error, before_connection=before_connection))

    def _count(self, how: str) -> None:
        if self.effect is not None:
            self._world.coverage.effects[type(self.effect).__name__, how] += 1

    # -- effects that take time ---------------------------------------------------------------------------------------

    def _ask(self, effect: Ask) -> None:
        waits_ms = self.draws.pick((200, 5_000, 60_000, _LATE_MS))
        if waits_ms >= effect.request.timeout_s * 1000:
            self._plan(effect.request.timeout_s * 1000, lambda: self.resume(Answer.no(NO_ANSWER)))
            return
        people = tuple(f"owner-{n}" for n in range(effect.request.approvers))
        answer = Answer(allowed=True, by=people) if self.draws.chance(0.7) else Answer.no("not today", people[:1])
        self._plan(waits_ms, lambda: self.resume(answer))

    def _take_slot(self, effect: TakeSlot) -> None:
        self.leave_slot()
        guard, now_ms = self.home.guard, self._world.time.ms
        if guard is None:
            raise Violation("runs-after-death", str(self))
        self._slot_until_ms = self._slot_until_ms or now_ms + effect.wait_s * 1000
        self._slot = self.home.context.run(guard.shell.slots.enter, effect.where, effect.most, 0)
        if self._slot is not None or now_ms >= self._slot_until_ms:
            self._slot_until_ms = 0
            self.resume(self._slot)
        else:
            self._plan(_SLOT_MS, lambda: self._take_slot(effect))

    def _ask_chain(self, _effect: object) -> None:
        """Read the chain now, and hand the answer over now or later, when it may be out of date."""
        answer = self.perform()
        late_ms = self.draws.pick(_CHAIN_MS) if self._world.goes_wrong("slow_chain", 0.5, self.draws) else 0
        if late_ms:
            self._plan(late_ms, lambda: self.resume(answer))
        else:
            self.resume(answer)

    def __str__(self) -> str:
        want = f" of {self.actor.want}" if self.actor.want is not None else ""
        return f"{self.actor.kind} #{self.number}{want} in {self.home.name}"


_STEPS: Final[dict[type, Callable[[Task[Any], Any], None]]] = {
    Send: Task._send,  # noqa: SLF001 - of this module
    Ask: Task._ask,  # noqa: SLF001
    TakeSlot: Task._take_slot,  # noqa: SLF001
    AskChain: Task._ask_chain,  # noqa: SLF001
}
"""How each effect that takes time is performed. All others are answered at once."""
