"""What is old in an outbox, where the clocks of this machine and of the ledger's server are wrong, or set right."""

import itertools

import pytest

from tests.support.ledger import START_MS, a_hold, ids
from tests.support.outbox import LAST, Rows
from tests.unit.stores.test_outbox import HOUR_MS, left
from x402guard.stores.outbox import Outbox
from x402guard.stores.outbox_file import ENDING


@pytest.mark.parametrize("server_ahead_h", [-7, 0, 7, 10_000])
def test_what_is_old_is_so_by_this_machines_clock_as_well(place, server_ahead_h):
    here = [START_MS]
    mine, ahead_ms = Outbox(lambda: (here[0], 0)), server_ahead_h * HOUR_MS
    mine.keep_in(place, synced=False)
    mine.note(Rows(a_hold("first")), LAST)
    here[0] += HOUR_MS
    mine.note(Rows(a_hold("second"), now_ms=here[0] + ahead_ms), None)  # by another server
    kept = [each.hold.id for part in mine.parts(min(here[0], here[0] + ahead_ms)) for each in part]
    assert kept == ids("first", "second")
    here[0] += (6 + min(12, max(0, server_ahead_h))) * HOUR_MS
    mine.note(Rows(a_hold("third"), now_ms=here[0] + max(0, ahead_ms)), None)
    assert [each.hold.id for part in mine.parts(here[0]) for each in part] == ids("third")
    mine.close()


@pytest.mark.parametrize("behind_h", [0, 7, 11])
@pytest.mark.parametrize("writes_again", [True, False])
def test_a_clock_that_is_set_right_makes_nothing_old(place, behind_h, writes_again):
    """Also if the process is killed before it writes again."""
    right, ahead = [START_MS], [-behind_h * HOUR_MS]
    mine = Outbox(lambda: (right[0] - behind_h * HOUR_MS, ahead[0] + behind_h * HOUR_MS))
    mine.keep_in(place, synced=False)
    mine.note(Rows(a_hold("early"), now_ms=right[0]), LAST)
    right[0] += 60_000
    ahead[0] = 0
    if writes_again:
        mine.note(Rows(a_hold("late"), now_ms=right[0]), {**LAST, "seq": 4})
    mine._file.close()  # as kill -9 does
    mine._file = None
    kept = [each.hold.id for _, written in left(place, right[0] + 1_000) for each in written]
    assert kept == ids("early", "late")[: 1 + writes_again]


def test_a_clock_that_drifts_by_a_moment_writes_no_file_anew(mine, place):
    ahead = itertools.count()
    mine._here = lambda: (START_MS, next(ahead) % 3)
    files = set()
    for number in range(20):
        mine.note(Rows(a_hold(f"h{number}")), LAST)
        files |= set(place.iterdir())
    assert len([file for file in files if file.suffix == ENDING]) == 1
