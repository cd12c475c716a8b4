"""A merchant in a function, for tests that need no chain: true wire format, signatures recovered by eth-account."""

import base64
import json
import threading
from dataclasses import dataclass, field

import httpx

from x402guard import AsyncGuardedTransport, Guard, GuardedTransport, LocalSigner, Metering, Policy
from x402guard.frozen import replace

KEY = "0x" + "11" * 32
PAYER = LocalSigner.from_key(KEY).address
PAYEE = "0x209693Bc6afc0C5328bA36FaF03C514EF312287C"
OTHER_PAYEE = "0x857b06519E91e3A54538791bDbb0E22373e36b66"
FACILITATOR = "0x6C6D4539DE4FC56445d4Eff7Da256B40D6014233"
USDC = "0x036CbD53842c5426634e7929541eC2318f3dCF7e"
NETWORK = "eip155:84532"
URL = "https://courts.example/opinion/42"


def b64(value) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


def unb64(text: str):
    return json.loads(base64.b64decode(text))


def accept(amount=10_000, **changes) -> dict:
    """One exact EIP-3009 requirement of $0.01 by default, v2."""
    terms = {
        "scheme": "exact",
        "network": NETWORK,
        "asset": USDC,
        "amount": str(amount),
        "payTo": PAYEE,
        "maxTimeoutSeconds": 60,
        "extra": {"name": "USDC", "version": "2"},
    }
    terms.update(changes)
    return {key: value for key, value in terms.items() if value is not None}


def permit2(amount=10_000, **changes) -> dict:
    return accept(amount, extra={"name": "USDC", "version": "2", "assetTransferMethod": "permit2"}, **changes)


def upto(amount=50_000, facilitator=FACILITATOR, **changes) -> dict:
    extra = {"name": "USDC", "version": "2", "facilitatorAddress": facilitator}
    return accept(amount, scheme="upto", extra=extra, **changes)


def required(*accepts, url=URL, **changes) -> dict:
    return {
        "x402Version": 2,
        "error": "PAYMENT-SIGNATURE header is required",
        "resource": {"url": url, "description": "", "mimeType": "application/json"},
        "accepts": list(accepts) or [accept()],
        **changes,
    }


def required_v1(*accepts, url=URL) -> dict:
    entries = []
    for given in accepts or [accept(network="base-sepolia")]:
        entry = dict(given)
        entry["maxAmountRequired"] = entry.pop("amount")
        entries.append({**entry, "resource": url, "description": "", "mimeType": "application/json"})
    return {"x402Version": 1, "error": "X-PAYMENT header is required", "accepts": entries}


def offer_response(terms: dict) -> httpx.Response:
    if terms["x402Version"] == 1:
        return httpx.Response(402, json=terms)
    return httpx.Response(402, headers={"PAYMENT-REQUIRED": b64(terms)}, json={})


def open_terms(request):
    return required(url=str(request.url))


def receipt(success=True, transaction="0x" + "ab" * 32, network=NETWORK, **more) -> dict:
    return {"success": success, "transaction": transaction, "network": network, "payer": PAYER, **more}


def _fields(**types):
    return [{"name": name, "type": kind} for name, kind in types.items()]


_PLACE = {"chainId": "uint256", "verifyingContract": "address"}
TRANSFER = {
    "EIP712Domain": _fields(name="string", version="string", **_PLACE),
    "TransferWithAuthorization": _fields(
        **{"from": "address"},
        to="address",
        value="uint256",
        validAfter="uint256",
        validBefore="uint256",
        nonce="bytes32",
    ),
}
_PERMIT = {
    "EIP712Domain": _fields(name="string", **_PLACE),
    "PermitWitnessTransferFrom": _fields(
        permitted="TokenPermissions", spender="address", nonce="uint256", deadline="uint256", witness="Witness"
    ),
    "TokenPermissions": _fields(token="address", amount="uint256"),
}
_PERMIT2 = "0x000000000022D473030F116dDEE9F6B43aC78BA3"


def _recover(types, primary, domain, message, signature):
    from eth_account import Account  # half a second, which a process that is never paid need not take
    from eth_account.messages import encode_typed_data

    data = {"types": types, "primaryType": primary, "domain": {**domain, "chainId": 84532}, "message": message}
    return Account.recover_message(encode_typed_data(full_message=data), signature=signature)


def recover_payment(header: str):
    """(payer, nonce, amount, payee) of a payment header, from the signature itself and nothing else."""
    payload = unb64(header)["payload"]
    signature = payload["signature"]
    if "authorization" in payload:
        auth = payload["authorization"]
        numbers = {name: int(auth[name]) for name in ("value", "validAfter", "validBefore")}
        message = {**auth, **numbers, "nonce": bytes.fromhex(auth["nonce"][2:])}
        domain = {"name": "USDC", "version": "2", "verifyingContract": USDC}
        payer = _recover(TRANSFER, "TransferWithAuthorization", domain, message, signature)
        return payer, int(auth["nonce"], 16), int(auth["value"]), auth["to"]
    permit = payload["permit2Authorization"]
    amount = int(permit["permitted"]["amount"])
    witness = {name: int(value) if name == "validAfter" else value for name, value in permit["witness"].items()}
    kinds = {name: "uint256" if name == "validAfter" else "address" for name in witness}
    message = {
        "permitted": {"token": permit["permitted"]["token"], "amount": amount},
        "spender": permit["spender"],
        "nonce": int(permit["nonce"]),
        "deadline": int(permit["deadline"]),
        "witness": witness,
    }
    domain = {"name": "Permit2", "verifyingContract": _PERMIT2}
    types = {**_PERMIT, "Witness": _fields(**kinds)}
    payer = _recover(types, "PermitWitnessTransferFrom", domain, message, signature)
    return payer, int(permit["nonce"]), amount, permit["witness"]["to"]


@dataclass
class Shop:
    """Answers a 402 with ``terms``, and a paid request with 200 and a receipt, having recovered the signer.

    ``terms`` may be a function of the request; ``paid`` may replace the answer to a paid request (a function of request and
    shop, or an exception to raise).
    """

    terms: object = field(default_factory=required)
    paid: object = None
    seen: list = field(default_factory=list)
    payments: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        header = request.headers.get("payment-signature") or request.headers.get("x-payment")
        with self.lock:
            self.seen.append(request)
        if header is None:
            terms = self.terms(request) if callable(self.terms) else self.terms
            return terms if isinstance(terms, httpx.Response) else offer_response(terms)
        payer, nonce, amount, payee = recover_payment(header)
        assert payer == PAYER, "the signature does not recover to the payer"
        with self.lock:
            self.payments.append((nonce, amount, payee))
        if isinstance(self.paid, Exception):
            raise self.paid
        if callable(self.paid):
            return self.paid(request, self)
        name = "X-PAYMENT-RESPONSE" if "x-payment" in request.headers else "PAYMENT-RESPONSE"
        return httpx.Response(200, headers={name: b64(receipt())}, json={"paid": amount, "path": request.url.path})

    async def answer(self, request: httpx.Request) -> httpx.Response:
        return self(request)

    @property
    def nonces(self) -> set:
        return {nonce for nonce, _, _ in self.payments}

    @property
    def signed(self) -> int:
        """Atomic units over distinct nonces: what the payer could lose at most."""
        return sum({nonce: amount for nonce, amount, _ in self.payments}.values())


STANDARD_TIER = Metering(price_context={"service_tier": "default"})
"""Prices of the standard tier, so that the figures of a test are those of the price list."""


def make_guard(ledger="memory://", **more) -> Guard:
    more.setdefault("policy", Policy(breaker=None))  # tests of breakers set their own
    more.setdefault("signer", LocalSigner.from_key(KEY))
    more.setdefault("background_checks", False)  # tests say themselves when the chain is asked
    more.setdefault("metering", STANDARD_TIER)
    return Guard(ledger=ledger, **more)


def client(payer, shop, **more) -> httpx.Client:
    on_refusal = more.pop("on_refusal", "raise")
    return httpx.Client(transport=GuardedTransport(payer, httpx.MockTransport(shop), on_refusal=on_refusal), **more)


def believed(session, inner):
    """A client over a transport that is believed when it says that nothing left the machine, as the library's own are."""

    class Believing(GuardedTransport):
        library = replace(GuardedTransport.library, stock=(type(inner), httpx.AsyncHTTPTransport))

    return httpx.Client(transport=Believing(session, inner))


def async_client(payer, shop, **more) -> httpx.AsyncClient:
    on_refusal = more.pop("on_refusal", "raise")
    inner = httpx.MockTransport(shop.answer if isinstance(shop, Shop) else shop)
    return httpx.AsyncClient(transport=AsyncGuardedTransport(payer, inner, on_refusal=on_refusal), **more)
