"""Normalises an offer (v1 or v2) and checks it against the asset registry. The checked values are the signed values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from msgspec import Struct

from x402guard.assets import Asset, AssetRegistry, resolve_network, unpriced
from x402guard.errors import ProtocolError
from x402guard.evm import ZERO_ADDRESS, parse_address
from x402guard.kernel.evm import MAX_UINT256, Address
from x402guard.kernel.intent import Terms, TransferMethod
from x402guard.kernel.rows import Nanos
from x402guard.ledger.authorize import Refusal
from x402guard.x402.wire import (
    PaymentRequired,
    PaymentRequirementsV1,
    decode_payment_required,
    echoed_json,
    parse_requirement,
    whole,
)

KNOWN_SCHEMES: Final = frozenset({"exact", "upto"})

_DEPOSITING: Final = {
    "batch-settlement": "it takes a deposit before the sale",
    "auth-capture": "it may be captured again, and with fees, until its deadline",
}
"""Schemes that are known and not supported, with the reason."""

GATEWAY_DOMAIN: Final = "GatewayWalletBatched"
"""The domain name of an offer that Circle Gateway settles from its own wallet contract, not from the token."""


class Offer(Terms, frozen=True, kw_only=True):
    """One way to pay that is fully supported: its terms, as the registry names network and token, and what is around them.

    Attributes:
        asset: the entry of the asset registry, not the offer's data.
        amount_nanos: the amount in nano-dollars, rounded up.
        max_timeout_s: the lifetime of the signature that the server requests, in seconds.
        facilitator: the only address that may settle an ``upto``; None for ``exact``.
        flow: ``authorization``, or another that the server requests in ``extra.paymentFlow``.
        resource_url: the URL in the offer's ``resource``, or None.
        accepted_json: the requirement as received, as compact JSON; a payment echoes it.
        resource_json: v2's ``resource`` as compact JSON, or None.
        extensions_json: v2's ``extensions`` as compact JSON, or None.
        position: the index in ``accepts``.
        network_as_offered: the network by the name that the offer uses.
    """

    asset: Asset
    amount_nanos: Nanos
    max_timeout_s: int
    facilitator: Address | None
    flow: str
    resource_url: str | None
    accepted_json: str
    resource_json: str | None
    extensions_json: str | None
    position: int
    network_as_offered: str

    def describe(self) -> str:
        """Return scheme, amount, token, network and payee for messages."""
        return f"{self.scheme} {self.amount_atomic} {self.asset.symbol} units on {self.network} to {self.payee}"


@lru_cache(maxsize=32)
def offers_in(header: str, registry: AssetRegistry) -> tuple[Offer | Refusal, ...]:
    """Return the offers in a ``PAYMENT-REQUIRED`` header as ``normalise`` does. The last ones are known, as its terms are."""
    return tuple(normalise(decode_payment_required(header), registry))


def normalise(required: PaymentRequired, registry: AssetRegistry) -> list[Offer | Refusal]:
    """Return each entry of ``accepts`` as an ``Offer`` or a refusal, in the same order.

    What cannot be read in an entry refuses it alone: specification v2, 5.1.2, allows a currency code as the asset and the
    name of a role as the payee, and sellers write entries of other protocols. Raises ``ProtocolError`` if there is nothing
    else.
    """
    if not required.accepts:
        raise ProtocolError("the list of offers is empty", field="accepts")
    found: list[Offer | Refusal] = []
    unusable: list[ProtocolError] = []
    resource = required.resource
    if isinstance(resource, Mapping):  # strict facilitators refuse a null
        resource = {name: value for name, value in resource.items() if value is not None}
    echoed = tuple(None if part is None else echoed_json(part) for part in (resource, required.extensions))
    for index, entry in enumerate(required.accepts):
        try:
            found.append(_normalise_one(required, entry, index, registry, echoed))
        except ProtocolError as error:
            unusable.append(error)
            found.append(Refusal(UNUSABLE, str(error)))
    if len(unusable) == len(found):
        raise unusable[0]
    return found


UNUSABLE: Final = "unusable_offer"
"""The rule of an entry that cannot be read."""


def _normalise_one(
    required: PaymentRequired,
    entry: Any,
    index: int,
    registry: AssetRegistry,
    echoed: tuple[str | None, ...],
) -> Offer | Refusal:
    field = f"accepts[{index}]"
    if not isinstance(entry, Mapping):
        raise ProtocolError("it is not an object", field=field)
    scheme, offered = entry.get("scheme"), entry.get("network")
    if not isinstance(scheme, str) or not isinstance(offered, str):
        raise ProtocolError("scheme and network have to be strings", field=field)
    network = resolve_network(offered)
    if scheme in _DEPOSITING:
        return Refusal("schemes", f"scheme {scheme} is not supported: {_DEPOSITING[scheme]}")
    if scheme not in KNOWN_SCHEMES or (scheme == "upto" and required.version == 1):
        return Refusal("schemes", f"a scheme of x402 v{required.version} that is not supported", words=scheme)
    if network is None:
        return Refusal("networks", "not a known EVM network", words=offered)
    requirement = parse_requirement(required.version, entry, field=field)
    extra = requirement.extra or {}
    # In any case of its letters: it is compared with the registry, and official pages show one with a wrong checksum.
    asset = registry.find(network, _address(requirement.asset.lower(), f"{field}.asset"))
    if asset is None:
        return _unknown_token(network, requirement.asset)
    if (mismatch := _domain_mismatch(asset, extra)) is not None:
        return mismatch
    method = _method(scheme, asset, extra)
    if isinstance(method, Refusal):
        return method
    amount = _amount(requirement.amount, f"{field}.amount")
    resource_url: object = required.resource.get("url") if isinstance(required.resource, Mapping) else None
    if isinstance(requirement, PaymentRequirementsV1):
        resource_url = requirement.resource
    accepted = echoed_json(dict(entry))
    resource, extensions = (None, None) if required.version == 1 else _slim(accepted, *echoed, field=field)
    return Offer(
        version=required.version,
        scheme=scheme,
        method=method,
        network=asset.network,
        token=asset.contract,
        amount_atomic=amount,
        payee=_payee(requirement.pay_to, asset, f"{field}.payTo"),
        asset=asset,
        amount_nanos=asset.value_nanos(amount),
        max_timeout_s=int(requirement.max_timeout_s),
        facilitator=_facilitator(extra, f"{field}.extra.facilitatorAddress") if scheme == "upto" else None,
        flow=_flow(extra, f"{field}.extra.paymentFlow"),
        resource_url=resource_url if isinstance(resource_url, str) else None,
        accepted_json=accepted,
        resource_json=resource,
        extensions_json=extensions,
        position=index,
        network_as_offered=offered,
    )


MOST_ECHOED: Final = 5_500
"""Bytes of an offer that a payment echoes: with the signature, a header of 8 KB, which most servers read."""


def _slim(accepted: str, resource: str | None, extensions: str | None, *, field: str) -> tuple[str | None, str | None]:
    """Return what is echoed of ``resource`` and ``extensions``: all, or as much as a server reads in a header.

    Facilitators compare ``accepted`` alone. Raises ``ProtocolError`` if that is too long by itself.
    """
    room = MOST_ECHOED - _size(accepted)
    if room < 0:
        raise ProtocolError(f"a payment would echo {_size(accepted):,} bytes of it, which no server reads", field=field)
    if _size(resource) + _size(extensions) <= room:
        return resource, extensions
    kept = _identifier_in(extensions)
    if _size(resource) + _size(kept) <= room:
        return resource, kept
    return None, kept if _size(kept) <= room else None


def _size(text: str | None) -> int:
    return len((text or "").encode())


def _identifier_in(extensions: str | None) -> str | None:
    """Return the one extension to which a payment adds something, as compact JSON."""
    read = None if extensions is None else json.loads(extensions)
    asked = read.get("payment-identifier") if isinstance(read, dict) else None
    return None if asked is None else echoed_json({"payment-identifier": asked})


def _address(text: str, field: str) -> Address:
    try:
        return parse_address(text)
    except ValueError:
        reason = "not an address: 0x and forty hex digits, in mixed case with a correct EIP-55 checksum"
        raise ProtocolError(reason, field=field, words=text) from None


def _amount(text: str, field: str) -> int:
    amount = int(text)
    if amount == 0:
        raise ProtocolError("the amount is zero", field=field)
    if amount > MAX_UINT256:
        raise ProtocolError("does not fit into a uint256", field=field)
    return amount


def _payee(text: str, asset: Asset, field: str) -> Address:
    payee = _address(text, field)
    if payee in (ZERO_ADDRESS, asset.contract):
        raise ProtocolError(f"{payee} is the zero address or the token itself; money sent there is lost", field=field)
    return payee


def _facilitator(extra: Mapping[str, Any], field: str) -> Address:
    # Specification, upto on EVM: the witness binds the one address that may settle, so the offer has to name it.
    value = extra.get("facilitatorAddress")
    if not isinstance(value, str):
        raise ProtocolError("an upto offer has to name its facilitator", field=field)
    facilitator = _address(value, field)
    if facilitator == ZERO_ADDRESS:
        raise ProtocolError("the zero address cannot settle", field=field)
    return facilitator


def _flow(extra: Mapping[str, Any], field: str) -> str:
    flow = extra.get("paymentFlow")
    if flow is None:
        return "authorization"
    if not isinstance(flow, str):
        raise ProtocolError("has to be a string", field=field)
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
    reason = f"the transfer method cannot be used for {asset.symbol} on {asset.network}"
    return Refusal("methods", reason, words=str(asked or wanted))


def _unknown_token(network: str, token: str) -> Refusal:
    line = unpriced(network, token)
    why = "is not in the asset registry; add it with Guard(assets=[Asset(…)])"
    if line:
        why = f"is EURC, whose value in dollars its owner has to say: Guard(assets=[{line}])"
    return Refusal("assets", f"token {token} on {network} {why}")


def _domain_mismatch(asset: Asset, extra: Mapping[str, Any]) -> Refusal | None:
    """Return the refusal if the offer's data of the token differ from the registry, because one of them is wrong.

    The name of Circle Gateway's domain is no mistake: such an offer is not paid from the token itself.
    """
    if extra.get("name") == GATEWAY_DOMAIN:
        reason = (
            "the offer is paid from a deposit in Circle Gateway's wallet contract; only the token itself is supported"
        )
        return Refusal(
            "unsupported_wallet", reason, advice="Ask the seller for an offer of the exact scheme on the token."
        )
    ours: dict[str, str | int] = {"name": asset.name, "version": asset.version, "decimals": asset.decimals}
    for key, value in ours.items():
        offered = extra.get(key)
        if offered is not None and _same_kind(offered, value) != value:
            return Refusal(
                "asset_domain",
                f"the offer's {key} of {asset.contract} on {asset.network} differs: the asset registry has {value!r}; "
                "correct it with Guard(assets=[Asset(…)]) if the registry is wrong",
                words=str(offered),
            )
    return None


def _same_kind(offered: Any, ours: str | int) -> Any:
    """Return what an offer says of a token as a value of our kind, where nothing is lost: ``2`` and ``"2"`` are one."""
    if isinstance(ours, str) and type(offered) is int:
        return str(offered)
    return whole(offered) if isinstance(ours, int) else offered


class Stated(Struct, frozen=True):
    """What an entry in the body beside a header says of a payment, as far as it can be read; None or no amount if it cannot.

    Attributes:
        network: as CAIP-2.
        asset, payee: EVM addresses in lower case.
        amounts: as text, under the names of both versions.
    """

    network: str | None
    asset: str | None
    payee: str | None
    amounts: frozenset[str]


def stated_in(entry: Any) -> Stated:
    """Return what an entry says; nothing, if it is no object.

    The amount of another kind of chain, where no address is one of EVM, is none of ours.
    """
    entry = entry if isinstance(entry, Mapping) else {}
    asset, payee = (_evm_address(entry.get(name)) for name in ("asset", "payTo"))
    network = resolve_network(str(entry.get("network")).strip().lower())
    amounts = [str(entry.get(name)) for name in ("amount", "maxAmountRequired")]
    if network is None and asset is None and payee is None:
        amounts = []
    return Stated(network, asset, payee, frozenset(filter(_ATOMIC.fullmatch, amounts)))


def _evm_address(value: Any) -> str | None:
    text = str(value).strip().lower()
    return text if _ADDRESS.fullmatch(text) else None


_ADDRESS: Final = re.compile(r"0x[0-9a-f]{40}")
_ATOMIC: Final = re.compile(r"[0-9]{1,78}", re.ASCII)


def conflicts_with(offer: Offer, header: Iterable[Any], beside: Sequence[Stated]) -> bool:
    """True if an entry in the body *beside* a *header* says anything else than *offer*, and none says the same in full.

    What it says of another entry of the header is not said of this one, unless the same payment has another amount. A
    body is the server's own (HTTP transport v2, "Response Body"): what cannot be read in it says nothing.
    """
    ours = Stated(offer.network, offer.token.lower(), offer.payee.lower(), frozenset({str(offer.amount_atomic)}))
    if not beside or ours in beside:
        return False
    others = [*map(stated_in, header)]
    return any(
        _differs(entry, ours)
        and (_is_same_but_for_amount(entry, ours) or all(_differs(entry, each) for each in others))
        for entry in beside
    )


def _is_same_but_for_amount(entry: Stated, ours: Stated) -> bool:
    return (entry.network, entry.asset, entry.payee) == (ours.network, ours.asset, ours.payee)


def _differs(entry: Stated, ours: Stated) -> bool:
    named = ((entry.network, ours.network), (entry.asset, ours.asset), (entry.payee, ours.payee))
    return any(said not in (None, wanted) for said, wanted in named) or bool(entry.amounts - ours.amounts)
