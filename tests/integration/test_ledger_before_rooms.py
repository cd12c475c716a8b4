"""A ledger that the version before the rooms wrote: it opens, reports the same to the last digit, verifies, and goes on.

The file holds a named budget by the day, three sessions (one tripped, one open), payments captured and in doubt, an ``upto`` that is
held, LLM calls, tools, a child, a scope and refusals.
"""

import json
import shutil
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest

from tests.support.command_line import typed
from tests.support.merchant import URL, Shop, client, make_guard
from x402guard import SessionTripped

DATA = Path(__file__).parents[1] / "data"
REPORTS = json.loads((DATA / "ledger_before_rooms.json").read_text())


@pytest.fixture
def url(tmp_path):
    shutil.copy(DATA / "ledger_before_rooms.sqlite", tmp_path / "spend.db")
    return f"sqlite:///{tmp_path / 'spend.db'}"


command = partial(typed, cwd=".")


@pytest.mark.parametrize("session", sorted(REPORTS))
def test_its_reports_are_the_same(url, session):
    done = command("report", session, "--json", "--ledger", url)  # which only reads, and would lock older agents out
    assert (done.returncode, "x402guard verify --ledger" in done.stderr) == (2, True)
    assert command("verify", "--ledger", url).returncode == 0
    done = command("report", session, "--json", "--ledger", url)
    report = json.loads(done.stdout)
    del report["duration_s"]  # an open session goes on
    assert report.pop("view")["id"] == session  # which came later
    assert report["settlement"].pop("exposed_to_reorg") == "0.00"  # which came later
    assert report.pop("disputed") == "0.00"  # which came later, too
    assert report.pop("by_agent")[session]["name"] == report["session"]
    assert report.pop("why") == report["trip_reason"] or report["terminated_by"] == "budget_exhausted"
    assert (report.pop("kind"), report.pop("per"), report.pop("window")) == ("session", None, None)
    assert (report.pop("spent_total"), report.pop("bound_by"), report.pop("shadow")) == (report["spent"], None, None)
    assert sum(map(Decimal, report["payments"].pop("by_route").values())) == Decimal(report["payments"]["total"])
    for group in ("llm", "tools", "payments"):
        assert Decimal(report[group].pop("out")) <= Decimal(report["held"])  # which came later
    for row in report["outstanding"]:
        assert row.pop("request")
        del row["transaction"]  # of a claim
    for group, key in (("llm", "by_model"), ("tools", "by_tool")):  # which had amounts alone
        report[group][key] = {name: row["amount"] for name, row in report[group][key].items()}
    assert report == REPORTS[session]


def test_it_verifies(url):
    done = command("verify", "--ledger", url)
    assert (done.returncode, "136 entries of 10 budgets" in done.stdout) == (0, True)


def test_it_goes_on(url):
    # It holds what is live, and its last entry is days old on a machine that has seen nothing since.
    assert command("ledger", "clock", "--accept", "--ledger", url).returncode == 0
    with make_guard(url, budget=None) as guard:
        live = guard.session("live", id="run-3")
        client(live, Shop()).get(f"{URL}/after")
        assert live.spent == Decimal("0.02")
        with pytest.raises(SessionTripped):
            guard.session("looping", id="run-2").charge("other", "$0.01")
    assert command("verify", "--ledger", url).returncode == 0
