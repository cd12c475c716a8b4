"""Defines the commands ``policy check`` and ``policy explain``, which show the effect of the owner's rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated

import typer

from x402guard.chain.reader import RpcChainReader
from x402guard.cli.arguments import AsJson, Data, Header, Method, typed_request
from x402guard.errors import ConfigError
from x402guard.flow.singleflight import token_says
from x402guard.guard.arguments import meter_of
from x402guard.guard.guard import Guard
from x402guard.guard.settings import Settings, load_settings
from x402guard.http.explain import Explained, Explainer
from x402guard.money import format_dollars
from x402guard.policy import Policy, Rule
from x402guard.policy.patterns import check_pattern
from x402guard.policy.rules import KINDS
from x402guard.stores import MemoryStore, as_ledger_url, check_ledger_url
from x402guard.views.words import json_text, printable
from x402guard.x402.tokens import doubt_of, facts_of

policy = typer.Typer(help="Check and explain the owner's rules.", no_args_is_help=True)

_SAID = ("per_payment_cap", "hosts", "networks", "rules")
Config = Annotated[Path | None, typer.Option("--config", help="A settings file; default: x402guard.toml.")]


@policy.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A settings file, such as x402guard.toml.")], as_json: AsJson = False
) -> None:
    """Read a settings file as a guard does, and summarize its rules. An error in it gives exit code 2.

    The contract of each token that the file adds is asked whether it says the same.

    Example: x402guard policy check x402guard.toml
    """
    settings = load_settings(file)
    found = settings.policy.build()
    check_ledger_url(as_ledger_url(settings.ledger))
    # A guard on a ledger in memory runs every check of the settings and writes nothing.
    Guard(**{**settings.guard_arguments(), "ledger": MemoryStore()}).close()
    lines = _summary(found)
    for told, doubt in added_tokens(settings):
        if doubt is not None:
            raise ConfigError(f"assets: {doubt}")
        lines.append(told)
    text = "\n  ".join(
        [f"{file}: the policy is valid, and a guard can be created from the file", *map(printable, lines)]
    )
    if as_json:
        typer.echo(json_text({"file": str(file), "valid": True, "rules": lines}))
    else:
        typer.echo(text)


def added_tokens(settings: Settings) -> Iterator[tuple[str, str | None]]:
    """Yield each token of the settings that is not built in: what it counts, and why it is not believed, or None.

    Each contract is asked, if its network is in ``[chains]``. Raises ``ConfigError``.
    """
    added = settings.registry().added()
    if not added:
        return
    with closing(RpcChainReader(settings.read_chains())) as chain:
        for asset in added:
            says = token_says(facts_of(asset), chain) if asset.network in chain.networks else None
            told = f"{asset.symbol} at {asset.contract} on {asset.network} counts ${asset.usd} a token, by the settings"
            unread = says is None and settings.unsafe_no_chain
            yield told, None if unread else doubt_of(asset, says)


def _summary(found: Policy) -> list[str]:
    """Return what may be paid, then each setting that differs from its default, then the rules."""
    usual = Policy()
    cap = "no cap" if found.cap_nanos is None else f"at most ${format_dollars(found.cap_nanos)} a payment"
    hosts = "any host" if found.hosts is None else _shown(found.hosts)
    networks = "test networks" if found.networks == usual.networks else _shown(found.networks or ("any network",))
    lines = [f"payments: {cap}; {hosts}; {networks}"]
    for name in (field.name for field in fields(Policy) if field.init and field.name not in _SAID):
        value = getattr(found, name)
        if value != getattr(usual, name):
            lines.append(f"{name}: {_shown(value)}")
    return lines + [f"rule {rule.name!r}: {_shown_rule(rule)}" for rule in found.rules or ()]


def _shown(value: object) -> str:
    if value is None:
        return "off"
    if isinstance(value, (frozenset, tuple)):
        return ", ".join(sorted(map(str, value))) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {item}" for key, item in value.items()) or "none"
    if is_dataclass(value) and not isinstance(value, type):
        usual = type(value)()
        parts = ((field.name, getattr(value, field.name)) for field in fields(value) if field.init)
        changed = [f"{name} {_shown(part)}" for name, part in parts if part != getattr(usual, name)]
        return ", ".join(changed)
    return str(value)


def _shown_rule(rule: Rule) -> str:
    about = {
        "kinds": None if len(rule.kinds) == len(KINDS) else _shown(rule.kinds),
        "above": rule.above,
        "payees": None if rule.payees is None else _shown(rule.payees),
        "approvers": rule.approvers if rule.action == "ask" else None,
        "ceiling": rule.ceiling,
        "output_limit": rule.output_limit,
        "remove": _shown(rule.remove) if rule.remove else None,
    }
    said = "; ".join(f"{name} {value}" for name, value in about.items() if value is not None)
    return f"{rule.action} {rule.match}" + (f" ({said})" if said else "")


@policy.command("explain")
def explain(
    what: Annotated[
        str, typer.Argument(help="A URL, which is requested once without a payment; or the name of a tool.")
    ],
    *,
    method: Method = "GET",
    header: Header = None,
    data: Data = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Show the decision of the rules on a URL's offers, or on a tool. Signs nothing, pays nothing, opens no ledger.

    Example: x402guard policy explain https://seller.example/summary -X POST -d '{"pages": 3}'
    """
    explainer = explainer_of(load_settings(config))
    if "://" in what:
        lines = explainer.url(typed_request(what, method, header, data))
    else:
        if "." in what.partition("/")[0] and "/" in what and " " not in what:
            raise ConfigError(f"what: {what!r:.120} is neither a URL nor a tool; write https://{what:.100}")
        lines = [explainer.tool(check_pattern("what", what))]
    show_verdicts(lines, as_json=as_json)


def explainer_of(settings: Settings) -> Explainer:
    """Return what explains the rules of the settings. Raises ``ConfigError``."""
    return Explainer(settings.policy.build(), settings.registry(), settings.asks, meter_of(settings.metering.build()))


def show_verdicts(lines: list[Explained], *, as_json: bool) -> None:
    """Print what the rules make of offers or of a tool: the verdict, the rule and its reason, and what would be signed."""
    if as_json:
        typer.echo(json_text([line.to_dict() for line in lines]))
        return
    for line in lines:
        typer.echo(printable(f"{line.what}: {line.verdict}" + (f" ({line.rule})" if line.rule else "")))
        if line.reason:
            typer.echo(printable(f"  {line.reason}"))
        if line.signs:
            typer.echo(printable(f"  would sign {line.signs}"))
