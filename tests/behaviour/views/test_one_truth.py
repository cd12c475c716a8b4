"""The same words and figures for the same ledger, whichever view shows it, and however it is asked for."""

import json
import subprocess
import sys

import pytest

from tests.support.command_line import typed
from tests.support.merchant import make_guard
from x402guard import Owner


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'spend.db'}"


def test_a_block_that_an_exception_leaves_ends_as_an_error(url):
    told = []
    with make_guard(url, on_notice=lambda notice: told.append((notice.kind, notice.rule))) as guard:
        with pytest.raises(RuntimeError), guard.session("nightly", budget="$1.00", id="n-1") as session:
            session.charge("serp", "$0.01")
            raise RuntimeError
    assert told == [("session_ended", "error")]
    with Owner(url) as owner:
        report = owner.report("n-1").to_dict()
        assert (report["state"], report["terminated_by"], report["view"]["state"]) == ("closed", "error", "closed")
        assert owner.report("wallet").view.stops == (), "no budget and no rule has stopped it"
        assert [row.terminated_by for row in owner.sessions() if row.id == "n-1"] == ["error"]


_DIES = """
import os, sys
from x402guard import Guard
Guard(ledger=sys.argv[1]).session("dies", budget="$1.00", id="d-1").__enter__().charge("serp", "$0.01")
os._exit(9)
"""


def test_a_session_of_a_process_that_has_died_is_open_in_no_view(url, tmp_path):
    assert subprocess.run([sys.executable, "-c", _DIES, url], check=False, timeout=60).returncode == 9
    with Owner(url) as owner:
        assert [(row.id, row.state) for row in owner.sessions(state="abandoned")] == [("d-1", "abandoned")]
        assert [row.id for row in owner.sessions(state="open")] == ["wallet"]
        report = owner.report("d-1")
        assert (report.to_dict()["state"], report.view.state) == ("abandoned", "abandoned")
        assert [row.state for row in owner.report("wallet").view.sessions] == ["abandoned"]
        assert [(each.state, each.word) for each in owner.live().sessions] == [("closed", "abandoned")]
        assert owner.totals().counts == {"asks": 0, "stopped": 0, "open": 0, "closed": 1}
    listed = typed("sessions", "--ledger", url, "--state", "abandoned", "--json", cwd=tmp_path).stdout
    assert [row["id"] for row in json.loads(listed)] == ["d-1"]
    with make_guard(url) as guard, guard.session("dies", id="d-1") as session:  # its id opens it again
        session.charge("serp", "$0.01")
        with Owner(url) as owner:
            assert [row.id for row in owner.sessions(state="open")] == ["wallet", "d-1"]


def test_what_is_left_of_something_stopped_is_nothing_in_every_view(url, tmp_path):
    with make_guard(url, budget="$5.00") as guard:
        with guard.budget("customer", "$2.00", per="day", tz="UTC").session("s", budget="$1.00", id="s-1") as session:
            session.charge("serp", "$0.20")
            with Owner(url) as owner:
                owner.trip("customer")
                rows = {row.id: str(row.remaining) for row in owner.sessions()}
                assert rows == {"wallet": "4.80", "budget:customer": "0.00", "s-1": "0.00"}
                assert (session.remaining, owner.report("s-1").to_dict()["remaining"]) == (0, "0.00")
                assert [each.left for each in owner.live().sessions] == [0]
                assert [each.left for each in owner.totals().customers] == [0]
                said = " ".join(owner.report("customer").to_text().split())
                assert "$0.00 left + $1.80 not to be spent while it is stopped = $2.00 limit" in said
                owner.reset("customer")
                assert str(session.remaining) == "0.80"
                owner.trip("wallet")
                assert {str(row.remaining) for row in owner.sessions()} == {"0.00"}
                assert (owner.totals().left, owner.live().left) == (0, 0)
    listed = json.loads(typed("sessions", "--ledger", url, "--json", cwd=tmp_path).stdout)
    assert {row["remaining"] for row in listed} == {"0.00"}
