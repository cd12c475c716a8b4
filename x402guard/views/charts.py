"""Draws what happened over time as SVG: the curve of the money with a lane for each agent, and columns for days.

Each chart is drawn at three widths, and the style sheet shows one of them: scaled text cannot be read on a phone. A
curve has steps, because money moves in steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final
from xml.etree.ElementTree import Element

from x402guard.views.markup import el
from x402guard.views.model import EVIDENCE, Day, Lane, Mark, Point, View
from x402guard.views.text import cut, width_of
from x402guard.views.words import axis, count, dollars, rounded

SIZES: Final = ((1080, "c-l"), (700, "c-m"), (339, "c-s"))
"""Width and class of each drawing."""

_HEIGHT: Final = 250
_LANE: Final = 24
_TOP: Final = 16


def time_charts(view: View) -> list[Element]:
    """Return the curve of the money over time at three widths; none without a point."""
    if not view.series:
        return []
    return [_TimeChart(view, width, size).draw() for width, size in SIZES]


def day_charts(view: View) -> list[Element]:
    """Return the columns of the days at three widths."""
    return [_day_chart(view, width, size) for width, size in SIZES]


class _TimeChart:
    """One drawing of the curve."""

    def __init__(self, view: View, width: int, size: str) -> None:
        self.view, self.width, self.size = view, width, size
        self.left, self.right = (46, 74) if width > 400 else (4, 6)
        self.from_ms = min(view.series[0].ms, view.opened_ms if view.since_ms is None else view.series[0].ms)
        end = view.closed_ms or view.now_ms
        self.to_ms = max(view.series[-1].ms, min(end, view.until_ms or end), self.from_ms + 1000)
        peak = max(point.spent + point.held for point in view.series)
        self.shows_limit = view.limit is not None and peak * 8 >= view.limit
        self.most = max(peak, view.limit or 0) if self.shows_limit else peak * 115 // 100 or 1
        self.lanes = view.lanes if len(view.lanes) > 1 or any(lane.refused for lane in view.lanes) else ()
        self.lanes_top = _TOP + _HEIGHT + 14
        self.height = self.lanes_top + len(self.lanes) * (_LANE + (14 if width <= 400 else 0)) + 24

    def x(self, ms: int) -> float:
        """Return the place of a moment."""
        share = (min(max(ms, self.from_ms), self.to_ms) - self.from_ms) / (self.to_ms - self.from_ms)
        return round(self.left + share * (self.width - self.left - self.right), 1)

    def y(self, nanos: int) -> float:
        """Return the place of an amount."""
        return round(_TOP + _HEIGHT - nanos / self.most * _HEIGHT, 1)

    def draw(self) -> Element:
        """Return the drawing."""
        view = self.view
        words = f"Money over time: {dollars(view.spent)} spent and {dollars(view.sums.out)} still out"
        return el(
            "svg",
            self._trips(),
            self._amounts(),
            self._curve(view.series),
            self._limit(),
            self._passed(),
            self._lane_rows(),
            self._times(),
            class_=f"chart w {self.size}", viewBox=f"0 0 {self.width} {self.height}", role="img",
            aria_label=words + (f" of {dollars(view.limit)}" if view.limit is not None else ""),
        )  # fmt: skip

    def _trips(self) -> Iterator[Element]:
        """Yield a band for each time in which it was stopped."""
        begun: int | None = None
        bottom = self.height - 22
        marks: list[Mark | None] = [*(mark for mark in self.view.marks if mark.kind in ("trip", "reset")), None]
        for mark in marks:
            if mark is not None and mark.kind == "trip":
                begun = mark.ms if begun is None else begun
            elif begun is not None:
                start, end = self.x(begun), self.x(self.to_ms if mark is None else mark.ms)
                yield el("rect", class_="trip", x=start, y=_TOP, width=max(1.5, end - start), height=bottom - _TOP)
                yield el("line", class_="tripl", x1=start, x2=start, y1=_TOP, y2=bottom)
                begun = None

    def _amounts(self) -> Iterator[Element]:
        """Yield the grid: soft limits if the limit is shown, round amounts otherwise."""
        if self.shows_limit and self.view.limit is not None and self.view.soft:
            levels = [(self.view.limit * part // 1_000_000, f"{part // 10_000} %") for part in self.view.soft]
        else:
            levels = [(amount, axis(amount)) for amount in nice(self.most, 4)]
        for amount, words in levels:
            at = self.y(amount)
            if at < _TOP + 12 and self.shows_limit:
                continue
            yield el("line", class_="softl", x1=self.left, x2=self.width - self.right, y1=at, y2=at)
            if self.width > 400:
                yield el("text", words, x=self.left - 6, y=at + 4, text_anchor="end")
            else:
                yield el("text", words, x=self.left, y=at - 3)

    def _curve(self, points: Sequence[Point]) -> Iterator[Element]:
        upper = self._steps(points, lambda point: point.spent + point.held)
        lower = self._steps(points, lambda point: point.spent)
        base, start, end = self.y(0), self.x(self.from_ms), self.x(self.to_ms)
        yield el("path", class_="sp", d=_line([(start, base), *lower, (end, base)]) + "Z")
        if any(point.held for point in points):
            yield el("path", class_="hd", d=_line([*upper, *reversed(lower)]) + "Z")
            yield el("path", class_="hdl", d=_line(upper))
        yield el("path", class_="spl", d=_line(lower))
        yield el("line", class_="ax", x1=start, x2=end, y1=base, y2=base)

    def _steps(self, points: Sequence[Point], amount: Callable[[Point], int]) -> list[tuple[float, float]]:
        path, last = [(self.x(self.from_ms), self.y(0))], self.y(0)
        for point in points:
            x, y = self.x(point.ms), self.y(amount(point))
            path += [(x, last), (x, y)]
            last = y
        return [*path, (self.x(self.to_ms), last)]

    def _limit(self) -> Iterator[Element]:
        view, end = self.view, self.width - self.right
        if view.limit is None:
            return
        if self.shows_limit:
            at = self.y(view.limit)
            yield el("line", class_="lim", x1=self.left, x2=end, y1=at, y2=at)
            words, class_ = f"limit {rounded(view.limit)}", "st"
        else:
            at, words, class_ = _TOP, f"the limit, {rounded(view.limit)}, is far above", "tk"
        if self.shows_limit and self.width > 400:
            yield el("text", words.replace(" ", "\N{NO-BREAK SPACE}"), class_=class_, x=end + 6, y=at + 4)
        else:
            yield el("text", words, class_=class_, x=end, y=max(12, at - 4), text_anchor="end")

    def _passed(self) -> Iterator[Element]:
        for mark in self.view.marks:
            if mark.kind != "soft_limit":
                continue
            before = [point for point in self.view.series if point.ms <= mark.ms]
            if before:
                x, y = self.x(mark.ms), self.y(before[-1].spent + before[-1].held)
                yield el(
                    "path", el("title", mark.words), class_="dm", d=f"M{x} {y - 5}L{x + 5} {y}L{x} {y + 5}L{x - 5} {y}Z"
                )

    def _lane_rows(self) -> Iterator[Element]:
        at = self.lanes_top
        for lane in self.lanes:
            if self.width <= 400:
                at += 14
            middle = at + _LANE / 2
            yield el("line", class_="ax", x1=self.left, x2=self.width - self.right, y1=middle, y2=middle)
            yield from self._calls(lane, middle)
            label = cut(lane.name, min(width_of(lane.name), 9 if self.width > 400 else 30)).strip()
            title = el("title", lane.name)
            if self.width > 400:
                yield el("text", title, label, class_="tk", x=self.width - self.right + 8, y=middle + 4)
            else:
                yield el("text", title, label, class_="tk", x=self.left, y=at - 1)
            at += _LANE

    def _calls(self, lane: Lane, middle: float) -> Iterator[Element]:
        strokes = dict.fromkeys(self.x(ms) for ms in lane.calls)
        if strokes:
            yield el("path", class_="call", d="".join(f"M{x} {middle - 6}V{middle + 6}" for x in strokes))
        for first, last, number, rule in lane.refused:
            start, end = self.x(first), self.x(last)
            words = el("title", f"{number:,} × {rule}")
            yield el("path", words, class_="x", d=_cross(start, middle) + (_cross(end, middle) if end > start else ""))
            if end > start:
                yield el("line", class_="xl", x1=start, x2=end, y1=middle, y2=middle)
            if number > 1 and self.width > 400:
                yield el(
                    "text", f"× {number:,}", class_="badt", x=min(end + 7, self.width - self.right - 26), y=middle - 4
                )

    def _times(self) -> Iterator[Element]:
        at, seconds = self.height - 6, (self.to_ms - self.from_ms) / 1000
        for second in time_ticks(seconds, 6 if self.width > 400 else 3):
            x = self.x(self.from_ms + int(second * 1000))
            yield el("line", class_="ax", x1=x, x2=x, y1=self.height - 22, y2=self.height - 18)
            anchor = "start" if x < self.left + 20 else "end" if x > self.width - self.right - 20 else "middle"
            yield el("text", ("+" if second else "") + _tick(second), x=x, y=at, text_anchor=anchor)


def _line(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in points)


def _cross(x: float, y: float) -> str:
    return f"M{x - 4} {y - 4}L{x + 4} {y + 4}M{x - 4} {y + 4}L{x + 4} {y - 4}"


def nice(most: int, about: int) -> list[int]:
    """Return round amounts between zero and *most* (nano-dollars): about *about* of them."""
    raw, step = most / about, 1
    while step * 10 <= raw:
        step *= 10
    step = next((step * times for times in (1, 2, 5, 10) if step * times >= raw), step * 10)
    return list(range(step, most + 1, step))


_TICKS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200, 86_400)


def time_ticks(seconds: float, about: int) -> list[float]:
    """Return round seconds between zero and *seconds*: at most *about* + 1 of them."""
    step: float = next((tick for tick in _TICKS if seconds / tick <= about), 0)
    while not step or seconds / step > about:
        step = (step or 86_400) * 2
    return [number * step for number in range(int(seconds / step) + 1)]


def _tick(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


# -- days -------------------------------------------------------------------------------------------------------------

_SPENT: Final = EVIDENCE[:-1]


def _day_chart(view: View, width: int, size: str) -> Element:
    days, high, foot = view.days, 190, 64
    left, right = (52, 4) if width > 400 else (40, 4)
    most = max(day.sums.spent for day in days) or 1
    pitch = (width - left - right) / len(days)
    thick = max(1.0, min(34.0, pitch * 0.72))

    def middle(number: int) -> float:
        return round(left + pitch * (number + 0.5), 1)

    def y(amount: float) -> float:
        return round(_TOP + high - amount / most * high, 1)

    drawn: list[Element] = []
    for amount in nice(most, 3):
        drawn.append(el("line", class_="softl", x1=left, x2=width - right, y1=y(amount), y2=y(amount)))
        drawn.append(el("text", axis(amount), x=left - 6, y=y(amount) + 4, text_anchor="end"))
    for number, day in enumerate(days):
        drawn.append(_column(day, middle(number) - thick / 2, thick, y))
    drawn.append(el("line", class_="ax", x1=left, x2=width - right, y1=y(0), y2=y(0)))
    every = max(1, -(-len(days) * (74 if width > 400 else 62) // (width - left - right)))
    for number in range(len(days) - 1, -1, -every):
        at = middle(number)
        anchor = "end" if at > width - 40 else "start" if at < 40 else "middle"
        drawn.append(el("text", day_label(days[number].name), x=at, y=_TOP + high + 17, text_anchor=anchor))
    drawn.extend(_below(days, middle, pitch, _TOP + high + 36))
    return el(
        "svg", drawn, class_=f"chart w {size}", viewBox=f"0 0 {width} {_TOP + high + foot}", role="img",
        aria_label=f"{dollars(view.sums.spent)} spent in {count(len(days), 'day' if len(days[0].name) > 7 else 'month')}, at most {dollars(most)} in one",
    )  # fmt: skip


def _column(day: Day, x: float, thick: float, y: Callable[[float], float]) -> Element:
    at, parts = 0, []
    for name, amount in day.sums.parts():
        if name in _SPENT and amount > 0:
            top, bottom = y(at + amount), y(at)
            parts.append(
                el("rect", class_=f"f-{name}", x=round(x, 1), y=top, width=round(thick, 1), height=round(max(0.6, bottom - top), 1))
            )  # fmt: skip
            at += amount
    return el("g", el("title", f"{day_label(day.name)}: {dollars(day.sums.spent)}"), parts)


def _below(days: Sequence[Day], middle: Callable[[int], float], pitch: float, at: float) -> Iterator[Element]:
    """Yield below each day how many sessions were stopped and requests refused; a day too narrow for it has a dot."""
    for number, day in enumerate(days):
        for y, amount, sign in ((at, day.stops, "■"), (at + 16, day.refusals, "✕")):
            if amount:
                words = f"{sign}{amount}" if pitch >= 30 else sign
                title = el("title", f"{amount:,}")
                yield el("text", title, words, class_="badt", x=middle(number), y=y, text_anchor="middle")


def day_label(name: str) -> str:
    """Return a day of a view (``2026-11-22``) as ``22 Nov``, a month (``2026-11``) as ``Nov 2026``."""
    months = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
    year, month, *rest = name.split("-")
    return f"{int(rest[0])} {months[int(month) - 1]}" if rest else f"{months[int(month) - 1]} {year}"


def spark(amounts: Sequence[int], most: int) -> Element:
    """Return small columns of one customer's days, on the scale of *most* nano-dollars."""
    wide = 100 / max(1, len(amounts))
    drawn = [
        el("rect", class_="f-spent", x=f"{number * wide:.2f}%", width=f"{wide * 0.8:.2f}%", y=f"{100 - high:.1f}%", height=f"{high:.1f}%")
        for number, amount in enumerate(amounts)
        if amount > 0 and (high := max(6.0, amount * 100 / most))
    ]  # fmt: skip
    return el("svg", drawn, class_="spark", aria_hidden="true")


def is_long(view: View) -> bool:
    """True if days tell more of a view than a curve: for the wallet and named budgets, and beyond two days."""
    return len(view.days) > 2 or (len(view.days) == 2 and view.kind in ("wallet", "budget"))
