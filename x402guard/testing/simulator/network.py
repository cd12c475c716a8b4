"""The network between an agent and a seller: requests and answers are lost, late, doubled, or cut after the head."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, TypeVar

from x402guard.errors import CallTimeout
from x402guard.flow.effects import PeekBody, Reply, Send, SendFailed
from x402guard.testing.simulator.draws import Draws
from x402guard.testing.simulator.market import Answer, Selling, Signed, Visit, Want
from x402guard.testing.simulator.tasks import Task
from x402guard.testing.simulator.world import BrokenActor, Violation, World

R = TypeVar("R")

_TRIP_MS: Final = (0, 1, 10, 10, 50, 400)
_STUCK_MS: Final = (1_000, 20_000, 60_000, 200_000)
_NEVER_MS: Final = 90_000
_LONGEST_WAIT_S: Final = 3_600
_MOST_WAITS: Final = 1_000


class Shopping:
    """The line of one paid request to a seller.

    Attributes:
        body: of the last answer.
        status: of the last answer; 0 before it.
        paid_status: of the answer to the payment; 0 before it.
        states_length: the heads of its answers say how long their bodies are.
        broke: the body of the paid answer broke while it was read with its head.
    """

    def __init__(self, world: World, want: Want, payments: dict[str, Signed]) -> None:
        self._world, self._want, self._payments = world, want, payments
        self.body, self.status, self.paid_status = b"", 0, 0
        self.states_length = want.number % 2 == 0
        self.broke = self._breaks = False
        self._paying: Signed | None = None

    def peek(self, effect: PeekBody) -> bytes | None:
        """See ``Line.peek``."""
        self.broke = self._paying is not None and self._breaks
        if self.broke:
            raise SendFailed(ConnectionResetError("the body broke"), before_connection=False)
        if self._paying is not None:
            self._paying.read_by.add(0)  # its process has it; what cuts it off takes that back
        return self.body if len(self.body) <= effect.limit else None

    def send(self, task: Task[Any], effect: Send) -> None:
        """See ``Line.send``."""
        world, draws = self._world, task.draws
        if world.goes_wrong("unsent", 0.02 if effect.pays is None else 0.05, draws):
            task.fail(ConnectionRefusedError("no connection"), before_connection=True)
            return
        payment = None if effect.pays is None else self._payments[effect.pays]
        if payment is not None:
            payment.sent = True
        self._paying, self._breaks = payment, world.goes_wrong("late", 0.03, draws)
        waits = _Waiting(task, self)
        limit_s = effect.call_s if effect.head is None else effect.head[0]
        limit_ms = _NEVER_MS if limit_s is None else int(limit_s * 1000)
        late = CallTimeout("no answer in time") if limit_s is not None else TimeoutError("read")
        world.after(limit_ms, waits.fails(late), idle=True)
        if world.goes_wrong("cancelled", 0.01, draws):
            world.after(draws.pick(_TRIP_MS), waits.cancels)
        if world.goes_wrong("lost", 0.01, draws):
            return
        trip_ms = draws.pick(_STUCK_MS) if world.goes_wrong("delayed", 0.02, draws) else draws.pick(_TRIP_MS)
        copies = 2 if world.goes_wrong("doubled", 0.02, draws) else 1
        for copy in range(copies):
            visiting = Draws(draws.bits64())
            answered = waits.gets if copy == 0 else _forget
            world.after(trip_ms + copy * 700, self._visit(payment, visiting, answered))

    def _visit(self, payment: Signed | None, draws: Draws, answered: Callable[[Answer], None]) -> Callable[[], None]:
        def visit() -> None:
            world, want = self._world, self._want
            wrapped = world.goes_wrong("wrapped", 0.4, draws)
            visit = Visit(want, payment, world.chain, world.time.unix, draws, calm=world.calm, wrapped=wrapped)
            if payment is None:
                asset = world.asset
                token = {
                    "network": asset.network,
                    "address": asset.address,
                    "name": asset.name,
                    "version": asset.version,
                }
                offer = _named(want, "offer", lambda: want.seller.offer(visit, token))
                travels(world, checked(offer, want, "offer"), draws, answered)
                return
            sell(world, want, _named(want, "sell", lambda: want.seller.sell(visit)), draws, answered)

        return visit


def sell(world: World, want: Want, selling: Selling, draws: Draws, answered: Callable[[Answer], None]) -> None:
    """Run a seller's sale until it answers. Raises ``BrokenActor`` if it breaks the protocol."""
    waits = 0

    def go_on() -> None:
        nonlocal waits
        waits += 1
        try:
            wait_s: object = _named(want, "sell", lambda: next(selling))
        except StopIteration as done:
            travels(world, checked(done.value, want, "sell"), draws, answered)
            return
        if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)) or not 0 <= wait_s <= _LONGEST_WAIT_S:
            raise BrokenActor(
                f"{want.seller.name}.sell: it yields {wait_s!r:.80}, not seconds to wait (0 to {_LONGEST_WAIT_S})"
            )
        if waits > _MOST_WAITS:
            raise BrokenActor(f"{want.seller.name}.sell: it has waited {_MOST_WAITS} times, and does not answer")
        world.after(int(wait_s * 1000), go_on)

    returned: object = selling
    if not isinstance(returned, Generator):
        if isinstance(returned, Coroutine):
            returned.close()  # else Python warns of it later, elsewhere
        raise BrokenActor(
            f"{want.seller.name}.sell: it returns {returned!r:.80}, and has to yield seconds and return an Answer"
        )
    go_on()


def _named(want: Want, place: str, does: Callable[[], R]) -> R:
    """Return what a seller's own code returns. Raises ``BrokenActor`` that names it for what that raises."""
    try:
        return does()
    except (BrokenActor, Violation, StopIteration):
        raise
    except Exception as error:
        raise BrokenActor(
            f"{want.seller.name}.{place}: it raises {type(error).__name__}: {str(error)[:200]}"
        ) from error


def checked(answer: object, want: Want, place: str) -> Answer:
    """Return a seller's answer. Raises ``BrokenActor`` that names the seller if it is none."""
    if not isinstance(answer, Answer):
        raise BrokenActor(
            f"{want.seller.name}.{place}: it answers with {answer!r:.80}, not with an Answer (visit.deliver(…))"
        )
    return answer


def travels(world: World, answer: Answer, draws: Draws, answered: Callable[[Answer], None]) -> None:
    """Let an answer travel back."""
    world.after(draws.pick(_TRIP_MS), lambda: answered(answer))


def _forget(_answer: Answer) -> None:
    """The answer to a doubled request: its copy was sent by the network, and no caller waits."""


class _Waiting:
    """A request that is out. The first of its ends counts: an answer, a loss, a time limit, or a cancellation."""

    def __init__(self, task: Task[Any], shopping: Shopping) -> None:
        self._task, self._shopping, self._effect = task, shopping, task.effect

    @property
    def _is_over(self) -> bool:
        return self._task.is_over or self._task.effect is not self._effect

    def gets(self, answer: Answer) -> None:
        if self._is_over:
            return
        if answer.lost:
            self._task.fail(ConnectionResetError("the connection broke"), before_connection=False)
            return
        self._shopping.body, self._shopping.status = answer.body, answer.reply.status
        if isinstance(self._effect, Send) and self._effect.pays is not None:
            self._shopping.paid_status = answer.reply.status
        # Half of the sellers state the length of what they send: the payer reads those answers with their heads.
        length = (("content-length", str(len(answer.body))),) if self._shopping.states_length else ()
        self._task.resume(Reply(answer.reply.status, (*answer.reply.headers, *length)))

    def fails(self, error: Exception) -> Callable[[], bool]:
        def fail() -> bool:
            if self._is_over:
                return False
            self._task.fail(error, before_connection=False)
            return True

        return fail

    def cancels(self) -> None:
        if not self._is_over:
            self._task.cancel_while_waiting()
