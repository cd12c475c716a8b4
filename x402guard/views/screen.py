"""Renders the live view as one screen of a terminal, as wide and as high as it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from x402guard.views.live import Ask, Line, LiveSession, LiveView, chosen
from x402guard.views.model import Out
from x402guard.views.text import GLYPHS, bar, cut, width_of
from x402guard.views.words import clock, count, dollars, rounded, span

LEAST: Final = (60, 16)
"""The columns and lines below which a screen cannot show it."""

_SIGNS: Final = {"asks": "?", "stopped": "■", "open": " ", "closed": "·"}


def screen(
    view: LiveView, width: int, height: int, *, find: str = "", customer: str = "", agent: str = "", state: str = ""
) -> list[str]:
    """Return the lines of a screen: each has *width* columns, and they are *height* at most."""
    width, height = max(width, LEAST[0]), max(height, LEAST[1])
    inside = width - 4
    sessions = chosen(view.sessions, find=find, customer=customer, agent=agent, state=state)
    asks = [_ask(ask, view, inside) for ask in view.asks[:3]]
    out = [_out(row, view, inside) for row in view.outstanding[: max(2, height // 8)]]
    happened = [_line(line, inside) for line in view.lines[: max(3, height // 6)]]
    fixed = 4 + (1 + len(asks) if asks else 0) + 1 + (1 + len(out) if out else 0) + 1 + len(happened)
    room = max(2, height - fixed)
    shown = [_session(session, inside) for session in sessions[: room if len(sessions) <= room else room - 1]]
    if len(sessions) > len(shown):
        shown.append(f"{count(len(sessions) - len(shown), 'more session')}: x402guard sessions lists them")
    counts = view.counts()
    title = f"sessions, {len(sessions):,} of {view.ever:,}, {counts['stopped']:,} stopped"
    lines = [_edge("┌", "┐", " x402guard watch ", f" live {clock(view.now_ms)} ", width)]
    lines += _boxed([_wallet_bar(view, inside), _wallet(view, inside)], inside)
    if asks:
        lines += [
            _edge("├", "┤", f" {len(view.asks)} for you ", " x402guard approvals allow ID ", width),
            *_boxed(asks, inside),
        ]
    lines += [_edge("├", "┤", f" {title} ", " left, of ", width), *_boxed(shown or ["none"], inside)]
    if out:
        lines += [
            _edge("├", "┤", f" out now, {len(view.outstanding):,} ", " at most, for ", width),
            *_boxed(out, inside),
        ]
    lines += [_edge("├", "┤", " as it happens ", "", width), *_boxed(happened or ["nothing yet"], inside)]
    return [*lines[: height - 1], _edge("└", "┘", "", " Ctrl-C ends it ", width)]


def _edge(left: str, right: str, title: str, end: str, width: int) -> str:
    return f"{left}─{title}{'─' * (width - 4 - width_of(title) - width_of(end))}{end}─{right}"


def _boxed(lines: Iterable[str], inside: int) -> list[str]:
    return [f"│ {cut(line, inside)} │" for line in lines]


def _cells(amounts: Iterable[tuple[str, int]], limit: int | None, width: int) -> str:
    """Return a bar of exactly *width* columns: what is used of a limit, and dots for what is free."""
    shown = list(amounts)
    drawn = bar(shown, max(limit or 0, sum(amount for _, amount in shown)), width)
    return drawn + GLYPHS["left"] * (width - len(drawn))


def _wallet_bar(view: LiveView, inside: int) -> str:
    limit = "no limit" if view.limit is None else dollars(view.limit)
    parts = (("spent", view.spent), ("out", view.out), ("allocated", view.allocated))
    return f"{limit}  {_cells(parts, view.limit, inside - width_of(limit) - 2)}"


def _wallet(view: LiveView, inside: int) -> str:
    """Return the wallet's sums, as many as fit whole: a cut amount would be another amount."""
    parts = ["■ stopped"] if view.stopped else []
    parts += [f"█ {rounded(view.spent)} spent", f"/ {rounded(view.out)} out"]
    if view.left is not None:
        parts.append(f"· {rounded(view.left - view.allocated)} free")
    parts.append(f"- {rounded(view.allocated)} allocated")
    while width_of("   ".join(parts)) > inside and len(parts) > 1:
        parts.pop()
    return "   ".join(parts)


def _until(until_ms: int, now_ms: int) -> str:
    if until_ms <= now_ms:
        return "over"
    seconds = (until_ms - now_ms) // 1000
    return f"{seconds // 60}:{seconds % 60:02d}" if seconds < 3600 else span(seconds * 1000)


def _right(left: str, right: str, inside: int) -> str:
    return f"{cut(left, inside - width_of(right) - 1)} {right}"


def _ask(ask: Ask, view: LiveView, inside: int) -> str:
    return _right(f"? {ask.id}  {ask.what}", f"{ask.session}  no in {_until(ask.until_ms, view.now_ms)}", inside)


def _session(session: LiveSession, inside: int) -> str:
    left = "–" if session.left is None else rounded(session.left)
    limit = "no limit" if session.limit is None else rounded(session.limit)
    end = f"{left:>9} {limit:>9}"
    wide = max(8, inside - 36 - len(end) - 2)
    parts = (("spent", session.spent), ("out", session.out), ("allocated", session.allocated))
    cells = _cells(parts, session.limit, wide)
    return f"{_SIGNS[session.state]} {cut(session.name, 17)} {cut(session.customer, 14)}  {cells}  {end}"


def _out(row: Out, view: LiveView, inside: int) -> str:
    end = f"{dollars(row.amount):>10} {_until(row.until_ms, view.now_ms):>7}"
    return _right(f"/ {cut(row.to, max(12, inside - 48))} {row.session}", end, inside)


def _line(line: Line, inside: int) -> str:
    at = clock(line.at_ms).removesuffix(" UTC")
    amount = "" if line.amount is None else dollars(line.amount)
    if line.kind == "refused":
        return _right(f"{at} ✕ refused by {line.to}: {line.words}", line.session, inside)
    if line.kind in ("stopped", "reset"):
        sign = "■ stopped" if line.kind == "stopped" else "▶ reset"
        return _right(f"{at} {sign} {line.session}: {line.words}", "", inside)
    return _right(f"{at} {GLYPHS.get(line.kind, '?')} {line.to}", f"{line.session}  {amount:>11}", inside)
