"""``Guard``: connects the ledger, the key, the chains and the rules, and opens sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import anyio.lowlevel

from x402guard.assets import Asset, AssetRegistry
from x402guard.chain.rechecker import Rechecker
from x402guard.chain.settings import Endpoints
from x402guard.errors import ConfigError, LedgerUnavailable
from x402guard.flow.context import DEFAULT_BODY_BYTES, MAX_CLOCK_JUMP_S, Context, Mode
from x402guard.flow.drivers import run, transact_now
from x402guard.flow.heartbeat import Heartbeat
from x402guard.flow.late_writes import LateWrites
from x402guard.flow.ports import ChainReader, Signer
from x402guard.flow.shell import LOG, Shell, WritesLate
from x402guard.flow.surroundings import VERSION, here
from x402guard.flow.threads import finish_change, finish_closing, run_in_daemon_thread
from x402guard.frozen import replace
from x402guard.guard.approvers import limited_approver
from x402guard.guard.arguments import (
    check_kinds,
    check_mode,
    each_asset,
    gone_instances,
    is_gone,
    kill_path,
    meter_of,
    observed,
    open_ledger,
    positive,
    read_networks,
)
from x402guard.guard.clock import refuse_strange_clock, refuse_strange_server
from x402guard.guard.named_budget import BudgetParent
from x402guard.guard.notices import NoticeSender, OnNotice, Webhook
from x402guard.guard.opening import (
    Basis,
    WalletBudget,
    WalletLimit,
    check_on,
    kernel_opened,
    opener_of,
    parse_limit,
    parse_wallet_budget,
)
from x402guard.guard.session import Session, current_session
from x402guard.kernel.rows import WALLET, Nanos
from x402guard.ledger.authorize import lapse_due
from x402guard.ledger.lost import enter_ends
from x402guard.ledger.owner import owner_mark
from x402guard.ledger.purchases import DEFAULT_FLIGHT_S, DEFAULT_MEMORY_S, instance_mark
from x402guard.ledger.sessions import PAYER_MARK, ensure_payer, ensure_wallet
from x402guard.ledger.store import CheckedInParts, ForgetsSessions, LedgerStore, Life, MayBeAway
from x402guard.ledger.view import LedgerView, Scope
from x402guard.llm import Metering
from x402guard.money import Dollars
from x402guard.policy import Policy
from x402guard.policy.checks import check_flags
from x402guard.stores import DEFAULT_LEDGER
from x402guard.stores.memory import MOST_ENDED
from x402guard.tools.token_budget import TokenBudget
from x402guard.x402.cancel import Cancellation, cancelled
from x402guard.x402.delivery import note_cut
from x402guard.x402.reconciled import Reconciliation
from x402guard.x402.settlement import may_fit_now, sweep
from x402guard.x402.signer import payer_of

if TYPE_CHECKING:
    from eth_account.signers.local import LocalAccount

    from x402guard.telemetry.otel import Telemetry

_SEEN_S: Final = 1.0
"""Seconds after which a session without a hold is written."""

_CHECK_S: Final = 1.0
"""Seconds after its opening from which the rest of a ledger is checked."""


class Guard(BudgetParent):
    """One wallet, one ledger. Everything that spends goes through one of its sessions.

    Args:
        signer: the key, or an account of ``eth_account``; None meters and never signs.
        ledger: URL of the ledger (``memory://``, ``sqlite:///spend.db``, ``postgresql://user@host/database``), or a store,
            which the caller closes.
        policy: the owner's rules.
        assets: tokens besides the built-in ones.
        chains: network → JSON-RPC URL, ``web3.Web3``, several of these, or a ``Chain``; or a ``ChainReader``, which the
            caller closes.
        unsafe_no_chain: pay on real networks whose chain cannot be read; claims about real money stay unchecked.
        unsafe_async_failover: pay on real networks although a failover of the ledger's server can lose the newest holds.
        unsafe_trust_receipts: capture the claim of an ``upto`` receipt if no chain can prove it.
        budget: the wallet's own limit in dollars, over all sessions of this ledger: for good, or for each day, week or month,
            ``{"amount": "20.00", "per": "month", "tz": "Europe/Berlin"}``; None uses the limit in the ledger.
        max_body_bytes: the most bytes of a streaming request body that are kept to repeat it in a paid request.
        flight_s: seconds after which a request without an answer is in doubt.
        purchase_memory_s: seconds for which a payment that was taken without an answer keeps the same request from a
            new signature.
        memory_sessions: how many sessions that have ended ``memory://`` keeps; older ones are forgotten, but for what they
            captured. Other ledgers keep all.
        metering: how LLM calls are held and priced.
        session_budget: the budget in dollars of a session that names none; without it, such a session is an error.
        approver: the approver: a function of an ``ApprovalRequest`` that returns True, ``"terminal"``, ``"queue"``
            (answered by ``x402guard approvals``), or a list of these. None denies every step that needs approval.
        on_notice: a function of a ``Notice``, plain or ``async``, which gets each one once, in a thread of its own;
            ``docs/reference/notices.md`` lists them.
        webhook: where the same notices are posted to.
        kill_file: a path; while the file exists, every run that wants to spend is tripped.
        max_clock_jump_s: seconds that this machine's clock may run ahead of elapsed time; past it all is refused.
        background_checks: ask the chain about claims in a background thread; without, only ``reconcile`` asks, and a
            refusal for lack of budget before it is raised. A thread also checks what the ledger's opening has left.
        mode: ``"enforce"``, or ``"shadow"``: the rules refuse nothing that the budget allows, and the report says what
            they would have refused.
        telemetry: send traces and metrics to OpenTelemetry, in the background; ``docs/how-to/telemetry.md``.
        ledger_must_exist: refuse a missing ledger instead of creating a new one with a new budget.

    Raises ``ConfigError`` naming the setting, ``LedgerUnavailable`` if the ledger cannot be opened.
    """

    def __init__(
        self,
        *,
        signer: Signer | LocalAccount | None = None,
        ledger: str | LedgerStore = DEFAULT_LEDGER,
        policy: Policy | None = None,
        assets: Iterable[Asset] = (),
        chains: Mapping[str, Endpoints] | ChainReader | None = None,
        unsafe_no_chain: bool = False,
        unsafe_async_failover: bool = False,
        unsafe_trust_receipts: bool = False,
        budget: WalletBudget | None = None,
        max_body_bytes: int = DEFAULT_BODY_BYTES,
        flight_s: int = DEFAULT_FLIGHT_S,
        purchase_memory_s: int = DEFAULT_MEMORY_S,
        memory_sessions: int = MOST_ENDED,
        metering: Metering | None = None,
        session_budget: Dollars | None = None,
        approver: object = None,
        on_notice: OnNotice | None = None,
        webhook: Webhook | None = None,
        kill_file: Path | str | None = None,
        max_clock_jump_s: int = MAX_CLOCK_JUMP_S,
        background_checks: bool = True,
        ledger_must_exist: bool = False,
        mode: Mode = "enforce",
        telemetry: bool = False,
    ) -> None:
        pays, self.policy = check_kinds(signer, ledger, policy, chains, approver), policy or Policy()
        check_flags(background_checks=background_checks, unsafe_async_failover=unsafe_async_failover)
        check_flags(unsafe_no_chain=unsafe_no_chain, unsafe_trust_receipts=unsafe_trust_receipts)
        wallet, stop, self.meter = parse_wallet_budget(budget), kill_path(kill_file), meter_of(metering)
        self._notifier = NoticeSender(on_notice, webhook)
        chain = _reader_of(chains) if isinstance(chains, Mapping) else chains
        networks = read_networks(chain, self.policy, unsafe_no_chain=unsafe_no_chain)
        self.context = Context(
            session_id=WALLET,
            node_id=WALLET,
            instance=f"{here().hostname()}:{here().pid()}:{here().random_bytes(4).hex()}",
            policy=self.policy,
            payer=None if pays is None else payer_of(pays),
            chains=networks,
            flight_ms=positive("flight_s", flight_s) * 1000,
            memory_ms=positive("purchase_memory_s", purchase_memory_s) * 1000,
            unsafe_no_chain=unsafe_no_chain,
            may_lose_holds=not unsafe_async_failover,
            unsafe_trust_receipts=unsafe_trust_receipts,
            asks=approver is not None,
            shadow=check_mode(mode),
            max_clock_jump_ms=positive("max_clock_jump_s", max_clock_jump_s) * 1000,
            registry=AssetRegistry(each_asset(assets)),
            max_body_bytes=positive("max_body_bytes", max_body_bytes),
            may_fit_now=may_fit_now if networks else None,
            session_budget=parse_limit(session_budget, field="session_budget"),
        )
        self._closed, self._owns = False, (isinstance(ledger, str), isinstance(chains, Mapping))
        store = open_ledger(ledger, must_exist=ledger_must_exist, memory_sessions=memory_sessions)
        asks, notifier = limited_approver(approver, store), self._notifier
        shell = Shell(store, pays, chain, asks, notifier, kill_file=stop, shadow=self.context.shadow)
        self._open(shell, wallet, background_checks=background_checks, telemetry=telemetry)

    _life: Life | None = None
    _life_name: str | None = None

    @property
    def instance(self) -> str:
        """The name of this guard in the ledger: host, process, and a part at random."""
        return self.context.instance

    def _open(self, shell: Shell, wallet: WalletLimit, *, background_checks: bool, telemetry: bool) -> None:
        self._rechecker = Rechecker(lambda since_ms: run(sweep(self.context, since_ms=since_ms), self.shell))
        asks_chain = background_checks and shell.chain is not None
        self.shell = replace(shell, recheck=self._rechecker.nudge) if asks_chain else shell
        self._observer: Telemetry | None = None
        try:
            self._observer = observed(telemetry)
            self.shell = replace(self.shell, observer=self._observer, late_writes=self._late_writes(shell.store))
            shell.store.open_kernel(kernel_opened(self.context))
            if isinstance(shell.store, ForgetsSessions):
                shell.store.ask_chains(asks=shell.chain is not None)
            gone, machine = self._enter_instance(wallet), here().machine()
            risky = self.context.may_lose_holds and shell.store.may_lose_commits
            self.context = replace(
                self.context, gone=gone, machine=machine, outstanding=shell.store.outstanding, may_lose_holds=risky
            )
            if self.shell.signer is not None:
                self.shell.signer.bind(self.shell.store.signable)
            self._node_id, self._basis = WALLET, Basis(self.shell, self.context, self.meter)
            self._heartbeats = self._started(shell.store, checks=background_checks)
        except BaseException:
            self._release()
            raise

    def _started(self, store: LedgerStore, *, checks: bool) -> tuple[Heartbeat, ...]:
        """Start what is done from time to time. A ledger in memory needs none of it: no other process reads it."""
        beats = [Heartbeat(self._beat, "the sign that this process lives cannot be written")] if store.is_shared else []
        if beats or isinstance(store, CheckedInParts):
            beats.append(
                Heartbeat(self._show_sessions, "a session cannot be written", first_s=_SEEN_S, every_s=_SEEN_S)
            )
        if checks and isinstance(store, CheckedInParts):
            beats.append(Heartbeat(self._check_on, "the ledger cannot be checked", first_s=_CHECK_S))
        return tuple(beats)

    def _show_sessions(self) -> None:
        """Write the sessions that have no hold yet, so that other processes see them and can stop them."""
        self.shell.store.write_openings(older_s=_SEEN_S)

    def _check_on(self) -> None:
        """Check what of the ledger its opening has left."""
        check_on(self.shell, lambda: self._closed)

    def _late_writes(self, store: LedgerStore) -> WritesLate | None:
        """Return what writes the ends of answers; None for a ledger on this machine."""
        if not isinstance(store, MayBeAway):
            return None
        outbox = store.outbox  # a guard on this store that has been closed may have left something there
        for left_out in enter_ends(outbox.ends, outbox.written, store.transact):
            LOG.error("%s", left_out)
        return LateWrites(outbox)

    def _release(self) -> None:
        owns_store, owns_chain = self._owns
        try:
            if self._observer is not None:
                self._observer.close()
        finally:
            if self._life is not None:
                self._life.close()
            if owns_store:
                self.shell.store.close()
            if owns_chain and self.shell.chain is not None:
                self.shell.chain.close()

    def _enter_instance(self, wallet: WalletLimit) -> frozenset[str]:
        """Record the wallet, its payer and this instance, and end the instances whose process is gone."""
        store = self.shell.store
        refuse_strange_clock(store, self.shell.chain, here().boot_id())
        refuse_strange_server(store, self.shell.chain, here().boot_id())
        rows = store.marks("instance", "")
        ended = {key for key, row in rows.items() if not row["ended"] and is_gone(row, store.lives)}
        now_ms, name = store.now_ms(), here().random_bytes(8).hex()
        self._life = store.hold_life(name)  # before the row that names it
        self._life_name = None if self._life is None else name
        mine = self._row(ended=False)

        def change(view: LedgerView) -> None:
            limit, window = wallet
            ensure_wallet(view, limit, self.policy.soft_parts, window)
            if self.context.payer is not None:
                ensure_payer(view, self.context.payer)
            self._put_row(view, mine)
            for key in ended:
                view.put_mark(instance_mark(key), {**rows[key], "ended": True})
            if view.ahead_ms <= self.context.max_clock_jump_ms:
                lapse_due(view)

        scope = Scope(nodes=(WALLET,), marks=(PAYER_MARK, owner_mark(WALLET)), durable=True)
        try:
            transact_now(self.shell, scope, change)
        except BaseException:
            if self._life is not None:
                self._life.close(ends=True)  # no row names it: else each failed start leaves a file
            raise
        gone = gone_instances(rows, now_ms, store.lives)
        for key in ended:
            if (left := store.hold_life(rows[key].get("life", ""))) is not None:
                left.close(ends=True)
        return gone

    def _row(self, *, ended: bool) -> dict[str, Any]:
        store, me = self.shell.store, {"host": here().machine(), "pid": here().pid(), "boot": here().boot_id()}
        life = {} if self._life_name is None else {"life": self._life_name}
        knows = life | {"package": VERSION, "schema": store.schema, "lifetime_s": self.policy.max_lifetime_s}
        return {"since_ms": store.now_ms(), "steady_ms": store.steady_ms(), "ended": ended, **knows, **me}

    def _beat(self) -> None:
        self._write_row(self._row(ended=False))

    def _write_row(self, row: Mapping[str, Any]) -> None:
        self.shell.store.transact(Scope(), partial(self._put_row, row=row))

    def _put_row(self, view: LedgerView, row: Mapping[str, Any]) -> None:
        # The server's own time: what this process believes may lag behind it after its machine has slept.
        seen = {"seen_ms": view.clock_ms + view.ahead_ms} if self.shell.store.is_shared else {}
        view.put_mark(instance_mark(self.context.instance), {**row, **seen})

    @classmethod
    def from_env(cls, path: Path | str | None = None) -> Guard:
        """Return a guard from ``X402GUARD_*`` variables and ``x402guard.toml``; see ``docs/reference/settings.md``.

        Reads the private key once and removes it from the environment, so that no child process inherits it. Raises
        ``ConfigError`` naming the setting.
        """
        from x402guard.guard.settings import load_settings

        return cls(**load_settings(None if path is None else Path(path)).guard_arguments())

    def innermost(self) -> Session:
        """Return the innermost budget in context, for a client that many sessions share.

        Raises ``ConfigError`` if no session of this guard is in context.
        """
        inner = current_session()
        if inner is None or inner.shell is not self.shell:
            raise ConfigError(
                "GuardedTransport(guard): no session of this guard is in context; enter `with guard.session(…)`, and in a "
                "plain thread wrap the function with session.bind(…)"
            )
        return inner.innermost()

    def redeem(self, token: str) -> Session:
        """Open the session of a task that another agent has delegated, in this process, by its token.

        The session is for one worker at a time; after a crash the same token opens it again. ``session.task`` has the
        request, and takes the answer. Raises ``ConfigError`` for a token that is old, revoked, changed, used up or for
        another ledger; ``SessionTripped``, ``SessionClosed``. Nothing is opened then.
        """
        return redeemed(self._basis, token)

    @asynccontextmanager
    async def aredeem(self, token: str) -> AsyncIterator[Session]:
        """Do the same for an ``async with`` block, and end the session after it: ``redeem`` off the event loop."""
        session = await aredeemed(self._basis, token)
        async with session:
            yield session

    def warm(self) -> None:
        """Load the prices of models and OpenAI's vocabulary, which the first LLM call would load: a quarter of a second.

        Blocks; call it before a service takes requests, or in a thread. ``install`` does it in a thread.
        """
        self.meter.warm()

    def reconcile(self) -> Reconciliation:
        """Ask the chains about every unproven payment, and compare what left the wallet with the ledger.

        Records what is proven, expired or corrected; names chains that cannot be read. Raises ``LedgerUnavailable``.
        """
        from x402guard.x402.reconciliation import reconcile_ledger  # loaded at the first one

        return reconcile_ledger(self.shell, self.context)

    async def areconcile(self) -> Reconciliation:
        """Do the same, awaited."""
        return await run_in_daemon_thread(self.reconcile)

    def sweep(self) -> None:
        """Ask the chains once about the payments without a proof that are longest unasked, sixteen at most; record the answers."""
        run(sweep(self.context), self.shell)

    def cancel(self, hold_id: str) -> Cancellation:
        """Sign the cancellation of a live EIP-3009 payment, for any account to send and pay gas; see ``Cancellation``.

        The hold counts in full until the chain proves the cancellation. Raises ``ConfigError`` for a hold that cannot
        be cancelled, ``SignerError`` without a key.
        """
        return cancelled(self.shell, hold_id)

    def close(self) -> None:
        """End this instance and release the ledger. Live holds stay and count. May be called twice."""
        mark = self._row(ended=True)
        if self._closed:
            return
        self._closed = True
        self._rechecker.close()
        try:
            if self.context.cut_off:
                with suppress(LedgerUnavailable):
                    run(note_cut(self.context, *sorted(self.context.cut_off)), self.shell)
            if self.shell.late_writes is not None:
                self.shell.late_writes.close()
            for each in self._heartbeats:
                each.close()
            self._write_row(mark)
            if self._life is not None:
                self._life.close(ends=True)
        finally:
            self._notifier.close()
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        await finish_closing(self.close, of_a_guard=True)

    def __repr__(self) -> str:
        context = getattr(self, "context", None)  # a crash reporter may show an unfinished guard
        return (
            "Guard(unfinished)" if context is None else f"Guard(payer={context.payer}, instance={context.instance!r})"
        )


def _reader_of(chains: Mapping[str, Endpoints]) -> ChainReader:
    from x402guard.chain.reader import RpcChainReader  # loaded with the first chain

    return RpcChainReader(chains)


def redeemed(basis: Basis, token: str) -> Session:
    """Open the session of a token. Raises ``ConfigError`` naming what is wrong with it; nothing is opened then."""
    from x402guard.delegation.handles import Task
    from x402guard.delegation.offers import redeem
    from x402guard.delegation.scope import read_reach
    from x402guard.delegation.token import read_token

    if basis.context.shadow:
        raise ConfigError(
            "mode: a guard in shadow mode does not hold a worker to its task; redeem it with mode='enforce'"
        )
    read, opener = read_token(token), opener_of(basis.context)
    rows = basis.shell.store.marks("instance", "")
    gone = gone_instances(rows, basis.shell.store.now_ms(), basis.shell.store.lives)
    delegation, node = run(redeem(basis.context, read, opener, gone), basis.shell)
    hard = delegation.request["token_budget"] is not None
    quotes = tuple((pattern, Nanos(price)) for pattern, price in delegation.quotes)
    tokens, reach = TokenBudget(hard=hard), read_reach(delegation.reach)
    session = Session(basis, node, opener, None, tokens=tokens, reach=reach, quotes=quotes)
    session.work_on(Task(session, delegation))
    return session


async def aredeemed(basis: Basis, token: str) -> Session:
    """Do the same off the event loop. After a cancellation meanwhile, the token opens the session again."""
    opening = partial(copy_context().run, partial(redeemed, basis, token))
    session = await finish_change(opening, basis.shell, _leave)
    try:
        await anyio.lowlevel.checkpoint()
    except BaseException:
        await finish_closing(partial(_leave, session))
        raise
    return session


def _leave(session: Session) -> None:
    session.work_on(None)  # its task is not answered by leaving it
    session.close()
