"""Defines the command ``doctor``, which checks an installation and its settings."""

from __future__ import annotations

import importlib
import json
import os
import platform
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from x402guard.assets import resolve_network
from x402guard.chain.capabilities import COSTS, FINAL_BLOCK, missing
from x402guard.chain.reader import INVALID, RpcChainReader
from x402guard.chain.rpc import ChainUnreadable, JsonRpc, quantity
from x402guard.cli.arguments import AsJson, LedgerUrl, without_keys, working
from x402guard.cli.policy import added_tokens
from x402guard.errors import ConfigError, LedgerUnavailable
from x402guard.guard.guard import Guard
from x402guard.guard.opening import WalletBudget, parse_wallet_budget
from x402guard.guard.settings import Settings, load_settings, settings_sources, stated_settings
from x402guard.guard.unseen import clients_past_guard, unseen_libraries
from x402guard.kernel.rows import WALLET, HoldKind
from x402guard.ledger.owner import owner_mark
from x402guard.ledger.sessions import PAYER_MARK, is_owners_limit
from x402guard.ledger.watch import BEAT
from x402guard.money import format_dollars
from x402guard.policy import Policy
from x402guard.stores import (
    MemoryStore,
    as_ledger_url,
    check_ledger_url,
    is_postgres,
    ledger_exists,
    ledger_path,
    open_store,
)
from x402guard.stores.file_errors import refuse_second_path, refuse_unless_writable

_SHOWN = ("x402guard", "httpx", "httpx2", "genai-prices", "tiktoken", "msgspec", "coincurve")
_MISSED_BEATS = 3
Verdict = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: what was checked, its verdict, and details with the fix."""

    check: str
    verdict: Verdict
    detail: str


def doctor(
    ledger: LedgerUrl = None,
    as_json: AsJson = False,
    config: Annotated[
        Path | None, typer.Option("--config", help="A TOML file to use instead of ./x402guard.toml.")
    ] = None,
    load: Annotated[
        str | None,
        typer.Option("--load", help="Your agent's module. It is imported to find the libraries that it loads."),
    ] = None,
) -> None:
    """Check the settings, the key, the ledger, the chains, and libraries whose requests the guard does not see.

    Exit code 1 if a problem would prevent payments. Example: x402guard doctor --load my_agent
    """
    unseen = list(_unseen(load))  # first: the checks load libraries themselves
    with working("looking at settings, ledger and chains"):
        findings = [replace(each, detail=without_keys(each.detail)) for each in (*_examine(ledger, config), *unseen)]
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            mark = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}[finding.verdict]
            typer.echo(f"{mark}  {finding.check:<10} {finding.detail}")
    if any(finding.verdict == "problem" for finding in findings):
        raise typer.Exit(1)


def _examine(ledger: str | None, config: Path | None) -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {sys.platform}")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _SHOWN)
    yield Finding("versions", "ok", versions)
    try:
        sources = settings_sources(config)  # before the secrets leave the environment
        loosens = [row for row in stated_settings(config) if row.loosens]
        settings = load_settings(config)
        policy = settings.policy.build()
    except ConfigError as error:
        yield Finding("settings", "problem", str(error))
        return
    try:
        arguments = settings.guard_arguments()
        # A guard on a ledger in memory runs every check of the settings and writes nothing.
        Guard(**{**arguments, "ledger": MemoryStore()}).close()
    except ConfigError as error:
        yield Finding("settings", "problem", str(error))
        return
    verdict: Verdict = "warning" if "is not used" in sources else "ok"  # of a policy in the file
    yield Finding("settings", verdict, f"a guard can be created from them: {sources}")
    signer = arguments["signer"]
    if signer is None:
        yield Finding(
            "key",
            "warning",
            "neither X402GUARD_PRIVATE_KEY nor X402GUARD_KEYSTORE is set: this guard meters and never pays",
        )
    else:
        yield Finding("key", "ok", f"pays from {signer.address}")
    for row in loosens:
        yield Finding("loosens", "ok", f"{row.name} = {row.value:.200}, by {row.source}")
    yield from _policy(policy)
    yield from _people(settings, policy)
    yield from _ledger(ledger or settings.ledger, arguments["budget"], None if signer is None else signer.address)
    yield from _chains(settings, policy)
    for told, doubt in added_tokens(settings):
        yield Finding("token", "ok" if doubt is None else "problem", told if doubt is None else f"{doubt}; {told}")


def _unseen(module: str | None) -> Iterator[Finding]:
    """Yield the libraries whose requests the guard does not see: those that *module* loads, or else those installed."""
    if module is None:
        names = ", ".join(library.name for library in unseen_libraries(loaded=False))
        if names:
            detail = f"installed, but not seen by the guard: {names}; --load MODULE shows which of them an agent loads"
            yield Finding("unseen", "ok", detail)
        return
    if "/" in module or module.endswith(".py") or not all(module.split(".")):
        detail = f"--load names a module as Python imports it, such as my_agent or my_package.agent, not {module!r}"
        yield Finding("unseen", "problem", detail)
        return
    before = {library.name for library in unseen_libraries(loaded=True)}
    try:
        sys.path.insert(0, "")
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's own code may raise anything
        yield Finding("unseen", "problem", f"{module} cannot be imported: {type(error).__name__}: {error}")
        return
    finally:
        sys.path.remove("")
    past = clients_past_guard()
    yield from (Finding("unseen", "problem", f"{module}: {told}") for told in past)
    found = [library for library in unseen_libraries(loaded=True) if library.name not in before]
    if not found and not past:
        yield Finding("unseen", "ok", f"{module} loads nothing that the guard does not see")
    for library in found:
        detail = f"{module} loads {library.name}, whose requests are neither held nor paid: {library.hint}"
        yield Finding("unseen", "warning", detail)


def _policy(policy: Policy) -> Iterator[Finding]:
    cap = "none" if policy.per_payment_cap is None else str(policy.per_payment_cap)
    networks = "any known" if policy.networks is None else f"{len(policy.networks)} networks"
    yield Finding(
        "policy", "ok", f"per-payment cap {cap}, {networks}, signatures live {policy.max_lifetime_s} s at most"
    )


def _people(settings: Settings, policy: Policy) -> Iterator[Finding]:
    """Yield the findings about the approver and the kill file."""
    if settings.approver is not None:
        yield Finding("approver", "ok", f"questions go to the {settings.approver}")
    elif policy.risk is not None:
        detail = "no approver is set, so tools such as send_email and delete_… are denied; set approver, or policy.risk = false"
        yield Finding("approver", "warning", detail)
    if settings.kill_file is not None:
        file = Path(settings.kill_file).expanduser().absolute()
        try:
            if file.exists():
                yield Finding("kill file", "problem", f"{file} exists: nothing is paid until it is removed")
            else:
                yield Finding("kill file", "ok", f"while there is a file {file}, nothing is paid")
        except OSError as error:
            yield Finding("kill file", "problem", f"{file} cannot be looked at, so nothing is paid: {error.strerror}")


def _watchdog(beats: Iterable[Mapping[str, Any]], now_ms: int) -> Iterator[Finding]:
    """Yield whether the watchdog of a ledger still looks, if it had one that has not been ended."""
    for beat in beats:
        late_s = (now_ms - beat["at_ms"]) // 1000
        if beat["ended"]:
            continue
        if late_s > _MISSED_BEATS * beat["beat_s"]:
            fix = "start it again: x402guard watchdog"
            yield Finding("watchdog", "warning", f"process {beat['pid']} has not looked for {late_s} s; {fix}")
        else:
            yield Finding("watchdog", "ok", f"process {beat['pid']} looks every {beat['beat_s']} s")


def _place(path: Path) -> Finding:
    """Return whether a ledger can be made where there is none."""
    parent = path.resolve().parent
    if not parent.is_dir():
        return Finding("ledger", "problem", f"folder {parent} does not exist; create it first")
    writable = os.access(parent, os.W_OK)
    detail = f"{path} will be created at first use" if writable else f"{parent} cannot be written"
    return Finding("ledger", "ok" if writable else "problem", detail)


def _ledger(url: str, budget: WalletBudget | None, payer: str | None) -> Iterator[Finding]:
    try:
        url = as_ledger_url(url)
        path = ledger_path(url) if url.startswith("sqlite:///") else None
        check_ledger_url(url)
        is_there = path is None or ledger_exists(url)
    except (ConfigError, LedgerUnavailable) as error:
        yield Finding("ledger", "problem", f"{error}. {error.advice}")
        return
    if path is not None and not is_there:
        yield _place(path)
        return
    try:
        if path is not None:  # what a guard refuses, and who looks does not
            refuse_second_path(path.resolve())
            refuse_unless_writable(path.resolve())
        if is_postgres(url) and not ledger_exists(url):
            yield Finding("ledger", "ok", f"{url} has no ledger yet; it is made at first use")
            return
        store = open_store(url, read_only=True)
        live = sum(hold.kind is not HoldKind.TOKENS for hold in store.outstanding())
        wallets = store.marks(*PAYER_MARK).values()
        watched, now_ms = store.marks(*BEAT).values(), store.now_ms()
        limit = next((node.limit for node in store.path(WALLET)), None)
        set_by_owner = store.marks(*owner_mark(WALLET)).get(owner_mark(WALLET)[1])
        store.close()
    except (ConfigError, LedgerUnavailable) as error:
        yield Finding("ledger", "problem", f"{error}. {error.advice}")
        return
    shown = "no limit" if limit is None else f"a limit of ${format_dollars(limit)}"
    yield Finding("ledger", "ok", f"{url}: {live} live holds; its wallet has {shown}")
    yield from _watchdog(watched, now_ms)
    for wallet in wallets:
        if payer is not None and wallet["address"] != payer:
            yield Finding(
                "ledger", "problem", f"it belongs to the wallet {wallet['address']}, but the key belongs to {payer}"
            )
    asked, _ = parse_wallet_budget(budget)
    if limit is None and asked is None:
        how = "x402guard budget set wallet AMOUNT, or budget in the settings"
        yield Finding("ledger", "warning", f"its wallet has no limit: each session alone has one. Set it: {how}")
    if asked is not None and limit not in (None, asked):
        is_owners = limit is not None and is_owners_limit(set_by_owner, asked, limit)
        told = "which its owner has set; that counts" if is_owners else "so no guard starts; leave budget out"
        yield Finding(
            "ledger",
            "ok" if is_owners else "problem",
            f"budget is ${format_dollars(asked)}, but its wallet has {shown}, {told}",
        )
    if url == "memory://":
        yield Finding("ledger", "warning", "memory:// forgets every hold when the process ends")
    elif path is not None and stat.S_IMODE(path.stat().st_mode) & 0o077:
        yield Finding("ledger", "warning", f"{path} can be read by other users; run: chmod 600 {path}")


def _chains(settings: Settings, policy: Policy) -> Iterator[Finding]:
    try:
        RpcChainReader(settings.read_chains()).close()
    except ConfigError as error:
        yield Finding("chain", "problem", str(error))
        return
    for network, chain in settings.read_chains().items():
        rpc = JsonRpc(resolve_network(network) or network, chain.urls, timeout_s=chain.timeout_s)
        try:
            number, lacks = quantity(rpc.call("eth_blockNumber")), list(missing(rpc, chain.finality))
        except (ChainUnreadable, ConfigError, *INVALID) as error:
            yield Finding("chain", "problem", f"{network}: {error}")
        else:
            yield Finding("chain", "ok", f"{network}: block {number}")
            for capability in lacks:
                verdict: Verdict = "problem" if capability == FINAL_BLOCK else "warning"
                yield Finding("chain", verdict, f"{network}: the node has not {capability}: {COSTS[capability]}")
        finally:
            rpc.close()
    if not settings.chains:
        blind = "" if policy.networks is not None else "; real networks are refused without one"
        yield Finding("chain", "warning", f"no RPC endpoint is configured, so receipts stay claims{blind}")
