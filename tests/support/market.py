"""A seller that keeps what it is given and takes it when a test says so, on a real chain, beside a guard with its books."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from decimal import Decimal

import anyio
import httpx
from eth_account import Account

from x402guard import AsyncGuardedTransport, Chain, Guard, GuardedTransport, LocalSigner, Policy
from x402guard.testing import FacilitatorClient, Testnet
from x402guard.testing.chain_client import ChainClient, calldata
from x402guard.testing.contracts import PERMIT2, TOKEN
from x402guard.testing.facilitator import _settlement
from x402guard.testing.payments import read_payment, read_terms
from x402guard.testing.settlers import SettlerUnavailable

DIME, CEILING, TAKEN = Decimal("0.10"), Decimal("0.05"), Decimal("0.012345")
PATHS = {"eip3009": ("GET", "/documents/1"), "permit2": ("GET", "/permit2/1"), "upto": ("POST", "/llm")}
AMOUNTS = {"eip3009": DIME, "permit2": DIME, "upto": CEILING}
INVALIDATE = "invalidateUnorderedNonces(uint256,uint256)"


@dataclass
class Seller:
    """A settler that settles as asked, or says something else and keeps the signature for later.

    ``says``: None settles; ``"lost"`` gives no answer; a dict is the receipt it shows, with nothing settled; or a function that
    returns one of these.
    """

    says: object = None
    kept: list = field(default_factory=list)
    client: object = None

    async def facilitator_address(self):
        return await self.client.facilitator_address()

    async def verify(self, payment, terms):
        return await self.client.verify(payment, terms)

    async def settle(self, payment, terms, *, path):
        self.kept.append((payment, terms))
        says = self.says() if callable(self.says) else self.says
        if says is None:
            return await self.client.settle(payment, terms, path=path)
        if says == "lost":
            raise SettlerUnavailable("nobody answered")
        return {"success": True, "transaction": "", "network": terms["network"], **says}

    async def aclose(self):
        await self.client.aclose()


FAILS = {"success": False, "errorReason": "unexpected_settle_error"}


@dataclass
class Market:
    """One network, one seller, one wallet and its guard."""

    net: Testnet
    seller: Seller
    chain: ChainClient
    ledger: str
    opened: ExitStack
    told: list = field(default_factory=list)

    def guard(self, *, chains=True, ledger=None, **more):
        if chains is True:
            chains = {self.net.network: self.net.rpc}
        more = {"background_checks": False, "policy": Policy(breaker=None, loop=None)} | more
        signer = LocalSigner.from_key(self.net.payer_key)
        return self.opened.enter_context(
            Guard(signer=signer, ledger=ledger or self.ledger, chains=chains, on_notice=self.told.append, **more)
        )

    def final_after(self, blocks, **more):
        """A guard for which a block is final when so many come after it."""
        return self.guard(chains={self.net.network: Chain(self.net.rpc, finality=blocks)}, **more)

    def ask(self, session, kind="upto", mode="sync", path=None, **more):
        method, usual = PATHS[kind]
        more |= {"json": {"text": "the motion"}} if method == "POST" else {}
        at = {"base_url": self.net.merchant.url, "timeout": 30}
        if mode == "sync":
            with httpx.Client(transport=GuardedTransport(session), **at) as http:
                return http.request(method, path or usual, **more)

        async def main():
            async with httpx.AsyncClient(transport=AsyncGuardedTransport(session), **at) as http:
                return await http.request(method, path or usual, **more)

        return anyio.run(main)

    def take(self, number=-1, amount=None):
        """Settle what the seller has kept; return the receipt."""
        payment, terms = self.seller.kept[number]
        terms = terms if amount is None else {**terms, "amount": str(amount)}
        question = {"x402Version": payment["x402Version"], "paymentPayload": payment, "paymentRequirements": terms}
        answer = httpx.post(self.net.facilitator + "/settle", json=question, timeout=30, trust_env=False).json()
        return answer

    def settling_call(self, number=-1, amount=None):
        """(contract, calldata) that settles what the seller has kept."""
        payment, terms = self.seller.kept[number]
        return _settlement(read_payment(payment), read_terms(2, terms), amount or int(terms["amount"]))

    def send(self, to, data, key=None):
        """Send a transaction, from the wallet unless a key is given; return its receipt."""
        account = Account.from_key(key or self.net.payer_key)
        return self.chain.receipt(self.chain.send(account, to, data, gas=300_000))

    def invalidate(self, nonce):
        """The wallet itself gives a Permit2 nonce up."""
        return self.send(PERMIT2, calldata(INVALIDATE, nonce >> 8, 1 << (nonce & 255)))

    def mine(self, blocks=1):
        for _ in range(blocks):
            self.net.engine.rpc("evm_mine", [])

    def pay_past_the_guard(self, amount, to="0x" + "44" * 20, token=TOKEN):
        """Move money with the same key and without the guard."""
        return self.send(token, calldata("transfer(address,uint256)", to, amount))["transactionHash"]


@contextmanager
def market(make_engine, ledger, **net):
    """Open one, and close all that belongs to it."""
    seller = Seller()
    with ExitStack() as opened:
        running = opened.enter_context(Testnet(make_engine=make_engine, settler=seller, **net))
        seller.client = FacilitatorClient(running.facilitator)
        chain = ChainClient(running.rpc, running.chain_id)
        opened.callback(chain.close)
        yield Market(running, seller, chain, ledger, opened)
