"""One offer, v1 or v2, normalised and checked against the asset registry. What is checked is what is signed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from x402guard.assets import Asset, AssetRegistry, TransferMethod, resolve_network
from x402guard.errors import ProtocolError
from x402guard.evm import MAX_UINT256, ZERO_ADDRESS, Address, parse_address
from x402guard.ledger.authorize import Refusal
from x402guard.money import Nanos
from x402guard.x402.wire import (
    PaymentRequired,
    PaymentRequirements,
    PaymentRequirementsV1,
    compact_json,
    parse_message,
)

KNOWN_SCHEMES: Final = frozenset({"exact", "upto"})


@dataclass(frozen=True, slots=True)
class Offer:
    """One way to pay that we understand in full.

    Attributes:
        version: the x402 version it was made in, 1 or 2.
        scheme: ``exact`` or ``upto``.
        method: how the token moves: ``eip3009`` or ``permit2``.
        asset: our own registry's entry, never the offer's word.
        amount_atomic: atomic units of the asset; the ceiling for ``upto``.
        amount_nanos: the same in nano-dollars, rounded up.
        payee: who is paid.
        max_timeout_s: how long the server would like the signature to be good for, in seconds.
        facilitator: who alone may settle an ``upto``; None for ``exact``.
        flow: ``authorization``, or another that the server asks for in ``extra.paymentFlow``.
        resource_url: the URL the offer says it is for, or None.
        accepted_json: the requirement exactly as received, as compact JSON; a payment echoes it.
        resource_json: v2's ``resource`` as compact JSON, or None.
        extensions_json: v2's ``extensions`` as compact JSON, or None.
        position: its index in ``accepts``.
    """

    version: Literal[1, 2]
    scheme: str
    method: TransferMethod
    asset: Asset
    amount_atomic: int
    amount_nanos: Nanos
    payee: Address
    max_timeout_s: int
    facilitator: Address | None
    flow: str
    resource_url: str | None
    accepted_json: str
    resource_json: str | None
    extensions_json: str | None
    position: int

    @property
    def network(self) -> str:
        """The network in CAIP-2, whatever the offer called it."""
        return self.asset.network

    def describe(self) -> str:
        """Return a short phrase for messages: amount, token, network, payee."""
        return f"{self.scheme} {self.amount_atomic} {self.asset.symbol} units on {self.network} to {self.payee}"


def normalise(required: PaymentRequired, registry: AssetRegistry) -> list[Offer | Refusal]:
    """Return every entry of ``accepts`` as an ``Offer``, or the reason why it cannot be one, in their order.

    Raises ``ProtocolError`` for an entry that claims a scheme and network we know and is malformed: a peer that breaks the
    protocol once is not asked twice.
    """
    if not required.accepts:
        raise ProtocolError("no way to pay is offered", field="accepts")
    return [_normalise_one(required, entry, index, registry) for index, entry in enumerate(required.accepts)]


def _normalise_one(
    required: PaymentRequired, entry: Mapping[str, Any], index: int, registry: AssetRegistry
) -> Offer | Refusal:
    field = f"accepts[{index}]"
    scheme, network_as_offered = entry.get("scheme"), entry.get("network")
    if not isinstance(scheme, str) or not isinstance(network_as_offered, str):
        raise ProtocolError("scheme and network have to be text", field=field)
    network = resolve_network(network_as_offered)
    if scheme not in KNOWN_SCHEMES or (scheme == "upto" and required.version == 1):
        return Refusal("schemes", f"scheme {scheme[:40]!r} of x402 v{required.version} is not one we can pay")
    if network is None:
        return Refusal("networks", f"network {network_as_offered[:60]!r} is not an EVM network we know")
    requirement: PaymentRequirements | PaymentRequirementsV1
    if required.version == 1:
        requirement = parse_message(PaymentRequirementsV1, entry, field=field)
    else:
        requirement = parse_message(PaymentRequirements, entry, field=field)
    extra = requirement.extra or {}
    asset = registry.find(network, _address(requirement.asset, f"{field}.asset"))
    if asset is None:
        return Refusal(
            "assets",
            f"token {requirement.asset} on {network} is in no registry of ours; add it with Guard(assets=[Asset(…)])",
        )
    if (mismatch := _domain_mismatch(asset, extra)) is not None:
        return mismatch
    method = _method(scheme, asset, extra)
    if isinstance(method, Refusal):
        return method
    amount = _amount(requirement.amount, f"{field}.amount")
    if isinstance(requirement, PaymentRequirementsV1):
        resource_url: object = requirement.resource
    else:
        resource_url = (required.resource or {}).get("url")
    return Offer(
        version=required.version,
        scheme=scheme,
        method=method,
        asset=asset,
        amount_atomic=amount,
        amount_nanos=asset.value_nanos(amount),
        payee=_payee(requirement.pay_to, asset, f"{field}.payTo"),
        max_timeout_s=requirement.max_timeout_s,
        facilitator=_facilitator(extra, f"{field}.extra.facilitatorAddress") if scheme == "upto" else None,
        flow=_flow(extra, f"{field}.extra.paymentFlow"),
        resource_url=resource_url if isinstance(resource_url, str) else None,
        accepted_json=compact_json(dict(entry)),
        resource_json=None if required.resource is None else compact_json(required.resource),
        extensions_json=None if required.extensions is None else compact_json(required.extensions),
        position=index,
    )


def _address(text: str, field: str) -> Address:
    try:
        return parse_address(text)
    except ValueError as error:
        raise ProtocolError(str(error), field=field) from None


def _amount(text: str, field: str) -> int:
    amount = int(text)
    if amount == 0:
        raise ProtocolError("a payment of zero is not a payment", field=field)
    if amount > MAX_UINT256:
        raise ProtocolError("more than a uint256 holds", field=field)
    return amount


def _payee(text: str, asset: Asset, field: str) -> Address:
    payee = _address(text, field)
    if payee in (ZERO_ADDRESS, asset.contract):
        raise ProtocolError(f"{payee} is the zero address or the token itself; money sent there is lost", field=field)
    return payee


def _facilitator(extra: Mapping[str, Any], field: str) -> Address:
    # Specification, upto on EVM: the witness binds the one address that may settle, so an upto without it is no offer.
    value = extra.get("facilitatorAddress")
    if not isinstance(value, str):
        raise ProtocolError("an upto offer has to name its facilitator", field=field)
    facilitator = _address(value, field)
    if facilitator == ZERO_ADDRESS:
        raise ProtocolError("the zero address cannot settle", field=field)
    return facilitator


def _flow(extra: Mapping[str, Any], field: str) -> str:
    flow = extra.get("paymentFlow", "authorization")
    if not isinstance(flow, str):
        raise ProtocolError("has to be text", field=field)
    return flow


def _method(scheme: str, asset: Asset, extra: Mapping[str, Any]) -> TransferMethod | Refusal:
    asked = extra.get("assetTransferMethod")
    if scheme == "upto":
        wanted = "permit2"  # specification, upto on EVM: Permit2 is its only method
    elif asked is None:
        wanted = "eip3009" if "eip3009" in asset.methods else "permit2"
    else:
        wanted = asked
    for method in asset.methods:
        if method == wanted and asked in (None, wanted):
            return method
    return Refusal(
        "methods", f"transfer method {str(asked or wanted)[:40]!r} cannot be used for {asset.symbol} on {asset.network}"
    )


def _domain_mismatch(asset: Asset, extra: Mapping[str, Any]) -> Refusal | None:
    """The offer may repeat what we know of the token; where it says otherwise, one of us is wrong and nobody signs."""
    ours = {"name": asset.name, "version": asset.version, "decimals": asset.decimals}
    for key, value in ours.items():
        offered = extra.get(key)
        if offered is not None and offered != value:
            return Refusal(
                "asset_domain",
                f"the offer says {key} {str(offered)[:60]!r} for {asset.contract} on {asset.network}, "
                f"our registry says {value!r}; correct it with Guard(assets=[Asset(…)]) if the registry is wrong",
            )
    return None


def conflicts_with_body(offer: Offer, body: PaymentRequired) -> bool:
    """True where a body carries terms and none of them agrees with *offer* on network, asset, amount and payee."""
    if not body.accepts:
        return False
    wanted = (offer.network, offer.asset.contract.lower(), str(offer.amount_atomic), offer.payee.lower())
    return not any(_terms(entry, body.version) == wanted for entry in body.accepts)


def _terms(entry: Mapping[str, Any], version: int) -> tuple[str | None, str, str, str]:
    amount = str(entry.get("maxAmountRequired" if version == 1 else "amount", ""))
    network = resolve_network(str(entry.get("network", "")))
    return network, str(entry.get("asset", "")).lower(), amount, str(entry.get("payTo", "")).lower()
