"""A report that is signed can be checked by who has neither the ledger nor the key; what was changed is told."""

import json
import os
import stat

import pytest

from tests.support.command_line import typed
from tests.support.merchant import make_guard
from x402guard import ConfigError, ReportKey, verify_report

PASSWORD = {"X402GUARD_REPORT_KEY_PASSWORD": "of the test only"}


@pytest.fixture(scope="module")
def report():
    with make_guard() as guard, guard.session("court-research", budget="$1.00") as session:
        session.charge("serp", "$0.01")
    return session.report()


@pytest.fixture(scope="module")
def key():
    return ReportKey.new()


@pytest.fixture
def folder(tmp_path):
    with make_guard(f"sqlite:///{tmp_path / 'x402guard.db'}") as guard:
        with guard.session("court-research", budget="$1.00") as session:
            session.charge("serp", "$0.01")
    return tmp_path


def test_a_report_is_signed_sent_and_checked_in_a_shell(folder, tmp_path_factory):
    made = typed("keys", "report", "report-key.json", cwd=folder, **PASSWORD)
    public = made.stdout.split()[0]
    assert (made.returncode, len(public)) == (0, 64), made.stderr
    assert stat.S_IMODE(os.stat(folder / "report-key.json").st_mode) == 0o600
    signed = typed("report", "court-research", "--sign", "report-key.json", cwd=folder, **PASSWORD)
    assert signed.returncode == 0, signed.stderr
    assert typed("report", cwd=folder, **PASSWORD).returncode == 0, "the variable is known where it is not used"
    elsewhere = tmp_path_factory.mktemp("elsewhere")  # no ledger and no key
    (elsewhere / "signed.json").write_text(signed.stdout)
    checked = typed("verify-report", "signed.json", "--key", public, cwd=elsewhere)
    assert checked.returncode == 0, checked.stderr
    assert "court-research " in checked.stdout
    assert f"by {public}, and unchanged" in checked.stdout
    as_json = typed("verify-report", "signed.json", "--key", public.upper(), "--json", cwd=elsewhere)
    assert json.loads(as_json.stdout)["spent"] == "0.01"
    (elsewhere / "signed.json").write_text(signed.stdout.replace('"0.01"', '"0.001"'))
    changed = typed("verify-report", "signed.json", "--key", public, cwd=elsewhere)
    assert (changed.returncode, changed.stdout) == (2, "")
    assert "the report was changed after it was signed" in changed.stderr
    again = typed("keys", "report", "report-key.json", cwd=folder, **PASSWORD)
    assert (again.returncode, "already exists" in again.stderr) == (2, True)


def test_a_signature_holds_however_the_file_is_laid_out(report, key):
    signed = json.loads(key.sign(report, at_unix=1_700_000_000))
    for text in (json.dumps(signed), json.dumps(signed, indent=8, sort_keys=True), json.dumps(signed).encode()):
        checked = verify_report(text, key.public)
        assert (checked.signed_at, checked.public_key) == (1_700_000_000, key.public)
        assert checked.report.to_dict() == report.to_dict()


def changed(signed, **more):
    return json.dumps({**signed, **more})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: changed(s, signed_at=s["signed_at"] + 1), "was changed after it was signed"),
        (lambda s: changed(s, report={**s["report"], "spent": "0.00"}), "was changed after it was signed"),
        (lambda s: changed(s, report={**s["report"], "more": 1}), "was changed after it was signed"),
        (lambda s: changed(s, signature="00" * 64), "was changed after it was signed"),
        (lambda s: changed(s, signature="00"), "was changed after it was signed"),
        (lambda s: changed(s, signature="xx"), "of the wrong type"),
        (lambda s: changed(s, signed_at="now"), "of the wrong type"),
        (lambda s: changed(s, report={}), "no x402guard.report.v1"),
        (lambda s: changed(s, report=[]), "no x402guard.report.v1"),
        (lambda s: changed(s, schema="x402guard.signed_report.v2"), "no x402guard.signed_report.v1"),
        (lambda s: changed(s, also=1), "no x402guard.signed_report.v1"),
        (lambda s: changed(s, public_key="ab" * 32), "is signed by abab"),
        (lambda s: json.dumps(s["report"]), "a report without a signature"),
        (lambda s: json.dumps(s)[:-1] + ', "report": {}}', "appears twice"),
        (lambda s: json.dumps(s)[:-9], "cannot be read"),
        (lambda s: "", "cannot be read"),
        (lambda s: "[]", "no x402guard.signed_report.v1"),
        (lambda s: b"\xff\xfe", "cannot be read"),
        (lambda s: "[" * 100_000, "cannot be read"),
    ],
)
def test_what_was_changed_is_told(report, key, change, message):
    with pytest.raises(ConfigError, match=message):
        verify_report(change(json.loads(key.sign(report))), key.public)


@pytest.mark.parametrize("public", ["", "ab", "zz" * 32, None, 7, "ab" * 33])
def test_what_is_no_public_key_is_told(report, key, public):
    with pytest.raises(ConfigError, match="is not 64 hex digits"):
        verify_report(key.sign(report), public)


def test_another_key_did_not_sign_it(report, key):
    other = ReportKey.new()
    with pytest.raises(ConfigError, match=f"signed by {key.public[:6]}…, not by {other.public[:6]}…"):
        verify_report(key.sign(report), other.public)
    forged = json.dumps({**json.loads(key.sign(report)), "public_key": other.public})
    with pytest.raises(ConfigError, match="was changed"):
        verify_report(forged, other.public)


@pytest.mark.parametrize(
    "text", ["", "{}", "-----BEGIN PRIVATE KEY-----", "[" * 50_000, '{"schema": "x402guard.report_key.v1"}']
)
def test_what_is_no_report_key_is_told(tmp_path, text):
    path = tmp_path / "key.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"no report key|the file is damaged"):
        ReportKey.from_file(path, password="x")
    with pytest.raises(ConfigError, match="cannot be read"):
        ReportKey.from_file(tmp_path / "none", password="x")


def test_a_key_comes_back_with_its_password_alone_and_is_shown_by_nothing(tmp_path, key):
    path = tmp_path / "key.json"
    path.write_text(key.to_json("right"))
    assert ReportKey.from_file(path, password="right").public == key.public
    with pytest.raises(ConfigError, match="the password is wrong"):
        ReportKey.from_file(path, password="wrong")
    secret = key._key.private_bytes_raw().hex()
    assert secret not in repr(key) + path.read_text() + str(vars(key))
    with pytest.raises(TypeError, match="not pickled"):
        key.__reduce__()


def test_without_a_password_or_a_file_the_command_says_what_to_do(folder):
    typed("keys", "report", "report-key.json", cwd=folder, **PASSWORD)
    done = typed("report", "--sign", "report-key.json", cwd=folder)
    assert (done.returncode, "set X402GUARD_REPORT_KEY_PASSWORD" in done.stderr) == (2, True)
    done = typed("report", "--sign", "nothing.json", cwd=folder, **PASSWORD)
    assert (done.returncode, "nothing.json cannot be read" in done.stderr) == (2, True)
    done = typed("verify-report", "nothing.json", "--key", "ab" * 32, cwd=folder)
    assert (done.returncode, "nothing.json cannot be read" in done.stderr) == (2, True)
