"""What the ledger's tables say, read without the library's help: rows of budgets and holds, and who signed twice."""

import json
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg

AWAY_S = 30


@dataclass(frozen=True)
class HoldRow:
    """A hold, in nano-dollars; `counted` is its ceiling while it is held, and what was captured after."""

    node: str
    state: str
    amount: int
    captured: int
    deadline: int
    place: str

    @property
    def counted(self) -> int:
        """What it takes from its budgets."""
        return self.amount if self.state == "held" else self.captured


@dataclass(frozen=True)
class NodeRow:
    """A budget, in nano-dollars."""

    parent: str | None
    limit: int | None
    counted: int


@dataclass(frozen=True)
class Books:
    """The ledger at one moment: budgets and holds by id."""

    nodes: dict[str, NodeRow]
    holds: dict[str, HoldRow]

    def path(self, node: str | None) -> list[str]:
        """A budget and all that it is paid out of."""
        above = []
        while node is not None:
            above.append(node)
            node = self.nodes[node].parent
        return above


NODES = (
    "SELECT id, parent_id, max_nanos, captured + held + granted_out - past, granted_in - captured - held - granted_out "
    "FROM nodes WHERE kind <> 'tokens'"
)
HOLDS = "SELECT id, node_id, state, amount, captured, deadline_unix, {url} FROM holds"
ENTRIES = (
    "SELECT event, hold_id, data FROM entries WHERE hold_id IS NOT NULL AND event <> 'event' ORDER BY node_id, seq"
)


class BookWatch:
    """Reads an SQLite ledger beside those who write it."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30, isolation_level=None)

    def _rows(self, *queries: str) -> list[list[tuple]]:
        """What each query finds, all at one moment."""
        self._db.execute("BEGIN")
        try:
            return [self._db.execute(sql.format(url="json_extract(purpose, '$.url')")).fetchall() for sql in queries]
        finally:
            self._db.execute("COMMIT")

    def read(self) -> Books:
        """One moment of the ledger: both tables in one transaction."""
        nodes, holds = self._rows(NODES, HOLDS)
        books = Books(
            {row[0]: NodeRow(*row[1:4]) for row in nodes}, {f"0x{row[0]}": HoldRow(*row[1:]) for row in holds}
        )
        for node_id, parent, _, _, idle in nodes:
            if parent is not None and idle:  # drawn and not used: it is free for all below its lender
                for above in books.path(parent):
                    books.nodes[above] = replace(books.nodes[above], counted=books.nodes[above].counted - idle)
                assert idle > 0, f"{node_id} has used {-idle} that it has not drawn"
        return books

    def signed_again(self) -> Counter[str]:
        """How often each purchase was held anew while nobody knew how a payment for it had ended.

        An answer that claims a settlement, or an end in the books, ends a purchase: whoever asks once more after it buys once more.
        """
        doubtful: defaultdict[str, set[str]] = defaultdict(set)
        again: Counter[str] = Counter()
        place_of: dict[str, str] = {}
        [rows] = self._rows(ENTRIES)
        for event, hold, data in rows:
            facts = json.loads(data)
            if event == "authorize":
                place_of[hold] = facts["request"].removeprefix("GET ")
                again[place_of[hold]] += bool(doubtful[place_of[hold]])
            open_ones = doubtful[place_of[hold]]
            if event in ("authorize", "represent", "reopen") or (event == "note" and facts.get("doubt")):
                open_ones.add(hold)
            elif event in ("capture", "void", "expire", "lapse", "note"):
                open_ones.discard(hold)
        return again

    def close(self) -> None:
        """Close the file."""
        self._db.close()


class ServerWatch(BookWatch):
    """Reads a ledger in PostgreSQL, whose server may be away for a moment."""

    def __init__(self, url: Callable[[], str]) -> None:
        self._url = url

    def _rows(self, *queries: str) -> list[list[tuple]]:
        began = time.monotonic()
        while True:
            try:
                with psycopg.connect(self._url(), options="-c search_path=x402guard") as db:
                    db.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                    return [db.execute(sql.format(url="purpose::json ->> 'url'")).fetchall() for sql in queries]
            except psycopg.OperationalError:
                if time.monotonic() - began > AWAY_S:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        """Nothing is open between two looks."""
