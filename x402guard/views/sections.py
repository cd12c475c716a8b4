"""Renders the long tables of a page: what was refused, what is still out, and every call."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final
from xml.etree.ElementTree import Element

from x402guard.views import words
from x402guard.views.markup import Child, address, aligned, el, foreign, padded, section, swatch
from x402guard.views.model import Call, View
from x402guard.views.words import count, dollars

_NAMED: Final = 6


def refusal_section(view: View) -> Element | None:
    """Return what was refused, one row for each rule; None if nothing was."""
    if not view.refusals:
        return None
    why = (
        "Before anything was signed or sent: none of this cost money. Amounts and words are those of the last refusal."
    )
    rows = []
    for row in view.refusals:
        more = f" and {len(row.agents) - _NAMED} more" if len(row.agents) > _NAMED else ""
        agents = el("span", foreign(", ".join(row.agents[:_NAMED])), more, class_="sub")
        rows.append(
            el(
                "tr",
                el("td", foreign(row.rule), agents, class_="rule"),
                el("td", f"{'at least ' if row.is_least else ''}{row.count:,} ×", class_="n"),
                el("td", _or_dash("asked", row.requested), class_="n m"),
                el("td", _or_dash("was left", row.available), class_="n m"),
                el("td", foreign(row.reason), el("span", words.near(row.last_ms, view.now_ms), class_="sub"), class_="words"),
            )
        )  # fmt: skip
    names = ("rule", "count", "asked", "was left", "in words")
    head = el(
        "tr", [el("th", name, scope="col", class_="n" if 0 < place < 4 else None) for place, name in enumerate(names)]
    )
    table = el("table", el("thead", head), el("tbody", rows), class_="stack")
    return section("refused", "Refused, by rule", why, table)


def _or_dash(name: str, nanos: int | None) -> list[Child]:
    return ["–"] if nanos is None else [el("span", f"{name} ", class_="sm"), dollars(nanos)]


def outstanding_section(view: View) -> Element | None:
    """Return what is still out, if it is more than one call; the first lines of the page have said a single one."""
    if view.outstanding_count < 2:
        return None
    places = padded(row.amount for row in view.outstanding)
    rows = []
    for row in view.outstanding:
        where = words.whereabouts(row.customer, row.session, row.agent)
        command = words.out_command(row)
        rows.append(
            el(
                "tr",
                el("td", foreign(row.to), el("span", foreign(where), class_="sub"), class_="what"),
                el("td", aligned(row.amount, places), class_="n amt o"),
                el("td", f"until {words.near(row.until_ms, view.now_ms)}", class_="m"),
                el("td", foreign(row.why) if row.why else "in time" if row.until_ms > view.now_ms else "not settled yet", el("span", el("code", command), class_="sub") if command else None, class_="m words"),
            )
        )  # fmt: skip
    names = ("to", "at most", "until", "why")
    head = el("tr", [el("th", name, scope="col", class_="n" if name == "at most" else None) for name in names])
    more = view.outstanding_count - len(view.outstanding)
    why = "Signed or sent, and not taken yet. After its time nothing of it can be taken."
    if more:
        why += f" These are the first of {count(view.outstanding_count, 'call')}; for all, see x402guard holds."
    table = el("table", el("thead", head), el("tbody", rows), class_="stack")
    return section("out", f"Still out: {dollars(view.sums.out)}", why, table)


def call_rows(view: View, links: bool) -> Iterator[Element]:
    """Yield one row for each call, refusal, stop and reset."""
    places = padded(call.amount for call in view.calls if call.amount is not None and call.kind != "refusal")
    several = words.day(view.calls[0].ms) != words.day(view.calls[-1].ms)
    for call in view.calls:
        at = datetime.fromtimestamp(call.ms / 1000, UTC)
        when = f"{at.day} {at:%b, %H:%M:%S}" if several else f"{at:%H:%M:%S}"
        if call.kind in ("refusal", "trip", "reset"):
            yield _event_row(call, when)
            continue
        evidence = words.NAMES.get(call.evidence, call.evidence)
        is_known = call.evidence != "nothing"
        yield el(
            "tr",
            el("td", when, class_="m"),
            el("td", foreign(call.agent), class_="m"),
            el("td", foreign(call.to), el("span", _detail(call), class_="sub"), class_="what"),
            el("td", aligned(call.amount or 0, places), class_="n amt"),
            el("td", swatch(call.evidence) if is_known else None, evidence, class_="m ev"),
            el("td", _transaction(call, links), class_="m"),
            data_k=call.kind,
            data_e=call.evidence,
        )


def _event_row(call: Call, when: str) -> Element:
    sign = {"refusal": "✕", "trip": "■ stopped:", "reset": "▶ reset"}[call.kind]
    name = {"refusal": call.to, "trip": call.to.replace("_", " "), "reset": ""}[call.kind]
    what = f"{sign} {name}".strip()
    amount = dollars(call.amount) if call.amount is not None else None
    return el(
        "tr",
        el("td", when, class_="m"),
        el("td", foreign(call.agent), class_="m"),
        el("td", foreign(what), el("span", foreign(call.words), class_="sub") if call.words else None, class_="what bad"),
        el("td", amount, class_="n amt"),
        el("td", "refused" if call.kind == "refusal" else None, class_="m bad"),
        el("td", class_="m"),
        class_=None if call.kind == "reset" else "ref",
        data_k="refusal",
        data_e="",
    )  # fmt: skip


def _detail(call: Call) -> list[Child]:
    found: list[Child] = []
    if call.kind == "payment":
        found = [foreign(call.path), f" · {words.scheme_words(call)} · to ", address(call.payee)]
    elif call.kind == "llm":
        used = f"{call.tokens_in:,} in, {call.tokens_out:,} out" if call.tokens_in or call.tokens_out else "no bill"
        found = [foreign(call.host or call.provider), f" · {used}"]
    else:
        found = ["tool"]
    return [*found, " · ", foreign(call.words)] if call.words else found


def _transaction(call: Call, links: bool) -> Element | None:
    if not call.transaction:
        return None
    target = words.explorer(call.network, call.transaction) if links else None
    if target is None:
        return address(call.transaction)
    return el("a", address(call.transaction), href=target, rel="noreferrer noopener", target="_blank")
