"""Price files: taken in by the owner's word, with their hash shown, and never fetched."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from x402guard.errors import ConfigError
from x402guard.llm.genai_prices import GenaiPriceBook
from x402guard.strict_json import check_depth

PRICES_FILE: Final = "x402guard-prices.json"
"""Where ``x402guard prices update`` writes, in the working directory, unless the settings name another."""

_FORMAT: Final = "x402guard.llm.genai_prices.v1"
_MOST_BYTES: Final = 67_108_864

Price = Decimal | None


@dataclass(frozen=True, slots=True)
class PriceChange:
    """One price of one model that differs between two books, in dollars by the unit's own measure (a million tokens, say).

    Attributes:
        provider, model, unit: what it is the price of.
        before, after: None where a book has no such price.
        dropped: the new book does not know the model at all: it is refused, and costs nothing.
    """

    provider: str
    model: str
    unit: str
    before: Price
    after: Price
    dropped: bool = False

    @property
    def falls_by_half(self) -> bool:
        """True where less than half of the old price is left, or none of its own: what had one falls to another's."""
        if not self.before or self.dropped:
            return False
        return self.after is None or self.after * 2 < self.before


def open_book(path: str | None) -> GenaiPriceBook:
    """Return the bundled prices, or those of a file that ``write_prices`` wrote. Raises ``ConfigError``."""
    if path is None:
        return GenaiPriceBook()
    file = Path(path)
    wrapped = _load(file)
    if not isinstance(wrapped, Mapping) or wrapped.get("format") != _FORMAT:
        raise ConfigError(f"metering.prices: {file} was not written by `x402guard prices update`")
    providers = wrapped.get("providers")
    found = _hash(providers)
    if found != wrapped.get("sha256"):
        raise ConfigError(f"metering.prices: {file} was changed since it was taken in: its hash is {found}")
    return _book(providers, file, f"sha256:{found[:12]}")


def read_prices(path: Path) -> tuple[GenaiPriceBook, str]:
    """Return the prices of a file in genai-prices' own format (a list of providers), and their hash. Raises ``ConfigError``."""
    providers, found = _providers_of(path)
    return _book(providers, path, f"sha256:{found[:12]}"), found


def write_prices(source: Path, target: Path, *, seen: str | None = None) -> str:
    """Take the prices of *source* in: write them to *target* with their hash, which is returned.

    *seen* is the hash of what its owner said yes to: a file that has changed since is refused. Raises ``ConfigError``.
    """
    providers, found = _providers_of(source)
    if seen not in (None, found):
        raise ConfigError(f"prices: {source} has changed since it was looked at: its hash is {found}")
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
    """Yield every price that differs, by provider, name and label: tiers, batches, prices to come and other names too.

    A model is looked up in both books by each of its names, since a rule may lead a name elsewhere. A special price that one of
    the books lacks is compared with the plain one that holds instead. *at_unix* (unix seconds) says which prices hold now.
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
            raise ConfigError(f"prices: {path} is larger than any price file")
        text = path.read_text(encoding="utf-8")
        check_depth(text)
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"prices: {path} cannot be read: {error}") from error


def _providers_of(path: Path) -> tuple[Any, str]:
    raw = _load(path)
    providers = raw.get("providers") if isinstance(raw, Mapping) else raw
    return providers, _hash(providers)


def _hash(providers: Any) -> str:
    canonical = json.dumps(providers, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _book(providers: Any, path: Path, version: str) -> GenaiPriceBook:
    if not isinstance(providers, list) or not providers:
        raise ConfigError(f"prices: {path} is not a list of providers, the format of genai-prices")
    try:
        return GenaiPriceBook.of_raw(providers, source=path.name, version=version)
    except Exception as error:
        raise ConfigError(f"prices: {path} is not in the format of genai-prices: {str(error)[:300]}") from error
