"""What a process has held and spent in the last hours, and what it could not write: in its memory, and in a file.

A server can lose what it has committed: a replica without it takes over, or a backup is restored. The process that wrote it
enters it again. If that process has ended, the next one on the same machine takes its file over. It also writes the ends of
answers that the ended one could not write, because the server was away.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from msgspec import UNSET, Struct, UnsetType
from msgspec.json import Decoder, Encoder
from msgspec.structs import asdict, replace
from typing_extensions import override

from x402guard.errors import LedgerUnavailable
from x402guard.kernel.rows import Delivery, Hold, HoldKind, HoldState, Node
from x402guard.ledger.lost import LateEnd, Written
from x402guard.ledger.purchases import presentation_of
from x402guard.ledger.tree import path
from x402guard.stores.outbox_file import ENDING, OutboxFile, alone, is_free, open_file, remove_file
from x402guard.stores.postgres_rows import LoadedRows
from x402guard.stores.rows import UnreadableRecord, hold_record, to_hold

_LOG: Final = logging.getLogger("x402guard")

_MOST_KEPT: Final = 5_000
_SET_MS: Final = 1_000
_MOST_AHEAD_MS: Final = 43_200_000
_KEPT_MS: Final = 21_600_000  # less than the age of what can be archived, which is in the ledger and is no hold
_AT_ONCE: Final = 100
_MOST_LINE: Final = 10_000_000
_AGAIN_S: Final = 60.0
_DAMAGED: Final = (
    "Nothing was paid. The file has what an agent on this machine held and spent last, and is damaged. Move it away only if the "
    "ledger's server has lost nothing and was not away as that agent ended; else enter what it says by hand first."
)

Last = Mapping[str, str | int]
"""An entry of the journal: its node, its number, its hash."""

_Row = tuple[list[str | int | None], dict[str, Any], list[str]]


class _Entry(Struct):
    """What tells one entry of the journal."""

    node_id: str
    seq: int
    hash: str


class _Line(Struct, omit_defaults=True):
    """One line of a file: what has changed.

    Attributes:
        at_ms: the later of this machine's time and that of the ledger, in unix milliseconds.
        lasts: the entries that have to be in the ledger from then on.
        holds: for each hold its row, the facts of its first entry, and the budgets above it.
        gone: the holds that count no more.
        ends: the ends of answers that cannot be written now.
        written: the ends that are written.
    """

    at_ms: int
    lasts: list[_Entry] | UnsetType = UNSET
    holds: list[_Row] = []
    gone: list[str] = []
    ends: list[LateEnd] = []
    written: list[LateEnd] = []


_TEXT: Final = Encoder().encode
_READ: Final = Decoder(_Line).decode


def outbox_folder(ledger: str) -> Path | None:
    """Return where this user keeps the files of a ledger, by its id; None without a home folder."""
    folder = state_folder()
    return None if folder is None else folder / "outbox" / ledger


def state_folder() -> Path | None:
    """Return where this user keeps what belongs to no ledger's own file; None without a home folder.

    See the XDG Base Directory Specification, ``XDG_STATE_HOME``.
    """
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        state = named if named.is_absolute() else Path.home() / ".local/state"
    except RuntimeError:
        return None
    return state / "x402guard" if state.is_absolute() else None


class Kept:
    """Holds as they were written last, of the last six hours, five thousand at most; and the newest durable entries.

    Attributes:
        lasts: the newest entry of each process of which something is kept; which of them is the newest is unknown.
        ends: the ends of answers that are not written, in their order.
    """

    def __init__(self) -> None:
        self.lasts: tuple[Last, ...] = ()
        self.ends: list[LateEnd] = []
        self._holds: dict[str, tuple[int, Written]] = {}

    @property
    def last(self) -> Last | None:
        """One of these entries, the newest one once this process has written; None without one."""
        return self.lasts[-1] if self.lasts else None

    def put(self, at_ms: int, written: Written) -> None:
        """Keep a hold as it is now."""
        self._holds.pop(written.hold.id, None)
        self._holds[written.hold.id] = at_ms, written

    def drop(self, hold_ids: Iterable[str]) -> None:
        """Forget holds that count no more."""
        for hold_id in hold_ids:
            self._holds.pop(hold_id, None)

    def known(self, hold_id: str) -> Written | None:
        """Return a hold as it was kept; None if it is not."""
        return self._holds.get(hold_id, (0, None))[1]

    def forget_old(self, now_ms: int) -> None:
        """Forget holds older than six hours at a time in unix milliseconds, and the oldest of too many."""
        while self._holds:
            oldest = next(iter(self._holds))
            if len(self._holds) <= _MOST_KEPT and self._holds[oldest][0] > now_ms - _KEPT_MS:
                break
            del self._holds[oldest]

    def read(self, line: _Line) -> None:
        """Take over what a line of a file says. Raises ``UnreadableRecord``."""
        for record, facts, above in line.holds:
            self.put(line.at_ms, Written(to_hold(record), facts, tuple(above)))
        self.drop(line.gone)
        self.ends += line.ends
        self.ends = [end for end in self.ends if end not in line.written] if line.written else self.ends
        if line.lasts is not UNSET:
            self.lasts = tuple(map(asdict, line.lasts))

    def add(self, other: Kept) -> None:
        """Take over what another process has kept; of a hold in both, what was written later."""
        for hold_id, kept in other._holds.items():
            if hold_id not in self._holds or self._holds[hold_id][0] <= kept[0]:
                self._holds[hold_id] = kept
        self._holds = dict(sorted(self._holds.items(), key=lambda item: item[1][0]))
        self.lasts += tuple(last for last in other.lasts if last not in self.lasts)
        self.ends += [end for end in other.ends if end not in self.ends]

    def lines(self) -> Iterator[_Line]:
        """Yield lines that say all of it."""
        yield _Line(0, lasts=_entries(self.lasts))
        for end in self.ends:
            yield _Line(0, ends=[end])
        for at_ms, written in self._holds.values():
            yield _Line(at_ms, holds=[_as_row(written)])

    def parts(self, now_ms: int) -> list[list[Written]]:
        """Return the holds as of a time (unix milliseconds), in parts for a transaction each."""
        self.forget_old(now_ms)
        kept = [written for _, written in self._holds.values()]
        return [kept[start : start + _AT_ONCE] for start in range(0, len(kept), _AT_ONCE)]


class Outbox(Kept):
    """What this process has kept: in memory alone until it is told where its file lies.

    Args:
        here: returns this machine's time in unix milliseconds, and how far its clock has been set ahead of that; by default
            the time is that of the ledger. What is old is so by both: a server that takes over may be hours ahead.
    """

    def __init__(self, here: Callable[[], tuple[int, int]] | None = None) -> None:
        super().__init__()
        self._here, self._ahead_ms = here, 0
        self._folder: Path | None = None
        self._is_synced = False
        self._file: OutboxFile | None = None
        self._is_only = self._has_written = False
        self._again_s = 0.0  # after an error: when it is tried again
        self._is_behind = False  # the file lacks something: an error, or Ctrl-C
        self._lock = threading.RLock()  # ends are kept while another thread writes
        self._pid = os.getpid()

    def keep_in(self, folder: Path, *, synced: bool) -> None:
        """Keep a file in *folder* from the first write on. If *synced*, a power cut does not take what is durable."""
        self._folder, self._is_synced = folder, synced

    def note(self, rows: LoadedRows, last: Last | None) -> None:
        """Keep what the changes of one transaction have written, with its *last* entry if that has to stay."""
        first = {entry.hold_id: entry for entry in rows.entries if entry.event == "authorize"}
        holds, gone = list[Written](), list[str]()
        now_ms = rows.now_ms if self._here is None else self._now_ms(self._here)
        # This machine's clock may be set right before the next line is written; a server's may be wrong by years.
        at_ms = max(now_ms, min(rows.now_ms, now_ms + _MOST_AHEAD_MS))
        for hold in rows.written_holds():
            before = self.known(hold.id)
            if hold.kind is HoldKind.TOKENS or hold.state in (HoldState.VOIDED, HoldState.EXPIRED):
                if before is not None:
                    gone.append(hold.id)
                continue
            entry = first.get(hold.id)
            of_another = {"kind": hold.kind, "amount": hold.amount, "deadline": hold.deadline_unix}
            facts = entry.facts() if entry is not None else of_another if before is None else before.facts
            holds.append(Written(hold, facts, _above(rows.nodes, hold, before)))
        with self._lock:
            for each in holds:
                self.put(at_ms, each)
            self.drop(gone)
            self.forget_old(min(now_ms, rows.now_ms))
            if last is not None:
                taken_over = self.lasts[:-1] if self._has_written else self.lasts
                self.lasts = (*taken_over, last) if len(self.lasts) > 1 else (last,)
                self._has_written = True
            # A line for each hold: a seller's terms are long, and one transaction may have a hundred of them.
            lines = [_Line(at_ms, holds=[_as_row(each)]) for each in holds]
            if gone or last is not None:
                lines.append(_Line(at_ms, UNSET if last is None else _entries(self.lasts), gone=gone))
            self._say(*lines, sync=last is not None and self._is_synced)

    def _now_ms(self, here: Callable[[], tuple[int, int]]) -> int:
        """Return the time as this machine's clock shows it. Where it was set, what was kept before is as old as it was."""
        now_ms, ahead_ms = here()
        with self._lock:
            if abs(ahead_ms - self._ahead_ms) > _SET_MS:  # two clocks are never read at one moment
                set_by_ms, self._ahead_ms = ahead_ms - self._ahead_ms, ahead_ms
                self._holds = {hold_id: (at_ms + set_by_ms, kept) for hold_id, (at_ms, kept) in self._holds.items()}
                self._is_behind = True  # the file is written anew
        return now_ms + ahead_ms

    @override
    def parts(self, now_ms: int) -> list[list[Written]]:
        with self._lock:
            return super().parts(now_ms)

    def keep(self, end: LateEnd) -> bool:
        """Keep the end of an answer that cannot be written now. Returns True if it is on the disk."""
        if self._pid != os.getpid():
            return False  # a fork: the file is the parent's
        with self._lock:
            if is_new := end not in self.ends:
                self.ends.append(end)
            if is_new or self._is_behind:
                self._say(_Line(0, ends=[end]), sync=True)  # the ledger has nothing of it
            return self._folder is not None and not self._is_behind

    def written(self, end: LateEnd) -> None:
        """Forget an end, if it is kept. What it says of a hold is in the ledger, also if another try has written it."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if end not in self.ends:
                return
            self.ends = [each for each in self.ends if each != end]
            at_ms, kept = self._holds.get(end.hold_id, (0, None))
            is_meant = kept is not None and presentation_of(kept.hold) == (end.hold_id, end.presented)
            if kept is not None and is_meant and end.delivery is not None and kept.hold.delivery is Delivery.OPEN:
                kept = replace(kept, hold=replace(kept.hold, delivery=end.delivery))
                self._holds[end.hold_id] = at_ms, kept
                self._say(_Line(at_ms, holds=[_as_row(kept)]))
            self._say(_Line(0, written=[end]))

    def look_for(self, lasts: Iterable[Last]) -> None:
        """Look for other entries from now on: what the ledger had lost is entered again."""
        found = tuple(lasts)
        with self._lock:
            self.lasts = found
            self._say(_Line(0, _entries(self.lasts)), sync=self._is_synced)

    def all_there(self) -> None:
        """Note that the ledger has all entries. Those of ended processes are older than one that this process has written."""
        if self._has_written and len(self.lasts) > 1:
            self.look_for(self.lasts[-1:])

    def take_over(self, ended: Sequence[Left]) -> None:
        """Write what was added of *ended* processes to the file of this one, and remove theirs."""
        try:
            self._make()
            self._is_only = True
        except OSError as error:
            self._log(error)
        for left in ended:
            if self._is_only or left.is_entered:  # else it is nowhere but there
                left.remove()

    def _say(self, *lines: _Line, sync: bool = False) -> None:
        """Write lines. After an error, write all of it anew, once a minute until that succeeds."""
        if self._folder is None or not lines:
            return
        was_behind, self._is_behind = self._is_behind, True
        if self._again_s and time.monotonic() < self._again_s:
            return
        try:
            if self._file is None or was_behind or self._file.is_long or self._file.is_gone:
                self._make()
            else:
                self._file.append(b"\n".join(map(_TEXT, lines)), sync=sync)
            self._again_s, self._is_behind = 0.0, False
        except OSError as error:
            self._again_s = time.monotonic() + _AGAIN_S
            self._log(error)

    def _make(self) -> None:
        """Write all of it to a new file, and remove the one before. Raises ``OSError``; then that one stays."""
        if self._folder is None:
            return
        made = OutboxFile(self._folder, map(_TEXT, self.lines()))
        before, self._file = self._file, made
        if before is not None:
            before.close(remove=True)

    def _log(self, error: OSError) -> None:
        _LOG.error(
            "%s: what this process writes cannot be kept beside the ledger: %s; if the ledger's server loses it, or has not "
            "taken it, after this process has ended, it is not entered again",
            self._folder,
            error.strerror,
        )

    def close(self) -> None:
        """Close the file; the next process takes it over. Idempotent."""
        with self._lock:
            if self._is_behind:
                self._again_s = 0.0
                self._say(_Line(0))
            file, self._file, self._folder = self._file, None, None
        if file is not None:
            file.close()

    def discard(self) -> None:
        """Close the file, and remove it if those of the ended processes are still there: the ledger cannot be opened."""
        with self._lock:
            file, self._file, self._folder = self._file, None, None
        if file is not None:
            file.close(remove=not self._is_only)


class Left(Kept):
    """What a process that has ended kept in its file, as of a time in unix milliseconds.

    Attributes:
        is_entered: all of it that the ledger had lost is there again.
    """

    def __init__(self, file: Path, lines: BinaryIO, now_ms: int) -> None:
        super().__init__()
        self._file, self.is_entered = file, False
        for number, line in enumerate(iter(lambda: lines.readline(_MOST_LINE), b""), 1):
            try:
                if line != b"\n":
                    self.read(_READ(line))
            except (ValueError, RecursionError, UnreadableRecord) as error:
                if line.endswith(b"\n") or (number == 1 and not line.strip(b"\0")):
                    raise LedgerUnavailable(
                        f"{file}: line {number} cannot be read: {error!s:.200}", advice=_DAMAGED
                    ) from error
                # The process has ended while it wrote this one.
                _LOG.error("%s: line %d cannot be read and is left out: %.200s", file, number, error)
        self.forget_old(now_ms)

    def remove(self) -> None:
        """Remove the file."""
        remove_file(self._file)


@contextmanager
def left_behind(folder: Path, now_ms: int) -> Iterator[Sequence[Left]]:
    """Yield what the ended processes of this machine have kept of a ledger. Others that ask wait until the block ends.

    Raises ``LedgerUnavailable`` for a file that cannot be read, and if another process takes longer than ten seconds.
    """
    found = list[Left]()
    with ExitStack() as opened:
        file = folder
        try:
            if folder.is_dir():
                opened.enter_context(alone(folder))
                # Not by ``glob``, which finds nothing in a folder that it cannot read.
                for file in sorted(file for file in folder.iterdir() if file.suffix == ENDING):
                    lines = opened.enter_context(open_file(file)) if file.is_file() else None
                    if lines is not None and is_free(file, lines.fileno()):
                        found.append(Left(file, lines, now_ms))
        except OSError as error:
            raise LedgerUnavailable(
                f"{file} has what an agent on this machine wrote last, and cannot be read: {error.strerror}",
                advice="Nothing was paid. Let this user read it; remove it only if the ledger's server has lost nothing.",
            ) from error
        yield found


def _above(nodes: Mapping[str, Node], hold: Hold, before: Written | None) -> tuple[str, ...]:
    """Return the budgets that a hold is paid out of, from its own up, as far as they are known."""
    if hold.node_id in nodes:
        return tuple(node.id for node in path(nodes, hold.node_id))
    return (hold.node_id,) if before is None else before.path


def _entries(lasts: Iterable[Last]) -> list[_Entry]:
    return [_Entry(**last) for last in lasts]  # type: ignore[arg-type]  # with a number that is one


def _as_row(written: Written) -> _Row:
    return list(hold_record(written.hold)), dict(written.facts), list(written.path)
