"""Signs the cancellation of a signed payment. The hold is freed only when the chain shows the cancellation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from x402guard.errors import ConfigError, SignerError
from x402guard.flow.shell import Shell
from x402guard.kernel.evm import MAX_UINT256, Address, normalise_signature
from x402guard.kernel.intent import Intent
from x402guard.kernel.rows import Hold, HoldState
from x402guard.ledger.view import LedgerView, Scope


@dataclass(frozen=True, slots=True)
class Cancellation:
    """A transaction that cancels a payment. Any account can send it and pay the gas.

    Until the chain shows it, the payment may still be taken and its hold counts in full. ``reconcile`` frees the hold.

    Attributes:
        hold_id: the hold of the payment.
        network: CAIP-2.
        to: the token's contract.
        data: the calldata, as 0x and hex. It can only cancel this payment.
        deadline: unix time in seconds after which the payment is worthless.
    """

    hold_id: str
    network: str
    to: Address
    data: str = field(repr=False)
    deadline: int


def cancelled(shell: Shell, hold_id: str) -> Cancellation:
    """Record the request to cancel a payment, then sign the cancellation. See ``Guard.cancel``."""
    signer = shell.signer
    if signer is None:
        raise SignerError("a cancellation needs a key to sign it")

    def change(view: LedgerView) -> Hold:
        hold = _cancellable(view.hold(hold_id), hold_id, view.now_unix)
        facts = {"name": "cancel_requested", "deadline": hold.deadline_unix}
        view.record(hold.node_id, "event", hold_id=hold.id, facts=facts)
        return hold

    hold = shell.store.transact(Scope(holds=(hold_id,), durable=True), change)
    intent = hold.payment()
    signature = normalise_signature(signer.sign_cancellation(hold))
    data = "0x" + cancellation_call(intent, signature).hex()
    return Cancellation(hold.id, intent.network, intent.token, data, hold.deadline_unix)


def _cancellable(hold: Hold | None, hold_id: str, now_unix: int) -> Hold:
    if hold is None or hold.intent is None:
        raise ConfigError(f"hold: there is no payment {hold_id[:80]!r} in this ledger; see `x402guard holds`")
    if hold.state is not HoldState.HELD:
        raise ConfigError(f"hold: {hold.id} is {hold.state}; only a live one can be cancelled", public=hold.id)
    if hold.intent.method != "eip3009":
        raise ConfigError(
            f"hold: {hold.id} is paid by {hold.intent.method}, which a signature cannot cancel; the wallet itself can call "
            "invalidateUnorderedNonces of Permit2",
            public=hold.id,
        )
    if hold.intent.dead_at(now_unix):
        raise ConfigError(
            f"hold: {hold.id} was valid until {hold.deadline_unix} and is worthless now; reconcile frees it",
            public=hold.id,
        )
    return hold


_SELECTOR: Final = bytes.fromhex("5a049a70")  # cancelAuthorization(address,bytes32,uint8,bytes32,bytes32)


def cancellation_call(intent: Intent, signature: bytes) -> bytes:
    """Return the calldata that cancels *intent* with a 65-byte signature; any account may send it to the token."""
    if not 0 <= intent.nonce <= MAX_UINT256 or len(signature) != 65:
        raise ValueError("a nonce has 32 bytes and a signature 65")
    payer = bytes.fromhex(intent.payer.removeprefix("0x")).rjust(32, b"\0")
    r, s, v = signature[:32], signature[32:64], signature[64:]
    return _SELECTOR + payer + intent.nonce.to_bytes(32, "big") + v.rjust(32, b"\0") + r + s
