"""Verifies and settles x402 payments on a chain over JSON-RPC, with its own key.

It supports protocol versions 1 and 2, and the schemes `exact` (EIP-3009 or Permit2) and `upto` (version 2 only).
"""

import json
import time
from collections.abc import Callable

from eth_account import Account
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from x402guard.testing.chain_client import ChainClient, calldata, selector
from x402guard.testing.contracts import PERMIT2
from x402guard.testing.engine import JSON, RpcError
from x402guard.testing.payments import (
    V1_NETWORKS,
    Eip3009Payment,
    Permit2Payment,
    Refused,
    SignedPayment,
    Terms,
    check_payment,
    check_signature,
    read_payment,
    read_terms,
)
from x402guard.testing.server import Hosted

_SETTLE_GAS = 300_000
_SIGNATURE_BYTES = 65

_AUTHORIZED = "transferWithAuthorization(address,address,uint256,uint256,uint256,bytes32,"
_SETTLE_EXACT = "settle(((address,uint256),uint256,uint256),address,(address,uint256),bytes)"
_SETTLE_UPTO = "settle(((address,uint256),uint256,uint256),uint256,address,(address,address,uint256),bytes)"

# The contracts' revert reasons: text for the token, error selectors for the others.
_REVERTS = {
    "authorization is used": "invalid_exact_evm_nonce_already_used",
    "authorization is expired": "invalid_exact_evm_payload_authorization_valid_before",
    "authorization is not yet valid": "invalid_exact_evm_payload_authorization_valid_after",
    "invalid signature": "invalid_exact_evm_payload_signature",
    "exceeds balance": "insufficient_funds",
    "exceeds allowance": "permit2_allowance_required",
    selector("InvalidNonce()"): "permit2_invalid_nonce",
    selector("InvalidSigner()"): "invalid_permit2_signature",
    selector("SignatureExpired(uint256)"): "permit2_deadline_expired",
    selector("PaymentTooEarly()"): "permit2_not_yet_valid",
    selector("UnauthorizedFacilitator()"): "upto_unauthorized_facilitator",
}


class _Reverted(Exception):  # noqa: N818 - an outcome on the chain, not an error of this code
    """A settlement whose simulation succeeded and whose transaction reverted."""

    def __init__(self, transaction: str) -> None:
        super().__init__(transaction)
        self.transaction = transaction


class Facilitator(Hosted):
    """Verifies and settles payments on the chain behind `rpc_url`, paying the gas from `key`.

    As an ASGI application (`app`) it answers POST /verify, POST /settle and GET /supported. The methods of the same
    names may be called from any thread, and several settlements may run at once.
    """

    def __init__(self, *, rpc_url: str, chain_id: int, key: str) -> None:
        self._account = Account.from_key(key)
        self._chain = ChainClient(rpc_url, chain_id)
        self._chain_id = chain_id
        self.app = Starlette(
            routes=[
                Route("/verify", self._endpoint(self.verify), methods=["POST"]),
                Route("/settle", self._endpoint(self.settle), methods=["POST"]),
                Route("/supported", self._answer_supported, methods=["GET"]),
            ]
        )

    @property
    def address(self) -> str:
        """The address that sends the settlements; `upto` payments must name it."""
        return str(self._account.address)

    def supported(self) -> JSON:
        """The kinds of payment that this facilitator settles, in the shape of GET /supported."""
        network = f"eip155:{self._chain_id}"
        kinds: list[JSON] = [
            {"x402Version": 2, "scheme": "exact", "network": network},
            {"x402Version": 2, "scheme": "upto", "network": network, "extra": {"facilitatorAddress": self.address}},
        ]
        if self._chain_id in V1_NETWORKS:
            kinds.append({"x402Version": 1, "scheme": "exact", "network": V1_NETWORKS[self._chain_id]})
        return {"kinds": kinds, "extensions": [], "signers": {"eip155:*": [self.address]}}

    def verify(self, payment: JSON, requirements: JSON) -> JSON:
        """Return whether a payment could be settled now, in the shape of POST /verify. Sends no transaction."""
        known = {}
        try:
            terms, signed = self._read(payment, requirements)
            known["payer"] = signed.payer
            self._check(signed, terms)
            self._simulate(signed, terms, terms.amount)
        except Refused as refusal:
            return {"isValid": False, "invalidReason": refusal.reason} | known
        except RpcError as error:
            failure = {"isValid": False, "invalidReason": "unexpected_verify_error", "invalidMessage": str(error)}
            return failure | known
        return {"isValid": True} | known

    def settle(self, payment: JSON, requirements: JSON) -> JSON:
        """Settle a payment and wait for its receipt, in the shape of POST /settle.

        For `upto`, the amount of `requirements` is charged; zero sends no transaction.
        """
        network = str(requirements.get("network", "")) if isinstance(requirements, dict) else ""
        failure = {"success": False, "transaction": "", "network": network}
        try:
            terms, signed = self._read(payment, requirements)
            failure["payer"] = signed.payer
            charged = terms.amount
            if terms.scheme == "upto":
                terms = _at_ceiling(signed, terms)
            self._check(signed, terms)
            transaction = self._settle_on_chain(signed, terms, charged) if charged > 0 else ""
        except Refused as refusal:
            return failure | {"errorReason": refusal.reason}
        except _Reverted as revert:
            return failure | {"errorReason": "invalid_transaction_state", "transaction": revert.transaction}
        except (RpcError, TimeoutError) as error:
            return failure | {"errorReason": "unexpected_settle_error", "errorMessage": str(error)}
        receipt = {"success": True, "payer": signed.payer, "transaction": transaction, "network": network}
        return receipt | ({"amount": str(charged)} if terms.scheme == "upto" else {})

    def close(self) -> None:
        """Stop serving and close the connections to the chain. Idempotent."""
        super().close()
        self._chain.close()

    # ---- HTTP ----

    def _endpoint(self, action: Callable[[JSON, JSON], JSON]) -> Callable[[Request], object]:
        async def answer(request: Request) -> Response:
            try:
                content = json.loads(await request.body())
                payment, requirements = content["paymentPayload"], content["paymentRequirements"]
            except (ValueError, KeyError, TypeError) as error:
                return JSONResponse({"error": f"not a payment with its requirements: {error!r}"}, status_code=400)
            return JSONResponse(await run_in_threadpool(action, payment, requirements))

        return answer

    async def _answer_supported(self, _request: Request) -> Response:
        return JSONResponse(self.supported())

    # ---- verification ----

    def _read(self, payment: JSON, requirements: JSON) -> tuple[Terms, SignedPayment]:
        version = payment.get("x402Version") if isinstance(payment, dict) else None
        if version not in (1, 2):
            raise Refused("invalid_x402_version")
        terms = read_terms(version, requirements)
        chosen = payment if version == 1 else payment.get("accepted")
        if not isinstance(chosen, dict):
            raise Refused("invalid_payload")
        if terms.scheme not in ("exact", "upto") or chosen.get("scheme") != terms.scheme:
            raise Refused("unsupported_scheme")
        own = V1_NETWORKS.get(self._chain_id) if version == 1 else f"eip155:{self._chain_id}"
        if terms.network != own or chosen.get("network") != own:
            raise Refused("invalid_network")
        return terms, read_payment(payment)

    def _check(self, payment: SignedPayment, terms: Terms) -> None:
        check_payment(payment, terms, now=int(time.time()), facilitator=self.address)
        check_signature(payment, terms, self._chain_id)

    def _simulate(self, payment: SignedPayment, terms: Terms, amount: int) -> None:
        if self._chain.rpc("eth_getCode", terms.asset, "latest") == "0x":
            # A call to an address without code succeeds and moves nothing.
            raise Refused("asset_not_deployed_contract")
        if isinstance(payment, Permit2Payment):
            allowed = self._chain.read_uint(terms.asset, "allowance(address,address)", payment.payer, PERMIT2)
            if allowed < amount:
                raise Refused("permit2_allowance_required")
        if self._chain.read_uint(terms.asset, "balanceOf(address)", payment.payer) < amount:
            raise Refused("insufficient_funds")
        to, data = _settlement(payment, terms, amount)
        try:
            self._chain.call(to, data, sender=self.address)
        except RpcError as error:
            said = f"{error.message} {error.data}"
            reason = next((code for words, code in _REVERTS.items() if words in said), "invalid_transaction_state")
            raise Refused(reason) from error

    def _settle_on_chain(self, payment: SignedPayment, terms: Terms, amount: int) -> str:
        self._simulate(payment, terms, amount)
        to, data = _settlement(payment, terms, amount)
        transaction = self._chain.send(self._account, to, data, gas=_SETTLE_GAS)
        if self._chain.receipt(transaction)["status"] != "0x1":
            raise _Reverted(transaction)
        return transaction


def _settlement(payment: SignedPayment, terms: Terms, amount: int) -> tuple[str, str]:
    """The contract and the call data that settle `amount` atomic units."""
    if isinstance(payment, Permit2Payment):
        permit = ((payment.token, payment.amount), payment.nonce, payment.deadline)
        if payment.facilitator is None:
            witness: tuple[object, ...] = (payment.payee, payment.valid_after)
            data = calldata(_SETTLE_EXACT, permit, payment.payer, witness, payment.signature)
        else:
            witness = (payment.payee, payment.facilitator, payment.valid_after)
            data = calldata(_SETTLE_UPTO, permit, amount, payment.payer, witness, payment.signature)
        return payment.spender, data
    return terms.asset, _authorized_transfer(payment)


def _authorized_transfer(payment: Eip3009Payment) -> str:
    fields = (
        payment.payer, payment.payee, payment.value, payment.valid_after, payment.valid_before, payment.nonce,
    )  # fmt: skip
    signature = payment.signature
    if len(signature) != _SIGNATURE_BYTES:
        return calldata(f"{_AUTHORIZED}bytes)", *fields, signature)
    v = signature[64] if signature[64] >= 27 else signature[64] + 27
    return calldata(f"{_AUTHORIZED}uint8,bytes32,bytes32)", *fields, v, signature[:32], signature[32:64])


def _at_ceiling(payment: SignedPayment, terms: Terms) -> Terms:
    """The terms of an `upto` settlement with the signed amount instead of the charged amount."""
    if not isinstance(payment, Permit2Payment):
        raise Refused("unsupported_payload_type")
    if terms.amount > payment.amount:
        raise Refused("invalid_upto_evm_payload_settlement_exceeds_amount")
    return terms.with_amount(payment.amount)
