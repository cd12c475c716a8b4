"""Prices requests whose cost is no text of one answer: batches (the sum of their parts), rerank, transcription."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, localcontext
from typing import Any, Final

from msgspec.structs import replace as altered

from x402guard.errors import Unpriced
from x402guard.flow.capture import Bill
from x402guard.flow.ports import Usage
from x402guard.frozen import replace
from x402guard.kernel.rows import MAX_NANOS, Evidence, Nanos
from x402guard.ledger.authorize import Refusal
from x402guard.llm.ceiling import find_ceiling
from x402guard.llm.dearest import unread_cost
from x402guard.llm.forms import Field, read_form, seconds_of_flac
from x402guard.llm.leaves import count_of, counts_of, is_measure
from x402guard.llm.meter import FixedPrice, Meter
from x402guard.llm.rates import EXACT, Rates, find_model, fixed_factor, unpriced, whole_nanos
from x402guard.llm.request import UNREADABLE, read_call
from x402guard.llm.tools_used import MOST_USES
from x402guard.strict_json import NotReadable, read_object, write_object
from x402guard.vendors.media import BYTES_PER_AUDIO_TOKEN
from x402guard.vendors.routes import Flavour, Route

LISTED: Final = frozenset({"messages_batch", "gemini_batch", "mistral_batch", "rerank", "transcription"})
"""The flavours that are priced here."""

_MOST_PARTS: Final = 100_000
_OF_A_BATCH: Final = {"processing": "batch"}
_ENDPOINTS: Final[Mapping[str, Flavour]] = {
    "/v1/chat/completions": "chat", "/v1/fim/completions": "completions", "/v1/embeddings": "embeddings",
}  # fmt: skip
"""Mistral's endpoint of a batch → the flavour of its parts."""

_UNIT_PRICE: Final = Decimal("0.0025")
"""Dollars of one search unit of Cohere's rerank: a query with up to 100 documents (cohere.com/pricing). Most cost 0.002."""

_CHEAPER: Final = re.compile(r"rerank-(v3|english-v3|multilingual-v3|v4\.0-fast)")
_BY_TOKEN: Final = {"rerank-v5.0-fast": Decimal("0.02"), "rerank-v5.0-pro": Decimal("0.05")}
"""Dollars per million tokens of input (cohere.com/blog/rerank-5)."""

_DOCUMENTS_A_UNIT: Final = 100
_CHUNK: Final = 500
"""Tokens from which on a document counts twice."""

_PER: Final = 1_000_000
_BYTES_A_SECOND: Final = 640  # the least that a speech codec takes
_TOKENS_A_SECOND: Final = 32
_LONGEST_MODEL: Final = 300
_MOST_TRANSCRIBED: Final = 16_384  # tokens of output
_LEAST_SECONDS: Final = {"groq": 10}
_LINKS: Final = re.compile(r"(?i)url|uri|file_?id|link")
_LONGEST_S: Final = 86_400


def price_listed(
    meter: Meter, route: Route, body: bytes | None, content_type: str, *, place: str, at_unix: int
) -> FixedPrice | Refusal:
    """Return what a request is held at, or a refusal if that cannot be known. *place* is its host and path."""
    if body is None:
        return _unreadable("body", "it streams past max_body_bytes, so it cannot be priced")
    if route.flavour == "transcription":
        fields = read_form(body, content_type)
        return _transcription(meter, route, fields, size=len(body), place=place, at_unix=at_unix)
    try:
        sent = read_object(body)
    except NotReadable as error:
        return _unreadable("body", f"{error}; a metered call has to be one JSON object")
    if route.flavour == "rerank":
        return _rerank(route, sent, place)
    return _batch(meter, route, sent, place, at_unix)


def _unreadable(field: str, reason: str) -> Refusal:
    return Refusal(UNREADABLE, f"{field}: {reason}", error=Unpriced)


def _batch(meter: Meter, route: Route, sent: Mapping[str, Any], place: str, at_unix: int) -> FixedPrice | Refusal:
    """Return the sum of the ceilings of a batch's parts, at the prices of batches where the book has them."""
    settings = replace(meter.settings, price_context={**meter.settings.price_context, **_OF_A_BATCH})
    parts = _parts(route, sent)
    if isinstance(parts, Refusal):
        return parts
    total, models = 0, list[str]()
    for index, (flavour, model, body) in enumerate(parts):
        read = read_call(altered(route, flavour=flavour, model=model), write_object(dict(body)))
        if isinstance(read, Refusal):
            return altered(read, reason=f"requests[{index}].{read.reason}")
        if body.get("speed") not in (None, "standard"):
            return unpriced(f"requests[{index}].speed: its price in a batch is unknown; leave it out")
        ceiling = find_ceiling(read, settings, meter.book, meter.counter, at_unix)
        if isinstance(ceiling, Refusal):
            return altered(ceiling, reason=f"requests[{index}].{ceiling.reason}")
        limit = ceiling.limit if ceiling.limit is not None else ceiling.maximum
        if limit is None:
            return unpriced(
                f"requests[{index}]: it sets no output limit, and the maximum output of its model is unknown"
            )
        total, models = total + ceiling.amount(limit), [*models, read.model][:2]
    return FixedPrice(
        route.provider, place, Nanos(total), models[0] if len(set(models)) == 1 else "", "the sum of its parts"
    )


def _parts(route: Route, sent: Mapping[str, Any]) -> list[tuple[Flavour, str | None, Mapping[str, Any]]] | Refusal:
    """Return (flavour, model, body) of each request in a batch."""
    listed, inner, flavour, model = sent.get("requests"), "params", "messages", None
    if route.flavour == "gemini_batch":
        flavour, inner, model, listed = "gemini", "request", route.model, _inline(sent)
    elif route.flavour == "mistral_batch":
        flavour, inner = _ENDPOINTS.get(str(sent.get("endpoint")), ""), "body"
        if sent.get("input_files"):
            return unpriced("input_files: their requests are not in this one, so it cannot be priced")
        if not flavour:
            return unpriced(f"endpoint: the price of {str(sent.get('endpoint'))[:60]!r} in a batch is unknown")
    if not isinstance(listed, list) or not listed or len(listed) > _MOST_PARTS:
        return unpriced("requests: the batch does not hold its requests (1 to 100,000), so it cannot be priced")
    found: list[tuple[Flavour, str | None, Mapping[str, Any]]] = []
    for index, each in enumerate(listed):
        body = each.get(inner) if isinstance(each, dict) else None
        if not isinstance(body, dict):
            return _unreadable(f"requests[{index}]", f"it has no {inner}")
        whole = body if "model" in body or "model" not in sent else {**body, "model": sent["model"]}
        found.append((flavour, model, whole))  # type: ignore[arg-type]  # "" was refused
    return found


def _inline(sent: Mapping[str, Any]) -> object:
    """Return the requests that a batch of Gemini's holds; None if they are in a file, or if it says them twice."""
    found: object = sent
    for names in (("batch",), ("inputConfig", "input_config"), ("requests",), ("requests",)):
        said = [name for name in names if name in found] if isinstance(found, dict) else []
        if not isinstance(found, dict) or len(said) != 1 or found.keys() & {"fileName", "file_name"}:
            return None
        found = found[said[0]]
    return found


def _rerank(route: Route, sent: Mapping[str, Any], place: str) -> FixedPrice | Refusal:
    model, documents = sent.get("model") or "rerank-v3.5", sent.get("documents")
    if not isinstance(model, str) or not isinstance(documents, list) or not documents:
        return _unreadable("documents", "the request lists no documents, so it cannot be priced")
    sizes = [len(write_object({"": each})) for each in (*documents, sent.get("query"))]
    if model in _BY_TOKEN:
        tokens = sum(sizes) + sizes[-1] * len(documents)  # each document is read with the query
        return FixedPrice(route.provider, place, whole_nanos(tokens * _BY_TOKEN[model] / _PER), model, "vendor")
    if model.startswith("rerank-v5"):
        return unpriced(f"model: {route.provider} has no price for {model[:60]!r}")
    chunks = sum(max(1, -(-(size + sizes[-1]) // _CHUNK)) for size in sizes[:-1])
    return FixedPrice(
        route.provider, place, whole_nanos(-(-chunks // _DOCUMENTS_A_UNIT) * _unit_price(model)), model, "vendor"
    )


def _unit_price(model: str) -> Decimal:
    return Decimal("0.002") if _CHEAPER.match(model) else _UNIT_PRICE


def _transcription(
    meter: Meter, route: Route, fields: list[Field] | None, *, size: int, place: str, at_unix: int
) -> FixedPrice | Refusal:
    if fields is None:
        return _unreadable(
            "body", "it is no form that every server reads alike, so it cannot be priced; send multipart/form-data"
        )
    models = [each.value for each in fields if each.name.strip().lower() == "model"]
    if len(models) != 1 or not 0 < len(models[0]) <= _LONGEST_MODEL:
        return _unreadable("model", "the form has to name one model, so that it can be priced")
    if any(_LINKS.search(each.name) for each in fields):
        return unpriced("file: a link to a sound does not say how long it is; send the file itself")
    model = models[0].decode("utf-8", "replace").strip()
    rates = _rates(meter, route, model, at_unix)
    if rates is None:
        return unpriced(f"model: {route.provider} has no price for {model!r}")
    flac = max((seconds_of_flac(each.value) or 0 for each in fields if each.is_file), default=0)
    seconds = max(size // _BYTES_A_SECOND + 1, min(flac, _LONGEST_S), _LEAST_SECONDS.get(route.provider, 1))
    tokens = max(-(-size // BYTES_PER_AUDIO_TOKEN), min(flac, _LONGEST_S) * _TOKENS_A_SECOND)
    amount = whole_nanos(rates.dollars(_heard(rates, seconds, tokens)))
    return FixedPrice(route.provider, place, amount, model, "book")


def _rates(meter: Meter, route: Route, model: str, at_unix: int) -> Rates | None:
    name = meter.settings.aliases.get(model, model)
    found = find_model(meter.book, route.provider, name, at_unix)
    return None if found is None else Rates(meter.book, *found, {}, fixed_factor(route.endpoint, found[0]))


def _heard(rates: Rates, seconds: int, tokens: int, output: int = _MOST_TRANSCRIBED) -> Usage:
    """Return the usage of a sound in the units that its model has prices for."""
    units = rates.priced.units
    if "input_audio_seconds" in units:
        return {"input_audio_seconds": seconds, "audio_seconds": seconds}
    if "audio_seconds" in units:
        return {"audio_seconds": seconds}
    heard = {"input_audio_tokens": tokens} if "input_audio_tokens" in units else {}
    return {"input_tokens": tokens, **heard, "output_tokens": output}


def bill_listed(meter: Meter, route: Route, price: FixedPrice, answer: Mapping[str, Any], at_unix: int) -> Bill:
    """Return the cost of a request by what its *answer* states; what it was held at, if it states nothing.

    A request says how long a sound is, and how many documents there are: what is ``MOST_USES`` times its hold is disputed.
    """
    with localcontext(EXACT):
        stated = _stated(meter, route, price, answer, at_unix)
    if stated is None:
        return Bill(price.amount, Evidence.ESTIMATE, note=f"{price.source}: the answer states no usage")
    usage, amount = stated
    most = min(price.amount * MOST_USES, MAX_NANOS)
    if amount <= most:
        return Bill(amount, Evidence.PROVIDER_USAGE, usage)
    return Bill(
        Nanos(most),
        Evidence.PROVIDER_USAGE,
        note=f"disputed: the claim is more than {MOST_USES:,} times what the request was held at",
        claimed=Nanos(min(amount, MAX_NANOS)),
        latches=meter.settings.disputes == "latch",
    )


def _stated(
    meter: Meter, route: Route, price: FixedPrice, answer: Mapping[str, Any], at_unix: int
) -> tuple[Usage, Nanos] | None:
    if route.flavour == "rerank":
        return _reranked(price.model, answer)
    rates = _rates(meter, route, price.model, at_unix) if route.flavour == "transcription" else None
    stated = answer.get("usage")
    if rates is None:
        return None
    used = stated if isinstance(stated, dict) else {}
    units = rates.priced.units
    lengths = (used.get("seconds"), used.get("prompt_audio_seconds"), answer.get("duration"))
    seconds, into, out = (
        min(max(map(count_of, lengths)), _LONGEST_S),
        count_of(used.get("input_tokens")),
        count_of(used.get("output_tokens")),
    )
    usage: Usage | None = None
    if seconds and "audio_seconds" in units:
        usage = _heard(rates, max(seconds, _LEAST_SECONDS.get(route.provider, 1)), 0, 0)
    elif into and "input_tokens" in units:
        details = used.get("input_token_details")
        heard = count_of(details.get("audio_tokens")) if isinstance(details, dict) else into
        sound = {"input_audio_tokens": min(into, heard)} if "input_audio_tokens" in units else {}
        out = max(out, count_of(used.get("total_tokens")) - into)
        usage = {"input_tokens": into, **sound, "output_tokens": out}
    unread = [(name, count) for name, count in counts_of(used) if name not in _READ and not is_measure(name)]
    if usage is None or (unread and "input_tokens" not in units):
        return None
    return usage, whole_nanos(rates.dollars(usage) + (unread_cost(rates, unread) if unread else 0))


_READ: Final = frozenset(
    {"seconds", "prompt_audio_seconds", "prompt_tokens", "completion_tokens", "input_tokens", "output_tokens",
     "total_tokens", "input_token_details.audio_tokens", "input_token_details.text_tokens"}
)  # fmt: skip
"""The counts of a transcription that are read, or are parts of the length that is billed."""


def _reranked(model: str, answer: Mapping[str, Any]) -> tuple[Usage, Nanos] | None:
    meta = answer.get("meta")
    billed = meta.get("billed_units") if isinstance(meta, dict) else None
    stated = billed if isinstance(billed, dict) else {}
    if any(count and name not in ("search_units", "input_tokens") for name, count in stated.items()):
        return None  # what else is billed is not known
    if model in _BY_TOKEN:
        tokens = count_of(stated.get("input_tokens"))
        return ({"input_tokens": tokens}, whole_nanos(tokens * _BY_TOKEN[model] / _PER)) if tokens else None
    units = count_of(stated.get("search_units"))
    return ({"rerank_searches": units}, whole_nanos(units * _unit_price(model))) if units else None
