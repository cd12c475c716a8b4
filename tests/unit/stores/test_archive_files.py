"""A file of ended sessions that is gone, damaged, forged, or not what the ledger says of it, is found, and stops no payment."""

import gzip
import json

import pytest

from tests.support.archives import archive, only, run
from tests.support.merchant import make_guard
from x402guard import LedgerUnavailable
from x402guard.guard.owner import Owner
from x402guard.stores.archive_file import digest_of

pytestmark = pytest.mark.xdist_group("postgres")


def packed(edit):
    """A way to change the lines of a file."""

    def damage(path):
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
        path.write_bytes(gzip.compress("\n".join(edit(lines)).encode()))

    return damage


def without_one(lines):
    kept = [line for line in lines if "run-3" not in line]
    return [*kept[:-1], json.dumps(["end", len(kept) - 2])]


def flipped(raw):
    return bytes([*raw[:90], raw[90] ^ 1, *raw[91:]])


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "empty": lambda path: path.write_bytes(b""),
    "another file": lambda path: path.write_bytes(gzip.compress(b'{"hello": 1}\n')),
    "no gzip": lambda path: path.write_bytes(b"x" * 300),
    "a bit": lambda path: path.write_bytes(flipped(path.read_bytes())),
    "no end": packed(lambda lines: lines[:-1]),
    "a line less": packed(lambda lines: [line for line in lines if '["run-1",3,' not in line]),
    "an amount": packed(lambda lines: [line.replace("250000000", "150000000") for line in lines]),
    "a session less": packed(without_one),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_gone_or_changed_is_found(spent, folder, damage):
    archive(spent, folder)
    path = only(folder)
    DAMAGES[damage](path)
    with Owner(spent) as owner:
        [problem, *_] = owner.verify()
        assert str(path) in problem, problem
        assert owner.verify(archives=False) == []
        assert owner.report("id=run-4").to_dict()["tools"]["calls"] == 1
        with pytest.raises(LedgerUnavailable, match="archive ") as caught:
            owner.report("id=run-1")
        assert "agents pay without it" in str(caught.value.advice)
    with make_guard(spent) as guard, guard.session("research", budget="$1.00", id="run-1") as session:
        session.charge("search", "$0.01")  # an agent needs no file


def rewrite(ledger, path, edit):
    """A file that was changed together with its digest in the ledger."""
    packed(edit)(path)
    run(ledger, f"UPDATE archived SET digest = '{digest_of(path)}'")


FORGED = {
    "an amount": lambda lines: [line.replace("250000000", "150000000") for line in lines],
    "a line less": lambda lines: [line for line in lines if '["run-1",3,' not in line],
    "a session less": without_one,
    "no end": lambda lines: lines[:-1],
    "a list": lambda lines: [*lines[:-1], '["entry",[]]', lines[-1]],
    "nested": lambda lines: [*lines[:-1], "[" * 100_000, lines[-1]],
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_file_is_found_although_its_digest_is_right(spent, folder, forged):
    archive(spent, folder)
    rewrite(spent, only(folder), FORGED[forged])
    with Owner(spent) as owner:
        assert owner.verify() != []
        assert owner.verify(archives=False) == []


@pytest.mark.parametrize("field", ["captured", "limit", "tripped", "head"])
def test_what_the_ledger_says_of_a_file_is_checked(spent, folder, field):
    archive(spent, folder)
    said = json.loads(run(spent, "SELECT said FROM archived WHERE node_id = 'run-3'")[0][0])
    said[field] = {"captured": 1, "limit": 7, "tripped": False, "head": "ab" * 32}[field]
    run(spent, f"UPDATE archived SET said = '{json.dumps(said)}' WHERE node_id = 'run-3'")
    with Owner(spent, verified=False) as owner:
        for archives in (True, False):
            assert any("'run-3'" in problem for problem in owner.verify(archives=archives))


@pytest.mark.parametrize("said", ["{}", "[", "[" * 100_000, '{"seq": "x"}'])
def test_and_what_cannot_be_read_is_named(spent, folder, said):
    archive(spent, folder)
    run(spent, f"UPDATE archived SET said = '{said}' WHERE node_id = 'run-3'")
    with Owner(spent, verified=False) as owner:
        try:
            assert owner.verify() != []
        except LedgerUnavailable as error:
            assert "archived journal of 'run-3' cannot be read" in str(error)
