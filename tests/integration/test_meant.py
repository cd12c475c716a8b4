"""What somebody types who means something else is led to the right command, and nothing is changed."""

import json
from decimal import Decimal

import pytest

from tests.support.command_line import typed
from tests.support.merchant import make_guard
from x402guard import Owner

MEANT = {
    "budget wallet 20": "write x402guard budget set wallet 20",
    "budget show wallet": "write x402guard sessions, or x402guard report wallet",
    "budget list": "write x402guard sessions",
    "holds list": "write x402guard holds",
    "stop wallet": "write x402guard trip SESSION, or x402guard trip wallet for all of them",
    "unlock wallet": "write x402guard reset SESSION",
    "session": "write x402guard sessions",
    "ledger backup copy.db": "write x402guard ledger copy FILE",
    "help": "write x402guard --help",
    "version": "write x402guard --version",
    "-v": "write x402guard --version",
    "keys show wallet.json": "write x402guard keys address FILE",
    "doctor --fix": "each line says what to do",
    "report nightly --csv": "write --format csv",
    "--ledger spend.db sessions": "it stands after the command: x402guard COMMAND --ledger …",
    "--config other.toml sessions": "it stands after the command",
    "budget set wallet 5 --ledger": "See: x402guard budget set --help",
    "verify --counters": "See: x402guard verify --help",
    "sessions --ledger .": "is a folder; name a file in it",
    "budget set wallet 20,00": "write it as 20.00",
    "budget set wallet +5": "write it as 20.00",
}


@pytest.fixture
def books(tmp_path):
    url = f"sqlite:///{tmp_path / 'x402guard.db'}"
    with make_guard(url, budget="$5.00") as guard, guard.session("nightly", budget="$1.00", id="nightly-17") as session:
        session.charge("serp", "$0.10")
    return tmp_path / "x402guard.db"


@pytest.mark.parametrize("words", MEANT)
def test_what_is_meant_is_said(books, words):
    before = books.read_bytes()
    done = typed(*words.split(), cwd=books.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert MEANT[words] in done.stderr
    assert "without the $" not in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert books.read_bytes() == before


def test_the_beginning_of_an_id_is_enough_if_there_is_one(books):
    assert "nightly" in typed("report", "nightly-1", cwd=books.parent).stdout
    assert typed("trip", "nigh", cwd=books.parent).returncode == 0
    with make_guard(f"sqlite:///{books}") as guard:
        guard.session("other", budget="$1.00", id="nightly-18").close()
    done = typed("report", "nightly-1", cwd=books.parent)
    assert (done.returncode, "'nightly-1' may mean 2 of them" in done.stderr) == (2, True)
    assert typed("report", "nigh", cwd=books.parent).returncode == 2


def test_the_name_of_a_session_is_no_file_for_a_page(books):
    for word in ("nightly", "nightly-17"):
        done = typed("report", "--html", word, cwd=books.parent)
        assert (done.returncode, f"write report {word} --html report.html" in done.stderr) == (2, True)
        assert not (books.parent / word).exists()


def test_a_wallet_can_be_without_a_limit_again(books):
    done = typed("budget", "set", "wallet", "none", cwd=books.parent)
    assert (done.returncode, done.stdout) == (0, "the wallet: $5.00 → no limit, open\n")
    with Owner(books) as owner:
        assert (owner.budget("wallet").budget, owner.budget("wallet").remaining) == (None, None)
        assert owner.verify() == []
    again = typed("budget", "set", "wallet", "2.00", "--json", cwd=books.parent)
    assert json.loads(again.stdout)["was"] is None
    with Owner(books) as owner:
        assert owner.budget("wallet").remaining == Decimal("1.9")
        assert owner.verify() == []
    refused = typed("budget", "set", "nightly", "none", cwd=books.parent)
    assert (refused.returncode, "the wallet alone can be without" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[policy]\nrepeat = "ask"\nledger = "./x402guard.db"\n', "it stands above the first [table] of the file"),
        ('ledger = "./x402guard.db"\nledger = "./y.db"\n', "a key is there twice (at line 2"),
    ],
)
def test_a_setting_in_the_wrong_place_is_told_so(books, text, says):
    (books.parent / "x402guard.toml").write_text(text)
    done = typed("policy", "check", "x402guard.toml", cwd=books.parent)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr
