"""A stop works whatever its reason says, and however a shell or a file system has spelt it."""

import os
import subprocess
import sys

import pytest

from tests.support.merchant import make_guard
from x402guard import ConfigError, Owner, SessionTripped


@pytest.fixture
def url(tmp_path):
    url = f"sqlite:///{tmp_path}/l.db"
    with make_guard(url, budget="$50") as guard:
        guard.session("s", budget="$5", id="job").close()
    return url


REASONS = [" " * 3_000 + "stop", "G\udcfcnther: stop", "\udcff", "a\nb\x1b[31m", "stop \0 now", "x" * 5_000, "größer"]


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("by", ["owner", "session"])
def test_a_reason_that_is_odd_stops_as_any_other(ledger_url, reason, by):
    with make_guard(ledger_url, budget="$50") as guard:
        session = guard.session("s", budget="$5", id="job")
        if by == "owner" and ledger_url != "memory://":
            with Owner(ledger_url) as owner:
                owner.trip("job", reason)
        else:
            session.trip(reason)
        with pytest.raises(SessionTripped):
            session.charge("serp", "$0.10")
        assert session.spent == 0


@pytest.mark.parametrize("reason", [None, 5, b"x", ["x"], "", " \n "])
def test_a_reason_that_says_nothing_is_named(url, reason):
    with Owner(url) as owner, pytest.raises(ConfigError, match=r"^reason: .* says nothing"):
        owner.trip("job", reason)


@pytest.mark.parametrize(
    ("by", "written"),
    [
        ("grace", "grace"),
        ("G\udcfcnther", "G\\udcfcnther"),
        ("a\0b\n c", "a\\x00b c"),
        ("x" * 999, "x" * 300),
        (7, "7"),
    ],
)
def test_the_journal_says_who_has_tripped_it_and_why_in_one_line(url, by, written):
    with Owner(url, by=by) as owner:
        owner.trip("job", "spends\n  too much")
    with make_guard(url) as guard:
        [said] = [entry.facts() for entry in guard.shell.store.entries("job") if entry.event == "trip"]
        assert said == {"word": "kill_switch", "reason": "spends too much", "by": written}


def test_a_shell_passes_a_reason_in_another_encoding(url, tmp_path):
    command = f"{sys.executable} -m x402guard trip job --ledger {tmp_path}/l.db --reason $'G\\xfcnther: stop'"
    said = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert (said.returncode, b"is tripped" in said.stdout) == (0, True)
    with Owner(url) as owner:
        assert owner.budget("job").state == "tripped"
    assert (
        subprocess.run(
            [sys.executable, "-m", "x402guard", "verify", "--ledger", f"{tmp_path}/l.db"], check=False
        ).returncode
        == 0
    )


def test_a_kill_file_whose_name_is_no_utf8_stops_for_good(url, tmp_path):
    kill = os.fsdecode(os.fsencode(tmp_path) + b"/stop\xff")
    with make_guard(url, kill_file=kill) as guard:
        session = guard.session("s", id="job", budget="$5")
        with open(kill, "w"):
            pass
        with pytest.raises(SessionTripped):
            session.charge("serp", "$0.10")
        os.unlink(kill)
        with pytest.raises(SessionTripped):
            session.charge("serp", "$0.10")
