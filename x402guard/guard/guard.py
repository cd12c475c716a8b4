"""``Guard``: wires the ledger, the key, the chains and the rules together, and opens sessions."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import anyio
import anyio.to_thread

from x402guard.assets import Asset, AssetRegistry
from x402guard.chain.reader import Chain, RpcChainReader
from x402guard.errors import ConfigError
from x402guard.flow.context import DEFAULT_BODY_BYTES, MAX_CLOCK_JUMP_S, Context
from x402guard.flow.drivers import run
from x402guard.flow.ports import ChainReader, Signer
from x402guard.flow.shell import Shell
from x402guard.guard.approvers import as_approver
from x402guard.guard.arguments import (
    check_kinds,
    each_asset,
    is_gone,
    kill_path,
    machine,
    meter_of,
    positive,
    read_networks,
)
from x402guard.guard.named_budget import NamedBudget, open_budget
from x402guard.guard.notices import NoticeSender, OnNotice, Webhook
from x402guard.guard.opening import Basis, in_a_thread, parse_limit, session_request
from x402guard.guard.rechecker import Rechecker
from x402guard.guard.session import Session, current_session
from x402guard.ledger.in_doubt import DEFAULT_FLIGHT_S, instance_mark
from x402guard.ledger.model import WALLET
from x402guard.ledger.sessions import PAYER_MARK, ensure_payer, ensure_wallet
from x402guard.ledger.store import LedgerStore
from x402guard.ledger.view import LedgerView, Scope
from x402guard.llm import Metering
from x402guard.money import Dollars, Nanos
from x402guard.policy import Policy
from x402guard.policy.checks import SoftLimits, check_flags
from x402guard.stores import DEFAULT_LEDGER, open_store
from x402guard.tools.token_budget import TokenBudget
from x402guard.x402.cancel import Cancellation, cancelled
from x402guard.x402.reconciliation import Reconciliation, reconcile_ledger
from x402guard.x402.settlement import may_fit_now, sweep


class Guard:
    """One wallet, one ledger. Everything that spends goes through a session of it.

    Args:
        signer: the key; None meters and never signs.
        ledger: URL of the books (``memory://``, ``sqlite:///spend.db``), or a store, which its owner closes.
        policy: the owner's rules.
        assets: tokens beside the built-in ones.
        chains: network → JSON-RPC URL, several of them, or a ``Chain``, for chain evidence; or a ``ChainReader``, which its owner
            closes.
        unsafe_no_chain: pay on real networks whose chain cannot be read; claims about real money stay unchecked.
        unsafe_trust_receipts: capture what an ``upto`` receipt claims where no chain can tell.
        budget: the wallet's own limit in dollars, over all sessions of this ledger; None takes what the ledger says.
        max_body_bytes: how much of a streaming request body is kept, so that a paid request can repeat it.
        flight_s: seconds after which a request without an answer is in doubt.
        metering: how LLM calls are held and priced.
        session_budget: the budget in dollars of a session that names none; without, such a session is an error.
        approver: who is asked where a rule wants a person: a function of an ``ApprovalRequest`` that returns True, ``"terminal"``,
            ``"queue"`` (answered by ``x402guard approvals``), or a list of these. None denies what would be asked.
        on_notice: a function that is told of soft limits and open breakers, each a ``Notice``.
        webhook: where the same is posted to.
        kill_file: a path; while there is a file, every run that wants to spend is latched.
        max_clock_jump_s: how far this machine's clock may run ahead of time passing, in seconds, before everything is refused.
        background_checks: ask the chain about claims in a thread of its own; without, ``reconcile`` and the refusals that a lack
            of budget would bring ask it alone.
        ledger_must_exist: refuse a ledger that is not there instead of making a new one, with a new budget.

    Raises ``ConfigError`` naming the setting, ``LedgerUnavailable`` where the books cannot be opened.
    """

    def __init__(
        self,
        *,
        signer: Signer | None = None,
        ledger: str | LedgerStore = DEFAULT_LEDGER,
        policy: Policy | None = None,
        assets: Iterable[Asset] = (),
        chains: Mapping[str, str | Sequence[str] | Chain] | ChainReader | None = None,
        unsafe_no_chain: bool = False,
        unsafe_trust_receipts: bool = False,
        budget: Dollars | None = None,
        max_body_bytes: int = DEFAULT_BODY_BYTES,
        flight_s: int = DEFAULT_FLIGHT_S,
        metering: Metering | None = None,
        session_budget: Dollars | None = None,
        approver: object = None,
        on_notice: OnNotice | None = None,
        webhook: Webhook | None = None,
        kill_file: Path | str | None = None,
        max_clock_jump_s: int = MAX_CLOCK_JUMP_S,
        background_checks: bool = True,
        ledger_must_exist: bool = False,
    ) -> None:
        check_kinds(signer, ledger, policy, chains)
        self.policy = policy or Policy()
        check_flags(
            background_checks=background_checks,
            ledger_must_exist=ledger_must_exist,
            unsafe_no_chain=unsafe_no_chain,
            unsafe_trust_receipts=unsafe_trust_receipts,
        )
        limit, stop = parse_limit(budget, field="budget"), kill_path(kill_file)
        self._notifier = NoticeSender(on_notice, webhook)
        as_approver(approver)  # wrong ones are said before anything is opened
        chain = RpcChainReader(chains) if isinstance(chains, Mapping) else chains
        networks = read_networks(chain, self.policy, unsafe_no_chain=unsafe_no_chain)
        self.instance = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.context = Context(
            session_id=WALLET,
            node_id=WALLET,
            instance=self.instance,
            policy=self.policy,
            payer=None if signer is None else signer.address,
            chains=networks,
            flight_ms=positive("flight_s", flight_s) * 1000,
            unsafe_no_chain=unsafe_no_chain,
            unsafe_trust_receipts=unsafe_trust_receipts,
            asks=approver is not None,
            max_clock_jump_ms=positive("max_clock_jump_s", max_clock_jump_s) * 1000,
            registry=AssetRegistry(each_asset(assets)),
            max_body_bytes=positive("max_body_bytes", max_body_bytes),
            sweep=may_fit_now if networks else None,
            session_budget=parse_limit(session_budget, field="session_budget"),
        )
        self.meter = meter_of(metering)
        # What was given is its owner's to close; others may share it.
        self._closed, self._owns = False, (isinstance(ledger, str), isinstance(chains, Mapping))
        store = open_store(ledger, must_exist=ledger_must_exist) if isinstance(ledger, str) else ledger
        shell = Shell(store, signer, chain, as_approver(approver, store), self._notifier, kill_file=stop)
        self._open(shell, limit, checks=background_checks and chain is not None)

    def _open(self, shell: Shell, limit: Nanos | None, *, checks: bool) -> None:
        self._rechecker = Rechecker(lambda: run(sweep(self.context), shell))
        self.shell = replace(shell, recheck=self._rechecker.nudge) if checks else shell
        try:
            self.context = replace(self.context, gone=self._enter_books(limit))
            if self.shell.signer is not None:
                self.shell.signer.bind(self.shell.store.hold)
            self._basis = Basis(self.shell, self.context, self.meter)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        owns_store, owns_chain = self._owns
        if owns_store:
            self.shell.store.close()
        if owns_chain and self.shell.chain is not None:
            self.shell.chain.close()

    def _enter_books(self, limit: Nanos | None) -> frozenset[str]:
        """Write down the wallet, whose it is, and that this instance runs; end instances whose process is gone."""
        store, host = self.shell.store, machine()
        rows = store.marks("instance", "")
        ended = {key for key, row in rows.items() if not row["ended"] and row.get("host") == host and is_gone(row)}
        mine = {"since_ms": store.now_ms(), "ended": False, "host": host, "pid": os.getpid()}

        def change(view: LedgerView) -> None:
            ensure_wallet(view, limit, self.policy.soft_parts)
            if self.context.payer is not None:
                ensure_payer(view, self.context.payer)
            view.put_mark(instance_mark(self.instance), mine)
            for key in ended:
                view.put_mark(instance_mark(key), {**rows[key], "ended": True})

        store.transact(Scope(nodes=(WALLET,), marks=(PAYER_MARK,), durable=True), change)
        return frozenset(ended | {key for key, row in rows.items() if row["ended"]})

    @classmethod
    def from_env(cls, path: Path | str | None = None) -> Guard:
        """Return a guard set up by ``X402GUARD_*`` variables and ``x402guard.toml``; see ``docs/reference/settings.md``.

        The private key is read once and removed from the environment, so that no child process inherits it. Raises
        ``ConfigError`` naming the setting.
        """
        from x402guard.guard.settings import load_settings

        return cls(**load_settings(None if path is None else Path(path)).guard_arguments())

    def session(
        self,
        name: str,
        *,
        budget: Dollars | None = None,
        tokens: TokenBudget | int | None = None,
        id: str | None = None,  # noqa: A002 - the user's word
        reserve: Dollars | None = None,
        soft_limit: SoftLimits | None = None,
    ) -> Session:
        """Open a session with a budget, or with ``id`` resume the one of that id with what it has left.

        ``budget`` is in dollars, ``tokens`` what its context may take (100,000 by default); those of a resumed session can be
        lowered and never raised. ``reserve`` (dollars, or a part such as ``"10%"``) is kept for LLM calls inside
        ``session.finalizing()``; ``soft_limit`` are the parts of the budget at which people are told, such as 0.9, in place of the
        policy's. Raises ``ConfigError``.
        """
        request = session_request(
            self._basis, WALLET, name, budget=budget, session_id=id, reserve=reserve, soft_limit=soft_limit
        )
        return Session.open(self._basis, request, None, tokens)

    def budget(
        self, name: str, limit: Dollars | None = None, *, per: str | None = None, tz: str = "UTC"
    ) -> NamedBudget:
        """Return the budget of a name, opened at first use: a parent of many sessions and budgets, in all processes.

        ``limit`` is in dollars, and can be lowered and never raised; with ``per`` (``day``, ``week``, ``month``) it begins anew by
        the calendar of ``tz``, such as ``Europe/Berlin``. Without either, it is the one that stands. Raises ``ConfigError``.
        """
        return open_budget(self._basis, WALLET, name, limit, per=per, tz=tz)

    def innermost(self) -> Session:
        """Return the innermost budget in context, for a client that many sessions share.

        Raises ``ConfigError`` where no session of this guard is in context.
        """
        inner = current_session()
        if inner is None or inner.shell is not self.shell:
            raise ConfigError(
                "GuardedTransport(guard): no session of this guard is in context; enter `with guard.session(…)`, and in a "
                "plain thread wrap the function with session.bind(…)"
            )
        return inner.innermost()

    def reconcile(self) -> Reconciliation:
        """Ask the chains about every payment that is not proven, and compare what left the wallet with what the books explain.

        What is found is written down: proven, expired, or corrected. Raises ``LedgerUnavailable``; a chain that cannot be read is
        named in the result.
        """
        return reconcile_ledger(self.shell, self.context)

    async def areconcile(self) -> Reconciliation:
        """The same, awaited."""
        return await in_a_thread(self.reconcile)

    def sweep(self) -> None:
        """Ask the chains once about the live payments longest unasked, at most sixteen, and write down what they say."""
        run(sweep(self.context), self.shell)

    def cancel(self, hold_id: str) -> Cancellation:
        """Sign the cancellation of a live EIP-3009 payment, for whoever pays the gas to send; see ``Cancellation``.

        The hold counts in full until the chain proves the cancellation. Raises ``ConfigError`` for a hold that cannot be cancelled,
        ``SignerError`` where there is no key.
        """
        return cancelled(self.shell, hold_id)

    def close(self) -> None:
        """End this instance and release the ledger. Live holds stay and go on counting. Closing twice is fine."""
        mark = {"since_ms": self.shell.store.now_ms(), "ended": True, "host": machine(), "pid": os.getpid()}
        if self._closed:
            return
        self._closed = True
        self._rechecker.close()
        try:
            scope = Scope(nodes=(WALLET,))
            self.shell.store.transact(scope, lambda view: view.put_mark(instance_mark(self.instance), mark))
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
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close)

    def __repr__(self) -> str:
        context = getattr(self, "context", None)  # a crash reporter may look at a guard that was never finished
        return "Guard(unfinished)" if context is None else f"Guard(payer={context.payer}, instance={self.instance!r})"
