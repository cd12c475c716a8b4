"""On a ledger of several machines, a process shows that it lives; a silent one has no open session, and loses no hold."""

import contextvars
import json
import time

import psycopg
import pytest

from tests.support.ledger import a_hold
from tests.support.merchant import make_guard
from x402guard import ConfigError, Owner
from x402guard.flow import heartbeat
from x402guard.flow.surroundings import Surroundings, settle_in
from x402guard.ledger.in_doubt import in_doubt, instance_mark, is_silent
from x402guard.ledger.view import LedgerView

pytestmark = [pytest.mark.xdist_group("postgres"), pytest.mark.long]


class Elsewhere(Surroundings):
    """Another machine."""

    def machine(self):
        return "elsewhere/1/1"


@pytest.fixture
def elsewhere(url):
    """A guard with an open session on another machine, which ends without a word after the test."""

    def opens():
        settle_in(Elsewhere())
        guard = make_guard(url, budget="$5.00")
        session = guard.session("far", budget="$1.00", id="run-1")
        session.__enter__()
        session.charge("search", "$0.10")
        return guard

    guard = contextvars.Context().run(opens)
    yield guard
    guard._heartbeat.close()
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
        assert first["beat_s"] == 60
        until_s = time.monotonic() + 20
        while row(url, guard.instance)["since_ms"] == first["since_ms"]:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert row(url, guard.instance)["ended"] is False
    ended = row(url, guard.instance)
    assert ended["ended"] is True
    time.sleep(0.1)
    assert row(url, guard.instance) == ended


def test_a_file_of_one_machine_needs_no_sign(tmp_path):
    with make_guard(f"sqlite:///{tmp_path / 'spend.db'}") as guard:
        assert guard._heartbeat is None
        assert "beat_s" not in guard.shell.store.marks("instance", "")[guard.instance]


def test_a_session_whose_machine_is_silent_counts_as_ended(url, elsewhere):
    with make_guard(url) as guard, guard.session("far", budget="$1.00", id="run-1"):
        [node] = [node for node in guard.shell.store.nodes() if node.id == "run-1"]
        assert len(node.openers) == 2  # it may be alive
    put(url, elsewhere.instance, since_ms=row(url, elsewhere.instance)["since_ms"] - 599_000)
    with make_guard(url) as guard:
        assert elsewhere.instance not in guard.context.gone
    with Owner(url) as owner, pytest.raises(ConfigError, match=r"open in process .* of elsewhere"):
        owner.roll_back("id=run-1")
    put(url, elsewhere.instance, since_ms=row(url, elsewhere.instance)["since_ms"] - 60_000)
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
    silent = {"since_ms": now_ms - 3_600_000, "beat_s": 60, "ended": False}
    assert is_silent(silent, now_ms)
    assert not is_silent({**silent, "ended": True}, now_ms)
    assert not is_silent({"since_ms": now_ms - 3_600_000, "ended": False}, now_ms)
    hold = a_hold(now_ms=now_ms)
    for ended in (False, True):
        view = LedgerView(now_ms=now_ms, marks={instance_mark(hold.instance): {**silent, "ended": ended}})
        assert in_doubt(view, hold, flight_ms=150_000) is ended


def test_a_sign_that_cannot_be_written_is_tried_again(url, monkeypatch, elsewhere):
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    beats = []

    def beat():
        beats.append(1)
        if len(beats) < 3:
            elsewhere.shell.store._writer.say("SELECT 1 FROM nowhere")

    sign = heartbeat.Heartbeat(lambda: elsewhere.shell.store._in_turn(beat))
    until_s = time.monotonic() + 20
    while len(beats) < 4:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    sign.close()
    sign.close()
