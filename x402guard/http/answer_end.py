"""Records how a paid answer ended, in the ledger and in the receipt of its caller."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any

from x402guard.errors import LedgerUnavailable
from x402guard.flow.context import Context
from x402guard.flow.drivers import run, run_async, to_the_end
from x402guard.flow.effects import Flow
from x402guard.flow.receipt import Receipt
from x402guard.flow.shell import Shell
from x402guard.http.streams import EXTENSION
from x402guard.x402.flow import Unrecorded, record, unwritten
from x402guard.x402.settlement import AnswerEnd, note_answer_end


class AnswerEnding:
    """The flow that records how a paid answer ended; of a short one, its claim as well.

    Any other one without *success* delivers nothing, which is recorded already. *extensions* are those of the response:
    they get the receipt as it was recorded.
    """

    def __init__(
        self,
        context: Context,
        handed: Unrecorded | Receipt,
        shell: Shell,
        *,
        success: bool,
        extensions: MutableMapping[str, Any],
    ) -> None:
        self._context, self._shell, self._success, self._extensions = context, shell, success, extensions
        self._short = handed if isinstance(handed, Unrecorded) else None
        receipt = handed.receipt if isinstance(handed, Unrecorded) else handed
        self._presentation = (receipt.hold_id, receipt.presented)
        self._is_late = False

    def __call__(self, end: AnswerEnd) -> Flow[None]:
        """Return the flow for one *end*."""
        if self._short is not None:
            self._extensions[EXTENSION] = yield from record(self._context, self._short, end)
        elif self._success or end == "late":
            yield from note_answer_end(self._context, self._presentation, end)

    def failed(self, error: LedgerUnavailable) -> None:
        """Say in the receipt of a short answer that it could not be recorded, or is recorded later."""
        if self._short is not None:
            self._extensions[EXTENSION] = unwritten(self._short.authorized, error)

    def gone(self) -> None:
        """Note, in memory alone, that nothing of the answer is under way any more, unless its end is written later."""
        if not self._is_late:
            self._context.in_flight.discard(self._presentation)

    def write(self, end: AnswerEnd) -> None:
        """Record one *end*, at once or, on a ledger of several machines, later: until then the purchase is under way."""
        late_writes = self._shell.late_writes
        if late_writes is None:
            run(self(end), self._shell)
            return
        self._is_late = True
        # The whole of it: a purchase is handed over by two changes where the policy asks about repeated ones.
        late_writes.write(partial(self._written, end), lambda _: None, patient=end == "late")

    async def awrite(self, end: AnswerEnd) -> None:
        """Do the same, awaited."""
        if self._shell.late_writes is None:
            await run_async(self(end), self._shell)
        else:
            await to_the_end(partial(self.write, end), self._shell, lambda _: None)

    def _written(self, end: AnswerEnd) -> None:
        run(self(end), replace(self._shell, late_writes=None))
        self._is_late = False
        self.gone()


def note_answer(note_end: AnswerEnding, end: AnswerEnd) -> None:
    """Record how a paid answer ended. The answer is the caller's, whether or not the ledger can be written."""
    try:
        note_end.write(end)
    except LedgerUnavailable as error:
        note_end.failed(error)
    finally:
        note_end.gone()


async def note_answer_async(note_end: AnswerEnding, end: AnswerEnd) -> None:
    """``note_answer``, awaited."""
    try:
        await note_end.awrite(end)
    except LedgerUnavailable as error:
        note_end.failed(error)
    finally:
        note_end.gone()
