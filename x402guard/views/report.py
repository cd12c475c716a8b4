"""Defines the report of a session. What builds and renders it loads at the first one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec

from x402guard.errors import ConfigError
from x402guard.frozen import read_struct
from x402guard.kernel.windows import zone
from x402guard.money import format_dollars
from x402guard.views.words import json_text

if TYPE_CHECKING:
    from x402guard.views.books import Books
    from x402guard.views.captures import CaptureRow
    from x402guard.views.model import View


class Report:
    """The report of a session, a named budget, the wallet or a period, as text, JSON and HTML.

    The keys of ``to_dict`` are stable; amounts are decimal strings in dollars. That of a period has the keys of its view
    alone. All renderings draw from ``view``.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._given: Mapping[str, Any] | None = values
        self._books: Books | None = None
        self._between: tuple[int | None, int | None] = (None, None)

    def captures(self) -> list[CaptureRow]:
        """Return what was captured in the time of the report, entry by entry, out of the same rows of the ledger.

        Of a budget with a window, that is its present window, by when an entry was written: a correction of an earlier
        window's call is among them, and counts in that window. Raises ``ConfigError`` for a report that was read from JSON.
        """
        if self._books is None:
            raise ConfigError("captures: this report was read from JSON, which has no entries; ask the ledger's owner")
        books, (since_ms, until_ms) = self._books, self._between
        if since_ms is None and until_ms is None and books.node.window is not None:
            since_ms = books.node.since_ms
        from x402guard.views.captures import capture_rows

        return capture_rows(books.nodes, books.entries, books.lines, since_ms=since_ms or 0, until_ms=until_ms)

    @classmethod
    def of(cls, books: Books, *, since_ms: int | None = None, until_ms: int | None = None) -> Report:
        """Return the report of these rows; with *since_ms* or *until_ms* (unix milliseconds) that of the period."""
        report = cls({})
        report._given, report._books, report._between = None, books, (since_ms, until_ms)
        return report

    @cached_property
    def view(self) -> View | None:
        """What it shows; None for one from a file whose view this version cannot read: it is then shown as its JSON."""
        from x402guard.views.build import build_view
        from x402guard.views.model import VIEW_SCHEMA, View

        if self._books is not None:
            since_ms, until_ms = self._between
            return build_view(self._books, since_ms=since_ms, until_ms=until_ms)
        given = (self._given or {}).get("view")
        if not isinstance(given, dict) or given.get("schema") != VIEW_SCHEMA:
            return None
        try:
            view = read_struct(given, View)
            zone(view.tz)
        except (msgspec.ValidationError, ValueError):
            return None
        # What is read as text has to be what is read as keys.
        agrees = (self._given or {}).get("spent", "") in (format_dollars(view.spent), "")
        return view if agrees else None

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """The values of ``to_dict``; not a copy of them."""
        if self._given is not None:
            return self._given
        assert self._books is not None
        from x402guard.views.report_keys import keys_of

        shown: dict[str, Any] = msgspec.to_builtins(self.view)
        return shown if self._between != (None, None) else {**keys_of(self._books), "view": shown}

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values: text, numbers, lists and dicts."""
        copy: dict[str, Any] = json.loads(json.dumps(self.values))
        return copy

    def to_json(self) -> str:
        """Return the report as JSON, indented by two spaces, in a fixed order."""
        return json_text(self.values)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return "Report()"

    def to_text(self) -> str:
        """Return the report as plain text of at most 80 columns, for a terminal or a log."""
        from x402guard.views.text import render

        return self.to_json() if self.view is None else render(self.view)

    def to_html(self, *, links: bool = True, csv: str | None = None) -> str:
        """Return the report as one HTML page that needs no network, for a screen, a phone or paper.

        Args:
            links: link transactions to the block explorer of their network; False for a local chain, which none knows.
            csv: the name of a file beside the page that lists every call, if there is one.
        """
        if self.view is None:
            return f"<!doctype html><title>x402guard</title><pre>{escape(self.to_json())}</pre>"
        from x402guard.views.page import page

        return page(self.view, links=links, csv=csv)

    def _repr_html_(self) -> str:
        # A notebook shows the page in a frame of its own, where its styles touch nothing else and no script runs.
        return f'<iframe sandbox="" width="100%" height="900" srcdoc="{escape(self.to_html())}"></iframe>'
