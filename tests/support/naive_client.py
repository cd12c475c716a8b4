"""The control: an x402 client as one writes it on a first afternoon. Whatever holds for ours has to fail for it.

It signs what the 402 says, with eth-account; signs anew when an answer is lost or bad; follows redirects with all its
headers; fills in every extension that it is asked for; believes every number; and keeps no books.
"""

import base64
import json
import secrets
import time

import httpx
from eth_account import Account

from x402guard.testing.payments import Eip3009Payment, Permit2Payment, Terms, typed_data

MOST_TRIES = 30
PROXIES = {
    "exact": "0x402085c248EeA27D92E8b30b2C58ed07f9E20001",
    "upto": "0x4020A4f3b7b90ccA423B9fabCc0CE57C6C240002",
}
CHAINS = {"base-sepolia": 84532, "base": 8453}


class NaiveTransport(httpx.BaseTransport):
    """Pays whoever asks. ``spent`` is dollars, as the servers state them."""

    def __init__(self, key):
        self.account = Account.from_key(key)
        self.inner = httpx.HTTPTransport(retries=0)
        self.spent = 0.0

    def close(self):
        self.inner.close()

    def handle_request(self, request):
        body, url, header = request.read(), request.url, {}
        for _ in range(MOST_TRIES):
            headers = {**{k: v for k, v in request.headers.items() if k != "host"}, **header}
            sending = httpx.Request(request.method, url, headers=headers, content=body)
            sending.extensions = request.extensions
            try:
                response = self.inner.handle_request(sending)
                response.read()
            except httpx.TransportError:
                header = {}
                continue
            if response.status_code == 402:
                header = self.pay(response)
            elif response.is_redirect:
                url = url.join(response.headers["location"])
            elif response.status_code >= 500:
                header = {}
            else:
                self.count(response)
                return response
        return response

    def count(self, response):
        """An LLM's answer costs what its usage says, at ten dollars a million tokens."""
        if response.content:
            usage = response.json().get("usage", {})
            self.spent += usage.get("total_tokens", 0) / 100_000

    def pay(self, response):
        terms = self.read(response)
        version, offer = terms["x402Version"], terms["accepts"][0]
        amount = offer["maxAmountRequired"] if version == 1 else offer["amount"]
        network = offer["network"]
        chain_id = CHAINS.get(network) or int(network.partition(":")[2])
        terms_of = Terms(
            version, offer["scheme"], network, generous(amount), offer["asset"], offer["payTo"], offer["extra"]
        )
        payload = self.sign(terms_of, chain_id, offer["maxTimeoutSeconds"])
        if version == 1:
            message = {"x402Version": 1, "scheme": offer["scheme"], "network": network, "payload": payload}
            return {"X-PAYMENT": encoded(message)}
        message = {"x402Version": 2, "accepted": offer, "payload": payload, "extensions": terms.get("extensions", {})}
        for extension in message["extensions"].values():
            if "signature" in str(extension):
                extension["info"] = {**extension["info"], "amount": str(2**256 - 1), "signature": self.allowance()}
        return {"PAYMENT-SIGNATURE": encoded(message)}

    @staticmethod
    def read(response):
        """The first terms there are, wherever they stand."""
        header = response.headers.get_list("payment-required")
        if not header:
            return response.json()
        return json.loads(base64.b64decode(header[0].split(",")[0]))

    def allowance(self):
        """Whatever the extension wants signed."""
        return self.account.unsafe_sign_hash(secrets.token_bytes(32)).signature.hex()

    def sign(self, terms, chain_id, lifetime_s):
        until = int(time.time()) + lifetime_s
        by_permit2 = terms.scheme == "upto" or terms.extra.get("assetTransferMethod") == "permit2"
        make = self.permit if by_permit2 else self.authorization
        payment, written, name = make(terms, until)
        message = typed_data(payment, terms, chain_id)
        signature = Account.sign_typed_data(self.account.key, full_message=message).signature
        return {name: written, "signature": "0x" + signature.hex().removeprefix("0x")}

    def authorization(self, terms, until):
        nonce = secrets.token_bytes(32)
        payment = Eip3009Payment(self.account.address, terms.pay_to, terms.amount, 0, until, nonce, b"")
        written = {
            "from": payment.payer, "to": payment.payee, "value": str(payment.value), "validAfter": "0",
            "validBefore": str(until), "nonce": "0x" + nonce.hex(),
        }  # fmt: skip
        return payment, written, "authorization"

    def permit(self, terms, until):
        spender, nonce = PROXIES[terms.scheme], secrets.randbits(256)
        facilitator = terms.extra.get("facilitatorAddress")
        payment = Permit2Payment(
            self.account.address, terms.pay_to, terms.asset, terms.amount, spender, nonce, 0, until, facilitator, b""
        )
        witness = {"to": terms.pay_to, "validAfter": "0"} | ({"facilitator": facilitator} if facilitator else {})
        written = {
            "from": payment.payer, "permitted": {"token": terms.asset, "amount": str(terms.amount)}, "spender": spender,
            "nonce": str(nonce), "deadline": str(until), "witness": witness,
        }  # fmt: skip
        return payment, written, "permit2Authorization"


def generous(amount):
    """Whatever can be read as a number."""
    return int(amount, 16) if amount.startswith("0x") else int(float(amount))


def encoded(message):
    return base64.b64encode(json.dumps(message).encode()).decode()
