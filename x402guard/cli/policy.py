"""Defines the commands ``policy check`` and ``policy explain``, which show the effect of the owner's rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from x402guard.assets import AssetRegistry
from x402guard.cli.arguments import AsJson, Data, Header, Method, typed_request
from x402guard.errors import ConfigError, ProtocolError, X402GuardError
from x402guard.flow.request import RequestFacts
from x402guard.frozen import replace
from x402guard.guard.guard import Guard
from x402guard.guard.settings import Settings, load_settings
from x402guard.http.request import mark_guarded, request_facts
from x402guard.ledger.authorize import Refusal
from x402guard.ledger.model import HoldKind
from x402guard.money import Nanos, format_dollars
from x402guard.policy import Policy, Rule
from x402guard.policy.judge import judge
from x402guard.policy.rules import KINDS
from x402guard.policy.verdicts import Subject, Verdict
from x402guard.stores import MemoryStore, check_ledger_url
from x402guard.views.words import printable
from x402guard.x402.offer import Offer, normalise
from x402guard.x402.offer_rules import Case, judge_offer, lifetime_s
from x402guard.x402.wire import PAYMENT_REQUIRED, decode_json, decode_payment_required, parse_payment_required

policy = typer.Typer(help="Check and explain the owner's rules.", no_args_is_help=True)

_WAIT_S = 10.0
_SAID = ("per_payment_cap", "hosts", "networks", "rules")
_MOST_BYTES = 1_048_576
Config = Annotated[Path | None, typer.Option("--config", help="A settings file; default: x402guard.toml.")]


@policy.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A settings file, such as x402guard.toml.")], as_json: AsJson = False
) -> None:
    """Read a settings file as a guard does, and summarize its rules. An error in it gives exit code 2.

    Example: x402guard policy check x402guard.toml
    """
    settings = load_settings(file)
    found = settings.policy.build()
    check_ledger_url(settings.ledger)
    # A guard on a ledger in memory runs every check of the settings and writes nothing.
    Guard(**{**settings.guard_arguments(), "ledger": MemoryStore()}).close()
    lines = _summary(found)
    text = "\n  ".join(
        [f"{file}: the policy is valid, and a guard can be created from the file", *map(printable, lines)]
    )
    if as_json:
        typer.echo(json.dumps({"file": str(file), "valid": True, "rules": lines}, indent=2, ensure_ascii=False))
    else:
        typer.echo(text)


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
    settings = load_settings(config)
    rules = settings.policy.build()
    lines = (
        explain_url(typed_request(what, method, header, data), settings, rules)
        if "://" in what
        else [_explain_tool(what, rules, asks=settings.approver is not None)]
    )
    show_verdicts(lines, as_json=as_json)


def show_verdicts(lines: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print what the rules make of offers or of a tool: the verdict, the rule and its reason, and what would be signed."""
    if as_json:
        typer.echo(json.dumps(lines, indent=2, ensure_ascii=False))
        return
    for line in lines:
        typer.echo(printable(f"{line['what']}: {line['verdict']}" + (f" ({line['rule']})" if line["rule"] else "")))
        if line["reason"]:
            typer.echo(printable(f"  {line['reason']}"))
        if line.get("signs"):
            typer.echo(printable(f"  would sign {line['signs']}"))


def _explain_tool(tool: str, rules: Policy, *, asks: bool) -> dict[str, Any]:
    return _line(tool, judge(rules, Subject(HoldKind.TOOL, (tool,), Nanos(0))), asks=asks)


def _line(what: str, verdict: Verdict, *, asks: bool) -> dict[str, Any]:
    if verdict.action == "ask" and not asks:
        verdict = replace(verdict, action="deny", reason=f"{verdict.reason}, but the settings name no approver")
    people = "needs approval" if verdict.approvers <= 1 else f"needs {verdict.approvers} approvals"
    words = {"allow": "allowed", "narrow": "narrowed", "ask": people, "deny": "denied"}
    level = f"{verdict.level}: " if verdict.level else ""
    return {"what": what, "verdict": f"{level}{words[verdict.action]}", "rule": verdict.rule, "reason": verdict.reason}


def explain_url(request: httpx.Request, settings: Settings, rules: Policy) -> list[dict[str, Any]]:
    """Send a request once, without a payment, and return what the rules make of each offer. Raises ``ConfigError``."""
    url = str(request.url)
    try:
        with httpx.Client(timeout=_WAIT_S, trust_env=False) as http:
            facts = request_facts(request)
            with closing(http.send(mark_guarded(request), stream=True)) as answer:
                body = _read(answer)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"url: the request to {url[:200]!r} failed: {type(error).__name__}: {error}") from error
    if answer.status_code != httpx.codes.PAYMENT_REQUIRED:
        return [
            {"what": url, "verdict": f"requires no payment (status {answer.status_code})", "rule": "", "reason": ""}
        ]
    registry = AssetRegistry(tuple(asset.build() for asset in settings.assets))
    try:
        required = _terms(answer, body)
    except X402GuardError as error:
        return [{"what": url, "verdict": "denied", "rule": error.code, "reason": str(error)}]
    asks = settings.approver is not None
    return [_explain_offer(offer, facts, rules, asks=asks) for offer in normalise(required, registry)]


def _read(answer: httpx.Response) -> bytes:
    body = b""
    for chunk in answer.iter_bytes():
        body += chunk
        if len(body) > _MOST_BYTES:
            raise ValueError(f"the answer has more than {_MOST_BYTES} bytes")
    return body


def _terms(answer: httpx.Response, body: bytes) -> Any:
    header = answer.headers.get(PAYMENT_REQUIRED)
    if header is not None:
        return decode_payment_required(header)
    value = decode_json(body, field="body")
    if not isinstance(value, dict):
        raise ProtocolError("this 402 answer contains no x402 terms", field="body")
    return parse_payment_required(value, field="body")


def _explain_offer(offer: Offer | Refusal, facts: RequestFacts, rules: Policy, *, asks: bool) -> dict[str, Any]:
    if isinstance(offer, Refusal):
        return {"what": "an offer", "verdict": "denied", "rule": offer.rule, "reason": offer.reason}
    what = f"${format_dollars(offer.amount_nanos)} to {offer.payee} on {offer.network}, {offer.scheme}"
    case = Case(facts, offer)
    objection = judge_offer(rules, case)
    if objection is not None:
        return {"what": what, "verdict": "denied", "rule": objection.rule, "reason": objection.reason}
    verdict = judge(rules, case.subject)
    most = None if verdict.narrow is None else verdict.narrow.most
    if most is not None and offer.amount_nanos > most:
        reason = f"rule {verdict.narrowed_by!r} narrows this to ${format_dollars(most)}, but the seller sets the price"
        return {"what": what, "verdict": "denied", "rule": verdict.narrowed_by, "reason": reason}
    signs = (
        f"{offer.amount_atomic} units of {offer.asset.symbol} ({offer.asset.address}) to {offer.payee} on {offer.network} by {offer.scheme}/{offer.method}, "
        f"good for {lifetime_s(rules, case)} s"
    )
    return {**_line(what, verdict, asks=asks), "signs": signs}
