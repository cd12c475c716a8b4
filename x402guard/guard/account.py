"""What a ledger says of its budgets: how one stands, a session's report, and what those of a name have cost so far."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from decimal import Decimal

from x402guard.errors import ConfigError
from x402guard.flow.shell import Shell
from x402guard.ledger.model import Hold, Node
from x402guard.ledger.owner import trip_node
from x402guard.ledger.queries import nodes_of, outstanding_of, report_of
from x402guard.ledger.report import Report, remaining
from x402guard.ledger.view import Scope
from x402guard.money import Dollars, dollars_to_nanos, nanos_to_decimal
from x402guard.policy.steps import run_of


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A payment or call that is out already, and counts until its end whatever is tripped.

    Attributes:
        hold_id: its line in the ledger.
        amount: dollars that it may take at most.
        payee: whom it pays; the model or tool where it is no payment.
        deadline: unix time in seconds after which it is worthless.
    """

    hold_id: str
    amount: Decimal
    payee: str
    deadline: int


class Account(ABC):
    """A budget's own numbers, as the ledger has them now: all in exact dollars, and in its window where it has one."""

    @property
    @abstractmethod
    def shell(self) -> Shell:
        """The ports it runs on."""

    @property
    @abstractmethod
    def id(self) -> str:
        """Its id in the ledger."""

    def _nodes(self) -> dict[str, Node]:
        return nodes_of(self.shell.store, self.id)

    @property
    def limit(self) -> Decimal | None:
        """The budget in dollars, exact."""
        limit = self._nodes()[self.id].limit
        return None if limit is None else nanos_to_decimal(limit)

    @property
    def spent(self) -> Decimal:
        """What was captured here and below, in dollars, exact."""
        return nanos_to_decimal(self._nodes()[self.id].spent)

    @property
    def held(self) -> Decimal:
        """What live holds here and below may still take, in dollars, exact."""
        return nanos_to_decimal(self._nodes()[self.id].live)

    @property
    def remaining(self) -> Decimal:
        """The largest payment that fits into this budget and every one above it, in dollars, exact."""
        left = remaining(self._nodes(), self.id)
        return Decimal("Infinity") if left is None else nanos_to_decimal(left)

    def would_exceed(self, amount: Dollars) -> bool:
        """True where a payment of *amount* dollars would not fit now, here or in a budget above. It holds nothing.

        Raises ``TypeError`` for a float, ``ValueError`` for what is no dollar amount.
        """
        nanos = dollars_to_nanos(amount, field="amount")
        left = remaining(self._nodes(), self.id)
        return left is not None and nanos > left

    def trip(self, reason: str) -> tuple[Outstanding, ...]:
        """Latch the run that this belongs to: nothing is signed or sent in it until its owner resets it.

        Returns what is out already, oldest first: that may be taken until its end, and counts.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError("reason: say why the session is tripped, for whoever has to reset it")
        run_id = run_of(self.id)
        store = self.shell.store
        store.transact(Scope(nodes=(run_id,), durable=True), lambda view: trip_node(view, run_id, reason[:300]))
        return tuple(map(_as_outstanding, outstanding_of(store, run_id)))

    def report(self) -> Report:
        """Return the accounts of this budget and all below it, as they stand in the ledger now."""
        return report_of(self.shell.store, self.id)


def _as_outstanding(hold: Hold) -> Outstanding:
    payee = hold.payment().payee if hold.intent is not None else hold.purpose.tool
    return Outstanding(hold.id, nanos_to_decimal(hold.amount), payee, hold.deadline_unix)
