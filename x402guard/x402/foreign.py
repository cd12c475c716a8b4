"""Payments that the guard did not make: finds them in a request, and reads what they may take."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

from msgspec import Struct

from x402guard.assets import AssetRegistry, resolve_network
from x402guard.errors import ProtocolError
from x402guard.evm import parse_address
from x402guard.flow.sealed import Sealed
from x402guard.kernel.evm import MAX_UINT256
from x402guard.kernel.rows import Nanos
from x402guard.strict_json import check_depth
from x402guard.x402.rails import MEMBERS, SCHEMES
from x402guard.x402.wire import PAYMENT_HEADERS, decode_base64_json

META: Final = "x402/payment"
"""The member of ``params._meta`` that holds a payment in JSON-RPC (x402 specification, MCP transport)."""

METADATA: Final = "x402.payment.payload"
"""The member of ``params.message.metadata`` that holds a payment in JSON-RPC (x402 specification, A2A transport)."""

_WHERE: Final = {**{name: f"_meta[{name!r}]" for name in MEMBERS}, METADATA: f"metadata[{METADATA!r}]"}
_AUTHORIZATION: Final = "authorization"


class ForeignPayment(Struct, frozen=True):
    """One payment in a request.

    Attributes:
        where: the header or member that holds it.
        digest: the SHA-256 of it, 32 bytes.
        message: the payment as received; a header's text, or the JSON value of a member.
    """

    where: str
    digest: bytes
    message: Sealed[Any]


def payments_in(headers: Iterable[tuple[str, str]], body: bytes | None) -> tuple[ForeignPayment, ...]:
    """Return the payments in a request, on any of ``RAILS``: in a header, by ``Authorization``, or in JSON-RPC.

    A *body* of None, one that streams, is not searched.
    """
    found = []
    for name, value in headers:
        lower = name.lower().replace("_", "-")  # many servers read both alike
        scheme = _SCHEME.search(value) if lower == _AUTHORIZATION else None
        if lower in PAYMENT_HEADERS or scheme is not None:
            where = f"the header {lower.upper()}" + (
                f": {(scheme[1] or scheme[2]).capitalize()}" if scheme is not None else ""
            )
            found.append(ForeignPayment(where, _digest(value), Sealed(value)))
    if body and _may_hold_one(body):
        found += [ForeignPayment(where, member_digest(message), Sealed(message)) for where, message in _members(body)]
    return tuple(found)


_SCHEME: Final = re.compile(rf"(?:^|,)\s*({'|'.join(sorted(SCHEMES))})\s|\b(l402|lsat)\s", re.IGNORECASE)
"""One of the schemes in an Authorization header is a rail's, such as Payment. Servers of L402 look for it anywhere."""

_WORDS: Final = (b"x402", b"paymentauth")
_ESCAPED: Final = re.compile(
    rb"\\u00(" + b"|".join(sorted({b"%02x" % letter for word in _WORDS for letter in word + word.upper()})) + rb")"
)
"""One of the characters of such a word as an escape."""


def _may_hold_one(body: bytes) -> bool:
    """True for a body with such a word, in any case of letters, in UTF-8, UTF-16 or UTF-32, or with a part of it escaped."""
    plain = _plain_words(body)
    return any(word in plain for word in _WORDS) or _ESCAPED.search(plain) is not None


def _plain_words(body: bytes) -> bytes:
    """Return a body in small letters, one byte each: a longer encoding has zeros between those of ASCII."""
    small = body.lower()
    return small.replace(b"\0", b"") if b"\0" in small else small


def member_digest(message: Any) -> bytes:
    """Return the digest of a payment in JSON-RPC, 32 bytes: whatever the order of its keys, which A2A's package changes."""
    return _digest(json.dumps(whole_numbers(message), sort_keys=True))


def whole_numbers(value: Any) -> Any:
    """Return JSON values with whole numbers as such: A2A's package knows floats alone."""
    if isinstance(value, dict):
        return {name: whole_numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [whole_numbers(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class _Members(list[tuple[str, Any]]):
    """The members of a JSON object in order. Of a key that appears twice, servers read the first or the last."""


def _members(body: bytes) -> Iterator[tuple[str, Any]]:
    """Yield where a payment stands in a JSON-RPC message, or in a batch of them, and the payment.

    The message is read as leniently as any server reads it. A large body, whose reading would stop the event loop, and one
    that cannot be read are searched for the member.
    """
    if len(body) > _MOST_READ:
        yield from _spelt_in(body)
        return
    try:
        check_depth(body)
        value = json.loads(body, object_pairs_hook=_Members)
    except (ValueError, RecursionError):
        yield from _spelt_in(body)
        return
    for message in [value] if isinstance(value, _Members) else value if isinstance(value, list) else ():
        called = _values(message, "params")
        holders = [(name, meta) for params in called for meta in _values(params, "_meta") for name in MEMBERS]
        # A2A has the message below ``params`` in JSON-RPC, and at the top over HTTP+JSON.
        sent = [each for params in (message, *called) for each in _values(params, "message")]
        holders += [(METADATA, data) for each in sent for data in _values(each, "metadata")]
        for name, holder in holders:
            yield from ((_WHERE[name], _plain(found)) for found in _values(holder, name))


_MOST_READ: Final = 2**18
_MOST_FOUND: Final = 16
_MOST_MESSAGE: Final = 2**16


def _spelt_in(body: bytes) -> Iterator[tuple[str, Any]]:
    """Yield each member of a payment's name, wherever it stands in a body, and its value; None if that cannot be read."""
    text = body.decode(json.detect_encoding(body), "replace")
    for name, where in _WHERE.items():
        for number, found in enumerate(islice(_SPELT[name].finditer(text), _MOST_FOUND + 1)):
            # What stands behind so many is not read, so what it may take is unknown.
            part = text[found.end() : found.end() + _MOST_MESSAGE] if number < _MOST_FOUND else ""
            try:
                check_depth(part)
                value, _ = json.JSONDecoder(object_pairs_hook=_Members).raw_decode(part)
            except (ValueError, RecursionError):
                value = None
            yield where, _plain(value)


def _spelling(name: str) -> re.Pattern[str]:
    """Return what finds a member's name in JSON: in any case of letters, each of them plain or as an escape."""
    spelt = "".join(rf"(?:\\?{re.escape(each)}|\\u00{ord(each):02x})" for each in name)
    return re.compile(rf'(?<!\\)"{spelt}"\s*:\s*', re.IGNORECASE)


_SPELT: Final = {name: _spelling(name) for name in _WHERE}


def _values(value: object, key: str) -> list[Any]:
    """Return the parts of an object under a key, in any case of letters, as Go reads the fields of its types."""
    return [part for name, part in value if name.casefold() == key.casefold()] if isinstance(value, _Members) else []


def _plain(value: object) -> Any:
    """Return the JSON value of a member. A key twice has two readings, so what it may take cannot be read."""
    if isinstance(value, _Members):
        plain = {name: _plain(part) for name, part in value}
        return plain if len(plain) == len(value) else None
    return [_plain(part) for part in value] if isinstance(value, list) else value


class Taking(Struct, frozen=True):
    """The most that a payment may take, in nano-dollars rounded up, to whom and where; the payee is "" if it is not known."""

    amount: Nanos
    payee: str
    network: str


def most_taken(payment: ForeignPayment, registry: AssetRegistry) -> Taking | None:
    """Return the most that a payment may take, or None if that cannot be read.

    The signed values count. The network and the token of an EIP-3009 payment stand outside of what is signed, so the
    dearest token of the registry that can be moved so counts.
    """
    try:
        message = payment.message.reveal()
        if isinstance(message, str):
            message = decode_base64_json(_SCHEME.sub("", message), field=payment.where)
        return _most_by_challenge(message, registry) if "challenge" in message else _most(message, registry)
    except (ProtocolError, ValueError, KeyError, TypeError, AttributeError):
        return None  # of another protocol, or of no known form


def _most_by_challenge(message: Mapping[str, Any], registry: AssetRegistry) -> Taking | None:
    """Return the most that a credential of MPP may take: an EIP-3009 authorization on the chain of its challenge."""
    payload, request = message["payload"], message["challenge"]["request"]
    if isinstance(request, str):
        request = decode_base64_json(request, field="challenge.request")
    if payload["type"] != "authorization":
        return None
    accepted = {"network": f"eip155:{request['methodDetails']['chainId']}", "asset": request["currency"]}
    return _most({"accepted": accepted, "payload": {"authorization": payload}}, registry)


def _most(message: Mapping[str, Any], registry: AssetRegistry) -> Taking | None:
    accepted, payload = message.get("accepted") or message, message["payload"]
    network = resolve_network(accepted["network"])
    if network is None or len({"authorization", "permit2Authorization"} & payload.keys()) != 1:
        return None
    known = registry.on({network})
    if "authorization" in payload:
        signed = payload["authorization"]
        amount, payee = signed["value"], signed["to"]
        assets = tuple(
            asset for asset in registry.all() if "eip3009" in asset.methods
        )  # the chain is not signed either
        named = accepted.get("asset")
        if named is not None and registry.find(network, parse_address(named)) is None:
            return None
    else:
        signed = payload["permit2Authorization"]
        amount, payee = signed["permitted"]["amount"], signed.get("witness", {}).get("to", "")
        assets = tuple(asset for asset in known if asset.contract == parse_address(signed["permitted"]["token"]))
    if not assets or not isinstance(amount, str) or not amount.isascii() or not amount.isdigit():
        return None
    if len(amount) > 78 or int(amount) > MAX_UINT256:
        return None
    most = max(asset.value_nanos(int(amount)) for asset in assets)
    return Taking(most, parse_address(payee) if payee else "", network)
