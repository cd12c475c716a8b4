"""Asks a chain what flows want to know. "Could not read" is an answer, also from a reader of the user's that raises."""

from __future__ import annotations

from concurrent.futures import Future

from x402guard.errors import ConfigError
from x402guard.flow.effects import ReadChain, ReadFunds, ReadNonce, ReadTransfers
from x402guard.flow.ports import ChainReader, Funds, Transfers, WalletReader
from x402guard.ledger.evidence import Finding, Unreadable

ChainQuestion = ReadChain | ReadFunds | ReadTransfers | ReadNonce

_Key = tuple[str, int, str]

_NO_CHAIN = Unreadable("no chain is configured")


class Asking:
    """What a chain is being asked at the moment: who wants to know the same of a hold waits for the one answer.

    Many payments may be refused at once for lack of budget, and each of them wants to know about the same claims.
    """

    def __init__(self) -> None:
        # No lock: every step is one operation on a dict with plain keys, which Ctrl-C cannot leave half done.
        self._under_way: dict[_Key, Future[Finding]] = {}

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
        claim = effect.hold.claim
        key = (effect.hold.id, 0, "") if claim is None else (effect.hold.id, claim.amount, claim.transaction)
        mine: Future[Finding] = Future()
        try:
            try:
                answer = self._under_way.setdefault(key, mine)
                if answer is mine:
                    mine.set_result(_finding(effect, chain))
                return answer.result()
            finally:
                self._end(key, mine)
        finally:
            # Ctrl-C may have come in the midst of that, and would keep everybody waiting who asks the same. Twice is once.
            self._end(key, mine)

    def _end(self, key: _Key, mine: Future[Finding]) -> None:
        if self._under_way.get(key) is mine:
            del self._under_way[key]
        if not mine.done():
            mine.set_result(Unreadable("the read was broken off"))


def _finding(effect: ReadChain, chain: ChainReader) -> Finding:
    try:
        return chain.read(effect.hold)
    except Exception as error:  # noqa: BLE001 - see ask
        return Unreadable(f"the chain reader failed: {type(error).__name__}")


def _funds(effect: ReadFunds, chain: ChainReader) -> Funds | None:
    try:
        return chain.funds(effect.network, effect.token, effect.owner)
    except ConfigError:
        raise  # it serves another chain: the owner has to know, and nothing is signed yet
    except Exception:  # noqa: BLE001 - see ask
        return None
