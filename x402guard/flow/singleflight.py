"""Reads chains for flows. "Could not read" is an answer, also if a user's reader raises."""

from __future__ import annotations

from queue import SimpleQueue

from x402guard.errors import ConfigError
from x402guard.flow.ports import (
    AccountFunds,
    ChainQuestion,
    ChainReader,
    Funds,
    HeadReader,
    HeadTime,
    HoldStatus,
    TokenFacts,
    TokenReader,
    TokenSays,
    TransferNonce,
    Transfers,
    WalletReader,
)
from x402guard.ledger.findings import Finding, Unreadable, proven

_Key = tuple[str, int, str]
_NO_CHAIN = Unreadable("no chain is configured")
_BROKEN_OFF = Unreadable("the read was broken off")


class _Flight:
    """One read under way, and those who wait for its answer."""

    __slots__ = ("_answer", "_waiting")

    def __init__(self) -> None:
        self._answer: Finding | None = None
        self._waiting: list[SimpleQueue[None]] = []

    def answer(self) -> Finding:
        """Return the answer, once it is there."""
        woken: SimpleQueue[None] = SimpleQueue()
        self._waiting.append(woken)  # first, so that an end that comes now wakes it
        if self._answer is None:
            woken.get()
        assert self._answer is not None, "an end has an answer"
        return self._answer

    def end(self, answer: Finding) -> Finding:
        """Hand the answer to all who wait. Ending again changes nothing."""
        self._answer = known = answer if self._answer is None else self._answer
        for woken in self._waiting:  # none is removed: Ctrl-C may come between, and the second end wakes it
            woken.put(None)
        return known


class SingleFlight:
    """Coalesces chain reads: concurrent questions about one hold share one request (single flight).

    Many payments may be refused at once for lack of budget, and each of them asks about the same claims.
    """

    def __init__(self) -> None:
        # No lock: every step is one operation on a dict with plain keys, which Ctrl-C cannot interrupt halfway.
        self._under_way: dict[_Key, _Flight] = {}

    def ask(
        self, question: ChainQuestion, chain: ChainReader | None
    ) -> Finding | Funds | TokenSays | Transfers | int | None:
        """Return the answer to one question. Raises only ``ConfigError``, if an endpoint serves another chain."""
        if isinstance(question, HoldStatus):
            return _NO_CHAIN if chain is None else self._read(question, chain)
        if isinstance(question, AccountFunds):
            return None if chain is None else _funds(question, chain)
        if isinstance(question, TokenFacts):
            return token_says(question, chain)
        if isinstance(question, HeadTime):
            return _head(question, chain)
        wallet: object = chain
        if not isinstance(wallet, WalletReader):
            return Unreadable("the configured chain reader cannot list what left the wallet")
        try:
            if isinstance(question, TransferNonce):
                return wallet.nonce_behind(question.network, question.token, question.payer, question.transfer)
            return wallet.transfers(
                question.network, question.token, question.payer, after=question.after, since_unix=question.since_unix
            )
        except Exception as error:  # noqa: BLE001 - a reader may be the user's
            return Unreadable(f"the chain reader failed: {type(error).__name__}")

    def _read(self, question: HoldStatus, chain: ChainReader) -> Finding:
        claim = question.hold.claim
        key = (question.hold.id, 0, "") if claim is None else (question.hold.id, claim.amount, claim.transaction)
        mine = _Flight()
        try:
            try:
                flight = self._under_way.setdefault(key, mine)
                return mine.end(_finding(question, chain)) if flight is mine else flight.answer()
            finally:
                self._end(key, mine)
        finally:
            # Ctrl-C may have interrupted that, and others would wait for ever. Ending twice is harmless.
            self._end(key, mine)

    def _end(self, key: _Key, mine: _Flight) -> None:
        if self._under_way.get(key) is mine:
            del self._under_way[key]
        mine.end(_BROKEN_OFF)


def _finding(question: HoldStatus, chain: ChainReader) -> Finding:
    try:
        return proven(question.hold.payment(), chain.read(question.hold))
    except Exception as error:  # noqa: BLE001 - see ask
        return Unreadable(f"the chain reader failed: {type(error).__name__}")


def token_says(question: TokenFacts, chain: object) -> TokenSays | None:
    """Return what a token's contract says, or None if *chain* cannot read it. Raises ``ConfigError`` as ``ask``."""
    try:
        if not isinstance(chain, TokenReader):
            return None
        return chain.token(question.network, question.token, signs=question.signs)
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001 - see ask
        return None


def _head(question: HeadTime, chain: object) -> int | None:
    try:
        return chain.head_unix(question.network) if isinstance(chain, HeadReader) else None
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001 - see ask
        return None


def _funds(question: AccountFunds, chain: ChainReader) -> Funds | None:
    try:
        return chain.funds(question.network, question.token, question.account)
    except ConfigError:
        raise  # it serves another chain: an error for the owner; nothing is signed yet
    except Exception:  # noqa: BLE001 - see ask
        return None
