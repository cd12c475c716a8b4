"""The drivers and adapters that a guard's flows run on, and the budgets that pay for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol, TypeVar

from msgspec import Struct, field

from x402guard.flow.bulkheads import Slots
from x402guard.flow.context import Context
from x402guard.flow.ports import ChainReader, Signer
from x402guard.flow.singleflight import SingleFlight
from x402guard.ledger.lost import LateEnd
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.view import LedgerView, Notice, Severity
from x402guard.policy.approvals import Answer, ApprovalRequest

R = TypeVar("R")

LOG: Final = logging.getLogger("x402guard")


class Notifier(Protocol):
    """Sends notices to the owner."""

    def notify(self, notices: Iterable[Notice]) -> None:
        """Send notices. Never raises."""


class Observer(Protocol):
    """Is told what flows do, for traces and metrics. Returns at once and never raises."""

    def committed(self, view: LedgerView) -> None:
        """Take a change that is in the ledger."""

    def step(self, name: str, hold_id: str) -> None:
        """Take a step of a payment that is not in the journal: ``sign`` or ``send``."""


_LEVELS: Final = {"info": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}


def is_logged(severity: Severity) -> bool:
    """Return whether a log takes notices of a severity."""
    return LOG.isEnabledFor(_LEVELS[severity])


def log_notice(notice: Notice) -> None:
    """Write a notice as a log record. Its fields are attributes of the record; ``event`` is the notice's kind."""
    level = _LEVELS[notice.severity]
    if is_logged(notice.severity):
        fields = notice.to_dict()
        del fields["message"]  # the record has its own
        # A reason may be an agent's words: no line of theirs looks like one of ours.
        message = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in notice.message)
        LOG.log(level, "%s", message, extra={"event": fields.pop("kind"), **fields})


class _Log:
    def notify(self, notices: Iterable[Notice]) -> None:
        for notice in notices:
            log_notice(notice)


def do_nothing() -> None:
    """Default ``recheck``: background checks are off."""


class Shell(Struct, frozen=True, eq=False):
    """The adapters that every flow of a guard runs on.

    Attributes:
        store: the ledger.
        signer: the key, or None.
        chain: the chains, or None.
        approver: the approver, or None.
        notifier: sends notices.
        slots: the slots of the bulkheads.
        kill_file: a file that stops everything while it exists, or None.
        recheck: requests a background check of the claims; returns at once.
        single_flight: coalesces chain reads.
        observer: is told of commits and steps, or None.
        shadow: the owner's rules refuse nothing; what they would refuse is recorded.
        late_writes: writes the ends of answers that need not be waited for; None where the ledger is on this machine.
    """

    store: LedgerStore
    signer: Signer | None
    chain: ChainReader | None
    approver: Approver | None = None
    notifier: Notifier = field(default_factory=_Log)
    slots: Slots = field(default_factory=Slots)
    kill_file: Path | None = None
    recheck: Callable[[], None] = do_nothing
    single_flight: SingleFlight = field(default_factory=SingleFlight)
    observer: Observer | None = None
    shadow: bool = False
    late_writes: WritesLate | None = None


class WritesLate(Protocol):
    """Writes what may come later (``late_writes.LateWrites``)."""

    def write(self, call: Callable[[], R], late: Callable[[R], object], *, end: LateEnd, patient: bool = False) -> R:
        """Return the result of *call*, or raise ``LedgerUnavailable`` and let *late* take it when it is written.

        *end* is what the call writes, as data. A *patient* call is waited for to its end.
        """

    def catch_up(self) -> None:
        """Let what restrains be written first. Raises ``LedgerUnavailable``."""

    def close(self) -> None:
        """Wait a while for what is still to be written."""


class Approver(Protocol):
    """Asks a person, in a thread of its own. An exception and a late answer are a no."""

    def ask(self, request: ApprovalRequest) -> Answer:
        """Return the answer."""


class FindsBudget(Protocol):
    """A session, or a guard that finds the session in context."""

    def innermost(self) -> Payer:
        """Return the innermost budget in context. Raises ``ConfigError`` if there is none."""


class Payer(Protocol):
    """A budget that pays: a session or a scope."""

    def innermost(self) -> Payer:
        """Return the innermost budget in context, at or below this one. Raises ``ConfigError``, ``SessionClosed``."""

    @property
    def context(self) -> Context:
        """The settings of its flows."""

    @property
    def shell(self) -> Shell:
        """The adapters of its flows."""
