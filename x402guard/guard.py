"""``Guard``: wires the ledger, the key, the chains and the rules together, and opens sessions."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread

from x402guard.agent.context import TokenBudget
from x402guard.assets import TEST_NETWORKS, Asset, AssetRegistry
from x402guard.chain import RpcChainReader
from x402guard.drivers import Shell, run
from x402guard.errors import ConfigError
from x402guard.ledger.doubt import DEFAULT_FLIGHT_S, instance_mark
from x402guard.ledger.model import WALLET, NodeKind
from x402guard.ledger.sessions import PAYER_MARK, NodeRequest, ensure_payer, ensure_wallet
from x402guard.ledger.view import LedgerView, Scope
from x402guard.metering import Metering
from x402guard.metering.classify import Meter
from x402guard.metering.registered import RegisteredBook
from x402guard.money import Dollars, Nanos
from x402guard.openings import check_name, parse_limit
from x402guard.outgoing import DEFAULT_BODY_BYTES
from x402guard.policy import Policy
from x402guard.policy.settings import check_flag
from x402guard.ports import ChainReader, LedgerStore, Signer
from x402guard.price_file import open_book
from x402guard.purchase import Terms
from x402guard.session import Session, current_session
from x402guard.settlement import sweep
from x402guard.stores import DEFAULT_LEDGER, open_store
from x402guard.tokens import TiktokenCounter

__all__ = ["Guard"]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}", re.ASCII)


class Guard:
    """One wallet, one ledger. Everything that spends goes through a session of it.

    Args:
        signer: the key; None meters and never signs.
        ledger: URL of the books (``memory://``, ``sqlite:///spend.db``), or a store, which its owner closes.
        policy: the owner's rules.
        assets: tokens beside the built-in ones.
        chains: network → JSON-RPC URL, for chain evidence; or a ``ChainReader``, which its owner closes.
        unsafe_no_chain: pay on real networks whose chain cannot be read; claims about real money stay unchecked.
        unsafe_trust_receipts: capture what an ``upto`` receipt claims where no chain can tell.
        budget: the wallet's own limit in dollars, over all sessions of this ledger; None takes what the ledger says.
        max_body_bytes: how much of a streaming request body is kept, so that a paid request can repeat it.
        flight_s: seconds after which a request without an answer is in doubt.
        metering: how LLM calls are held and priced.

    Raises ``ConfigError`` naming the setting, ``LedgerUnavailable`` where the books cannot be opened.
    """

    def __init__(
        self,
        *,
        signer: Signer | None = None,
        ledger: str | LedgerStore = DEFAULT_LEDGER,
        policy: Policy | None = None,
        assets: Iterable[Asset] = (),
        chains: Mapping[str, str] | ChainReader | None = None,
        unsafe_no_chain: bool = False,
        unsafe_trust_receipts: bool = False,
        budget: Dollars | None = None,
        max_body_bytes: int = DEFAULT_BODY_BYTES,
        flight_s: int = DEFAULT_FLIGHT_S,
        metering: Metering | None = None,
    ) -> None:
        _check_kinds(signer, ledger, policy, chains)
        self.policy = policy or Policy()
        self.registry = AssetRegistry(_each_asset(assets))
        self.max_body_bytes = _positive("max_body_bytes", max_body_bytes)
        flight_ms = _positive("flight_s", flight_s) * 1000
        check_flag("unsafe_no_chain", unsafe_no_chain)
        check_flag("unsafe_trust_receipts", unsafe_trust_receipts)
        limit = parse_limit(budget, field="budget")
        chain = RpcChainReader(chains) if isinstance(chains, Mapping) else chains
        networks = frozenset() if chain is None else chain.networks
        _check_real_networks(self.policy, networks, unsafe_no_chain=unsafe_no_chain)
        self.instance = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self.terms = Terms(
            session_id=WALLET,
            node_id=WALLET,
            instance=self.instance,
            policy=self.policy,
            payer=None if signer is None else signer.address,
            chains=networks,
            flight_ms=flight_ms,
            unsafe_no_chain=unsafe_no_chain,
            unsafe_trust_receipts=unsafe_trust_receipts,
            meter=_meter(metering),
        )
        # What was given is its owner's to close; others may share it.
        self._closed = False
        self._owns = (isinstance(ledger, str), isinstance(chains, Mapping))
        store = open_store(ledger) if isinstance(ledger, str) else ledger
        self.shell = Shell(store, signer, chain)
        try:
            self._enter_books(limit)
            if signer is not None:
                signer.bind(store.hold)
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        owns_store, owns_chain = self._owns
        if owns_store:
            self.shell.store.close()
        if owns_chain and self.shell.chain is not None:
            self.shell.chain.close()

    def _enter_books(self, limit: Nanos | None) -> None:
        """Write down the wallet, whose it is, and that this instance runs; end instances whose process is gone."""
        store, host = self.shell.store, _machine()
        rows = store.marks("instance", "")
        ended = {key for key, row in rows.items() if not row["ended"] and row.get("host") == host and _is_gone(row)}
        mine = {"since_ms": store.now_ms(), "ended": False, "host": host, "pid": os.getpid()}

        def change(view: LedgerView) -> None:
            ensure_wallet(view, limit)
            if self.terms.payer is not None:
                ensure_payer(view, self.terms.payer)
            view.put_mark(instance_mark(self.instance), mine)
            for key in ended:
                view.put_mark(instance_mark(key), {**rows[key], "ended": True})

        store.transact(Scope(nodes=(WALLET,), marks=(PAYER_MARK,), durable=True), change)
        self.gone = frozenset(ended | {key for key, row in rows.items() if row["ended"]})

    @classmethod
    def from_env(cls, path: Path | str | None = None) -> Guard:
        """Return a guard set up by ``X402GUARD_*`` variables and ``x402guard.toml``; see ``docs/settings.md``.

        The private key is read once and removed from the environment, so that no child process inherits it. Raises
        ``ConfigError`` naming the setting.
        """
        from x402guard.config import load_settings

        return cls(**load_settings(None if path is None else Path(path)).guard_arguments())

    def session(
        self,
        name: str,
        *,
        budget: Dollars | None = None,
        tokens: TokenBudget | int | None = None,
        id: str | None = None,  # noqa: A002 - the user's word
    ) -> Session:
        """Open a session with a budget, or with ``id`` resume the one of that id with what it has left.

        ``budget`` is in dollars, ``tokens`` what its context may take (100,000 by default); those of a resumed session can be
        lowered and never raised. Raises ``ConfigError``.
        """
        check_name(name)
        if id is not None and (not isinstance(id, str) or not _ID.fullmatch(id) or id == WALLET):
            raise ConfigError(f"id: {id!r} cannot be a session's id; use letters, digits, and . _ : - (at most 100)")
        request = NodeRequest(
            id=id or f"s_{secrets.token_hex(8)}",
            parent_id=WALLET,
            kind=NodeKind.SESSION,
            name=name,
            limit=parse_limit(budget, field="budget"),
            opener=self.opener(),
            gone=self.gone,
        )
        return Session.open(self, request, None, tokens)

    def conversation_terms(self) -> Terms:
        """Return the terms of the session in context, for a client that many sessions share.

        Raises ``ConfigError`` where no session of this guard is in context.
        """
        inner = current_session()
        if inner is None or inner.shell is not self.shell:
            raise ConfigError(
                "GuardedTransport(guard): no session of this guard is in context; enter `with guard.session(…)`, and in a "
                "plain thread wrap the function with session.bind(…)"
            )
        return inner.conversation_terms()

    def sweep(self) -> None:
        """Ask the chains once about the live payments longest unasked, at most sixteen, and write down what they say."""
        run(sweep(self.terms), self.shell)

    def opener(self) -> str:
        """Return a token for one opening of a session by this guard."""
        return f"{self.instance}#{secrets.token_hex(4)}"

    def close(self) -> None:
        """End this instance and release the ledger. Live holds stay and go on counting. Closing twice is fine."""
        mark = {"since_ms": self.shell.store.now_ms(), "ended": True, "host": _machine(), "pid": os.getpid()}
        if self._closed:
            return
        self._closed = True
        try:
            scope = Scope(nodes=(WALLET,))
            self.shell.store.transact(scope, lambda view: view.put_mark(instance_mark(self.instance), mark))
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.close)

    def __repr__(self) -> str:
        terms = getattr(self, "terms", None)  # a crash reporter may look at a guard that was never finished
        return "Guard(unfinished)" if terms is None else f"Guard(payer={terms.payer}, instance={self.instance!r})"


def _meter(metering: Metering | None) -> Meter:
    if metering is not None and not isinstance(metering, Metering):
        raise ConfigError(
            f"metering: a {type(metering).__name__} is not a Metering; write Metering(unbounded_output=…)"
        )
    settings = metering or Metering()
    given = settings.prices
    book = (
        open_book(None if given is None else str(given)) if given is None or isinstance(given, (str, Path)) else given
    )
    return Meter(settings, RegisteredBook(book, owner=settings.models), settings.counter or TiktokenCounter())


def _check_kinds(signer: object, ledger: object, policy: object, chains: object) -> None:
    """Say which argument is of the wrong kind, before anything is opened; and never what it holds: it may be a key."""
    if signer is not None and (
        isinstance(signer, type) or not (hasattr(signer, "sign") and hasattr(signer, "address"))
    ):
        raise ConfigError("signer: not a signer; write LocalSigner.from_key(…), or None to meter without ever signing")
    if not isinstance(ledger, str) and not hasattr(ledger, "transact"):
        raise ConfigError(f"ledger: {ledger!r} is neither a ledger URL (sqlite:///spend.db) nor a store")
    if policy is not None and not isinstance(policy, Policy):
        raise ConfigError(f"policy: a {type(policy).__name__} is not a Policy; write Policy(per_payment_cap=…)")
    if chains is not None and not isinstance(chains, Mapping) and not hasattr(chains, "networks"):
        raise ConfigError("chains: neither a mapping from network to URL nor a ChainReader")


def _each_asset(assets: Iterable[Asset]) -> tuple[Asset, ...]:
    if not isinstance(assets, Iterable):
        raise ConfigError(f"assets: {assets!r} is not a list of Asset")
    listed = tuple(assets)
    for asset in listed:
        if not isinstance(asset, Asset):
            raise ConfigError(f"assets: {asset!r} is not an Asset; write Asset(network=…, address=…, …)")
    return listed


def _machine() -> str:
    """Return what tells this machine, and this container's process ids, from any other that shares the ledger's file."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()  # not Linux: the host name has to do


def _is_gone(row: Mapping[str, object]) -> bool:
    pid = row.get("pid")
    if not isinstance(pid, int) or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)  # signal 0 sends nothing: it asks whether the process exists
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _positive(name: str, value: int) -> int:
    if type(value) is not int or value <= 0:
        raise ConfigError(f"{name}: {value!r} is not a positive whole number")
    return value


def _check_real_networks(policy: Policy, readable: frozenset[str], *, unsafe_no_chain: bool) -> None:
    """Real money needs a chain to check claims against, or the owner's word that it does not."""
    if policy.networks is None or unsafe_no_chain:
        return
    blind = sorted(set(policy.networks) - TEST_NETWORKS - readable)
    if blind:
        raise ConfigError(
            f"chains: policy.networks allows {', '.join(blind[:3])}, where real money moves, and no RPC is configured; "
            f'add chains={{"{blind[0]}": "https://…"}}, or say unsafe_no_chain=True'
        )
