"""On a ledger of several machines, a process shows that it lives; a silent one has no open session, and loses no hold."""

import contextvars
import gc
import json
import time
import weakref

import psycopg
import pytest

from tests.support.ledger import a_hold
from tests.support.merchant import make_guard
from x402guard import ConfigError, LedgerUnavailable, Owner
from x402guard.flow import heartbeat
from x402guard.flow.surroundings import Surroundings, use_surroundings
from x402guard.ledger.purchases import in_doubt, instance_mark, silent_instances
from x402guard.ledger.view import LedgerView
from x402guard.stores import open_store

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.long]


class Elsewhere(Surroundings):
    """Another machine."""

    def machine(self):
        return "elsewhere/1/1"


@pytest.fixture
def elsewhere(url):
    """A guard with an open session on another machine, which ends without a word after the test."""

    def opens():
        use_surroundings(Elsewhere())
        guard = make_guard(url, budget="$5.00")
        session = guard.session("far", budget="$1.00", id="run-1")
        session.__enter__()
        session.charge("search", "$0.10")
        return guard

    guard = contextvars.Context().run(opens)
    yield guard
    guard._heartbeats[0].close()
    guard.shell.store.close()


def row(url, instance):
    with psycopg.connect(url) as raw:
        found = raw.execute("SELECT value FROM x402guard.marks WHERE kind = 'instance' AND key = %s", (instance,))
        return json.loads(found.fetchone()[0])


def put(url, instance, **changes):
    with psycopg.connect(url) as raw:
        value = json.dumps({**row(url, instance), **changes})
        raw.execute("UPDATE x402guard.marks SET value = %s WHERE kind = 'instance' AND key = %s", (value, instance))


def test_a_process_shows_every_minute_that_it_lives(url, monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    with make_guard(url) as guard:
        first = row(url, guard.instance)
        assert abs(first["seen_ms"] - first["since_ms"]) < 10_000
        until_s = time.monotonic() + 20
        while row(url, guard.instance)["seen_ms"] == first["seen_ms"]:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert row(url, guard.instance)["ended"] is False
    ended = row(url, guard.instance)
    assert ended["ended"] is True
    time.sleep(0.1)
    assert row(url, guard.instance) == ended


def test_a_file_of_one_machine_needs_no_sign(tmp_path):
    with make_guard(f"sqlite:///{tmp_path / 'spend.db'}") as guard:
        [sessions] = guard._heartbeats  # which writes its sessions
        assert "seen_ms" not in guard.shell.store.marks("instance", "")[guard.instance]
    assert not sessions._thread.is_alive()


def test_a_session_whose_machine_is_silent_counts_as_ended(url, elsewhere):
    with make_guard(url) as guard, guard.session("far", budget="$1.00", id="run-1"):
        [node] = [node for node in guard.shell.store.nodes() if node.id == "run-1"]
        assert len(node.openers) == 2  # it may be alive
    put(url, elsewhere.instance, seen_ms=row(url, elsewhere.instance)["seen_ms"] - 590_000)
    with make_guard(url) as guard:
        assert elsewhere.instance not in guard.context.gone
    with Owner(url) as owner, pytest.raises(ConfigError, match=r"open in process .* of elsewhere"):
        owner.roll_back("id=run-1")
    put(url, elsewhere.instance, seen_ms=row(url, elsewhere.instance)["seen_ms"] - 60_000)
    with make_guard(url) as guard:
        assert elsewhere.instance in guard.context.gone
        with guard.session("far", budget="$1.00", id="run-1") as session:
            [node] = [node for node in guard.shell.store.nodes() if node.id == "run-1"]
            assert len(node.openers) == 1
            session.charge("search", "$0.10")
    with Owner(url) as owner:
        assert owner.sessions(name="far")[0].state == "closed"
        assert owner.roll_back("id=run-1") == []
    assert row(url, elsewhere.instance)["ended"] is False  # it is only silent


def test_silence_makes_no_hold_doubtful_and_frees_none():
    now_ms = 1_800_000_000_000
    silent = {"seen_ms": now_ms - 3_600_000, "ended": False}
    assert silent_instances({"me": silent}, now_ms) == {"me"}
    assert silent_instances({"me": {**silent, "ended": True}}, now_ms) == set()
    assert silent_instances({"me": {"since_ms": now_ms - 3_600_000, "ended": False}}, now_ms) == set()
    hold = a_hold(now_ms=now_ms)
    for ended in (False, True):
        view = LedgerView.of_marks(now_ms, {instance_mark(hold.instance): {**silent, "ended": ended}})
        assert in_doubt(view, hold, flight_ms=150_000) is ended


def test_a_process_that_believes_an_older_time_judges_by_the_newest_sign():
    now_ms = 1_800_000_000_000
    rows = {
        name: {"seen_ms": now_ms - age_ms, "ended": False}
        for name, age_ms in (("a", 0), ("b", 590_000), ("c", 660_000))
    }
    assert silent_instances(rows, now_ms - 3_600_000) == {"c"}


def test_a_machine_that_slept_shows_the_servers_time(url, monkeypatch):
    """Its own steady clock stood still, so it disbelieves what the server says, but not for others."""
    store = open_store(url, steady_ms=lambda: 0)
    with make_guard(store) as guard:
        store._clock._began = (store.now_ms() - 660_000, 0)
        assert store._clock.read()[1] >= 600_000
        guard._beat()
        shown = row(url, guard.instance)
        assert shown["seen_ms"] - shown["since_ms"] >= 600_000
    store.close()


class Beats:
    """What writes a sign, and fails at first."""

    def __init__(self):
        self.count = 0

    def beat(self):
        self.count += 1
        if self.count == 1:
            raise LedgerUnavailable("away")
        if self.count == 2:
            raise ZeroDivisionError


def until(holds):
    until_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_sign_that_cannot_be_written_is_tried_again(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    beats = Beats()
    sign = heartbeat.Heartbeat(beats.beat, "it fails")
    until(lambda: beats.count > 3)
    sign.close()
    sign.close()
    assert not sign._thread.is_alive()


def test_a_guard_that_is_not_closed_is_kept_alive_by_no_sign(monkeypatch, url):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    guard = make_guard(url)
    thread, gone = guard._heartbeats[0]._thread, weakref.ref(guard)
    del guard
    for _ in range(50):
        gc.collect()
        if gone() is None and not thread.is_alive():
            break
        time.sleep(0.02)
    assert (gone(), thread.is_alive()) == (None, False)
