"""Writes captured entries for other systems: CSV, Stripe's billing meters, Orb.

Each line has the hash of its journal entry as the key that its receiver deduplicates by, for as long as it does so.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from functools import lru_cache
from operator import attrgetter
from typing import Final

from msgspec.structs import asdict

from x402guard.errors import ConfigError
from x402guard.kernel.rows import Nanos
from x402guard.money import format_dollars
from x402guard.policy.checks import check_choice
from x402guard.views.captures import CaptureRow

EVENT_NAME: Final = "x402guard_spend"
"""The name of the events for a billing system, unless the owner gives another one."""

_LONGEST_NAME: Final = 100  # of Stripe's event names
_FORMULA: Final = re.compile('(^|;)(?="*[=+\\-@\t\r\uff1d\uff0b\uff0d\uff20])')
"""Where a spreadsheet takes what follows for a formula, also one whose separator is a semicolon; the signs in full width, too."""


def dollars(nanos: int) -> str:
    """Return an amount that may be negative, in dollars."""
    return f"-{format_dollars(Nanos(-nanos))}" if nanos < 0 else format_dollars(Nanos(nanos))


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_COLUMNS: Final = tuple(name for name in CaptureRow.__struct_fields__ if name not in ("at_ms", "nanos"))
_OF_ROW: Final = attrgetter(*_COLUMNS)
_OURS: Final = frozenset({"kind", "event", "tokens_in", "tokens_out", "evidence", "now", "hold", "entry"})
_OTHERS: Final = tuple(place for place, name in enumerate(_COLUMNS) if name not in _OURS)
"""The columns whose words are those of sellers, agents and customers."""

HEADER: Final = ",".join(("time", "dollars", *_COLUMNS)) + "\r\n"
"""The first line of a CSV file."""

_LINES_AT_ONCE: Final = 1_000


def to_csv(rows: Iterable[CaptureRow]) -> Iterator[str]:
    """Yield a CSV file (RFC 4180) in pieces: a header, and a line for each row.

    A text that a spreadsheet would take for a formula begins with an apostrophe: hosts, paths and tools are others' words.
    """
    yield HEADER
    piece = io.StringIO()
    writer = csv.writer(piece, lineterminator="\r\n")
    for number, row in enumerate(rows, 1):
        cells = list(_OF_ROW(row))
        for place in _OTHERS:
            cells[place] = _plain(cells[place])
        writer.writerow((_time(row.at_ms), dollars(row.nanos), *cells))
        if number % _LINES_AT_ONCE == 0:
            yield piece.getvalue()
            piece.seek(0)
            piece.truncate()
    yield piece.getvalue()


@lru_cache(maxsize=4096)
def _plain(text: str) -> str:
    """Return a text that no spreadsheet calculates, on one line."""
    safe = _FORMULA.sub(r"\g<1>'", text)
    return (
        safe
        if safe.isprintable()
        else "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in safe)
    )


def to_stripe_meter(rows: Iterable[CaptureRow], event_name: str = EVENT_NAME) -> Iterator[str]:
    """Yield one JSON line a row, the body of ``POST /v2/billing/meter_events``.

    The customer is the named budget, which has the name of Stripe's customer; the value is in nano-dollars, a whole number,
    so that a price of $0.000000001 a unit bills what was spent. Raises ``ConfigError`` for a row without a customer.
    """
    for row in rows:
        payload = {"stripe_customer_id": _customer(row), "value": str(row.nanos)}
        event = {"event_name": event_name, "identifier": row.entry, "timestamp": _time(row.at_ms), "payload": payload}
        yield json.dumps(event, ensure_ascii=False) + "\n"


def to_orb(rows: Iterable[CaptureRow], event_name: str = EVENT_NAME) -> Iterator[str]:
    """Yield one JSON line a row, an event of ``POST /v1/ingest``.

    The customer is the named budget, under which Orb knows it as its external id; ``properties.dollars`` is decimal text,
    and ``properties.nanos`` a whole number. Raises ``ConfigError`` for a row without a customer.
    """
    for row in rows:
        cells = asdict(row)
        properties = {name: cells[name] for name in _ORB_PROPERTIES if cells[name] not in ("", 0)}
        event = {
            "event_name": event_name,
            "idempotency_key": row.entry,
            "external_customer_id": _customer(row),
            "timestamp": _time(row.at_ms),
            "properties": {"nanos": row.nanos, "dollars": dollars(row.nanos), **properties},
        }
        yield json.dumps(event, ensure_ascii=False) + "\n"


_ORB_PROPERTIES: Final = (
    "session", "agent", "kind", "event", "host", "payee", "network", "transaction", "provider", "model", "tool",
    "tokens_in", "tokens_out", "evidence", "hold",
)  # fmt: skip


def _customer(row: CaptureRow) -> str:
    if not row.customer:
        raise ConfigError(
            f"customer: session {row.session!r} is in no named budget, so no one can be billed for it; open it with "
            'guard.budget("customer").session(…), or export one customer: x402guard report CUSTOMER'
        )
    return row.customer


FORMATS: Final = ("csv", "stripe-meter", "orb")


def export(rows: Iterable[CaptureRow], form: str, event_name: str = EVENT_NAME) -> Iterator[str]:
    """Yield the lines of a file in one of ``FORMATS``. Raises ``ConfigError`` for another one."""
    check_choice("--format", form, FORMATS)
    check_event_name(event_name)
    if form == "csv":
        return to_csv(rows)
    return to_stripe_meter(rows, event_name) if form == "stripe-meter" else to_orb(rows, event_name)


def check_event_name(name: str) -> str:
    """Return the name of an event. Raises ``ConfigError`` for one that Stripe does not take."""
    if not name.strip() or not name.isprintable() or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"--event-name: {name!r:.120} is no name for an event; write at most {_LONGEST_NAME} characters"
        )
    return name
