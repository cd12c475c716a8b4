"""Renders a view as one HTML page that needs no network: for a screen, a phone and paper, in light and dark.

A policy in the page lets nothing in but its own style and script, each by its hash, so there is no style attribute.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from html import unescape
from importlib import resources
from typing import Final
from xml.etree.ElementTree import Element

from x402guard.views import words
from x402guard.views.charts import day_charts, is_long, time_charts
from x402guard.views.markup import Child, address, bar, el, foreign, patterns, section, swatch, written
from x402guard.views.model import EVIDENCE, View
from x402guard.views.sections import call_rows, outstanding_section, refusal_section
from x402guard.views.tables import customers_section, groups_section, sessions_section, table_head
from x402guard.views.words import count, dollars

MARK: Final = "<!doctype html><!-- x402guard -->"
"""How a page of ours begins, so that no other file is taken for one."""


@cache
def asset(name: str) -> str:
    """Return the text of a style sheet or script of ours."""
    return (resources.files("x402guard.views") / name).read_text("utf-8").strip()


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def page(view: View, *, links: bool = True, csv: str | None = None) -> str:
    """Return a view as an HTML page.

    Args:
        view: what it shows.
        links: link transactions to the block explorer of their network.
        csv: the name of a file beside it that lists every call, or None.
    """
    main = el("main", _top(view), _sections(view, links=links, csv=csv), id="main")
    return document(
        f"{_name(view)}: {words.headline(view)}",
        [
            patterns(),
            el("a", "Skip to the figures", class_="skip", href="#main"),
            _header("wallet report" if view.kind == "wallet" else f"{view.kind} report"),
            main,
            _footer(view),
        ],
        style=asset("report.css"),
        script=f"{asset('theme.js')}\n{asset('report.js')}",
    )


def document(title: str, body: Iterable[Element], *, style: str, script: str, connects: bool = False) -> str:
    """Return a whole page whose policy lets in this style and this script, and nothing else.

    With *connects* its script may ask the server that the page came from, and its forms go there.
    """
    goes = "form-action 'self'; connect-src 'self'" if connects else "form-action 'none'"
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; {goes}"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width,initial-scale=1"),
        # A form that is sent without any referrer has no origin either, and our own server would refuse it.
        el("meta", name="referrer", content="same-origin" if connects else "no-referrer"),
        el("meta", name="robots", content="noindex"),
        el("title", words.printable(title)),
        el("style", style),
    )
    return f"{MARK}\n" + written(el("html", head, el("body", body, el("script", script)), lang="en")) + "\n"


def policy_of(html: str) -> str:
    """Return the policy of a page of ours, for the header of an HTTP response."""
    found = _POLICY.search(html)
    return "default-src 'none'" if found is None else unescape(found[1])


_POLICY: Final = re.compile(r'http-equiv="Content-Security-Policy" content="([^"]*)"')


def _name(view: View) -> str:
    return "The wallet" if view.kind == "wallet" else view.name


def _header(what: str) -> Element:
    return el(
        "header",
        el("b", "x402guard"),
        el("span", what, class_="nb"),
        el("span", class_="sp"),
        el("button", "Print", id="print", class_="quiet noprint hm", hidden=True, type="button"),
        el("button", "Dark", id="theme", class_="quiet noprint", hidden=True, type="button"),
        class_="top",
    )


# -- the first ten seconds --------------------------------------------------------------------------------------------


def _top(view: View) -> list[Child]:
    return [
        el("h1", "The wallet" if view.kind == "wallet" else foreign(view.name)),
        _meta(view),
        _verdict(view),
        *_bar(view),
        el("p", words.gap_words(view), class_="bad") if view.gap else None,
        _sum(view),
        _legend(view),
        el("div", _why(view), _out(view), _proven(view), class_="three"),
    ]


def _meta(view: View) -> Element:
    parts: list[Child] = []
    if view.customer:
        parts += ["customer ", foreign(view.customer), " · "]
    if view.wallet:
        parts += ["wallet ", address(view.wallet), " · "]
    parts += [f"{words.network_name(network)} · " for network in view.chain.networks if network]
    if view.asked:
        parts.append(words.period_words(view))
    else:
        ran = words.span((view.closed_ms or view.now_ms) - view.opened_ms)
        state = {"open": "open for", "tripped": "stopped, opened"}.get(view.state, "for")
        parts.append(f"{words.moment(view.opened_ms)}, {state} {ran}{' ago' if view.state == 'tripped' else ''}")
    return el("p", parts, class_="meta")


def _verdict(view: View) -> Element:
    spent = el("span", words.headline(view), title=f"{dollars(view.spent)} exactly")
    stopped, out = words.stopped_words(view.stopped), words.out_words(view)
    return el(
        "p",
        spent,
        " ",
        el("em", stopped) if stopped else None,
        " ",
        _dearest_customer(view),
        el("span", out, class_="o") if out else None,
        class_="verdict",
    )


def _dearest_customer(view: View) -> list[Child]:
    if len(view.customers) < 2 or not view.customers[0].row.sums.spent:
        return []
    first = view.customers[0].row
    return [foreign(first.name), f" cost most, {words.rounded(first.sums.spent)}. "]


def _scale(view: View) -> int:
    return max(view.limit or 0, view.sums.total)


def _bar(view: View) -> list[Child]:
    scale = _scale(view)
    if not scale:
        return []
    drawn = bar(view.sums.parts(), scale, class_="bar big")
    if view.limit is None:
        return [drawn]
    ticks = _past_ticks(view.limit, scale) if scale > view.limit else _soft_ticks(view.soft, view.limit)
    return [drawn, el("svg", ticks, class_="scale", aria_hidden="true")]


def _at(where: str, text: str, anchor: str | None = None, class_: str | None = None) -> Element:
    return el("text", text, x=where, y=17, text_anchor=anchor, class_=class_)


def _soft_ticks(soft: Sequence[int], limit: int) -> Iterator[Element]:
    """Yield the scale of a bar within its limit, with the soft limits."""
    yield _at("0", "$0")
    for part in soft or (500_000,):
        where = f"{part / 10_000:.2f}%"
        yield el("line", x1=where, x2=where, y1=0, y2=5)
        if soft and 150_000 < part < 850_000:
            yield _at(where, f"{part // 10_000} %", "middle", "hm" if part > 600_000 else None)
    yield _at("100%", f"limit {words.rounded(limit)}", "end", "st")


def _past_ticks(limit: int, scale: int) -> Iterator[Element]:
    """Yield the scale of a bar that is past its limit: the limit stands inside it."""
    share = limit * 100 / scale
    where, name = f"{share:.2f}%", f"limit {words.rounded(limit)}"
    yield el("line", x1=where, x2=where, y1=0, y2=8)
    yield _at("0", "$0")
    if share > 80:  # too near to the end for a word beside it
        yield _at(where, name, "end", "st")
    else:
        yield _at("100%", words.rounded(scale), "end")
        yield _at(f"{max(12.0, share):.2f}%", name, "start", "st")


def _sum(view: View) -> Element:
    terms = words.sum_words(view)
    children: list[Child] = []
    for number, (amount, name) in enumerate(terms):
        if number:
            children.append(" = " if words.is_sum(name) else " + ")
        children.append(el("span", el("b", amount), f" {name}", class_="nb"))
    return el("p", children, class_="sum")


def _legend(view: View) -> Element:
    return el(
        "dl",
        [
            el(
                "div",
                el("dt", swatch(name), words.NAMES.get(name, name)),
                el("dd", dollars(amount), el("small", what)),
                class_=None if amount else "z",
            )
            for name, amount, what in words.legend(view)
        ],
        class_="legend",
    )


def _answer(title: str, head: str, details: Iterable[Child], class_: str = "") -> Element:
    lines = [el("p", line, class_="d") for line in details if line is not None and line != ""]
    return el("div", el("h2", title), el("p", head, class_="big" + (f" {class_}" if class_ else "")), lines)


def _last(view: View) -> list[Child]:
    """Return why the last request was refused, unless the stop says it already."""
    last = max(view.refusals, key=lambda row: row.last_ms)
    if view.stopped is not None and view.stopped.reason and view.stopped.reason in last.reason:
        return []
    return [
        f" The last, by {words.printable(last.rule)} at {words.near(last.last_ms, view.now_ms)}: ",
        foreign(last.reason),
    ]


def _why(view: View) -> Element:
    refused = None
    if view.refused:
        link = el("a", f"{count(view.refused, 'request was', 'requests were')} refused", href="#refused")
        refused = el("span", link, f" by {count(len(view.refusals), 'rule')}, before anything was signed.", _last(view))
    several = None
    if view.stops:
        total = sum(number for _, number in view.stops)
        by = ", ".join(f"{number} by {word.replace('_', ' ')}" for word, number in view.stops)
        several = f"{total:,} of {count(view.sessions_count, 'session')}"
        if view.stopped is None:
            return _answer("What was stopped", several, [f"{by}.", refused], "bad")
        several += f" stopped: {by}."
    if view.stopped is None or not words.stopped_words(view.stopped):
        head = "Nothing stopped it" if view.stopped is None else view.stopped.word
        return _answer("Why it stopped", head, [refused or "Nothing was refused."])
    head = words.stop_head(view.stopped)
    detail = el("span", foreign(words.stop_detail(view.stopped, view.now_ms)))
    reset = f"x402guard reset {view.id}" if view.state == "tripped" else None
    return _answer(
        "Why it stopped",
        head[:1].upper() + head[1:],
        [detail, el("code", reset) if reset else None, several, refused],
        "bad",
    )


def _out(view: View) -> Element:
    if not view.outstanding and view.asked and view.until_ms is not None:
        return _answer("Still out", "Nothing of it", ["Of what was signed before that, nothing can still be taken."])
    if not view.outstanding:
        return _answer("Still out", "Nothing", ["Nothing that was signed can still be taken."])
    first = view.outstanding[0]
    details: list[Child]
    if view.outstanding_count == 1:
        left = words.span(first.until_ms - view.now_ms)
        until = f" It may be taken until {words.near(first.until_ms, view.now_ms)}: {left} when this was written."
        if first.until_ms <= view.now_ms:
            until = f" Its time was over at {words.near(first.until_ms, view.now_ms)}; it is not settled yet."
        command = words.out_command(first)
        details = [
            el("span", foreign(words.out_line(first)), ".", until),
            el("code", command) if command else None,
        ]
    else:
        last = max(row.until_ms for row in view.outstanding)
        link = el("a", count(view.outstanding_count, "call"), href="#out")
        until = f", the last until {words.near(last, view.now_ms)}. It counts until then."
        if last <= view.now_ms:
            until = f", whose time was over at {words.near(last, view.now_ms)}; none is settled yet."
        details = [el("span", "in ", link, until)]
    return _answer("Still out", dollars(view.sums.out), details, "o")


def _proven(view: View) -> Element:
    chain = view.chain
    if not chain.payments:
        return _answer("Proven on chain", "No payment", ["Nothing was paid by signature."])
    details: list[Child] = [f"{dollars(view.sums.proven)}, each by its own transaction."]
    if chain.claimed:
        details.append(f"{chain.claimed:,} claimed by a receipt alone, {dollars(view.sums.claimed)}.")
    if chain.unexplained:
        details.append(el("span", words.unexplained_words(view), class_="bad"))
    if chain.asked_ms is not None:
        details.append(f"The chain was last asked at {words.near(chain.asked_ms, view.now_ms)}.")
    if chain.claimed or chain.assumed or chain.asked_ms is None:
        details.append(el("span", el("code", "x402guard reconcile"), " asks again."))
    return _answer("Proven on chain", f"{chain.proven:,} of {count(chain.payments, 'payment')}", details)


# -- the rest ---------------------------------------------------------------------------------------------------------


def _sections(view: View, *, links: bool, csv: str | None) -> list[Child]:
    return [
        _over_time(view),
        customers_section(view),
        groups_section(view),
        refusal_section(view),
        outstanding_section(view),
        _context(view),
        _remarks(view),
        sessions_section(view, csv),
        _calls(view, links=links, csv=csv),
    ]


def _over_time(view: View) -> Element | None:
    if is_long(view):
        why = "By evidence, proven at the bottom. Below: ■ sessions stopped, ✕ requests refused."
        return section("time", "Each day" if len(view.days[0].name) > 7 else "Each month", why, day_charts(view))
    charts = time_charts(view)
    if not charts:
        return None
    said: list[Child] = [
        swatch("spent"),
        "spent, and ",
        swatch("out"),
        "held above it",
        " against the limit." if view.limit else ".",
    ]
    if view.soft and view.limit:
        said.append(" ◇ a soft limit was passed.")
    if len(view.lanes) > 1 or any(lane.refused for lane in view.lanes):
        said += [" Below, one line an agent: a stroke is a call, ", el("span", "✕", class_="bad"), " a refusal."]
    if any(mark.kind == "trip" for mark in view.marks):
        said.append(" The red band is a stop, until its owner reset it.")
    said.append(f" It begins at {words.near(view.series[0].ms, view.now_ms)}.")
    return section("time", "Money over time", said, charts)


def _context(view: View) -> Element | None:
    tokens = view.tokens
    if tokens is None or not (tokens.used or tokens.reserved):
        return None
    why = f"The second budget: what the agent has read and written. {tokens.left:,} are left."
    rows = [el("tr", el("td", foreign(name)), el("td", f"{number:,}", class_="n")) for name, number in tokens.rows]
    share = min(100.0, tokens.used * 100 / tokens.total) if tokens.total else 100.0
    drawn = el(
        "svg",
        el("rect", class_="f-stated", x=0, y=0, width=f"{share:.2f}%", height="100%"),
        class_="bar",
        aria_hidden="true",
    )
    title = f"Context: {tokens.used:,} of {tokens.total:,} tokens used"
    return section("context", title, why, drawn, el("table", el("tbody", rows), class_="grp"))


def _remarks(view: View) -> Element | None:
    if not view.remarks:
        return None
    rows = [
        el("tr", el("th", remark.name, scope="row"), el("td", foreign(remark.words), class_="words"))
        for remark in view.remarks
    ]
    return section("remarks", "Beside the sums", None, el("table", el("tbody", rows), class_="remarks"))


def _calls(view: View, *, links: bool, csv: str | None) -> Element | None:
    if not view.calls:
        return None
    total, listed = view.calls_count, sum(1 for call in view.calls if call.kind in ("payment", "llm", "tool"))
    why = "In order, with what it paid and why that is believed. Query strings, bodies and keys are never shown."
    title = "Every call"
    if listed < total:
        title = f"{listed:,} of {total:,} calls"
        rest = (
            f"every one is in {csv}, beside this file"
            if csv
            else f"x402guard report {view.id} --format csv lists every one"
        )
        why = f"The dearest and the latest; {rest}. Query strings, bodies and keys are never shown."
    if not links and any(call.transaction for call in view.calls):
        why += " Transactions are not linked: no block explorer knows a local chain."
    kinds = (("", "all"), ("payment", "payments"), ("llm", "model calls"), ("tool", "tools"), ("refusal", "refusals"))
    evidence = [("", "any"), *((name, words.NAMES.get(name, name)) for name in EVIDENCE)]
    tools = el(
        "div",
        el("label", "Find ", el("input", type="search", id="find", autocomplete="off")),
        _select("Kind", "kind", kinds),
        _select("Evidence", "evidence", evidence),
        el("output", id="shown"),
        class_="tools", hidden=True,
    )  # fmt: skip
    head = table_head("UTC", "agent", "what", "amount", "evidence", "transaction", right=9)
    return section("calls", title, why, tools, el("table", head, el("tbody", call_rows(view, links)), class_="calls"))


def _select(label: str, name: str, options: Iterable[tuple[str, str]]) -> Element:
    chosen = [el("option", text, value=value) for value, text in options]
    return el("label", f"{label} ", el("select", chosen, id=name))


def _footer(view: View) -> Element:
    written_at = words.moment(view.now_ms)
    exact = "Amounts are exact to the nano-dollar but where a headline or an axis shows cents."
    return el(
        "footer",
        el("p", f"Written {written_at} from the ledger; {view.schema}. {exact} ", el("code", "x402guard verify"), " checks the journal."),
    )  # fmt: skip
