"""A seller of one's own on the test network: it takes payments as it likes, and says of them what it likes."""

import base64
import json
import secrets

import httpx
from eth_account import Account
from eth_utils.address import to_checksum_address

from tests.support.merchant import make_guard
from tests.support.testnet import decoded
from x402guard import GuardedTransport, LocalSigner
from x402guard.kernel.typed_data import EXACT_PROXY
from x402guard.testing.chain_client import ChainClient, calldata

GAS = 600_000
PRICE = 100_000
SETTLE = "settle(((address,uint256),uint256,uint256),address,(address,uint256),bytes)"
TRANSFER = "transferWithAuthorization(address,address,uint256,uint256,uint256,bytes32,bytes)"
# Hands its calldata on to one address, and reverts where that does: what every batching or wrapping contract is inside.
FORWARDER = "0x60288060095f395ff3365f5f375f5f365f5f73{target}5af16026575f5ffd5b00"


class Wild:
    """Sells everything for $0.10, by `method`; `take` is given (payload, its own transaction sender) and returns the hash to show."""

    def __init__(self, net, tmp_path, method="eip3009", **guard):
        self.net, self.method = net, method
        self.seller = Account.create()
        net.fund(self.seller.address, wei=10**18)
        self.chain = ChainClient(net.rpc, net.chain_id)
        self.take = self.settle
        self.taken = []
        guard.setdefault("chains", {net.network: net.rpc})
        guard.setdefault("ledger", f"sqlite:///{tmp_path / 'spend.db'}")
        self.guard = make_guard(signer=LocalSigner.from_key(net.payer_key), **guard)
        self.session = self.guard.session("agent", budget="$1.00")
        self.http = httpx.Client(transport=GuardedTransport(self.session, httpx.MockTransport(self)))

    def __call__(self, request):
        header = request.headers.get("payment-signature")
        if header is None:
            return httpx.Response(402, headers={"PAYMENT-REQUIRED": _b64(self._terms(str(request.url)))}, json={})
        transaction = self.take(decoded(header)["payload"])
        receipt = {
            "success": True,
            "transaction": transaction,
            "network": self.net.network,
            "payer": self.net.payer,
        }
        return httpx.Response(200, headers={"PAYMENT-RESPONSE": _b64(receipt)}, json={})

    def _terms(self, url):
        extra = {"name": "USDC", "version": "2", "assetTransferMethod": self.method}
        offer = {
            "scheme": "exact",
            "network": self.net.network,
            "asset": self.net.token,
            "amount": str(PRICE),
            "payTo": self.seller.address,
            "maxTimeoutSeconds": 120,
            "extra": extra,
        }
        resource = {"url": url, "description": "", "mimeType": "application/json"}
        return {"x402Version": 2, "error": "pay", "resource": resource, "accepts": [offer]}

    def buy(self, path="/1"):
        return self.http.get(f"https://wild.example{path}")

    def settle(self, payload):
        """Take a payment as everybody does."""
        return self.send(*self.call_for(payload))

    def settle_wrapped(self, payload):
        """Take a payment by a contract of one's own."""
        to, data = self.call_for(payload)
        return self.send(self.forwarder(to), data)

    def call_for(self, payload):
        """(to, calldata) that takes a payment."""
        signature = bytes.fromhex(payload["signature"][2:])
        if "authorization" in payload:
            terms = payload["authorization"]
            values = [int(terms[name]) for name in ("value", "validAfter", "validBefore")]
            nonce = bytes.fromhex(terms["nonce"][2:])
            return self.net.token, calldata(TRANSFER, terms["from"], terms["to"], *values, nonce, signature)
        terms = payload["permit2Authorization"]
        permitted = terms["permitted"]
        permit = ((permitted["token"], int(permitted["amount"])), int(terms["nonce"]), int(terms["deadline"]))
        witness = (terms["witness"]["to"], int(terms["witness"]["validAfter"]))
        return EXACT_PROXY, calldata(SETTLE, permit, terms["from"], witness, signature)

    def forwarder(self, target):
        """Deploy what calls *target* with whatever it is called with; return its address."""
        code = FORWARDER.format(target=target[2:].lower())
        return to_checksum_address(self._confirmed("", code)["contractAddress"])

    def send(self, to, data, *, ok=True):
        """Send a transaction as the seller; return its hash."""
        receipt = self._confirmed(to, data)
        assert (receipt["status"] == "0x1") is ok
        return receipt["transactionHash"]

    def _confirmed(self, to, data):
        return self.chain.receipt(self.chain.send(self.seller, to, data, gas=GAS))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.http.close()
        self.guard.close()
        self.chain.close()


def any_hash():
    return "0x" + secrets.token_hex(32)


def _b64(value):
    return base64.b64encode(json.dumps(value).encode()).decode()
