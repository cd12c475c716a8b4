"""Starts the test network as one object: chain, JSON-RPC, facilitator and merchant, with a funded payer."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from eth_account import Account
from eth_account.signers.local import LocalAccount
from eth_utils.address import to_checksum_address
from eth_utils.crypto import keccak

from x402guard.testing.chain_client import ChainClient, calldata
from x402guard.testing.contracts import CHAIN_ID, PERMIT2, TOKEN
from x402guard.testing.engine import Engine
from x402guard.testing.eth_tester_engine import EthTesterEngine
from x402guard.testing.facilitator import Facilitator
from x402guard.testing.merchant import Merchant
from x402guard.testing.routes import Route
from x402guard.testing.rpc import rpc_app
from x402guard.testing.server import Server
from x402guard.testing.settlers import FacilitatorClient, Settler

_GAS_MONEY_WEI = 10**21
_SETUP_GAS = 100_000
_TRANSFER = "0x" + keccak(text="Transfer(address,address,uint256)").hex()
_UNLIMITED = 2**256 - 1


@dataclass(frozen=True)
class Transfer:
    """A transfer of the dollar token on the chain; `amount` is in atomic units."""

    transaction: str
    block: int
    payee: str
    amount: int


class Testnet:
    """A running test network, as a context manager or until `close`.

    The payer gets `funds` atomic units (default: $1,000) and has approved Permit2 for all of it. By default each
    network creates a new payer key; never pass a key that holds real money. `routes`, `settler` and `payee` go to the
    merchant; without a settler, the merchant uses the network's own facilitator. `make_engine` is called with
    `chain_id` and `balances`, and returns the chain: `EthTesterEngine`, `AnvilEngine`, or one of those with more
    arguments bound.
    """

    __test__ = False  # pytest must not collect it because of its name

    def __init__(
        self,
        *,
        routes: Iterable[Route] | None = None,
        settler: Settler | None = None,
        payee: str | None = None,
        payer_key: str | None = None,
        funds: int = 1_000_000_000,
        chain_id: int = CHAIN_ID,
        make_engine: Callable[..., Engine] = EthTesterEngine,
    ) -> None:
        payer: LocalAccount = Account.from_key(payer_key) if payer_key else Account.create()
        collector: LocalAccount = Account.create()
        self._payer = payer
        self.payee = payee or str(Account.create().address)
        """The address that the merchant's payments go to."""
        self.chain_id = chain_id
        self.token = TOKEN
        self.permit2 = PERMIT2
        with ExitStack() as opened:
            gas_money = {str(account.address): _GAS_MONEY_WEI for account in (payer, collector)}
            self.engine = make_engine(chain_id=chain_id, balances=gas_money)
            """The chain itself, for methods that only one kind of engine has."""
            opened.callback(self.engine.close)
            self.rpc = opened.enter_context(Server(rpc_app(self.engine))).url
            """The URL of the chain's JSON-RPC."""
            self._chain = ChainClient(self.rpc, chain_id)
            opened.callback(self._chain.close)
            self._fund_payer(funds)
            facilitator = Facilitator(rpc_url=self.rpc, chain_id=chain_id, key=collector.key.hex())
            self.facilitator = opened.enter_context(facilitator).url
            """The URL of the facilitator."""
            self.facilitator_address = facilitator.address
            backend = settler or FacilitatorClient(self.facilitator)
            merchant = Merchant(settler=backend, payee=self.payee, routes=routes, chain_id=chain_id)
            self.merchant = opened.enter_context(merchant)
            """The merchant: its `url`, its `routes` (path templates by name) and its `payee`."""
            self._opened = opened.pop_all()

    def _fund_payer(self, funds: int) -> None:
        self.fund(self.payer, tokens=funds)
        self._confirm(TOKEN, calldata("approve(address,uint256)", PERMIT2, _UNLIMITED))

    def fund(self, address: str, *, tokens: int = 0, wei: int = 0) -> None:
        """Give `address` new tokens (in atomic units) and native coin of the payer (in wei), and wait for the receipts.

        Raises RuntimeError if a transaction reverts.
        """
        if tokens:
            self._confirm(TOKEN, calldata("mint(address,uint256)", address, tokens))
        if wei:
            self._confirm(address, "0x", wei=wei)

    def _confirm(self, to: str, data: str, *, wei: int = 0) -> None:
        sent = self._chain.send(self._payer, to, data, gas=_SETUP_GAS, wei=wei)
        if self._chain.receipt(sent)["status"] != "0x1":
            raise RuntimeError(f"the test network could not move its own funds: {sent} reverted")

    @property
    def network(self) -> str:
        """The chain in CAIP-2 form."""
        return f"eip155:{self.chain_id}"

    @property
    def payer(self) -> str:
        """The address of the funded account."""
        return str(self._payer.address)

    @property
    def payer_key(self) -> str:
        """The payer's private key as 0x and 64 hex digits. It is a test key without money on any real chain."""
        return "0x" + self._payer.key.hex().removeprefix("0x")

    def balance(self, address: str) -> int:
        """The present token balance of `address`, in atomic units."""
        return self._chain.read_uint(TOKEN, "balanceOf(address)", address)

    def transfers(self) -> list[Transfer]:
        """Every transfer of the token that left the payer's account, in order."""
        payer_topic = "0x" + self.payer[2:].lower().rjust(64, "0")
        query = {"address": TOKEN, "topics": [_TRANSFER, payer_topic], "fromBlock": "0x0", "toBlock": "latest"}
        return [
            Transfer(
                transaction=log["transactionHash"],
                block=int(log["blockNumber"], 16),
                payee=to_checksum_address("0x" + log["topics"][2][-40:]),
                amount=int(log["data"], 16),
            )
            for log in self._chain.rpc("eth_getLogs", query)
        ]

    def advance(self, seconds: int) -> None:
        """Move the chain's clock forward by whole `seconds`, and mine a block."""
        self.engine.advance(seconds)

    def describe(self) -> dict[str, Any]:
        """The data that a client needs to use this network, as a dict for JSON."""
        return {
            "rpc": self.rpc,
            "chain_id": self.chain_id,
            "token": self.token,
            "permit2": self.permit2,
            "facilitator": self.facilitator,
            "merchant": {"url": self.merchant.url, "routes": dict(self.merchant.routes)},
            "payer_key": self.payer_key,
        }

    def close(self) -> None:
        """Stop everything, the merchant first and the chain last. Idempotent."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.close()
