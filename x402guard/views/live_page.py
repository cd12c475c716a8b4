"""Renders the live view as sections of a page. The page's script puts a section in place of the last one as it changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from xml.etree.ElementTree import Element

from msgspec import Struct

from x402guard.views import words
from x402guard.views.live import STATES, Ask, Line, LiveCustomer, LiveLatch, LiveSession, LiveView, chosen
from x402guard.views.markup import bar, el, foreign, patterns, section, swatch, written
from x402guard.views.model import EVIDENCE, Out
from x402guard.views.page import asset, document
from x402guard.views.words import count, dollars, rounded

SHOWN: Final = 100
"""The maximum number of sessions on the page; a search finds the others."""

_MOST_OUT: Final = 30
_STATES: Final = {"asks": "? asks you", "stopped": "■ stopped", "open": "● open", "closed": "closed"}


class Choice(Struct, frozen=True, kw_only=True):
    """What the reader has chosen to see, and whether the reader is the owner."""

    find: str = ""
    customer: str = ""
    agent: str = ""
    state: str = ""
    is_owner: bool = False


def looked_for(choice: Choice) -> str:
    """Return the text by which sessions that have ended are looked for."""
    return choice.find or choice.customer or choice.agent


def live_page(view: LiveView | None, choice: Choice) -> str:
    """Return the whole page; without a view the page without a figure, to sign in."""
    filled = {} if view is None else _elements(view, choice)
    made = {name: el("div", filled.get(name, []), id=name, class_="live") for name in _SECTIONS}
    beside = el("div", made["customers"], made["out"], made["lines"], class_="two three-live")
    main = el(
        "main", made["now"], made["asks"], _filters(view, choice), made["sessions"], made["latches"], beside, id="main"
    )
    said = "Read from the ledger, one moment for every figure on this page. "
    return document(
        "x402guard live",
        [
            patterns(),
            el("a", "Skip to the figures", class_="skip", href="#main"),
            _header(),
            main,
            _stop_dialog(),
            _sign_in(),
            el("footer", el("p", said, el("code", "x402guard watch"), " shows the same in a terminal.")),
        ],
        style=f"{asset('report.css')}\n{asset('live.css')}",
        script=f"{asset('theme.js')}\n{asset('live.js')}",
        connects=True,
    )


_SECTIONS: Final = ("now", "asks", "sessions", "latches", "customers", "out", "lines")


def sections(view: LiveView, choice: Choice) -> dict[str, str]:
    """Return each section that changes, by its id, as HTML."""
    return {name: "".join(map(written, body)) for name, body in _elements(view, choice).items()}


def _elements(view: LiveView, choice: Choice) -> dict[str, list[Element]]:
    return {
        "now": _now(view),
        "asks": _asks(view.asks, choice.is_owner),
        "sessions": _sessions(view, choice),
        "latches": _latches(view.latches),
        "customers": _customers(view.customers),
        "out": _out(view),
        "lines": _lines(view.lines),
        "pick-customer": _customer_options(view, choice),
        "pick-agent": _agent_options(view, choice),
    }


def _header() -> Element:
    """Return the head: the script shows an owner what an owner may do, and the server refuses it to all others."""
    stop = {"data_session": "wallet", "data_name": "the wallet"}
    return el(
        "header",
        el("b", "x402guard"),
        el("span", "live", class_="nb"),
        el("span", id="link", class_="nb"),
        el("span", class_="sp"),
        el("span", id="said", class_="lost", role="status"),
        el("span", "signed in as owner", id="owner", class_="nb hm", hidden=True),
        el("button", "Dark", id="theme", class_="quiet", hidden=True, type="button"),
        el("button", "Sign in…", id="signing", class_="quiet", type="button"),
        el("button", "Stop all…", id="stop", class_="bad", type="button", hidden=True, **stop),
        class_="top",
    )


def _now(view: LiveView) -> list[Element]:
    counts = view.counts()
    left = rounded(view.left) if view.left is not None else rounded(view.spent)
    head = f"{left} left of {rounded(view.limit or 0)}." if view.left is not None else f"{left} spent, without a limit."
    out = f"{rounded(view.out)} is out in {count(len(view.outstanding), 'call')}." if view.outstanding else ""
    stopped = f"{count(counts['stopped'], 'session')} stopped." if counts["stopped"] else ""
    asks = f"{count(len(view.asks), 'question')} for you." if view.asks else ""
    verdict = el(
        "p",
        head, " ",
        el("span", out, class_="o") if out else None, " ",
        el("em", "The wallet is stopped: ", foreign(view.stopped)) if view.stopped else None, " ",
        el("em", stopped) if stopped else None, " ", asks,
        class_="verdict",
    )  # fmt: skip
    parts = [("spent", view.spent), ("out", view.out), ("alloc", view.allocated)]
    shown = [("spent", "spent", view.spent, "captured"), ("out", "out", view.out, "signed or sent, not taken yet"),
             ("alloc", "allocated", view.allocated, "open sessions may take it")]  # fmt: skip
    if view.left is not None:
        shown.append(("left", "free", view.left - view.allocated, "for any session"))
    legend = el(
        "dl",
        [
            el(
                "div",
                el("dt", swatch(name), word),
                el("dd", dollars(amount), el("small", what)),
                class_=None if amount else "z",
            )
            for name, word, amount, what in shown
        ],
        class_="legend",
    )
    return [el("h1", "The wallet now"), verdict, _parts(parts, view.limit, "bar big"), legend]


def _parts(parts: Iterable[tuple[str, int]], limit: int | None, class_: str) -> Element:
    """Return a bar of (class, amount) against its own limit; past the limit, or without one, the bar is full."""
    shown = list(parts)
    return bar(shown, max(limit or 0, sum(amount for _, amount in shown)), class_=class_)


def _asks(asks: tuple[Ask, ...], is_owner: bool) -> list[Element]:
    if not asks:
        return []
    rows = []  # the whole question has the query, which only who answers it has to read
    for ask in asks:
        where = f" for {words.printable(ask.customer)}" if ask.customer else ""
        left = f" {dollars(ask.left)} is left there." if ask.left is not None else ""
        buttons = [
            el("button", "Deny", type="button", data_ask=ask.id, data_answer="deny", data_key=f"deny {ask.id}"),
            el("button", "Allow once", type="button", data_ask=ask.id, data_answer="allow", data_key=f"allow {ask.id}"),
        ]
        rows.append(
            el(
                "tr",
                el("td", foreign(ask.what), el("span", foreign(ask.agent), " in ", foreign(ask.session), where, ".", left, class_="sub"),
                   el("span", foreign(ask.words), class_="sub words") if is_owner else None, class_="what"),
                el("td", "no in ", _countdown(ask.until_ms), class_="m o"),
                el("td", f"{ask.said} of {ask.approvers}" if ask.approvers > 1 else None, class_="m"),
                el("td", *(buttons if is_owner else [el("code", f"x402guard approvals allow {ask.id}")]), class_="n"),
            )
        )  # fmt: skip
    why = "Nothing is held or signed meanwhile. Silence is a no."
    return [section(None, f"Waiting for you: {len(asks)}", why, el("table", el("tbody", rows), class_="stack"))]


def _countdown(until_ms: int) -> Element:
    """Return a time that the page's script counts down to; without it, the time itself."""
    return el("time", words.clock(until_ms), data_until=until_ms, class_="nb")


def _filters(view: LiveView | None, choice: Choice) -> Element:
    def select(label: str, name: str, options: Iterable[Element]) -> Element:
        return el("label", f"{label} ", el("select", options, name=name, id=f"pick-{name}"))

    return el(
        "form",
        el("label", "Find ", el("input", type="search", name="find", value=choice.find, autocomplete="off")),
        select("Customer", "customer", _customer_options(view, choice)),
        select("Agent", "agent", _agent_options(view, choice)),
        select("State", "state", _options([("", "not closed"), *((state, state) for state in STATES)], choice.state)),
        el("button", "Show", type="submit"),
        id="filters", class_="tools", method="get", action="/",
    )  # fmt: skip


def _options(options: Iterable[tuple[str, str]], chosen_one: str) -> list[Element]:
    return [el("option", words.printable(text), value=value, selected=value == chosen_one) for value, text in options]


def _customer_options(view: LiveView | None, choice: Choice) -> list[Element]:
    names = {session.customer for session in view.sessions if session.customer} if view is not None else set()
    names |= {choice.customer} - {""}  # what was chosen stays chosen, also while there is none
    return _options([("", "all"), *((name, name) for name in sorted(names))], choice.customer)


def _agent_options(view: LiveView | None, choice: Choice) -> list[Element]:
    names = {agent for session in view.sessions for agent in session.agents} if view is not None else set()
    shown = sorted(names)[:_MOST_AGENTS]
    chosen_one = [choice.agent] if choice.agent and choice.agent not in shown else []
    return _options([("", "all"), *((name, name) for name in (*chosen_one, *shown))], choice.agent)


_MOST_AGENTS: Final = 200


def _sessions(view: LiveView, choice: Choice) -> list[Element]:
    found = chosen(view.sessions, find=choice.find, customer=choice.customer, agent=choice.agent, state=choice.state)
    rows = [_session(session, view, choice.is_owner) for session in found[:SHOWN]]
    counts = view.counts()
    why = f"{len(found):,} of {count(view.ever, 'session')}; {counts['open']:,} open, {counts['stopped']:,} stopped."
    if len(found) > SHOWN:
        why += f" The first {SHOWN} are shown: search for the others."
    if not found:
        why += " None fits what you look for." if view.ever else " There is none yet."
    head = [
        ("session", ""),
        ("spent, out, allocated, left", ""),
        ("left", "n"),
        ("spent", "n"),
        ("out", "n"),
        ("open for", ""),
        ("state", ""),
    ]
    table = el(
        "table",
        el("thead", el("tr", [el("th", name, scope="col", class_=class_ or None) for name, class_ in head])),
        el("tbody", rows),
        class_="stack",
    )  # fmt: skip
    return [section(None, "Sessions", why, table if rows else None)]


def _age(ms: int) -> str:
    """Return how long a session is open, without seconds: what changes each second would be drawn each second."""
    return "under 1 min" if ms < 60_000 else words.span(ms // 60_000 * 60_000)


def _some(names: tuple[str, ...], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _session(session: LiveSession, view: LiveView, is_owner: bool) -> Element:
    details = [name for name in (session.customer, _some(session.agents)) if name]
    left = "no limit" if session.left is None else dollars(session.left)
    of = None if session.limit is None else el("span", f"of {dollars(session.limit)}", class_="sub")
    is_bad = session.state == "stopped"
    stop = None
    if is_owner and session.state in ("open", "asks"):
        stop = el("button", "Stop…", type="button", class_="quiet bad", data_session=session.id,
                  data_name=" · ".join(name for name in (session.name, session.customer, session.id) if name),
                  data_key=f"stop {session.id}")  # fmt: skip
    state = _STATES[session.state]
    word = f": {session.word.replace('_', ' ')}" if session.word and session.state != "open" else ""
    return el(
        "tr",
        el("td", foreign(session.name), el("span", foreign(" · ".join(details)), class_="sub") if details else None, class_="what"),
        el("td", _parts((("spent", session.spent), ("out", session.out), ("alloc", session.allocated)), session.limit, "bar"), class_="b"),
        el("td", left, of, class_="n amt"),
        el("td", el("span", "spent ", class_="sm"), dollars(session.spent), class_="n m"),
        el("td", el("span", "out ", class_="sm"), dollars(session.out) if session.out else "–", class_="n m"),
        el("td", el("span", "open for ", class_="sm"), _age(view.now_ms - session.opened_ms), class_="m nb"),
        el("td", el("span", state + word, class_="bad" if is_bad else "o" if session.state == "asks" else None), stop, class_="m"),
    )  # fmt: skip


def _customers(customers: tuple[LiveCustomer, ...]) -> list[Element]:
    if not customers:
        return []
    rows = []
    for each in customers[:_MOST_OUT]:
        limit = (
            "no limit" if each.limit is None else f"of {dollars(each.limit)}" + (f" a {each.per}" if each.per else "")
        )
        rows.append(
            el(
                "tr",
                el("td", foreign(each.name), el("span", limit, class_="sub"), _stopped(each.stopped)),
                el("td", _parts((("spent", each.spent), ("out", each.out)), each.limit, "bar thin"), class_="b"),
                el(
                    "td",
                    dollars(each.spent),
                    None if each.left is None else el("span", f"{dollars(each.left)} left", class_="sub"),
                    class_="n",
                ),
            )
        )
    more = f" and {len(customers) - _MOST_OUT} more" if len(customers) > _MOST_OUT else ""
    return [
        section(
            None,
            "Customers now",
            f"Each bar is that customer's own limit; the fullest first{more}.",
            el("table", el("tbody", rows)),
        )
    ]


def _latches(latches: tuple[LiveLatch, ...]) -> list[Element]:
    if not latches:
        return []
    rows = [
        el(
            "tr",
            el("td", foreign(latch.reason), el("span", foreign(latch.session), class_="sub"), class_="what"),
            el("td", f"since {words.moment(latch.since_ms)}", class_="m"),
            el("td", "until cleared" if latch.ends_ms is None else f"until {words.moment(latch.ends_ms)}", class_="m"),
            el("td", el("code", f"x402guard latches --clear {latch.id}"), class_="n"),
        )
        for latch in latches[:_MOST_OUT]
    ]
    why = "Each refuses what it is about until it ages, or its owner clears it."
    return [section(None, f"Latches: {len(latches):,}", why, el("table", el("tbody", rows), class_="stack"))]


def _stopped(why: str | None) -> Element | None:
    return None if why is None else el("span", "■ stopped: ", foreign(why), class_="sub bad")


def _out(view: LiveView) -> list[Element]:
    rows = [_out_row(row) for row in view.outstanding[:_MOST_OUT]]
    more = len(view.outstanding) - len(rows)
    why = "Signed or sent. Each may still be taken until its time is over." if rows else "Nothing is out."
    why += f" The first {len(rows)} of {len(view.outstanding):,}." if more else ""
    return [section(None, f"Out now: {len(view.outstanding):,}", why, el("table", el("tbody", rows)) if rows else None)]


def _out_row(row: Out) -> Element:
    where = words.whereabouts(row.customer, row.session, row.agent)
    return el(
        "tr",
        el("td", foreign(row.to), el("span", foreign(where), class_="sub")),
        el("td", dollars(row.amount), class_="n o"),
        el("td", _countdown(row.until_ms), class_="n"),
    )


def _lines(lines: tuple[Line, ...]) -> list[Element]:
    rows = []
    for line in lines:
        where = words.whereabouts(line.customer, line.session, line.agent)
        is_bad = line.kind in ("refused", "stopped")
        sign = {"refused": "✕ ", "stopped": "■ stopped: ", "reset": "▶ reset: "}.get(line.kind, "")
        rows.append(
            el(
                "tr",
                el("td", words.clock(line.at_ms).removesuffix(" UTC"), class_="nb"),
                el("td", swatch(line.kind) if line.kind in EVIDENCE else None, sign, foreign(line.to),
                   el("span", foreign(line.words), class_="sub") if line.words else None,
                   el("span", foreign(where), class_="sub"), class_="bad" if is_bad else None),
                el("td", dollars(line.amount) if line.amount is not None else None, class_="n"),
            )
        )  # fmt: skip
    return [
        section(
            None,
            "As it happens",
            "The last lines of the journals, UTC." if rows else "Nothing has happened yet.",
            el("table", el("tbody", rows)),
        )
    ]


def _stop_dialog() -> Element:
    said = (
        "Nothing more is signed or sent there until you reset it. "
        "What is out already may still be taken until its time is over."
    )
    return el(
        "dialog",
        el("h2", "Stop ", el("bdi", id="stopped-name"), "?"),
        el("p", said),
        el("label", "Why? It is read when it is reset. ", el("input", id="reason", maxlength=300, autocomplete="off")),
        el("p", id="unstopped", class_="lost", role="alert"),
        el(
            "p",
            el("button", "Keep running", id="keep", type="button", autofocus=True),
            " ",
            el("button", "Stop", id="really", type="button", class_="bad"),
        ),
        id="stopping",
        aria_labelledby="stopped-name",
    )


def _sign_in() -> Element:
    said = (
        "With a token that x402guard serve has printed; with --owner it prints one that may also allow, deny and stop."
    )
    return el(
        "dialog",
        el("h2", "Sign in"),
        el("p", said),
        el(
            "form",
            el("p", id="unsigned-why", class_="lost", role="alert"),
            el("label", "Token ", el("input", name="token", type="password", autocomplete="off", required=True)),
            el(
                "p",
                el("button", "Sign in", type="submit"),
                " ",
                el("button", "Close", id="unsigned", type="button"),
            ),
            id="sign-form",
        ),
        id="sign-in",
        aria_label="Sign in",
    )
