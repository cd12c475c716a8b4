"""Renders the report as plain text, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final
from zoneinfo import ZoneInfo

_MOST_ROWS: Final = 12


def render(report: Mapping[str, Any]) -> str:
    """Return the values of a report as aligned lines of text, without a trailing newline."""
    lines = [
        f"{report['kind']} {report['session']}  ({report['id']})",
        _row("state", report["state"] + (f", {report['terminated_by']}" if report["terminated_by"] else "")),
        *([_row("", report["why"])] if report["why"] else []),
        _row("budget", _dollars(report["budget"]) + (f" a {report['per']}" if report["per"] else "")),
        _row("spent", _dollars(report["spent"]) + _since(report)),
        _row("held", _dollars(report["held"])),
        _row(
            "remaining",
            _dollars(report["remaining"])
            + (f", and ${report['reserve']} in reserve" if report["reserve"] else "")
            + _binding(report["bound_by"]),
        ),
        _row("evidence", _pairs(report["evidence"])),
    ]
    lines.extend(_table(report))
    if report["payments"]["calls"]:
        lines.append(_row("schemes", _pairs(report["payments"]["by_scheme"])))
    if any(amount != "0.00" for amount in report["settlement"].values()):
        lines.append(_row("settlement", _pairs(report["settlement"])))
    if report["disputed"] != "0.00":
        lines.append(_row("disputed", f"${report['disputed']} more than was booked is claimed for LLM calls"))
    lines.extend(
        _row("allowance", f"Permit2 may move ${row['exposed']} of {row['symbol']} on {row['network']}, by signature")
        for row in report["allowances"]
    )
    soft = [event for event in report["events"] if event["event"] == "tokens_soft_limit"]
    lines.extend(_tokens(report["tokens"], soft))
    lines.extend(_row("unmetered", _unmetered(event)) for event in report["events"] if event["event"] == "unmetered")
    lines.extend(
        _row("spike", event["reason"]) for event in report["events"] if event["event"] in ("spend_spike", "token_spike")
    )
    lines.extend(_asked(report["events"]))
    lines.extend(_refusals(report["refusals"], report["why"]))
    doubts = {event["hold_id"]: event["doubt"] for event in report["events"] if event.get("doubt")}
    names = {event["hold_id"]: event.get("tool") or event.get("model") for event in report["events"]}
    lines.extend(_outstanding(report["outstanding"], doubts, names))
    lines.extend(_agents(report["by_agent"]))
    lines.append(_row("duration", f"{report['duration_s']:.1f} s"))
    lines.extend(_shadow(report["shadow"]))
    return "\n".join(map(printable, lines))


def _agents(agents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the tree of sessions below one: what each has spent itself, and how it stands."""
    if len(agents) < 2:
        return []
    least = min(agent_id.count("/") for agent_id in agents)
    names = ["  " * (agent_id.count("/") - least) + agent["name"] for agent_id, agent in agents.items()]
    wide = max(map(len, names[: _MOST_ROWS * 2]))
    rows = [
        f"{name:<{wide}}  ${agent['amount']}  {agent['state']}"
        + (f", {word}" if (word := agent["terminated_by"]) else "")
        for name, agent in zip(names, agents.values(), strict=True)
    ]
    shown = rows[: _MOST_ROWS * 2]
    more = [f"and {len(rows) - len(shown)} more"] if len(rows) > len(shown) else []
    return [_row("" if number else "agents", row) for number, row in enumerate([*shown, *more])]


def _table(report: Mapping[str, Any]) -> list[str]:
    """Return one table of LLM calls, payments and tools: their amounts, and their shares of the total."""
    spent = Decimal(report["spent_total"])
    rows: list[tuple[str, str, str, str]] = []
    for name, group in (("llm", "by_model"), ("payments", "by_route"), ("tools", "by_tool")):
        totals = report[name]
        is_out = totals["out"] != "0.00"
        if totals["calls"] or is_out:
            calls = "1 call" if totals["calls"] == 1 else f"{totals['calls']} calls"
            share = f"{Decimal(totals['total']) / spent:.1%}" if spent else ""
            rows.append((name, calls, _dollars(totals["total"]), share.replace("%", " %")))
            dearest = sorted(totals[group].items(), key=lambda item: -Decimal(_amount(item[1])))
            rows.extend(("", str(key), _dollars(_amount(value)), "") for key, value in dearest[:_MOST_ROWS])
            rest = sum(Decimal(_amount(value)) for _, value in dearest[_MOST_ROWS:])
            if len(dearest) > _MOST_ROWS:
                rows.append(("", f"and {len(dearest) - _MOST_ROWS} more", _dollars(f"{rest:f}"), ""))
            if is_out:
                rows.append(("", "still out, beside these", _dollars(totals["out"]), ""))
    if not rows:
        return []
    wide = max(len(what) for _, what, _, _ in rows)
    long = max(len(amount.partition(".")[0]) for _, _, amount, _ in rows)
    # Decimal points are aligned, so that a column is easy to add up.
    aligned = [
        (name, what, " " * (long - len(amount.partition(".")[0])) + amount, share) for name, what, amount, share in rows
    ]
    end = max(len(amount) for _, _, amount, _ in aligned)
    return [
        _row(name, f"{what:<{wide}}  {amount:<{end}}  {share:>8}".rstrip()) for name, what, amount, share in aligned
    ]


def _since(report: Mapping[str, Any]) -> str:
    if report["window"] is None:
        return ""
    zone = ZoneInfo(report["per"].partition(" ")[2])
    begun, ends = (datetime.fromtimestamp(report["window"][key], zone).strftime("%Y-%m-%d") for key in ("from", "to"))
    return f" from {begun} to {ends}, ${report['spent_total']} in all"


def _binding(budget: Mapping[str, str] | None) -> str:
    if budget is None:
        return ""
    name = "the wallet" if budget["kind"] == "wallet" else f"{budget['kind']} {budget['name']!r}"
    return f", which is what {name} has left"


def _amount(value: Any) -> str:
    """Return the dollars of a row: of a model or tool with its calls, or of a payee."""
    return str(value["amount"] if isinstance(value, Mapping) else value)


def _tokens(tokens: Mapping[str, Any] | None, soft: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the token budget; none if no token is used or reserved."""
    if tokens is None or not (tokens["used"] or tokens["reserved"]):
        return []
    reserved = f", {tokens['reserved']:,} reserved" if tokens["reserved"] else ""
    part = f"{tokens['used'] / tokens['total']:.1%}".replace("%", " %")
    lines = [
        _row(
            "tokens", f"{tokens['used']:,} of {tokens['total']:,} used ({part}){reserved}, {tokens['remaining']:,} left"
        )
    ]
    lines.extend(_row("", f"past the soft limit of {event['soft_tokens']:,}") for event in soft[-1:])
    rows = [("llm", tokens["llm"]), *tokens["by_tool"].items(), ("other", tokens["other"])]
    shown = [(name, f"{count:,}") for name, count in rows if count]
    wide, long = (max((len(row[column]) for row in shown), default=0) for column in (0, 1))
    return lines + [_row("", f"{name:<{wide}}  {count:>{long}}") for name, count in shown]


def printable(text: str) -> str:
    """Return *text* without control characters: servers choose part of it, and a terminal would execute them."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _row(name: str, value: str) -> str:
    return f"  {name:<12}{value}"


def _dollars(value: str | None) -> str:
    return "no limit" if value is None else f"${value}"


def _pairs(values: Mapping[str, str]) -> str:
    shown = [f"{key} ${value}" for key, value in values.items() if value != "0.00"]
    return ", ".join(shown) or "nothing yet"


def _refusals(rows: Iterable[Mapping[str, Any]], why: str | None) -> list[str]:
    """Return a line for each rule. A reason that ``why`` has said already is not said again."""
    lines = []
    for row in rows:
        last = "" if row["count"] == 1 else ", the last"
        said = why is not None and why in row["reason"]
        lines.append(_row("refused", f"{row['count']} × {row['rule']}" + ("" if said else f"{last}: {row['reason']}")))
    return lines


def _shadow(shadow: Mapping[str, Any] | None) -> list[str]:
    if shadow is None:
        return []
    calls = "1 call" if shadow["calls"] == 1 else f"{shadow['calls']} calls"
    lines = [_row("shadow", f"with these rules {calls}, ${shadow['total']}, would have been refused:")]
    for row in shadow["by_rule"]:
        last = "" if row["calls"] == 1 else ", the last"
        lines.append(_row("", f"{row['calls']} × {row['rule']}, ${row['amount']}{last}: {row['reason']}"))
    return lines


def _asked(events: Iterable[Mapping[str, Any]]) -> list[str]:
    answers = [event for event in events if event["event"] == "approval"]
    if not answers:
        return []
    allowed = sum(1 for event in answers if event["allowed"])
    last = answers[-1]
    by = f" by {', '.join(last['by'])}" if last["by"] else ""
    word = "allowed" if last["allowed"] else "denied"
    return [
        _row("asked", f"{allowed} × allowed, {len(answers) - allowed} × denied; the last, {last['what']}: {word}{by}")
    ]


def _unmetered(event: Mapping[str, Any]) -> str:
    return f"{event['place']} looks like an LLM call but is not held: add its host to Metering(endpoints=…), or list it as free"


def _outstanding(
    rows: Iterable[Mapping[str, Any]], doubts: Mapping[str, str], names: Mapping[str, str | None]
) -> list[str]:
    lines = []
    for row in rows:
        until = datetime.fromtimestamp(row["exposed_until"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        whom = row["payee"] or names.get(row["hold_id"]) or "a call that is out"
        what = f" for {row['request']}" if row["request"] and row["payee"] else ""
        lines.append(_row("outstanding", f"${row['amount']} to {whom}{what} until {until}  ({row['hold_id'][:16]}…)"))
        if row["transaction"]:
            lines.append(_row("", f"its server names the transaction {row['transaction']}"))
        if row["hold_id"] in doubts:
            lines.append(_row("", f"in doubt: {doubts[row['hold_id']]}"))
    return lines
