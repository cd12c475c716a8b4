"""Asks the owner before a ledger is used by a clock that is days ahead of it, and may be wrong.

A clock that is wrong ends holds, starts the windows of budgets again, and writes times that the right clock cannot pass.
"""

from __future__ import annotations

from typing import Final

from x402guard.errors import ConfigError
from x402guard.flow.ports import ChainReader, HeadReader
from x402guard.kernel.rows import WALLET, HoldKind
from x402guard.ledger.owner import CLOCK_MARK, MOST_AHEAD_MS, accept_time, windows_ahead
from x402guard.ledger.store import LedgerStore, MayBeAway
from x402guard.ledger.view import LedgerView, Scope
from x402guard.policy.stamps import bring_back, stamps_ahead

_RIGHT_MS: Final = 3_600_000


def refuse_strange_clock(store: LedgerStore, chain: ChainReader | None, boot: str) -> None:
    """Raise ``ConfigError`` if the clock is over a day ahead of the ledger's last entry, and nothing shows that it is right.

    It is right if the steady clock of this *boot* of the machine agrees, or the head of a chain. Nothing is asked for a
    ledger without live holds and without spending in a window, for which the time makes no difference.
    """
    now_ms = store.now_ms()
    wallet = next(iter(store.path(WALLET)), None)
    if wallet is None:
        return
    whose = "the clock of the ledger's server" if isinstance(store, MayBeAway) else "this machine's clock"
    ahead_ms = now_ms - max(wallet.last_ms, _accepted_ms(store))
    if ahead_ms > MOST_AHEAD_MS and not _is_right(store, chain, boot):
        raise _asked(f"{whose} is {ahead_ms // 3_600_000} hours ahead of the ledger's last entry")


def refuse_strange_server(store: LedgerStore, chain: ChainReader | None, boot: str) -> None:
    """Raise ``ConfigError`` if the ledger's server is over an hour ahead of this machine, and nothing shows that it is right.

    Only who pays asks: a machine on which the owner looks, or stops agents, may have the wrong clock itself.
    """
    ahead_ms = store.now_ms() - store.here_ms() if isinstance(store, MayBeAway) else 0
    if ahead_ms <= _RIGHT_MS or store.now_ms() - _accepted_ms(store) <= MOST_AHEAD_MS:
        return
    if not _is_right(store, chain, boot):
        raise _asked(f"the clock of the ledger's server is {ahead_ms / 3_600_000:.1f} hours ahead of this machine's")


def accept_clock(store: LedgerStore, by: str) -> None:
    """Take the clock as right for *by*, the owner: times in the future, of budgets and of guards, become the present."""
    keys, ahead = stamps_ahead(store), windows_ahead(store)
    holds = tuple(store.unsettled(store.now_ms() // 1000))
    nodes = tuple(node.id for node in store.nodes())
    scope = Scope(nodes=nodes, holds=holds, marks=(CLOCK_MARK, *keys), durable=True)

    def change(view: LedgerView) -> None:
        accept_time(view, by, ahead, holds)
        bring_back(view, keys)

    store.transact(scope, change)


def _asked(strange: str) -> ConfigError:
    return ConfigError(
        f"clock: {strange}, and nothing shows that it is right; set it, or, if it is right, run: x402guard ledger clock --accept"
    )


def _accepted_ms(store: LedgerStore) -> int:
    return int(store.marks(*CLOCK_MARK).get(CLOCK_MARK[1], {"at_ms": 0})["at_ms"])


def _is_right(store: LedgerStore, chain: ChainReader | None, boot: str) -> bool:
    return _agrees(store, boot) or _head_agrees(chain, store.now_ms()) or not _matters(store)


def _agrees(store: LedgerStore, boot: str) -> bool:
    """True if the steady clock shows that the time passed since another guard opened or closed on this boot."""
    known = [row for row in store.marks("instance", "").values() if boot and row.get("boot") == boot]
    if not known:
        return False
    last = max(known, key=lambda row: int(row["steady_ms"]))
    expected_ms = int(last["since_ms"]) + store.steady_ms() - int(last["steady_ms"])
    return abs(store.now_ms() - expected_ms) <= _RIGHT_MS


def _head_agrees(chain: object, now_ms: int) -> bool:
    if not isinstance(chain, HeadReader):
        return False
    heads = (chain.head_unix(network) for network in sorted(chain.networks))
    return any(head is not None and abs(head * 1000 - now_ms) <= _RIGHT_MS for head in heads)


def _matters(store: LedgerStore) -> bool:
    if any(hold.kind is not HoldKind.TOKENS for hold in store.outstanding()):
        return True
    return any(node.window is not None and node.counted for node in store.nodes())
