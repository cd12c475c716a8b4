"""What the chain itself says left the wallet: Transfer logs, and the nonce in the calldata that moved each."""

from collections import defaultdict

from eth_utils.crypto import keccak

from x402guard.testing import Testnet
from x402guard.testing.chain_client import ChainClient
from x402guard.testing.contracts import TOKEN

_TRANSFER = "0x" + keccak(text="Transfer(address,address,uint256)").hex()
_WORD = 64


class ChainWatch:
    """Reads blocks as they come. `settled` is nonce → the amounts (atomic units) of the Transfers that it moved.

    `time` is the unix time of the block up to which that is known.
    """

    def __init__(self, net: Testnet) -> None:
        self._rpc = ChainClient(net.rpc, net.chain_id)
        self._payer = "0x" + net.payer[2:].lower().rjust(_WORD, "0")
        self.settled: defaultdict[str, list[int]] = defaultdict(list)
        self.time = 0
        self._next = 0

    def look(self) -> None:
        """Read what is new, up to the block that is the latest now."""
        block = self._rpc.rpc("eth_getBlockByNumber", "latest", False)
        upto = int(block["number"], 16)
        query = {
            "address": TOKEN,
            "topics": [_TRANSFER, self._payer],
            "fromBlock": hex(self._next),
            "toBlock": hex(upto),
        }
        for log in self._rpc.rpc("eth_getLogs", query) if upto >= self._next else ():
            transaction = self._rpc.rpc("eth_getTransactionByHash", log["transactionHash"])
            self.settled[_nonce_of(transaction)].append(int(log["data"], 16))
        self._next, self.time = upto + 1, int(block["timestamp"], 16)

    @property
    def total(self) -> int:
        """Atomic units that have left the wallet."""
        return sum(sum(amounts) for amounts in self.settled.values())

    def close(self) -> None:
        """Close the connection."""
        self._rpc.close()


def _nonce_of(transaction: dict) -> str:
    """EIP-3009 has the nonce as its sixth argument, both Permit2 proxies as the third word of the permit."""
    words = transaction["input"].removeprefix("0x")[8:]
    at = (5 if transaction["to"].lower() == TOKEN.lower() else 2) * _WORD
    return "0x" + words[at : at + _WORD]
