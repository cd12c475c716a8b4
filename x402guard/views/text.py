"""Renders a view as plain text of at most 80 columns, for a terminal or a log."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from x402guard.views import words
from x402guard.views.model import EVIDENCE, Row, Sums, View
from x402guard.views.words import dollars, printable

WIDTH: Final = 80
GLYPHS: Final = {
    "proven": "█", "claimed": "▒", "stated": "▓", "priced": "░", "assumed": "?", "out": "/", "left": "·",
    "spent": "█", "allocated": "-",
}  # fmt: skip

_BAR: Final = 66
_NAME: Final = 31
_MOST_LINES: Final = 12
_MOST_DAYS: Final = 14


def render(view: View) -> str:
    """Return a view as lines of text, without a trailing newline."""
    blocks = (
        _head(view), _verdict(view), _money(view), _facts(view), _remarks(view), _customers(view), _sessions(view),
        *_groups(view), _days(view), _refusals(view),
    )  # fmt: skip
    filled = (block for block in map(list, blocks) if block)
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in filled)


def width_of(text: str) -> int:
    """Return how many columns of a terminal *text* takes."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "FW" else 1 for char in text
    )


def cut(text: str, width: int) -> str:
    """Return printable *text* in exactly *width* columns, cut by ``…`` or filled with spaces."""
    clean = printable(text)
    if width_of(clean) > width:
        while clean and width_of(clean) > width - 1:
            clean = clean[:-1]
        clean += "…"
    return clean + " " * (width - width_of(clean))


def bar(amounts: Sequence[tuple[str, int]], scale: int, width: int) -> str:
    """Return a bar of *width* columns for *scale*; each amount takes its part of it, and one column at least.

    *amounts* are (name of ``GLYPHS``, amount). The bar never says more than *width*, also past the limit.
    """
    shown = [(name, amount) for name, amount in amounts if amount > 0]
    if not shown or scale <= 0:
        return ""
    cells = [max(1, round(amount * width / scale)) for _, amount in shown]
    while sum(cells) > width and max(cells) > 1:
        cells[cells.index(max(cells))] -= 1
    return "".join(GLYPHS[name] * number for (name, _), number in zip(shown, cells, strict=True))[:width]


def _wrapped(text: str, *, first: str = "  ", then: str = "  ") -> list[str]:
    """Return *text* in lines that fit; only a word that is wider than a line is broken."""
    lines, line, is_begun = [], first, False
    for word in printable(text).split():
        rest = word
        while rest:
            space = " " if is_begun else ""
            if width_of(line) + width_of(space + rest) <= WIDTH - 2:
                line, rest, is_begun = line + space + rest, "", True
            elif is_begun:
                lines.append(line)
                line, is_begun = then, False
            else:
                part = _beginning(rest, WIDTH - 2 - width_of(line))
                line, rest, is_begun = line + part, rest[len(part) :], True
    return [*lines, line]


def _beginning(text: str, width: int) -> str:
    """Return as much of the beginning of *text* as fits into *width* columns, and one character at least."""
    end = len(text)
    while end > 1 and width_of(text[:end]) > width:
        end -= 1
    return text[:end]


def _fact(name: str, text: str) -> list[str]:
    return _wrapped(text, first=f"  {name:<13}", then=" " * 15)


def _head(view: View) -> Iterator[str]:
    name = printable(view.name) + (f"  for {printable(view.customer)}" if view.customer else "")
    if view.kind == "wallet":
        name = "The wallet"
    about = [words.span((view.closed_ms or view.now_ms) - view.opened_ms)]
    about += [words.network_name(network) for network in view.chain.networks[:2]]
    about += [f"wallet {words.short(view.wallet)}"] if view.wallet else []
    for left, right in ((name, words.moment(view.opened_ms)), (view.id, ", ".join(about))):
        room = WIDTH - 2 - width_of(right)
        yield cut(left, room - 1) + " " + right


def _verdict(view: View) -> Iterator[str]:
    yield from _wrapped(f"{words.headline(view)} {words.stopped_words(view.stopped)}")
    if said := words.out_words(view):
        yield from _wrapped(said)
    if gap := words.gap_words(view):
        yield from _wrapped(gap)


def _money(view: View) -> Iterator[str]:
    """Yield the bar and what its parts mean: every kind of evidence, also one of zero, so that reports can be compared."""
    parts = list(view.sums.parts())
    if view.left is not None and view.left > 0:
        parts.append(("left", view.left))
    scale = max(view.limit or 0, view.sums.total)
    if scale:
        end = "" if view.limit is None else f"  {dollars(scale)}"
        yield f"  {bar(parts, scale, min(_BAR, WIDTH - 4 - len(end)))}{end}"
    yield from _wrapped(words.sum_line(view))
    yield ""
    shown = words.legend(view)
    wide = max(len(dollars(amount)) for _, amount, _ in shown)
    for name, amount, what in shown:
        glyph, word = GLYPHS.get(name, "!") * 2, words.NAMES.get(name, name)
        yield f"  {glyph} {word:<10}{dollars(amount):<{wide + 4}}{what}"


def _facts(view: View) -> Iterator[str]:
    state = view.state + (f", {view.stopped.word}" if view.stopped else "")
    yield from _fact("state", state)
    if view.stopped is not None:
        stop = view.stopped
        at = "" if stop.at_ms is None else f", at {words.near(stop.at_ms, view.now_ms)}"
        yield from _fact("stopped by", words.stop_head(stop) + at)
        if stop.reason:
            yield from _fact("", stop.reason)
    if view.stops:
        yield from _fact("stopped", ", ".join(f"{number} by {word}" for word, number in view.stops))
    if view.per is not None and view.since_ms is not None and not view.asked:
        limit = "no limit" if view.limit is None else dollars(view.limit)
        since = words.day(view.since_ms, view.tz)
        yield from _fact("window", f"{limit} a {view.per}, since {since}; {dollars(view.spent_total)} spent in all")
    if view.remaining is not None:
        said = dollars(view.remaining)
        if view.reserve:
            said += f", and {dollars(view.reserve)} in reserve"
        if view.bound_by is not None:
            kind = "the wallet" if view.bound_by.kind == "wallet" else f"{view.bound_by.kind} {view.bound_by.name!r}"
            said += f", which is what {kind} has left"
        yield from _fact("remaining", said)
    for number, row in enumerate(view.outstanding[:_MOST_LINES]):
        said = f"{dollars(row.amount)} {words.out_line(row)}, until {words.near(row.until_ms, view.now_ms)}"
        yield from _fact("" if number else "still out", said)
        if row.transaction:
            yield from _fact("", f"its server names the transaction {words.short(row.transaction)}")
        if command := words.out_command(row):
            yield f"{'':15}{command}"
    if more := view.outstanding_count - len(view.outstanding[:_MOST_LINES]):
        yield from _fact("", f"and {more} more; see x402guard holds")
    if said := words.chain_words(view):
        yield from _fact("on chain", said)
    if said := words.unexplained_words(view):
        yield from _fact("unexplained", said)


def _remarks(view: View) -> Iterator[str]:
    for remark in view.remarks:
        yield from _fact(remark.name, remark.words)
    tokens = view.tokens
    if tokens is not None and (tokens.used or tokens.reserved):
        part = f"{tokens.used / tokens.total:.1%}".replace("%", " %") if tokens.total else "0 %"
        reserved = f", {tokens.reserved:,} reserved" if tokens.reserved else ""
        yield from _fact("tokens", f"{tokens.used:,} of {tokens.total:,} used ({part}){reserved}, {tokens.left:,} left")
        if tokens.soft is not None:
            yield from _fact("", f"past the soft limit of {tokens.soft:,}")
        wide = max(width_of(cut(name, min(40, width_of(printable(name))))) for name, _ in tokens.rows or [("", 0)])
        for name, number in tokens.rows[:_MOST_LINES]:
            yield f"{'':15}{cut(name, wide)}  {number:>9,}"


def _groups(view: View) -> Iterator[Iterable[str]]:
    everything = [*view.kinds, *view.agents, *view.sellers, *view.models, *view.tools]
    scale = max((row.sums.total for row in everything), default=0)
    agents = view.agents if len(view.agents) > 1 else ()
    for title, rows in (
        ("KIND", view.kinds),
        ("AGENT", agents),
        ("SELLER", view.sellers),
        ("MODEL", view.models),
        ("TOOL", view.tools),
    ):
        yield _group(f"BY {title}", rows, scale)


def _group(title: str, rows: Sequence[Row], scale: int, second: str = "calls") -> Iterator[str]:
    if not rows:
        return
    yield f"  {cut(title, _NAME)}{second:>7}    amount"
    shown = _most_telling(rows)
    several = Counter(row.name for row in rows)  # one host, several payees
    for row in shown:
        limit = f" (of {dollars(row.limit)})" if row.limit is not None and row.depth else ""
        branch = "  " * min(row.depth - 1, 6) + "└ " if row.depth else ""
        ended = f" {row.word}" if row.word and row.depth else ""
        paid = f" {words.short(row.detail)}" if several[row.name] > 1 and row.detail else ""
        yield _line(branch + row.name + paid + limit, f"{row.calls:,}", row.sums, scale, ended)
    if len(rows) > len(shown):
        rest = sum(row.sums.total for row in rows) - sum(row.sums.total for row in shown)
        yield f"  {cut(f'and {len(rows) - len(shown)} more', _NAME)}{'':>7}    {dollars(rest)}"


def _most_telling(rows: Sequence[Row]) -> list[Row]:
    """Return the dearest rows in their order, in a tree with those above them."""
    if len(rows) <= _MOST_LINES:
        return list(rows)
    by_cost = sorted(range(len(rows)), key=lambda place: -rows[place].sums.total)
    kept: set[int] = set()
    for place in by_cost:
        chain, depth = {place}, rows[place].depth
        for above in range(place - 1, -1, -1):
            if rows[above].depth < depth:
                chain.add(above)
                depth = rows[above].depth
        if len(kept | chain) <= _MOST_LINES:
            kept |= chain
    return [rows[place] for place in sorted(kept)]


def _line(name: str, number: str, sums: Sums, scale: int, after: str = "") -> str:
    amount = f"{dollars(sums.total):<12} "
    head = f"  {cut(name, _NAME)}{number:>7}    {amount}"
    return f"{head}{bar(sums.parts(), scale, max(1, min(20, WIDTH - width_of(head) - len(after))))}{after}"


def _customers(view: View) -> Iterator[str]:
    if not view.customers:
        return
    shown = view.customers[: _MOST_LINES * 2]
    columns = [("spent", [dollars(each.row.sums.spent) for each in shown])]
    if view.customers[0].today is not None:
        columns.append(("yesterday", [_dash(each.yesterday) for each in shown]))
        columns.append(("today", [_dash(each.today) for each in shown]))
    columns.append(("out", [_dash(each.row.sums.out) for each in shown]))
    while sum(wide := [max(len(name), *map(len, cells)) + 2 for name, cells in columns]) > WIDTH - 14:
        del columns[-2]  # today, then yesterday: the page has them
    name = WIDTH - 2 - sum(wide)
    days = f" ({view.tz} days)" if len(columns) > 2 else ""
    yield f"  {cut(f'CUSTOMER{days}', min(name, 36))}" + "".join(
        f"{title:>{size}}" for (title, _), size in zip(columns, wide, strict=True)
    )
    for number, each in enumerate(shown):
        cells = (f"{cells[number]:>{size}}" for (_, cells), size in zip(columns, wide, strict=True))
        yield f"  {cut(each.row.name, min(name, 36))}{''.join(cells)}"
    if len(view.customers) > _MOST_LINES * 2:
        yield f"  and {len(view.customers) - _MOST_LINES * 2} more"


def _sessions(view: View) -> Iterator[str]:
    if not view.sessions:
        return
    yield f"  {cut(f'SESSIONS, {view.sessions_count:,}', 30)}{'amount':>14}{'limit':>12}  state"
    for row in view.sessions[:_MOST_LINES]:
        limit = "none" if row.limit is None else dollars(row.limit)
        name = f"{row.name}  {row.detail}" if row.detail else row.name
        yield f"  {cut(name, 30)}{dollars(row.sums.total):>14}{limit:>12}  {cut(row.word or row.state, 18)}"
    if view.sessions_count > len(view.sessions[:_MOST_LINES]):
        yield f"  and {view.sessions_count - len(view.sessions[:_MOST_LINES]):,} more; see x402guard sessions"


def _dash(nanos: int | None) -> str:
    return dollars(nanos) if nanos else "–"


def _days(view: View) -> Iterator[str]:
    days = view.days[-_MOST_DAYS:]
    if len(days) < 2:
        return
    scale = max(day.sums.spent for day in days)
    title = "DAY" if len(days[0].name) > 7 else "MONTH"
    if len(view.days) > len(days):
        title = f"LAST {len(days)}"
    yield f"  {cut(title, 12)}{'amount':>14}{'stopped':>9}{'refused':>9}"
    for day in days:
        drawn = bar([(name, amount) for name, amount in day.sums.parts() if name != EVIDENCE[-1]], scale, 30)
        yield f"  {cut(day.name, 12)}{_dash(day.sums.spent):>14}{day.stops or '–':>9}{day.refusals or '–':>9}  {drawn}"


def _refusals(view: View) -> Iterator[str]:
    """Yield what each rule has refused. A reason that the stop has said already is not said again."""
    if not view.refusals:
        return
    yield "  REFUSED, before anything was signed"
    said = None if view.stopped is None else view.stopped.reason
    for row in view.refusals[: _MOST_LINES * 2]:
        last = "" if row.count == 1 else ", the last"
        reason = "" if said and said in row.reason else row.reason
        least = "at least " if row.is_least else ""
        yield from _wrapped(f"{least}{row.count:,} × {row.rule}{last if reason else ''}")
        if reason:
            yield from _wrapped(reason, first=" " * 6, then=" " * 6)
