"""Renders the tables that say where the money went: by kind, agent, seller, model, tool, customer and session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from xml.etree.ElementTree import Element

from x402guard.views import words
from x402guard.views.charts import day_label, spark
from x402guard.views.markup import Child, address, aligned, bar, el, foreign, padded, section
from x402guard.views.model import Customer, Row, View
from x402guard.views.words import count, dollars

_MOST_SHOWN: Final = 60


def table_head(*names: str, right: int) -> Element:
    """Return the head of a table; from the column *right* on, numbers stand to the right."""
    cells = [el("th", name, scope="col", class_="n" if place >= right else None) for place, name in enumerate(names)]
    return el("thead", el("tr", cells))


def groups_section(view: View) -> Element | None:
    """Return the tables by kind, agent, seller, model and tool, all bars on one scale; None if nothing was used."""
    agents = view.agents if len(view.agents) > 1 else ()
    tables = (
        ("By kind", "", view.kinds),
        ("By agent", "a tick is its own limit" if any(row.depth for row in agents) else "", agents),
        ("By seller", "host, and whom it had paid", view.sellers),
        ("By model", "tokens as billed", view.models),
        ("By tool", "", view.tools),
    )
    scale = max((row.sums.total for _, _, rows in tables for row in rows), default=0)
    made = [_group(title, note, rows, scale) for title, note, rows in tables if rows]
    if not made:
        return None
    why = f"All bars have one scale, $0 to {words.rounded(scale)}, and count what is still out."
    return section("groups", "Where the money went", why, el("div", made, class_="two"))


def _group(title: str, note: str, rows: Sequence[Row], scale: int) -> Element:
    places = padded(row.sums.total for row in rows)
    body = [
        el(
            "tr",
            el("td", _row_name(row), class_=f"t{min(row.depth, 4)}" if row.depth else None),
            el(
                "td", bar(row.sums.parts(), scale, class_="bar thin", tick=row.limit if row.depth else None), class_="b"
            ),
            el("td", f"{row.calls:,}", class_="n"),
            el("td", aligned(row.sums.total, places), class_="n"),
        )
        for row in rows[:_MOST_SHOWN]
    ]
    return el(
        "table",
        el("caption", title, el("span", f" {note}") if note else None),
        table_head("name", f"$0 to {words.rounded(scale)}", "calls", "amount", right=2),
        el("tbody", body),
        class_="fix grp",
    )


def _row_name(row: Row) -> list[Child]:
    details: list[Child] = []
    if row.detail:
        details.append(el("span", address(row.detail), class_="sub"))
    if row.tokens_in or row.tokens_out:
        details.append(el("span", f"{row.tokens_in:,} in, {row.tokens_out:,} out", class_="sub"))
    if row.limit is not None and row.depth:
        details.append(el("span", f"of {dollars(row.limit)}", class_="sub"))
    if row.word is not None and row.depth:
        details.append(el("span", row.word.replace("_", " "), class_="sub bad"))
    if row.refused:
        details.append(el("span", f"{row.refused:,} refused", class_="sub"))
    return [foreign(row.name), *details]


def customers_section(view: View) -> Element | None:
    """Return the customers: what each has spent in all, yesterday and today, and its days; None without one."""
    if not view.customers:
        return None
    shown, others = view.customers[:_MOST_SHOWN], view.customers[_MOST_SHOWN:]
    scale = max(each.row.sums.total for each in shown)
    most = max((max(each.days, default=0) for each in shown), default=0)
    yesterday = max(view.customers, key=lambda each: each.yesterday or 0)
    why = ""
    if yesterday.yesterday:
        why = (
            f"Yesterday ({view.tz}), {words.printable(yesterday.row.name)} cost most: {dollars(yesterday.yesterday)}. "
        )
    if others:
        rest = dollars(sum(each.row.sums.spent for each in others))
        why += f"These are the {len(shown)} dearest; {len(others)} more have spent {rest}. "
    first = day_label(view.days[0].name) if view.days else ""
    recent = () if shown[0].today is None else (f"yesterday, {view.tz}", f"today, {view.tz}")
    places = padded(each.row.sums.spent for each in shown)
    return section(
        "customers",
        "Customers",
        f"{why}The small columns are the time since {first}, all on one scale.",
        el(
            "table",
            table_head("customer", f"$0 to {words.rounded(scale)}", "spent", *recent, "out", "refused", "by day", right=2),
            el("tbody", [_customer(each, scale, most, places) for each in shown]),
            class_="stack cust",
        ),
    )  # fmt: skip


def _customer(each: Customer, scale: int, most: int, places: int) -> Element:
    row = each.row
    detail = count(each.sessions, "session")
    if row.limit is not None:
        used = f"{dollars(each.window_spent)} of " if each.per else ""
        per = f" a {each.per.replace(' ', ', ')}" if each.per else ""
        detail = f"{used}{words.rounded(row.limit)}{per} · {detail}"

    def cell(name: str, amount: str) -> Element:
        return el("td", el("span", f"{name} ", class_="sm"), amount, class_="n m")

    return el(
        "tr",
        el("td", foreign(row.name), el("span", detail, class_="sub"), class_="what"),
        el("td", bar(row.sums.parts(), scale, class_="bar thin"), class_="b"),
        el("td", aligned(row.sums.spent, places), class_="n amt"),
        [
            cell(name, dollars(amount) if amount else "–")
            for name, amount in (("yesterday", each.yesterday), ("today", each.today))
            if amount is not None
        ],
        cell("out", dollars(row.sums.out) if row.sums.out else "–"),
        cell("refused", f"{row.refused:,}" if row.refused else "–"),
        el("td", spark(each.days, most) if most else None, class_="spk"),
    )


def sessions_section(view: View, csv: str | None) -> Element | None:
    """Return the dearest sessions below the wallet or a named budget; None for a session."""
    if not view.sessions:
        return None
    scale, places = max(1, *(row.sums.total for row in view.sessions)), padded(row.sums.total for row in view.sessions)
    rows = [
        el(
            "tr",
            el("td", foreign(row.name), el("span", *_session_detail(row), class_="sub"), class_="what"),
            el("td", bar(row.sums.parts(), scale, class_="bar thin", tick=row.limit), class_="b"),
            el("td", aligned(row.sums.total, places), class_="n amt"),
            el("td", "no limit" if row.limit is None else f"of {dollars(row.limit)}", class_="n m"),
            el("td", count(row.calls, "call"), class_="n m"),
            el("td", _state(row), class_="m"),
        )
        for row in view.sessions
    ]
    more = view.sessions_count - len(view.sessions)
    title = f"The {len(view.sessions)} dearest sessions of {view.sessions_count:,}" if more else "Sessions"
    where = f"are in {csv}, beside this file" if csv else "are listed by x402guard sessions"
    why = "A tick is the session's limit." + (f" The other {more:,} {where}." if more else "")
    head = table_head("session", f"$0 to {words.rounded(scale)}", "amount", "limit", "calls", "state", right=2)
    return section("sessions", title, why, el("table", head, el("tbody", rows), class_="stack"))


def _session_detail(row: Row) -> list[Child]:
    opened = words.moment(row.opened_ms)
    return [foreign(row.detail), f" · {opened}"] if row.detail else [opened]


def _state(row: Row) -> Element:
    if row.word and row.word != "completed":
        return el("span", f"■ {row.word.replace('_', ' ')}", class_="bad")
    return el("span", row.word or row.state)
