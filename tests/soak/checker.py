"""What has to hold at every instant, computed from the chain, from what was signed, and from the ledger's file.

The promise: what the chain can take from the wallet ≤ what the ledger counts ≤ the limit; and nothing is signed that is not first in
the ledger.

Ledger and chain cannot be read at one moment. So a check reads in this order:
1. what the sellers were given, then what the agents' signers wrote down: the payments that are out by now, N. A signer writes after it has
   signed and before it hands the signature on, so what a seller has stands in the signers' file too.
2. the ledger. Every payment of N was signed before, so its hold has to be there.
3. the chain. For one payment, what it can still take or has taken only falls: from its ceiling to what settled, or to nothing once its
   deadline is past. What N can take at 3 is therefore at most what it could at 2; and if the ledger counted enough at 2, it counts
   enough for 3. Were the chain read first, a payment that died and was freed in between would look like a hole in the books.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from tests.soak.bookwatch import Books, BookWatch
from tests.soak.chainwatch import ChainWatch
from tests.soak.layout import Lines
from tests.soak.seller import LyingSeller
from x402guard.testing.payments import Permit2Payment

NANOS = 1_000
"""Nano-dollars in an atomic unit of a token of six decimals."""


@dataclass(frozen=True)
class Signed:
    """A payment that is out: at most `amount` atomic units, until a block's time says that it is dead."""

    amount: int
    until: int
    by_permit: bool

    def is_good(self, time: int) -> bool:
        """EIP-3009 is good while t < validBefore, Permit2 while t ≤ deadline."""
        return time <= self.until if self.by_permit else time < self.until


@dataclass
class Checker:
    """Compares. What went wrong stands in `failures`; `overshoot` is the most by which money was out of control, in nano-dollars."""

    sellers: list[LyingSeller]
    signers: Lines
    ledger: BookWatch
    chain: ChainWatch
    signed: dict[str, Signed] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    lost: set[str] = field(default_factory=set)
    twice: set[str] = field(default_factory=set)
    overshoot: int = 0
    checks: int = 0
    most_out: int = 0

    def check(self) -> Books:
        """Compare once, and return the ledger as it was."""
        given = {nonce: cheque for seller in self.sellers for nonce, cheque in list(seller.received.items())}
        for line in self.signers.fresh():
            self.signed[line["nonce"]] = Signed(line["amount"], line["until"], line["method"] == "permit2")
        for nonce, cheque in given.items():
            by_permit = isinstance(cheque.signed, Permit2Payment)
            self.signed.setdefault(nonce, Signed(cheque.amount, cheque.valid_until, by_permit))
        books = self.ledger.read()
        self.chain.look()
        self._compare(books)
        self.checks += 1
        return books

    def takeable(self, nonce: str, payment: Signed) -> int:
        """What the chain has let be taken of a payment, or can still; in nano-dollars."""
        moved = self.chain.settled.get(nonce)
        if moved:
            return sum(moved) * NANOS
        return payment.amount * NANOS if payment.is_good(self.chain.time) else 0

    def _compare(self, books: Books) -> None:
        exposed: defaultdict[str, int] = defaultdict(int)
        for nonce, payment in self.signed.items():
            takeable = self.takeable(nonce, payment)
            hold = books.holds.get(nonce)
            if hold is None:
                self.lost.add(nonce)
                self.failures[f"{nonce} is out, and stands in no book"] += 1
                exposed["wallet"] += takeable
                continue
            self._bound(f"{nonce} counts {hold.counted} ({hold.state}) of {takeable}", takeable - hold.counted)
            for node in books.path(hold.node):
                exposed[node] += takeable
        counted: defaultdict[str, int] = defaultdict(int)
        for hold in books.holds.values():
            for node in books.path(hold.node):
                counted[node] += hold.counted
        for name, node in books.nodes.items():
            self._bound(f"{name} counts {node.counted}, and {exposed[name]} can be taken", exposed[name] - node.counted)
            if counted[name] != node.counted:
                self.failures[f"{name} counts {node.counted}, and its holds {counted[name]}"] += 1
            if node.limit is not None:
                self._bound(f"{name} counts {node.counted}, its limit is {node.limit}", node.counted - node.limit)
        self.most_out = max(self.most_out, exposed["wallet"])
        for nonce, moved in self.chain.settled.items():
            if len(moved) > 1:
                self.twice.add(nonce)

    def _bound(self, what: str, past: int) -> None:
        if past > 0:
            self.failures[what] += 1
            self.overshoot = max(self.overshoot, past)

    def compare_at_the_end(self) -> Books:
        """Nothing can be taken any more: to the atomic unit, each payment counts what the chain shows of it."""
        books = self.check()
        for nonce, hold in books.holds.items():
            settled = sum(self.chain.settled.get(nonce, ())) * NANOS
            if hold.state == "held" or hold.counted != settled:
                self.failures[
                    f"at the end {nonce} is {hold.state}, counts {hold.counted}, and the chain shows {settled}"
                ] += 1
        for nonce in self.chain.settled.keys() - self.signed.keys():
            self.failures[f"{nonce} was settled, and nobody saw it signed"] += 1
        return books
