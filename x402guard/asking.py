"""Asks a chain what flows want to know. "Could not read" is an answer, also from a reader of the user's that raises."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from x402guard.effects import ReadChain, ReadFunds, ReadNonce, ReadTransfers
from x402guard.errors import ConfigError
from x402guard.ledger.evidence import Finding, Unreadable
from x402guard.ledger.model import Claim
from x402guard.ports import ChainReader, Funds, Transfers, WalletReader

__all__ = ["Asking", "ChainQuestion"]

ChainQuestion = ReadChain | ReadFunds | ReadTransfers | ReadNonce

_NO_CHAIN = Unreadable("no chain is configured")


class Asking:
    """What a chain is being asked at the moment: who wants to know the same of a hold waits for the one answer.

    Many payments may be refused at once for lack of budget, and each of them wants to know about the same claims.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[tuple[str, Claim | None], Future[Finding]] = {}

    def ask(self, effect: ChainQuestion, chain: ChainReader | None) -> Finding | Funds | Transfers | int | None:
        """Return the answer to one question. Raises ``ConfigError`` alone: where an endpoint serves another chain."""
        if isinstance(effect, ReadChain):
            return _NO_CHAIN if chain is None else self._read(effect, chain)
        if isinstance(effect, ReadFunds):
            return None if chain is None else _funds(effect, chain)
        wallet: object = chain
        if not isinstance(wallet, WalletReader):
            return Unreadable("what is configured for the chain cannot say what left the wallet")
        try:
            if isinstance(effect, ReadNonce):
                return wallet.nonce_behind(effect.network, effect.token, effect.payer, effect.transfer)
            return wallet.transfers(
                effect.network, effect.token, effect.payer, after=effect.after, since_unix=effect.since_unix
            )
        except Exception as error:  # noqa: BLE001 - a reader may be the user's
            return Unreadable(f"the chain reader failed: {type(error).__name__}")

    def _read(self, effect: ReadChain, chain: ChainReader) -> Finding:
        key = (effect.hold.id, effect.hold.claim)
        with self._lock:
            answer = self._under_way.get(key)
            mine = answer is None
            if answer is None:
                answer = self._under_way[key] = Future()
        if not mine:
            return answer.result()
        finding: Finding = Unreadable("the read was broken off")
        try:
            finding = chain.read(effect.hold)
        except Exception as error:  # noqa: BLE001 - see ask
            finding = Unreadable(f"the chain reader failed: {type(error).__name__}")
        finally:
            with self._lock:
                del self._under_way[key]
            answer.set_result(finding)
        return finding


def _funds(effect: ReadFunds, chain: ChainReader) -> Funds | None:
    try:
        return chain.funds(effect.network, effect.token, effect.owner)
    except ConfigError:
        raise  # it serves another chain: the owner has to know, and nothing is signed yet
    except Exception:  # noqa: BLE001 - see ask
        return None
