"""Builds HTML and SVG elements. The standard library's ElementTree escapes every text and every attribute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from xml.etree.ElementTree import Element, tostring

from x402guard.views.words import NAMES, dollars, printable, short

Child = Element | str | None
"""A child of an element: another one, text, or nothing."""

_MOST_PLACES: Final = 5
_LEAST: Final = 0.5
"""The width of an amount that is not zero, in percent of a bar."""


def el(tag: str, *children: Child | Iterable[Child], **attributes: object) -> Element:
    """Return an element. ``class_`` is ``class``, other underscores are hyphens; an attribute of None is left out."""
    made = Element(tag)
    for name, value in attributes.items():
        if value is not None and value is not False:
            made.set(name.rstrip("_").replace("_", "-"), "" if value is True else str(value))
    last: Element | None = None
    for child in _flat(children):
        if isinstance(child, Element):
            made.append(child)
            last = child
        elif last is None:
            made.text = (made.text or "") + child
        else:
            last.tail = (last.tail or "") + child
    return made


def _flat(children: Iterable[Child | Iterable[Child]]) -> Iterable[Element | str]:
    for child in children:
        if isinstance(child, (Element, str)):
            yield child
        elif child is not None:
            yield from (each for each in child if each is not None)


def section(name: str | None, title: str, why: Child | Sequence[Child], *children: Child | Iterable[Child]) -> Element:
    """Return a section of a page with its heading, a sentence below it, and what it holds; *name* is its id."""
    return el("section", el("h2", title), el("p", why, class_="why") if why else None, *children, id=name)


def written(element: Element) -> str:
    """Return an element as HTML."""
    return tostring(element, encoding="unicode", method="html")


def foreign(text: str) -> Element:
    """Return text that a server, an agent or a customer has chosen: on its own in direction, breaking anywhere."""
    return el("bdi", printable(text) or "–")


def address(text: str) -> Element:
    """Return an address or a hash in short, with the whole of it as its title."""
    return el("bdi", short(printable(text)), title=printable(text), class_="mono")


def swatch(name: str) -> Element:
    """Return the small square that shows how an amount is drawn."""
    return el(
        "svg",
        el("rect", class_=f"f-{name}", x=1, y=1, width=10, height=10),
        class_="sw",
        aria_hidden="true",
        viewBox="0 0 12 12",
    )


def bar(amounts: Iterable[tuple[str, int]], scale: int, *, class_: str, tick: int | None = None) -> Element:
    """Return a bar of (name, amount) on a scale from zero, in percent; *tick* is an amount that a line marks.

    What does not fit on the scale fills the bar.
    """
    parts = [(name, amount) for name, amount in amounts if amount > 0]
    scale = max(scale, 1)
    widths = [max(_LEAST, amount * 100 / scale) for _, amount in parts]
    if (total := sum(widths)) > 100:
        widths = [width * 100 / total for width in widths]
    drawn, at = [], 0.0
    for (name, _), width in zip(parts, widths, strict=True):
        drawn.append(el("rect", class_=f"f-{name}", x=f"{at:.2f}%", y=0, width=f"{width:.2f}%", height="100%"))
        at += width
    if tick is not None and 0 < tick <= scale:
        where = f"{tick * 100 / scale:.2f}%"
        drawn.append(el("line", class_="mk", x1=where, x2=where, y1=0, y2="100%"))
    words = ", ".join(f"{dollars(amount)} {NAMES.get(name, name)}" for name, amount in parts) or "nothing"
    return el("svg", drawn, class_=class_, role="img", aria_label=words)


def patterns() -> Element:
    """Return the textures of the kinds of evidence, which tell them apart without colour."""
    return el(
        "svg",
        el(
            "defs",
            el(
                "pattern",
                el("rect", width=5, height=5, class_="c-claimed0"),
                el("rect", width=2.2, height=5, class_="c-claimed"),
                id="h-claimed", width=5, height=5, patternUnits="userSpaceOnUse", patternTransform="rotate(45)",
            ),
            el(
                "pattern",
                el("rect", width=4, height=4, class_="c-priced0"),
                el("rect", y=1, width=4, height=1.8, class_="c-priced"),
                id="h-priced", width=4, height=4, patternUnits="userSpaceOnUse",
            ),
            el(
                "pattern",
                el("rect", width=4.5, height=4.5, class_="c-assumed0"),
                el("circle", cx=2.2, cy=2.2, r=1.25, class_="c-assumed"),
                id="h-assumed", width=4.5, height=4.5, patternUnits="userSpaceOnUse",
            ),
            el(
                "pattern",
                el("rect", width=6, height=6, class_="c-out0"),
                el("rect", width=2, height=6, class_="c-out"),
                id="h-out", width=6, height=6, patternUnits="userSpaceOnUse", patternTransform="rotate(-45)",
            ),
        ),
        class_="defs", aria_hidden="true", width=0, height=0,
    )  # fmt: skip


def padded(amounts: Iterable[int]) -> int:
    """Return the number of decimal places that align a column of amounts in nano-dollars."""
    return min(_MOST_PLACES, max((len(dollars(amount).partition(".")[2]) for amount in amounts), default=2))


def aligned(nanos: int, places: int, before: str = "") -> list[Child]:
    """Return an amount with invisible zeros behind it, so that the points of a column stand below each other."""
    text = dollars(nanos)
    missing = places - len(text.partition(".")[2])
    return [before, text, el("i", "0" * missing, aria_hidden="true") if missing > 0 else None]
