"""``Guard``: wires the ledger, the key, the chains and the rules together, and opens sessions."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

from x402guard.assets import TEST_NETWORKS, Asset, AssetRegistry
from x402guard.chain import RpcChainReader
from x402guard.drivers import Shell, run
from x402guard.errors import ConfigError
from x402guard.ledger.doubt import instance_mark
from x402guard.ledger.model import WALLET, NodeKind
from x402guard.ledger.sessions import NodeRequest, ensure_wallet
from x402guard.ledger.view import LedgerView, Scope
from x402guard.money import Dollars
from x402guard.policy import Policy
from x402guard.ports import ChainReader, LedgerStore, Signer
from x402guard.purchase import Terms
from x402guard.session import Session, current_session, parse_limit
from x402guard.settlement import sweep
from x402guard.stores import open_store

__all__ = ["DEFAULT_LEDGER", "Guard"]

DEFAULT_LEDGER = "sqlite:///x402guard.db"

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}", re.ASCII)


class Guard:
    """One wallet, one ledger. Everything that spends goes through a session of it.

    Args:
        signer: the key; None meters and never signs.
        ledger: URL of the books (``memory://``, ``sqlite:///spend.db``), or a store.
        policy: the owner's rules.
        assets: tokens beside the built-in ones.
        chains: network → JSON-RPC URL, for chain evidence; or a ``ChainReader``.
        unsafe_no_chain: pay on real networks whose chain cannot be read; claims about real money stay unchecked.
        unsafe_trust_receipts: capture what an ``upto`` receipt claims where no chain can tell.
        budget: the wallet's own limit in dollars, over all sessions of this ledger; None takes what the ledger says.
        max_body_bytes: how much of a streaming request body is kept, so that a paid request can repeat it.
        flight_s: seconds after which a request without an answer is in doubt.

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
        max_body_bytes: int = 10_485_760,
        flight_s: int = 30,
    ) -> None:
        self.policy = policy or Policy()
        self.registry = AssetRegistry(assets)
        self.max_body_bytes = _positive("max_body_bytes", max_body_bytes)
        limit = parse_limit(budget, field="budget")
        chain = RpcChainReader(chains) if isinstance(chains, Mapping) else chains
        networks = frozenset() if chain is None else chain.networks
        _check_real_networks(self.policy, networks, unsafe_no_chain=unsafe_no_chain)
        store = open_store(ledger) if isinstance(ledger, str) else ledger
        self.shell = Shell(store, signer, chain)
        self.instance = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._openers = count(1)
        self.terms = Terms(
            session_id=WALLET,
            session_name=WALLET,
            node_id=WALLET,
            instance=self.instance,
            policy=self.policy,
            payer=None if signer is None else signer.address,
            chains=networks,
            flight_ms=_positive("flight_s", flight_s) * 1000,
            unsafe_no_chain=unsafe_no_chain,
            unsafe_trust_receipts=unsafe_trust_receipts,
        )
        try:
            store.transact(Scope(nodes=(WALLET,), durable=True), lambda view: ensure_wallet(view, limit))
            self._register()
            if signer is not None:
                signer.bind(store.hold)
        except BaseException:
            store.close()
            raise

    @classmethod
    def from_env(cls, path: Path | None = None) -> Guard:
        """Return a guard set up by ``X402GUARD_*`` variables and ``x402guard.toml``; see ``docs/settings.md``.

        The private key is read once and removed from the environment, so that no child process inherits it. Raises
        ``ConfigError`` naming the setting.
        """
        from x402guard.config import load_settings

        return cls(**load_settings(path).guard_arguments())

    def session(self, name: str, *, budget: Dollars | None = None, id: str | None = None) -> Session:  # noqa: A002 - the user's word
        """Open a session with a budget, or with ``id`` resume the one of that id with what it has left.

        ``budget`` is in dollars; a resumed session's can be lowered and never raised. Raises ``ConfigError``.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError("name: a session needs a name, such as 'court-research'")
        if id is not None and (not _ID.fullmatch(id) or id == WALLET):
            raise ConfigError(f"id: {id!r} cannot be a session's id; use letters, digits, and . _ : - (at most 100)")
        request = NodeRequest(
            id=id or f"s_{secrets.token_hex(8)}",
            parent_id=WALLET,
            kind=NodeKind.SESSION,
            name=name,
            limit=parse_limit(budget, field="budget"),
            opener=self.opener(),
        )
        return Session.open(self, request, None)

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
        """Ask the chains once about the live payments longest unasked, at most 32, and write down what they say."""
        run(sweep(self.terms), self.shell)

    def opener(self) -> str:
        """Return a token for one opening of a session by this guard."""
        return f"{self.instance}#{next(self._openers)}"

    def _register(self) -> None:
        """Write down that this instance runs, and that those of dead processes on this machine do not any more."""
        store, host = self.shell.store, socket.gethostname()
        rows = store.marks("instance", "")
        gone = [key for key, row in rows.items() if not row["ended"] and row.get("host") == host and _is_gone(row)]
        mine = {"beat_ms": store.now_ms(), "ended": False, "host": host, "pid": os.getpid()}

        def change(view: LedgerView) -> None:
            view.put_mark(instance_mark(self.instance), mine)
            for key in gone:
                view.put_mark(instance_mark(key), {**rows[key], "ended": True})

        store.transact(Scope(nodes=(WALLET,)), change)

    def close(self) -> None:
        """End this instance and release the ledger. Live holds stay and go on counting. Closing twice is fine."""
        mark = {"beat_ms": self.shell.store.now_ms(), "ended": True, "host": socket.gethostname(), "pid": os.getpid()}
        if not self._closed:
            self._closed = True
            self.shell.store.transact(
                Scope(nodes=(WALLET,)), lambda view: view.put_mark(instance_mark(self.instance), mark)
            )
            self.shell.store.close()
            if self.shell.chain is not None:
                self.shell.chain.close()

    _closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Guard(payer={self.terms.payer}, instance={self.instance!r})"


def _is_gone(row: Mapping[str, object]) -> bool:
    pid = row.get("pid")
    if not isinstance(pid, int) or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)  # signal 0 sends nothing: it asks whether the process exists
    except ProcessLookupError:
        return True
    except PermissionError:
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
