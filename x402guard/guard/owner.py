"""What the owner of a ledger can see and do. The command line is a face over it; a guard can do none of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from x402guard.chain.settings import Endpoints
from x402guard.errors import ConfigError
from x402guard.flow.drivers import transact_now
from x402guard.flow.ports import ChainReader
from x402guard.flow.surroundings import here
from x402guard.guard.allowance import wallet_of
from x402guard.guard.approvers import operating_user
from x402guard.guard.arguments import as_ms, existing_ledger, gone_here, gone_in, may_write, positive, whole_id
from x402guard.guard.clock import refuse_strange_clock
from x402guard.guard.guard import Guard
from x402guard.guard.owner_rows import (
    ActionRow,
    AllowanceRow,
    BudgetRow,
    ChangesKey,
    DelegationRow,
    HoldRow,
    LatchRow,
    LimitChange,
    QuestionRow,
    TransferRow,
    budget_rows,
    delegation_named,
    delegation_rows,
    limited,
    only_one,
)
from x402guard.guard.signed_report import Anchor
from x402guard.guard.watchdog import Watchdog
from x402guard.kernel.change_set import MarkKey
from x402guard.kernel.rows import WALLET, Hold, HoldKind, NodeKind
from x402guard.ledger.actions import OPEN_STATES
from x402guard.ledger.budgets import as_line
from x402guard.ledger.delegations import delegation_marks, read_delegation, revoke
from x402guard.ledger.lines import fold_holds
from x402guard.ledger.lost import ROLLED_BACK_MARK, end_rolled_back
from x402guard.ledger.owner import check_reason, owner_mark, reset_node, trip_node
from x402guard.ledger.purchases import forgive, instance_mark
from x402guard.ledger.queries import (
    Prediction,
    compared_of,
    find_budget,
    nodes_of,
    outstanding_of,
    path_of,
    prediction_of,
)
from x402guard.ledger.questions import approval_mark, close_unanswered, give_answer, question_id, waiting
from x402guard.ledger.store import Audited
from x402guard.ledger.verify import Head, differences, heads_of, verify_windows
from x402guard.ledger.view import LedgerView, Scope
from x402guard.ledger.watch import Limits
from x402guard.money import Dollars
from x402guard.policy.checks import check_dollars, check_kind, check_name
from x402guard.policy.latches import clear, latches_of
from x402guard.policy.loops import forget_before
from x402guard.policy.prices import accept_price, accepted_key
from x402guard.policy.recount import too_low
from x402guard.policy.settings import Policy
from x402guard.policy.steps import reset_mark, run_of
from x402guard.stores import open_store
from x402guard.tools.undo import actions_of, roll_back, unregistered
from x402guard.views.books import books_of
from x402guard.views.captures import CaptureRow, capture_rows
from x402guard.views.live import LiveView, Totals, live_of, totals_of
from x402guard.views.report import Report
from x402guard.x402.cancel import Cancellation
from x402guard.x402.reconciled import Reconciliation
from x402guard.x402.unexplained import acknowledge, key_of, unexplained_in

R = TypeVar("R")


class Owner(ChangesKey):
    """A ledger in the hands of its owner: what is in it, and the commands that loosen or stop it. Never for an agent.

    A session is named by its id, by its name if only one has it, by ``id=ID``, or as ``wallet``. A block
    (``with Owner(…) as owner``) closes the ledger.

    Args:
        ledger: URL or path of an existing ledger; by default that of the settings.
        by: the name that the journal keeps with limits, trips, resets and answers; by default the system's user.
        chains: as for ``Guard``, for ``reconcile``; by default those of the settings.
        read_only: only look; True by itself where this user may not write the file.
        verified: refuse an inconsistent ledger.

    Raises ``ConfigError`` for a ledger that is not there, ``LedgerUnavailable`` if it cannot be opened.
    """

    def __init__(
        self,
        ledger: str | Path | None = None,
        *,
        by: str | None = None,
        chains: Mapping[str, Endpoints] | ChainReader | None = None,
        read_only: bool = False,
        verified: bool = True,
    ) -> None:
        self.url = existing_ledger(ledger)
        self.by = as_line(str(operating_user() if by is None else by)[:300])
        self._chains = chains
        self._reconciler: Guard | None = None
        read_only = read_only or not may_write(self.url)
        self._store = open_store(self.url, verified=verified, read_only=read_only)

    @property
    def as_of(self) -> float | None:
        """When what is shown was written, in unix seconds, on a replica of the ledger's server; None elsewhere."""
        behind_ms = self._store.as_of_ms()
        return None if behind_ms is None else behind_ms / 1000

    # -- looking ------------------------------------------------------------------------------------------------------

    def sessions(
        self,
        *,
        name: str | None = None,
        state: str | None = None,
        parent: str | None = None,
        since: datetime | None = None,
        limit: int | None = None,
    ) -> list[BudgetRow]:
        """Return the sessions, the named budgets and the wallet, oldest first.

        With *name* (or a pattern with ``*``), *state* (``open``, ``abandoned``, ``closed``, ``tripped``), *parent* (all below that
        budget) and *since* (when they were opened) only those that fit, and with *limit* only the last ones.
        """
        since_ms = as_ms("since", since) or 0
        return budget_rows(self._store, name=name, state=state, parent=parent, since_ms=since_ms, limit=limit)

    def report(
        self, session: str | None = None, *, since: datetime | None = None, until: datetime | None = None
    ) -> Report:
        """Return the report of a session, a named budget or the wallet; by default of the last session.

        With *since* or *until* it is that of the period, with what was captured in it. Raises ``ConfigError``.
        """
        books = books_of(self._store, find_budget(self._store, session, latest=True), gone=gone_in(self._store))
        return Report.of(books, since_ms=as_ms("since", since), until_ms=as_ms("until", until))

    def live(self, *, find: str = "") -> LiveView:
        """Return what is under way now in all sessions of the ledger, at one moment.

        Of those that have ended it has the newest ones, and those whose id, name or budget has the text *find*.
        """
        return live_of(self._store, find=find, gone=gone_in(self._store))

    def totals(self) -> Totals:
        """Return the figures of the ledger at one moment: what ``/metrics`` says."""
        return totals_of(self._store, gone=gone_in(self._store))

    def captures(
        self, session: str | None = None, *, since: datetime | None = None, until: datetime | None = None
    ) -> list[CaptureRow]:
        """Return what was captured in a session, a named budget or the wallet and below, entry by entry.

        With *since* and *until* only what was captured between them; the amounts of all add up to what is spent.
        """
        node_id = find_budget(self._store, session, latest=True)
        with self._store.at_one_moment() as ledger:
            nodes, entries = nodes_of(ledger), ledger.entries(node_id, grants=False)
        first_ms, last_ms = as_ms("since", since) or 0, as_ms("until", until)
        return capture_rows(nodes, entries, fold_holds(entries), since_ms=first_ms, until_ms=last_ms)

    def predict(self, name: str) -> Prediction:
        """Return what past sessions of a name have cost."""
        return prediction_of(self._store, check_name("name", name))

    def holds(self) -> list[HoldRow]:
        """Return every live hold: what may still be taken, by whom, until when, and whether it is in doubt."""
        marks = {instance_mark(key): row for key, row in self._store.marks("instance", "").items()}
        view = LedgerView.of_marks(self._store.now_ms(), marks)
        return [HoldRow.of(view, hold) for hold in self._store.outstanding() if hold.kind is not HoldKind.TOKENS]

    def verify(self, against: Anchor | None = None, *, archives: bool = True) -> list[str]:
        """Return what does not add up in the whole ledger, a sentence each; nothing for a sound one.

        With an earlier anchor (``verify_anchor``) also what has been removed or replaced since. Without *archives*, the
        files of archived sessions are not read, but only what the ledger keeps of them. Raises ``ConfigError`` for a
        ledger in memory.
        """
        if against is not None:
            check_kind("against", against, Anchor, "verify_anchor(text, public_key) returns one")
        problems = list(self._audited().audit(archives=archives))
        problems = problems or (verify_windows(self._store) if archives else [])
        if problems or against is None:
            return problems
        return differences(against.heads, self.heads(), self._audited(), archives=archives)

    def verify_counters(self, policy: Policy, *, archives: bool = True) -> list[str]:
        """Count all steps again from the journals, and return the counters of the guards that say less, a sentence each.

        *policy* is the one under which agents pay from this ledger: what another one did not count differs as well.
        """
        check_kind("policy", policy, Policy, "write Policy(max_steps=…)")
        return too_low(policy, self._audited().steps(archives=archives), self._store)

    def heads(self) -> tuple[Head, ...]:
        """Return the last entry of every journal, for ``ReportKey.sign_anchor``."""
        return heads_of(self._store.nodes())

    def size(self) -> tuple[int, int]:
        """Return the number of journal entries, and of budgets."""
        return self._audited().size()

    # -- answering ----------------------------------------------------------------------------------------------------

    def approvals(self) -> list[QuestionRow]:
        """Return the questions of agents that wait for an answer."""
        return [QuestionRow.of(key, row, self._store.now_ms()) for key, row in self._waiting().items()]

    def allow(self, question: str, *, by: str | None = None) -> QuestionRow:
        """Allow one call, once. *question* is its id, or a unique beginning of it. Raises ``ConfigError``."""
        return self._answer(question, by, yes=True)

    def deny(self, question: str, *, by: str | None = None) -> QuestionRow:
        """Deny one call. Raises ``ConfigError``."""
        return self._answer(question, by, yes=False)

    def latches(self) -> list[LatchRow]:
        """Return what has refused a call because of something seen before, and refuses the next one until it ages."""
        return [LatchRow.of(latch) for latch in latches_of(self._store)]

    def clear_latch(self, latch: str) -> LatchRow:
        """Clear a latch, by its id or a unique beginning of it: it refuses nothing until something is seen again.

        Raises ``ConfigError`` for one that is not there.
        """
        found = [each for each in latches_of(self._store) if latch and each.id.startswith(latch)]
        held = only_one("latch", latch, found, "x402guard latches")
        self._write(held.key, lambda view: clear(view, held, self.by))
        return LatchRow.of(held)

    def accept_price(self, route: str, most: Dollars) -> str:
        """Let a route, as a refusal by ``price_ratio`` names it, cost up to *most* dollars; 0 takes that back. Returns it."""
        nanos, key = check_dollars("most", most), accepted_key(route)
        self._write(key, lambda view: accept_price(view, key, nanos, self.by))
        return key[1]

    def unexplained(self) -> list[TransferRow]:
        """Return the Transfers out of the wallet that no payment explains, and that were not acknowledged."""
        return [TransferRow.of(row) for row in unexplained_in(self._store)]

    def acknowledge(self, transfer: str) -> TransferRow:
        """Record that the owner knows of a Transfer, by its id or a unique beginning of it: it is no alarm any more.

        Raises ``ConfigError`` for one that is not there.
        """
        found = [row for row in unexplained_in(self._store) if transfer and row["id"].startswith(transfer)]
        row = only_one("transfer", transfer, found, "x402guard acknowledge")
        key = key_of(self._store, row["id"])
        self._write(key, lambda view: acknowledge(view, key, self.by))
        return TransferRow.of(row)

    # -- commands -----------------------------------------------------------------------------------------------------

    def set_budget(
        self, session: str, limit: Dollars | None, *, per: str | None = None, tz: str = "UTC", stops: bool = False
    ) -> LimitChange:
        """Set the limit of a session, a named budget or the wallet, in dollars, also upwards; None for a wallet without.

        *per* is when the spending of the wallet or a named budget restarts, by the calendar of *tz*: ``day``, ``week``, ``month``.
        A limit that is zero or below what is used stops (trips) the budget: then *stops* has to be True, or ``ConfigError``.
        """
        nanos = None if limit is None else check_dollars("limit", limit)
        return self._change(session, partial(limited, limit=nanos, by=self.by, restarts=(per, tz), stops=stops))

    def trip(self, session: str, reason: str = "by its owner") -> list[Hold]:
        """Stop a session, or with ``wallet`` all of them, until it is reset.

        Returns its live holds: what is signed or sent already can still be taken.
        """
        node = self._change(session, lambda view, node_id: trip_node(view, node_id, reason, self.by))
        return outstanding_of(self._store, node.id)

    def reset(self, session: str, *, unsafe_early: bool = False) -> BudgetRow:
        """Reset a tripped session. Its loop counters start at zero; what it has spent stays counted.

        After the ledger's server has lost entries, raises ``ConfigError`` for the wallet until what was signed and lost
        is dead, final and reconciled, unless it is *unsafe_early*.
        """
        known = compared_of(self._store) if session == WALLET else None

        def change(view: LedgerView, node_id: str) -> str:
            if known is not None:
                end_rolled_back(view, known, unsafe_early=unsafe_early)
            reset_node(view, node_id, self.by)
            forget_before(view, run_of(node_id))
            return node_id

        return self.budget(self._change(session, change))

    def forgive(self, hold: str, *, unsafe_in_flight: bool = False) -> Hold:
        """Let the same request sign a new payment, although this one was or may be taken and its answer was lost.

        *hold* is its id, or a unique beginning of it. The payment itself is unchanged and counts as before. Raises
        ``ConfigError`` while its answer is under way, unless *unsafe_in_flight*.
        """
        hold_id = whole_id(hold, self._store.unsettled(0))
        known = self._store.hold(hold_id)
        marks = () if known is None else (instance_mark(known.instance),)
        change = partial(forgive, hold_id=hold_id, by=self.by, unsafe_in_flight=unsafe_in_flight)
        return self._store.transact(Scope(holds=(hold_id,), marks=marks, durable=True), change)

    def actions(self, session: str) -> list[ActionRow]:
        """Return what ``reversible`` functions have done in a session and below, in the order in which they began."""
        return [ActionRow.of(each) for each in actions_of(self._store, self._session(session))]

    def roll_back(self, session: str) -> list[ActionRow]:
        """Undo what a session and those below it have done and not committed, the last first; return these actions.

        Import the modules whose ``reversible`` functions have done it before: only what they name is called, and no text
        of the ledger is imported. An undo that raises is ``failed``, with the error's class, and the others follow. Raises
        ``ConfigError`` for an undo that none of them names, and while a process that is not known to have ended has the
        session open: it undoes them itself.
        """
        node_id = self._session(session)
        missing = unregistered(
            each for each in actions_of(self._store, node_id) if each.state in OPEN_STATES and each.undo
        )
        if missing:
            raise ConfigError(
                f"undo: {', '.join(missing)[:500]}: no function that is imported here is decorated with it; name the modules "
                "that have done it: x402guard journal rollback SESSION MODULE, with --from FOLDER if they are in a folder"
            )
        rows = self._store.marks("instance", "")
        gone = gone_here(self._store)
        for node in self._store.nodes(node_id):
            for opener in node.openers:
                instance = opener.rpartition("#")[0]
                if instance in rows and instance not in gone:
                    row = rows[instance]
                    raise ConfigError(
                        f"session: {node.id!r} is open in process {row.get('pid')} of {row.get('host')}, which undoes its "
                        "actions when it ends; stop that process first"
                    )
        with self._guard(pays=False) as guard:
            undone = roll_back(self._store, partial(transact_now, guard.shell), node_id, of_others=True)
        return [ActionRow.of(each) for each in undone]

    def delegations(self, session: str | None = None) -> list[DelegationRow]:
        """Return the tasks that agents have delegated: all of them, or those of a session and below."""
        return delegation_rows(self._store, "" if session is None else f"{self._session(session)}/")

    def revoke(self, delegation: str, reason: str = "by its owner") -> DelegationRow:
        """Revoke a delegation: its token is worth nothing, and its session is tripped.

        *delegation* is the id of its session or of its request, or a unique beginning of that. Of several with one request
        id the outermost is meant, because an agent chooses the ids of those below it. Raises ``ConfigError``, also if it is
        answered already.
        """
        session = delegation_named(self._store, delegation).session
        why = f"{check_reason(reason)} (by {self.by})"
        row = read_delegation(self._store.marks("delegation", session)[session])
        scope = Scope(nodes=(session,), marks=delegation_marks(row), durable=True)
        with self._guard(pays=False) as guard:
            transact_now(guard.shell, scope, lambda view: revoke(view, session, why))
        return next(each for each in delegation_rows(self._store, session) if each.session == session)

    def watchdog(
        self, *, silence_s: int = 300, run_s: int | None = None, states: int = 5, every_s: int = 10
    ) -> Watchdog:
        """Return what trips the runs of this ledger that are stuck, one look at a time; close it at the end.

        Args:
            silence_s: seconds without an entry, with no call under way and no question that waits for a person.
            run_s: seconds for which a run may be open; None for no limit.
            states: how often a run may report the same state (``session.step(state=…)``).
            every_s: seconds between two looks. ``doctor`` misses the watchdog after three of them.

        Raises ``ConfigError`` naming the argument.
        """
        run_s = None if run_s is None else positive("run_s", run_s)
        limits = Limits(positive("silence_s", silence_s), run_s, positive("states", states))
        beat_s = positive("every_s", every_s)
        return Watchdog(self._guard(pays=False), limits, beat_s)

    def cancel(self, hold: str) -> Cancellation:
        """Sign the cancellation of a live EIP-3009 payment with the key of the settings; see ``Guard.cancel``.

        *hold* is its id, or a unique beginning of it.
        """
        with self._guard(pays=True) as guard:
            if guard.shell.signer is None:
                raise ConfigError("private_key: a cancellation needs a signature; set X402GUARD_PRIVATE_KEY")
            return guard.cancel(whole_id(hold, (each.id for each in self._store.outstanding())))

    def reconcile(self) -> Reconciliation:
        """Ask the chains about every payment that is not proven, and compare what left the wallet with the ledger."""
        if self._reconciler is None:
            self._reconciler = self._guard(pays=False)
        return self._reconciler.reconcile()

    def allowances(self) -> list[AllowanceRow]:
        """Return what Permit2 may move of each token of the settings' wallet, read from the chains now."""
        with self._guard(pays=True) as guard:
            return wallet_of(guard).rows()

    def allowance(self, *, network: str | None = None, token: str | None = None) -> AllowanceRow:
        """Return what Permit2 may move of one token, which may be left out where only one fits."""
        with self._guard(pays=True) as guard:
            return wallet_of(guard).row(wallet_of(guard).asset(network, token))

    def set_allowance(self, amount: Dollars, *, network: str | None = None, token: str | None = None) -> AllowanceRow:
        """Set what Permit2 may move of one token to exactly *amount* dollars; 0 revokes it.

        Signs a transaction with the key of the settings, which pays the gas, and waits until it is in a block.
        *network* (CAIP-2 or a v1 name) and *token* (symbol or contract) may be left out where only one fits. Raises
        ``ConfigError``, ``SignerError``.
        """
        nanos = check_dollars("amount", amount)
        with self._guard(pays=True) as guard:
            wallet = wallet_of(guard)
            return wallet.set(wallet.asset(network, token), nanos)

    def budget(self, session: str) -> BudgetRow:
        """Return one session, named budget or the wallet."""
        node_id = find_budget(self._store, session)
        nodes = path_of(self._store, node_id)
        return BudgetRow.of(nodes[node_id], nodes, gone_here(self._store))

    # -- the ledger ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the ledger. May be called twice."""
        if self._reconciler is not None:
            self._reconciler.close()
            self._reconciler = None
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_left_by: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Owner({self.url!r})"

    def _guard(self, *, pays: bool) -> Guard:
        from x402guard.guard.settings import load_settings  # a program that owns no ledger does not load it

        arguments: dict[str, Any] = load_settings().guard_arguments(pays=pays)
        if self._chains is not None:
            arguments["chains"] = self._chains
        own = {"ledger": self._store, "background_checks": False, "approver": None, "telemetry": False}
        return Guard(**{**arguments, **own})

    def _session(self, session: str) -> str:
        node_id = find_budget(self._store, session)
        if nodes_of(self._store, node_id)[node_id].kind is not NodeKind.SESSION:
            raise ConfigError(f"session: {session!r} is no session; name one, as x402guard sessions lists them")
        return node_id

    def _audited(self) -> Audited:
        if not isinstance(self._store, Audited):
            raise ConfigError(
                "ledger: only a ledger in a file or a database can be verified, such as sqlite:///x402guard.db"
            )
        return self._store

    def _change(self, session: str, change: Callable[[LedgerView, str], R]) -> R:
        node_id = find_budget(self._store, check_name("session", session))
        # A wrong time in the ledger would pass for a right one later.
        refuse_strange_clock(self._store, None, here().boot_id())
        marks = (reset_mark(run_of(node_id)), owner_mark(node_id), ROLLED_BACK_MARK)
        scope = Scope(nodes=(node_id,), marks=marks, durable=True)
        return self._store.transact(scope, lambda view: change(view, node_id))

    def _write(self, key: MarkKey, change: Callable[[LedgerView], None]) -> None:
        if not self._store.path(WALLET):
            raise ConfigError(f"ledger: {self.url} has no wallet yet; name the ledger that your agents use")
        self._store.transact(Scope(nodes=(WALLET,), marks=(key,), durable=True), change)

    def _waiting(self) -> dict[str, Mapping[str, Any]]:
        """Return the questions that wait. Clears timed-out questions whose process ended before it took the answer."""
        rows = self._store.marks("approval", "")
        for key, row in rows.items():
            if row["words"] and self._store.now_ms() >= row["until_ms"] and may_write(self.url):
                close = partial(close_unanswered, key=key, shown=question_id(key, row))
                self._store.transact(Scope(marks=(approval_mark(key),)), close)
        return waiting(rows, self._store.now_ms())

    def _answer(self, question: str, by: str | None, *, yes: bool) -> QuestionRow:
        person = self.by if by is None else by
        found = [row for row in self.approvals() if question and row.is_meant_by(question)]
        asked = only_one("question", question, found, "x402guard approvals list")
        scope = Scope(marks=(approval_mark(asked.key),), durable=True)
        change = partial(give_answer, key=asked.key, by=person, allow=yes, shown=asked.id)
        return QuestionRow.of(asked.key, self._store.transact(scope, change), self._store.now_ms())
