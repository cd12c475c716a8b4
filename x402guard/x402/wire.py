"""The x402 wire format, version 2 and version 1: the header codec and the messages.

Sources: x402 specification v2 section 5 (types) and its HTTP transport; the same sections of v1. All input is
untrusted, so sizes, depth, counts and duplicates are bounded before anything is decoded.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any, Final, Literal, TypeVar

from msgspec import Meta, Struct, ValidationError
from msgspec import field as named
from msgspec.json import Encoder

from x402guard.assets import resolve_network
from x402guard.errors import ProtocolError
from x402guard.frozen import read_struct, readable
from x402guard.kernel.evm import MAX_UINT256
from x402guard.strict_json import NotReadable, check_depth, doubled, read_json
from x402guard.x402.rails import RECEIPT_HEADERS, REQUEST_HEADERS

PAYMENT_REQUIRED: Final = "payment-required"
PAYMENT_SIGNATURE: Final = "payment-signature"
PAYMENT_RESPONSE: Final = "payment-response"
X_PAYMENT: Final = "x-payment"
X_PAYMENT_RESPONSE: Final = "x-payment-response"
PAYMENT_HEADERS: Final = REQUEST_HEADERS
"""The request headers that hold a payment, on any rail."""

_NUL: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")

MAX_HEADER_CHARS: Final = 131_072
MOST_KEPT_CHARS: Final = 8_192
"""A longer header is read anew each time: its terms take up to a megabyte."""

MAX_BODY_BYTES: Final = 262_144
MAX_JSON_DEPTH: Final = 128
MAX_ACCEPTS: Final = 256

M = TypeVar("M", bound=Struct)

Headers = Iterable[tuple[str, str]]
"""Header lines as received: names in any case, with duplicates."""

Name = Annotated[str, Meta(max_length=64)]
Account = Annotated[str, Meta(max_length=128)]
_WholeSeconds = Annotated[float, Meta(ge=-(2**53), lt=2**53, multiple_of=1)]  # 60.0 is a whole number in JSON
Seconds = Annotated[int, Meta(ge=-(2**53))] | _WholeSeconds
AtomicAmount = Annotated[str, Meta(pattern=r"^[0-9]{1,78}\Z", max_length=78)]


@readable
class PaymentRequirements(Struct, frozen=True):
    """One way to pay, v2 (specification v2, 5.1.2). ``amount`` is in atomic units, ``max_timeout_s`` in seconds."""

    scheme: Name
    network: Name
    amount: AtomicAmount
    asset: Account
    pay_to: Account = named(name="payTo")
    max_timeout_s: Seconds = named(name="maxTimeoutSeconds")
    extra: dict[str, Any] | None = None


@readable
class PaymentRequirementsV1(Struct, frozen=True):
    """One way to pay, v1 (specification v1, 5.1.2). ``amount`` is in atomic units, ``max_timeout_s`` in seconds."""

    scheme: Name
    network: Name
    amount: AtomicAmount = named(name="maxAmountRequired")
    asset: Account
    pay_to: Account = named(name="payTo")
    max_timeout_s: Seconds = named(name="maxTimeoutSeconds")
    resource: Any = None
    extra: dict[str, Any] | None = None


@readable
class PaymentRequired(Struct, frozen=True):
    """The terms of a 402: a version and the ways to pay (specification 5.1).

    The entries of ``accepts`` stay plain JSON, so that one that cannot be read does not fail the others. What is around them
    decides about no money: it is of any type, and is sent back as it came.
    """

    version: Literal[1, 2] = named(name="x402Version")
    accepts: tuple[Any, ...]
    resource: Any = None
    extensions: Any = None
    error: Any = None


@readable
class SettleResponse(Struct, frozen=True):
    """A receipt (specification v2, 5.3). It is only a *claim* of the server.

    ``exact`` receipts have no ``amount``; an ``upto`` settled at zero has an empty ``transaction``.
    """

    success: bool
    transaction: Annotated[str, Meta(max_length=128)] = ""
    network: Name = ""
    payer: Account | None = None
    amount: AtomicAmount | None = None
    error_reason: Annotated[str, Meta(max_length=1024)] | None = named(name="errorReason", default=None)


def only_header(headers: Headers, name: str) -> str | None:
    """Return the value of the header *name* (lower case), or None if it is missing.

    Raises ``ProtocolError`` if it occurs with two values, because two readers could use different ones.
    """
    values = [value for key, value in headers if key.lower() == name]
    if len({value.strip() for value in values}) > 1:
        raise ProtocolError(f"the header occurs {len(values)} times, with different values", field=name.upper())
    return values[0] if values else None


def decode_json(raw: bytes, *, field: str, is_terms: bool = False) -> Any:
    """Return the JSON value in *raw* (UTF-8).

    Raises ``ProtocolError`` naming *field* for duplicate keys, NaN, a depth over 128 and invalid text. In *terms* a NUL and
    half an emoji are texts like others, which are sent back escaped, and an object with a key twice is ``Doubled``.
    """
    try:
        value = read_json(_text(raw, is_terms=is_terms), most_depth=MAX_JSON_DEPTH, marks_doubled=is_terms)
        if b"\\u" in raw and not is_terms:
            compact_json(value)  # raises for a lone surrogate
            if _NUL.search(raw):
                raise NotReadable("a NUL in a text")  # a ledger in PostgreSQL cannot keep it
        return value
    except ValueError as error:
        words = getattr(error, "words", "")
        raise ProtocolError(f"not acceptable JSON: {str(error)[:120]}", field=field, words=words) from None


def _text(raw: bytes, *, is_terms: bool) -> str:
    """Return text in UTF-8; terms may have a byte order mark, or be in Latin-1, where no needed field differs."""
    try:
        return raw.decode("utf-8-sig" if is_terms else "utf-8")
    except UnicodeDecodeError:
        if not is_terms:
            raise
        return raw.decode("latin-1")


_PLAIN_ALPHABET: Final = str.maketrans("-_", "+/")


def decode_base64_json(value: str, *, field: str, is_terms: bool = False) -> Any:
    """Return the JSON value in a header: base64 in either alphabet (RFC 4648, 4 and 5), padded or not.

    Raises ``ProtocolError`` naming *field*.
    """
    if len(value) > MAX_HEADER_CHARS:
        raise ProtocolError(f"{len(value)} characters; at most {MAX_HEADER_CHARS} are allowed", field=field)
    text = "".join(value.split()).rstrip("=").translate(_PLAIN_ALPHABET)  # some servers wrap it, as in a mail
    try:
        raw = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise ProtocolError("not base64", field=field) from None
    return decode_json(raw, field=field, is_terms=is_terms)


def parse_message(model: type[M], value: Any, *, field: str) -> M:
    """Return *value* (decoded JSON) as *model*. Raises ``ProtocolError`` naming the first invalid field."""
    try:
        return read_struct(value, model)
    except ValidationError as error:
        where, words = _fault(error)
        raise ProtocolError(words, field=f"{field}{where}") from None


_WRONG: Final = (
    ("missing required field", "it is missing"),
    ("Invalid enum value", "it is neither 1 nor 2"),
    ("of length <=", "it is too long"),
    ("matching regex", 'it is not a whole number of atomic units as text, such as "10000"'),
    ("` >= ", "it is too small"),
    ("a multiple of", "it is not a whole number"),
    ("Expected `str", "it is not text"),
    ("Expected `int", "it is not a whole number"),
    ("Expected `bool", "it is neither true nor false"),
    ("Expected `object", "it is not an object"),
    ("Expected `array", "it is not a list"),
)
"""What is wrong with a field, by the words of msgspec's error, which name types and limits and may name the value."""

_PLACE: Final = re.compile(r"(?: - at `\$(?P<path>[^`]*)`|missing required field `(?P<missing>[^`]*)`)")


def _fault(error: ValidationError) -> tuple[str, str]:
    """Return (the invalid field, after its parent's name, what is wrong with it)."""
    told, where = str(error), ""
    for found in _PLACE.finditer(told):
        where = (found["path"] or "") + where if found["path"] is not None else f".{found['missing']}" + where
    return where, next((words for part, words in _WRONG if part in told), "it is invalid")


def parse_payment_required(value: Any, *, field: str) -> PaymentRequired:
    """Return decoded JSON as ``PaymentRequired``. Raises ``ProtocolError``, also for over 256 ``accepts``."""
    if not isinstance(value, Mapping):
        raise ProtocolError("it is not an object", field=field)
    twice = sorted(doubled(value) & {"x402Version", "accepts"})
    if twice:
        raise ProtocolError("it appears twice", field=f"{field}.{twice[0]}")
    if isinstance(value.get("accepts"), list) and len(value["accepts"]) > MAX_ACCEPTS:
        raise _too_many(len(value["accepts"]), field)
    known = {name: value[name] for name in ("accepts", "resource", "extensions", "error") if name in value}
    if "x402Version" in value:
        known["x402Version"] = whole(value["x402Version"])
    return parse_message(PaymentRequired, known, field=field)


_NEEDED: Final = ("scheme", "network", "amount", "maxAmountRequired", "asset", "payTo", "maxTimeoutSeconds", "extra")


def parse_requirement(
    version: int, entry: Mapping[str, Any], *, field: str
) -> PaymentRequirements | PaymentRequirementsV1:
    """Return an entry of ``accepts`` by what decides about money in it. Raises ``ProtocolError`` naming the field.

    The lifetime is a whole number in any spelling that loses nothing; an amount is digits, as text or as an integer. What
    appears twice has two readings.
    """
    extra = entry.get("extra")
    twice = sorted(doubled(entry) & set(_NEEDED)) + [f"extra.{name}" for name in sorted(doubled(extra))]
    if twice:
        raise ProtocolError("it appears twice", field=f"{field}.{twice[0]}")
    known = {name: entry[name] for name in (*_NEEDED, "resource") if name in entry}
    known["extra"] = extra or None
    if "maxTimeoutSeconds" in known:
        known["maxTimeoutSeconds"] = whole(known["maxTimeoutSeconds"])
    for name in ("amount", "maxAmountRequired"):
        if type(known.get(name)) is int:
            known[name] = str(known[name])
    if version == 1:
        return parse_message(PaymentRequirementsV1, known, field=field)
    return parse_message(PaymentRequirements, known, field=field)


_WHOLE: Final = re.compile(r"[0-9]{1,15}", re.ASCII)


def whole(value: Any) -> Any:
    """Return a whole number that is written as text, or with a fraction of zero; anything else as it is."""
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def entries_beside(raw: bytes | None) -> list[Mapping[str, Any]]:
    """Return the entries that a body beside a header names, read as leniently as any client reads it.

    In a list, in lists of that, or alone; of a key that appears twice both are read, and what follows the JSON is not. What
    cannot be read says nothing: a body is the server's own (HTTP transport v2, "Response Body").
    """
    text = "" if raw is None else raw.decode("utf-8", "replace")
    start = text.find("{")
    if start < 0:
        return []
    found: list[Mapping[str, Any]] = []
    for pairs in (dict, _first):
        try:
            check_depth(text)
            value, _ = json.JSONDecoder(object_pairs_hook=pairs).raw_decode(text, start)
        except (ValueError, RecursionError):
            return []
        found += islice(_objects_in(value.get("accepts")), MAX_ACCEPTS)
    return found


def _first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(reversed(pairs))


def _too_many(count: int, field: str) -> ProtocolError:
    return ProtocolError(f"{count} offers; at most {MAX_ACCEPTS} are allowed", field=f"{field}.accepts")


def _objects_in(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, dict):
        yield value
    for each in value if isinstance(value, list) else ():
        yield from _objects_in(each)


def decode_payment_required(value: str) -> PaymentRequired:
    """Return the terms in a ``PAYMENT-REQUIRED`` header (HTTP transport v2; some servers write v1 there). Raises ``ProtocolError``.

    Sellers send the same text again and again, so the last ones are known, but for those that would take much memory.
    Nothing changes the terms that are returned.
    """
    return _known_terms(value) if len(value) <= MOST_KEPT_CHARS else _terms_in(value)


def _terms_in(value: str) -> PaymentRequired:
    field = PAYMENT_REQUIRED.upper()
    return parse_payment_required(decode_base64_json(value, field=field, is_terms=True), field=field)


_known_terms: Final = lru_cache(maxsize=64)(_terms_in)

_DIGITS: Final = 9
_FRAMING: Final = frozenset({"content-length", "content-encoding", "transfer-encoding"})


def stated_length(headers: Headers) -> int | None:
    """Return the length of a body in bytes, as its head states it; None if it states none, or none below a gigabyte.

    A body that is packed, or that comes in chunks, has none.
    """
    framing = [line for line in headers if line[0].lower() in _FRAMING]
    one = framing[0][1] if len(framing) == 1 and framing[0][0].lower() == "content-length" else ""
    return int(one) if len(one) <= _DIGITS and one.isascii() and one.isdecimal() else None


def has_receipt(headers: Headers) -> bool:
    """True if a header holds a receipt, readable or not."""
    return any(name.lower() in RECEIPT_HEADERS for name, _ in headers)


def _stated(value: Any) -> Any:
    """Return a receipt without what states nothing: "" or null, and what is no amount, network, payer or reason.

    Sellers write amounts as numbers, in dollars or as objects, networks by any of their names, payers as CAIP-10. A receipt
    is a claim alone, so what cannot be read of it is not claimed.
    """
    if not isinstance(value, dict):
        return value
    stated = {key: each for key, each in value.items() if each not in (None, "")}
    if type(stated.get("amount")) is int:
        stated["amount"] = str(stated["amount"])
    if type(stated.get("network")) is int:
        stated["network"] = str(stated["network"])
    if str(stated.get("network", "")).isdecimal():
        stated["network"] = f"eip155:{stated['network']}"
    payer = stated.get("payer")
    if isinstance(payer, str) and payer.startswith("eip155:"):
        stated["payer"] = payer.rpartition(":")[2]
    if not (isinstance(stated.get("amount"), str) and _DIGITS_ALONE.fullmatch(stated["amount"])):
        stated.pop("amount", None)
    for name in ("network", "payer", "errorReason"):
        if not isinstance(stated.get(name, ""), str):
            del stated[name]
    return stated


_DIGITS_ALONE: Final = re.compile(r"[0-9]{1,78}", re.ASCII)


def decode_receipt(headers: Headers) -> SettleResponse | None:
    """Return the receipt in ``PAYMENT-RESPONSE`` or ``X-PAYMENT-RESPONSE``, or None if both are missing.

    Raises ``ProtocolError`` for an unreadable receipt, or for two that claim different things.
    """
    lines = list(headers)
    found = []
    for name in (PAYMENT_RESPONSE, X_PAYMENT_RESPONSE):
        value = only_header(lines, name)
        if value is not None:
            told = _stated(_receipt_in(value, field=name.upper()))
            found.append(parse_message(SettleResponse, told, field=name.upper()))
    receipt = found[-1] if found else None
    if receipt is not None and len({_claimed(each) for each in found}) > 1:
        raise ProtocolError("two different receipts", field=PAYMENT_RESPONSE.upper())
    if receipt is not None and receipt.amount is not None and int(receipt.amount) > MAX_UINT256:
        raise ProtocolError("does not fit into a uint256", field=f"{PAYMENT_RESPONSE.upper()}.amount")
    return receipt


def _receipt_in(value: str, *, field: str) -> Any:
    """Return the JSON in a header: base64, or as it is, as some servers write it."""
    if value.lstrip().startswith("{"):
        if len(value) > MAX_HEADER_CHARS:
            raise ProtocolError(f"{len(value)} characters; at most {MAX_HEADER_CHARS} are allowed", field=field)
        return decode_json(value.encode("latin-1", "replace"), field=field)
    return decode_base64_json(value, field=field)


def _claimed(receipt: SettleResponse) -> tuple[Any, ...]:
    """Return what a receipt claims, in one spelling."""
    network = resolve_network(receipt.network) or receipt.network
    return receipt.success, receipt.transaction.lower(), network, receipt.amount, (receipt.payer or "").lower()


_ENCODED: Final = Encoder().encode


def compact_json(value: Any) -> str:
    """Return *value* as JSON without white space, keys in their order, non-ASCII text unescaped.

    Raises ``UnicodeEncodeError`` for a lone surrogate.
    """
    return _ENCODED(value).decode()


def echoed_json(value: Any) -> str:
    """Return what a seller has written as compact JSON, to be sent back: half an emoji is escaped, as it came."""
    try:
        return compact_json(value)
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))


def encode_header(message: Mapping[str, Any]) -> str:
    """Return a message as base64 of its compact JSON, as the HTTP transport requires."""
    return base64.b64encode(echoed_json(message).encode()).decode("ascii")


def decode_header(value: str) -> dict[str, Any]:
    """Return the message in a header that ``encode_header`` has made. It may be longer than what a server may send."""
    message: dict[str, Any] = json.loads(base64.b64decode(value))
    return message
