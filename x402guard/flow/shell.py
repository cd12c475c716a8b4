"""What a guard's flows run on, and what pays for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from x402guard.flow.bulkheads import Slots
from x402guard.flow.context import Context
from x402guard.flow.ports import ChainReader, Signer
from x402guard.flow.singleflight import SingleFlight
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.view import Notice
from x402guard.policy.approvals import Answer, ApprovalRequest

LOG: Final = logging.getLogger("x402guard")


class Notifier(Protocol):
    """Tells people what they ought to know."""

    def notify(self, notices: Iterable[Notice]) -> None:
        """Tell of what has happened; never raises."""


class _Log:
    def notify(self, notices: Iterable[Notice]) -> None:
        for notice in notices:
            LOG.log(logging.WARNING if notice.pressing else logging.INFO, notice.message)


def do_nothing() -> None:
    """Nobody is there to ask the chain behind a caller's back."""


@dataclass(frozen=True, slots=True)
class Shell:
    """What every flow of a guard runs on.

    Attributes:
        store: the books.
        signer: the key, if any.
        chain: the chains, if any.
        approver: who is asked, if anybody.
        teller: who is told what happens.
        slots: the bulkheads: how many calls are under way, and where.
        kill_file: a file whose being there stops everything, if any.
        recheck: has the chain asked soon about what is claimed; returns at once.
        single_flight: what the chain is being asked at the moment.
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


class Approver(Protocol):
    """Asks a person, in a thread of its own. What it raises, and what comes too late, is a no."""

    def ask(self, request: ApprovalRequest) -> Answer:
        """Return the answer."""


class Payer(Protocol):
    """A budget that pays: a session or a scope."""

    def innermost(self) -> Payer:
        """Return the innermost budget in context: this one, or one inside it. Raises ``ConfigError``, ``SessionClosed``."""

    @property
    def context(self) -> Context:
        """What its flows work under."""

    @property
    def shell(self) -> Shell:
        """What its flows run on."""
