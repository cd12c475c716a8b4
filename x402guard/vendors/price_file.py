"""Price files: imported by the owner's command after a look at their hash, and never downloaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from x402guard.errors import ConfigError
from x402guard.strict_json import check_depth
from x402guard.vendors.genai_prices import GenaiPriceBook

PRICES_FILE: Final = "x402guard-prices.json"
"""The file in the working directory that ``x402guard prices update`` writes, unless the settings name another."""

_FORMAT: Final = "x402guard.llm.genai_prices.v1"
_MOST_BYTES: Final = 67_108_864

Price = Decimal | None


class PriceChange(Struct, frozen=True):
    """One price of a model that differs between two books, in dollars per measure of the unit (a million tokens, say).

    Attributes:
        provider, model, unit: the subject of the price.
        before, after: None if that book has no such price.
        dropped: True if the new book does not know the model: calls to it are refused, and cost nothing.
    """

    provider: str
    model: str
    unit: str
    before: Price
    after: Price
    dropped: bool = False

    @property
    def falls_by_half(self) -> bool:
        """True if the new price is less than half of the old one, or missing: then another unit's price applies."""
        if not self.before or self.dropped:
            return False
        return self.after is None or self.after * 2 < self.before


def open_book(path: str | None) -> GenaiPriceBook:
    """Return the bundled prices, or the prices of a file from ``write_prices``. Raises ``ConfigError``."""
    if path is None:
        return GenaiPriceBook()
    file = Path(path)
    wrapped = _load(file)
    if not isinstance(wrapped, Mapping) or wrapped.get("format") != _FORMAT:
        raise ConfigError(f"metering.prices: {file} was not written by `x402guard prices update`")
    providers = wrapped.get("providers")
    found = _hash(providers)
    if found != wrapped.get("sha256"):
        raise ConfigError(f"metering.prices: {file} was changed after its import: its hash is {found}", public=found)
    return _book(providers, file, f"sha256:{found[:12]}")


def read_prices(path: Path) -> tuple[GenaiPriceBook, str]:
    """Return the prices and hash of a file in genai-prices' format (a list of providers). Raises ``ConfigError``."""
    providers, found = _providers_of(path)
    return _book(providers, path, f"sha256:{found[:12]}"), found


def write_prices(source: Path, target: Path, *, seen: str | None = None) -> str:
    """Import the prices of *source*: write them to *target* with their hash, and return the hash.

    *seen* is the hash that the owner confirmed: a file that changed after that is refused. Raises ``ConfigError``.
    """
    providers, found = _providers_of(source)
    if seen not in (None, found):
        raise ConfigError(
            f"prices: {source} was changed after its hash was confirmed: its hash is now {found}", public=found
        )
    _book(providers, source, found)
    text = json.dumps({"format": _FORMAT, "sha256": found, "providers": providers})
    partly = target.with_name(f".{target.name}.new")
    try:
        partly.write_text(text, encoding="utf-8")
        partly.replace(target)
    except OSError as error:
        raise ConfigError(f"prices: {target} cannot be written: {error}") from error
    return found


def compare(before: GenaiPriceBook, after: GenaiPriceBook, at_unix: int) -> Iterator[PriceChange]:
    """Yield every price that differs, by provider, name and label, with tiers, batch and future prices and other names.

    Each name of a model is looked up in both books, because a matching rule may resolve it differently. A special price
    that one book lacks is compared with that book's plain price. *at_unix* (unix seconds) is the moment of the current
    prices.
    """
    for provider, name in sorted({*before.names(), *after.names()}):
        old, new = before.every_price(provider, name, at_unix), after.every_price(provider, name, at_unix)
        if not old or not new:
            for unit in sorted({*old, *new}):
                yield PriceChange(provider, name, unit, old.get(unit), new.get(unit), dropped=not new)
            continue
        for label in sorted({*old, *new}):
            unit = label.partition(" ")[0]
            was, is_now = old.get(label, old.get(unit)), new.get(label, new.get(unit))
            if was != is_now:
                yield PriceChange(provider, name, label, was, is_now)


def _load(path: Path) -> Any:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"prices: {path} is too large for a price file")
        text = path.read_text(encoding="utf-8")
        check_depth(text)
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"prices: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _providers_of(path: Path) -> tuple[Any, str]:
    raw = _load(path)
    providers = raw.get("providers") if isinstance(raw, Mapping) else raw
    return providers, _hash(providers)


def _hash(providers: Any) -> str:
    canonical = json.dumps(providers, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _book(providers: Any, path: Path, version: str) -> GenaiPriceBook:
    if not isinstance(providers, list) or not providers:
        raise ConfigError(f"prices: {path} is not a list of providers in the format of genai-prices")
    try:
        return GenaiPriceBook.of_raw(providers, source=path.name, version=version)
    except Exception as error:
        raise ConfigError(f"prices: {path} is not in the format of genai-prices: {str(error)[:300]}") from error
