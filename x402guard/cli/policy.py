"""Defines the commands ``policy check`` and ``policy explain``, which show the effect of the owner's rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from msgspec.structs import replace

from x402guard.assets import TEST_NETWORKS
from x402guard.chain.reader import RpcChainReader
from x402guard.cli.arguments import AsJson, Data, Header, Method, typed_request
from x402guard.errors import ConfigError, PaymentRefused, ProtocolError
from x402guard.flow.context import Context
from x402guard.flow.shell import Shell
from x402guard.flow.singleflight import token_says
from x402guard.guard.arguments import meter_of
from x402guard.guard.guard import Guard
from x402guard.guard.opening import parse_wallet_budget
from x402guard.guard.settings import Settings, load_settings
from x402guard.http.explain import MOST_BYTES, Explained, Explainer
from x402guard.http.rehearsal import NoKey, RehearsedLedger, rehearse
from x402guard.kernel.evm import Address
from x402guard.kernel.rows import WALLET, Nanos
from x402guard.ledger.sessions import PAYER_MARK
from x402guard.ledger.view import Notice
from x402guard.money import dollars_to_nanos, format_dollars
from x402guard.policy import Policy, Rule
from x402guard.policy.approvals import ApprovalRequest
from x402guard.policy.patterns import check_pattern
from x402guard.policy.rules import KINDS
from x402guard.stores import MemoryStore, as_ledger_url, check_ledger_url, ledger_exists, open_store
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
    lines = [*_summary(found), *_budgets(settings)]
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


def _budgets(settings: Settings) -> Iterator[str]:
    """Yield what may be spent, by the settings."""
    limit, window = parse_wallet_budget(settings.budget)
    per = "" if window is None else f" each {window.per} ({window.tz})"
    said = [] if limit is None else [f"the wallet ${format_dollars(limit)}{per}"]
    if settings.session_budget is not None:
        said.append(f"each session ${format_dollars(dollars_to_nanos(settings.session_budget))}")
    yield "budgets: " + (", ".join(said) or "none; the wallet's limit is in its ledger, and each session names its own")


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
    """Show what the rules, the ledger and the chains make of a URL's offers, or the rules of a tool. Exit code 2: refused.

    Nothing is signed, paid or written.

    Example: x402guard policy explain https://seller.example/summary -X POST -d '{"pages": 3}'
    """
    settings = load_settings(config)
    if "://" in what:
        lines = explained(settings, typed_request(what, method, header, data))
    else:
        if "." in what.partition("/")[0] and "/" in what and " " not in what:
            raise ConfigError(f"what: {what!r:.120} is neither a URL nor a tool; write https://{what:.100}")
        lines = [explainer_of(settings).tool(check_pattern("what", what))]
    show_verdicts(lines, as_json=as_json)


def explainer_of(settings: Settings) -> Explainer:
    """Return what explains the rules of the settings. Raises ``ConfigError``."""
    return Explainer(settings.policy.build(), settings.registry(), settings.asks, meter_of(settings.metering.build()))


_NO_LIMIT: Final = Nanos(10**18)
"""A session's budget where none is asked about, in nano-dollars: a billion dollars."""


def explained(settings: Settings, request: httpx.Request, limit: Nanos | None = None) -> list[Explained]:
    """Return what would become of each offer for a request, asked of the rules, the ledger and the chains.

    *limit*: the budget of the session that pays, in nano-dollars; None to ask without one, and without a key if there is
    none. Raises ``ConfigError``, ``LedgerUnavailable``.
    """
    explainer = explainer_of(settings)
    answer, raw = explainer.ask(request)
    lines = explainer.answer(request, answer, raw)
    if not any(line.signs for line in lines):
        return lines
    with _rehearsing(settings, limit) as (payer, unasked):
        try:
            outcome = rehearse(request, answer, raw, most=MOST_BYTES, payer=payer)
        except (PaymentRefused, ProtocolError) as error:
            rule = getattr(error, "rule", "") or error.code
            no = {"verdict": "denied", "rule": rule, "reason": str(error).removeprefix(f"{rule}: "), "signs": ""}
            return [replace(line, **no) if line.signs else line for line in lines]
    if isinstance(outcome, ApprovalRequest):
        asks = {"verdict": "needs approval", "rule": outcome.rule, "reason": outcome.reason}
        lines = [replace(line, **asks) if line.signs else line for line in lines]
    return [replace(line, not_asked=unasked) if line.signs else line for line in lines]


@contextmanager
def _rehearsing(settings: Settings, limit: Nanos | None) -> Iterator[tuple[tuple[Context, Shell], str]]:
    """Give the session that would pay, of which nothing is written, and what it cannot ask, in words."""
    url, must_exist = as_ledger_url(settings.ledger), settings.ledger_must_exist
    check_ledger_url(url)
    is_there = url != "memory://" and ledger_exists(url)
    store = open_store(url, must_exist=must_exist, read_only=is_there) if is_there or must_exist else MemoryStore()
    with closing(store):
        ledger: Any = RehearsedLedger(store) if store.path(WALLET) else MemoryStore()
        address, unasked = settings.payer(), ""
        known = address or ledger.marks(*PAYER_MARK).get(PAYER_MARK[1], {}).get("address")
        if limit is None and address is None:
            unasked = "whether the key is there" + ("" if known else ", and what its account has")
            address = known or Address(_NO_ACCOUNT)
        arguments = settings.guard_arguments(pays=False) | {"signer": address and NoKey(address), "webhook": None}
        if not known:
            arguments |= {"chains": None, "unsafe_no_chain": True}
        with Guard(**arguments | {"ledger": ledger, **_QUIET}) as guard:
            budget = f"${format_dollars(limit or guard.context.session_budget or _NO_LIMIT)}"
            session = guard.session("x402guard pay", budget=budget)
            if not unasked and (blind := sorted(set(guard.policy.networks or TEST_NETWORKS) - guard.context.chains)):
                unasked = f"what the account has on {', '.join(blind)}: [chains] names no RPC of it"
            yield (session.context, replace(session.shell, notifier=_Silent())), unasked


_NO_ACCOUNT: Final = "0x" + "00" * 20
_QUIET: Final = {"background_checks": False, "telemetry": False}


class _Silent:
    """Says nothing: what would be told has not happened."""

    def notify(self, notices: Iterable[Notice]) -> None:
        """Do nothing."""


def show_verdicts(lines: list[Explained], *, as_json: bool) -> None:
    """Print what becomes of offers or of a tool: the verdict, the rule and its reason, and what would be signed.

    Raises ``typer.Exit`` with code 2 if all are refused.
    """
    if as_json:
        typer.echo(json_text([line.to_dict() for line in lines]))
    for line in () if as_json else lines:
        typer.echo(printable(f"{line.what}: {line.verdict}" + (f" ({line.rule})" if line.rule else "")))
        if line.reason:
            typer.echo(printable(f"  {line.reason}"))
        if line.signs:
            typer.echo(printable(f"  would sign {line.signs}"))
        if line.not_asked:
            typer.echo(printable(f"  not asked: {line.not_asked}"))
    if lines and all(line.is_denied for line in lines):
        raise typer.Exit(2)
