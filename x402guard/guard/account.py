"""The numbers of a budget in the ledger: its balances, its report, and what is outstanding when it is tripped."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal

from x402guard.errors import X402GuardError
from x402guard.flow.drivers import transact_now
from x402guard.flow.shell import Shell
from x402guard.guard.arguments import gone_in
from x402guard.guard.opening import Basis
from x402guard.kernel.rows import Hold, Node
from x402guard.ledger.owner import check_reason, trip_node
from x402guard.ledger.queries import outstanding_of, path_of
from x402guard.ledger.tree import remaining
from x402guard.ledger.view import Scope
from x402guard.money import Dollars, dollars_to_nanos, format_dollars, nanos_to_decimal
from x402guard.policy.steps import run_of
from x402guard.views.report import Report


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A payment or call that was held before a trip. It may still be sent, and counts until its end.

    Attributes:
        hold_id: its hold in the ledger.
        amount: its ceiling in dollars.
        payee: the address that it pays; the model or tool if it is no payment.
        deadline: unix time in seconds after which it is worthless.
    """

    hold_id: str
    amount: Decimal
    payee: str
    deadline: int


class Account:
    """A budget's current numbers in the ledger: exact dollars, of its current window if it has one."""

    _basis: Basis
    _node_id: str
    _name: str

    @property
    def shell(self) -> Shell:
        """The adapters that it runs on."""
        return self._basis.shell

    @property
    def id(self) -> str:
        """Its id in the ledger. A session that is not written yet is written now: another process may open it by its id."""
        with suppress(X402GuardError):  # its first hold writes it, or says why it cannot
            self.shell.store.write_openings(self._node_id)
        return self._node_id

    @property
    def name(self) -> str:
        """The name it was given."""
        return self._name

    def _nodes(self) -> dict[str, Node]:
        return path_of(self.shell.store, self.id)

    @property
    def limit(self) -> Decimal | None:
        """The budget in dollars, exact."""
        limit = self._nodes()[self.id].limit
        return None if limit is None else nanos_to_decimal(limit)

    @property
    def spent(self) -> Decimal:
        """Dollars captured in this budget and below, exact."""
        return nanos_to_decimal(self._nodes()[self.id].spent)

    @property
    def held(self) -> Decimal:
        """Dollars that live holds in this budget and below may still take, exact."""
        return nanos_to_decimal(self._nodes()[self.id].live)

    @property
    def remaining(self) -> Decimal:
        """The largest payment that fits this budget and every budget above it, in dollars, exact."""
        left = remaining(self._nodes(), self.id)
        return Decimal("Infinity") if left is None else nanos_to_decimal(left)

    def would_exceed(self, amount: Dollars) -> bool:
        """Return whether a payment of *amount* dollars would not fit now, here or in a budget above. Holds nothing.

        Raises ``TypeError`` for a float, ``ValueError`` for anything else that is not a dollar amount.
        """
        nanos = dollars_to_nanos(amount, field="amount")
        left = remaining(self._nodes(), self.id)
        return left is not None and nanos > left

    def trip(self, reason: str) -> tuple[Outstanding, ...]:
        """Trip the run of this budget: nothing new is held in it, signed or sent until its owner resets it.

        In a worker's session (``guard.redeem``) and inside it, that session alone; of a named budget, that budget.

        Returns what is outstanding, oldest first: it may still be signed and sent, can be taken until its end, and counts.
        Raises ``ConfigError`` for a *reason* that says nothing.
        """
        why = check_reason(reason)
        run_id = self._tripped_with_it()
        store = self.shell.store
        transact_now(self.shell, Scope(nodes=(run_id,), durable=True), lambda view: trip_node(view, run_id, why))
        return tuple(map(_as_outstanding, outstanding_of(store, run_id)))

    def _tripped_with_it(self) -> str:
        return run_of(self._node_id)

    def __repr__(self) -> str:
        what = f"{type(self).__name__}({self._name!r}, id={self._node_id!r}"
        try:
            nodes = self._nodes()
            node, left = nodes[self.id], remaining(nodes, self.id)
        except (X402GuardError, KeyError, AttributeError):
            return f"{what})"  # a crash reporter may show one whose ledger is closed
        limit = "no limit" if node.limit is None else f"${format_dollars(node.limit)}"
        rest = "" if left is None else f", ${format_dollars(left)} left"
        return f"{what}, {node.state}, ${format_dollars(node.spent)} spent of {limit}, ${format_dollars(node.live)} held{rest})"

    def report(self) -> Report:
        """Return the current report of this budget and all below it."""
        from x402guard.views.books import books_of  # loaded at the first report

        return Report.of(books_of(self.shell.store, self.id, gone=gone_in(self.shell.store)))


def _as_outstanding(hold: Hold) -> Outstanding:
    payee = hold.payment().payee if hold.intent is not None else hold.purpose.tool
    return Outstanding(hold.id, nanos_to_decimal(hold.amount), payee, hold.deadline_unix)
