"""What a process keeps for a server that loses commits, and what the next process on its machine makes of its file."""

import errno
import gc
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.ledger import START_MS, a_hold, an_id, an_intent, ids, usd
from tests.support.outbox import LAST, WHOLE, Rows
from x402guard.errors import LedgerUnavailable
from x402guard.frozen import replace
from x402guard.kernel.rows import (
    WALLET,
    HoldKind,
    HoldState,
    Nanos,
    Purpose,
)
from x402guard.stores import outbox, outbox_file
from x402guard.stores.outbox import Kept, Outbox, left_behind, outbox_folder

HOUR_MS = 3_600_000


def left(place, now_ms=START_MS):
    """[(the last entry, the holds)] that ended processes have left; as many as the files that are free."""
    with left_behind(place, now_ms) as ended:
        return [(each.last, [w for part in each.parts(now_ms) for w in part]) for each in ended]


def next_descriptor():
    """The lowest number of a file that is not open."""
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def test_a_hold_comes_back_as_it_was_written(mine, place):
    facts = {"kind": "payment", "words": ["é", 1], "amount": 2**60}
    tool = replace(a_hold("tool", kind=HoldKind.TOOL), purpose=Purpose(tool="search", host="x"))
    mine.note(Rows(WHOLE, tool, facts=facts), LAST)
    mine.close()
    [(last, written)] = left(place)
    assert last == LAST
    assert [each.hold for each in written] == [WHOLE, tool]
    assert [each.path for each in written] == [("s", WALLET)] * 2
    assert [each.facts for each in written] == [facts] * 2


def test_the_latest_state_of_each_counts_and_what_counts_no_more_is_gone(mine, place):
    held = a_hold("h1", kind=HoldKind.TOOL)
    mine.note(Rows(held, a_hold("h2"), a_hold("h3"), a_hold("h4", kind=HoldKind.TOKENS), facts={"a": 1}), LAST)
    captured = replace(held, state=HoldState.CAPTURED, captured=held.amount)
    mine.note(Rows(captured, replace(a_hold("h2"), state=HoldState.VOIDED)), None)
    mine.note(Rows(replace(a_hold("h3"), state=HoldState.EXPIRED)), {**LAST, "seq": 4})
    mine.close()
    [(last, [one])] = left(place)
    assert (last["seq"], one.hold, one.facts) == (4, captured, {"a": 1})


def test_a_living_process_keeps_its_file_and_is_asked_nothing(mine, place):
    mine.note(Rows(WHOLE), LAST)
    assert left(place) == []
    mine.close()
    assert len(left(place)) == 1


def test_a_file_is_made_with_the_first_write_and_not_before(mine, place):
    assert not place.exists()
    mine.note(Rows(), None)
    assert not place.exists()
    mine.note(Rows(), LAST)
    assert len(list(place.iterdir())) == 1


def test_without_a_folder_everything_is_in_memory():
    alone = Outbox()
    alone.note(Rows(WHOLE), LAST)
    alone.close()
    assert (len(alone.parts(START_MS)), alone.last) == (1, LAST)


@pytest.mark.parametrize(
    "torn",
    [b"", b"{", b"\0" * 40, b'{"at_ms":1}', b'{"at_ms": "x"}', b"[" * 5_000, b'\n{"at_ms":1,"holds":[[[1],{},[]]]}'],
)
def test_what_a_process_was_writing_as_it_ended_is_left_out(mine, place, torn):
    mine.note(Rows(WHOLE), LAST)
    mine.close()
    [file] = place.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole + torn)
    [(last, [one])] = left(place)
    assert (last, one.hold) == (LAST, WHOLE)


@pytest.mark.parametrize(
    "line",
    [
        b'{"at_ms": "x"}',
        b'{"at_ms":1,"holds":[[[1],{},[]]]}',
        b'{"at_ms":1,"lasts":[{}]}',
        b'{"at_ms":1,"lasts":[{"node_id":"s","seq":"x","hash":""}]}',
        b"no json",
        b"\0" * 40,
    ],
)
@pytest.mark.parametrize("where", ["first", "in the middle", "last"])
def test_a_damaged_line_is_no_torn_one_and_the_file_stays(mine, place, line, where):
    mine.note(Rows(WHOLE), LAST)
    mine.note(Rows(a_hold("h2", kind=HoldKind.TOOL)), {**LAST, "seq": 4})
    mine.close()
    [file] = place.iterdir()
    lines = [each for each in file.read_bytes().splitlines() if each]
    lines.insert({"first": 0, "in the middle": 1, "last": len(lines)}[where], line)
    file.write_bytes(b"\n".join(lines) + b"\n")
    for _ in range(2):
        with pytest.raises(LedgerUnavailable, match=r"\.jsonl: line \d cannot be read: ") as caught:
            left(place)
        assert "is damaged" in caught.value.advice
    assert file.exists()


def test_a_file_of_nothing_but_zeros_is_damaged(mine, place):
    mine.note(Rows(WHOLE), LAST)
    mine.close()
    [file] = place.iterdir()
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(LedgerUnavailable, match="line 1 cannot be read"):
        left(place)


def test_every_end_of_a_file_can_be_read(mine, place):
    """A process may end at each byte that it writes."""
    mine.note(Rows(WHOLE), LAST)
    mine.note(Rows(a_hold("h2", kind=HoldKind.TOOL)), {**LAST, "seq": 4})
    mine.close()
    [file] = place.iterdir()
    whole = file.read_bytes()
    counts = []
    for length in range(1, len(whole) + 1):
        file.write_bytes(whole[:length])
        [(_, written)] = left(place)
        counts.append(len(written))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 2)


def test_a_line_that_ctrl_c_has_cut_takes_no_other_with_it(mine, place, monkeypatch):
    mine.note(Rows(WHOLE), LAST)
    writes = os.write

    def cut(descriptor, data):
        writes(descriptor, data[:-3])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(outbox_file.os, "write", cut)
        with pytest.raises(KeyboardInterrupt):
            mine.note(Rows(a_hold("h2")), None)
    mine.note(Rows(a_hold("h3")), {**LAST, "seq": 5})
    mine.close()
    [(last, written)] = left(place)
    assert (last["seq"], [each.hold.id for each in written]) == (5, ids("whole", "h2", "h3")), (
        "all of it is written anew"
    )


def test_after_six_hours_no_hold_is_left_to_enter_but_the_entry_is_looked_for(mine, place):
    mine.note(Rows(a_hold("early")), LAST)
    mine.note(Rows(a_hold("late"), now_ms=START_MS + HOUR_MS), None)
    mine.close()
    assert len(left(place, START_MS + 6 * HOUR_MS - 1)[0][1]) == 2
    [(last, [one])] = left(place, START_MS + 6 * HOUR_MS)
    assert (last, one.hold.id) == (LAST, an_id("late"))
    assert left(place, START_MS + 700 * HOUR_MS) == [(LAST, [])]


def test_a_living_process_looks_for_its_last_entry_however_old_it_is(mine):
    mine.note(Rows(WHOLE), LAST)
    assert mine.parts(START_MS + 100 * HOUR_MS) == []
    assert mine.last == LAST


def test_the_file_of_an_ended_process_is_taken_over(mine, place):
    mine.note(Rows(a_hold("theirs")), LAST)
    mine.close()
    following = Outbox()
    following.keep_in(place, synced=False)
    following.note(Rows(a_hold("mine"), now_ms=START_MS - 5), {**LAST, "seq": 2})
    with left_behind(place, START_MS) as ended:
        for each in ended:
            following.add(each)
        following.take_over(ended)
    following.close()
    with left_behind(place, START_MS) as [one]:
        assert [each["seq"] for each in one.lasts] == [2, 3], "which of the two is the newer one is unknown"
    [(_, written)] = left(place)
    assert [each.hold.id for each in written] == ids("mine", "theirs")


def test_what_cannot_be_copied_stays_where_it_is(mine, place, monkeypatch, caplog):
    mine.note(Rows(WHOLE), LAST)
    mine.close()
    following = Outbox()
    following.keep_in(place, synced=False)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, left_behind(place, START_MS) as ended:
        patch.setattr(outbox_file.tempfile, "mkstemp", full)
        for each in ended:
            following.add(each)
        following.take_over(ended)
    assert "No space left on device" in caplog.text
    following.close()
    [(last, [one])] = left(place)
    assert (last, one.hold) == (LAST, WHOLE)


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_ended_processes_each_last_entry_is_looked_for_until_all_are_there_with_one_of_this(mine, place, order):
    """The later one may have begun earlier; a clock may have gone back."""
    for at_ms, amount in ((START_MS + 5, "$0.50"), (START_MS, "$0.10")):
        ended = Outbox()
        ended.keep_in(place, synced=False)
        ended.note(Rows(a_hold("both", amount), now_ms=at_ms), {**LAST, "seq": at_ms})
        ended.close()
    with left_behind(place, START_MS) as both:
        for each in both[::order]:
            mine.add(each)
        mine.take_over(both)
    assert {each["seq"] for each in mine.lasts} == {START_MS, START_MS + 5}
    [[kept]] = mine.parts(START_MS)
    assert kept.hold.amount == usd("$0.50")
    mine.all_there()
    assert len(mine.lasts) == 2, "none of them is known to be newer than the other"
    for seq in (1, 2):
        mine.note(Rows(), {**LAST, "seq": seq})
        assert [each["seq"] for each in mine.lasts[2:]] == [seq]
    mine.all_there()
    mine.close()
    with left_behind(place, START_MS) as [one]:
        assert [each["seq"] for each in one.lasts] == [2]


def test_the_holds_of_one_change_are_lines_of_their_own(mine, place):
    """A seller's terms are long, and a sweep ends a hundred payments at once: what cannot be read is refused."""
    long = an_intent()
    long = replace(long, accepted_json="x" * 120_000)
    holds = [a_hold(f"h{number}", intent=long) for number in range(100)]
    mine.note(Rows(), LAST)
    mine.note(Rows(*holds, facts={"kind": "payment"}), LAST)
    mine.close()
    [(last, written)] = left(place)
    assert (last, [each.hold for each in written]) == (LAST, holds)


def test_what_is_entered_again_is_kept_for_the_next_loss(mine, place):
    mine.note(Rows(a_hold("h1"), a_hold("h2")), LAST)
    mine.look_for([{**LAST, "seq": 9}])
    mine.close()
    [(last, written)] = left(place)
    assert (last["seq"], len(written)) == (9, 2)


def test_a_file_that_another_program_has_removed_is_made_anew(mine, place):
    mine.note(Rows(a_hold("h1")), LAST)
    for file in place.iterdir():
        file.unlink()
    mine.note(Rows(a_hold("h2")), None)
    mine.close()
    [(last, written)] = left(place)
    assert (last, [each.hold.id for each in written]) == (LAST, ids("h1", "h2"))


@pytest.mark.parametrize("steps", range(1, 40))
def test_ctrl_c_at_any_step_of_writing_it_anew_takes_nothing(mine, place, monkeypatch, steps):
    """At each call of the system, from the first one on."""
    mine.note(Rows(a_hold("h1")), LAST)
    monkeypatch.setattr(outbox_file, "_LONG", -100_000_000)  # each write is one
    left_to_go = [steps]

    def may_break(call):
        def called(*given, **more):
            left_to_go[0] -= 1
            if left_to_go[0] == 0:
                raise KeyboardInterrupt
            return call(*given, **more)

        return called

    with monkeypatch.context() as patch:
        for module, name in (
            (outbox_file.os, "write"), (outbox_file.os, "fsync"), (outbox_file.os, "open"), (outbox_file.os, "close"),
            (outbox_file.tempfile, "mkstemp"), (outbox_file.fcntl, "flock"), (Path, "unlink"),
        ):  # fmt: skip
            patch.setattr(module, name, may_break(getattr(module, name)))
        with suppress(KeyboardInterrupt):
            mine.note(Rows(a_hold("h2")), None)
    mine.note(Rows(a_hold("h3")), {**LAST, "seq": 5})
    mine.close()
    gc.collect()
    following = Kept()
    with left_behind(place, START_MS) as ended:
        for each in ended:
            following.add(each)
    assert {w.hold.id for part in following.parts(START_MS) for w in part} >= set(ids("h1", "h3"))
    assert 5 in [each["seq"] for each in following.lasts]


def test_a_long_file_is_written_anew_with_what_still_counts(mine, place, monkeypatch):
    monkeypatch.setattr(outbox_file, "_LONG", 10_000)
    mine.note(Rows(WHOLE), LAST)
    opened = next_descriptor()
    for number in range(200):
        mine.note(Rows(replace(WHOLE, captured=Nanos(number))), {**LAST, "seq": number})
    assert next_descriptor() <= opened + 1, "those before it are closed"
    [file] = place.iterdir()
    assert file.stat().st_size < 30_000
    mine.close()
    [(last, [one])] = left(place)
    assert (last["seq"], one.hold.captured) == (199, 199)


def test_what_is_no_such_file_stays_as_it_is(mine, place):
    """Also one that another process is making at the moment: it is empty."""
    mine.note(Rows(WHOLE), LAST)
    mine.close()
    (place / "made.jsonl").touch()
    (place / "note.txt").write_text("mine")
    (place / "folder.jsonl").mkdir()
    os.mkfifo(place / "pipe.jsonl")
    before = {file.name for file in place.iterdir()}
    assert len(left(place)) == 1
    assert {file.name for file in place.iterdir()} == before | {"lock"}


def test_a_file_that_cannot_be_opened_is_no_empty_one(mine, place, monkeypatch):
    mine.note(Rows(WHOLE), LAST)
    mine.close()

    def refuses(*_):
        raise PermissionError(13, "Permission denied")

    for calls in ([(Path, "open")], [(os, "listdir"), (os, "scandir")]):  # a folder that may be entered and not read
        with monkeypatch.context() as patch:
            for place_of, call in calls:
                patch.setattr(place_of, call, refuses)
            with pytest.raises(LedgerUnavailable, match="cannot be read: Permission denied") as caught:
                left(place)
        assert "remove it only if" in caught.value.advice


@pytest.mark.parametrize("call", ["write", "fsync", "mkstemp"])
def test_a_disk_that_is_full_holds_up_nothing_and_is_tried_again_after_a_minute(mine, place, monkeypatch, caplog, call):
    now_s = [1_000.0]
    monkeypatch.setattr(outbox, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=None))
    mine.note(Rows(a_hold("h1")), LAST)
    monkeypatch.setattr(outbox_file, "_LONG", -100_000_000)  # each write is a new file
    tries = []

    def full(*_, **__):
        tries.append(call)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(outbox_file.tempfile if call == "mkstemp" else outbox_file.os, call, full)
        for number in range(60):
            mine.note(Rows(a_hold(f"h{number % 3}")), None)
            now_s[0] += 0.99
        assert len(tries) == 1
        assert len(list(place.iterdir())) == 1
    assert "No space left on device" in caplog.text
    now_s[0] += 1.0
    mine.note(Rows(a_hold("h4")), {**LAST, "seq": 9})
    mine.close()
    [(last, written)] = left(place)
    assert (last["seq"], [each.hold.id for each in written]) == (9, ids("h0", "h1", "h2", "h4"))


def test_a_fork_does_not_keep_the_file_of_a_parent_that_has_ended(mine, place):
    mine.note(Rows(WHOLE), LAST)
    to_parent, to_child = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        os.write(to_parent[1], b"x")
        os.read(to_child[0], 1)
        os._exit(0)
    os.read(to_parent[0], 1)
    assert left(place) == []
    mine.close()
    try:
        assert len(left(place)) == 1
    finally:
        os.write(to_child[1], b"x")
        os.waitpid(pid, 0)
        for end in (*to_parent, *to_child):
            os.close(end)


def test_two_that_open_at_once_look_one_after_the_other(mine, place, monkeypatch):
    """Else the second would pay before what was lost is entered."""
    mine.note(Rows(WHOLE), LAST)
    mine.close()
    monkeypatch.setattr(outbox_file, "_WAIT_S", 0.1)
    with left_behind(place, START_MS) as first:
        assert len(first) == 1
        with pytest.raises(LedgerUnavailable, match="another process on this machine") as caught:
            left(place)
        assert str(place) in caught.value.advice
    assert len(left(place)) == 1


def test_a_disk_that_may_only_be_read_is_read(mine, place, monkeypatch):
    mine.note(Rows(WHOLE), LAST)
    mine.close()
    opens, os_open = Path.open, os.open

    def read_only(opener):
        def called(path, mode, *more, **named):
            if mode not in ("rb", os.O_RDONLY):
                raise OSError(errno.EROFS, "Read-only file system")
            return opener(path, mode, *more, **named)

        return called

    monkeypatch.setattr(Path, "open", read_only(opens))
    monkeypatch.setattr(outbox_file.os, "open", read_only(os_open))
    assert len(left(place)) == 1


def test_a_file_that_another_has_just_taken_over_is_none(mine, place, monkeypatch):
    """It is opened, then locked; in between another process may have removed it."""
    mine.note(Rows(WHOLE), LAST)
    mine.close()
    [file] = place.iterdir()
    locks = outbox_file.fcntl.flock

    def removed_before(*given):
        file.unlink(missing_ok=True)
        return locks(*given)

    monkeypatch.setattr(outbox_file.fcntl, "flock", removed_before)
    assert left(place) == []


def test_the_folder_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert outbox_folder("id") == tmp_path / "x402guard" / "outbox" / "id"
    monkeypatch.setenv("HOME", "/home/me")
    for relative in ("", "not/absolute"):
        monkeypatch.setenv("XDG_STATE_HOME", relative)
        assert outbox_folder("id") == Path("/home/me/.local/state/x402guard/outbox/id")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("HOME", "not/absolute")
    assert outbox_folder("id") is None
    monkeypatch.setattr(Path, "home", homeless)
    assert outbox_folder("id") is None
