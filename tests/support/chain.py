"""A chain that says what it is told to."""

from dataclasses import dataclass, field

from tests.support.merchant import NETWORK
from x402guard.flow.ports import Funds
from x402guard.ledger.findings import Unreadable


@dataclass
class MockChain:
    """A ``ChainReader`` whose findings are set by hold id, or by a function of the hold."""

    finding: object = None
    networks: frozenset = frozenset({NETWORK})
    asked: list = field(default_factory=list)

    def read(self, hold):
        self.asked.append(hold.id)
        found = self.finding(hold) if callable(self.finding) else self.finding
        return Unreadable("nothing is known") if found is None else found

    def funds(self, network, token, owner):
        return Funds(10**12, 10**12)

    @property
    def reads(self) -> int:
        return len(self.asked)

    def close(self) -> None:
        pass
