"""An anchor that was given away: what a later ledger has lost since is told, by who has the public key alone."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as some

from tests.support.command_line import typed
from tests.support.merchant import make_guard
from x402guard import ConfigError, Owner, ReportKey, verify_anchor
from x402guard.ledger.verify import Head, merkle_root

PASSWORD = {"X402GUARD_REPORT_KEY_PASSWORD": "of the test only"}
KEY = ReportKey.new()


def spend(path, *amounts, **sessions):
    """Charge *amounts* in session ``run``, and an amount in each session named."""
    with make_guard(f"sqlite:///{path}") as guard:
        for name, charged in {"run": amounts, **{name: (amount,) for name, amount in sessions.items()}}.items():
            with guard.session(name, budget="$1.00", id=name) as session:
                for amount in charged:
                    session.charge("serp", amount)


def anchored(path):
    with Owner(f"sqlite:///{path}") as owner:
        return verify_anchor(KEY.sign_anchor(owner.heads(), at_unix=1_800_000_000), KEY.public)


def found_in(path, anchor):
    with Owner(f"sqlite:///{path}", verified=False, read_only=True) as owner:
        assert owner.verify() == []  # the books alone say nothing of it
        return owner.verify(anchor)


@pytest.fixture
def path(tmp_path):
    spend(tmp_path / "spend.db", "$0.01", "$0.02", other="$0.03")
    return tmp_path / "spend.db"


def test_a_ledger_that_has_grown_has_all_that_was_anchored(path):
    anchor = anchored(path)
    assert found_in(path, anchor) == []
    spend(path, "$0.04", other="$0.05", third="$0.06")
    assert found_in(path, anchor) == []
    assert [head.node_id for head in anchor.heads] == sorted(head.node_id for head in anchor.heads)


def test_an_older_copy_is_told(path, tmp_path):
    shutil.copy(path, tmp_path / "older.db")
    spend(path, "$0.04")
    anchor = anchored(path)
    told = found_in(tmp_path / "older.db", anchor)
    assert any(line.startswith("run: it has ") and line.endswith(" were anchored: an older copy") for line in told)
    assert not any("other" in line for line in told)


def test_a_session_that_is_gone_is_told(path, tmp_path):
    anchor = anchored(path)
    spend(tmp_path / "forged.db", "$0.01", "$0.02")
    told = found_in(tmp_path / "forged.db", anchor)
    assert any(line.startswith("other: its ") and line.endswith(" anchored entries are gone") for line in told)


@pytest.mark.parametrize("grown", [False, True])
def test_a_ledger_that_was_written_anew_with_other_amounts_is_told(path, tmp_path, grown):
    """Sound in itself, with the same budgets and as many entries, or more."""
    anchor = anchored(path)
    spend(tmp_path / "forged.db", "$0.01", "$0.01", *(["$0.01"] * grown), other="$0.03")
    told = found_in(tmp_path / "forged.db", anchor)
    assert any(
        line.startswith("run: entry ") and line.endswith(" is another one than the one that was anchored")
        for line in told
    )


def test_an_anchor_is_made_and_compared_in_a_shell(path, tmp_path):
    public = typed("keys", "report", "key.json", cwd=tmp_path, **PASSWORD).stdout.split()[0]
    made = typed("verify", "--ledger", "spend.db", "--anchor", "key.json", cwd=tmp_path, **PASSWORD)
    assert made.returncode == 0, made.stderr
    (tmp_path / "anchor.json").write_text(made.stdout)
    spend(path, "$0.04")
    compared = ("verify", "--ledger", "spend.db", "--against", "anchor.json")
    whole = typed(*compared, "--key", public, cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert "it has all of the 5 journals that were anchored at 20" in whole.stdout
    shutil.copy(path, tmp_path / "kept.db")
    for name in ("spend.db", "spend.db-lock"):
        (tmp_path / name).unlink(missing_ok=True)
    spend(path, "$0.01")
    lost = typed(*compared, "--key", public, "--json", cwd=tmp_path)
    assert lost.returncode == 1, lost.stdout
    assert any(line.startswith("other: its ") for line in json.loads(lost.stdout)["problems"])
    mistakes = {
        "--against: give an anchor and the public key": compared,
        "signed anchor: none.json cannot be read": (*compared[:-1], "none.json", "--key", public),
        "signed anchor: it is signed by": (*compared, "--key", "ab" * 32),
        "is not 64 hex digits": (*compared, "--key", "abc"),
        "--anchor: an anchor is JSON": ("verify", "--ledger", "spend.db", "--anchor", "key.json", "--json"),
        "report key: none.json cannot be read": ("verify", "--ledger", "spend.db", "--anchor", "none.json"),
    }
    for words, command in mistakes.items():
        refused = typed(*command, cwd=tmp_path, **PASSWORD)
        assert (refused.returncode, refused.stdout) == (2, ""), command
        assert words in refused.stderr


def changed(text, **values):
    return json.dumps(json.loads(text) | values)


def test_an_anchor_that_was_changed_is_refused(path):
    with Owner(f"sqlite:///{path}") as owner:
        text = KEY.sign_anchor(owner.heads())
    heads = json.loads(text)["heads"]
    other = merkle_root([Head(*head) for head in heads[1:]])
    for wrong, words in {
        changed(text, heads=heads[1:]): "its root is not that of its heads",
        changed(text, heads=heads[1:], root=other): "the signature does not fit: the anchor was changed",
        changed(text, signed_at=1): "the signature does not fit",
        changed(text, heads=[["run", "1", "ab"]]): "its heads are no list",
        changed(text, schema="x402guard.signed_report.v1"): "it is no x402guard.anchor.v1",
        changed(text, more=1): "it is no x402guard.anchor.v1",
        changed(text, signature="zz"): "of the wrong type",
        "{": "it cannot be read",
        "[]": "it is no x402guard.anchor.v1",
    }.items():
        with pytest.raises(ConfigError, match="signed anchor: ") as refused:
            verify_anchor(wrong, KEY.public)
        assert words in str(refused.value)


def test_the_root_is_that_of_the_rfc():
    """Worked out by hand for one and three leaves, RFC 6962, section 2.1."""
    import hashlib

    def sha(*parts):
        return hashlib.sha256(b"".join(parts)).digest()

    heads = [Head(name, number, "ab") for number, name in enumerate("abc", 1)]
    one, two, three = (sha(b"\x00", json.dumps([h.node_id, h.seq, h.hash]).encode()) for h in heads)
    assert merkle_root(heads[:1]) == one.hex()
    assert merkle_root(heads) == sha(b"\x01", sha(b"\x01", one, two), three).hex()
    assert merkle_root([]) == sha(b"").hex()


@given(some.lists(some.tuples(some.text(max_size=3), some.integers(1, 3), some.sampled_from(["aa", "bb"])), max_size=9))
def test_no_other_heads_have_the_same_root(rows):
    heads = [Head(*row) for row in rows]
    root = merkle_root(heads)
    for number, head in enumerate(heads):
        rest = heads[:number] + heads[number + 1 :]
        assert merkle_root(rest) != root
        assert merkle_root([*heads[:number], Head(head.node_id, head.seq + 1, head.hash), *heads[number + 1 :]]) != root
