"""Every setting with its default and its meaning, read from the classes that have them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, get_args

from msgspec import Struct
from pydantic import BaseModel

from x402guard.guard.guard import Guard
from x402guard.guard.settings import MeteringSettings, PolicySettings, Settings, tables_in
from x402guard.guard.tables import ZERO_IS_NONE, ProxySettings
from x402guard.llm import Metering
from x402guard.policy import Breaker, Bulkhead, Loop, Policy, Velocity

_MEANINGS: Final = {
    "keystore": "a keystore file (version 3) in place of the private key; its password is X402GUARD_KEYSTORE_PASSWORD.",
    "webhook_url": "where notices are posted to, each once.",
}
_UNSET: Final = "…   # not set"
_HEAD: Final = """\
# The settings of x402guard. Guard.from_env() and each command read this file in the folder they run in, as its owner has
# trusted it; an environment variable X402GUARD_… comes first. Each line shows the default: take the # away to change it, and
#     x402guard policy check x402guard.toml     reads it back
#     x402guard config trust                    trusts it as it is then
# No key and no password belongs here: see x402guard keys.
#
"""
_SECRETS: Final = ("private_key", "keystore_password", "webhook_secret")
_ARGUMENT: Final = re.compile(r"^ {8}(\w+(?:, \w+)*): (.*(?:\n {12}.*)*)", re.MULTILINE)


class Default(Struct, frozen=True):
    """One setting.

    Attributes:
        table: its table in ``x402guard.toml``: ``""``, ``policy``, ``policy.loop`` …
        name: its key.
        value: the default as TOML; None if it is none, which TOML cannot write.
        meaning: what it is.
    """

    table: str
    name: str
    value: str | None
    meaning: str


def each_default() -> Iterator[Default]:
    """Yield every setting that ``x402guard.toml`` can have, in the order of the classes."""
    guard = _meanings(Guard)
    for name, field in Settings.model_fields.items():
        if name not in ("policy", "metering", "proxy", *_SECRETS):
            yield Default("", name, _toml(field.default), guard.get(name, "") or _MEANINGS.get(name, ""))
    yield from _of_table("policy", Policy(), PolicySettings)
    yield from _of_table("metering", Metering(), MeteringSettings)
    yield from _of_table("proxy", ProxySettings(), ProxySettings)


def _of_table(table: str, part: object, keys: type[BaseModel]) -> Iterator[Default]:
    meanings = _meanings(type(part))
    inner: list[tuple[str, object, type[BaseModel]]] = []
    for name, field in keys.model_fields.items():
        value = getattr(part, name)
        if dataclasses.is_dataclass(value):
            inner.append((f"{table}.{name}", value, tables_in(field.annotation)[0]))
            continue
        none = "0" if isinstance(part, ZERO_IS_NONE) and str not in get_args(field.annotation) else None
        yield Default(table, name, none if value is None else _toml(value), meanings.get(name, ""))
    for name, value, table_keys in inner:
        yield from _of_table(name, value, table_keys)


def on_by_default() -> str:
    """Return, in a few lines, what a guard without settings does."""
    policy, metering = Policy(), Metering()
    loop, velocity, breaker = policy.loop or Loop(), policy.velocity or Velocity(), policy.breaker or Breaker()
    bulkhead = policy.bulkhead or Bulkhead()
    return "\n".join(
        (
            "On by default:",
            f"  payments on test networks alone, {policy.per_payment_cap} each at most",
            f"  {loop.calls} identical calls within {loop.window_s} s, then a refusal; {loop.latch_after} refusals of one call trip the run",
            f"  {velocity.new_payees_per_day} new sellers a day in each run, and prices up to {velocity.price_ratio} times those of like requests",
            f"  {breaker.failures} failures in a row open the circuit of a host or tool for {breaker.rest_s} s; {bulkhead.per_host} payments to a host at a time",
            "  tools that delete, send e-mail or SMS, or move money ask an approver, and are refused without one",
            f"  a paid answer may take {policy.timeouts.payment_s} s, and a call waits {policy.wait_for_budget_s} s for held money",
            f"  LLM calls without an output limit: {metering.unbounded_output!r}",
            "Off by default: limits on steps, time and dollars a minute for the whole run; a chain to check receipts against",
        )
    )


def settings_text() -> str:
    """Return an ``x402guard.toml`` that changes nothing: each setting as a comment, with its default and its meaning."""
    lines, table = [_HEAD + textwrap.indent(on_by_default(), "# ") + "\n"], ""
    for each in each_default():
        if each.table != table:
            table = each.table
            lines.append(f"\n[{table}]")
        words = each.meaning.replace("None", "not set")
        lines += [f"# {line}" for line in textwrap.wrap(words, 116)]
        lines.append(f"# {each.name} = {each.value or _UNSET}\n")
    return "\n".join(lines)


def _toml(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, str | Decimal):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{}" if not value else None
    if isinstance(value, frozenset | set):
        value = sorted(value)
    return f"[{', '.join(filter(None, map(_toml, value)))}]" if isinstance(value, Sequence) else None


def _meanings(kind: type[Any]) -> dict[str, str]:
    """Return what the arguments of a class are, by its docstring."""
    found = {}
    for names, text in _ARGUMENT.findall(f"        {inspect.cleandoc(kind.__doc__ or '')}".replace("\n", "\n    ")):
        for name in names.split(", "):
            found[name] = " ".join(text.split()).replace("``", "`")
    return found
