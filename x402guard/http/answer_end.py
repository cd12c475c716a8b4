"""Records how a paid answer ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from x402guard.errors import LedgerUnavailable
from x402guard.flow.context import Context
from x402guard.flow.drivers import run, run_async
from x402guard.flow.effects import Flow, Transact
from x402guard.flow.receipt import Receipt
from x402guard.flow.shell import Shell
from x402guard.flow.surroundings import here
from x402guard.flow.threads import finish_change
from x402guard.frozen import replace
from x402guard.kernel.rows import Delivery
from x402guard.ledger.lost import LateEnd
from x402guard.ledger.purchases import take_back
from x402guard.ledger.view import Scope
from x402guard.x402.delivery import AnswerEnd, late_delivery, note_answer_end


class AnswerEnding:
    """The flow that records how a paid answer ended. An answer without *success* delivers nothing.

    One that *broke* while it was read with its head has ended late, whatever its reader does.

    Attributes:
        is_followed: of a redirect: says at its end whether its reader follows it.
        was_followed: it has said so.
        was_lost: its caller did not get the answer, as far as this process knows.
        has_come: its caller got the whole answer, in the end.
        redirect: of what a redirect leads to: the ending of that redirect.
    """

    def __init__(self, context: Context, receipt: Receipt, shell: Shell, *, success: bool, broke: bool) -> None:
        self._context, self._shell, self._success, self._broke = context, shell, success, broke
        self._presentation, self._known = (receipt.hold_id, receipt.presented), receipt.delivery
        self._purchase = context.in_flight.get(self._presentation)
        self._is_late = self._has_ended = self.was_lost = self.has_come = self.was_followed = False
        self.is_followed: Callable[[], bool] | None = None
        self.redirect: AnswerEnding | None = None
        self._waiting: Callable[[], bool] | None = None

    def leads_on(self, end: AnswerEnd) -> bool:
        """True if this *end* is that of a redirect that is followed: the purchase is open, and waits for the next hop."""
        if end != "whole" or self._broke or self.is_followed is None or not self.is_followed():
            return False
        self._has_ended = self.was_followed = True
        self.waits()
        return True

    def waits(self) -> None:
        """Note, in memory alone, that the next hop of this task brings the answer: until then it is under way.

        If the same task asks again before, none has come, and it presents its payment again.
        """
        self._context.between_hops[self._presentation] = self._waiting or here().follow_task()

    def waits_for(self, is_over: Callable[[], bool]) -> None:
        """Note what says that no next hop comes any more, in place of the end of the task that got the redirect."""
        self._waiting = is_over
        if self._presentation in self._context.between_hops:
            self._context.between_hops[self._presentation] = is_over

    def forgotten(self) -> None:
        """Note, in memory alone, that nothing is left that could send a next hop."""
        if self._presentation in self._context.between_hops:
            self.gone()

    def is_known(self, end: AnswerEnd) -> bool:
        """True if the ledger has this *end*: a short answer was read before its receipt was made."""
        if not self._success:
            return end != "late"
        return self._known == Delivery.LOST or (self._known == Delivery.DONE and end == "whole")

    def __call__(self, end: AnswerEnd) -> Flow[None]:
        """Return the flow for one *end*."""
        end = "late" if self._broke else end
        if not self.is_known(end):
            yield from note_answer_end(self._context, self._presentation, end)

    def following(self) -> Flow[None]:
        """Return the flow that goes on with the purchase at the next hop. Raises ``LedgerUnavailable``."""
        self._context.cut_off.discard(self._presentation)
        self._context.between_hops.pop(self._presentation, None)
        self._context.in_flight[self._presentation] = self._purchase
        if self.was_lost or self.redirect is None or not self.redirect.was_followed:
            # It was handed over with the redirect, or a hop was lost; both may be written already.
            scope = Scope(holds=self._presentation[:1], durable=True)
            yield Transact(scope, lambda view: take_back(view, self._presentation))

    def follow(self) -> None:
        """Go on with the purchase: its answer redirects, and the next hop brings what was paid for, or another redirect.

        Where the ledger cannot be written, it is open in memory alone.
        """
        with suppress(LedgerUnavailable):
            run(self.following(), self._shell)

    async def afollow(self) -> None:
        """Do the same, awaited."""
        with suppress(LedgerUnavailable):
            await run_async(self.following(), self._shell)

    def gone(self) -> None:
        """Note, in memory alone, that nothing of the answer is under way any more, unless its end is written later."""
        if not self._is_late:
            self._context.between_hops.pop(self._presentation, None)
            self._context.in_flight.pop(self._presentation, None)

    def lost(self) -> None:
        """Note, in memory alone, that the answer did not reach its caller: the next purchase writes it down before."""
        self.was_lost = True
        self._context.cut_off.add(self._presentation)
        self._context.between_hops.pop(self._presentation, None)
        self._context.in_flight.pop(self._presentation, None)

    def dropped(self) -> None:
        """Note, in memory alone, that nothing reads the answer any more: a body that was not closed is lost."""
        if not self._has_ended:
            self.lost()

    def write(self, end: AnswerEnd) -> None:
        """Record one *end*, at once or, on a ledger of several machines, later: until then the purchase is under way.

        An answer that was lost is not: the same request presents its payment again.
        """
        self._has_ended = True
        late_writes, end = self._shell.late_writes, "late" if self._broke else end
        self.was_lost, self.has_come = self.was_lost or end != "whole", end == "whole" and not self._broke
        if late_writes is None or self.is_known(end):
            run(self(end), self._shell)
            return
        if end == "whole":
            self._is_late = True
        else:
            self.lost()
        # The whole of it: a purchase is handed over by two changes where the policy asks about repeated ones.
        (hold_id, presented), delivery = self._presentation, late_delivery(self._context, self._presentation, end)
        data = LateEnd(hold_id, presented=presented, delivery=delivery)
        late_writes.write(partial(self._written, end), lambda _: None, end=data, patient=end == "late")

    async def awrite(self, end: AnswerEnd) -> None:
        """Do the same, awaited."""
        self._has_ended = True
        self.was_lost, self.has_come = self.was_lost or end != "whole", end == "whole" and not self._broke
        if self._shell.late_writes is None or self.is_known(end):
            await run_async(self(end), self._shell)
        else:
            if end != "whole":
                self.lost()  # before it waits for a thread
            await finish_change(partial(self.write, end), self._shell, lambda _: None, may_drop=False)

    def _written(self, end: AnswerEnd) -> None:
        run(self(end), replace(self._shell, late_writes=None))
        if end == "late":
            self._context.cut_off.discard(self._presentation)
        self._is_late = False
        self.gone()


def note_answer(note_end: AnswerEnding, end: AnswerEnd) -> None:
    """Record how a paid answer ended. The answer is the caller's, whether or not the ledger can be written."""
    if note_end.leads_on(end):
        return
    try:
        with suppress(LedgerUnavailable):
            note_end.write(end)
    except BaseException:
        note_end.lost()  # the caller gets this error in place of the answer
        raise
    finally:
        note_end.gone()


async def note_answer_async(note_end: AnswerEnding, end: AnswerEnd) -> None:
    """``note_answer``, awaited."""
    if note_end.leads_on(end):
        return
    try:
        with suppress(LedgerUnavailable):
            await note_end.awrite(end)
    except BaseException:
        note_end.lost()
        raise
    finally:
        note_end.gone()
