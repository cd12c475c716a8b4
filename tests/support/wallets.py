"""A chain on which a wallet's Transfers are what a test says."""

from dataclasses import dataclass, field

from tests.support.chain import MockChain
from tests.support.merchant import USDC
from x402guard.flow.ports import OutgoingTransfer, Transfers

TX, OTHER_TX = "0x" + "ab" * 32, "0x" + "cd" * 32
THIEF = "0x857b06519E91e3A54538791bDbb0E22373e36b66"


@dataclass
class Wallet(MockChain):
    """A chain that shows these Transfers, a block each from 1 on, and these findings by hold id."""

    outgoing: list = field(default_factory=list)
    nonces: dict = field(default_factory=dict)
    looks: list = field(default_factory=list)
    meanwhile: object = None
    at_most: int = 1000

    def transfers(self, network, token, payer, *, after, since_unix):
        self.looks.append((token, after))
        first = (after or 0) + 1
        mine = [(block, t) for block, (of, t) in enumerate(self.outgoing, 1) if of == token and block >= first]
        upto = min(len(self.outgoing), first + self.at_most - 1)
        found = Transfers(upto, tuple(t for block, t in mine if block <= upto), complete=upto == len(self.outgoing))
        if self.meanwhile is not None:
            self.meanwhile(self)
        return found

    def nonce_behind(self, network, token, payer, transfer):
        return self.nonces.get(transfer.transaction)


def leaves(amount, transaction=TX, payee=THIEF, token=None):
    """A Transfer out of the wallet, and its token's contract."""
    return token or USDC, OutgoingTransfer(transaction, 0, payee, amount)
