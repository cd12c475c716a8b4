"""The ends of answers that a process cannot write lie in its file until they are written, by it or by the next one."""

import threading
from contextlib import suppress

import pytest

from tests.support.ledger import START_MS, a_hold, an_id, usd
from tests.support.outbox import LAST, WHOLE, Rows
from x402guard.kernel.rows import Claim, Delivery, Evidence, Nanos
from x402guard.ledger.events import Capture
from x402guard.ledger.lost import LateEnd
from x402guard.stores import outbox_file
from x402guard.stores.outbox import Outbox, left_behind

HOUR_MS = 3_600_000


def ends_left(place):
    with left_behind(place, START_MS) as ended:
        return [each.ends for each in ended]


CLAIMED = LateEnd("paid", claim=Claim(usd("$0.10"), "0xab"), believe=True, marks=(("receipt", "n/0xab"),))
HANDED_OVER = LateEnd("paid", presented=1, delivery=Delivery.DONE)
BILLED = LateEnd(
    "call", capture=Capture(Nanos(10**30), Evidence.PROVIDER_USAGE, usage={"input_tokens": 10**30}, note="é")
)
DOUBTED = LateEnd("other", claim=Claim(usd("$0.10"), "x"), doubt="no receipt", delivery=Delivery.LOST)


def test_ends_come_back_as_they_were_kept_in_their_order_until_they_are_written(mine, place, monkeypatch):
    for end in (CLAIMED, BILLED, HANDED_OVER, DOUBTED, CLAIMED):
        mine.keep(end)
    mine.note(Rows(WHOLE), LAST)
    [file] = place.iterdir()
    assert ends_left(place) == []
    copy = place / "copy.jsonl"
    copy.write_bytes(file.read_bytes())
    assert ends_left(place) == [[CLAIMED, BILLED, HANDED_OVER, DOUBTED]]
    copy.unlink()
    mine.written(BILLED)
    mine.written(LateEnd("never kept"))
    monkeypatch.setattr(outbox_file, "_LONG", -100_000_000)
    mine.written(DOUBTED)  # in a new file
    mine.forget_old(START_MS + 100 * HOUR_MS)
    mine.close()
    mine.keep(BILLED)  # a closed ledger keeps nothing
    assert ends_left(place) == [[CLAIMED, HANDED_OVER]]


def test_an_end_is_on_the_disk_before_its_caller_goes_on(mine, place, monkeypatch):
    synced = []
    mine.note(Rows(WHOLE), LAST)
    monkeypatch.setattr(outbox_file.os, "fsync", synced.append)
    mine.note(Rows(WHOLE), LAST)
    assert synced == []
    mine.keep(BILLED)
    assert len(synced) == 1


def test_the_ends_of_an_ended_process_are_taken_over_once(mine, place):
    mine.keep(BILLED)
    mine.close()
    following = Outbox()
    following.keep_in(place, synced=False)
    with left_behind(place, START_MS) as ended:
        for each in (*ended, *ended):
            following.add(each)
        assert following.ends == [BILLED]
        following.take_over(ended)
    following.close()
    assert ends_left(place) == [[BILLED]]


def test_ends_are_kept_while_another_thread_writes(mine, place):
    def keeps():
        for number in range(200):
            mine.keep(LateEnd(f"end {number}"))

    keeping = threading.Thread(target=keeps)
    keeping.start()
    for number in range(300):
        mine.note(Rows(a_hold(f"h{number}", now_ms=START_MS)), {**LAST, "seq": number})
    keeping.join()
    mine.close()
    with left_behind(place, START_MS) as [one]:
        assert [end.hold_id for end in one.ends] == [f"end {number}" for number in range(200)]
        assert (one.last["seq"], sum(map(len, one.parts(START_MS)))) == (299, 300)


def test_an_end_that_a_full_disk_did_not_take_is_written_by_the_next_attempt_or_the_close(
    mine, place, monkeypatch, caplog
):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    mine.note(Rows(WHOLE), LAST)
    with monkeypatch.context() as patch:
        patch.setattr(outbox_file.os, "write", full)
        assert mine.keep(BILLED) is False
    assert mine.keep(BILLED) is False, "tried again a minute later, so that a slow disk holds up nothing"
    assert "has not taken it, after this process has ended" in caplog.text
    mine.close()
    assert ends_left(place) == [[BILLED]]


def test_an_end_that_ctrl_c_cut_is_written_by_the_next_attempt(mine, place, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    mine.note(Rows(WHOLE), LAST)
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(outbox_file.os, "write", interrupted)
        mine.keep(BILLED)
    assert mine.keep(BILLED) is True
    mine._lock.acquire()  # killed: nothing more is written
    [file] = place.iterdir()
    (place / "copy.jsonl").write_bytes(file.read_bytes())
    assert ends_left(place) == [[BILLED]]
    mine._lock.release()


def test_forty_thousand_ends_can_be_read(mine, place):
    mine.ends = [LateEnd(f"{number:0300}") for number in range(40_000)]
    mine.keep(BILLED)
    mine.close()
    with left_behind(place, START_MS) as [one]:
        assert len(one.ends) == 40_001


def test_without_a_home_folder_an_end_is_in_memory_alone():
    assert Outbox().keep(BILLED) is False


def kept_delivery(place, copy):
    copy.mkdir()
    [file] = place.iterdir()
    (copy / file.name).write_bytes(file.read_bytes())
    with left_behind(copy, START_MS) as ended:
        [part] = [part for each in ended for part in each.parts(START_MS)]
        return [each.hold.delivery for each in part if each.hold.id == an_id("paid")]


@pytest.mark.parametrize("presented", [0, 1])
def test_an_end_that_an_earlier_try_has_written_is_kept_with_its_hold(mine, place, tmp_path, presented):
    """The commit was made and its answer lost: the next try changes nothing, so no row says what was handed over."""
    paid = a_hold("paid", delivery=Delivery.OPEN, presented=1)
    mine.note(Rows(WHOLE, paid), LAST)
    end = LateEnd(paid.id, presented=presented, delivery=Delivery.DONE)
    mine.keep(end)
    mine.written(end)
    after = Delivery.DONE if presented == 1 else Delivery.OPEN  # of another answer to the same payment
    assert mine.known(paid.id).hold.delivery is after
    assert kept_delivery(place, tmp_path / "copy") == [after]
